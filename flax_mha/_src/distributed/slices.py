"""Cuts calls along their sequences, and reorders the chunks of sequences that are split over devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha._src.call.operands import Layout, Operands
from flax_mha._src.core.integers import int_at_least
from flax_mha._src.core.tile import Scalar


class SequenceAxes(NamedTuple):
    """The sequence axes of one array of a call."""

    queries: int | None  # number of the axis with an entry for each query, or None
    keys: int | None  # number of the axis with an entry for each key, or None
    travels: bool  # whether the array is split over devices as keys and values are, and so travels with them in a ring


def sequence_axes(operands: Operands) -> tuple[SequenceAxes, ...]:
    """Finds the sequence axes of each array, in the order of `jax.tree.leaves`."""
    batch = ["B"] * (operands.query.ndim - 3)
    found = []
    for x, axes in zip(jax.tree.leaves(operands), operands.axis_names(), strict=True):
        names = [axis for name in axes.split() for axis in (batch if name == "B" else [name])]
        # An axis "T|1" or "S|1" of length 1 is broadcast.
        numbers = {name[0]: i for i, name in enumerate(names) if not name.endswith("|1") or x.shape[i] != 1}
        found.append(SequenceAxes(numbers.get("T"), numbers.get("S"), travels_with_keys(names)))
    return tuple(found)


def travels_with_keys(names: Sequence[str]) -> bool:
    """Returns whether an array with these axes is split by keys; one with queries and keys is split by queries."""
    return "S" in names and not {"T", "T|1"} & set(names)


def slice_call(
    operands: Operands,
    axes: Sequence[SequenceAxes],
    queries: tuple[Scalar, int],
    keys: tuple[Scalar, Scalar, int] | None,
    positions: tuple[Scalar, Scalar],
) -> Operands:
    """Cuts some queries and keys out of the operands that a device holds.

    `queries` are the first query and their number. `keys` are the first key in arrays that travel, the first key in
    arrays with entries for all keys, and their number; None keeps all. `positions` of the first query and the first key
    are relative to the offsets of `operands`.
    """
    first_query, height = queries

    def cut(x: Array, axes: SequenceAxes) -> Array:
        x = _cut(x, axes.queries, first_query, height)
        if keys is None:
            return x
        first_held, first_of_all, width = keys
        return _cut(x, axes.keys, first_held if axes.travels else first_of_all, width)

    shape = (1,) * (operands.query.ndim - 3)
    offsets = operands.offsets.moved(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in positions))
    return _map(cut, operands, axes)._replace(offsets=offsets)


def _cut(x: Array, axis: int | None, first: Scalar, length: int) -> Array:
    return x if axis is None or x.shape[axis] == length else lax.dynamic_slice_in_dim(x, first, length, axis)


def _map(change: Callable[[Array, SequenceAxes], Any], operands: Operands, axes: Sequence[SequenceAxes]) -> Operands:
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, map(change, leaves, axes))


def travelling_arrays(operands: Operands, axes: Sequence[SequenceAxes]) -> list[Array]:
    """Lists the arrays that travel around a ring."""
    return [x for x, of_array in zip(jax.tree.leaves(operands), axes, strict=True) if of_array.travels]


def replace_travelling(operands: Operands, axes: Sequence[SequenceAxes], arrays: Sequence[Array]) -> Operands:
    """Replaces the `travelling_arrays` of `operands` by `arrays`."""
    following = iter(arrays)
    return _map(lambda x, of_array: next(following) if of_array.travels else x, operands, axes)


def reorder_keys(operands: Operands, order: np.ndarray, and_queries: bool = False) -> Operands:
    """Calls `reorder_chunks` on all arrays along their keys and, with `and_queries`, along their queries."""

    def change(x: Array, axes: SequenceAxes) -> Array:
        x = x if axes.keys is None else reorder_chunks(x, order, axes.keys)
        return x if axes.queries is None or not and_queries else reorder_chunks(x, order, axes.queries)

    return _map(change, operands, sequence_axes(operands))


def reorder_chunks(x: Any, order: np.ndarray, axis: int) -> Any:
    """Cuts an array of NumPy or JAX into `len(order)` chunks, and joins them such that chunk `order[i]` is the i-th."""
    library = np if isinstance(x, np.ndarray) else jnp
    chunks = library.split(x, len(order), axis)
    return library.concatenate([chunks[i] for i in order], axis)


def chunk_order(layout: Layout, devices: int) -> np.ndarray:
    """Lists the chunks of the sequence, by number, in the order in which the devices hold them."""
    ranks = np.arange(int_at_least("devices", devices, 1), dtype=np.int32)
    if layout == "contiguous":
        return ranks
    return np.stack([chunk_of(ranks, number, devices) for number in range(2)], 1).ravel()


def chunk_of(rank: Any, number: Any, devices: int) -> Any:
    """Returns the index in the sequence of a device's chunk 0, which is `rank`, or of chunk 1 (only in "zigzag")."""
    return rank + number * (2 * devices - 1 - 2 * rank)
