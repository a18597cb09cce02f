"""Checks that masks and calls share: each function checks one argument and returns it
in one standard form.

Every error names the argument, the expected value, the given value and a fix. Traced
values are not checked. Lengths, positions and ids of any integer dtype become int32,
never with a silent change of their meaning.
"""

import functools
import math
import numbers
import warnings
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from flax_mha._src.core.tracing import being_traced, readable

DTYPES = ("float16", "bfloat16", "float32", "float64")
# The range of int32, the dtype of positions and their differences. A larger window or
# length limits nothing.
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
MASK = "a boolean array or a mask object such as CausalMask()"


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Warns of a call that works, but not as its author may expect; once in a process,
    whatever Python's filters say.
    """
    warnings.warn(f"flax_mha: {text}", stacklevel=2)


class Shape(NamedTuple):
    """The sizes of a call, against which its arguments are checked."""

    batch: tuple[int, ...]
    query_length: int
    key_length: int
    # These are 1 if only the batch and the lengths matter.
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    value_size: int = 1

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of all scores, [B..., N, T, S], to which bias and mask must
        broadcast.
        """
        return (*self.batch, self.num_heads, self.query_length, self.key_length)

    def indices(
        self, by_batch: bool, by_head: bool
    ) -> tuple[Array | np.ndarray, np.ndarray]:
        """Returns indices of batch entries, [B...], counted over all batch axes, and
        indices of heads, [N].

        Without `by_batch` or `by_head`, these indices are a single 0, with axes of
        length 1.
        """
        batch = self.batch if by_batch else (1,) * len(self.batch)
        count = math.prod(batch)
        # NumPy does not support a count that is a symbol of `jax.export`.
        if isinstance(count, int):
            entries = np.arange(count, dtype=np.int32)
        else:
            entries = jnp.arange(count, dtype=jnp.int32)
        heads = np.arange(self.num_heads if by_head else 1, dtype=np.int32)
        return entries.reshape(batch), heads


def mask(value: ArrayLike | None, shape: Shape) -> Array:
    array = as_array("mask", value, MASK)
    if array.dtype != bool:
        raise ValueError(
            f"mask must be bool (True means attend), but got {array.dtype}; use "
            "mask.astype(bool) if it contains 0 and 1, or pass it as bias= to add it "
            "to the scores."
        )
    return over_scores("mask", array, shape)


def over_scores(name: str, array: Array, shape: Shape) -> Array:
    """Checks that a mask or bias, the argument `name`, broadcasts to all scores, and
    adds missing leading axes.
    """
    return broadcastable(
        name,
        array,
        shape.scores,
        meaning="[batch..., heads, queries, keys]",
        fix=_axes_fix(name, array, shape),
    )


def mask_of_numbers(value: object) -> tuple[Array, Bool[Array, ""] | None]:
    """Converts a mask that Flax accepts, booleans or the numbers 0 and 1, to a boolean
    array.

    Other numbers raise a ValueError: most likely they are an additive mask of 0 and
    -inf, with the opposite meaning. Traced numbers cannot be checked. For them, the
    second result is an array that is True if any is not 0 or 1: pass it to `nan_if`.
    Otherwise it is None.
    """
    array = as_array("mask", value, MASK)
    if array.dtype == bool:
        return array, None
    if not readable(array):
        converted = array.astype(bool)
        is_other = (array != 0) & (array != 1)
        return converted, is_other.any()
    others = np.setdiff1d(array, (0, 1))
    if len(others):
        fix = "."
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isnan(others).any():
            fix = "; pass it as bias= to add it to the scores."
        raise ValueError(
            "mask must be bool, or contain only 0 and 1 (1 means attend), but got "
            f"{array.dtype} containing {others[0]}{fix}"
        )
    return array.astype(bool), None


def nan_if(flag: Bool[Array, ""] | None, x: Array) -> Array:
    """Returns `x`, or NaN in all its entries if `flag` is True; a `flag` of None counts
    as False.
    """
    if flag is None:
        return x
    return jnp.where(flag, jnp.asarray(jnp.nan, x.dtype), x)


def _axes_fix(name: str, array: Array, shape: Shape) -> str:
    """Returns advice to add axes if a mask or bias, the argument `name`, has shape
    [B..., S] or [B..., T | 1, S | 1], otherwise "".
    """
    rank = len(shape.batch)
    keys = shape.key_length
    if not rank or array.shape[:rank] != shape.batch:
        return ""
    first = "..." if rank > 1 else ":"
    sizes = array.shape[rank:]
    if sizes == (keys,):
        return f"; use {name}[{first}, None, None, :]"
    if len(sizes) != 2:
        return ""
    if sizes[0] in (1, shape.query_length) and sizes[1] in (1, keys):
        return f"; use {name}[{first}, None, :, :]"
    return ""


def per_sequence(name: str, value: ArrayLike | None, shape: Shape) -> Array | None:
    """Checks an argument of one integer per sequence, or one for all; returns int32
    that broadcasts to [B...].
    """
    if value is None:
        return None
    array = int32(name, value)
    # The shape in jax.nn for inputs without a batch axis.
    if not shape.batch and array.shape == (1,):
        array = array[0]
    return broadcastable(name, array, shape.batch, "[batch...]")


def lengths(
    name: str, value: ArrayLike | None, shape: Shape, most: int | None = None
) -> Array | None:
    """Checks and returns one length per sequence, or one for all, as an array; None
    stays None.

    Lengths must be from 0 to `most` (None: no limit).
    """
    array = per_sequence(name, value, shape)
    if array is None:
        return None
    least, greatest = extremes(array)
    if least < 0:
        raise ValueError(
            f"{name} must be at least 0, but got {least}; use 0 for an all-padding "
            "sequence."
        )
    if isinstance(most, int) and greatest > most:
        raise ValueError(
            f"{name} must be at most {most}, the length of the array, but got "
            f"{greatest}."
        )
    return array


def segment_ids(
    query_ids: ArrayLike | None,
    key_ids: ArrayLike | None,
    shape: Shape,
    names: tuple[str, str] = ("query_segment_ids", "key_value_segment_ids"),
) -> tuple[Array, Array]:
    """Checks the segment ids of queries [B..., T] and keys [B..., S]; `names` are the
    names of the arguments in errors.

    If one of them is None, the other is used for both, which requires T = S.
    """
    if query_ids is None and key_ids is None:
        raise ValueError(
            "SegmentMask(query_ids, key_value_ids) requires integer arrays, but got "
            "None."
        )
    queries = shape.query_length
    keys = shape.key_length
    is_missing = query_ids is None or key_ids is None
    if is_missing and queries != keys:
        missing = names[0] if query_ids is None else names[1]
        raise ValueError(
            f"{missing} must also be passed if queries and keys differ in length "
            f"({queries} and {keys}), but got None."
        )
    if query_ids is None:
        query_ids = key_ids
    if key_ids is None:
        key_ids = query_ids
    query_ids = _ids_of(names[0], query_ids, shape.batch, queries)
    key_ids = _ids_of(names[1], key_ids, shape.batch, keys)
    # Traced ids of 64 bits keep their dtype.
    dtype = jnp.promote_types(query_ids.dtype, key_ids.dtype)
    return query_ids.astype(dtype), key_ids.astype(dtype)


def _ids_of(name: str, value: object, batch: tuple[int, ...], length: int) -> Array:
    """Checks segment ids [B..., length]."""
    ids = ids_int32(name, value)
    if ids.ndim == 0 or ids.shape[-1] != length:
        raise ValueError(
            f"{name} must have shape [batch..., {length}], one id per position, "
            f"but got {ids.shape}."
        )
    return broadcastable(name, ids, (*batch, length), "[batch..., length]")


def key_indices(value: ArrayLike | None, shape: Shape) -> Array | None:
    """Checks the keys that each query lists, [B..., T, k] or [B..., T, K, k]; adds the
    axis of key heads if missing.
    """
    if value is None:
        return None
    indices = int32("key_indices", value)
    keys = shape.key_length
    each = (*shape.batch, shape.query_length)
    if indices.ndim == len(each) + 1:
        indices = indices[..., None, :]
    has_lists = indices.ndim == len(each) + 2 and indices.shape[:-2] == each
    # One list may be for all key heads.
    if not has_lists or indices.shape[-2] not in (1, shape.num_kv_heads):
        raise ValueError(
            "key_indices must have shape [batch..., queries, k] or [batch..., queries, "
            f"key heads, k] (here, {each} or {(*each, shape.num_kv_heads)} followed by "
            f"k), but got {np.shape(value)}."
        )
    if not indices.shape[-1]:
        raise ValueError(
            "key_indices must list at least 1 key per query, but got 0; use -1 for no "
            "key."
        )
    least, greatest = extremes(indices)
    if least < -1 or (isinstance(keys, int) and greatest >= max(keys, 1)):
        raise ValueError(
            f"key_indices must be from 0 to {keys - 1}, the last key, or -1 for none, "
            f"but got values from {least} to {greatest}; replace others by -1."
        )
    return indices


def check_bool(name: str, value: bool) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, jax.core.Tracer):
        fix = (
            "; make it static with static_argnames in jax.jit, or capture it in a "
            "closure"
        )
        if name == "is_causal":
            fix = "; pass mask=flax_mha.CausalMask() instead"
        raise ValueError(
            f"{name} must be a concrete True or False, but got a traced value{fix}. "
            "flax.linen's nn.remat and flax.nnx.remat trace the arguments of what they "
            "wrap."
        )
    raise ValueError(f"{name} must be True or False, but got {value!r}.")


def as_array(name: str, value: object, expected: str) -> Array:
    """Converts a value to an array; errors say that `name` must be `expected`."""
    value = unwrapped(value)
    if value is None or isinstance(value, str) or callable(value):
        fix = ""
        if isinstance(value, type):
            fix = f"; call it: {value.__name__}()"
        raise ValueError(f"{name} must be {expected}, but got {value!r}{fix}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be {expected}, but got {type(value).__name__}."
        ) from error


def broadcastable(
    name: str, array: Any, shape: tuple[int, ...], meaning: str, fix: str = ""
) -> Array:
    """Checks that an array broadcasts to `shape`, and adds missing leading axes, of
    length 1.

    For errors, `name` is the argument, `meaning` names the axes of `shape`, and `fix`
    is advice.
    """
    # Broadcasting aligns the last axes.
    from_last = zip(reversed(array.shape), reversed(shape), strict=False)
    sizes_fit = all(n in (1, size) for n, size in from_last)
    if array.ndim > len(shape) or not sizes_fit:
        raise ValueError(
            f"{name} must broadcast to {meaning} = {shape}, but got shape "
            f"{array.shape}{fix}."
        )
    if array.ndim == len(shape):
        return array
    if readable(array) and being_traced():
        # Reshaping a JAX array while tracing would hide its values.
        array = np.asarray(array)
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an integer of Python or NumPy, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def int_at_least(name: str, value: object, least: int) -> int:
    """Returns `value` as an int; raises a ValueError if it is not an integer of Python
    or NumPy, or below `least`.
    """
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, but got {value!r}.")
    return int(value)


def epsilon(name: str, value: object) -> None:
    """Raises a ValueError unless `value`, which a norm adds to a variance, is a finite
    number above 0, also in float32.
    """
    number = number_in(value)
    if not is_finite(number) or number <= 0:
        raise ValueError(f"{name} must be a finite number > 0, but got {value!r}.")
    limits = np.finfo(np.float32)
    least = float(limits.tiny)
    greatest = float(limits.max)
    if not least <= number <= greatest:
        raise ValueError(
            f"{name} must be in the range of float32, {least:.2g} to {greatest:.2g}, "
            f"but got {value!r}."
        )


def unwrapped(value: object) -> Any:
    """Returns the array inside a variable of `flax.nnx` (or any object with
    `__jax_array__`); returns any other `value` unchanged.
    """
    if isinstance(value, jax.Array | type) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def is_finite(value: object) -> TypeGuard[float]:
    """Returns whether `value` is a finite real number of Python or NumPy that fits in
    float64, but not a bool.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def number_in(value: object) -> Any:
    """Converts a 0-d array whose value can be read to a Python number; returns anything
    else unchanged.
    """
    array = unwrapped(value)
    if not isinstance(array, jax.Array | np.ndarray):
        return value
    if array.ndim or not readable(array):
        return value
    if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number):
        return array.item()
    return value


def integers(name: str, value: Any) -> Any:
    """Converts integers to an array: in NumPy if their values can be read, because JAX
    would cut 64 bits to 32.
    """
    value = unwrapped(value)
    is_int32 = isinstance(value, jax.Array) and value.dtype == jnp.int32
    try:
        if is_int32 or isinstance(value, jax.core.Tracer) or not readable(value):
            array = value
        else:
            array = np.asarray(value)
    except jax.errors.TracerArrayConversionError:  # a list that holds traced numbers
        array = jnp.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must be an integer array, but got {value!r}, whose rows differ in "
            "length."
        ) from error
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = array.dtype if array.dtype != object else repr(value)
        raise ValueError(
            f"{name} must have an integer dtype, but got {got}; use .astype(jnp.int32)."
        )
    return array


def int32(name: str, value: object) -> Array:
    """Converts integers to int32; those out of its range become the nearest int32."""
    array = integers(name, value)
    if np.dtype(array.dtype).itemsize > 4 or array.dtype == np.uint32:
        is_unsigned = jnp.issubdtype(array.dtype, jnp.unsignedinteger)
        # An unsigned dtype has no negative limit.
        low = None if is_unsigned else INT32_MIN
        array = array.clip(low, INT32_MAX)
    return array.astype(np.int32)


def ids_int32(name: str, value: object) -> Array:
    """Converts ids to int32, so that different ids stay different; raises a ValueError
    if they are out of range.

    Traced ids cannot be checked: 64-bit ids keep their dtype, and uint32 wraps around.
    """
    array = integers(name, value)
    itemsize = np.dtype(array.dtype).itemsize
    if isinstance(array, jax.core.Tracer):
        return array if itemsize > 4 else array.astype(np.int32)
    fits = itemsize < 4 or array.dtype == np.int32
    if array.size and not fits:
        least = array.min()
        greatest = array.max()
        if int(least) < INT32_MIN or int(greatest) > INT32_MAX:
            raise ValueError(
                f"{name} must be in the int32 range, but got values from {least} to "
                f"{greatest}; renumber them with np.unique(ids, return_inverse=True)."
            )
    return array.astype(np.int32)


def extremes(array: Array) -> tuple[int, int]:
    """Returns the least and the greatest entry of an array; (0, 0) if it is empty or
    its values cannot be read.
    """
    if not readable(array) or not array.size:
        return 0, 0
    known = np.asarray(array)
    return int(known.min()), int(known.max())
