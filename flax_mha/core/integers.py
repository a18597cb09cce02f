"""Integers of any width as int32: lengths, positions and ids, without a silent change of what they mean."""

import numbers
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_mha.core.tracing import readable

# Positions and their differences are int32. A window or a length that is larger limits nothing.
LARGEST, SMALLEST = 2**31 - 1, -(2**31)


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an integer of Python or NumPy; bools are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def int_at_least(name: str, value: object, least: int) -> int:
    """Returns an integer of Python or NumPy as Python's.

    Raises:
      ValueError: If it is none, or less than `least`.
    """
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, but got {value!r}.")
    return int(value)


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether `value` is a real number of Python or NumPy, NaN and infinity included; bools are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def unwrapped(value: Any) -> Any:
    """The array in what stands for one, such as a variable of `flax.nnx`; all else as it is."""
    if isinstance(value, jax.Array | type) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def integers(name: str, value: Any) -> Any:
    """Integers as they are given: in NumPy 64 bits stay, of which JAX would drop 32, and known values stay known."""
    value = unwrapped(value)
    is_int32 = isinstance(value, jax.Array) and value.dtype == jnp.int32
    try:
        array = value if is_int32 or isinstance(value, jax.core.Tracer) or not readable(value) else np.asarray(value)
    except jax.errors.TracerArrayConversionError:  # a list that holds traced numbers
        array = jnp.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be integers, but got {value!r}, whose parts differ in length.") from error
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = array.dtype if array.dtype != object else repr(value)
        raise ValueError(f"{name} must be integers, but got {got}; use .astype(jnp.int32).")
    return array


def int32(name: str, value: Any) -> Array:
    """Integers as int32, the nearest one for those that are out of its range."""
    array = integers(name, value)
    if np.dtype(array.dtype).itemsize > 4 or array.dtype == np.uint32:
        low = None if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else SMALLEST
        array = array.clip(low, LARGEST)
    return array.astype(np.int32)


def ids_int32(name: str, value: Any) -> Array:
    """Integers as int32 that are equal where the given ones are; traced ones of 64 bits stay as they are.

    Traced ones without sign, of 32 bits, count modulo 2^32.
    """
    array = integers(name, value)
    fits = np.dtype(array.dtype).itemsize < 4 or array.dtype == np.int32
    if isinstance(array, jax.core.Tracer) or fits:
        return array if np.dtype(array.dtype).itemsize > 4 else array.astype(np.int32)
    if array.size and not SMALLEST <= int(array.min()) <= int(array.max()) <= LARGEST:
        raise ValueError(
            f"{name} must be in the range of int32, but got {array.min()} to {array.max()}; number them with "
            "np.unique(ids, return_inverse=True)."
        )
    return array.astype(np.int32)


def extremes(array: Array) -> tuple[int, int]:
    """The least and the greatest of integers where these are known, else 0."""
    if not readable(array) or not array.size:
        return 0, 0
    known = np.asarray(array)
    return int(known.min()), int(known.max())
