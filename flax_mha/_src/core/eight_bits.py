"""Quantizes vectors to 8-bit numbers, with one scale for each vector."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# The largest number of each dtype; a vector is scaled so that its largest number
# becomes this.
LARGEST_OF = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def is_quantized(dtype: DTypeLike) -> bool:
    """Returns whether `dtype` is int8 or float8_e4m3fn, the 8-bit dtypes whose numbers
    come with scales.
    """
    return jnp.dtype(dtype) in LARGEST_OF


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def quantize(
    x: Float[Array, "... F"], dtype: jnp.dtype
) -> tuple[Array, Float[Array, "... 1"]]:
    """Divides each vector [F] by its scale and rounds it to `dtype`; returns 8-bit
    numbers and float32 scales.

    A vector of zeros has scale 0. A vector with NaN or infinity becomes zeros with
    scale NaN.
    """
    x = x.astype(jnp.float32)
    # In some sizes XLA's CPU loses the NaN of a maximum.
    is_finite = jnp.isfinite(x).all(axis=-1, keepdims=True)
    # scale = max |x| / largest number of the dtype
    largest = LARGEST_OF[dtype]
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) / largest
    # XLA may flush smaller numbers to 0, and then divides by 0.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)
    x = jnp.where((scale > 0) & is_finite, x / jnp.where(scale > 0, scale, 1), 0)
    if dtype == jnp.int8:
        x = jnp.round(x)
    x = jnp.clip(x, -largest, largest)
    return x.astype(dtype), jnp.where(is_finite, scale, jnp.nan)


@quantize.defjvp
def _quantize_jvp(dtype: jnp.dtype, primals: tuple, tangents: tuple) -> tuple:
    raise NotImplementedError(
        f"a cache with dtype {dtype} is not differentiable; use a dtype with at least "
        "16 bits."
    )


def as_floats(x: Array, dtype: DTypeLike) -> Array:
    """Converts 8-bit numbers to `dtype` without scaling them; uint8 numbers are the
    bits of float8_e4m3fn.
    """
    # As a float16, whose exponent bias is 15 instead of 7, the bits mean the value *
    # 2^-8.
    if x.dtype == jnp.uint8:
        signed = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        bits = (signed << jnp.int16(7)) & jnp.int16(-0x4001)
        x = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    # Every 8-bit number is exact in bfloat16, the upper half of a float32; XLA's CPU
    # takes twice as long to round.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)


def dequantize(x: Array, scale: Float[Array, "... 1"], dtype: DTypeLike) -> Array:
    """Inverts `quantize` up to rounding: multiplies 8-bit numbers by their scales, and
    returns floats of `dtype`.
    """
    return (as_floats(x, jnp.float32) * scale).astype(dtype)


def quantize_cache(
    key: Float[Array, "... H"],
    value: Float[Array, "... Hv"],
    value_size: int | None,
    dtype: jnp.dtype,
) -> tuple[Array, Array, Float[Array, "... 2"]]:
    """Quantizes keys and values; returns 8-bit keys, 8-bit values, and their scales, in
    this order.

    With `value_size`, the first `value_size` features of each key are its value: they
    have the second scale, and all other features the first. `value` then has no
    features, and is returned unchanged.
    """
    first, second = _parts(key, value, value_size)
    first, first_scale = quantize(first, dtype)
    second, second_scale = quantize(second, dtype)
    if value_size is None:
        key = first
        value = second
    else:
        key = jnp.concatenate([second, first], axis=-1)
    scale = jnp.concatenate([first_scale, second_scale], axis=-1)
    return key, value, scale


def dequantize_cache(
    key: Array,
    value: Array,
    scale: Float[Array, "... 2"],
    value_size: int | None,
    dtype: DTypeLike,
) -> tuple[Float[Array, "... H"], Float[Array, "... Hv"]]:
    """Inverts `quantize_cache` up to rounding. With `value_size`, ignores `value`: keys
    begin with their values.
    """
    first, second = _parts(key, value, value_size)
    key = dequantize(first, scale[..., 0:1], dtype)
    value = dequantize(second, scale[..., 1:2], dtype)
    if value_size is not None:
        key = jnp.concatenate([value, key], axis=-1)
    return key, value


def _parts(key: Array, value: Array, value_size: int | None) -> tuple[Array, Array]:
    """Returns the two separately scaled arrays: key and value, or key[..., value_size:]
    and key[..., :value_size].
    """
    if value_size is None:
        return key, value
    return key[..., value_size:], key[..., :value_size]
