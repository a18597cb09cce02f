"""Numbers in 8 bits, with one scale for each vector of them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# The largest number of each dtype; the largest of a vector becomes that.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def is_quantized(dtype: DTypeLike) -> bool:
    """Returns whether numbers of this dtype come with scales."""
    return jnp.dtype(dtype) in LARGEST


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def quantize(x: Float[Array, "... F"], dtype: jnp.dtype) -> tuple[Array, Float[Array, "... 1"]]:
    """Rounds vectors to 8 bits, and returns them with their scales, float32.

    A vector of zeros has scale 0, one that is not finite zeros and scale NaN.
    """
    x = x.astype(jnp.float32)
    is_finite = jnp.isfinite(x).all(axis=-1, keepdims=True)  # in some sizes XLA's CPU loses the NaN of a maximum
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) / LARGEST[dtype]
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)
    x = jnp.where((scale > 0) & is_finite, x / jnp.where(scale > 0, scale, 1), 0)
    x = jnp.clip(jnp.round(x) if dtype == jnp.int8 else x, -LARGEST[dtype], LARGEST[dtype])
    return x.astype(dtype), jnp.where(is_finite, scale, jnp.nan)


@quantize.defjvp
def _quantize_jvp(dtype: jnp.dtype, primals: tuple, tangents: tuple) -> tuple:
    raise NotImplementedError(
        f"a cache of keys and values in {dtype} has no derivative; use a dtype of 16 bits or more to differentiate it."
    )


def as_floats(x: Array, dtype: DTypeLike) -> Array:
    """Converts numbers, also the bits of `float8_e4m3fn` in uint8, to floats."""
    if x.dtype == jnp.uint8:  # a float16 with their sign, exponent and fraction is 2^-8 of their number
        signed = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        bits = (signed << jnp.int16(7)) & jnp.int16(-0x4001)
        x = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256
    return x.astype(dtype)


def dequantize(x: Array, scale: Float[Array, "... 1"], dtype: DTypeLike) -> Array:
    """Returns the vectors that numbers in 8 bits and their scales stand for."""
    return (as_floats(x, jnp.float32) * scale).astype(dtype)
