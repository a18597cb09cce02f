"""Queries that list their keys: results equal those of a mask that shows these keys,
and memory is linear.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, forget_programs, refused
from flax import nnx
from marks import Refusals, core, with_core

import flax_mha
from flax_mha import KVCache, dot_product_attention, explain_implementation, recipes
from flax_mha.cache import cached_attention


class Sizes(NamedTuple):
    batch: int
    t: int
    s: int
    n: int
    k: int
    h: int
    hv: int
    # Listed keys of a query.
    count: int
    # Whether each key head has a list of its own.
    by_head: bool = False


SIZES = {
    "few queries": Sizes(2, 3, 40, 2, 2, 8, 8, count=5, by_head=True),
    "blocks of queries": Sizes(2, 67, 31, 4, 2, 8, 5, count=7),
    "one key a query": Sizes(1, 40, 9, 2, 1, 4, 4, count=1),
    "one key head of many features": Sizes(1, 33, 50, 6, 1, 24, 16, count=9),
}
SLOPES = jnp.array([0.3, -0.2, 0.1, 0.4, 0.5, -0.6])


def plain(sizes):
    return {}


def causal(sizes):
    return {
        "is_causal": True,
        "query_offset": 4,
        "key_value_seq_lengths": jnp.arange(sizes.batch) * 7 + 9,
        "sinks": jnp.linspace(-1, 1, sizes.n),
    }


def windows(sizes):
    query_ids = jnp.arange(sizes.t)[None] // 30
    key_ids = jnp.arange(sizes.s)[None] // 30
    return {
        "local_window_size": (20, 5),
        "query_segment_ids": query_ids.repeat(sizes.batch, 0),
        "key_value_segment_ids": key_ids.repeat(sizes.batch, 0),
        "logits_soft_cap": 1.5,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(3),
    }


def sloped(score, b, h, i, j):
    return score + SLOPES[h].astype(score.dtype) * (i - j).astype(score.dtype)


def modified(sizes):
    scores = (1, sizes.n, sizes.t, sizes.s)
    visible = jnp.arange(sizes.t * sizes.s) % 5 > 0
    return {
        "score_mod": sloped,
        "bias": jnp.cos(jnp.arange(sizes.n * sizes.t * sizes.s)).reshape(scores),
        "mask": visible.reshape(1, 1, sizes.t, sizes.s),
    }


def all_of_them(sizes):
    lengths = sizes.s - jnp.arange(sizes.batch) * 3
    arguments = causal(sizes) | windows(sizes) | modified(sizes)
    return arguments | {"key_value_seq_lengths": lengths}


CALLS = {
    "plain": plain,
    "causal, lengths, sinks": causal,
    "window, segments, soft cap, dropout": windows,
    "score_mod, bias, mask": modified,
    "all of them": all_of_them,
}


def drawn(sizes, seed=0, dtype=np.float32):
    """Query, key, value and lists of keys, some of which are repeated or -1."""
    rng = np.random.default_rng(seed)
    batch, t, s, n, k, h, hv, count, by_head = sizes
    shapes = (batch, t, n, h), (batch, s, k, h), (batch, s, k, hv)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    shape = (batch, t, k, count) if by_head else (batch, t, count)
    return arrays, rng.integers(-1, s, shape, np.int32)


def shown(indices, sizes):
    """The mask [B, N, T, S] that shows the listed keys."""
    by_head = indices if indices.ndim == 4 else indices[:, :, None]
    visible = (by_head[..., None] == np.arange(sizes.s)).any(-2)
    group = sizes.n // visible.shape[2]
    return jnp.asarray(np.repeat(np.moveaxis(visible, 2, 1), group, axis=1))


def everything(attend, *arrays):
    """Output and log-sum-exp, a tangent, gradients and their tangents."""

    def output_of(*arrays):
        return attend(*arrays)[0]

    def loss(*arrays):
        output = output_of(*arrays)
        # Weights that differ, so that no error cancels another one.
        weights = jnp.cos(jnp.arange(output.size, dtype=output.dtype))
        return (output * weights.reshape(output.shape)).sum()

    tangents = tuple(jnp.sin(x) for x in arrays)
    tangent = jax.jvp(output_of, arrays, tangents)
    gradient = jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, tangents)
    return attend(*arrays), tangent, gradient


CASES = [
    core("blocks of queries", "plain", "float32"),
    ("blocks of queries", "all of them", "float32"),
]


@pytest.mark.parametrize(
    ("name", "call", "dtype"), [*CASES, *itertools.product(SIZES, CALLS, ["float64"])]
)
def test_listed_keys_equal_a_mask_that_shows_them(name, call, dtype):
    sizes = SIZES[name]
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    with jax.enable_x64(dtype == "float64"):
        options = CALLS[call](sizes)
        for option, x in options.items():
            if getattr(x, "dtype", None) == jnp.float32:
                options[option] = x.astype(dtype)
        given = options.pop("mask", None)
        attention = functools.partial(
            dot_product_attention, return_residual=True, **options
        )

        @jax.jit
        def listed(indices, *arrays):
            attend = functools.partial(attention, key_indices=indices, mask=given)
            return everything(attend, *arrays)

        @jax.jit
        def masked(mask, *arrays):
            if given is not None:
                mask = mask & given
            attend = functools.partial(attention, mask=mask, implementation="xla")
            return everything(attend, *arrays)

        for seed in range(3):
            arrays, indices = drawn(sizes, seed, dtype)
            got = listed(indices, *arrays)
            want = masked(shown(indices, sizes), *arrays)
            close(got, want, tolerance, at_least=1)


def attend_causally(query, key, value, indices):
    return dot_product_attention(query, key, value, key_indices=indices, is_causal=True)


@pytest.mark.core
def test_memory_is_linear_and_a_tenth_of_the_dense_memory():
    def temporaries(length, attend):
        x = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)
        indices = jax.ShapeDtypeStruct((1, length, 64), jnp.int32)
        gradient = jax.grad(lambda arrays, indices: attend(*arrays, indices).sum())
        program = jax.jit(gradient).lower((x, x, x), indices).compile()
        return program.memory_analysis().temp_size_in_bytes

    def dense(query, key, value, indices):
        return dot_product_attention(
            query, key, value, is_causal=True, implementation="xla"
        )

    short = temporaries(2048, attend_causally)
    long = temporaries(8192, attend_causally)

    # Four times as many queries, with as many keys each.
    assert long <= 5 * short
    assert long <= temporaries(8192, dense) / 10


@jax.jit
def attend(query, key, value, indices):
    return dot_product_attention(query, key, value, key_indices=indices)


def rows_with_nan(output):
    return np.isnan(output).any((0, 2, 3))


TWENTY = Sizes(1, 20, 9, 2, 1, 4, 4, count=3)


@pytest.mark.core
def test_query_without_listed_keys_is_zero_and_repeated_keys_count_once():
    (query, key, value), indices = drawn(TWENTY)
    indices[0, 3] = -1
    indices[0, 4] = (2, 2, -1)

    output = attend(query, key, value, indices)

    np.testing.assert_array_equal(output[0, 3], 0)
    np.testing.assert_allclose(output[0, 4], value[0, 2].repeat(2, 0), rtol=1e-6)


@pytest.mark.core
def test_nan_reaches_only_queries_that_list_its_key():
    (query, key, value), indices = drawn(TWENTY)
    indices[indices == 5] = -1
    indices[0, 7, 1] = 5
    dirty = key.copy()
    dirty[0, 5] = np.nan
    lists_it = np.arange(20) == 7

    clean = attend(query, key, value, indices)
    with_nan = attend(query, dirty, value, indices)

    np.testing.assert_array_equal(rows_with_nan(with_nan), lists_it)
    np.testing.assert_array_equal(with_nan[:, ~lists_it], clean[:, ~lists_it])

    @jax.grad
    def gradient(key):
        output = attend(query, key, value, indices)
        return jnp.where(lists_it[:, None, None], 0, output).sum()

    assert np.isfinite(gradient(dirty)).all()


@pytest.mark.core
def test_traced_index_beyond_the_keys_makes_its_query_nan():
    (query, key, value), indices = drawn(TWENTY)
    indices[0, 8, 0] = 9
    # Under jit, it cannot raise an error, and must not count as the last key.
    output = attend(query, key, value, indices)
    np.testing.assert_array_equal(rows_with_nan(output), np.arange(20) == 8)


ARRAYS, INDICES = drawn(SIZES["blocks of queries"])
REFUSED = Refusals()


def refuses(message, indices):
    REFUSED.add(message, dot_product_attention, *ARRAYS, key_indices=indices)


refuses(r"key_indices must have shape .* but got \(2, 66, 7\)", INDICES[:, :-1])
refuses("at least 1 key per query, but got 0", INDICES[..., :0])
refuses("key heads", INDICES[:, :, None].repeat(3, 2))
refuses(
    "key_indices must be from 0 to 30, .* replace others by -1",
    np.where(INDICES == 3, 31, INDICES),
)
refuses("got values from -2 to", INDICES - 1)
refuses("integer dtype", INDICES.astype(float))


@pytest.mark.core
@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_wrong_indices_raise_errors(message, call):
    refused(message, call)


@pytest.mark.core
def test_only_xla_takes_key_indices():
    message = "key_indices is not supported: pass implementation=None"
    with pytest.raises(NotImplementedError, match=message):
        dot_product_attention(*ARRAYS, key_indices=INDICES, implementation="blockwise")

    explanation = explain_implementation(*ARRAYS, key_indices=INDICES, platform="cuda")
    assert explanation.chosen == "xla"
    assert explanation.variant == "keys gathered for each query"


OF_HEADS = Sizes(3, 20, 30, 4, 2, 8, 8, count=5, by_head=True)


@pytest.mark.core
def test_grouped_heads_have_derivatives_as_on_a_gpu(monkeypatch, request):
    """There, weights are divided by their sum before the product with the values."""
    query = jax.random.normal(jax.random.key(0), (2, 8, 4, 6))
    key = jax.random.normal(jax.random.key(1), (2, 30, 2, 6))
    value = jax.random.normal(jax.random.key(2), (2, 30, 2, 5))
    lists = jax.random.randint(jax.random.key(3), (2, 8, 2, 7), -1, 30)

    def derivatives():
        def attend(query, key, value):
            return dot_product_attention(query, key, value, key_indices=lists)

        arrays = (query, key, value)
        output, pull = jax.vjp(attend, *arrays)
        return jax.jvp(attend, arrays, arrays), pull(jnp.cos(output))

    expected = derivatives()
    compiled_for(monkeypatch, "gpu")
    request.addfinalizer(forget_programs)
    forget_programs()

    close(derivatives(), expected)


def test_lists_can_be_mapped_over():
    arrays, indices = drawn(OF_HEADS)
    want = attend_causally(*arrays, indices)
    got = jax.vmap(attend_causally)(*arrays, indices)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lists_work_in_16_bits(dtype):
    arrays, indices = drawn(OF_HEADS)
    want = attend_causally(*arrays, indices)
    got = attend_causally(*(x.astype(dtype) for x in arrays), indices)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.05)


def test_top_blocks_equal_the_definition():
    """MoBA: a query attends to its own block, and to those before it whose mean key
    fits best.
    """
    (query, key, value), _ = drawn(Sizes(2, 23, 30, 4, 2, 8, 8, count=1))
    offset = 7
    block = 4
    count = 3
    means = [key[:, i : i + block].mean(1) for i in range(0, 30, block)]
    visible = np.zeros((2, 2, 23, 30), bool)
    for b, h, t in np.ndindex(2, 2, 23):
        own = (t + offset) // block
        # The queries of a key head choose together.
        together = query[b, t, 2 * h : 2 * h + 2].sum(0)
        fit = [float((together * mean[b, h]).sum()) for mean in means[:own]]
        best = np.argsort(fit)[::-1][: count - 1]
        for chosen in (*best, own):
            visible[b, h, t, chosen * block : (chosen + 1) * block] = True
    causal = {"is_causal": True, "query_offset": offset}
    mask = visible.repeat(2, 1)
    want = dot_product_attention(query, key, value, mask=mask, **causal)

    blocks = recipes.top_blocks(query, key, block, count, query_offset=offset)
    got = dot_product_attention(query, key, value, **blocks, query_offset=offset)

    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_top_blocks_of_sequences_at_their_own_positions(dtype):
    (query, key, _), _ = drawn(Sizes(2, 5, 30, 4, 2, 8, 8, count=1))
    offsets = jnp.array([0, 17], dtype)

    choose = jax.jit(lambda offset: recipes.top_blocks(query, key, 4, 3, offset))
    got = choose(offsets)["key_indices"]

    for i, offset in enumerate(offsets.tolist()):
        alone = recipes.top_blocks(query[i], key[i], 4, 3, query_offset=offset)
        np.testing.assert_array_equal(got[i], alone["key_indices"])


def test_top_blocks_refuse_what_they_cannot_use():
    (query, key, _), _ = drawn(Sizes(2, 5, 30, 4, 2, 8, 8, count=1))
    refused("block must be an int >= 1", recipes.top_blocks, query, key, 0, 3)
    choose = functools.partial(recipes.top_blocks, query, key, 4, 3)
    refused("query_offset must broadcast to", choose, jnp.zeros((2, 5), int))
    refused("query_offset must have an integer dtype", choose, 1.5)
    choose = functools.partial(recipes.top_blocks, block=4, count=3)
    refused(
        "query heads must be a multiple of .* got 3 and 2", choose, query[:, :, :3], key
    )
    refused("depths must match, but got 7 and 8", choose, query[..., :7], key)


def test_top_blocks_of_no_queries_or_keys():
    (query, key, value), _ = drawn(Sizes(2, 5, 30, 4, 2, 8, 8, count=1))
    for t, s in ((0, 30), (5, 0), (0, 0)):
        arrays = (query[:, :t], key[:, :s])
        blocks = recipes.top_blocks(*arrays, 4, 3)
        got = dot_product_attention(*arrays, value[:, :s], **blocks)
        np.testing.assert_array_equal(got, np.zeros((2, t, 4, 8)))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_top_blocks_choose_blocks_with_non_finite_keys(bad, count):
    """As `Indexer` does: a query that may choose the block returns NaN, and no query
    silently attends to one block less.
    """
    (query, key, value), _ = drawn(Sizes(2, 23, 23, 4, 2, 8, 8, count=1))
    key[0, 5, 1, 3] = bad
    blocks = recipes.top_blocks(query, key, block=4, count=count)
    got = dot_product_attention(query, key, value, **blocks)

    want = np.zeros((2, 23, 4), bool)
    # Its own block, without the queries before the key; with others, all queries after.
    end = 8 if count == 1 else 23
    want[0, 5:end, 2:] = True
    np.testing.assert_array_equal(np.isnan(got).any(-1), want)
    # A list holds as many keys as without NaN.
    listed = recipes.top_blocks(query, np.zeros_like(key), block=4, count=count)
    np.testing.assert_array_equal(
        (blocks["key_indices"] >= 0).sum(-1), (listed["key_indices"] >= 0).sum(-1)
    )


def test_top_blocks_of_other_heads_ignore_a_query_with_nan():
    """Heads that share a key head choose together, by the features that are finite."""
    (query, key, _), _ = drawn(Sizes(1, 23, 23, 4, 2, 8, 8, count=1))
    query[0, 20, 0, 2] = np.nan
    got = recipes.top_blocks(query, key, block=4, count=3)["key_indices"]
    query[0, 20, 0, 2] = 0
    want = recipes.top_blocks(query, key, block=4, count=3)["key_indices"]
    np.testing.assert_array_equal(got, want)


def test_top_blocks_list_blocks_whose_products_overflow():
    """Every query has earlier blocks, so every list is full."""
    query = np.full((1, 40, 1, 2), [[[[1e30, -1e30]]]], np.float32)
    key = np.ones((1, 40, 1, 2), np.float32)
    # Their products are -inf, and inf - inf.
    key[0, :4] = [-1e30, 1e30]
    key[0, 4:8] = 1e30
    indices = recipes.top_blocks(query, key, block=4, count=3)["key_indices"]
    assert (indices[0, 12:] >= 0).sum(-1).min() >= 8 + 1
    assert (indices[0, 12:, 0, :] < 8).sum(-1).max() > 0


def memory_of_top_blocks(length):
    x = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)
    choose = jax.jit(
        lambda query, key: recipes.top_blocks(query, key, 64, 3)["key_indices"]
    )
    analysis = choose.lower(x, x).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.core
def test_memory_of_choosing_blocks_grows_linearly():
    short, long = map(memory_of_top_blocks, (2**14, 2**16))
    assert long < 4.5 * short
    # The products of all queries and blocks.
    assert long < 2**16 * (2**16 // 64) * 4 * 4 / 4


def test_blocks_of_queries_choose_as_one_does():
    """With blocks of one key, a few hundred queries do not fit in memory together."""
    (query, key, _), _ = drawn(Sizes(2, 300, 4096, 4, 2, 8, 8, count=1))
    offset = jnp.array([700, 3])
    got = recipes.top_blocks(query, key, 1, 5, offset)["key_indices"]
    for first in (0, 150):
        some = query[:, first : first + 150]
        want = recipes.top_blocks(some, key, 1, 5, offset + first)["key_indices"]
        np.testing.assert_array_equal(got[:, first : first + 150], want)


def test_top_blocks_are_exported_with_symbolic_lengths():
    """One program for all lengths, also of fewer blocks than `count`."""

    def attend(query, key, value, offset):
        blocks = recipes.top_blocks(query, key, 4, 3, query_offset=offset)
        return dot_product_attention(
            query, key, value, **blocks, query_offset=offset, implementation="xla"
        )

    batch, queries, keys = jax.export.symbolic_shape("batch, queries, keys")
    of_keys = jax.ShapeDtypeStruct((batch, keys, 2, 8), jnp.float32)
    exported = jax.export.export(jax.jit(attend))(
        jax.ShapeDtypeStruct((batch, queries, 4, 8), jnp.float32),
        of_keys,
        of_keys,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    for t, s in ((23, 30), (7, 7), (1, 3)):
        arrays, _ = drawn(Sizes(2, t, s, 4, 2, 8, 8, count=1))
        offset = np.int32(s - t)
        want = attend(*arrays, offset)
        got = exported.call(*arrays, offset)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


CACHES = {
    "float32": {"dtype": jnp.float32},
    "each sequence its own index": {"dtype": jnp.float32, "per_row": True},
    "8 bits": {"dtype": jnp.int8},
    "ring": {"dtype": jnp.float32, "window": 6},
    "ring in 8 bits": {"dtype": jnp.float8_e4m3fn, "window": 6},
}


def window_of(name):
    if "window" not in CACHES[name]:
        return {}
    return {"local_window_size": (CACHES[name]["window"], 0)}


# The largest features, to which the scales of 8 bits are exact.
EXACT_8_BITS = {jnp.int8: 127, jnp.float8_e4m3fn: 448}
SEQUENCE = Sizes(2, 29, 29, 4, 2, 8, 8, count=6, by_head=True)


@pytest.mark.parametrize("name", with_core(CACHES, "each sequence its own index"))
def test_decoding_equals_the_whole_sequence(name):
    cache_options = CACHES[name]
    # Some of the listed positions are in the future, which a cache does not hold yet.
    (query, key, value), indices = drawn(SEQUENCE)
    # Exact in 8 bits.
    key = np.round(key * 4)
    value = np.round(value * 4)
    if cache_options["dtype"] == jnp.float8_e4m3fn:
        key = np.sign(key) * 2.0 ** np.clip(np.abs(key), 0, 3)
        value = np.sign(value) * 2.0 ** np.clip(np.abs(value), 0, 3)
    largest = EXACT_8_BITS.get(cache_options["dtype"], 448)
    key[..., 0] = largest
    value[..., 0] = largest
    query[..., 0] = 0
    options = window_of(name)
    want = dot_product_attention(
        query, key, value, key_indices=indices, is_causal=True, **options
    )

    step = jax.jit(cached_attention, static_argnames="local_window_size")
    cache = KVCache.create(2, 29, num_kv_heads=2, head_size=8, **cache_options)
    first = 0
    # A prompt, single tokens and several together.
    for number in (18, 1, 1, 4, 1, 4):
        part = slice(first, first + number)
        arrays = (query[:, part], key[:, part], value[:, part])
        listed = indices[:, part]
        got, cache = step(*arrays, cache, key_indices=listed, **options)
        np.testing.assert_allclose(got, want[:, part], rtol=0, atol=2e-5 * 448)
        first += number


@pytest.mark.core
def test_wrong_indices_raise_errors_while_decoding():
    (query, key, value), indices = drawn(SEQUENCE)
    cache = KVCache.create(2, 29, num_kv_heads=2, head_size=8)
    arrays = (query[:, :1], key[:, :1], value[:, :1])
    step = functools.partial(cached_attention, *arrays, cache)
    refused("key_indices must have shape", step, key_indices=indices[:, :2])
    refused("key_indices must be from 0 to", step, key_indices=indices[:, :1] - 2)


OF_MODULES = Sizes(2, 9, 9, 4, 2, 8, 8, count=3)


def inputs_of_modules():
    """Inputs of 32 features, lists of keys, and the mask that shows them."""
    (query, _, _), indices = drawn(OF_MODULES)
    return query.reshape(2, 9, 32), indices, shown(indices, OF_MODULES)


LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (flax_mha.MultiHeadAttention, {"num_kv_heads": 2}),
        (flax_mha.MultiHeadLatentAttention, LATENT),
    ],
)
def test_modules_of_nnx_take_lists(kind, options):
    x, indices, mask = inputs_of_modules()
    layer = kind(4, 32, **options, decode=False, rngs=nnx.Rngs(0))

    got = layer(x, is_causal=True, key_indices=indices)
    want = layer(x, is_causal=True, mask=mask)

    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    explanation = layer.explain(x, key_indices=indices)
    assert explanation.variant == "keys gathered for each query"


def test_modules_of_nnx_take_lists_while_decoding():
    x, indices, _ = inputs_of_modules()
    rope = flax_mha.RoPE()
    layer = flax_mha.MultiHeadAttention(
        4, 32, num_kv_heads=2, decode=True, rope=rope, rngs=nnx.Rngs(0)
    )
    want = layer(x, key_indices=indices, is_causal=True, decode=False)

    layer.init_cache(x.shape)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        got = layer(x[:, part], key_indices=indices[:, part])
        np.testing.assert_allclose(got, want[:, part], rtol=0, atol=1e-5)


def test_modules_of_linen_take_lists_and_sow_their_weights_and_scores():
    x, indices, mask = inputs_of_modules()
    layer = flax_mha.linen.MultiHeadDotProductAttention(4, num_kv_heads=2)
    params = layer.init(jax.random.key(0), x)
    sow = {"sow_weights": True, "sow_max_score": True}
    apply = functools.partial(layer.apply, params, x, mutable=["intermediates"], **sow)

    got = apply(key_indices=indices)
    want = apply(mask=mask)

    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
