"""Slices the arrays of a call along its sequences: the queries and keys of a ring's
step, or a block of queries.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_mha._src.call.operands import Operands
from flax_mha._src.core.tile import Scalar


class SequenceAxes(NamedTuple):
    """Which axes of an array have an entry for each query or key, and whether it
    travels with the keys in a ring.
    """

    queries: int | None  # number of the axis with an entry for each query, or None
    keys: int | None  # number of the axis with an entry for each key, or None
    # Whether the array is split over devices like keys and values, and so travels with
    # them in a ring.
    travels: bool


def sequence_axes(operands: Operands) -> list[SequenceAxes]:
    """Finds the axes of queries and keys in each array of `operands`, in the order of
    `jax.tree.leaves`.
    """
    batch_axes = operands.query.ndim - 3
    found = []
    for x, axes in zip(jax.tree.leaves(operands), operands.axis_names(), strict=True):
        names: list[str] = []
        for name in axes.split():
            # "B" stands for all batch axes.
            count = batch_axes if name == "B" else 1
            names += [name] * count
        numbers = {}
        for i, name in enumerate(names):
            # An axis "T|1" or "S|1" of length 1 is broadcast.
            is_broadcast = name.endswith("|1") and x.shape[i] == 1
            if not is_broadcast:
                numbers[name[0]] = i
        found.append(
            SequenceAxes(
                queries=numbers.get("T"),
                keys=numbers.get("S"),
                travels=travels_with_keys(names),
            )
        )
    return found


def travels_with_keys(names: Sequence[str]) -> bool:
    """Returns whether an array is split over devices by its keys, so that it travels
    with the keys around a ring.

    `names` are the names of its axes, as in `Operands.axis_names`. If it also has an
    axis of queries, it is split along that axis instead.
    """
    return "S" in names and not {"T", "T|1"} & set(names)


def slice_call(
    operands: Operands,
    queries: tuple[Scalar, int],
    keys: tuple[Scalar, Scalar, int] | None,
    positions: tuple[Scalar, Scalar],
) -> Operands:
    """Slices one device's operands to a range of queries and a range of keys, and moves
    the offsets.

    Args:
      operands: The device's operands.
      queries: (first, number).
      keys: (first in arrays that travel around the ring, first in arrays that stay,
        number); None keeps all keys. Travelling arrays hold one device's keys, the
        others all.
      positions: What to add to the query offset and to the key offset.
    """
    first_query, num_queries = queries
    if keys is None:
        keys = (0, 0, operands.lengths[1])
    first_held, first_of_all, num_keys = keys

    def cut_axis(x: Array, axis: int | None, first: Scalar, length: int) -> Array:
        if axis is None or x.shape[axis] == length:
            return x
        return lax.dynamic_slice_in_dim(x, first, length, axis)

    def cut(x: Array, axes: SequenceAxes) -> Array:
        first_key = first_held if axes.travels else first_of_all
        x = cut_axis(x, axes.queries, first_query, num_queries)
        return cut_axis(x, axes.keys, first_key, num_keys)

    # Offsets have an entry per batch entry.
    shape = (1,) * (operands.query.ndim - 3)
    increases = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in positions]
    offsets = operands.offsets.moved(*increases)
    return map_arrays(cut, operands)._replace(offsets=offsets)


def map_arrays(
    change: Callable[[Array, SequenceAxes], Array], operands: Operands
) -> Operands:
    leaves, structure = jax.tree.flatten(operands)
    changed = map(change, leaves, sequence_axes(operands))
    return jax.tree.unflatten(structure, changed)
