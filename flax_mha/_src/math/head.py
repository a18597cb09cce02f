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
from flax_mha._src.call.operands import (
    Call,
    IdsAndSeeds,
    NonFinite,
    Operands,
    Options,
    Result,
)
from flax_mha._src.core.tile import Offsets, Tile
from flax_mha._src.core.tracing import T, being_traced
from flax_mha._src.masks import Mask
from flax_mha._src.math.scores import ScoreInputs, ScoreRule

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


class Listed(NamedTuple):
    """The lists of keys of t consecutive queries, for calls in which each query lists
    its keys (`key_indices`).
    """

    first: Int[Array, ""]  # number of the first of these queries
    indices: Int[Array, "t k"]  # indices of keys; -1 means no key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """The arrays and the score rule of one head or, with leading axes [B..., K, G], of
    all heads.
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
        shape = (self.query.shape[0], self.key.shape[-2])
        first, indices = (0, None) if self.listed is None else self.listed
        return Tile(
            first,
            0,
            shape,
            self.rule.offsets.values,
            ring=self.rule.ring,
            indices=indices,
        )


def heads_of(call: Call, dtype: DTypeLike, stored: DTypeLike | None = None) -> Head:
    """Returns the arrays of a call as a `Head` with axes [B..., K, G, ...].

    `dtype` is the dtype of operands of matrix products. Query, key and value are
    converted to it or, for an engine that rounds them to `dtype` itself, to `stored`.
    The scale multiplies the queries. But if it is a number, and queries are rounded to
    a narrower `dtype`, it multiplies the products, as `rule.scale`.
    """
    operands, options = call
    inputs, rule = scores_of(operands, options)
    groups = operands.groups
    nonfinite = operands.nonfinite
    stored = dtype if stored is None else stored
    query = operands.query.astype(rule.dtype)
    if operands.scale is not None:
        # For the gradient of the scale.
        query = query if nonfinite is None else guard.zero(query, nonfinite.query)
        query = query * operands.scale.astype(rule.dtype)
    elif dtype == rule.dtype:
        query = query * options.scale
    else:  # scaling before the product would round the query
        rule = dataclasses.replace(rule, scale=options.scale)
    queries = split_heads(query.astype(stored), groups)
    keys, values = (
        split_heads(x.astype(stored), (groups[0], 1)) for x in operands[1:3]
    )
    if nonfinite is not None:
        nonfinite = NonFinite(
            vectors_by_head(nonfinite.query, groups),
            vectors_by_head(nonfinite.key, (groups[0], 1)),
        )
    return Head(queries, keys, values, inputs, rule, nonfinite)


def scores_of(operands: Operands, options: Options) -> tuple[ScoreInputs, ScoreRule]:
    """Collects everything except query and key that a call's scores depend on, in the
    layout of one head.

    Returns the arrays that get gradients, and a rule that holds everything else.
    """
    num_heads = operands.query.shape[-2]
    num_kv_heads = operands.key.shape[-2]
    groups = (num_kv_heads, num_heads // num_kv_heads)
    rank = operands.query.ndim - 3
    convert = functools.partial(by_head, batch_rank=rank, groups=groups)
    mask = operands.mask
    inputs = ScoreInputs(
        bias=None if operands.bias is None else convert(operands.bias, "B N T S"),
        sink=None
        if operands.sinks is None
        else convert(operands.sinks, "B N").astype(options.dtype),
        captured=_captured_by_head(operands, options, convert),
    )
    ids = zip(ids_and_seeds(operands, options), ("B", "N", "B N words"), strict=True)
    batch, head, seed = (None if x is None else convert(x, axes) for x, axes in ids)
    rule = ScoreRule(
        mask=mask.map_arrays(convert)
        if mask is not None and jax.tree.leaves(mask)
        else mask,
        offsets=jax.tree.map(lambda x: convert(x, "B"), operands.offsets),
        dropout_seed=seed,
        batch=batch,
        head=head,
        constants=[convert(x, "") for x in operands.constants],
        dtype=options.dtype,
        soft_cap=options.soft_cap,
        score_mod=options.score_mod,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
        ring=operands.key.shape[-3] if options.ring else None,
        returns_max=options.return_max_score,
        on_gpu=options.target.platform == "gpu",
    )
    return inputs, rule


def _captured_by_head(
    operands: Operands, options: Options, convert: Callable[[Array, str], Array]
) -> list[Array]:
    """Splits a captured array by head if `score_mod` indexes it only as array[b, h,
    ...]; heads share the others.

    Every tile adds to the gradients of its head's captured arrays, so small arrays save
    time. A head's entry has the shape [1, 1, ...]. `score_mod` still works, because JAX
    clamps the indices b and h to 0.
    """
    batch = operands.query.shape[:-3]
    num_heads = operands.query.shape[-2]
    ids = operands.ids_and_seeds
    arrays = list(operands.captured)
    for i, x in enumerate(arrays):
        is_entry = (
            options.score_mod is not None and options.score_mod.entries_of_heads[i]
        )
        # A slice of a larger call.
        if is_entry and ids is not None and ids.batch is not None:
            x = x[ids.batch.reshape(-1, 1), ids.head]
        is_entry = is_entry and x.shape[:2] == (math.prod(batch), num_heads)
        shape = (*batch, num_heads, 1, 1, *x.shape[2:])
        arrays[i] = (
            convert(x.reshape(shape), "B N 1 1 ...") if is_entry else convert(x, "")
        )
    return arrays


def ids_and_seeds(operands: Operands, options: Options) -> IdsAndSeeds:
    """Makes the indices b and h that `score_mod` gets, and two random words for each
    head, which seed its dropout.

    If the operands are a slice of a larger call, returns the indices and seeds that
    were made for the slice.
    """
    if operands.ids_and_seeds is not None:
        return operands.ids_and_seeds
    batch = operands.query.shape[:-3]
    num_heads = operands.query.shape[-2]
    entry = head = seed = None
    if options.score_mod is not None:
        entry = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
        head = jnp.arange(num_heads, dtype=jnp.int32)
    if operands.dropout_rng is not None:
        if options.broadcast_dropout:
            shape = (1,) * (len(batch) + 1)
        else:
            shape = (*batch, num_heads)
        seed = jax.random.bits(operands.dropout_rng, (*shape, 2), jnp.uint32)
    return IdsAndSeeds(entry, head, seed)


def by_head(
    x: AnyArray, axes: str, batch_rank: int, groups: tuple[int, int]
) -> AnyArray:
    """Converts an array to the layout of one head; batch and head axes that it lacks
    get length 1.

    `axes` names the array's axes, for example "B N T S" (see `masks/base.py`);
    `batch_rank` is the number of batch axes, and `groups` is (K, G).
    """
    names = axes.split()
    batch = batch_rank if "B" in names else 0
    head = groups if "N" in names and x.shape[batch] != 1 else (1, 1)
    part = x.shape[batch + ("N" in names) :]
    return x.reshape(*(x.shape[:batch] if batch else (1,) * batch_rank), *head, *part)


def mask_by_head(mask: Mask, batch_rank: int, groups: tuple[int, int]) -> Mask:
    return mask.map_arrays(
        functools.partial(by_head, batch_rank=batch_rank, groups=groups)
    )


def split_heads(
    x: Float[Array, "*B L N F"], groups: tuple[int, int]
) -> Float[Array, "*B K G L F"]:
    """Converts vectors to the layout of one head; `groups` is (K, G) for queries, and
    (K, 1) for keys and values.
    """
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])


def vectors_by_head(
    x: Float[Array, "*B L N"], groups: tuple[int, int]
) -> Float[Array, "*B K G L"]:
    """Converts an array with one number for each position and head to the layout of one
    head; see `split_heads`.
    """
    rank = x.ndim - 2
    x = lax.transpose(x, (*range(rank), rank + 1, rank))
    return lax.reshape(x, (*x.shape[:rank], *groups, x.shape[-1]))


def to_caller(
    results: tuple[
        Float[Array, "*B K G T Hv"],
        Float[Array, "*B K G T"],
        Float[Array, "*B K G T"] | None,
    ],
    dtype: DTypeLike,
) -> Result:
    """Converts results from the layout of one head to the caller's layout [B..., T, N],
    and the output to `dtype`.
    """
    output, lse, largest = results
    output = join_heads(output).astype(dtype)
    lse = join_heads(lse[..., None])[..., 0]
    return Result(
        output, lse, None if largest is None else join_heads(largest[..., None])[..., 0]
    )


def from_caller(
    result: Result, groups: tuple[int, int]
) -> tuple[Float[Array, "*B K G T Hv"], Float[Array, "*B K G T"]]:
    """Converts output and log-sum-exp to the layout of one head, in the log-sum-exp's
    dtype; `groups` is (K, G).
    """
    lse: Any = result.lse
    return split_heads(result.output.astype(lse.dtype), groups), vectors_by_head(
        lse, groups
    )


def join_heads(x: Float[Array, "*B K G L F"]) -> Float[Array, "*B L N F"]:
    """Inverts `split_heads`: converts vectors from the layout of one head to the
    caller's layout.
    """
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)


def map_heads(
    one_head: Callable[[Any], Any],
    operands: Any,
    axes: int,
    looped_axes: int = 0,
    max_heads: int | None = None,
) -> Any:
    """Maps `one_head` over batch entries and heads, the first `axes` axes of every
    array.

    Each of these axes has its full size or 1. Along an axis of length 1, all heads
    share one entry: it is never repeated, and its gradient is the sum over these heads.
    The first `looped_axes` axes are looped over (`lax.map`), the others are vmapped.
    Every result begins with the same axes.

    If `one_head` has loops with matrix products, and a tool has replaced these
    (`products_are_replaced`), pass all axes as `looped_axes`: to vmap a loop, JAX calls
    `lax.dot_general` with the operands inside the tool's own products.

    Args:
      one_head: A function of a pytree of arrays.
      operands: Pytree of arrays [axes..., part of one head].
      axes: The number of leading axes to map over.
      looped_axes: How many of these to loop over.
      max_heads: The most heads to vmap at a time; if there are more, a loop runs over
        parts of them. None: no limit.
    """
    leaves, tree = jax.tree.flatten(operands)
    # By axis and array.
    is_mapped = [[leaf.shape[axis] != 1 for leaf in leaves] for axis in range(axes)]
    sizes = [
        next((leaf.shape[axis] for leaf in leaves if leaf.shape[axis] != 1), 1)
        for axis in range(axes)
    ]
    mapped = [
        _squeezed(x, tuple(axis for axis in range(axes) if x.shape[axis] == 1))
        for x in leaves
    ]

    def run(leaves: list) -> Any:
        return one_head(jax.tree.unflatten(tree, leaves))

    for axis in reversed(range(axes)):
        if not any(is_mapped[axis]):
            continue
        inner = math.prod(sizes[axis + 1 :])
        if axis < looped_axes:
            group = 1
        elif max_heads is None:
            group = sizes[axis]
        else:
            group = max_heads // max(inner, 1)
        if group < sizes[axis]:
            group = next(n for n in range(max(group, 1), 0, -1) if sizes[axis] % n == 0)
        if axis >= looped_axes and group >= sizes[axis]:
            run = jax.vmap(run, ([0 if flag else None for flag in is_mapped[axis]],))
        else:
            run = functools.partial(_loop, run, is_mapped[axis], group)
    unit = tuple(axis for axis in range(axes) if not any(is_mapped[axis]))
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), run(mapped))


def _loop(
    run: Callable[[list], Any], is_mapped: list[bool], group: int, leaves: list
) -> Any:
    """Maps `run` over the first axis of leaves marked in `is_mapped`, in a loop that
    vmaps `group` entries at once.
    """

    def entry(mapped: list) -> Any:
        following = iter(mapped)
        return run(
            [
                next(following) if flag else leaf
                for leaf, flag in zip(leaves, is_mapped, strict=True)
            ]
        )

    mapped = [leaf for leaf, flag in zip(leaves, is_mapped, strict=True) if flag]
    return lax.map(entry, mapped, batch_size=None if group == 1 else group)


def by_blocks(
    block: Callable[[Int[Array, ""]], T], queries: int, height: int, axis: int
) -> T:
    """Calls `block` for one block of queries at a time, to save memory; joins results
    along their query axis, `axis`.

    `block(first)` returns results of `height` queries from number `first` on, or of all
    `queries` if these are fewer.
    """
    if queries <= height:
        return block(jnp.int32(0))
    count = -(-queries // height)
    # The last block ends at the last query, so it may compute some queries of the block
    # before it again.
    firsts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * height, queries - height)
    results = lax.map(jax.checkpoint(block, prevent_cse=False), firsts)

    def joined(x: Array) -> Array:
        before = jnp.moveaxis(x[:-1], 0, axis)
        last = x[-1]
        again = count * height - queries
        last = lax.slice_in_dim(last, again, height, axis=axis)
        return jnp.concatenate([lax.collapse(before, axis, axis + 2), last], axis=axis)

    return jax.tree.map(joined, results)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """Returns one head's arrays of the pytree `operands`; `place` holds the head's
    index along each leading axis.
    """
    return jax.tree.map(
        lambda x: x[
            tuple(0 if n == 1 else i for i, n in zip(place, x.shape, strict=False))
        ],
        operands,
    )


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
    operands, options = call
    offsets = Offsets.of(
        *(
            jnp.asarray(x, jnp.int32) if isinstance(x, int) and x else x
            for x in operands.offsets.values
        )
    )
    scale: Any = operands.scale
    if scale is None:
        # A NumPy array, because creating a JAX array takes a large part of the time of
        # a small call.
        scale = np.asarray(options.scale, options.dtype)
    rank = operands.query.ndim - 3
    offsets = jax.tree.map(
        lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape), offsets
    )
    return Call(
        operands._replace(offsets=offsets, scale=scale), options._replace(scale=1.0)
    )
