"""How new keys and values are written into a cache: in place where the cache is donated, on every platform."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from flax_mha._mesh import by_device
from flax_mha._platform import platform, varying_alike

# Up to jax 0.11, XLA's CPU converts all of a bfloat16 array to float32 and back to write a part of it.
_CONVERTS_BFLOAT16 = jax.__version_info__ < (0, 12)
# Up to so many tokens are then written one after another, without a copy of the cache.
FEW = 64


def written(cached: Array, new: Array, places: Int[Array, "*B T"]) -> Array:
    """Returns the cache [B..., S, K, H] with new entries [B..., T, K, H] in these slots.

    Args:
      cached: Keys or values of a cache.
      new: New ones, in the same dtype.
      places: The slot of each new entry, one row for each batch entry or [T] for all. A place outside the cache
        writes nothing.
    """
    cached = jnp.asarray(cached)  # a checkpoint may have been read as NumPy's arrays
    if not new.size:
        return cached
    axes = "B T" if places.ndim > 1 else "T"
    return by_device(_written_here, cached, "B S K H", (new, "B T K H"), (places, axes))


def _written_here(cached: Array, new: Array, places: Int[Array, "*B T"]) -> Array:
    if cached.dtype == jnp.bfloat16 and _CONVERTS_BFLOAT16 and platform() == "cpu":
        return _written_as_bits(*varying_alike((cached, new, places)))
    return _scattered(cached, new, places)


def _scattered(cached: Array, new: Array, places: Int[Array, "*B T"]) -> Array:
    if places.ndim == 1:
        return cached.at[..., places, :, :].set(new, mode="drop")
    rows = jnp.arange(math.prod(places.shape[:-1]), dtype=jnp.int32)[:, None]
    flat, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (cached, new))
    flat = flat.at[rows, places.reshape(-1, places.shape[-1])].set(fresh, mode="drop")
    return flat.reshape(cached.shape)


@jax.custom_jvp
def _written_as_bits(cached: Array, new: Array, places: Int[Array, "*B T"]) -> Array:
    """The same of bfloat16, by operations on its bits."""
    if not isinstance(places.size, int) or places.size > FEW:  # symbolic ones may be many
        bits, new_bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in (cached, new))
        return lax.bitcast_convert_type(_scattered(bits, new_bits, places), jnp.bfloat16)
    flat, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (cached, lax.bitcast_convert_type(new, jnp.uint16)))
    _, slots, num_heads, size = flat.shape
    rows = 1 if places.ndim > 1 else flat.shape[0]  # all at once, if they share their places

    def write(i: Int[Array, ""], flat: Array) -> Array:
        i = i.astype(jnp.int32)
        row, step = (i // fresh.shape[1], i % fresh.shape[1]) if places.ndim > 1 else (jnp.zeros_like(i), i)
        place = lax.dynamic_index_in_dim(places.reshape(-1), i, keepdims=False)
        row, place, zero = varying_alike((row, place, jnp.int32(0)))
        one = lax.dynamic_slice(fresh, (row, step, zero, zero), (rows, 1, num_heads, size))

        def written(flat: Array) -> Array:
            bits = lax.bitcast_convert_type(flat, jnp.uint16)
            return lax.bitcast_convert_type(lax.dynamic_update_slice(bits, one, (row, place, zero, zero)), jnp.bfloat16)

        # In a branch of its own, this is one operation in place.
        return lax.cond(place < slots, written, lambda flat: flat, flat)

    return lax.fori_loop(0, places.size, write, flat).reshape(cached.shape)


@_written_as_bits.defjvp
def _written_as_bits_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    cached, new, places = primals
    _, tangent = jax.jvp(lambda cached, new: _scattered(cached, new, places), (cached, new), tangents[:2])
    return _written_as_bits(cached, new, places), tangent
