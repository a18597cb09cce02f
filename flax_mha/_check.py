"""What `dot_product_attention` accepts: each function checks one argument, before any compute, and returns it ready.

Every message says which argument it is about, what is expected, what was got and, where that is not plain, the mend.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

DTYPES = ("float16", "bfloat16", "float32", "float64")


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

    def indices(self, by_batch: bool, by_head: bool) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the batch entries [B...], counted through, and of the heads [N]; or all in one, number 0."""
        batch = self.batch if by_batch else (1,) * len(self.batch)
        numbers = np.arange(math.prod(batch), dtype=np.int32).reshape(batch)
        return numbers, np.arange(self.num_heads if by_head else 1, dtype=np.int32)


def inputs(query: Array, key: Array, value: Array) -> Shape:
    """The sizes of query, key and value, if they fit together."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key, value must have same rank, but got {shapes}.")
    if query.ndim < 3:
        raise ValueError(f"query must be [batch..., length, heads, head size], so of rank 3 or more, but got {shapes}.")
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
            f"{num_kv_heads} in {shapes}."
        )
    if query.shape[-1] < 1:
        raise ValueError(f"query head size must be at least 1, but got {shapes}.")
    if not query.dtype == key.dtype == value.dtype or query.dtype.name not in DTYPES:
        raise ValueError(
            f"query, key, value must share one dtype out of {', '.join(DTYPES)}, but got query {query.dtype}, "
            f"key {key.dtype}, value {value.dtype}; use .astype."
        )
    sizes = (query.shape[-3], key.shape[-3], num_heads, num_kv_heads, query.shape[-1], value.shape[-1])
    return Shape(query.shape[:-3], *sizes)


def bias(array: ArrayLike | None, shape: Shape) -> Array | None:
    """An array of floats that broadcasts to the scores."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.dtype.name not in DTYPES:
        mend = "; a boolean array is a mask" if array.dtype == bool else ""
        raise ValueError(f"bias must have a dtype out of {', '.join(DTYPES)}, but got {array.dtype}{mend}.")
    return _broadcastable("bias", array, shape.scores, "[batch..., heads, queries, keys]")


def mask(array: ArrayLike | None, shape: Shape) -> Array | None:
    """A boolean array that broadcasts to the scores."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.dtype != bool:
        raise ValueError(
            f"mask must be bool (True attends), but got {array.dtype}; use mask.astype(bool) if it holds 0 and 1, "
            "or pass it as bias if it is to be added to the scores."
        )
    return _broadcastable("mask", array, shape.scores, "[batch..., heads, queries, keys]")


def per_sequence(name: str, array: ArrayLike | None, shape: Shape) -> Array | None:
    """One integer for every batch entry, or one for all."""
    if array is None:
        return None
    array = _integers(name, array)
    if not shape.batch and array.shape == (1,):  # what jax.nn expects of inputs without a batch axis
        array = array[0]
    return _broadcastable(name, array, shape.batch, "[batch...]")


def offset(value: int | ArrayLike, shape: Shape) -> tuple[int, Array | None]:
    """The position of the first query as a number, and the same as an array where it is one."""
    if _is_int(value):
        return int(value), None  # type: ignore[arg-type]
    return 0, per_sequence("query_offset", value, shape)


def segment_ids(
    query_ids: ArrayLike | None, key_ids: ArrayLike | None, shape: Shape
) -> tuple[Array, Array] | tuple[None, None]:
    """The segments of queries and keys; one stands for both where the lengths are the same."""
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
        ids = _integers(name, partner if given is None else given)  # type: ignore[arg-type]
        if ids.ndim == 0 or ids.shape[-1] != length:
            raise ValueError(f"{name} must be [batch..., {length}], one id a position, but got shape {ids.shape}.")
        checked.append(_broadcastable(name, ids, (*shape.batch, length), "[batch..., length]"))
    return checked[0], checked[1]


def window(size: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None] | None:
    """(left, right), each an int >= 0 or None."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(side is None or (_is_int(side) and side >= 0) for side in pair):
        raise ValueError(
            f"local_window_size must be an int >= 0, or a pair (left, right) of such or None, but got {size!r}."
        )
    return None if pair == (None, None) else pair


def scale(value: ArrayLike | None, shape: Shape) -> tuple[float, Array | None]:
    """The factor as a number, and the same as an array where it is one (its number is then 1)."""
    if value is None:
        return 1 / math.sqrt(shape.head_size), None
    if not isinstance(value, jax.Array):
        if not isinstance(value, int | float | np.number | np.ndarray) or np.ndim(value) or not math.isfinite(value):
            raise ValueError(f"scale must be one finite number, but got {value!r}.")
        return float(value), None
    if value.shape or value.dtype.name not in DTYPES:
        raise ValueError(f"scale must be one number, but got an array of shape {value.shape} and dtype {value.dtype}.")
    return 1.0, value


def sinks(array: ArrayLike | None, shape: Shape) -> Array | None:
    """One logit a head, or what broadcasts to [B..., N]."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.dtype.name not in DTYPES:
        raise ValueError(f"sinks must have a dtype out of {', '.join(DTYPES)}, but got {array.dtype}.")
    return _broadcastable("sinks", array, (*shape.batch, shape.num_heads), "[batch..., heads]")


def soft_cap(value: float | None) -> float | None:
    """A number > 0."""
    if value is None:
        return None
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"logits_soft_cap must be a finite number > 0, known while tracing, but got {value!r}.")
    return float(value)


def dropout(rate: float, rng: Array | None) -> float:
    """The rate, in [0, 1); above 0 it needs a key."""
    if isinstance(rate, jax.core.Tracer) or not isinstance(rate, int | float | np.number) or not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be a number in [0, 1), known while tracing, but got {rate!r}.")
    if rate > 0 and rng is None:
        raise ValueError("dropout_rng must be a key where dropout_rate > 0, but got None; pass jax.random.key(0), say.")
    if rate > 0 and not _is_key(rng):
        raise ValueError(f"dropout_rng must be one key as jax.random.key makes it, but got {rng!r}.")
    return float(rate)


def flag(name: str, value: bool) -> bool:
    """True or False, known while tracing."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but got {value!r}.")
    return bool(value)


def module_heads(num_heads: int, num_kv_heads: int | None, qkv_features: int) -> None:
    """Heads that divide the features, and key/value heads that divide the heads."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, but got {num_heads} and {num_kv_heads}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads}).")
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension ({qkv_features}) must be divisible by 'num_heads' heads ({num_heads}); choose "
            "qkv_features to be a multiple of num_heads."
        )


def normalization(kind: bool | str) -> bool | str:
    """False, True, or the norm's name."""
    if kind not in (False, True, "layer_norm", "rms_norm"):
        raise ValueError(f'normalize_qk must be False, True, "layer_norm" or "rms_norm", but got {kind!r}.')
    return kind


def given_or_same(inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
    """Keys, by default the queries, and values, by default the keys."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def module_inputs(inputs_q: Array, inputs_k: Array, inputs_v: Array) -> None:
    """Inputs [batch..., length, features] that fit each other."""
    shapes = f"inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}, inputs_v {inputs_v.shape}"
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(f"inputs must have same rank, 2 or more ([batch..., length, features]), but got {shapes}.")
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")


def module_segment_ids(ids: Array | tuple[Array, Array] | None) -> dict[str, Array | None]:
    """One array for queries and keys, or a pair, as arguments of the attention."""
    query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
    return {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_key(rng: object) -> bool:
    if not isinstance(rng, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.shape == ()
    return rng.dtype == jnp.uint32 and rng.ndim == 1


def _integers(name: str, array: ArrayLike) -> Array:
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, but got {array.dtype}; use .astype(jnp.int32).")
    return array.astype(jnp.int32)


def _broadcastable(name: str, array: Array, shape: tuple[int, ...], meaning: str) -> Array:
    """`array` with axes of length 1 in front until it has the rank of `shape`."""
    fits = array.ndim <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {meaning} = {shape}, but got shape {array.shape}.")
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
