"""Checks the arguments of `dot_product_attention`, with `core/validation.py`, and makes
a `Call` of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.call import (
    Call,
    Context,
    ScoreMod,
    Sharding,
    accumulation_dtype,
)
from flax_mha._src.core import validation
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import Target, is_key, target_of
from flax_mha._src.core.user_function import trace
from flax_mha._src.core.validation import (
    DTYPES,
    Shape,
    as_array,
    broadcastable,
    check_bool,
    is_finite,
    is_int,
    number_in,
    over_scores,
)
from flax_mha._src.masks import (
    ArrayMask,
    CausalMask,
    LengthMask,
    LocalMask,
    Mask,
    SegmentMask,
)
from flax_mha._src.masks.base import shows_future
from flax_mha._src.masks.function import check_lookups
from flax_mha._src.masks.visible import Visible

# Arguments that only modules accept, and the arguments of functions to use instead.
SIBLINGS = {
    "lengths": "query_seq_lengths and key_value_seq_lengths",
    "segment_ids": "query_segment_ids and key_value_segment_ids",
}
F = TypeVar("F", bound=Callable[..., Any])
LARGEST_CAP = 1e30  # beyond it, score / cap is so small that float32 makes it 0


def unexpected(function: str, name: str) -> TypeError:
    """Returns Python's error for an unknown argument `name`. If only modules accept it,
    the error says what to use.
    """
    fix = ""
    if name in SIBLINGS:
        fix = f"; only modules accept {name}; use {SIBLINGS[name]} instead"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{fix}")


def naming_siblings(function: F) -> F:
    """Wraps an attention function: for an argument that only modules accept, the error
    says what to use instead.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        misplaced = SIBLINGS.keys() & keywords
        if misplaced:
            raise unexpected(function.__name__, min(misplaced))
        return function(*arguments, **keywords)

    return cast(F, call)


class CommonArguments(TypedDict, total=False):
    """The keyword arguments that `dot_product_attention` shares with
    `cached_attention`.
    """

    scale: float | ArrayLike | None
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    score_mod: ScoreMod | None
    key_indices: ArrayLike | None
    dropout_rate: float
    dropout_rng: Array | None
    broadcast_dropout: bool
    precision: lax.PrecisionLike
    qkv_sharding: Sharding | None


class Arguments(CommonArguments, total=False):
    """The keyword-only arguments of `dot_product_attention` except `implementation` and
    the `return_` flags.
    """

    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    query_offset: int | ArrayLike | None
    key_value_offset: int | ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None


class CallArguments(Arguments, total=False):
    """All keyword arguments of `dot_product_attention` but `return_residual` and
    `implementation`.
    """

    return_max_score: bool


def check_inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, any_dtypes: bool = False
) -> tuple[Array, Array, Array, Shape]:
    """Converts query, key and value to arrays and checks them; also returns sizes.
    `any_dtypes`: dtypes may differ.
    """
    meaning = "[batch..., length, heads, head size]"

    def converted(name: str, x: ArrayLike) -> Array:
        if isinstance(x, jax.Array):
            return x
        return as_array(name, x, f"an array {meaning}")

    query = converted("query", query)
    key = converted("key", key)
    value = converted("value", value)

    # Only for errors, because it takes long.
    def shapes() -> str:
        return f"query {query.shape}, key {key.shape}, value {value.shape}"

    # Shapes.
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must have the same rank, but got {shapes()}."
        )
    if query.ndim < 3:
        raise ValueError(
            f"query must have rank 3 or more ({meaning}), but got {shapes()}."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key, value batch dims must match, but got {shapes()}."
        )
    sizes_to_match = (
        ("key, value lengths", key.shape[-3], value.shape[-3]),
        ("query, key depths", query.shape[-1], key.shape[-1]),
        ("key, value heads", key.shape[-2], value.shape[-2]),
    )
    for name, one, other in sizes_to_match:
        if one != other:
            raise ValueError(
                f"{name} must match, but got {one} and {other} in {shapes()}."
            )
    num_heads = query.shape[-2]
    num_kv_heads = key.shape[-2]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "query heads must be a multiple of key/value heads, both at least 1, but "
            f"got {num_heads} and {num_kv_heads} in {shapes()}; the expected layout is "
            f"{meaning}. To convert from PyTorch's [batch, heads, length, head size], "
            "use jnp.swapaxes(x, -3, -2)."
        )
    if query.shape[-1] < 1:
        raise ValueError(f"query head size must be at least 1, but got {shapes()}.")

    # Dtypes.
    dtypes = {query.dtype, key.dtype, value.dtype}
    same_dtype = any_dtypes or len(dtypes) == 1
    are_floats = all(dtype.name in DTYPES for dtype in dtypes)
    if not same_dtype or not are_floats:
        raise ValueError(
            f"query, key, value must have the same dtype, one of {', '.join(DTYPES)}, "
            f"but got query {query.dtype}, key {key.dtype}, value {value.dtype}; use "
            ".astype."
        )
    shape = Shape(
        batch=query.shape[:-3],
        query_length=query.shape[-3],
        key_length=key.shape[-3],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=query.shape[-1],
        value_size=value.shape[-1],
    )
    return query, key, value, shape


def check_floats(name: str, value: ArrayLike | None) -> Array | None:
    """Checks that bias or sinks are an array of floats."""
    if value is None:
        return None
    array = as_array(name, value, "an array of floats")
    if array.dtype.name not in DTYPES:
        fix = ""
        if array.dtype == bool and name == "bias":
            fix = "; pass a boolean array as mask="
        raise ValueError(
            f"{name} must have one of the dtypes {', '.join(DTYPES)}, but got "
            f"{array.dtype}{fix}."
        )
    return array


def _positions(
    name: str, offset: ArrayLike | None, length: int, shape: Shape
) -> tuple[Any, int, int]:
    """Checks one offset, the argument `name`, of a sequence of this length. Returns it
    as an int or an array with an offset per sequence, and the lowest and the highest
    position.
    """
    checked: Any
    if offset is None:
        offset = 0
    if is_int(offset):
        checked = int(offset)
        first = last = checked
    else:
        checked = validation.per_sequence(name, offset, shape)
        first, last = validation.extremes(checked)
    # A symbol of `jax.export` has no known size.
    if isinstance(length, int):
        last = last + max(length, 1) - 1
    if first < validation.INT32_MIN or last > validation.INT32_MAX:
        raise ValueError(
            f"{name} must keep positions within the int32 range, but they run from "
            f"{first} to {last}; use a smaller offset."
        )
    return checked, first, last


def check_offsets(
    query_offset: ArrayLike | None, key_offset: ArrayLike | None, shape: Shape
) -> Offsets:
    """Checks the positions of the first query and key: all positions and distances must
    fit in int32. None means 0.
    """
    query_offset, first_query, last_query = _positions(
        "query_offset", query_offset, shape.query_length, shape
    )
    key_offset, first_key, last_key = _positions(
        "key_value_offset", key_offset, shape.key_length, shape
    )
    largest_distance = max(last_query - first_key, last_key - first_query)
    if largest_distance > validation.INT32_MAX:
        raise ValueError(
            "query_offset and key_value_offset must keep distances within the int32 "
            f"range, but queries are at positions {first_query} to {last_query} "
            f"and keys at {first_key} to {last_key}; use smaller offsets."
        )
    return Offsets.of(query_offset, key_offset)


def check_window(size: Any) -> tuple[int | None, int | None] | None:
    """Checks a window size; returns how far a query attends (before itself, after
    itself), or None if both are None.
    """
    pair = (size, size)
    if isinstance(size, tuple | list):
        pair = tuple(size)
    sides = [side for side in pair if side is not None]
    are_valid = all(is_int(side) and side >= 0 for side in sides)
    if len(pair) != 2 or not are_valid:
        raise ValueError(
            "local_window_size must be an int >= 0, or a pair (left, right) with "
            f"entries >= 0 or None, but got {size!r}."
        )
    if not sides:
        return None
    return pair


def check_is_causal(is_causal: Any, mask: Any) -> bool:
    """Returns `is_causal` as a bool; None counts as True, as it does while decoding.

    Raises a ValueError if the call is causal, but the mask is made to show later
    tokens, as `CausalMask() | mask` is.
    """
    given = is_causal
    is_causal = given is None or check_bool("is_causal", given)
    if is_causal and isinstance(mask, Mask) and shows_future(mask):
        raise ValueError(
            "is_causal must be False if mask shows later tokens, as CausalMask() | "
            f"mask does, because a causal call would hide them, but got {given}; pass "
            "is_causal=False (while decoding, None means True)."
        )
    return is_causal


def check_scale(value: Any, shape: Shape) -> tuple[float, Array | None]:
    """Checks a scale; returns (1.0, array) for a JAX array, otherwise (number, None). A
    `value` of None is 1 / sqrt(H).
    """
    if value is None:
        return 1 / math.sqrt(shape.head_size), None
    value = validation.unwrapped(value)
    # Python's and NumPy's numbers are static: fused kernels take no array.
    if not isinstance(value, jax.Array):
        number = number_in(value)
        if not is_finite(number):
            raise ValueError(f"scale must be a finite number, but got {value!r}.")
        if abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"scale must fit in float32, but got {value!r}.")
        return float(number), None
    if value.shape or value.dtype.name not in DTYPES:
        raise ValueError(
            f"scale must be a scalar, but got an array of shape {value.shape} and "
            f"dtype {value.dtype}."
        )
    return 1.0, value


def check_precision(value: Any) -> Any:
    """Checks that `jax.lax.dot_general` accepts `value` as its precision, and returns
    it in a hashable form.
    """
    if isinstance(value, list):
        value = tuple(value)
    # JAX decides, as it does for its own products.
    try:
        _dot_with(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            'precision must be None, "default", "high", "highest" or a '
            f"jax.lax.Precision, but got {value!r}."
        ) from error
    return value


@functools.cache
def _dot_with(precision: Any) -> None:
    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), x)


def check_soft_cap(value: float | None) -> float | None:
    if value is None:
        return None
    value = number_in(value)
    if not is_finite(value) or value <= 0:
        raise ValueError(
            f"logits_soft_cap must be a concrete finite number > 0, but got {value!r}."
        )
    if value > LARGEST_CAP:
        raise ValueError(
            f"logits_soft_cap must be at most {LARGEST_CAP:g}, but got {value!r}; pass "
            "None to disable the cap."
        )
    return float(value)


def check_dropout_rate(rate: float) -> float:
    rate = number_in(rate)
    if not is_finite(rate) or not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate must be a concrete number in [0, 1), but got {rate!r}."
        )
    return float(rate)


def check_dropout(rate: float, rng: Any) -> float:
    """Checks the dropout rate and, if it is above 0, the random key `rng`; returns the
    rate.
    """
    rate = check_dropout_rate(rate)
    if rate == 0:
        return rate
    if rng is None:
        raise ValueError(
            "dropout_rng must be a key if dropout_rate > 0, but got None; pass a key "
            "such as jax.random.key(0)."
        )
    is_array = isinstance(rng, jax.Array | np.ndarray)
    raw_shape = _raw_key_shape(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    is_typed_key = is_array and is_key(rng) and not rng.shape
    is_raw_key = is_array and rng.dtype == jnp.uint32 and rng.shape == raw_shape
    if not is_typed_key and not is_raw_key:
        if hasattr(rng, "shape"):
            got = f"an array of shape {rng.shape} and dtype {rng.dtype}"
        else:
            got = repr(rng)
        raise ValueError(
            "dropout_rng must be a single key from jax.random.key, or a raw uint32 key "
            f"of shape {raw_shape}, but got {got}."
        )
    return rate


@functools.cache
def _raw_key_shape(implementation: str) -> tuple[int, ...]:
    """Returns the shape of a raw key of the random number generator `implementation`,
    such as "threefry2x32".
    """

    def data() -> Array:
        return jax.random.key_data(jax.random.key(0, impl=implementation))

    return jax.eval_shape(data).shape


def check_sharding(value: Any, rank: int) -> Any:
    if value is None or isinstance(value, Context):
        return value
    if not isinstance(value, NamedSharding | PartitionSpec):
        raise ValueError(
            "qkv_sharding must be a jax.P or a NamedSharding for the query, but got "
            f"{value!r}."
        )
    spec = value.spec if isinstance(value, NamedSharding) else value
    # An entry is the mesh axis that splits an axis of the query, or several, or None.
    names: list[Any] = []
    for entry in spec:
        if isinstance(entry, tuple):
            names.extend(entry)
        elif entry is not None:
            names.append(entry)
    are_repeated = len(set(names)) < len(names)
    if are_repeated or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "qkv_sharding must contain only mesh axis names or None, with no name "
            f"repeated, but got {spec}."
        )
    if len(spec) > rank:
        raise ValueError(
            f"qkv_sharding must have at most {rank} entries, one per axis of the "
            f"query, but got {spec}."
        )
    return value


def canonical(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: bool = False,
    platform: str | None = None,
    **arguments: Unpack[CallArguments],
) -> Call:
    """Checks the arguments of `dot_product_attention`, combines all masks into one, and
    makes a `Call`.

    To explain the call for another platform, pass its name as `platform`; None means
    the one that computes the call.
    """
    unknown = arguments.keys() - CallArguments.__optional_keys__
    if unknown:
        raise unexpected("dot_product_attention", min(unknown))
    query, key, value, shape = check_inputs(query, key, value)
    target = target_of((query, key, value), platform)
    # A Call without keys, which `with_keys` completes.
    scoring = check_scoring(query, shape, arguments, target, return_residual)
    window = check_window(arguments.get("local_window_size"))
    query_offset = arguments.get("query_offset")
    key_offset = arguments.get("key_value_offset")
    offsets = Offsets()
    most_queries: int | None = shape.query_length
    most_keys: int | None = shape.key_length
    if query_offset is not None or key_offset is not None:
        offsets = check_offsets(query_offset, key_offset, shape)
        # With any offset, even 0, the arrays may be slices of longer sequences, to
        # which lengths then refer: they may exceed the arrays.
        most_queries = None
        most_keys = None
    query_lengths = validation.lengths(
        "query_seq_lengths", arguments.get("query_seq_lengths"), shape, most_queries
    )
    key_lengths = validation.lengths(
        "key_value_seq_lengths",
        arguments.get("key_value_seq_lengths"),
        shape,
        most_keys,
    )

    masks: list[Mask | None] = [LengthMask(key_lengths, query_lengths)]
    if check_bool("is_causal", arguments.get("is_causal", False)):
        masks.append(CausalMask())
    if window is not None:
        masks.append(LocalMask(*window))
    query_ids = arguments.get("query_segment_ids")
    key_ids = arguments.get("key_value_segment_ids")
    if query_ids is not None or key_ids is not None:
        ids = validation.segment_ids(query_ids, key_ids, shape)
        masks.append(SegmentMask(*ids))
    masks.append(given_mask(mask, shape))

    indices = validation.key_indices(arguments.get("key_indices"), shape)
    return with_keys(
        scoring,
        shape,
        bias,
        masks,
        key=key,
        value=value,
        offsets=offsets,
        key_indices=indices,
    )


def check_scoring(
    query: Array,
    shape: Shape,
    arguments: CallArguments,
    target: Target,
    return_residual: bool = False,
) -> Call:
    """Returns a call without keys, for `with_keys`; checks arguments that need no keys,
    and traces `score_mod`.
    """
    number, scale_array = check_scale(arguments.get("scale"), shape)
    dtype = accumulation_dtype(query.dtype)
    score_mod = arguments.get("score_mod")
    function = None
    captured: list[Array] = []
    constants: list[Array] = []
    if score_mod is not None:
        function, captured, constants = trace("score_mod", score_mod, dtype)
    dropout_rng = arguments.get("dropout_rng")
    rate = check_dropout(arguments.get("dropout_rate", 0.0), dropout_rng)
    if rate == 0:
        dropout_rng = None
    sinks = check_floats("sinks", arguments.get("sinks"))
    if sinks is not None:
        of_heads = (*shape.batch, shape.num_heads)
        sinks = broadcastable("sinks", sinks, of_heads, "[batch..., heads]")

    broadcast_dropout = arguments.get("broadcast_dropout", False)
    return_max_score = arguments.get("return_max_score", False)
    return Call(
        query=query,
        sinks=sinks,
        captured=captured,
        constants=constants,
        scale_array=scale_array,
        dropout_rng=dropout_rng,
        dtype=dtype,
        target=target,
        scale=number,
        soft_cap=check_soft_cap(arguments.get("logits_soft_cap")),
        score_mod=function,
        dropout_rate=rate,
        broadcast_dropout=check_bool("broadcast_dropout", broadcast_dropout),
        precision=check_precision(arguments.get("precision")),
        return_residual=check_bool("return_residual", return_residual),
        return_max_score=check_bool("return_max_score", return_max_score),
        sharding=check_sharding(arguments.get("qkv_sharding"), query.ndim),
    )


def with_keys(
    scoring: Call,
    shape: Shape,
    bias: ArrayLike | None,
    masks: Sequence[Mask | None],
    **keys: Any,
) -> Call:
    """Returns a call from `check_scoring` with bias, all masks together, and the fields
    `keys`: key, value, offsets, and others that depend on them. Checks bias and
    functions.
    """
    visible = Visible.of(masks)
    checked_bias = check_floats("bias", bias)
    if checked_bias is not None:
        checked_bias = over_scores("bias", checked_bias, shape)
    # `jax.export` may replace sizes by symbols.
    sizes = (*shape.batch, *shape[1:])
    call = scoring.replace(
        bias=checked_bias,
        mask=visible,
        has_known_sizes=all(isinstance(size, int) for size in sizes),
        **keys,
    )
    # A mask that calls a function holds arrays, at least the indices of its heads.
    if call.score_mod is not None or jax.tree.leaves(visible):
        check_lookups(shape, call.score_mod, visible, call.offsets, call.lengths)
    return call


def given_mask(mask: ArrayLike | Mask | None, shape: Shape) -> Mask | None:
    if mask is None:
        return None
    if isinstance(mask, Mask):
        return mask.canonical(shape)
    return ArrayMask(validation.mask(mask, shape))
