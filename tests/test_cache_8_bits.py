"""Caches in 8 bits: the numbers that they hold, attention over these numbers, and
refusals.
"""

import functools
import itertools
from typing import NamedTuple

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


def rounding_error(x, largest, dtype):
    """Half a step of int8; half a step of float8 at x, or of its smallest numbers.
    `largest` is that of the numbers that share a scale.
    """
    if dtype == "int8":
        return largest / 254
    return np.maximum(np.abs(x) / 16, largest / 448 / 1024)


def rounded(x, dtype):
    # x is about numbers * scale, with one scale a row.
    numbers, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
    return np.asarray(dequantize(numbers, scale, jnp.float32))


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_numbers_are_off_by_half_a_step(dtype):
    sizes = 10.0 ** np.array([-30, -3, 0, 3, 30])[:, None, None]
    x = np.float32(rng.standard_normal((5, 7, H)) * sizes)

    error = np.abs(rounded(x, dtype) - x)

    largest = np.abs(x).max(-1, keepdims=True)
    assert (error <= rounding_error(x, largest, dtype) * 1.0001).all()


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_zeros_and_extremes(dtype):
    """A row with NaN or infinity becomes NaN."""
    nan = [np.nan, np.nan]
    x = np.float32([[0, 0], [1e-45, 0], [np.nan, 1], [np.inf, 1], [3e38, -3e38]])
    expected = np.float32([[0, 0], [0, 0], nan, nan, [3e38, -3e38]])
    np.testing.assert_allclose(rounded(x, dtype), expected, rtol=1e-6)


@pytest.mark.core
def test_no_maximum_loses_a_nan():
    """In arrays of this size, XLA's largest number of a vector is not NaN."""
    x = np.ones((40, 128), np.float32)
    places = np.arange(40)
    x[places, places] = np.nan
    assert np.isnan(rounded(x, "int8")).all()


class Kind(NamedTuple):
    window: int | None = None
    lengths: list | None = None
    value_size: int | None = None
    # Enough tokens to be read in blocks, or few.
    some: int = 5


KINDS = {
    "one index": Kind(),
    "lengths": Kind(lengths=[20, 13], some=20),
    "ring": Kind(window=WINDOW, some=20),
    "ring of latents": Kind(window=WINDOW, value_size=10),
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("int8", "one index"),
        (FLOAT8, "lengths"),
        core(FLOAT8, "ring"),
        ("int8", "ring of latents"),
    ],
)
def test_attention_over_a_cache_equals_attention_over_its_floats(dtype, name):
    """A prompt, a token, some or many, one; beams, and tokens that are taken back."""
    kind = KINDS[name]
    is_ring = kind.window is not None
    cache = empty(
        dtype,
        per_row=kind.lengths is not None,
        window=kind.window,
        value_size=kind.value_size,
    )
    assert cache.length == (WINDOW + 1 + SPARE if is_ring else S)
    attend = functools.partial(
        jax.jit(cached_attention, static_argnames="local_window_size"),
        local_window_size=kind.window,
    )
    in_full = functools.partial(
        dot_product_attention, is_causal=True, local_window_size=kind.window
    )

    def stored(key, value):
        """What is passed: a cache of latents takes values from its keys."""
        if kind.value_size is None:
            return key, value
        return key, None

    def floats(key, value):
        if kind.value_size is None:
            return key, value
        return key, key[..., : kind.value_size]

    @jax.jit
    def over_floats(query, cache, visible):
        key, value = floats(*cache.floats(jnp.float32))
        return dot_product_attention(query, key, value, mask=visible[:, None])

    # A prompt is not rounded.
    query, *new = tokens(20)
    lengths = None if kind.lengths is None else np.array(kind.lengths)
    output, cache = attend(query, *stored(*new), cache, lengths=lengths)
    expected = jax.jit(in_full)(query, *floats(*new))
    assert_close(output[:, :13], expected[:, :13])

    for number in (1, kind.some, 1):
        query, *new = tokens(number)
        output, cache = attend(query, *stored(*new), cache)
        first = np.broadcast_to(cache.index, B)[:, None] - number
        of_queries = (first + np.arange(number))[..., None]
        of_keys = np.asarray(cache.positions())[:, None]
        reach = S if kind.window is None else kind.window
        distance = of_queries - of_keys
        visible = (of_keys >= 0) & (distance >= 0) & (distance <= reach)
        # In a ring, new tokens are not rounded, unless it is only one.
        tolerance = 0.2 if is_ring and number > 1 else 1e-5
        assert_close(output, over_floats(query, cache, visible), atol=tolerance)

    # The bytes of tokens stay as they are in beams, and after others are taken back
    # and written again.
    beams = jnp.array([1, 1, 0])
    back = cache.truncate(cache.index - 2).take(beams)
    key, value = (x[beams] for x in new)
    again = back.update(*stored(key, value))
    last = int(back.index.max())
    for taken in (back, again):
        positions = np.asarray(taken.positions())
        held = (positions >= max(0, last - WINDOW)) & (positions < last)
        for name in ("key", "value", "scale"):
            found = np.asarray(getattr(taken, name))
            expected = np.asarray(getattr(cache, name)[beams])
            np.testing.assert_array_equal(found[held], expected[held])


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_beside_other_features_of_any_size(dtype):
    """Scores are off by |query| . step, weights by a factor of exp(2 error), values by
    a step, whatever the ratio.

    Ratios are powers of two, so that outputs are equal, bit for bit.
    """
    values = 10
    (old,) = tokens(600, (1,))
    query, new = tokens(1, (N, 1))
    attend = jax.jit(cached_attention)

    def output(ratio):
        factors = np.ones((1, 1, 1, H), np.float32)
        factors[..., values:] = ratio
        cache = empty(dtype, heads=1, value_size=values).update(old * factors, None)
        return attend(query / factors, new * factors, None, cache)[0]

    # One scale for all features would round the smaller ones away.
    got = output(1)
    for ratio in (1 / 128, 16, 128):
        np.testing.assert_array_equal(output(ratio), got)

    # Values and the other features have a scale each.
    query = query[:, 0]
    keys = np.concatenate([old, new], 1)[:, :, 0]
    steps = []
    for part in (keys[..., :values], keys[..., values:]):
        largest = np.abs(part).max(-1, keepdims=True)
        step = rounding_error(part, largest, dtype)
        steps.append(np.broadcast_to(step, part.shape))
    step_of_keys = np.concatenate(steps, -1)

    products = np.einsum("bnh,bsh->bns", query, keys)
    weights = np.asarray(jax.nn.softmax(products / H**0.5))
    off = np.einsum("bnh,bsh->bns", np.abs(query), step_of_keys)
    error = 2 * off.max(-1, keepdims=True) / H**0.5

    def weighted(x):
        return np.einsum("bns,bsv->bnv", weights, x)

    value = keys[..., :values]
    bound_of_weights = np.expm1(error) * weighted(np.abs(value))
    bound_of_values = np.exp(error) * weighted(steps[0])
    difference = np.abs(got[:, 0] - weighted(value))
    assert (difference <= bound_of_weights + bound_of_values + 1e-5).all()


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
    _, key, value = tokens(600)
    spoilt = value if place == "value" else key
    feature = 12 if place == "other feature" else 3
    spoilt[0, 300, 1, feature] = np.nan
    is_latent = place in ("latent", "other feature")
    cache = empty(dtype, value_size=10 if is_latent else None)
    cache = cache.update(key, None if is_latent else value)
    attend = jax.jit(cached_attention)

    for hidden, number in itertools.product((False, True), (4, 40)):
        query, key, value = tokens(number)
        if is_latent:
            value = None
        mask = np.ones(S, bool)
        mask[300] = not hidden
        output, _ = attend(query, key, value, cache, mask=mask)
        # Heads 2 and 3 share key head 1.
        is_nan = np.zeros((B, N), bool)
        is_nan[0, 2:] = not hidden
        np.testing.assert_array_equal(np.isnan(output).any((1, 3)), is_nan)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("dtype", ["bfloat16", FLOAT8])
def test_an_infinite_query_beside_empty_slots_makes_only_its_row_nan(
    dtype, scale, monkeypatch
):
    """Its products are infinite, and NaN where a slot holds zeros."""
    # Products are scaled, not queries.
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    query, *new = (jnp.abs(x) for x in tokens(5, dtype=jnp.bfloat16))
    _, key, value = tokens(S - 8, dtype=jnp.bfloat16)
    cache = empty(dtype).update(jnp.abs(key), jnp.abs(value))
    call = jax.jit(
        functools.partial(cached_attention, local_window_size=(40, 0), scale=scale)
    )

    # The scores are -inf, as those of masked keys.
    query = query.at[0].set(-jnp.sign(scale) * jnp.inf)
    output, _ = call(query, *new, cache)

    assert jnp.isnan(output[0]).all()
    assert jnp.isfinite(output[1]).all()


def with_nine_tokens():
    _, key, value = tokens(9)
    return empty(FLOAT8).update(key, value)


def test_vmap_over_caches_equals_one_call():
    new = tokens(1)
    cache = with_nine_tokens()
    expected, _ = jax.jit(cached_attention)(*new, cache)

    def stacked(x):
        # The other cache holds four tokens less.
        return jnp.stack([x, x]) if x.ndim else jnp.stack([x, x - 4])

    attend = jax.jit(jax.vmap(cached_attention, (None, None, None, 0)))
    output, _ = attend(*new, jax.tree.map(stacked, cache))

    assert_close(output[0], expected)


def test_caches_without_a_batch_axis_and_of_numpy_equal_others():
    new = tokens(1)
    cache = with_nine_tokens()
    attend = jax.jit(cached_attention)
    expected, _ = attend(*new, cache)

    alone = KVCache(cache.key[0], cache.value[0], cache.index, scale=cache.scale[0])
    output, _ = attend(*(x[0] for x in new), alone)
    assert_close(output, expected[0])

    output, _ = cached_attention(*new, jax.tree.map(np.asarray, cache))
    assert_close(output, expected)


def test_kept_branches_keep_their_numbers():
    _, key, value = tokens(1)
    cache = with_nine_tokens().update(key, value)
    branch = cache.keep([3, 5, 9]).floats(jnp.float32)
    for kept, old in zip(branch, cache.floats(jnp.float32), strict=True):
        np.testing.assert_array_equal(kept[:, :6], old[:, [0, 1, 2, 3, 5, 9]])


def test_other_ways_of_reading_equal_the_usual_one():
    """A score_mod with its own derivative, and "blockwise"."""
    new = tokens(1)
    cache = with_nine_tokens()
    expected, _ = jax.jit(cached_attention)(*new, cache)
    same = jax.custom_vjp(lambda score: score)
    same.defvjp(lambda score: (score, None), lambda _, g: (g,))

    def score_mod(score, b, h, q_idx, kv_idx):
        return same(score)

    for more in ({"score_mod": score_mod}, {"implementation": "blockwise"}):
        attend = jax.jit(functools.partial(cached_attention, **more))
        output, _ = attend(*new, cache)
        assert_close(output, expected)


def test_vjp_and_vmap_of_latents():
    old = tokens(9)[1][:, :, :1]
    query, key, _ = tokens(1)
    new = key[:, :, :1]
    latent = empty(FLOAT8, heads=1, value_size=6).update(old, None)
    assert latent.scale.shape == (B, S, 1, 2)
    keys = latent.update(new, None).floats(jnp.float32)[0][:, :10]

    @jax.jit
    def attend(query, cache):
        output, _ = cached_attention(query, new, None, cache)
        return output

    def over_floats(query):
        return dot_product_attention(query, keys, keys[..., :6])

    want, pull = jax.vjp(over_floats, query)
    output, pull_of_cache = jax.vjp(lambda query: attend(query, latent), query)
    assert_close(output, want)
    assert_close(*pull(want), *pull_of_cache(want))

    twice = jax.tree.map(lambda x: jnp.stack([x, x]), latent)
    outputs = jax.vmap(attend, (None, 0))(query, twice)
    assert_close(outputs, jnp.stack([want, want]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_have_the_gradient_of_a_cache_of_floats(dtype):
    """Cached keys and values have none."""
    query, key, value = tokens(1)
    _, *old = tokens(9)
    cache = empty(dtype, 9 + 1).update(*old)
    floats = cache.update(key, value).floats(jnp.float32)

    def total(*new):
        output, _ = cached_attention(*new, cache)
        return jnp.sum(jnp.sin(output))

    def total_of_floats(query):
        return jnp.sum(jnp.sin(dot_product_attention(query, *floats)))

    got = jax.jit(jax.grad(total))(query, key, value)
    assert_close(got, jax.grad(total_of_floats)(query))
    message = f"a cache with dtype {dtype} is not differentiable; use a"
    for argument in (1, 2):
        gradient = jax.jit(jax.grad(total, argument))
        with pytest.raises(NotImplementedError, match=message):
            gradient(query, key, value)


@pytest.mark.parametrize(("dtype", "foreign"), [core("int8", False), (FLOAT8, True)])
def test_modules_decode_as_attention_over_the_floats_of_their_caches(dtype, foreign):
    """Those of nnx and linen, which keep their scales in a variable."""
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

    step_of_nnx = functools.partial(nnx.jit(lambda module, x: module(x)), module)
    output = in_parts(linen_step(layer, variables), x, (9, 1, 1))
    assert_close(in_parts(step_of_nnx, x, (9, 1, 1)), output)

    whole = jax.jit(layer.clone(decode=False).apply)
    exact = whole(params, x, mask=np.tri(11, dtype=bool))
    assert_close(output, exact, atol=0.2)

    cache = variables["cache"]
    assert cache["cached_key"].dtype == module.cached_key.dtype == dtype
    assert cache["cached_scale"].shape == module.cached_scale.shape == (B, 40, N, 2)
    module.init_cache(slots)
    assert module.cached_scale is None


@pytest.mark.core
def test_scales_must_fit_the_dtype_and_the_shape():
    numbers = jnp.zeros((B, S, K, H), jnp.int8)
    scales = jnp.ones((B, S, K, 1))
    query, key, value = tokens(1)
    shape = r"scale must have shape \(2, 700, 2, 2\) for"

    unscaled = KVCache(numbers, numbers, jnp.int32(0))
    message = f"{shape} 8-bit keys and values.*, but got None for int8; use K"
    refused(message, cached_attention, query, key, value, unscaled)

    _, *floats = tokens(9)
    scaled = KVCache(*floats, jnp.int32(0), scale=scales[:, :9])
    message = r"must be None for other dtypes, but got \(2, 9, 2, 1\) for float32"
    refused(message, scaled.update, key, value)

    latents = KVCache(numbers, numbers[..., :0], 0, None, 6, scales)
    message = shape + r" .*, but got \(2, 700, 2, 1\) for int8"
    refused(message, cached_attention, query, key, None, latents)
