"""Attention of queries that list their keys (`key_indices`), in time and memory that
grow with T k.

Each block of queries gathers its keys and values, [t, k, H] for each head, and is then
computed like a head by `dense_head`, except that each query has its own keys. Few
queries, as in decoding, gather from the cache first, before anything else reads all of
it. All derivatives are JAX's; those of keys and values are scatter-adds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from flax_mha._src import guard
from flax_mha._src.call.call import Call, NonFinite, Result
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.masks import Mask
from flax_mha._src.masks.visible import Visible
from flax_mha._src.math.head import (
    Head,
    Listed,
    ResultsOfHead,
    by_blocks,
    heads_of,
    map_heads,
    split_heads,
    to_caller,
    vectors_by_head,
    with_float_keys,
)
from flax_mha._src.math.softmax import dense_head
from flax_mha._src.plan import Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ListedMask(Mask):
    """A mask that hides the entries -1 of `key_indices`, which mean no key."""

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        return jnp.asarray(tile.indices) >= 0


def attention(plan: Plan, call: Call) -> Result:
    """Computes a call with `key_indices`; for few queries, all their keys are gathered
    first, otherwise block by block.
    """
    queries, keys = call.lengths
    height: Any = plan.gathered
    assert call.key_indices is not None
    indices, is_beyond = _unique(call.key_indices, keys)
    if height == queries:
        call = _gather_first(call, indices)
    call = with_float_keys(call, call.query.dtype)
    mask = Visible.of([call.mask, ListedMask()])
    call = call.replace(mask=mask, key_indices=None)
    call = guard.guard(call, plan._replace(guard_first=True))
    head = heads_of(call, plan.dtype)

    groups = (indices.shape[-2], 1)
    listed = split_heads(indices, groups)
    is_beyond = vectors_by_head(is_beyond, groups)
    results = map_heads(
        functools.partial(_one_head, height),
        varying_alike((head, listed, is_beyond)),
        axes=call.query.ndim - 1,
        looped_axes=plan.looped_axes,
        max_heads=plan.max_heads,
        has_loops=True,
    )
    return to_caller(results, call.query.dtype)


def _gather_first(call: Call, indices: Int[Array, "*B T K k"]) -> Call:
    """Replaces keys, values and their scales by those that queries list, in the order
    of queries: the k keys of query 0, then those of query 1, and so on.
    """
    *batch, queries, num_heads, count = indices.shape
    places = jnp.swapaxes(indices, -1, -2)
    places = places.reshape(*batch, queries * count, num_heads, 1)

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, places, axis=-3, mode="clip")

    arrays: Any = (call.key, call.value, call.cache_scale)
    key, value, scale = jax.tree.map(take, arrays)
    return call.replace(key=key, value=value, cache_scale=scale)


def _unique(
    indices: Int[Array, "*B T K k"], keys: int
) -> tuple[Int[Array, "*B T K k"], Bool[Array, "*B T K"]]:
    """Sorts each list, and replaces repeats by -1; also returns which lists hold an
    index < -1 or >= `keys`.
    """
    indices = lax.sort(indices, dimension=-1)
    repeated = indices[..., 1:] == indices[..., :-1]
    is_beyond = (indices[..., -1] >= keys) | (indices[..., 0] < -1)
    # Not `.at[..., 1:].set`: XLA's CPU (jax 0.10) would update in place, and read what
    # it has written.
    unique = jnp.where(repeated, -1, indices[..., 1:])
    return jnp.concatenate([indices[..., :1], unique], axis=-1), is_beyond


def _one_head(
    height: int, own: tuple[Head, Int[Array, "T k"], Bool[Array, " T"]]
) -> ResultsOfHead:
    """Computes one head, gathering the keys of `height` queries at a time; if that is
    all queries, their keys are gathered already.

    `own` is the head, the keys that its queries list, and which rows must be NaN,
    because their lists are out of range.
    """
    head, indices, is_beyond = own
    queries, count = indices.shape
    nonfinite = head.nonfinite
    assert nonfinite is not None
    # A flag of infinity makes a row NaN, as if its query were not finite.
    query_flags = jnp.where(is_beyond, jnp.inf, nonfinite.query)
    nonfinite = nonfinite._replace(query=query_flags)
    head = dataclasses.replace(head, nonfinite=nonfinite)
    if height == queries:

        def split(x: Array) -> Array:
            return x.reshape(queries, count, *x.shape[1:])

        return _block(head, jnp.int32(0), indices, split)

    def block(first: Int[Array, ""]) -> ResultsOfHead:
        listed = lax.dynamic_slice_in_dim(indices, first, height)

        def gather(x: Array) -> Array:
            return jnp.take(x, listed, axis=0, mode="clip")

        return _block(head, first, listed, gather)

    return by_blocks(block, queries, height, 0)


def _block(
    head: Head,
    first: Int[Array, ""],
    indices: Int[Array, "t k"],
    gather: Callable[[Array], Array],
) -> ResultsOfHead:
    """Computes the results of t queries, from number `first` on, by `dense_head`.

    `indices` are the keys that they list. `gather(x)` takes the entries of these keys,
    [t, k, ...], out of an array.
    """
    cut = functools.partial(
        lax.dynamic_slice_in_dim, start_index=first, slice_size=indices.shape[0]
    )
    nonfinite: Any = head.nonfinite
    part = dataclasses.replace(
        head,
        query=cut(head.query),
        key=gather(head.key),
        value=gather(head.value),
        nonfinite=NonFinite(cut(nonfinite.query), gather(nonfinite.key)),
        listed=Listed(first, indices),
    )
    part = dataclasses.replace(part, inputs=head.inputs.cut(part.whole))
    return dense_head(False, part)
