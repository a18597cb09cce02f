"""What `dot_product_attention` accepts: each function checks one argument, before any compute, and returns it ready.

Every message names the argument, what is expected, what was given and, where that is not plain, how to fix it. Values
are looked at where they are known, so those of tracers are not.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha.core.context import Context
from flax_mha.core.integers import LARGEST, SMALLEST, extremes, ids_int32, int32, unwrapped
from flax_mha.core.target import being_traced, readable

DTYPES = ("float16", "bfloat16", "float32", "float64")
LARGEST_CAP = 1e30  # beyond it, score / cap is so small that float32 makes it 0


class Shape(NamedTuple):
    """The sizes of one call."""

    batch: tuple[int, ...]
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int

    @property
    def scores(self) -> tuple[int, ...]:
        """[B..., N, T, S]: what bias and mask broadcast to."""
        return (*self.batch, self.num_heads, self.query_length, self.key_length)

    def indices(self, by_batch: bool, by_head: bool) -> tuple[Array | np.ndarray, np.ndarray]:
        """Numbers of the batch entries [B...], counted through, and of the heads [N]; or a single 0 for all of them."""
        batch = self.batch if by_batch else (1,) * len(self.batch)
        count = math.prod(batch)
        numbers = np.arange(count, dtype=np.int32) if isinstance(count, int) else jnp.arange(count, dtype=jnp.int32)
        return numbers.reshape(batch), np.arange(self.num_heads if by_head else 1, dtype=np.int32)


def inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, any_dtypes: bool = False
) -> tuple[Array, Array, Array, Shape]:
    """Query, key and value as arrays, and their sizes, if they fit together."""
    meaning = "[batch..., length, heads, head size]"
    query, key, value = (
        _array(name, x, f"an array {meaning}") for name, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key, value must have same rank, but got {shapes}.")
    if query.ndim < 3:
        raise ValueError(f"query must be {meaning}, so of rank 3 or more, but got {shapes}.")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key, value batch dims must match, but got {shapes}.")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key, value lengths must match, but got {key.shape[-3]} and {value.shape[-3]} in {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query, key depths must match, but got {query.shape[-1]} and {key.shape[-1]} in {shapes}.")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key, value heads must match, but got {key.shape[-2]} and {value.shape[-2]} in {shapes}.")
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, both at least 1, but got {num_heads} and "
            f"{num_kv_heads} in {shapes}; arrays are {meaning}: use jnp.swapaxes(x, -3, -2) on PyTorch's "
            "[batch, heads, length, head size]."
        )
    if query.shape[-1] < 1:
        raise ValueError(f"query head size must be at least 1, but got {shapes}.")
    alike = any_dtypes or query.dtype == key.dtype == value.dtype
    if not alike or any(x.dtype.name not in DTYPES for x in (query, key, value)):
        raise ValueError(
            f"query, key, value must share one dtype out of {', '.join(DTYPES)}, but got query {query.dtype}, "
            f"key {key.dtype}, value {value.dtype}; use .astype."
        )
    sizes = (query.shape[-3], key.shape[-3], num_heads, num_kv_heads, query.shape[-1], value.shape[-1])
    return query, key, value, Shape(query.shape[:-3], *sizes)


def bias(value: ArrayLike | None, shape: Shape) -> Array | None:
    """An array of floats that broadcasts to the scores."""
    if value is None:
        return None
    array = _array("bias", value, "an array of floats")
    if array.dtype.name not in DTYPES:
        fix = "; a boolean array is a mask" if array.dtype == bool else ""
        raise ValueError(f"bias must have a dtype out of {', '.join(DTYPES)}, but got {array.dtype}{fix}.")
    return _broadcastable("bias", array, shape.scores, "[batch..., heads, queries, keys]")


def mask(value: ArrayLike | None, shape: Shape) -> Array | None:
    """A boolean array that broadcasts to the scores."""
    if value is None:
        return None
    array = _array("mask", value, "a boolean array or a mask object such as CausalMask()")
    if array.dtype != bool:
        raise ValueError(
            f"mask must be bool (True attends), but got {array.dtype}; use mask.astype(bool) if it holds 0 and 1, "
            "or pass it as bias= if it is to be added to the scores."
        )
    return _broadcastable("mask", array, shape.scores, "[batch..., heads, queries, keys]", _mask_fix(array, shape))


def mask_of_numbers(value: Any) -> Array:
    """A boolean array from the masks that Flax takes: booleans, or 0 and 1 in numbers."""
    array = _array("mask", value, "a boolean array or a mask object such as CausalMask()")
    if array.dtype == bool:
        return array
    if readable(array) and not np.isin(np.asarray(array), (0, 1)).all():
        other = np.asarray(array).ravel()[~np.isin(np.asarray(array), (0, 1)).ravel()][0]
        raise ValueError(
            f"mask must be bool, or hold 0 and 1 alone (1 attends), but got {array.dtype} with {other}; pass it as "
            "bias= if it is to be added to the scores."
        )
    return array.astype(bool)


def _mask_fix(array: Array, shape: Shape) -> str:
    """How to give a mask of keys, or of queries and keys, its missing axes."""
    batch, keys = shape.batch, shape.key_length
    if not batch or array.shape[: len(batch)] != batch:
        return ""
    if array.shape == (*batch, keys):
        return "; a mask of keys is mask[..., None, None, :]" if len(batch) > 1 else "; use mask[:, None, None, :]"
    if array.shape == (*batch, shape.query_length, keys):
        return "; use mask[..., None, :, :]" if len(batch) > 1 else "; use mask[:, None, :, :]"
    return ""


def per_sequence(name: str, value: ArrayLike | None, shape: Shape) -> Array | None:
    """One integer for every batch entry, or one for all; int32."""
    if value is None:
        return None
    array = int32(name, value)
    if not shape.batch and array.shape == (1,):  # what jax.nn expects of inputs without a batch axis
        array = array[0]
    return _broadcastable(name, array, shape.batch, "[batch...]")


def lengths(name: str, value: ArrayLike | None, shape: Shape) -> Array | None:
    """One length >= 0 for every batch entry, or one for all; int32."""
    array = per_sequence(name, value, shape)
    if array is not None and (least := extremes(array)[0]) < 0:
        raise ValueError(f"{name} must be at least 0, but got {least}; use 0 for a sequence of padding alone.")
    return array


def offsets(
    query_offset: ArrayLike, key_offset: ArrayLike, shape: Shape
) -> tuple[tuple[int, int], tuple[Array | None, Array | None]]:
    """Positions of the first query and the first key: the part that is a number, and the part that is an array."""
    numbers, arrays, ends = [], [], []
    for name, value, length in (
        ("query_offset", query_offset, shape.query_length),
        ("key_value_offset", key_offset, shape.key_length),
    ):
        if value is None:
            raise ValueError(f"{name} must be an integer or an array of integers, but got None; leave it out.")
        is_number = _is_int(value)
        array = None if is_number else per_sequence(name, value, shape)
        least, most = (int(value),) * 2 if array is None else extremes(array)  # type: ignore[arg-type]
        last = most + max(length, 1) - 1 if isinstance(length, int) else most
        if least < SMALLEST or last > LARGEST:
            raise ValueError(f"{name} must keep positions in the range of int32, but got positions {least} to {last}.")
        numbers.append(int(value) if is_number else 0)  # type: ignore[arg-type]
        arrays.append(array)
        ends.append((least, last))
    (q_first, q_last), (k_first, k_last) = ends
    if max(q_last - k_first, k_last - q_first) > LARGEST:
        raise ValueError(
            "query_offset and key_value_offset must keep distances in the range of int32, but got queries at positions "
            f"{q_first} to {q_last} and keys at {k_first} to {k_last}."
        )
    return (numbers[0], numbers[1]), (arrays[0], arrays[1])


def array_mask(value: ArrayLike, shape: Shape) -> Array:
    """The array of an ArrayMask."""
    array = mask(value, shape)
    if array is None:
        raise ValueError("ArrayMask(visible) must hold a boolean array, but got None.")
    return array


def segment_mask(query_ids: ArrayLike, key_ids: ArrayLike, shape: Shape) -> tuple[Array, Array]:
    """The ids of a SegmentMask."""
    queries, keys = segment_ids(query_ids, key_ids, shape)
    if queries is None or keys is None:
        raise ValueError("SegmentMask(query_ids, key_value_ids) must hold arrays of integers, but got None.")
    return queries, keys


def segment_ids(
    query_ids: ArrayLike | None, key_ids: ArrayLike | None, shape: Shape
) -> tuple[Array, Array] | tuple[None, None]:
    """The segments of queries and keys, of one dtype; one stands for both where the lengths are the same."""
    if query_ids is None and key_ids is None:
        return None, None
    if (query_ids is None or key_ids is None) and shape.query_length != shape.key_length:
        missing = "query_segment_ids" if query_ids is None else "key_value_segment_ids"
        raise ValueError(
            f"{missing} must be given too where queries and keys differ in length, but got lengths "
            f"{shape.query_length} and {shape.key_length} and only one of the two."
        )
    checked = []
    for name, given, partner, length in (
        ("query_segment_ids", query_ids, key_ids, shape.query_length),
        ("key_value_segment_ids", key_ids, query_ids, shape.key_length),
    ):
        ids = ids_int32(name, partner if given is None else given)
        if ids.ndim == 0 or ids.shape[-1] != length:
            raise ValueError(f"{name} must be [batch..., {length}], one id a position, but got shape {ids.shape}.")
        checked.append(_broadcastable(name, ids, (*shape.batch, length), "[batch..., length]"))
    dtype = jnp.promote_types(checked[0].dtype, checked[1].dtype)
    return checked[0].astype(dtype), checked[1].astype(dtype)


def window(size: Any) -> tuple[int | None, int | None] | None:
    """(left, right), each an int >= 0 or None."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(side is None or (_is_int(side) and side >= 0) for side in pair):
        raise ValueError(
            f"local_window_size must be an int >= 0, or a pair (left, right) of int >= 0 or None, but got {size!r}."
        )
    return None if pair == (None, None) else pair


def scale(value: Any, shape: Shape) -> tuple[float, Array | None]:
    """The scale as a static number and None if it is a number, or as 1.0 and an array if it is a JAX array."""
    if value is None:
        return 1 / math.sqrt(shape.head_size), None
    value = unwrapped(value)
    if not isinstance(value, jax.Array):
        number: Any = value[()] if isinstance(value, np.ndarray) and not value.ndim else value
        if not _is_number(number) or not math.isfinite(number):
            raise ValueError(f"scale must be one finite number, but got {value!r}.")
        if abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"scale must be a number that float32 can hold, but got {value!r}.")
        return float(number), None
    if value.shape or value.dtype.name not in DTYPES:
        raise ValueError(f"scale must be one number, but got an array of shape {value.shape} and dtype {value.dtype}.")
    return 1.0, value


def precision(value: Any) -> Any:
    """What `jax.lax.dot_general` takes."""
    if value is not None:
        x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        try:
            jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=value), x)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'precision must be None, "default", "high", "highest" or a jax.lax.Precision, but got {value!r}.'
            ) from error
    return tuple(value) if isinstance(value, list) else value  # it becomes part of a key


def sinks(value: ArrayLike | None, shape: Shape) -> Array | None:
    """One logit per head, or what broadcasts to [B..., N]."""
    if value is None:
        return None
    array = _array("sinks", value, "an array of floats, one per head")
    if array.dtype.name not in DTYPES:
        raise ValueError(f"sinks must have a dtype out of {', '.join(DTYPES)}, but got {array.dtype}.")
    return _broadcastable("sinks", array, (*shape.batch, shape.num_heads), "[batch..., heads]")


def soft_cap(value: float | None) -> float | None:
    """A number > 0 at which float32 can cap."""
    if value is None:
        return None
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"logits_soft_cap must be a finite number > 0, known while tracing, but got {value!r}.")
    if value > LARGEST_CAP:
        raise ValueError(f"logits_soft_cap must be at most {LARGEST_CAP:g}, but got {value!r}; None does not cap.")
    return float(value)


def dropout_rate(rate: float) -> float:
    """A number in [0, 1)."""
    if not _is_number(rate) or not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be a number in [0, 1), known while tracing, but got {rate!r}.")
    return float(rate)


def dropout(rate: float, rng: Any) -> float:
    """The rate; above 0 it needs a key."""
    rate = dropout_rate(rate)
    if rate > 0 and rng is None:
        raise ValueError("dropout_rng must be a key where dropout_rate > 0, but got None; pass jax.random.key(0), say.")
    if rate > 0 and not _is_key(rng):
        got = f"an array of shape {rng.shape} and dtype {rng.dtype}" if hasattr(rng, "shape") else repr(rng)
        raise ValueError(f"dropout_rng must be one key as jax.random.key makes it, but got {got}.")
    return rate


def flag(name: str, value: bool) -> bool:
    """True or False, known while tracing."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but got {value!r}.")
    return bool(value)


def sharding(value: Any, rank: int) -> Any:
    """How a mesh splits the query."""
    if value is not None and not isinstance(value, NamedSharding | PartitionSpec | Context):
        raise ValueError(f"qkv_sharding must be a jax.P or a NamedSharding, of the query, but got {value!r}.")
    spec: Any = () if value is None or isinstance(value, Context) else getattr(value, "spec", value)
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    names = [name for entry in entries for name in entry]
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"qkv_sharding must name mesh axes or None, each of them once, but got {spec}.")
    if len(spec) > rank:
        raise ValueError(f"qkv_sharding must have an entry for each axis of the query at most, {rank}, but got {spec}.")
    return value


def user_function(name: str, function: Any) -> None:
    """Something to call."""
    if not callable(function):
        raise ValueError(f"{name} must be a function of scalars, but got {function!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_key(rng: object) -> bool:
    if not isinstance(rng, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.shape == ()
    return rng.dtype == jnp.uint32 and rng.ndim == 1


def _array(name: str, value: Any, expected: str) -> Array:
    value = unwrapped(value)
    if value is None or isinstance(value, str) or callable(value):
        fix = f"; call it: {value.__name__}()" if isinstance(value, type) else ""
        raise ValueError(f"{name} must be {expected}, but got {value!r}{fix}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be {expected}, but got {type(value).__name__}.") from error


def _broadcastable(name: str, array: Any, shape: tuple[int, ...], meaning: str, fix: str = "") -> Array:
    """`array` with axes of length 1 in front until it has the rank of `shape`."""
    fits = array.ndim <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {meaning} = {shape}, but got shape {array.shape}{fix}.")
    if array.ndim == len(shape):
        return array
    if readable(array) and being_traced():
        array = np.asarray(array)  # a JAX array would no longer be known once it is reshaped
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
