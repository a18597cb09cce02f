"""Attention of queries that list their keys (`key_indices`), in time and memory that grow with T k.

A block of queries gathers its keys and values, [T, k, H] for each head, and is then computed as `dense.py` computes a
head, but with keys of its own for each query. All derivatives are JAX's; those of keys and values are scatter-adds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from flax_mha._src.call.operands import Call, Result, Rows
from flax_mha._src.call.slices import slice_call
from flax_mha._src.core.eight_bits import dequantize_cache
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.engines.xla import dense
from flax_mha._src.engines.xla.dense import ResultsOfHead
from flax_mha._src.guard import guard
from flax_mha._src.math.head import Head, heads_of, map_heads, split_heads, to_caller
from flax_mha._src.plan import Plan
from flax_mha.masks import Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ListedMask(Mask):
    """Hides the places in lists of keys that hold no key."""

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        return jnp.asarray(tile.indices) >= 0


def attention(plan: Plan, call: Call) -> Result:
    """Computes one block of queries after another."""
    operands, (queries, _), height = call.operands, call.operands.lengths, plan.gathered
    if height is None or queries <= height:
        return _block(plan, call)
    count = -(-queries // height)

    def block(first: Int[Array, ""]) -> Result:
        return _block(plan, call._replace(operands=slice_call(operands, (first, height), None, (first, 0))))

    # The last block ends at the last query, and computes some queries of the one before again.
    firsts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * height, queries - height)
    results = lax.map(jax.checkpoint(block, prevent_cse=False), firsts)

    def joined(x: Array) -> Array:
        axis = operands.query.ndim - 3
        before, last = jnp.moveaxis(x[:-1], 0, axis), x[-1]
        again = count * height - queries
        last = lax.slice_in_dim(last, again, height, axis=axis)
        return jnp.concatenate([lax.collapse(before, axis, axis + 2), last], axis=axis)

    return jax.tree.map(joined, results)


def _block(plan: Plan, call: Call) -> Result:
    """Gathers the keys of all queries, and computes their attention."""
    operands, options = call
    indices, is_beyond = _unique(operands.key_indices, operands.key.shape[-3])  # type: ignore[arg-type]
    batch, (queries, num_heads, count) = indices.shape[:-3], indices.shape[-3:]
    places = jnp.swapaxes(indices, -1, -2).reshape(*batch, queries * count, num_heads, 1)
    take = functools.partial(jnp.take_along_axis, indices=places, axis=-3, mode="clip")
    key, value, scale = jax.tree.map(take, (operands.key, operands.value, operands.cache_scale))
    if scale is not None:
        key, value = dequantize_cache(key, value, scale, options.value_size, operands.query.dtype)
    mask = ListedMask() if operands.mask is None else operands.mask & ListedMask()
    gathered = operands._replace(key=key, value=value, mask=mask, cache_scale=None, key_indices=None)
    guarded = guard(Call(gathered, options), plan._replace(guard=True))
    head = heads_of(guarded, plan.dtype)
    ring = operands.key.shape[-3] if options.ring else None
    head = dataclasses.replace(head, rule=dataclasses.replace(head.rule, ring=ring))
    by_head = split_heads(indices, (num_heads, 1)), split_heads(is_beyond[..., None], (num_heads, 1))[..., 0]
    each = varying_alike((head, *by_head))
    results = map_heads(_one_head, each, operands.query.ndim - 1, plan.looped_axes or 0, plan.max_heads)
    return to_caller(results, operands.query.dtype)


def _unique(indices: Int[Array, "*B T K k"], keys: int) -> tuple[Int[Array, "*B T K k"], Bool[Array, "*B T K"]]:
    """Sorts each list, replaces repeated keys by -1, and returns which queries list a key that does not exist."""
    indices = lax.sort(indices, dimension=-1)
    repeated = indices[..., 1:] == indices[..., :-1]
    is_beyond = (indices[..., -1] >= keys) | (indices[..., 0] < -1)
    return indices.at[..., 1:].set(jnp.where(repeated, -1, indices[..., 1:])), is_beyond


def _one_head(own: tuple[Head, Int[Array, "T k"], Bool[Array, " T"]]) -> ResultsOfHead:
    head, indices, is_beyond = own
    rows = head.rows
    if rows is not None:
        of_queries = jnp.where(is_beyond, jnp.inf, rows.query).astype(rows.query.dtype)
        rows = Rows(of_queries, rows.key.reshape(indices.shape))
    key, value = (x.reshape(*indices.shape, x.shape[-1]) for x in (head.key, head.value))
    head = dataclasses.replace(head, key=key, value=value, rows=rows, indices=indices)
    return dense.dense_head(False, dataclasses.replace(head, inputs=head.inputs.cut(head.whole)))
