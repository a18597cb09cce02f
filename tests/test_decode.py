"""`cached_attention`: any split of a sequence into calls equals one causal call, whatever nobody may see holds."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import compiled_for
from marks import with_core

from flax_mha import dot_product_attention
from flax_mha.cached_attention import cached_attention
from flax_mha.impl import cudnn
from flax_mha.impl.shared import schedule
from flax_mha.kv_cache import KVCache
from flax_mha.masks import CausalMask, FunctionMask, SegmentMask

N, H, HV = 4, 6, 5
LENGTH, SLOTS = 97, 131  # three blocks of 64 slots
WINDOW = 5
rng = np.random.default_rng(0)
SLOPES, SINKS = np.float32(rng.standard_normal((2, N)))
BIAS = np.float32(rng.standard_normal((N, 1, SLOTS)))
SHOWN = rng.random((2, 1, 1, SLOTS)) < 0.8
IDS = np.sort(rng.integers(0, 4, SLOTS)).astype(np.int32)
GARBAGE = (np.nan, np.inf, -np.inf, 3e38)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 16)
    monkeypatch.setattr(schedule, "MAX_WIDTH_IN_PLACE", 64)


def slopes_and_entry(score, b, h, q_idx, kv_idx):
    return score + jnp.asarray(SLOPES)[h] * (q_idx - 2 * kv_idx).astype(score.dtype) / 16 + b.astype(score.dtype)


def thinned(b, h, q_idx, kv_idx):
    return ((q_idx + 2 * kv_idx + h) % 5 != 1) | (q_idx == kv_idx)


class Structure(NamedTuple):
    """What is compiled once and met by many splits."""

    arguments: dict = {}  # noqa: RUF012
    batch: tuple[int, ...] = (2,)
    kv_heads: int = 2
    per_row: bool = False
    ring: bool = False
    dtype: str = "float32"
    cached: str = "float32"
    tolerance: float = 1e-5

    @property
    def length(self):
        return 173 if self.ring else LENGTH

    @property
    def sizes(self):
        """One token, few, and a prompt: for a ring one that is longer than the ring."""
        return (1, 7, 90) if self.ring else (1, 7, 40)

    def cache(self, garbage=0.0):
        window = WINDOW if self.ring else None
        cache = KVCache.create(self.batch, 999 if self.ring else SLOTS, self.kv_heads, H, self.cached, window)
        shape = (*cache.key.shape[:-1], HV)
        index = jnp.zeros(self.batch if self.per_row else (), jnp.int32)
        return KVCache(jnp.full_like(cache.key, garbage), jnp.full(shape, garbage, self.cached), index, cache.window)

    def tokens(self, seed=0):
        rng = np.random.default_rng(seed)
        shapes = ((N, H), (self.kv_heads, H), (self.kv_heads, HV))
        query, *cached = (rng.standard_normal((*self.batch, self.length, *shape), np.float32) for shape in shapes)
        return [np.asarray(jnp.asarray(query, self.dtype)), *(np.asarray(jnp.asarray(x, self.cached)) for x in cached)]


WINDOWED = {"local_window_size": (WINDOW, 0)}
LOGITS = {"logits_soft_cap": 3.0, "sinks": SINKS}
STRUCTURES = {
    "plain": Structure(),
    "lengths": Structure(per_row=True),
    "window, soft cap, sinks": Structure({"local_window_size": (9, 2)} | LOGITS, kv_heads=1),
    "ring": Structure(WINDOWED, ring=True, kv_heads=4),
    "ring, lengths, logits": Structure(WINDOWED | LOGITS, ring=True, per_row=True),
    "ring, positions": Structure(
        {"local_window_size": 4, "mask": FunctionMask(thinned), "score_mod": slopes_and_entry}, ring=True, per_row=True
    ),
    "positions, lengths": Structure({"mask": FunctionMask(thinned), "score_mod": slopes_and_entry}, per_row=True),
    "bias and mask of slots": Structure({"bias": BIAS, "mask": SHOWN}),
    "segments of slots, bias of heads": Structure(
        {"mask": SegmentMask(IDS[None, :1], IDS) | CausalMask(-3), "bias": BIAS[:, :, :1]}, per_row=True
    ),
    "no batch axis, dropout": Structure({"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)}, batch=()),
    "two batch axes, dropout, scale": Structure(
        {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5), "scale": jnp.float32(0.7)}, batch=(2, 1), per_row=True
    ),
    "narrow cache": Structure(cached="bfloat16", per_row=True),
    "narrow ring": Structure(WINDOWED, cached="float16", ring=True),
    # One rounding of an output of this size, and of each product's operands in 16 bits.
    "bfloat16": Structure(dtype="bfloat16", cached="bfloat16", tolerance=2**-6),
    "float16": Structure(dtype="float16", cached="float16", per_row=True, tolerance=2**-9),
}


def in_full(structure, query, key, value):
    """One causal call."""
    arguments = dict(structure.arguments)
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"][..., : structure.length]
    mask = arguments.get("mask")
    if isinstance(mask, np.ndarray):
        arguments["mask"] = mask[..., : structure.length]
    elif mask is not None and mask.lengths[1]:
        ids = IDS[: structure.length]
        arguments["mask"] = SegmentMask(np.full_like(ids, IDS[0]), ids) | CausalMask(-3)
    key, value = (jnp.asarray(x).astype(query.dtype) for x in (key, value))
    return dot_product_attention(query, key, value, is_causal=True, implementation="xla", **arguments)


@functools.lru_cache(maxsize=1)
def programs(name):
    structure = STRUCTURES[name]

    def step(query, key, value, cache, lengths):
        arguments = dict(structure.arguments)
        mask = arguments.get("mask")
        if mask is not None and not isinstance(mask, np.ndarray) and mask.lengths[1]:
            ids = np.full(query.shape[-3], IDS[0], np.int32)
            arguments["mask"] = SegmentMask(ids, IDS) | CausalMask(-3)
        return cached_attention(query, key, value, cache, lengths=lengths, **arguments)

    tokens = structure.tokens()
    expected = np.asarray(jax.jit(functools.partial(in_full, structure))(*tokens), np.float32)
    return tokens, expected, jax.jit(step), jax.jit(KVCache.truncate)


def padded(x, first, lengths, size, filling):
    """Of each sequence `lengths` tokens from `first` on, and then padding."""
    flat, rows = x.reshape(-1, *x.shape[-3:]), []
    for row, start, length in zip(flat, first.ravel(), lengths.ravel(), strict=True):
        padding = np.full((size - length, *x.shape[-2:]), filling, np.float32).astype(x.dtype)
        rows.append(np.concatenate([row[start : start + length], padding]))
    return np.stack(rows).reshape(*x.shape[:-3], size, *x.shape[-2:])


def split(name, seed):
    """A sequence in random pieces, now and then some taken back; garbage in padding and unwritten slots, if odd."""
    structure, rng = STRUCTURES[name], np.random.default_rng(seed)
    tokens, expected, step, truncate = programs(name)
    garbage = rng.choice(GARBAGE) if seed % 2 else 0.0
    largest = float(jnp.finfo(structure.cached).max)
    garbage = min(garbage, largest) if garbage == 3e38 else garbage
    cache = structure.cache(garbage)
    at, taken_back = np.zeros(structure.batch, int), 0
    got = np.full(expected.shape, np.nan, np.float32)
    while (at < structure.length).any():
        fits = [size for size in structure.sizes if structure.per_row or size <= structure.length - at.max(initial=0)]
        size = int(rng.choice(fits))
        if structure.per_row:
            lengths = np.minimum(rng.integers(0, size + 1, structure.batch), structure.length - at)
        else:
            lengths = np.full(structure.batch, size)
        pieces = (padded(x, at, lengths, size, garbage) for x in tokens)
        given = jnp.asarray(lengths, jnp.int32) if structure.per_row else None
        output, cache = step(*pieces, cache, given)
        output = np.asarray(output, np.float32).reshape(-1, *output.shape[-3:])
        rows = got.reshape(-1, *got.shape[-3:])
        for row, out, start, length in zip(rows, output, at.ravel(), lengths.ravel(), strict=True):
            row[start : start + length] = out[:length]
            np.testing.assert_array_equal(out[length:], 0)
        at = at + lengths
        if rng.random() < 0.3 and taken_back < 3:
            taken_back += 1
            at = at - int(rng.integers(0, min(at.min(), 20) + 1))
            cache = truncate(cache, jnp.asarray(at if structure.per_row else at.ravel()[0], jnp.int32))
            got.reshape(-1, *got.shape[-3:])[np.arange(structure.length) >= at.reshape(-1, 1)] = np.nan
        np.testing.assert_array_equal(cache.index, at if structure.per_row else at.ravel()[0])
    np.testing.assert_allclose(got, expected, rtol=0, atol=structure.tolerance)


@pytest.mark.parametrize(
    "name", with_core(STRUCTURES, "ring, lengths, logits", "positions, lengths", "bias and mask of slots", "bfloat16")
)
def test_any_split_equals_one_call(name):
    for seed in range(4):
        split(name, seed)


EAGER = {"ring, lengths, logits": [90, 1, 40], "bias and mask of slots": [40, 1, 40]}


@pytest.mark.parametrize("name", with_core(EAGER, "ring, lengths, logits"))
def test_where_the_index_is_known(name):
    """Without jit, prompts and rings take other ways through the same code."""
    structure = STRUCTURES[name]
    tokens, cache, at, outputs = structure.tokens(), structure.cache(), 0, []
    for size in EAGER[name]:
        pieces = (x[:, at : at + size] for x in tokens)
        output, cache = cached_attention(*pieces, cache, **structure.arguments)
        outputs.append(output)
        at += size
    expected = in_full(structure, *tokens)
    np.testing.assert_allclose(np.concatenate(outputs, 1), expected[:, :at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ring, positions", "narrow cache"])
def test_as_on_an_accelerator(name, monkeypatch):
    """All batch entries together."""
    programs.cache_clear()
    compiled_for(monkeypatch, "gpu")
    monkeypatch.setattr(cudnn, "device", lambda platform: cudnn.Device(platform, None))
    monkeypatch.setattr(schedule, "MAX_WIDTH_ACCELERATOR", 64)
    for seed in range(2):
        split(name, seed)
    programs.cache_clear()
