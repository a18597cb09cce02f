"""Attention of few queries over many keys, as in decoding: keys and values are read where they are.

Elsewhere keys and values are put into the layout of one head, which reads and writes all of them. Here a loop reads
blocks of keys [B..., S, K, H] in place, a block for all heads, and only from the first to the last block in which a
query of the batch entry sees a key. A step of decoding costs what its sequence has written to the cache, not what the
cache can hold.

Looking for keys and values that are not finite would take as long as all the rest. If any product of a query and a key,
or any output, is not finite, then everything is computed again, as `nonfinite.py` describes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha._call import accumulation_dtype
from flax_mha._impl import heads, layout, nonfinite, online_softmax
from flax_mha._impl.nonfinite import Magnitudes
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._platform import platform, varying_alike, varying_as
from flax_mha._tiles import Grid, Tile
from flax_mha.masks import And, CausalMask, LengthMask, LocalMask, Mask


class Blocks(NamedTuple):
    """How the scores of a batch entry are cut.

    Attributes:
      height: Queries of a block.
      width: Keys of a block.
      sequential: Whether batch entries run one after another, each with its own number of blocks; else together.
    """

    height: int
    width: int
    sequential: bool


class Entry(NamedTuple):
    """A batch entry: its number, its queries, and the rest with leading axes [K, G]."""

    number: Int[Array, ""]
    query: Float[Array, "K G T H"]
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
    batch, groups = query.shape[:-3], (key.shape[-2], query.shape[-2] // key.shape[-2])
    scaled = query.astype(accumulation_dtype(query.dtype)) * scale.astype(accumulation_dtype(query.dtype))
    queries = layout.split_heads(scaled, groups).reshape(-1, *groups, query.shape[-3], query.shape[-1])
    keys, values = map(_Cached.of, (key, value))

    def entry(i: Int[Array, ""], careful: bool) -> tuple[Array, Array, Array]:
        own_params, own_scores = _of_entry((params, scores), jnp.unravel_index(i, batch))
        return _entry(blocks, Entry(i, queries[i], own_params, own_scores), keys, values, careful)

    def entries(careful: bool) -> tuple[Array, Array, Array]:
        one, numbers = functools.partial(entry, careful=careful), jnp.arange(queries.shape[0], dtype=jnp.int32)
        return lax.map(one, numbers) if blocks.sequential else jax.vmap(one)(numbers)

    *fast, finite = entries(careful=False)
    output, lse = lax.cond(finite.all(), lambda: fast, lambda: list(entries(careful=True)[:2]))
    output, lse = (x.reshape(*batch, *x.shape[1:]) for x in (output, lse))
    return layout.join_heads(output).astype(query.dtype), layout.join_heads(lse[..., None])[..., 0]


class _Cached(NamedTuple):
    """Keys or values [B, S, K, F] to read blocks of."""

    array: Array

    @classmethod
    def of(cls, x: Float[Array, "*B S K F"]) -> "_Cached":
        return cls(x.reshape(-1, *x.shape[-3:]))

    def block(
        self, entry: Int[Array, ""], first: Int[Array, ""], width: int, dtype: DTypeLike
    ) -> Float[Array, "K 1 s F"]:
        """The block that begins at column `first`, in the layout of one head."""
        _, _, num_heads, size = self.array.shape

        def read() -> Float[Array, "s K F"]:
            start = (entry, first, jnp.int32(0), jnp.int32(0))
            x = lax.dynamic_slice(self.array, start, (1, width, num_heads, size))[0]
            return x.astype(dtype)

        if self.array.dtype == jnp.bfloat16 and platform() == "cpu":
            # XLA's CPU converts an array before it takes a part of it, and would do so with all of it before the loop.
            # Nothing is moved out of a branch; that this one is always taken, XLA must not know.
            nothing = varying_as(self.array, jnp.zeros((width, num_heads, size), dtype))
            return layout.split_heads(
                lax.cond(lax.optimization_barrier(first) >= 0, read, lambda: nothing), (num_heads, 1)
            )
        return layout.split_heads(read(), (num_heads, 1))


def _of_entry(tree: Any, place: tuple[Array, ...]) -> Any:
    """What belongs to the batch entry at `place`; axes of size 1 are shared."""

    def own(x: Array) -> Array:
        for axis_index in place:
            x = x[0] if x.shape[0] == 1 else lax.dynamic_index_in_dim(x, axis_index, 0, keepdims=False)
        return x

    return jax.tree.map(own, tree)


def _entry(
    blocks: Blocks, own: Entry, keys: _Cached, values: _Cached, careful: bool
) -> tuple[Float[Array, "K G T Hv"], Float[Array, "K G T"], Bool[Array, ""]]:
    """Output and log-sum-exp of one batch entry, a block of queries after the other, and whether all was finite."""
    length = own.query.shape[2]
    count = -(-length // blocks.height)

    def rows(first: Int[Array, ""] | int) -> tuple[Array, Array, Array]:
        part = lax.dynamic_slice_in_dim(own.query, first, blocks.height, 2)
        return _rows(blocks, first, own._replace(query=part), keys, values, careful)

    if count == 1:
        return rows(0)
    # The last block ends at the last query: it computes some queries of the one before again.
    firsts = np.minimum(np.arange(count) * blocks.height, length - blocks.height)
    output, lse, finite = lax.map(rows, jnp.asarray(firsts, jnp.int32))
    last = count * blocks.height - length

    def joined(x: Float[Array, "blocks K G t *F"]) -> Float[Array, "K G T *F"]:
        return jnp.concatenate([*x[:-1], x[-1][:, :, last:]], axis=2)

    return joined(output), joined(lse), finite.all()


def _rows(
    blocks: Blocks, first: Int[Array, ""] | int, own: Entry, keys: _Cached, values: _Cached, careful: bool
) -> tuple[Array, Array, Array]:
    """The same of one block of queries, from query `first` on."""
    begin, end = _visited(blocks, first, own.scores, keys.array.shape[1])
    start = heads.over_heads(
        lambda x: online_softmax.start(blocks.height, values.array.shape[3], x[1].sink, x[0].dtype),
        (own.query, own.params),
        2,
    )
    step = functools.partial(_step, blocks, first, own, keys, values, careful)
    start = varying_as(own.query, (start, jnp.zeros((), own.query.dtype)))
    state, products = lax.fori_loop(jnp.int32(begin), jnp.int32(end), step, start)
    output, lse = heads.over_heads(online_softmax.finish, state, 2)
    return output, lse, jnp.isfinite(products) & jnp.isfinite(output).all()


def _step(
    blocks: Blocks,
    first: Int[Array, ""] | int,
    own: Entry,
    keys: _Cached,
    values: _Cached,
    careful: bool,
    i: Int[Array, ""],
    carry: tuple,
) -> tuple:
    """Takes in block i of the keys, and sums up 0 times each product: NaN if one is not finite."""
    state, total = carry
    length = keys.array.shape[1]
    column = jnp.minimum(i * blocks.width, length - blocks.width)  # the last block ends at the last key
    k, v = (x.block(own.number, column, blocks.width, own.query.dtype) for x in (keys, values))

    def one_head(x: tuple) -> tuple:
        q, k, v, params, scores, state = x
        tile = Tile(first, column, (blocks.height, blocks.width), scores.offsets, ring=scores.ring)
        marks = row_marks = None
        if careful:
            k, v, of_keys = nonfinite.finite_keys(k, v)
            magnitudes = Magnitudes(nonfinite.magnitude_of(q), of_keys)
            marks, row_marks = magnitudes.marks_of_keys(), magnitudes.marks_of_rows(unmasked=False)
        products = scores.dot(q, k, transpose_b=True)
        s = scores.tile(products, params.cut(tile), tile, scores.mask, marks)
        if length % blocks.width:
            s = jnp.where(tile.columns >= i * blocks.width, s, -jnp.inf)
        kept = scores.dropout_multiplier(tile)

        def weigh(weights: Float[Array, "t s"]) -> Float[Array, "t Hv"]:
            return scores.dot(weights if kept is None else weights * kept.astype(weights.dtype), v)

        return online_softmax.update(state, s, weigh, row_marks), jnp.sum(products * 0)

    state, zeros = heads.over_heads(one_head, (own.query, k, v, own.params, own.scores, state), 2)
    return state, total + jnp.sum(zeros)


def _visited(
    blocks: Blocks, first: Int[Array, ""] | int, scores: Scores, length: int
) -> tuple[Int[Array, ""] | int, Int[Array, ""] | int]:
    """The first block of keys that some query may see, and one past the last."""
    count = -(-length // blocks.width)
    query_offset, key_offset = (jnp.asarray(x, jnp.int32).reshape(()) for x in scores.offsets)
    if scores.ring is not None:  # all of it, or what has been written since it was empty
        written = jnp.minimum(key_offset, length - 1) + 1
        return 0, jnp.maximum(-(-written // blocks.width), 0)
    mask = _bounds(scores.mask)
    if mask is None:
        return 0, count
    grid = Grid((1, count), (blocks.height, blocks.width), (query_offset + first, key_offset), None)
    some = jnp.broadcast_to(mask.occupancy(grid).any_visible, (1, count))[0]
    before, after = (jnp.argmax(x).astype(jnp.int32) for x in (some, some[::-1]))
    return before, jnp.where(some.any(), count - after, 0)


def _bounds(mask: Mask | None) -> Mask | None:
    """The parts of the mask that bound the visible positions, if there are any."""
    if isinstance(mask, And):
        left, right = _bounds(mask.left), _bounds(mask.right)
        return left if right is None else right if left is None else And(left, right)
    return mask if isinstance(mask, CausalMask | LocalMask | LengthMask) else None
