"""Slices of a call along its sequences: the queries and keys that a device or a hop of a ring computes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha.call.operands import Layout, Operands
from flax_mha.core.integers import int_at_least
from flax_mha.core.tile import Scalar


class SequenceAxes(NamedTuple):
    """The axes of an array of a call that have an entry for each query and for each key; None if there is none."""

    queries: int | None
    keys: int | None
    travels: bool  # if each device holds the entries of its own keys alone


def sequence_axes(operands: Operands) -> tuple[SequenceAxes, ...]:
    """Finds the axes of each array, in the order of `jax.tree.leaves`."""
    batch = ["B"] * (operands.query.ndim - 3)
    found = []
    for x, axes in zip(jax.tree.leaves(operands), operands.axis_names(), strict=True):
        names = [part for name in axes.split() for part in (batch if name == "B" else [name])]
        # An axis "T|1" or "S|1" of length 1 is broadcast.
        own = {name[0]: i for i, name in enumerate(names) if not name.endswith("|1") or x.shape[i] != 1}
        found.append(SequenceAxes(own.get("T"), own.get("S"), travels_with_keys(names)))
    return tuple(found)


def travels_with_keys(names: Sequence[str]) -> bool:
    """Returns True if an array with these axes is split over devices as the keys are.

    An array with an axis for the queries besides is split over those, and holds all keys.
    """
    return "S" in names and not {"T", "T|1"} & set(names)


def slice_call(
    operands: Operands,
    axes: Sequence[SequenceAxes],
    queries: tuple[Scalar, int],
    keys: tuple[Scalar, Scalar, int] | None,
    positions: tuple[Scalar, Scalar],
) -> Operands:
    """Cuts out some queries and keys of a call.

    `queries` are the first one and their number, `keys` the first one in arrays that travel with the keys, the first
    one in arrays that hold all keys, and their number; None keeps all keys. `positions` are the distances of the first
    query and the first key from those of the whole call.
    """
    first_query, height = queries

    def cut(x: Array, axes: SequenceAxes) -> Array:
        x = _cut(x, axes.queries, first_query, height)
        if keys is None:
            return x
        first_own, first_of_all, width = keys
        return _cut(x, axes.keys, first_own if axes.travels else first_of_all, width)

    shape = (1,) * (operands.query.ndim - 3)
    moved = operands.offsets.moved(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in positions))
    return _map(cut, operands, axes)._replace(offsets=moved)


def _cut(x: Array, axis: int | None, first: Scalar, length: int) -> Array:
    return x if axis is None or x.shape[axis] == length else lax.dynamic_slice_in_dim(x, first, length, axis)


def _map(change: Callable[[Array, SequenceAxes], Any], operands: Operands, axes: Sequence[SequenceAxes]) -> Operands:
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, map(change, leaves, axes))


def travelling_arrays(operands: Operands, axes: Sequence[SequenceAxes]) -> list[Array]:
    """Lists keys, values and all other arrays that are split over devices as the keys are."""
    return [x for x, own in zip(jax.tree.leaves(operands), axes, strict=True) if own.travels]


def replace_travelling(operands: Operands, axes: Sequence[SequenceAxes], arrays: Sequence[Array]) -> Operands:
    """Puts others in the place of `travelling_arrays`."""
    following = iter(arrays)
    return _map(lambda x, own: next(following) if own.travels else x, operands, axes)


def reorder_keys(operands: Operands, order: np.ndarray, and_queries: bool = False) -> Operands:
    """Reorders the chunks of all arrays along the keys, and along the queries if asked: chunk `order[i]` comes i-th."""

    def change(x: Array, axes: SequenceAxes) -> Array:
        x = x if axes.keys is None else reorder_chunks(x, order, axes.keys)
        return x if axes.queries is None or not and_queries else reorder_chunks(x, order, axes.queries)

    return _map(change, operands, sequence_axes(operands))


def reorder_chunks(x: Any, order: np.ndarray, axis: int) -> Any:
    """Cuts an array, of NumPy or JAX, into as many chunks as `order` has entries: chunk `order[i]` comes i-th."""
    library = np if isinstance(x, np.ndarray) else jnp
    chunks = library.split(x, len(order), axis)
    return library.concatenate([chunks[i] for i in order], axis)


def chunk_order(layout: Layout, devices: int) -> np.ndarray:
    """Lists the numbers of the chunks of the sequence in the order in which the devices hold them.

    Raises:
      ValueError: If `devices` is not an int >= 1.
    """
    ranks = np.arange(int_at_least("devices", devices, 1), dtype=np.int32)
    if layout == "contiguous":
        return ranks
    return np.stack([chunk_of(ranks, number, devices) for number in range(2)], 1).ravel()


def chunk_of(rank: Any, number: Any, devices: int) -> Any:
    """Returns the place in the sequence of a device's chunk 0 or 1; in contiguous sequences there is only chunk 0."""
    return rank + number * (2 * devices - 1 - 2 * rank)
