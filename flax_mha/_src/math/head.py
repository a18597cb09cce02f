"""Converts a call to the layout of one head, and maps functions of one head over batch
and heads (`map_heads`).

The math is written for one head. In the *layout of one head*, batch and heads come
first in every array: [B..., K | 1, G | 1, array of one head]. B are the batch axes, K
counts key heads, and G = N / K counts the query heads that share a key head (head n has
key head n // G). Along an axis of length 1, all heads share one entry.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src import guard
from flax_mha._src.call.call import Call, LogSumExp, NonFinite, Result
from flax_mha._src.core.eight_bits import dequantize_cache
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.core.tile import Offsets, Scalar, Tile
from flax_mha._src.core.tracing import T, being_traced
from flax_mha._src.masks import Mask
from flax_mha._src.math.derivatives import replace_at
from flax_mha._src.math.scores import ScoreInputs, ScoreRule

AnyArray = TypeVar("AnyArray", Array, np.ndarray)
# Output, log-sum-exp and, with `return_max_score`, the largest score of each row (the
# scores of one query): of one head or, with axes L, of many.
ResultsOfHead = tuple[Float[Array, "*L T Hv"], LogSumExp, Float[Array, "*L T"] | None]


class Listed(NamedTuple):
    """For t consecutive queries, the keys that each attends to (`key_indices`)."""

    first: Int[Array, ""]  # number of the first of these queries
    indices: Int[Array, "t k"]  # indices of keys; -1 means no key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """One head's arrays and score rule or, with leading axes [B..., K, G], those of all
    heads.
    """

    query: Float[Array, "... T H"]  # scaled, or to be scaled by `rule.scale`
    key: Float[Array, "... S H"]
    value: Float[Array, "... S Hv"]
    inputs: ScoreInputs
    rule: ScoreRule
    # Flags of queries and keys that were not finite; None if nothing can be masked.
    nonfinite: NonFinite | None
    # If given, each query has its own keys and values [T, k, H]; else all share keys.
    listed: Listed | None = None

    @property
    def finite_query(self) -> Float[Array, "... T H"]:
        """The queries, with zeros in place of those that hold NaN or infinity."""
        if self.nonfinite is None:
            return self.query
        return guard.zero(self.query, self.nonfinite.query)

    @property
    def whole(self) -> Tile:
        """The tile that holds all scores of the head."""
        row: Scalar = 0
        indices = None
        if self.listed is not None:
            row, indices = self.listed
        return Tile(
            row=row,
            column=0,
            shape=(self.query.shape[0], self.key.shape[-2]),
            offsets=self.rule.offsets.values,
            ring=self.rule.ring,
            indices=indices,
        )


def heads_of(call: Call, dtype: DTypeLike) -> Head:
    """Returns the arrays of a call as a `Head` with axes [B..., K, G, ...].

    Query, key and value are converted to `dtype`, that of operands of matrix products.
    The scale multiplies the queries. But if it is a number, and queries are rounded to
    a narrower `dtype`, it multiplies the products, as `rule.scale`.
    """
    inputs, rule = scores_of(call)
    nonfinite = call.nonfinite

    # The scale of softmax(scale * Q K^T).
    query = call.query.astype(rule.dtype)
    if call.scale_array is not None:
        # The gradient of the scale is a sum over the queries, so these must be finite.
        if nonfinite is not None:
            query = guard.zero(query, nonfinite.query)
        query = query * call.scale_array.astype(rule.dtype)
    elif dtype == rule.dtype:  # otherwise, scaling would round the query
        query = query * call.scale
        rule = rule.replace(scale=1.0)

    groups = call.groups
    key_groups = (groups[0], 1)
    queries = split_heads(query.astype(dtype), groups)
    keys = split_heads(call.key.astype(dtype), key_groups)
    values = split_heads(call.value.astype(dtype), key_groups)
    if nonfinite is not None:
        nonfinite = NonFinite(
            query=vectors_by_head(nonfinite.query, groups),
            key=vectors_by_head(nonfinite.key, key_groups),
        )
    return Head(queries, keys, values, inputs, rule, nonfinite)


def with_float_keys(call: Call, dtype: DTypeLike) -> Call:
    """Converts keys and values in 8 bits to `dtype`; leaves others as they are."""
    if call.cache_scale is None:
        return call
    key, value = dequantize_cache(
        call.key, call.value, call.cache_scale, value_size=call.value_size, dtype=dtype
    )
    return call.replace(key=key, value=value, cache_scale=None)


def scores_of(call: Call) -> tuple[ScoreInputs, ScoreRule]:
    """Collects everything except query and key that a call's scores depend on, in the
    layout of one head.

    Returns the arrays that get gradients, and a rule that holds everything else.
    """
    convert = functools.partial(by_head, batch_rank=len(call.batch), groups=call.groups)

    bias = call.bias
    if bias is not None:
        bias = convert(bias, "B N T S")
    sink = call.sinks
    if sink is not None:
        sink = convert(sink, "B N").astype(call.dtype)
    captured = _captured_by_head(call, convert)

    call = with_indices(call)
    fields = {x.name: getattr(call, x.name) for x in dataclasses.fields(ScoreRule)}
    rule = ScoreRule(**fields).map_arrays(convert)
    return ScoreInputs(bias, sink, captured), rule


def _captured_by_head(
    call: Call, convert: Callable[[Array, str], Array]
) -> list[Array]:
    """Splits a captured array by head if `score_mod` indexes it only as array[b, h,
    ...]; heads share the others.

    Every tile adds to the gradients of its head's captured arrays, so small arrays save
    time. A head's entry has the shape [1, 1, ...]. `score_mod` still works, because JAX
    clamps the indices b and h to 0.
    """
    if call.score_mod is None:
        return []
    size = (math.prod(call.batch), call.num_heads)
    arrays = []
    for i, x in enumerate(call.captured):
        has_entries = call.score_mod.entries_of_heads[i]
        # A slice of a larger call gets its own entries.
        if has_entries and call.batch_index is not None:
            x = x[call.batch_index.reshape(-1, 1), call.head_index]
        if has_entries and x.shape[:2] == size:
            x = x.reshape(*call.batch, call.num_heads, 1, 1, *x.shape[2:])
            arrays.append(convert(x, "B N 1 1 ..."))
        else:
            arrays.append(convert(x, ""))
    return arrays


def with_indices(call: Call) -> Call:
    """Adds the indices b and h that `score_mod` gets, and two random words for each
    head, which seed its dropout.

    A slice of a larger call keeps the indices and seeds that were made for it.
    """
    if call.batch_index is not None or call.dropout_seed is not None:
        return call
    made: dict[str, Any] = {}
    if call.score_mod is not None:
        entries = jnp.arange(math.prod(call.batch), dtype=jnp.int32)
        made["batch_index"] = entries.reshape(call.batch)
        made["head_index"] = jnp.arange(call.num_heads, dtype=jnp.int32)
    if call.dropout_rng is not None:
        shape = (*call.batch, call.num_heads)
        if call.broadcast_dropout:
            shape = (1,) * len(shape)
        made["dropout_seed"] = jax.random.bits(
            call.dropout_rng, (*shape, 2), jnp.uint32
        )
    return call.replace(**made)


def by_head(
    x: AnyArray, axes: str, batch_rank: int, groups: tuple[int, int]
) -> AnyArray:
    """Converts an array to the layout of one head; batch and head axes that it lacks
    get length 1.

    `axes` names the array's axes, for example "B N T S" (see `masks/base.py`);
    `batch_rank` is the number of batch axes, and `groups` is (K, G).
    """
    names = axes.split()
    batch: tuple[int, ...] = (1,) * batch_rank
    head = (1, 1)
    place = 0  # the first axis of the part that belongs to one head
    if "B" in names:
        batch = x.shape[:batch_rank]
        place = batch_rank
    if "N" in names:
        if x.shape[place] != 1:
            head = groups
        place += 1
    return x.reshape(*batch, *head, *x.shape[place:])


def mask_by_head(mask: Mask, batch_rank: int, groups: tuple[int, int]) -> Mask:
    return mask.map_arrays(
        functools.partial(by_head, batch_rank=batch_rank, groups=groups)
    )


def split_heads(
    x: Float[Array, "*B P N F"], groups: tuple[int, int]
) -> Float[Array, "*B K G P F"]:
    """Converts the vectors of P positions to the layout of one head; `groups` is (K, G)
    for queries, and (K, 1) for keys and values.
    """
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])


def vectors_by_head(
    x: Float[Array, "*B P N"], groups: tuple[int, int]
) -> Float[Array, "*B K G P"]:
    """Converts an array with a scalar per position and head to the layout of one head;
    see `split_heads`.
    """
    rank = x.ndim - 2
    x = lax.transpose(x, (*range(rank), rank + 1, rank))
    return lax.reshape(x, (*x.shape[:rank], *groups, x.shape[-1]))


def to_caller(results: ResultsOfHead, dtype: DTypeLike) -> Result:
    """Converts results from the layout of one head to the caller's layout [B..., T, N],
    and the output to `dtype`.
    """
    output, *rows = results
    lse, largest = jax.tree.map(lambda x: join_heads(x[..., None])[..., 0], rows)
    return Result(join_heads(output).astype(dtype), lse, largest)


def from_caller(
    result: Result, groups: tuple[int, int]
) -> tuple[Float[Array, "*B K G T Hv"], LogSumExp]:
    """Converts output and log-sum-exp to the layout of one head, in the log-sum-exp's
    dtype; `groups` is (K, G).
    """
    lse: Any = result.lse
    output = split_heads(result.output.astype(lse.log_sum.dtype), groups)
    return output, jax.tree.map(lambda x: vectors_by_head(x, groups), lse)


def join_heads(x: Float[Array, "*B K G P F"]) -> Float[Array, "*B P N F"]:
    """Inverts `split_heads`: converts vectors from the layout of one head to the
    caller's layout.
    """
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)


def map_heads(
    one_head: Callable[[Any], Any],
    operands: Any,
    axes: int,
    looped_axes: int | None = None,
    max_heads: int | None = None,
    has_loops: bool = False,
) -> Any:
    """Maps `one_head` over batch entries and heads, the first `axes` axes of every
    array.

    Each of these axes has its full size or 1. Along an axis of length 1, all heads
    share one entry: it is never repeated, and its gradient is the sum over these heads.
    The first `looped_axes` axes are looped over (`lax.map`), the others are vmapped.
    Every result begins with the same axes.

    Args:
      one_head: A function of a pytree of arrays.
      operands: Pytree of arrays [axes..., part of one head].
      axes: The number of leading axes to map over.
      looped_axes: How many of these to loop over; None means 0.
      max_heads: The most heads to vmap at a time; if there are more, a loop runs over
        parts of them. None: no limit.
      has_loops: Whether `one_head` has loops with matrix products. If a tool has
        replaced these (`products_are_replaced`), all axes are looped over: to vmap a
        loop, JAX calls `lax.dot_general` with the operands inside the tool's own
        products.
    """
    if has_loops and products_are_replaced():
        looped_axes = axes
    leaves, structure = jax.tree.flatten(operands)

    # Axes of length 1 are dropped before mapping, so no array is repeated.
    mapped = []
    for leaf in leaves:
        shared = tuple(axis for axis in range(axes) if leaf.shape[axis] == 1)
        mapped.append(_squeezed(leaf, shared))

    def run(leaves: list) -> Any:
        return one_head(jax.tree.unflatten(structure, leaves))

    # The innermost axis first: each step wraps the function of the axes inside it.
    inner = 1  # the number of heads that one call of `run` computes
    unmapped = []
    for axis in reversed(range(axes)):
        is_mapped = [leaf.shape[axis] != 1 for leaf in leaves]
        if not any(is_mapped):
            unmapped.append(axis)
            continue
        size = leaves[is_mapped.index(True)].shape[axis]
        is_looped = axis < (looped_axes or 0)
        group = size  # the number of entries to vmap at a time
        if is_looped:
            group = 1
        elif max_heads is not None and max_heads // max(inner, 1) < size:
            group = _largest_divisor(size, max_heads // max(inner, 1))
        if is_looped or group < size:
            run = functools.partial(_loop, run, is_mapped, group)
        else:
            in_axes = [0 if flag else None for flag in is_mapped]
            run = jax.vmap(run, (in_axes,))
        inner *= size
    results = run(mapped)
    unit = tuple(reversed(unmapped))
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), results)


def _largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` that is at most `limit`, at least 1."""
    divisor = max(limit, 1)
    while number % divisor:
        divisor -= 1
    return divisor


def _loop(
    run: Callable[[list], Any], is_mapped: list[bool], group: int, leaves: list
) -> Any:
    """Maps `run` over the first axis of leaves marked in `is_mapped`, in a loop that
    vmaps `group` entries at a time.
    """
    places = [i for i, flag in enumerate(is_mapped) if flag]

    def entry(mapped: list) -> Any:
        return run(replace_at(leaves, places, mapped))

    mapped = [leaves[i] for i in places]
    batch_size = None if group == 1 else group
    return lax.map(entry, mapped, batch_size=batch_size)


def by_blocks(
    block: Callable[[Int[Array, ""]], T], queries: int, height: int, axis: int
) -> T:
    """Calls `block` on one block of queries at a time, to save memory, and joins the
    results along `axis`, their query axis.

    `block(first)` returns the results of `height` queries (or of all `queries`, if
    there are fewer), starting with query `first`.
    """
    if queries <= height:
        return block(jnp.int32(0))
    count = -(-queries // height)
    # The last block ends at the last query, so it may compute some queries of the block
    # before it again.
    again = count * height - queries
    firsts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * height, queries - height)
    # A gradient recomputes each block, instead of keeping the scores of all.
    results = lax.map(jax.checkpoint(block, prevent_cse=False), firsts)

    def joined(x: Array) -> Array:
        before = jnp.moveaxis(x[:-1], 0, axis)
        last = x[-1]
        last = lax.slice_in_dim(last, again, height, axis=axis)
        return jnp.concatenate([lax.collapse(before, axis, axis + 2), last], axis=axis)

    return jax.tree.map(joined, results)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """Returns one head's arrays of the pytree `operands`; `place` holds the head's
    index along each leading axis.
    """

    def entry(x: Any) -> Any:
        index = []
        for i, size in zip(place, x.shape, strict=False):
            index.append(0 if size == 1 else i)
        return x[tuple(index)]

    return jax.tree.map(entry, operands)


def _squeezed(x: Array | np.ndarray, axes: tuple[int, ...]) -> Array | np.ndarray:
    if isinstance(x, np.ndarray):
        return np.squeeze(x, axes)
    return lax.squeeze(x, axes)


def numbers_as_arrays(call: Call) -> Call:
    """Converts the scale and nonzero offsets to arrays, so that a call with other
    values does not compile again.

    Inside a caller's `jit` they stay Python numbers: that program is compiled anyway,
    and constants make it faster. Offsets of 0 always stay numbers, so that the tiles to
    visit can be computed at trace time.
    """
    if being_traced():
        return call
    rank = len(call.batch)
    values = []
    for x in call.offsets.values:
        if isinstance(x, int) and x:
            x = jnp.asarray(x, jnp.int32)
        values.append(x)
    offsets = jax.tree.map(
        lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape), Offsets.of(*values)
    )
    scale: Any = call.scale_array
    if scale is None:
        # A NumPy array, because creating a JAX array takes a large part of the time of
        # a small call.
        scale = np.asarray(call.scale, call.dtype)
    return call.replace(offsets=offsets, scale_array=scale, scale=1.0)
