"""Queries that list their keys: results equal those of a mask that shows these keys,
and memory is linear.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, refused
from flax import nnx
from marks import core, with_core

import flax_mha
from flax_mha import KVCache, dot_product_attention, explain_implementation, recipes
from flax_mha.cache import cached_attention

# Batch, T, S, N, K, H, Hv, k, and whether each key head has a list of its own.
SIZES = {
    "few queries": (2, 3, 40, 2, 2, 8, 8, 5, True),
    "blocks of queries": (2, 67, 31, 4, 2, 8, 5, 7, False),
    "one key a query": (1, 40, 9, 2, 1, 4, 4, 1, False),
    "one key head of many features": (1, 33, 50, 6, 1, 24, 16, 9, False),
}
SLOPES = jnp.array([0.3, -0.2, 0.1, 0.4, 0.5, -0.6])
CALLS = {
    "plain": lambda sizes: {},
    "causal, lengths, sinks": lambda sizes: {
        "is_causal": True,
        "query_offset": 4,
        "key_value_seq_lengths": jnp.arange(sizes[0]) * 7 + 9,
        "sinks": jnp.linspace(-1, 1, sizes[3]),
    },
    "window, segments, soft cap, dropout": lambda sizes: {
        "local_window_size": (20, 5),
        "query_segment_ids": jnp.arange(sizes[1])[None].repeat(sizes[0], 0) // 30,
        "key_value_segment_ids": jnp.arange(sizes[2])[None].repeat(sizes[0], 0) // 30,
        "logits_soft_cap": 1.5,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(3),
    },
    "score_mod, bias, mask": lambda sizes: {
        "score_mod": lambda s, b, h, i, j: (
            s + SLOPES[h].astype(s.dtype) * (i - j).astype(s.dtype)
        ),
        "bias": jnp.cos(jnp.arange(sizes[3] * sizes[1] * sizes[2])).reshape(
            1, sizes[3], sizes[1], sizes[2]
        ),
        "mask": (jnp.arange(sizes[1] * sizes[2]) % 5 > 0).reshape(
            1, 1, sizes[1], sizes[2]
        ),
    },
}
CALLS["all of them"] = lambda sizes: {
    **CALLS["causal, lengths, sinks"](sizes),
    **CALLS["window, segments, soft cap, dropout"](sizes),
    **CALLS["score_mod, bias, mask"](sizes),
    "key_value_seq_lengths": sizes[2] - jnp.arange(sizes[0]) * 3,
}


def drawn(sizes, seed, dtype=np.float64):
    """Query, key, value and lists of keys, some of which are repeated or -1."""
    rng = np.random.default_rng(seed)
    batch, t, s, n, k, h, hv, count, by_head = sizes
    shapes = (batch, t, n, h), (batch, s, k, h), (batch, s, k, hv)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return arrays, rng.integers(
        -1, s, (batch, t, k, count) if by_head else (batch, t, count), np.int32
    )


def shown(indices, sizes):
    """The mask [B, N, T, S] that shows the listed keys."""
    s, n = sizes[2:4]
    by_head = indices if indices.ndim == 4 else indices[:, :, None]
    visible = (by_head[..., None] == np.arange(s)).any(-2)
    return jnp.asarray(
        np.repeat(np.moveaxis(visible, 2, 1), n // visible.shape[2], axis=1)
    )


def everything(attend, *arrays):
    """Output and log-sum-exp, a tangent, gradients and their tangents."""

    def loss(*arrays):
        output = attend(*arrays)[0]
        return (
            output
            * jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape)
        ).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    tangents = tuple(jnp.sin(x) for x in arrays)
    tangent = jax.jvp(lambda *arrays: attend(*arrays)[0], arrays, tangents)
    return attend(*arrays), tangent, jax.jvp(gradient, arrays, tangents)


CASES = [
    core("blocks of queries", "plain", "float32"),
    ("blocks of queries", "all of them", "float32"),
]


@pytest.mark.parametrize(
    ("name", "call", "dtype"), [*CASES, *itertools.product(SIZES, CALLS, ["float64"])]
)
def test_equal_to_a_mask_that_shows_these_keys(name, call, dtype):
    sizes = SIZES[name]
    with jax.enable_x64(dtype == "float64"):
        options = CALLS[call](sizes)
        options = {
            k: x.astype(dtype) if getattr(x, "dtype", None) == jnp.float32 else x
            for k, x in options.items()
        }
        given = options.pop("mask", None)

        @functools.partial(jax.jit, static_argnums=0)
        def run(way, indices, mask, *arrays):
            shows = {"key_indices": indices, "mask": given}
            if way == "mask":
                shows = {
                    "mask": mask if given is None else mask & given,
                    "implementation": "xla",
                }
            attend = functools.partial(
                dot_product_attention, return_residual=True, **shows, **options
            )
            return everything(attend, *arrays)

        for seed in range(3):
            arrays, indices = drawn(sizes, seed, dtype)
            got, want = (
                run(way, indices, shown(indices, sizes), *arrays)
                for way in ("indices", "mask")
            )
            close(got, want, 1e-9 if dtype == "float64" else 1e-5, at_least=1)


@pytest.mark.core
def test_memory_is_linear_and_a_tenth_of_the_dense_memory():
    def temporaries(length, attend):
        x = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)
        indices = jax.ShapeDtypeStruct((1, length, 64), jnp.int32)
        loss = jax.grad(lambda arrays, indices: attend(*arrays, indices).sum())
        return (
            jax.jit(loss)
            .lower((x, x, x), indices)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    def listed(query, key, value, indices):
        return dot_product_attention(
            query, key, value, key_indices=indices, is_causal=True
        )

    def dense(query, key, value, indices):
        return dot_product_attention(
            query, key, value, is_causal=True, implementation="xla"
        )

    short, long = (temporaries(length, listed) for length in (2048, 8192))
    assert long <= 5 * short
    assert long <= temporaries(8192, dense) / 10


@pytest.mark.core
def test_lists_without_keys_masked_numbers_and_unknown_indices():
    (query, key, value), indices = drawn(
        (1, 20, 9, 2, 1, 4, 4, 3, False), 0, np.float32
    )
    indices[0, 3], indices[0, 4] = -1, (2, 2, -1)
    indices[indices == 5] = -1
    indices[0, 7, 1] = 5
    dirty = key.copy()
    dirty[0, 5] = np.nan
    attend = jax.jit(
        lambda *arrays, indices=indices: dot_product_attention(
            *arrays, key_indices=indices
        )
    )
    clean = attend(query, key, value)
    with_nan = attend(query, dirty, value)
    np.testing.assert_array_equal(clean[0, 3], 0)
    # A repeated key counts once.
    np.testing.assert_allclose(clean[0, 4], value[0, 2].repeat(2, 0), rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(with_nan).any((0, 2, 3)), np.arange(20) == 7)
    np.testing.assert_array_equal(np.delete(with_nan, 7, 1), np.delete(clean, 7, 1))
    gradient = jax.grad(
        lambda key: jnp.where(
            jnp.arange(20)[:, None, None] == 7, 0, attend(query, key, value)
        ).sum()
    )
    assert np.isfinite(gradient(dirty)).all()
    indices[0, 8, 0] = 9
    beyond = jax.jit(lambda indices: attend(query, key, value, indices=indices))(
        indices
    )
    np.testing.assert_array_equal(np.isnan(beyond).any((0, 2, 3)), np.arange(20) == 8)


@pytest.mark.core
def test_errors_and_explanation():
    (query, key, value), indices = drawn(SIZES["blocks of queries"], 0, np.float32)
    call = functools.partial(dot_product_attention, query, key, value)
    for wrong, error in (
        (indices[:, :-1], r"key_indices must have shape .* but got \(2, 66, 7\)"),
        (indices[..., :0], "at least 1 key per query, but got 0"),
        (indices[:, :, None].repeat(3, 2), "key heads"),
        (
            np.where(indices == 3, 31, indices),
            "key_indices must be from 0 to 30, .* replace others by -1",
        ),
        (indices - 1, "got values from -2 to"),
        (indices.astype(float), "integer dtype"),
        (0, "key_indices must have shape"),
    ):
        refused(error, call, key_indices=wrong)
    with pytest.raises(
        NotImplementedError,
        match="key_indices is not supported: pass implementation=None",
    ):
        call(key_indices=indices, implementation="blockwise")
    explanation = explain_implementation(
        query, key, value, key_indices=indices, platform="cuda"
    )
    assert (explanation.chosen, explanation.variant) == (
        "xla",
        "keys gathered for each query",
    )


def test_vmap_and_16_bits():
    (query, key, value), indices = drawn(
        (3, 20, 30, 4, 2, 8, 8, 5, True), 0, np.float32
    )

    def attend(*arrays):
        return dot_product_attention(*arrays[:3], key_indices=arrays[3], is_causal=True)

    want = attend(query, key, value, indices)
    np.testing.assert_allclose(
        jax.vmap(attend)(query, key, value, indices), want, rtol=0, atol=1e-6
    )
    for dtype in (jnp.bfloat16, jnp.float16):
        got = attend(*(x.astype(dtype) for x in (query, key, value)), indices)
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.05)


def test_top_blocks_equal_the_definition():
    """MoBA: a query attends to its own block, and to those before it whose mean key
    fits best.
    """
    (query, key, value), _ = drawn((2, 23, 30, 4, 2, 8, 8, 1, False), 0, np.float32)
    offset = 7
    block = 4
    count = 3
    means = [key[:, i : i + block].mean(1) for i in range(0, 30, block)]
    visible = np.zeros((2, 2, 23, 30), bool)
    for b, h, t in np.ndindex(2, 2, 23):
        own = (t + offset) // block
        fit = [
            float((query[b, t, 2 * h : 2 * h + 2].sum(0) * mean[b, h]).sum())
            for mean in means[:own]
        ]
        for chosen in (*np.argsort(fit)[::-1][: count - 1], own):
            visible[b, h, t, chosen * block : (chosen + 1) * block] = True
    want = dot_product_attention(
        query,
        key,
        value,
        mask=visible.repeat(2, 1),
        is_causal=True,
        query_offset=offset,
    )
    blocks = recipes.top_blocks(query, key, block, count, query_offset=offset)
    got = dot_product_attention(query, key, value, **blocks, query_offset=offset)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    refused("block must be an int >= 1", recipes.top_blocks, query, key, 0, 3)


CACHES = {
    "float32": {"dtype": jnp.float32},
    "each sequence its own index": {"dtype": jnp.float32, "per_row": True},
    "8 bits": {"dtype": jnp.int8},
    "ring": {"dtype": jnp.float32, "window": 6},
    "ring in 8 bits": {"dtype": jnp.float8_e4m3fn, "window": 6},
}


@pytest.mark.parametrize("name", with_core(CACHES, "each sequence its own index"))
def test_decoding_equals_the_whole_sequence(name):
    """A prompt, single tokens and several at once; lists of positions, some of which
    are in the future.
    """
    total = 29
    window = CACHES[name].get("window")
    (query, key, value), indices = drawn(
        (2, total, total, 4, 2, 8, 8, 6, True), 0, np.float32
    )
    # Exact in 8 bits, as the largest is 127 or 448.
    key, value = (np.round(x * 4) for x in (key, value))
    key[..., 0], value[..., 0] = (127, 127) if name == "8 bits" else (448, 448)
    query[..., 0], exact = 0, {"atol": 2e-5 * 448}
    if "ring in" in name:
        key, value = (
            np.sign(x) * 2.0 ** np.clip(np.abs(x), 0, 3) for x in (key, value)
        )
        key[..., 0] = value[..., 0] = 448
    options = {} if window is None else {"local_window_size": (window, 0)}
    want = dot_product_attention(
        query, key, value, key_indices=indices, is_causal=True, **options
    )
    empty = KVCache.create(2, total, num_kv_heads=2, head_size=8, **CACHES[name])
    step = jax.jit(cached_attention, static_argnames="local_window_size")
    first = 0
    cache = empty
    for number in (18, 1, 1, 4, 1, 4):
        part = slice(first, first + number)
        got, cache = step(
            query[:, part],
            key[:, part],
            value[:, part],
            cache,
            key_indices=indices[:, part],
            **options,
        )
        np.testing.assert_allclose(got, want[:, part], rtol=0, **exact)
        first += number
    for wrong, error in (
        (indices[:, :2], "must have shape"),
        (indices[:, :1] - 2, "must be from 0 to"),
    ):
        with pytest.raises(ValueError, match=f"key_indices {error}"):
            cached_attention(
                query[:, :1],
                key[:, :1],
                value[:, :1],
                empty,
                key_indices=wrong,
                **options,
            )


def test_modules_take_lists():
    (x, *_), indices = drawn((2, 9, 9, 4, 2, 8, 8, 3, False), 0, np.float32)
    x = x.reshape(2, 9, 32)
    mask = shown(indices, (2, 9, 9, 4, 2))
    latent = {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    for layer in (
        flax_mha.MultiHeadAttention(
            4, 32, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0)
        ),
        flax_mha.MultiHeadLatentAttention(
            4, 32, **latent, decode=False, rngs=nnx.Rngs(0)
        ),
    ):
        got, want = (
            layer(x, is_causal=True, **given)
            for given in ({"key_indices": indices}, {"mask": mask})
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert (
        layer.explain(x, key_indices=indices).variant == "keys gathered for each query"
    )
    layer = flax_mha.MultiHeadAttention(
        4, 32, num_kv_heads=2, decode=True, rope=flax_mha.RoPE(), rngs=nnx.Rngs(0)
    )
    want = layer(x, key_indices=indices, is_causal=True, decode=False)
    layer.init_cache(x.shape)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        got = layer(x[:, part], key_indices=indices[:, part])
        np.testing.assert_allclose(got, want[:, part], rtol=0, atol=1e-5)
    layer = flax_mha.linen.MultiHeadDotProductAttention(4, num_kv_heads=2)
    params = layer.init(jax.random.key(0), x)
    sow = {"sow_weights": True, "sow_max_score": True}
    apply = functools.partial(layer.apply, params, x, mutable=["intermediates"], **sow)
    for got, want in zip(
        *map(jax.tree.leaves, (apply(key_indices=indices), apply(mask=mask))),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
