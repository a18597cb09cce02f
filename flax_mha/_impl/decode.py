"""Attention of few queries over many keys, as in decoding: keys and values are read where they are.

Elsewhere keys and values are put into the layout of one head, which reads and writes all of them. Here a loop reads
blocks of keys [B..., S, K, H] in place, a block for all heads, and only from the first to the last block in which a
query of the batch entry sees a key. A step of decoding costs what its sequence has written to the cache, not what the
cache can hold.

Looking for keys and values that are not finite would take as long as all the rest. If any product of a query and a key,
or any output, is not finite, then everything is computed again, as `nonfinite.py` describes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from flax_mha._call import accumulation_dtype
from flax_mha._impl import heads, layout, nonfinite, online_softmax
from flax_mha._impl.nonfinite import Magnitudes
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._platform import platform, varying_alike, varying_as
from flax_mha._tiles import Grid, Scalar, Tile
from flax_mha.masks import And, CausalMask, LengthMask, LocalMask, Mask


class Blocks(NamedTuple):
    """How the scores are cut.

    Attributes:
      height: Queries of a block.
      width: Keys of a block.
      sequential: Whether batch entries run one after another, each with its own number of blocks; else together.
    """

    height: int
    width: int
    sequential: bool


class Part(NamedTuple):
    """Some of the batch entries: all, or one, whose axes have length 1 then.

    Attributes:
      first: The first of them, an index for each batch axis.
      query: Their queries, scaled; like the rest with leading axes for batch and heads.
      row: The first of these queries.
      params: What is added to the scores.
      scores: How products become scores.
    """

    first: tuple[Scalar, ...]
    query: Float[Array, "*B K G t H"]
    row: Scalar
    params: ScoreParams
    scores: Scores


def attend(
    blocks: Blocks,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    scale: Float[Array, ""],
    params: ScoreParams,
    scores: Scores,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp, without gradients."""
    query, key, value, scale, params, scores = varying_alike((query, key, value, scale, params, scores))
    batch, dtype = query.shape[:-3], accumulation_dtype(query.dtype)
    groups = (key.shape[-2], query.shape[-2] // key.shape[-2])
    queries = layout.split_heads(query.astype(dtype) * scale.astype(dtype), groups)

    def one_entry(i: Int[Array, ""], careful: bool) -> tuple[Array, Array, Array]:
        place = jnp.unravel_index(i, batch)
        own_query, own_params, own_scores = _of_entry((queries, params, scores), place)
        return _blocks_of_rows(blocks, Part(place, own_query, 0, own_params, own_scores), key, value, careful)

    def entries(careful: bool) -> list[Array]:
        if not blocks.sequential:
            everything = Part((0,) * len(batch), queries, 0, params, scores)
            return list(_blocks_of_rows(blocks, everything, key, value, careful))
        numbers = jnp.arange(math.prod(batch), dtype=jnp.int32)
        parts = lax.map(functools.partial(one_entry, careful=careful), numbers)
        return [x.reshape(*batch, *x.shape[len(batch) + 1 :]) for x in parts]

    output, lse, flag = entries(careful=False)
    if scores.masks_scores(params):  # else NaN and infinity propagate by themselves
        finite = jnp.isfinite(output).all() & jnp.isfinite(flag).all()
        output, lse = lax.cond(finite, lambda: [output, lse], lambda: entries(careful=True)[:2])
    return layout.to_caller(output, lse, query.dtype)


def _of_entry(tree: Any, place: tuple[Array, ...]) -> Any:
    """What belongs to the batch entry at `place`; its batch axes have length 1."""

    def own(x: Array) -> Array:
        for axis, i in enumerate(place):
            x = x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, i, 1, axis)
        return x

    return jax.tree.map(own, tree)


def _blocks_of_rows(
    blocks: Blocks, part: Part, key: Array, value: Array, careful: bool
) -> tuple[Float[Array, "*B K G T Hv"], Float[Array, "*B K G T"], Float[Array, "..."]]:
    """Output and log-sum-exp, a block of queries after the other, and `_nonfinite_flag` of all products."""
    length = part.query.shape[-2]
    count = -(-length // blocks.height)

    def rows(row: Scalar) -> tuple[Array, Array, Array]:
        query = lax.dynamic_slice_in_dim(part.query, row, blocks.height, part.query.ndim - 2)
        return _rows(blocks, part._replace(query=query, row=row), key, value, careful)

    if count == 1:
        return rows(0)
    # The last block ends at the last query: it computes some queries of the one before again.
    firsts = np.minimum(np.arange(count) * blocks.height, length - blocks.height)
    output, lse, flag = lax.map(rows, jnp.asarray(firsts, jnp.int32))
    axis, again = part.query.ndim - 2, count * blocks.height - length

    def joined(x: Float[Array, "blocks ..."]) -> Float[Array, "..."]:
        return jnp.concatenate([*x[:-1], lax.slice_in_dim(x[-1], again, blocks.height, axis=axis)], axis=axis)

    return joined(output), joined(lse), flag.sum(0)  # a sum passes NaN on


def _rows(blocks: Blocks, part: Part, key: Array, value: Array, careful: bool) -> tuple[Array, Array, Array]:
    """The same of one block of queries."""
    axes, dtype = part.query.ndim - 2, part.query.dtype
    begin, end = _visited(blocks, part, key.shape[-3])

    def start(own: tuple[Array, ScoreParams]) -> tuple[online_softmax.State, Array]:
        return online_softmax.start(blocks.height, value.shape[-1], own[1].sink, dtype), jnp.zeros((), dtype)

    nothing = varying_as(part.query, heads.over_heads(start, (part.query, part.params), axes))
    step = functools.partial(_step, blocks, part, key, value, careful)
    state, flag = lax.fori_loop(jnp.int32(begin), jnp.int32(end), step, nothing)
    return *heads.over_heads(online_softmax.finish, state, axes), flag


def _step(
    blocks: Blocks, part: Part, key: Array, value: Array, careful: bool, i: Int[Array, ""], carry: tuple
) -> tuple:
    """Takes in block i of the keys."""
    length = key.shape[-3]
    column = jnp.minimum(i * blocks.width, length - blocks.width)  # the last block ends at the last key
    k, v = (_block(x, part, column, blocks.width) for x in (key, value))

    def one_head(own: tuple) -> tuple[online_softmax.State, Array]:
        q, k, v, params, scores, (state, flag) = own
        tile = Tile(part.row, column, (blocks.height, blocks.width), scores.offsets, ring=scores.ring)
        marks = row_marks = None
        if careful:
            k, v, of_keys = nonfinite.finite_keys(k, v)
            magnitudes = Magnitudes(nonfinite.magnitude_of(q), of_keys)
            marks, row_marks = magnitudes.marks_of_keys(), magnitudes.marks_of_rows(unmasked=False)
        products = scores.dot(k, q, transpose_b=True).T  # in this order XLA does not transpose the keys
        s = scores.tile(products, params.cut(tile), tile, scores.mask, marks)
        if length % blocks.width:
            s = jnp.where(tile.columns >= i * blocks.width, s, -jnp.inf)
        kept = scores.dropout_multiplier(tile, s.dtype)

        def weigh(weights: Float[Array, "t s"]) -> Float[Array, "t Hv"]:
            return scores.dot(weights if kept is None else weights * kept, v)

        return online_softmax.update(state, s, weigh, row_marks), _nonfinite_flag(flag, products, scores)

    return heads.over_heads(one_head, (part.query, k, v, part.params, part.scores, carry), part.query.ndim - 2)


def _block(x: Float[Array, "*B S K F"], part: Part, column: Scalar, width: int) -> Float[Array, "*B K 1 s F"]:
    """The keys or values of a part from this column on, in the layout of one head."""
    batch, (_, num_heads, size) = part.query.shape[:-4], x.shape[-3:]
    start = [jnp.asarray(i, jnp.int32) for i in (*part.first, column, 0, 0)]
    shape, dtype = (*batch, width, num_heads, size), part.query.dtype

    def read() -> Array:
        return lax.dynamic_slice(x, start, shape, allow_negative_indices=False).astype(dtype)

    if x.dtype != jnp.bfloat16 or platform() != "cpu":
        return layout.split_heads(read(), (num_heads, 1))
    # XLA's CPU converts an array before it takes a part of it, and would do so with all of it before the loop. Nothing
    # is moved out of a branch; that this one is always taken, XLA must not know.
    nothing = varying_as(x, jnp.zeros(shape, dtype))
    always = lax.optimization_barrier(start[-3]) >= 0
    return layout.split_heads(lax.cond(always, read, lambda: nothing), (num_heads, 1))


def _nonfinite_flag(before: Float[Array, ""], products: Float[Array, "t s"], scores: Scores) -> Float[Array, ""]:
    """A number that is not finite if a product is not, and if this does not make the output NaN anyway.

    NaN and infinity make the output NaN. Minus infinity does not: such a score counts as masked. A soft cap or a
    `score_mod` may return finite scores for all three.
    """
    if scores.soft_cap is None and scores.score_mod is None:
        return jnp.minimum(before, jnp.min(products))
    return before + jnp.sum(products * 0)


def _visited(blocks: Blocks, part: Part, length: int) -> tuple[Scalar, Scalar]:
    """The first block of keys in which some query may see one, and one past the last."""
    scores, count = part.scores, -(-length // blocks.width)
    if scores.ring is not None:  # all of it, or what has been written since it was empty
        written = jnp.minimum(jnp.max(scores.offsets[1]), length - 1) + 1
        return 0, jnp.maximum(-(-written // blocks.width), 0)
    mask = _bounds(scores.mask)
    if mask is None:
        return 0, count

    def one_head(own: tuple) -> Bool[Array, " count"]:
        mask, offset_arrays = own
        query, key = (n if x is None else x for n, x in zip(scores.offset_numbers, offset_arrays, strict=True))
        grid = Grid((1, count), (blocks.height, blocks.width), (query + part.row, key))
        return jnp.broadcast_to(mask.occupancy(grid).any_visible, (1, count))[0]

    some = heads.over_heads(one_head, (mask, scores.offset_arrays), part.query.ndim - 2)
    some = some.any(range(some.ndim - 1))
    before, after = (jnp.argmax(x).astype(jnp.int32) for x in (some, some[::-1]))
    return before, jnp.where(some.any(), count - after, 0)


def _bounds(mask: Mask | None) -> Mask | None:
    """The parts of the mask that bound the visible positions, if there are any."""
    if isinstance(mask, And):
        left, right = _bounds(mask.left), _bounds(mask.right)
        return left if right is None else right if left is None else And(left, right)
    return mask if isinstance(mask, CausalMask | LocalMask | LengthMask) else None
