"""Options of modules that change the output of each head before it is projected back to features."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src.core.eight_bits import dequantize_cache, quantize_cache
from flax_mha._src.distributed.split import is_explicit
from flax_mha.cache.kv_cache import KVCache

ACTIVATIONS = {
    "sigmoid": jax.nn.sigmoid,
    "softplus": lambda gate: jax.nn.softplus(gate.astype(jnp.promote_types(gate.dtype, jnp.float32))),  # as in Laguna
}


def apply_gate(x: Float[Array, "*B T N Hv"], gate: Float[Array, "..."], activation: str) -> Array:
    """Returns x * f(gate); `activation` names f in `ACTIVATIONS`. `gate` is [B..., T, N] or [B..., T, N, Hv]."""
    gate = ACTIVATIONS[activation](gate if gate.ndim == x.ndim else gate[..., None])
    # Outputs at padding are 0, and must stay 0 even if inputs there, and so the gate, are NaN or infinite.
    return x * jnp.where((x == 0) & ~jnp.isfinite(gate), 0, gate).astype(x.dtype)


def as_stored(cache: KVCache | None, key: Array, value: Array) -> Array:
    """Returns new values as attention reads them back from `cache`: rounded to its dtype, then converted back.

    `key` does not affect the result; `quantize_cache` takes both. Without a cache, returns `value`.
    """
    if cache is None or cache.value.dtype == value.dtype:
        return value
    if cache.scale is None:
        return value.astype(cache.value.dtype).astype(value.dtype)
    return dequantize_cache(*quantize_cache(key, value, None, cache.key.dtype), None, value.dtype)[1]


def exclude_own(x: Float[Array, "*B T N Hv"], value: Float[Array, "*B T K Hv"]) -> Float[Array, "*B T N Hv"]:
    """Returns x without its component along the token's own value v: x - (x . v) v / (v . v), or x if v is 0.

    Zhai, Exclusive self attention, arXiv:2603.09078.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    sharding: Any = jax.typeof(x).sharding if is_explicit(x) else None
    value = jnp.repeat(value.astype(dtype), x.shape[-2] // value.shape[-2], axis=-2, out_sharding=sharding)
    # The output of padding is 0, and stays 0 although its own value may be NaN.
    is_padding = (x == 0).all(-1, keepdims=True) & ~jnp.isfinite(value).all(-1, keepdims=True)
    value = jnp.where(is_padding, 0, value)
    # The result does not depend on the length of v: dividing by the largest entry avoids overflow and underflow.
    largest = lax.stop_gradient(jnp.abs(value).max(-1, keepdims=True))
    is_zero = largest < jnp.finfo(dtype).tiny
    value = value / jnp.where(is_zero, 1, largest)
    squares = jnp.where(is_zero, 1, jnp.square(value).sum(-1, keepdims=True))
    share = jnp.where(is_zero, 0, (x.astype(dtype) * value).sum(-1, keepdims=True) / squares)
    return (x.astype(dtype) - share * value).astype(x.dtype)
