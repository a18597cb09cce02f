"""Caches in 8 bits: the numbers that they hold, attention over these numbers, and
refusals.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_parts, linen_step, refused
from flax import nnx
from marks import core

import flax_mha
from flax_mha import dot_product_attention, linen
from flax_mha._src.cache.kv_cache import SPARE, KVCache
from flax_mha._src.core import tracing
from flax_mha._src.core.eight_bits import dequantize, quantize
from flax_mha.cache import cached_attention

B = 2
N = 4
K = 2
H = 16
S = 700
WINDOW = 5
FLOAT8 = "float8_e4m3fn"
DTYPES = ("int8", FLOAT8)
rng = np.random.default_rng(0)


assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def tokens(number, heads=(N, K, K), dtype=jnp.float32):
    return [rng.standard_normal((B, number, n, H)).astype(dtype) for n in heads]


def empty(dtype, slots=S, heads=K, **given):
    return KVCache.create(B, slots, heads, H, dtype, **given)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized(dtype):
    """Half a step of int8, a sixteenth of float8's own number; zeros, small and large
    rows, and NaN and infinity.
    """
    x = np.float32(
        rng.standard_normal((5, 7, H))
        * 10.0 ** np.array([-30, -3, 0, 3, 30])[:, None, None]
    )
    numbers, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
    error = abs(dequantize(numbers, scale, jnp.float32) - x)
    largest = abs(x).max(-1, keepdims=True)
    if dtype == "int8":
        step = largest / 254
    else:
        step = np.maximum(abs(x) / 16, largest / 448 / 1024)
    assert (error <= step * 1.0001).all()
    x = np.float32([[0, 0], [1e-45, 0], [np.nan, 1], [np.inf, 1], [3e38, -3e38]])
    got = np.asarray(
        dequantize(*quantize(jnp.asarray(x), jnp.dtype(dtype)), jnp.float32)
    )
    np.testing.assert_allclose(
        got,
        np.float32([[0, 0], [0, 0], [np.nan] * 2, [np.nan] * 2, [3e38, -3e38]]),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("int8", "one index"),
        (FLOAT8, "lengths"),
        core(FLOAT8, "ring"),
        ("int8", "ring of latents"),
    ],
)
def test_attention_over_a_cache_equals_attention_over_its_floats(dtype, kind):
    """A prompt, a token, some or many, one; bytes; beams; tokens that are taken back."""
    window = WINDOW if "ring" in kind else None
    lengths = np.array([20, 13]) if kind == "lengths" else None
    value_size = 10 if "latents" in kind else None
    cache = empty(
        dtype, per_row=kind == "lengths", window=window, value_size=value_size
    )
    assert cache.length == (WINDOW + 1 + SPARE if "ring" in kind else S)
    attend = functools.partial(
        jax.jit(cached_attention, static_argnames="local_window_size"),
        local_window_size=window,
    )

    def stored(key, value):
        return key, None if value_size else value

    def floats(key, value):
        return key, key[..., :value_size] if value_size else value

    @jax.jit
    def over_floats(query, cache, seen):
        return dot_product_attention(
            query, *floats(*cache.floats(jnp.float32)), mask=seen[:, None]
        )

    query, *new = tokens(20)
    output, cache = attend(query, *stored(*new), cache, lengths=lengths)
    in_full = jax.jit(
        functools.partial(
            dot_product_attention, is_causal=True, local_window_size=window
        )
    )
    # A prompt is not rounded.
    assert_close(output[:, :13], in_full(query, *floats(*new))[:, :13])
    for number in (1, 5 if kind in ("one index", "ring of latents") else 20, 1):
        query, *new = tokens(number)
        output, cache = attend(query, *stored(*new), cache)
        positions = np.asarray(cache.positions())[:, None]
        own = (np.broadcast_to(cache.index, B)[:, None] - number + np.arange(number))[
            ..., None
        ]
        seen = (
            (positions >= 0)
            & (positions <= own)
            & (positions >= own - (S if window is None else window))
        )
        # New tokens are not rounded in a ring.
        assert_close(
            output,
            over_floats(query, cache, seen),
            atol=0.2 if "ring" in kind and number > 1 else 1e-5,
        )
    rows = jnp.array([1, 1, 0])
    back = cache.truncate(cache.index - 2).take(rows)
    again = back.update(*stored(*(x[rows] for x in new)))
    for x in (back, again):
        end = int(x.index.max()) - (1 if x is again else 0)
        held = (np.asarray(x.positions()) >= max(0, end - WINDOW)) & (
            np.asarray(x.positions()) < end
        )
        for mine, old in zip(
            (x.key, x.value, x.scale),
            (cache.key, cache.value, cache.scale),
            strict=True,
        ):
            np.testing.assert_array_equal(
                np.asarray(mine)[held], np.asarray(old[jnp.array(rows)])[held]
            )


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_beside_other_features_of_any_size(dtype):
    """Scores are off by |query| . step, weights by a factor of exp(2 error), values by
    a step, whatever the ratio.

    Ratios are powers of two, so that outputs are equal, bit for bit.
    """
    values = 10
    old = tokens(600, (1,))[0]
    (query, new), attend = tokens(1, (N, 1)), jax.jit(cached_attention)

    def output(ratio):
        factors = np.where(np.arange(H) < values, 1, np.float32(ratio)).reshape(
            1, 1, 1, H
        )
        cache = empty(dtype, heads=1, value_size=values).update(old * factors, None)
        return attend(query / factors, new * factors, None, cache)[0]

    got = output(1)
    for ratio in (1 / 128, 16, 128):
        np.testing.assert_array_equal(output(ratio), got)
    keys = np.concatenate([old, new], 1)[:, :, 0]
    parts = np.abs(keys[..., :values]), np.abs(keys[..., values:])
    largest = [np.broadcast_to(x.max(-1, keepdims=True), x.shape) for x in parts]
    int8 = dtype == "int8"
    steps = [
        m / 254 if int8 else np.maximum(x / 16, m / 448 / 1024)
        for x, m in zip(parts, largest, strict=True)
    ]
    exact = [keys[..., :values], np.einsum("bnh,bsh->bns", query[:, 0], keys)]
    error = (
        2
        * np.einsum("bnh,bsh->bns", np.abs(query[:, 0]), np.concatenate(steps, -1)).max(
            -1
        )
        / H**0.5
    )
    weights = np.asarray(jax.nn.softmax(exact[1] / H**0.5))
    of_weights = np.expm1(error)[..., None] * np.einsum(
        "bns,bsv->bnv", weights, parts[0]
    )
    of_values = np.exp(error)[..., None] * np.einsum("bns,bsv->bnv", weights, steps[0])
    want = np.einsum("bns,bsv->bnv", weights, exact[0])
    assert (np.abs(got[:, 0] - want) <= of_weights + of_values + 1e-5).all()


@pytest.mark.parametrize(
    ("dtype", "place"),
    [
        ("int8", "value"),
        (FLOAT8, "key"),
        core("int8", "other feature"),
        (FLOAT8, "latent"),
    ],
)
def test_nan_only_affects_queries_that_attend_to_it(dtype, place):
    key, value = tokens(600)[1:]
    (value if place == "value" else key)[
        0, 300, 1, 12 if place == "other feature" else 3
    ] = np.nan
    latent = place in ("latent", "other feature")
    cache = empty(dtype, value_size=10 if latent else None).update(
        key, None if latent else value
    )
    attend = jax.jit(cached_attention)
    for hidden, number in itertools.product((False, True), (4, 40)):
        query, key, value = (x[:, :number] for x in tokens(40))
        mask = np.arange(S) != (300 if hidden else -1)
        output, _ = attend(query, key, None if latent else value, cache, mask=mask)
        wrong = [[False, False, not hidden, not hidden], [False] * 4]
        np.testing.assert_array_equal(np.isnan(output).any((1, 3)), wrong)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_an_infinite_query_beside_empty_slots(dtype, scale, monkeypatch):
    """Its products are infinite, and NaN where a slot holds zeros; together they make
    its row NaN, and no other.
    """
    # Products are scaled, not queries.
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    query, *new = (jnp.abs(x) for x in tokens(5, dtype=jnp.bfloat16))
    cache = empty(dtype).update(
        *(jnp.abs(x) for x in tokens(S - 8, dtype=jnp.bfloat16)[1:])
    )
    call = jax.jit(
        functools.partial(cached_attention, local_window_size=(40, 0), scale=scale)
    )
    output, _ = call(
        jnp.asarray(query).at[0].set(-jnp.inf if scale > 0 else jnp.inf), *new, cache
    )
    assert jnp.isnan(output[0]).all()
    assert jnp.isfinite(output[1]).all()


def test_transformations():
    """Mapped, in a scan, by NumPy's arrays, over batch axes, without a batch, kept
    branches, values among the keys.
    """
    cache = empty("float8_e4m3fn").update(*tokens(9)[1:])
    new = tokens(1)
    attend = jax.jit(cached_attention)
    want, after = attend(*new, cache)
    mapped = jax.tree.map(
        lambda x: jnp.stack([x, x]) if x.ndim else jnp.stack([x, x - 4]), cache
    )
    assert_close(
        jax.jit(jax.vmap(cached_attention, (None, None, None, 0)))(*new, mapped)[0][0],
        want,
    )
    alone = KVCache(cache.key[0], cache.value[0], cache.index, scale=cache.scale[0])
    assert_close(attend(*(x[0] for x in new), alone)[0], want[0])
    assert_close(cached_attention(*new, jax.tree.map(np.asarray, cache))[0], want)
    branch = after.keep([3, 5, 9]).floats(jnp.float32)
    for mine, old in zip(branch, after.floats(jnp.float32), strict=True):
        np.testing.assert_array_equal(mine[:, :6], old[:, [0, 1, 2, 3, 5, 9]])
    score_mod = jax.custom_vjp(lambda score: score)
    score_mod.defvjp(lambda score: (score, None), lambda _, g: (g,))
    for more in (
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score_mod(score)},
        {"implementation": "blockwise"},
    ):
        assert_close(
            jax.jit(functools.partial(cached_attention, **more))(*new, cache)[0], want
        )


def test_transformations_of_latents():
    latent = empty("float8_e4m3fn", heads=1, value_size=6).update(
        tokens(9)[1][:, :, :1], None
    )
    assert latent.scale.shape == (B, S, 1, 2)
    (query, key, _), attend = (
        tokens(1),
        jax.jit(lambda query, *cached: cached_attention(query, *cached)[0]),
    )
    new = key[:, :, :1]
    keys = latent.update(key[:, :, :1], None).floats(jnp.float32)[0][:, :10]
    want, pull = jax.vjp(
        lambda query: dot_product_attention(query, keys, keys[..., :6]), query
    )
    output, pull_of_cache = jax.vjp(
        lambda query: attend(query, new, None, latent), query
    )
    assert_close(output, want)
    assert_close(*pull(want), *pull_of_cache(want))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), latent)
    assert_close(
        jax.vmap(attend, (None, None, None, 0))(query, new, None, twice),
        jnp.stack([want, want]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives(dtype):
    """The gradient of a query is the same as with the cache as floats; cached keys and
    values have none.
    """
    new = tokens(1)
    cache = empty(dtype, 9 + 1).update(*tokens(9)[1:])

    def total(*new):
        return jnp.sum(jnp.sin(cached_attention(*new, cache)[0]))

    floats = cache.update(*new[1:]).floats(jnp.float32)
    want = jax.grad(
        lambda query: jnp.sum(jnp.sin(dot_product_attention(query, *floats)))
    )(new[0])
    assert_close(jax.jit(jax.grad(total))(*new), want)
    for place in (1, 2):
        with pytest.raises(
            NotImplementedError,
            match=f"a cache with dtype {dtype} is not differentiable; use a",
        ):
            jax.jit(jax.grad(total, place))(*new)


@pytest.mark.parametrize(
    ("dtype", "foreign"), [core("int8", False), ("float8_e4m3fn", True)]
)
def test_modules(dtype, foreign):
    """Both give what attention over the floats of their caches gives, and keep their
    scales in a variable.
    """
    x = jnp.asarray(rng.standard_normal((B, 11, 24)), jnp.float32)
    slots = (B, 40, 24)
    options = {"attention_fn": nn.dot_product_attention} if foreign else {}
    layer = linen.MultiHeadDotProductAttention(
        N, decode=True, cache_dtype=dtype, **options
    )
    variables = jax.jit(layer.init)(jax.random.key(0), jnp.zeros(slots))
    params = {"params": variables["params"]}
    module = flax_mha.MultiHeadAttention(
        N, 24, decode=True, rngs=nnx.Rngs(0), **options
    )
    nnx.update(module, params["params"])
    module.init_cache(slots, dtype=dtype)
    exact = jax.jit(layer.clone(decode=False).apply)(
        params, x, mask=np.tri(11, dtype=bool)
    )
    step = nnx.jit(lambda module, x: module(x))
    output = in_parts(linen_step(layer, variables), x, (9, 1, 1))
    assert_close(in_parts(functools.partial(step, module), x, (9, 1, 1)), output)
    assert_close(output, exact, atol=0.2)
    cache = variables["cache"]
    assert cache["cached_key"].dtype == module.cached_key.dtype == dtype
    assert cache["cached_scale"].shape == module.cached_scale.shape == (B, 40, N, 2)
    module.init_cache(slots)
    assert module.cached_scale is None


INT8 = jnp.zeros((B, S, K, H), jnp.int8)
SCALES = jnp.ones((B, S, K, 1))
UNSCALED = KVCache(INT8, INT8, jnp.int32(0))
SCALED = KVCache(*tokens(9)[1:], jnp.int32(0), scale=SCALES[:, :9])
LATENTS = KVCache(INT8, INT8[..., :0], 0, None, 6, SCALES)
SHAPE = r"scale must have shape \(2, 700, 2, 2\) for"
REFUSED = [
    (
        lambda: cached_attention(*tokens(1), UNSCALED),
        f"{SHAPE} 8-bit keys and values.*, but got None for int8; use K",
    ),
    (
        lambda: SCALED.update(*tokens(1)[1:]),
        r"must be None for other dtypes, but got \(2, 9, 2, 1\) for float32",
    ),
    (
        lambda: cached_attention(*tokens(1)[:2], None, LATENTS),
        SHAPE + r" .*, but got \(2, 700, 2, 1\) for int8",
    ),
    (
        lambda: dot_product_attention(tokens(1)[0], INT8, INT8),
        "query, key, value must have the same dtype, one of",
    ),
]


@pytest.mark.core
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    refused(message, call)
