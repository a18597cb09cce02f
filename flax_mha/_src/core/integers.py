"""Converts lengths, positions and ids of any integer dtype to int32, never with a silent change of their meaning."""

import math
import numbers
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_mha._src.core.tracing import readable

# Positions and their differences are int32. A window or a length that is larger limits nothing.
LARGEST, SMALLEST = 2**31 - 1, -(2**31)


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an integer of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def int_at_least(name: str, value: object, least: int) -> int:
    """Converts an integer of Python or NumPy to a Python int; raises a ValueError if it is none, or below `least`."""
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, but got {value!r}.")
    return int(value)


def unwrapped(value: Any) -> Any:
    """Returns the array that a variable of `flax.nnx` or another object with `__jax_array__` holds; else `value`."""
    if isinstance(value, jax.Array | type) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def is_finite(value: object) -> TypeGuard[float]:
    """Returns whether `value` is a finite real number of Python or NumPy that float64 can hold, and no bool."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def number_in(value: Any) -> Any:
    """Returns the Python number in a 0-d array of JAX or NumPy whose value is known; anything else unchanged."""
    array = unwrapped(value)
    if not isinstance(array, jax.Array | np.ndarray) or array.ndim or not readable(array):
        return value
    return array.item() if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number) else value


def integers(name: str, value: Any) -> Any:
    """Converts integers to an array, of NumPy if their values are known: JAX would reduce 64 bits to 32."""
    value = unwrapped(value)
    is_int32 = isinstance(value, jax.Array) and value.dtype == jnp.int32
    try:
        array = value if is_int32 or isinstance(value, jax.core.Tracer) or not readable(value) else np.asarray(value)
    except jax.errors.TracerArrayConversionError:  # a list that holds traced numbers
        array = jnp.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an integer array, but got {value!r}, whose rows differ in length.") from error
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = array.dtype if array.dtype != object else repr(value)
        raise ValueError(f"{name} must have an integer dtype, but got {got}; use .astype(jnp.int32).")
    return array


def int32(name: str, value: Any) -> Array:
    """Converts integers to int32; those out of its range become the nearest int32."""
    array = integers(name, value)
    if np.dtype(array.dtype).itemsize > 4 or array.dtype == np.uint32:
        low = None if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else SMALLEST
        array = array.clip(low, LARGEST)
    return array.astype(np.int32)


def ids_int32(name: str, value: Any) -> Array:
    """Converts ids to int32, or raises a ValueError, so that two of them are equal exactly if the given ids are.

    Traced ids cannot be checked: those of 64 bits keep their dtype, and uint32 wraps around.
    """
    array = integers(name, value)
    fits = np.dtype(array.dtype).itemsize < 4 or array.dtype == np.int32
    if isinstance(array, jax.core.Tracer) or fits:
        return array if np.dtype(array.dtype).itemsize > 4 else array.astype(np.int32)
    if array.size and not SMALLEST <= int(array.min()) <= int(array.max()) <= LARGEST:
        raise ValueError(
            f"{name} must be in the int32 range, but got values from {array.min()} to {array.max()}; renumber them "
            "with np.unique(ids, return_inverse=True)."
        )
    return array.astype(np.int32)


def extremes(array: Array) -> tuple[int, int]:
    """Returns the least and the greatest of integers; 0 and 0 if there are none or they are not known."""
    if not readable(array) or not array.size:
        return 0, 0
    known = np.asarray(array)
    return int(known.min()), int(known.max())
