"""`cached_attention`: full caches, NaN in slots, transformations, implementations,
refusals, any split into calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, refused
from marks import core, with_core

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha._src.cache.kv_cache import SPARE, KVCache
from flax_mha._src.engines.kernels.cudnn import engine as cudnn
from flax_mha.cache import cached_attention
from flax_mha.masks import ArrayMask, CausalMask, FunctionMask, LengthMask, SegmentMask

B = 2
N = 4
K = 2
H = 6
# A cache of S slots, of which LENGTH are filled.
S = 43
LENGTH = 31
WINDOW = 5
RING = WINDOW + 1 + SPARE


assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def tokens(number, batch=(B,), dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((*batch, number, n, H)).astype(dtype) for n in (N, K, K)
    ]


def cut(arrays, first, last):
    return [x[..., first:last, :, :] for x in arrays]


def empty(batch=(B,), dtype=jnp.float32, **given):
    return KVCache.create(batch, S, K, H, dtype, **given)


def in_full(x, **arguments):
    return dot_product_attention(*x, is_causal=True, implementation="xla", **arguments)


@jax.jit
def step(query, key, value, cache, lengths=None):
    return cached_attention(query, key, value, cache, lengths=lengths)


X = tokens(LENGTH)
FULL = np.asarray(in_full(X))


def after(number, **given):
    """A cache that holds so many tokens of X."""
    return empty(**given).update(*cut(X, 0, number)[1:])


def in_parts(attend, x, cache, sizes):
    """The outputs of a sequence of calls, one after the other, and the last cache."""
    outputs = []
    ends = itertools.accumulate(sizes, initial=0)
    for first, end in itertools.pairwise(ends):
        output, cache = attend(*cut(x, first, end), cache)
        outputs.append(output)
    return np.concatenate(outputs, 1), cache


def test_a_sequence_without_room_returns_nan_and_keeps_its_cache():
    cache = empty(per_row=True).update(*tokens(S)[1:], lengths=[S - 19, 11])

    output, new = step(*tokens(20, seed=1), cache)

    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1]).all()
    np.testing.assert_array_equal(new.index, [S - 19, 31])
    for old, now in zip(cache.arrays, new.arrays, strict=True):
        np.testing.assert_array_equal(now[0], old[0])


def test_a_full_cache_of_one_index_returns_nan_and_stays():
    _, key, value = tokens(S)
    cache = KVCache(jnp.asarray(key), jnp.asarray(value), jnp.int32(S))

    output, new = step(*tokens(1, seed=1), cache)

    assert np.isnan(output).all()
    jax.tree.map(np.testing.assert_array_equal, new, cache)


def test_the_largest_score_of_all_calls_is_that_of_the_whole_sequence():
    """Without room it is NaN."""
    attend = jax.jit(functools.partial(cached_attention, return_max_score=True))
    largest = []

    def keeping_the_largest(*arguments):
        output, cache, max_score = attend(*arguments)
        largest.append(max_score)
        return output, cache

    output, cache = in_parts(keeping_the_largest, X, empty(per_row=True), (20, 10, 1))

    assert_close(output, FULL)
    _, expected = in_full(X, return_max_score=True)
    np.testing.assert_allclose(np.max(largest, 0), expected, rtol=1e-6)

    *_, max_score = attend(*cut(X, 0, 20), cache.truncate([31, 5]))
    assert np.isnan(max_score[0]).all()
    assert np.isfinite(max_score[1]).all()


@pytest.mark.core
def test_padding_needs_no_room():
    """A prompt that is padded beyond the cache, with a bias for each slot."""
    x = tokens(S + 9)
    lengths = jnp.array([S, 7])
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((N, 1, S)), jnp.float32)

    def run(cache):
        return cached_attention(*x, cache, bias, lengths=lengths)

    expected = in_full(cut(x, 0, S), bias=bias, query_seq_lengths=lengths)
    for attend in (jax.jit(run), run):
        output, cache = attend(empty(per_row=True))
        assert_close(output[:, :S], expected)
        np.testing.assert_array_equal(output[:, S:], 0)
        np.testing.assert_array_equal(cache.index, lengths)


@pytest.mark.core
def test_a_ring_returns_nan_after_too_many_tokens_are_taken_back():
    """In two steps, of which either would have been fine: the second needs tokens that
    the first took back.
    """
    attend = functools.partial(cached_attention, local_window_size=WINDOW)
    x = tokens(3 * RING)
    cache = KVCache.create(B, 999, K, H, window=WINDOW).update(*x[1:])

    at = 2 * RING + 10
    near = cache.truncate(at)
    output, _ = attend(*cut(x, at, at + 1), near)
    expected = in_full(x, local_window_size=WINDOW)
    assert_close(output, expected[:, at : at + 1])

    at = 2 * RING
    far = near.truncate(at)
    for size in (1, 3):
        output, _ = attend(*cut(x, at, at + size), far)
        assert np.isnan(output).all()


@pytest.mark.parametrize(
    ("number", "place"), [(1, 4), (18, LENGTH - 3)], ids=["1", "18"]
)
@pytest.mark.parametrize("filling", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_nan_affects_the_queries_that_attend_to_its_slot(number, place, filling, which):
    at = LENGTH - number - 1
    query, key, value = X
    if which == "key":
        key = jnp.asarray(key).at[0, place, 1, 2].set(filling)
    else:
        value = jnp.asarray(value).at[0, place, 1, 2].set(filling)
    # Heads 2 and 3 share key head 1. Tokens of the call attend from `place` on.
    attends = np.zeros((B, number, N), bool)
    attends[0, max(0, place - at) :, 2:] = True

    cache = empty().update(*cut((key, value), 0, at))
    output, _ = step(*cut((query, key, value), at, at + number), cache)

    output = np.asarray(output)
    assert np.isnan(output[attends]).all()
    assert_close(output[~attends], FULL[:, at : at + number][~attends])


@pytest.mark.parametrize("number", [1, 18])
@pytest.mark.parametrize("filling", [core(np.nan), np.inf, 3e38, -3e38])
def test_hidden_slots_never_affect_outputs_and_gradients(number, filling):
    """Never written, beyond the window, or masked."""
    at = LENGTH - number
    arguments = {"mask": np.arange(S) != at - 2, "local_window_size": (8, 0)}
    hidden = np.r_[0 : at - 9, at - 2, LENGTH:S]

    @jax.jit
    def run(key, value):
        cache = KVCache(key, value, jnp.int32(at))

        def loss(*new):
            output, _ = cached_attention(*new, cache, **arguments)
            return jnp.sin(output).sum(), output

        gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return gradients(*cut(X, at, LENGTH))

    cache = after(at)
    key = cache.key.at[:, hidden].set(filling)
    value = cache.value.at[:, hidden].set(filling)
    jax.tree.map(assert_close, run(key, value), run(cache.key, cache.value))


def test_a_score_mod_with_a_custom_derivative_reads_a_narrow_cache():
    """Only such calls take the dense path."""
    doubled = jax.custom_vjp(lambda x: jnp.sin(x) * 2)

    def forward(x):
        return doubled(x), x

    def backward(x, cotangent):
        return (cotangent * 2 * jnp.cos(x),)

    doubled.defvjp(forward, backward)
    mod = {"score_mod": lambda score, b, h, q, k: doubled(score)}
    query, key, value = X
    key = key.astype(jnp.bfloat16)
    value = value.astype(jnp.bfloat16)
    attend = functools.partial(cached_attention, **mod)
    cache = empty(dtype=jnp.bfloat16)

    output, _ = in_parts(attend, (query, key, value), cache, (18, 1, LENGTH - 19))

    exact = query, key.astype(jnp.float32), value.astype(jnp.float32)
    assert_close(output, in_full(exact, **mod))


def with_cache(at, dtype=jnp.float32):
    """A function of all tokens, of which the first `at` are in the cache."""

    def attend(*x):
        cache = empty(dtype=dtype).update(*cut(x[1:], 0, at))
        output, _ = cached_attention(*cut(x, at, LENGTH), cache)
        return output

    return attend


def of_one_call(at):
    return lambda *x: in_full(x)[:, at:]


def loss_of(attend, number):
    weights = np.random.default_rng(3).standard_normal((B, number, N, H))
    weights = jnp.asarray(weights, jnp.float32)

    def loss(*x):
        output = attend(*x).astype(jnp.float32)
        return jnp.sum(jnp.sin(output) * weights)

    return loss


@pytest.mark.parametrize("number", [3, 18])
def test_derivatives_equal_those_of_one_call(number):
    """Gradients of new queries, keys and values and of the cache; a tangent and its
    gradient.
    """
    at = LENGTH - number

    def derivatives(attend):
        loss = loss_of(attend, number)

        def along(*x):
            _, tangent = jax.jvp(loss, x, tuple(map(jnp.cos, x)))
            return tangent

        run = jax.jit(
            lambda *x: (
                jax.grad(loss, (0, 1, 2))(*x),
                jax.value_and_grad(along, (0, 1, 2))(*x),
            )
        )
        return run(*X)

    got = derivatives(with_cache(at))
    close(got, derivatives(of_one_call(at)), 1e-5, 1.0)


def test_gradients_in_16_bits_equal_those_of_one_call():
    number = 2
    at = LENGTH - number
    x = [x.astype(jnp.bfloat16) for x in X]

    def gradients(attend):
        loss = loss_of(attend, number)
        of_all = jax.jit(jax.grad(loss, (0, 1, 2)))(*x)
        return [x.astype(jnp.float32) for x in of_all]

    got = gradients(with_cache(at, jnp.bfloat16))
    close(got, gradients(of_one_call(at)), 2**-5, 1.0)


@pytest.mark.parametrize("number", [1, 18])
def test_vmap_over_sequences_with_their_own_indices(number):
    """Each with a cache without a batch axis."""
    starts = (3, 12)

    def fill(key, value, index):
        return empty(()).update(key, value, index)

    def new_tokens(x):
        return np.stack([x[b, i : i + number] for b, i in enumerate(starts)])

    caches = jax.vmap(fill)(*cut(X[1:], 0, 12), jnp.array(starts))
    attend = jax.jit(jax.vmap(cached_attention))
    output, caches = attend(*map(new_tokens, X), caches)

    assert_close(output, new_tokens(FULL))
    np.testing.assert_array_equal(caches.index, np.array(starts) + number)


@pytest.mark.core
def test_decoding_in_a_scan_equals_one_call():
    x = [x.astype(jnp.bfloat16) for x in X]
    by_token = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in x]

    def one(cache, token):
        output, cache = cached_attention(*token, cache)
        return cache, output[:, 0]

    run = jax.jit(lambda cache: jax.lax.scan(one, cache, by_token))
    cache, outputs = run(empty(dtype=jnp.bfloat16))

    assert int(cache.index) == LENGTH
    outputs = np.asarray(outputs, np.float32).swapaxes(0, 1)
    expected = np.asarray(in_full(x), np.float32)
    # One rounding of the output in bfloat16, and one of the products.
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=2**-6)


@pytest.mark.parametrize(
    ("dtype", "window"), [(jnp.float64, None), (jnp.bfloat16, WINDOW)]
)
def test_64_bit_types_are_accepted_and_keep_their_precision(dtype, window):
    with jax.enable_x64(True):
        query, key, value = (x.astype(np.float64) for x in X)
        new = query, jnp.asarray(key, dtype), jnp.asarray(value, dtype)
        cache = KVCache.create(B, 999, K, H, dtype, window=window, per_row=True)
        attend = functools.partial(cached_attention, local_window_size=window)

        output, cache = attend(*new, cache, lengths=np.array([LENGTH, 20]))
        # Indices of 64 bits keep the cache's own in 32.
        cache = cache.truncate(jnp.int64(17)).take(jnp.arange(2))
        assert (output.dtype, cache.index.dtype) == (jnp.float64, jnp.int32)
        last, cache = jax.jit(attend)(*cut(new, 17, 18), cache)
        np.testing.assert_array_equal(cache.index, 18)

        if window is None:
            expected = in_full([query, key, value])
            np.testing.assert_allclose(output[0], expected[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(last, expected[:, 17:18], rtol=0, atol=1e-12)


@pytest.mark.core
def test_blockwise_reads_several_tokens_in_a_ring():
    """One token: test_flax_modules.py, without a window: test_decode_future.py."""
    cache = KVCache.create(B, 999, K, H, window=WINDOW)
    attend = functools.partial(
        cached_attention, implementation="blockwise", local_window_size=WINDOW
    )

    output, _ = in_parts(jax.jit(attend), X, cache, (18, LENGTH - 18))

    assert_close(output, in_full(X, local_window_size=WINDOW))


@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("number", [1, 20])
def test_implementations_without_caches_are_refused(implementation, window, number):
    cache = KVCache.create(B, 999, K, H, window=window)
    run = functools.partial(
        cached_attention, implementation=implementation, local_window_size=window
    )
    for attend in (run, jax.jit(run)):
        arrays = (*tokens(number), cache)
        refused(
            "does not support this call", attend, *arrays, error=NotImplementedError
        )


@pytest.mark.parametrize("batch", [0, (), (2, 0)])
@pytest.mark.parametrize("number", [0, 1, 20])
def test_empty_batches_and_inputs(batch, number):
    cache = KVCache.create(batch, S, K, H, jnp.bfloat16, per_row=True)
    query, key, value = tokens(number, cache.batch)
    key = key.astype(jnp.bfloat16)
    value = value.astype(jnp.bfloat16)

    output, cache = cached_attention(query, key, value, cache)

    assert output.shape == query.shape
    np.testing.assert_array_equal(cache.index, np.full(cache.batch, number))


# Errors -------------------------------------------------------------------------------

NEW = tokens(3)
IN_RING = KVCache.create(B, 999, K, H, window=WINDOW)


def call_refused(message, cache=None, new=NEW, **arguments):
    cache = empty() if cache is None else cache
    refused(message, cached_attention, *new, cache, **arguments)


def ring_refused(message, **arguments):
    call_refused(message, IN_RING, local_window_size=WINDOW, **arguments)


@pytest.mark.core
def test_a_cache_must_be_a_kv_cache():
    message = (
        "cache must be a KVCache, but got NoneType; create one with KVCache.create"
    )
    refused(message, cached_attention, *NEW, None)


@pytest.mark.core
def test_new_tokens_must_fit_the_cache():
    query, key, value = NEW
    message = r"query and key must have the same length .*, but got 3 and 5"
    call_refused(message, new=(query, *tokens(5)[1:]))
    message = r"expected key shape \(2, T, 2, 6\) instead got \(6,\)"
    call_refused(message, new=(jnp.ones(6),) * 3)
    message = "query, key depths must match, but got 4 and 6"
    call_refused(message, new=(query[..., :4], key, value))


@pytest.mark.core
def test_masks_and_biases_need_an_entry_for_each_slot():
    new = tokens(20)
    message = r"of mask must have length 43 .* got shape \(20, 20\)"
    call_refused(message, new=new, mask=np.ones((20, 20), bool))
    message = r"of bias must have length 43 .* or 1, but got shape \(4, 20, 20\)"
    call_refused(message, new=new, bias=np.ones((N, 20, 20), np.float32))


@pytest.mark.core
def test_a_ring_needs_its_window():
    message = (
        "local_window_size must extend at most 5 positions .*got None; create the cache"
    )
    call_refused(message, IN_RING)
    message = r"at most.*got \(None, 0\)"
    call_refused(message, IN_RING, local_window_size=(None, 0))


@pytest.mark.core
def test_a_ring_takes_no_arrays_with_an_entry_for_each_slot():
    """Its slots hold different tokens over time."""
    message = r"bias must have length 1 .* ring .*\(4, 1, 70\); to mask by position"
    ring_refused(message, bias=np.ones((N, 1, RING)))
    message = "mask must have length 1 on the key axis, because a ring cache reuses"
    ring_refused(message, mask=np.ones((1, RING), bool))
    message = "mask must not contain an array with one entry per key for a ring cache"
    ring_refused(message, mask=SegmentMask(np.ones(3, int), np.ones(RING, int)))
    array = ArrayMask(np.ones((3, RING), bool))
    ring_refused(message, mask=CausalMask() & ~array)


# Random splits into calls -------------------------------------------------------------

# Three blocks of 64 slots.
HV = 5
SLOTS = 131
WHOLE = 97
rng = np.random.default_rng(0)
# A slope and a sink for each head.
SLOPES, SINKS = np.float32(rng.standard_normal((2, N)))
BIAS = np.float32(rng.standard_normal((N, 1, SLOTS)))
SHOWN = rng.random((2, 1, 1, SLOTS)) < 0.8
IDS = np.sort(rng.integers(0, 4, SLOTS)).astype(np.int32)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 16)
    monkeypatch.setattr(schedule, "MAX_WIDTH_IN_PLACE", 64)


def slopes_and_entry(score, b, h, q_idx, kv_idx):
    distance = (q_idx - 2 * kv_idx).astype(score.dtype)
    slope = jnp.asarray(SLOPES)[h] / 16
    return score + slope * distance + b.astype(score.dtype)


def thinned(b, h, q_idx, kv_idx):
    return ((q_idx + 2 * kv_idx + h) % 5 != 1) | (q_idx == kv_idx)


def in_segments(queries, slots):
    return SegmentMask(np.full(queries, IDS[0]), IDS[:slots]) | CausalMask(-3)


class Structure(NamedTuple):
    """A call that is compiled once for many splits."""

    arguments: dict = {}  # noqa: RUF012
    batch: tuple[int, ...] = (2,)
    kv_heads: int = 2
    per_row: bool = False
    ring: bool = False
    dtype: str = "float32"
    cached: str = "float32"
    value_size: int | None = None
    tolerance: float = 1e-5

    @property
    def length(self):
        # Longer than the ring, so that slots are overwritten.
        if self.ring:
            return 173
        return WHOLE

    @property
    def sizes(self):
        """One token, few, and a prompt: for a ring one that is longer than the ring."""
        if self.ring:
            return (1, 7, 90)
        return (1, 7, 40)

    def given(self, queries, slots=SLOTS):
        """The arguments of a call; a mask or a bias of slots is made for so many
        queries and slots.
        """
        arguments = dict(self.arguments)
        for name in ("mask", "bias"):
            make = arguments.get(name)
            if callable(make):
                arguments[name] = make(queries, slots)
        return arguments

    def cache(self, garbage=0.0):
        cache = KVCache.create(
            self.batch,
            SLOTS,
            self.kv_heads,
            H,
            self.cached,
            window=WINDOW if self.ring else None,
            per_row=self.per_row,
            value_size=self.value_size,
        )
        # With `value_size`, values are a part of the keys.
        value_size = HV if self.value_size is None else 0
        key = jnp.full_like(cache.key, garbage)
        value = jnp.full((*key.shape[:-1], value_size), garbage, self.cached)
        return dataclasses.replace(cache, key=key, value=value)

    def tokens(self, seed=0):
        rng = np.random.default_rng(seed)

        def draw(heads, size, dtype):
            x = rng.standard_normal((*self.batch, self.length, heads, size), np.float32)
            return np.asarray(jnp.asarray(x, dtype))

        query = draw(N, H, self.dtype)
        key = draw(self.kv_heads, H, self.cached)
        if self.value_size is not None:
            return [query, key]
        return [query, key, draw(self.kv_heads, HV, self.cached)]


WINDOWED = {"local_window_size": (WINDOW, 0)}
WINDOW_AHEAD = {"local_window_size": (9, 2)}
NARROW = {"local_window_size": 4}
LOGITS = {"logits_soft_cap": 3.0, "sinks": SINKS}
DROPOUT = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)}
SCALED = {"scale": jnp.float32(0.7)}
OF_HEADS = {"mask": LengthMask(171), "bias": BIAS[:, :, :1]}
FUNCTIONS = {"mask": FunctionMask(thinned), "score_mod": slopes_and_entry}
OF_EACH_SLOT = {
    "bias": lambda _, slots: BIAS[..., :slots],
    "mask": lambda _, slots: SHOWN[..., :slots],
}
STRUCTURES = {
    "no batch axis, window, logits, dropout": Structure(
        WINDOW_AHEAD | DROPOUT | LOGITS, batch=(), kv_heads=1
    ),
    "ring, lengths, logits": Structure(WINDOWED | LOGITS, ring=True, per_row=True),
    "narrow ring, positions": Structure(
        NARROW | FUNCTIONS, ring=True, per_row=True, kv_heads=4, cached="float16"
    ),
    "positions, lengths": Structure(FUNCTIONS, per_row=True),
    "segments of slots, bias of heads": Structure(
        {"mask": in_segments, "bias": BIAS[:, :, :1]}, per_row=True
    ),
    "two batch axes, dropout, scale": Structure(
        SCALED | DROPOUT, batch=(2, 1), per_row=True, cached="bfloat16"
    ),
    "values in keys": Structure(LOGITS, kv_heads=1, value_size=4, per_row=True),
    "values in a narrow ring": Structure(
        WINDOWED | OF_HEADS, cached="bfloat16", ring=True, value_size=4
    ),
    # One rounding of an output of this size, and of each product's operands in 16 bits.
    # (In bfloat16: `test_decoding_in_a_scan_equals_one_call`.)
    "float16, bias and mask of slots": Structure(
        OF_EACH_SLOT, dtype="float16", cached="float16", tolerance=2**-9
    ),
}


def whole_call(structure, query, key, value=None):
    """One causal call of all tokens."""
    if value is None:
        value = key[..., : structure.value_size]
    key = jnp.asarray(key).astype(query.dtype)
    value = jnp.asarray(value).astype(query.dtype)
    arguments = structure.given(structure.length, structure.length)
    return dot_product_attention(
        query, key, value, is_causal=True, implementation="xla", **arguments
    )


class Programs(NamedTuple):
    """Tokens and expected outputs, with one batch axis, and the jitted programs."""

    tokens: list
    expected: np.ndarray
    step: Callable
    truncate: Callable


@functools.lru_cache(maxsize=1)
def programs(name):
    structure = STRUCTURES[name]

    def step(cache, lengths, query, key, value=None):
        arguments = structure.given(query.shape[-3])
        return cached_attention(query, key, value, cache, lengths=lengths, **arguments)

    def with_one_batch_axis(x):
        return x.reshape(-1, *x.shape[-3:])

    tokens = structure.tokens()
    expected = jax.jit(functools.partial(whole_call, structure))(*tokens)
    return Programs(
        tokens=[with_one_batch_axis(x) for x in tokens],
        expected=with_one_batch_axis(np.asarray(expected, np.float32)),
        step=jax.jit(step),
        truncate=jax.jit(KVCache.truncate),
    )


def padded(x, first, lengths, size, filling):
    """Of each sequence `lengths` tokens from `first` on, and then padding."""
    pieces = np.full((len(x), size, *x.shape[2:]), filling, np.float32)
    pieces = pieces.astype(x.dtype)
    for piece, row, start, length in zip(pieces, x, first, lengths, strict=True):
        piece[:length] = row[start : start + length]
    return pieces


def split(name, seed):
    """A sequence in random pieces, of which some are taken back; odd seeds fill padding
    and unwritten slots.
    """
    structure = STRUCTURES[name]
    rng = np.random.default_rng(seed)
    tokens, expected, step, truncate = programs(name)
    garbage = 0.0
    if seed % 2:
        largest = float(jnp.finfo(structure.cached).max)
        garbage = rng.choice((np.nan, np.inf, -np.inf, min(3e38, largest)))
    cache = structure.cache(garbage)
    # Of each sequence, the number of tokens so far.
    at = np.zeros(len(expected), int)
    taken_back = 0
    got = np.full(expected.shape, np.nan, np.float32)

    def index(numbers):
        numbers = jnp.asarray(numbers, jnp.int32)
        if structure.per_row:
            return numbers.reshape(structure.batch)
        return numbers[0]

    while (at < structure.length).any():
        # Without an index each, no sequence may have padding.
        sizes = structure.sizes
        if not structure.per_row:
            sizes = [x for x in sizes if x <= structure.length - at.max(initial=0)]
        size = int(rng.choice(sizes))
        lengths = np.full(len(at), size)
        given_lengths = None
        if structure.per_row:
            drawn = rng.integers(0, size + 1, len(at))
            lengths = np.minimum(drawn, structure.length - at)
            given_lengths = index(lengths)

        pieces = []
        for x in tokens:
            piece = padded(x, at, lengths, size, garbage)
            pieces.append(piece.reshape(*structure.batch, size, *x.shape[2:]))
        output, cache = step(cache, given_lengths, *pieces)

        output = np.asarray(output, np.float32).reshape(-1, *output.shape[-3:])
        for row, out, start, length in zip(got, output, at, lengths, strict=True):
            row[start : start + length] = out[:length]
            np.testing.assert_array_equal(out[length:], 0)
        at = at + lengths

        # Tokens that are taken back are passed again.
        if rng.random() < 0.3 and taken_back < 3:
            taken_back += 1
            at = at - int(rng.integers(0, min(at.min(), 20) + 1))
            cache = truncate(cache, index(at))
            got[np.arange(structure.length) >= at[:, None]] = np.nan
        np.testing.assert_array_equal(cache.index, index(at))
    np.testing.assert_allclose(got, expected, rtol=0, atol=structure.tolerance)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", with_core(STRUCTURES, "ring, lengths, logits"))
def test_any_split_equals_one_call(name):
    for seed in range(4):
        split(name, seed)
    # Also after tokens were taken back.
    number_of_programs = programs(name).step._cache_size()
    assert number_of_programs <= len(STRUCTURES[name].sizes)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ring, lengths, logits", [90, 1, 40]),
        ("float16, bias and mask of slots", [40, 1, 40]),
    ],
)
def test_a_known_index_gives_the_output_of_one_call(name, sizes):
    """Without jit, prompts and rings take other branches."""
    structure = STRUCTURES[name]
    tokens = structure.tokens()
    attend = functools.partial(cached_attention, **structure.given(0))
    got, _ = in_parts(attend, tokens, structure.cache(), sizes)

    expected = whole_call(structure, *tokens)[:, : sum(sizes)]
    np.testing.assert_allclose(got, expected, rtol=0, atol=structure.tolerance)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "width", [64, schedule.MAX_WIDTH_ACCELERATOR], ids=["blocks", "one block"]
)
@pytest.mark.parametrize(
    "name", ["narrow ring, positions", "two batch axes, dropout, scale"]
)
def test_any_split_equals_one_call_as_on_an_accelerator(
    name, width, platform, monkeypatch
):
    """All batch entries together."""
    programs.cache_clear()
    compiled_for(monkeypatch, platform)
    # No kernel: the portable computation, with an accelerator's sizes.
    monkeypatch.setattr(cudnn, "device", lambda platform: cudnn.Device(platform, None))
    monkeypatch.setattr(schedule, "MAX_WIDTH_ACCELERATOR", width)
    for seed in range(2):
        split(name, seed)
    programs.cache_clear()
