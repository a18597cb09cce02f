"""With `jax_debug_nans`, no call with finite arguments stops, also if JAX runs
operations one by one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import with_core

import flax_mha
from flax_mha import KVCache, dot_product_attention, linen, masks
from flax_mha.cache import cached_attention

B = 2
T = 6
N = 4
K = 2
H = 8


# Every test that ends shows that nothing stopped.
@pytest.fixture(autouse=True)
def debug_nans():
    with jax.debug_nans(True):
        yield


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


QUERY = normal(B, T, N, H)
KEY = normal(B, T, K, H)
VALUE = normal(B, T, K, H)
X = normal(B, T, N * H)
LENGTHS = {
    "key_value_seq_lengths": np.int32([3, 0]),
    "query_seq_lengths": np.int32([6, 2]),
}
CALLS = {}
CALLS["causal, soft cap, largest score"] = {
    "is_causal": True,
    "logits_soft_cap": 2.0,
    "return_max_score": True,
}
CALLS["queries without keys"] = {
    "is_causal": True,
    "query_offset": -2,
    "return_residual": True,
    "return_max_score": True,
}
CALLS["lengths"] = LENGTHS
CALLS["lengths, sinks of -inf"] = LENGTHS | {"sinks": np.full(N, -np.inf, np.float32)}
CALLS["all masked"] = {"mask": np.zeros((B, 1, T, T), bool)}
CALLS["mask function"] = {
    "mask": masks.FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0)
}
CALLS["bias of -inf"] = {
    "bias": np.full((B, N, T, T), -np.inf, np.float32),
    "sinks": np.zeros(N, np.float32),
}


def only_earlier(score, b, h, q_idx, kv_idx):
    return jnp.where(q_idx > kv_idx, score, -jnp.inf)


CALLS["score_mod, dropout"] = {
    "score_mod": only_earlier,
    "dropout_rate": 0.3,
    "dropout_rng": jax.random.key(0),
}


def assert_finite(tree):
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("name", with_core(CALLS, "lengths"))
def test_call_and_its_gradients_raise_no_error(name, implementation):
    attend = functools.partial(
        dot_product_attention, implementation=implementation, **CALLS[name]
    )

    def loss(arrays):
        output, *_ = jax.tree.leaves(attend(*arrays))
        return jnp.sum(output**2)

    attend(QUERY, KEY, VALUE)
    assert_finite(jax.grad(loss)((QUERY, KEY, VALUE)))


def test_lists_of_keys_raise_no_error():
    indices = np.random.default_rng(0).integers(-1, T, (B, T, 3)).astype(np.int32)
    assert_finite(dot_product_attention(QUERY, KEY, VALUE, key_indices=indices))


CACHES = {
    "plain": {},
    "ring": {"window": 8},
    "each sequence, ring": {"window": 8, "per_row": True},
    "8 bits": {"dtype": jnp.int8},
    "8 bits, ring": {"dtype": jnp.int8, "window": 8},
}


TOKEN = (QUERY[:, :1], KEY[:, :1], VALUE[:, :1])


@pytest.mark.parametrize("name", with_core(CACHES, "each sequence, ring"))
def test_prompt_tokens_and_changes_of_a_cache_raise_no_error(name):
    options = CACHES[name]
    cache = KVCache.create(B, 100, num_kv_heads=K, head_size=H, **options)
    lengths = np.int32([6, 3]) if "per_row" in options else None
    step = functools.partial(cached_attention, local_window_size=options.get("window"))

    output, cache = step(QUERY, KEY, VALUE, cache, lengths=lengths)
    for _ in range(3):
        output, cache = step(*TOKEN, cache)
    cache = cache.take([1, 0])
    cache = cache.truncate(cache.index - 2)
    # A ring keeps only its last slots.
    if "window" not in options:
        cache = cache.keep([3, 5])
    output, cache = step(*TOKEN, cache)

    assert_finite(output)


def test_ring_that_lost_tokens_raises_no_error():
    """Their slots hold NaN until they are written again."""
    cache = KVCache.create(B, 100, num_kv_heads=K, head_size=H, window=6)
    for _ in range(cache.length // T + 2):
        cache = cache.update(KEY, VALUE)
    cache = cache.truncate(cache.index - 2)
    with jax.debug_nans(False):
        assert np.isnan(cache.key).any()

    output, _ = cached_attention(*TOKEN, cache, local_window_size=6)

    assert_finite(output)


SOWS = {"sow_weights": True, "sow_max_score": True}
MODULE = {}
MODULE["sows"] = SOWS
MODULE["sows, causal, queries without keys"] = SOWS | {
    "is_causal": True,
    "lengths": np.int32([4, 0]),
}
MODULE["sows, all masked"] = SOWS | {"mask": np.zeros((B, 1, T, T), bool)}
MODULE["mask of numbers"] = {
    "mask": np.ones((B, 1, T, T), np.float32),
    "sow_weights": True,
}
MODULE["segments, soft cap"] = {"segment_ids": np.int32([[0, 0, 1, 1, 2, 2]] * B)}
OPTIONS = {
    "sinks": True,
    "normalize_qk": True,
    "gate": True,
    "rope": flax_mha.RoPE(),
    "dropout_rate": 0.3,
}


@pytest.mark.parametrize("name", MODULE)
def test_module_of_nnx_raises_no_error(name):
    layer = flax_mha.MultiHeadAttention(
        N, N * H, decode=False, rngs=nnx.Rngs(0), **OPTIONS
    )

    def attend(layer):
        capturing = nnx.capture(layer, nnx.Intermediate)
        output, _ = capturing(X, deterministic=False, rngs=nnx.Rngs(1), **MODULE[name])
        return output

    assert_finite(attend(layer))
    assert_finite(nnx.grad(lambda layer: jnp.sum(attend(layer) ** 2))(layer))


@pytest.mark.parametrize("name", with_core(MODULE, "sows"))
def test_module_of_linen_raises_no_error(name):
    layer = linen.MultiHeadDotProductAttention(num_heads=N, normalize_qk=True)
    variables = layer.init(jax.random.key(0), X)
    output, _ = layer.apply(variables, X, mutable=["intermediates"], **MODULE[name])
    assert_finite(output)


def test_decoding_that_sows_raises_no_error():
    layer = flax_mha.MultiHeadAttention(N, N * H, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(X.shape)
    for i in range(3):
        output, _ = nnx.capture(layer, nnx.Intermediate)(X[:, i : i + 1], **SOWS)
    assert_finite(output)
