"""Parts of a call along its queries and keys: what devices and hops compute when a sequence is split."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha.call.context import belongs_to_keys, chunks_in_order
from flax_mha.call.operands import Operands
from flax_mha.core.tile import Offsets, Scalar


def _dimension(x: Array, axes: str, name: str, batch_rank: int) -> int | None:
    """The dimension for "T" or "S" of an array whose axes have these names; None if it has none or is broadcast."""
    names = [part for name in axes.split() for part in ([name] * batch_rank if name == "B" else [name])]
    found = [i for i, part in enumerate(names) if part == name or (part == f"{name}|1" and x.shape[i] != 1)]
    return found[0] if found else None


def of_queries(operands: Operands, first: Scalar, length: int) -> Operands:
    """The part for the queries `first` to `first + length`."""
    rank = operands.query.ndim - 3

    def cut(x: Array, axes: str) -> Array:
        dimension = _dimension(x, axes, "T", rank)
        return x if dimension is None else lax.dynamic_slice_in_dim(x, first, length, dimension)

    return operands.map_arrays(cut)


def of_keys(operands: Operands, first: Scalar, place: Scalar, length: int) -> Operands:
    """The part for `length` keys: from `first` on in arrays split over keys, from `place` on in those with all keys."""
    rank = operands.query.ndim - 3

    def cut(x: Array, axes: str) -> Array:
        dimension = _dimension(x, axes, "S", rank)
        start = first if belongs_to_keys(axes) else place
        return x if dimension is None else lax.dynamic_slice_in_dim(x, start, length, dimension)

    return operands.map_arrays(cut)


def arrays_of_keys(operands: Operands) -> list[Array]:
    """Keys, values and all else that has an entry for each key and is split as they are."""
    found: list[Array] = []

    def find(x: Array, axes: str) -> Array:
        if belongs_to_keys(axes):
            found.append(x)
        return x

    operands.map_arrays(find)
    return found


def with_arrays_of_keys(operands: Operands, arrays: Sequence[Array]) -> Operands:
    """The operands with others in the place of `arrays_of_keys`."""
    following = iter(arrays)
    return operands.map_arrays(lambda x, axes: next(following) if belongs_to_keys(axes) else x)


def reordered(operands: Operands, order: np.ndarray, names: Sequence[str]) -> Operands:
    """The operands with the chunks of their axes "T" or "S" in another order: chunk `order[i]` comes i-th."""
    rank = operands.query.ndim - 3

    def change(x: Array, axes: str) -> Array:
        for name in names:
            dimension = _dimension(x, axes, name, rank)
            x = x if dimension is None else chunks_in_order(x, order, dimension)
        return x

    return operands.map_arrays(change)


def at_positions(operands: Operands, query: Scalar, key: Scalar) -> Operands:
    """The call whose first query and key stand so many positions behind those of the whole call."""
    shape = (1,) * (operands.query.ndim - 3)
    offsets = operands.offsets.moved(query, key)
    arrays = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) if jnp.ndim(x) == 0 else x for x in offsets.values)
    return operands._replace(offsets=Offsets.of(*arrays))
