"""`cached_attention`: full caches, NaN in slots, transformations, implementations,
refusals, any split into calls.
"""

import dataclasses
import functools
import itertools
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
from flax_mha._src.engines.kernels import cudnn
from flax_mha.cache import cached_attention
from flax_mha.masks import ArrayMask, CausalMask, FunctionMask, LengthMask, SegmentMask

B = 2
N = 4
K = 2
H = 6
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
    one = KVCache(cache.key, cache.value, jnp.int32(S))
    output, new = step(*tokens(1, seed=1), one)
    assert np.isnan(output).all()
    jax.tree.map(np.testing.assert_array_equal, new, one)


def test_the_largest_scores_of_all_calls():
    """The largest of them is the largest score of the whole sequence; without room it
    is NaN.
    """
    attend = jax.jit(functools.partial(cached_attention, return_max_score=True))
    largest = []

    def keeping_the_largest(*arguments):
        output, cache, max_score = attend(*arguments)
        largest.append(max_score)
        return output, cache

    output, cache = in_parts(keeping_the_largest, X, empty(per_row=True), (20, 10, 1))
    assert_close(output, FULL)
    np.testing.assert_allclose(
        np.max(largest, 0), in_full(X, return_max_score=True)[1], rtol=1e-6
    )
    *_, max_score = attend(*cut(X, 0, 20), cache.truncate([31, 5]))
    assert np.isnan(max_score[0]).all()
    assert np.isfinite(max_score[1]).all()


@pytest.mark.core
def test_padding_needs_no_room():
    """A prompt that is padded beyond the cache, with a bias for each slot."""
    x = tokens(S + 9)
    lengths = jnp.array([S, 7])
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((N, 1, S)), jnp.float32)
    both = jax.jit(lambda cache: cached_attention(*x, cache, bias, lengths=lengths))
    expected = in_full(cut(x, 0, S), bias=bias, query_seq_lengths=lengths)
    for run in (both, lambda cache: cached_attention(*x, cache, bias, lengths=lengths)):
        output, cache = run(empty(per_row=True))
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
    near = cache.truncate(2 * RING + 10)
    output, _ = attend(*cut(x, 2 * RING + 10, 2 * RING + 11), near)
    expected = in_full(x, local_window_size=WINDOW)
    assert_close(output, expected[:, 2 * RING + 10 : 2 * RING + 11])
    far = near.truncate(2 * RING)
    for size in (1, 3):
        output, _ = attend(*cut(x, 2 * RING, 2 * RING + size), far)
        assert np.isnan(output).all()


@pytest.mark.parametrize("number", [1, 18])
def test_nan_affects_the_queries_that_attend_to_its_slot(number):
    at = LENGTH - number - 1
    place = LENGTH - 3 if number > 2 else 4
    sees = np.zeros((B, number, N), bool)
    sees[0, max(0, place - at) :, 2:] = True
    for filling in (jnp.nan, jnp.inf):
        for which in (1, 2):
            spoilt = list(X)
            spoilt[which] = jnp.asarray(X[which]).at[0, place, 1, 2].set(filling)
            cache = empty().update(*cut(spoilt, 0, at)[1:])
            output = np.asarray(step(*cut(spoilt, at, at + number), cache)[0])
            assert np.isnan(output[sees]).all()
            assert_close(output[~sees], FULL[:, at : at + number][~sees])


@pytest.mark.parametrize("number", [1, 18])
@pytest.mark.parametrize("filling", [core(np.nan), np.inf, 3e38, -3e38])
def test_hidden_slots_never_affect_outputs_and_gradients(number, filling):
    """Never written, beyond the window, or masked."""
    at = LENGTH - number
    mask = np.arange(S) != at - 2
    hidden = np.r_[0 : at - 9, at - 2, LENGTH:S]

    @jax.jit
    def run(key, value):
        def loss(*new):
            more = {"mask": mask, "local_window_size": (8, 0)}
            output, _ = cached_attention(
                *new, KVCache(key, value, jnp.int32(at)), **more
            )
            return jnp.sin(output).sum(), output

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
            *cut(X, at, LENGTH)
        )

    cache = after(at)
    got = run(
        cache.key.at[:, hidden].set(filling), cache.value.at[:, hidden].set(filling)
    )
    jax.tree.map(assert_close, got, run(cache.key, cache.value))


def test_a_score_mod_with_a_custom_derivative_reads_a_narrow_cache():
    """Only such calls take the dense path."""
    doubled = jax.custom_vjp(lambda x: jnp.sin(x) * 2)
    doubled.defvjp(
        lambda x: (doubled(x), x), lambda x, cotangent: (cotangent * 2 * jnp.cos(x),)
    )
    x = [X[0], *(x.astype(jnp.bfloat16) for x in X[1:])]
    mod = {"score_mod": lambda score, b, h, q, k: doubled(score)}
    expected = in_full([x.astype(jnp.float32) for x in x], **mod)
    output, _ = in_parts(
        functools.partial(cached_attention, **mod),
        x,
        empty(dtype=jnp.bfloat16),
        (18, 1, LENGTH - 19),
    )
    assert_close(output, expected)


@pytest.mark.parametrize(
    ("number", "dtype"), [(2, jnp.bfloat16), (3, jnp.float32), (18, jnp.float32)]
)
def test_derivatives_equal_those_of_one_call(number, dtype):
    """Gradients of new queries, keys and values and of the cache; a tangent and its
    gradient, unless in 16 bits.
    """
    x = [x.astype(dtype) for x in X]
    at = LENGTH - number
    weights = jnp.asarray(
        np.random.default_rng(3).standard_normal((B, number, N, H)), jnp.float32
    )

    def by_cache(*x):
        return cached_attention(
            *cut(x, at, LENGTH), empty(dtype=dtype).update(*cut(x[1:], 0, at))
        )[0]

    def derivatives(f):
        def loss(*x):
            return jnp.sum(jnp.sin(f(*x).astype(jnp.float32)) * weights)

        def along(*x):
            return jax.jvp(
                f if dtype == jnp.bfloat16 else loss, x, tuple(map(jnp.cos, x))
            )[1]

        gradients = jax.grad(loss, (0, 1, 2))(*x)
        if dtype == jnp.bfloat16:
            return gradients
        return (gradients, jax.value_and_grad(along, (0, 1, 2))(*x))

    got, expected = (
        jax.jit(lambda f=f: derivatives(f))()
        for f in (by_cache, lambda *x: in_full(x)[:, at:])
    )
    close(
        *(jax.tree.map(np.float32, x) for x in (got, expected)),
        1e-5 if dtype == jnp.float32 else 2**-5,
        1.0,
    )


@pytest.mark.parametrize("number", [1, 18])
def test_vmap_over_sequences_with_their_own_indices(number):
    """Each with a cache without a batch axis."""
    indices = jnp.array([3, 12])
    caches = jax.vmap(lambda key, value, index: empty(()).update(key, value, index))(
        *cut(X[1:], 0, 12), indices
    )
    new = [jnp.stack([x[b, i : i + number] for b, i in enumerate((3, 12))]) for x in X]
    output, caches = jax.jit(jax.vmap(cached_attention))(*new, caches)
    expected = np.stack([FULL[b, i : i + number] for b, i in enumerate((3, 12))])
    assert_close(output, expected)
    np.testing.assert_array_equal(caches.index, indices + number)


@pytest.mark.core
def test_scan():
    x = [x.astype(jnp.bfloat16) for x in X]
    by_token = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in x]

    def one(cache, token):
        output, cache = cached_attention(*token, cache)
        return cache, output[:, 0]

    cache, outputs = jax.jit(lambda cache: jax.lax.scan(one, cache, by_token))(
        empty(dtype=jnp.bfloat16)
    )
    assert int(cache.index) == LENGTH
    expected = np.asarray(in_full(x), np.float32)
    np.testing.assert_allclose(
        np.asarray(outputs, np.float32).swapaxes(0, 1), expected, rtol=0, atol=2**-6
    )


def test_64_bit_types():
    with jax.enable_x64(True):
        x = [jnp.asarray(np.asarray(x), jnp.float64) for x in X]
        expected = in_full(x)
        for dtype, window in ((jnp.float64, None), (jnp.bfloat16, WINDOW)):
            cache = KVCache.create(B, 999, K, H, dtype, window=window, per_row=True)
            attend = functools.partial(cached_attention, local_window_size=window)
            new = [x[0], *(x.astype(dtype) for x in x[1:])]
            output, cache = attend(*new, cache, lengths=np.array([LENGTH, 20]))
            cache = cache.truncate(jnp.int64(17)).take(jnp.arange(2))
            assert (output.dtype, cache.index.dtype) == (jnp.float64, jnp.int32)
            last, cache = jax.jit(attend)(*cut(new, 17, 18), cache)
            np.testing.assert_array_equal(cache.index, 18)
            if window is None:
                np.testing.assert_allclose(output[0], expected[0], rtol=0, atol=1e-12)
                np.testing.assert_allclose(last, expected[:, 17:18], rtol=0, atol=1e-12)


@pytest.mark.core
def test_blockwise():
    """Several tokens in a ring; one token: test_flax_modules.py, without a window:
    test_decode_future.py.
    """
    cache = KVCache.create(B, 999, K, H, window=WINDOW)
    given = {"local_window_size": WINDOW}
    attend = jax.jit(
        functools.partial(cached_attention, implementation="blockwise", **given)
    )
    assert_close(in_parts(attend, X, cache, (18, LENGTH - 18))[0], in_full(X, **given))


@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_implementations_without_caches(implementation, window):
    cache = KVCache.create(B, 999, K, H, window=window)
    run = functools.partial(
        cached_attention, implementation=implementation, local_window_size=window
    )
    for number, attend in itertools.product((1, 20), (run, jax.jit(run))):
        refused(
            "does not support this call",
            attend,
            *tokens(number),
            cache,
            error=NotImplementedError,
        )


@pytest.mark.parametrize("batch", [0, (), (2, 0)])
@pytest.mark.parametrize("number", [0, 1, 20])
def test_empty_batches_and_inputs(batch, number):
    cache = KVCache.create(batch, S, K, H, jnp.bfloat16, per_row=True)
    query, key, value = tokens(number, cache.batch)
    output, cache = cached_attention(
        query, key.astype(jnp.bfloat16), value.astype(jnp.bfloat16), cache
    )
    assert output.shape == query.shape
    np.testing.assert_array_equal(cache.index, np.full(cache.batch, number))


NEW = tokens(3)
ONE = empty()
ROWS = empty(per_row=True)
FULL_CACHE = empty().update(*tokens(S)[1:])
IN_RING = KVCache.create(B, 999, K, H, window=WINDOW)


def call(cache=ONE, new=NEW, **arguments):
    return cached_attention(*new, cache, **arguments)


def in_ring(**arguments):
    return call(IN_RING, local_window_size=WINDOW, **arguments)


FLOATS = np.ones((N, 20, 20), np.float32)
SHOWING = functools.partial(np.ones, dtype=bool)
# Both have an entry for each slot of a ring, whose tokens change.
OF_SLOTS = [
    SegmentMask(np.ones(3, int), np.ones(RING, int)),
    CausalMask() & ~ArrayMask(SHOWING((3, RING))),
]
REFUSED = [
    (lambda: call(FULL_CACHE, tokens(1)), "the cache is full: all 43 slots are in use"),
    (
        lambda: call(FULL_CACHE),
        "end at position 46, but there are only 43 slots; create a longer cache",
    ),
    (
        lambda: jax.eval_shape(lambda cache: call(cache, tokens(S + 1))[0], ONE),
        "got 44 new tokens for 43 slots",
    ),
    (
        lambda: call(None),
        "cache must be a KVCache, but got NoneType; create one with KVCache.create",
    ),
    (
        lambda: call(new=(NEW[0], *tokens(5)[1:])),
        r"query and key must have the same length .*, but got 3 and 5",
    ),
    (
        lambda: call(new=tokens(3, (1,))),
        r"expected key shape \(2, T, 2, 6\) instead got \(1, 3, 2, 6\)",
    ),
    (
        lambda: call(new=(jnp.ones(6),) * 3),
        r"expected key shape \(2, T, 2, 6\) instead got \(6,\)",
    ),
    (
        lambda: call(new=tokens(3, dtype=jnp.bfloat16)),
        "key must have the cache's dtype, float32, .*; use .astype",
    ),
    (
        lambda: call(new=(NEW[0][..., :4], *NEW[1:])),
        "query, key depths must match, but got 4 and 6",
    ),
    (
        lambda: call(new=tokens(20), mask=SHOWING((20, 20))),
        r"of mask must have length 43 .* got shape \(20, 20\)",
    ),
    (
        lambda: call(new=tokens(20), bias=FLOATS),
        r"of bias must have length 43 .* or 1, but got shape \(4, 20, 20\)",
    ),
    (
        lambda: call(new=tokens(20), mask=CausalMask),
        r"mask object .*call it: CausalMask\(\)",
    ),
    (lambda: call(mask=np.ones((3, S))), "mask must be bool .*got float32"),
    (
        lambda: call(IN_RING),
        "local_window_size must extend at most 5 positions .*got None; create the "
        "cache",
    ),
    (lambda: call(IN_RING, local_window_size=(None, 0)), r"at most.*got \(None, 0\)"),
    (
        lambda: in_ring(bias=np.ones((N, 1, RING))),
        r"bias must not differ .* ring .*\(4, 1, 70\); use a mask object",
    ),
    (
        lambda: in_ring(mask=SHOWING((1, RING))),
        "mask must not differ between slots of a ring cache",
    ),
    (
        lambda: in_ring(mask=OF_SLOTS[0]),
        "mask must not contain an array with one entry per key for a ring cache",
    ),
    (
        lambda: in_ring(mask=OF_SLOTS[1]),
        "mask must not contain an array with one entry per key for a ring cache",
    ),
    (lambda: call(lengths=[1, 1]), "lengths must be None if all .*per_row=True"),
    (
        lambda: call(ROWS, lengths=[4, 1]),
        "lengths must be between 0 and 3 .*got values from 1 to 4",
    ),
]


@pytest.mark.core
@pytest.mark.parametrize(("run", "message"), REFUSED)
def test_refused(run, message):
    refused(message, run)


# Three blocks of 64 slots.
HV = 5
SLOTS = 131
WHOLE = 97
rng = np.random.default_rng(0)
SLOPES, SINKS = np.float32(rng.standard_normal((2, N)))
BIAS = np.float32(rng.standard_normal((N, 1, SLOTS)))
SHOWN = rng.random((2, 1, 1, SLOTS)) < 0.8
IDS = np.sort(rng.integers(0, 4, SLOTS)).astype(np.int32)
GARBAGE = (np.nan, np.inf, -np.inf, 3e38)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 16)
    monkeypatch.setattr(schedule, "MAX_WIDTH_IN_PLACE", 64)


def slopes_and_entry(score, b, h, q_idx, kv_idx):
    return (
        score
        + jnp.asarray(SLOPES)[h] * (q_idx - 2 * kv_idx).astype(score.dtype) / 16
        + b.astype(score.dtype)
    )


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
        return 173 if self.ring else WHOLE

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
        made = {
            name: self.arguments[name]
            for name in ("mask", "bias")
            if callable(self.arguments.get(name))
        }
        return self.arguments | {
            name: make(queries, slots) for name, make in made.items()
        }

    def cache(self, garbage=0.0):
        window = WINDOW if self.ring else None
        options = {
            "window": window,
            "per_row": self.per_row,
            "value_size": self.value_size,
        }
        cache = KVCache.create(
            self.batch,
            999 if self.ring else SLOTS,
            self.kv_heads,
            H,
            self.cached,
            **options,
        )
        shape = (*cache.key.shape[:-1], HV if self.value_size is None else 0)
        key = jnp.full_like(cache.key, garbage)
        value = jnp.full(shape, garbage, self.cached)
        return dataclasses.replace(cache, key=key, value=value)

    def tokens(self, seed=0):
        rng = np.random.default_rng(seed)
        shapes = ((N, H), (self.kv_heads, H), (self.kv_heads, HV))
        query, *cached = (
            rng.standard_normal((*self.batch, self.length, *shape), np.float32)
            for shape in shapes
        )
        cached = cached if self.value_size is None else cached[:1]
        return [
            np.asarray(jnp.asarray(query, self.dtype)),
            *(np.asarray(jnp.asarray(x, self.cached)) for x in cached),
        ]


WINDOWED, WINDOW_AHEAD, NARROW = (
    {"local_window_size": size} for size in ((WINDOW, 0), (9, 2), 4)
)
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
    # (In bfloat16: `test_scan`.)
    "float16, bias and mask of slots": Structure(
        OF_EACH_SLOT, dtype="float16", cached="float16", tolerance=2**-9
    ),
}


def whole_call(structure, query, key, value=None):
    """One causal call of all tokens."""
    value = key[..., : structure.value_size] if value is None else value
    key, value = (jnp.asarray(x).astype(query.dtype) for x in (key, value))
    arguments = structure.given(structure.length, structure.length)
    return dot_product_attention(
        query, key, value, is_causal=True, implementation="xla", **arguments
    )


@functools.lru_cache(maxsize=1)
def programs(name):
    """Tokens and expected outputs, with one batch axis, and the jitted programs."""
    structure = STRUCTURES[name]

    def step(cache, lengths, query, key, value=None):
        return cached_attention(
            query,
            key,
            value,
            cache,
            lengths=lengths,
            **structure.given(query.shape[-3]),
        )

    tokens = structure.tokens()
    expected = np.asarray(
        jax.jit(functools.partial(whole_call, structure))(*tokens), np.float32
    )
    flat = [x.reshape(-1, *x.shape[-3:]) for x in (expected, *tokens)]
    return flat[1:], flat[0], jax.jit(step), jax.jit(KVCache.truncate)


def padded(x, first, lengths, size, filling):
    """Of each sequence `lengths` tokens from `first` on, and then padding."""
    pieces = np.full((len(x), size, *x.shape[2:]), filling, np.float32).astype(x.dtype)
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
    garbage = rng.choice(GARBAGE) if seed % 2 else 0.0
    if garbage == 3e38:
        garbage = min(garbage, float(jnp.finfo(structure.cached).max))
    cache = structure.cache(garbage)
    at = np.zeros(len(expected), int)
    taken_back = 0
    got = np.full(expected.shape, np.nan, np.float32)

    def index(numbers):
        return jnp.asarray(
            numbers.reshape(structure.batch) if structure.per_row else numbers[0],
            jnp.int32,
        )

    while (at < structure.length).any():
        fits = [
            size
            for size in structure.sizes
            if structure.per_row or size <= structure.length - at.max(initial=0)
        ]
        size = int(rng.choice(fits))
        lengths = np.full(len(at), size)
        if structure.per_row:
            lengths = np.minimum(
                rng.integers(0, size + 1, len(at)), structure.length - at
            )
        pieces = [
            padded(x, at, lengths, size, garbage).reshape(
                *structure.batch, size, *x.shape[2:]
            )
            for x in tokens
        ]
        output, cache = step(
            cache, index(lengths) if structure.per_row else None, *pieces
        )
        output = np.asarray(output, np.float32).reshape(-1, *output.shape[-3:])
        for row, out, start, length in zip(got, output, at, lengths, strict=True):
            row[start : start + length] = out[:length]
            np.testing.assert_array_equal(out[length:], 0)
        at = at + lengths
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
    assert programs(name)[2]._cache_size() <= len(STRUCTURES[name].sizes)


EAGER = {
    "ring, lengths, logits": [90, 1, 40],
    "float16, bias and mask of slots": [40, 1, 40],
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", EAGER)
def test_a_known_index(name):
    """Without jit, prompts and rings take other branches."""
    structure = STRUCTURES[name]
    tokens = structure.tokens()
    attend = functools.partial(cached_attention, **structure.given(0))
    got, _ = in_parts(attend, tokens, structure.cache(), EAGER[name])
    np.testing.assert_allclose(
        got,
        whole_call(structure, *tokens)[:, : got.shape[1]],
        rtol=0,
        atol=structure.tolerance,
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "width", [64, schedule.MAX_WIDTH_ACCELERATOR], ids=["blocks", "one block"]
)
@pytest.mark.parametrize(
    "name", ["narrow ring, positions", "two batch axes, dropout, scale"]
)
def test_as_on_an_accelerator(name, width, platform, monkeypatch):
    """All batch entries together."""
    programs.cache_clear()
    compiled_for(monkeypatch, platform)
    monkeypatch.setattr(cudnn, "device", lambda platform: cudnn.Device(platform, None))
    monkeypatch.setattr(schedule, "MAX_WIDTH_ACCELERATOR", width)
    for seed in range(2):
        split(name, seed)
    programs.cache_clear()
