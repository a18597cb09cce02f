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
FUNCTION = {
    "causal, soft cap, largest score": {
        "is_causal": True,
        "logits_soft_cap": 2.0,
        "return_max_score": True,
    },
    "queries without keys": {
        "is_causal": True,
        "query_offset": -2,
        "return_residual": True,
        "return_max_score": True,
    },
    "lengths": LENGTHS,
    "lengths, sinks of -inf": LENGTHS | {"sinks": np.full(N, -np.inf, np.float32)},
    "all masked": {"mask": np.zeros((B, 1, T, T), bool)},
    "mask function": {
        "mask": masks.FunctionMask(
            lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0
        )
    },
    "bias of -inf": {
        "bias": np.full((B, N, T, T), -np.inf, np.float32),
        "sinks": np.zeros(N, np.float32),
    },
    "score_mod, dropout": {
        "score_mod": lambda score, b, h, q_idx, kv_idx: jnp.where(
            q_idx > kv_idx, score, -jnp.inf
        ),
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(0),
    },
}


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("name", with_core(FUNCTION, "lengths"))
def test_function(name, implementation):
    attend = functools.partial(
        dot_product_attention, implementation=implementation, **FUNCTION[name]
    )

    def loss(arrays):
        results = jax.tree.leaves(attend(*arrays))
        return jnp.sum(results[0] ** 2)

    attend(QUERY, KEY, VALUE)
    gradients = jax.grad(loss)((QUERY, KEY, VALUE))
    assert all(np.isfinite(x).all() for x in gradients)


def test_lists_of_keys():
    indices = np.random.default_rng(0).integers(-1, T, (B, T, 3)).astype(np.int32)
    assert np.isfinite(
        dot_product_attention(QUERY, KEY, VALUE, key_indices=indices)
    ).all()


CACHES = {
    "plain": {},
    "ring": {"window": 8},
    "each sequence, ring": {"window": 8, "per_row": True},
    "8 bits": {"dtype": jnp.int8},
    "8 bits, ring": {"dtype": jnp.int8, "window": 8},
}


@pytest.mark.parametrize("name", with_core(CACHES, "each sequence, ring"))
def test_cache(name):
    cache = KVCache.create(B, 100, num_kv_heads=K, head_size=H, **CACHES[name])
    lengths = np.int32([6, 3]) if "each" in name else None
    window = CACHES[name].get("window")
    step = functools.partial(cached_attention, local_window_size=window)
    output, cache = step(QUERY, KEY, VALUE, cache, lengths=lengths)
    for _ in range(3):
        output, cache = step(QUERY[:, :1], KEY[:, :1], VALUE[:, :1], cache)
    cache = cache.take([1, 0]).truncate(cache.take([1, 0]).index - 2)
    if "ring" not in name:
        cache = cache.keep([3, 5])
    output, cache = step(QUERY[:, :1], KEY[:, :1], VALUE[:, :1], cache)
    assert np.isfinite(output).all()


def test_ring_that_lost_tokens():
    """Their slots hold NaN until they are written again."""
    cache = KVCache.create(B, 100, num_kv_heads=K, head_size=H, window=6)
    for _ in range(cache.length // T + 2):
        cache = cache.update(KEY, VALUE)
    cache = cache.truncate(cache.index - 2)
    with jax.debug_nans(False):
        assert np.isnan(cache.key).any()
    output, _ = cached_attention(
        QUERY[:, :1], KEY[:, :1], VALUE[:, :1], cache, local_window_size=6
    )
    assert np.isfinite(output).all()


SOWS = {"sow_weights": True, "sow_max_score": True}
MODULE = {
    "sows": SOWS,
    "sows, causal, queries without keys": SOWS
    | {"is_causal": True, "lengths": np.int32([4, 0])},
    "sows, all masked": SOWS | {"mask": np.zeros((B, 1, T, T), bool)},
    "mask of numbers": {"mask": np.ones((B, 1, T, T), np.float32), "sow_weights": True},
    "segments, soft cap": {"segment_ids": np.int32([[0, 0, 1, 1, 2, 2]] * B)},
}
OPTIONS = {
    "sinks": True,
    "normalize_qk": True,
    "gate": True,
    "rope": flax_mha.RoPE(),
    "dropout_rate": 0.3,
}


@pytest.mark.parametrize("name", MODULE)
def test_module_of_nnx(name):
    layer = flax_mha.MultiHeadAttention(
        N, N * H, decode=False, rngs=nnx.Rngs(0), **OPTIONS
    )

    def attend(layer):
        capturing = nnx.capture(layer, nnx.Intermediate)
        output, _ = capturing(X, deterministic=False, rngs=nnx.Rngs(1), **MODULE[name])
        return output

    assert np.isfinite(attend(layer)).all()
    gradients = nnx.grad(lambda layer: jnp.sum(attend(layer) ** 2))(layer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", with_core(MODULE, "sows"))
def test_module_of_linen(name):
    layer = linen.MultiHeadDotProductAttention(num_heads=N, normalize_qk=True)
    variables = layer.init(jax.random.key(0), X)
    output, _ = layer.apply(variables, X, mutable=["intermediates"], **MODULE[name])
    assert np.isfinite(output).all()


def test_decoding_that_sows():
    layer = flax_mha.MultiHeadAttention(N, N * H, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(X.shape)
    for i in range(3):
        output, _ = nnx.capture(layer, nnx.Intermediate)(X[:, i : i + 1], **SOWS)
    assert np.isfinite(output).all()
