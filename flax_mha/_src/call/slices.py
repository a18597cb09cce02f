"""Slices the arrays of a call along its sequences: the queries and keys of a ring's
step, or a block of queries.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_mha._src.call.call import Call
from flax_mha._src.core.tile import Scalar


def axis_of(name: str, x: Array, axes: str) -> int | None:
    """Returns which axis of an array has this name, counted from the end; None if it
    has no such axis, or broadcasts along it.

    `axes` names its axes, as in `Call.map_arrays`: "T" has an entry for each query, "S"
    for each key, "K" for each key head.
    """
    names = axes.replace("|1", "").split()
    if name not in names:
        return None
    axis = names.index(name) - len(names)
    if x.shape[axis] == 1:
        return None
    return axis


def travels_with_keys(axes: str) -> bool:
    """Returns whether an array is split over devices by its keys, so that it travels
    with the keys around a ring.

    `axes` names its axes, as in `Call.map_arrays`. An array that also has an axis of
    queries is split along that axis instead.
    """
    names = axes.split()
    return "S" in names and not {"T", "T|1"} & set(names)


def slice_call(
    call: Call,
    queries: tuple[Scalar, int],
    keys: tuple[Scalar, Scalar, int] | None,
    positions: tuple[Scalar, Scalar],
) -> Call:
    """Slices one device's call to a range of queries and a range of keys, and moves the
    offsets.

    Args:
      call: The device's part of a call.
      queries: (first, number).
      keys: (first in arrays that travel around the ring, first in arrays that stay,
        number); None keeps all keys. Travelling arrays hold one device's keys, the
        others all.
      positions: What to add to the query offset and to the key offset.
    """
    first_query, num_queries = queries
    if keys is None:
        keys = (0, 0, call.lengths[1])
    first_held, first_of_all, num_keys = keys

    def cut_axis(x: Array, axis: int | None, first: Scalar, length: int) -> Array:
        if axis is None or x.shape[axis] == length:
            return x
        return lax.dynamic_slice_in_dim(x, first, length, axis)

    def cut(x: Array, axes: str) -> Array:
        first_key = first_of_all
        if travels_with_keys(axes):
            first_key = first_held
        x = cut_axis(x, axis_of("T", x, axes), first_query, num_queries)
        return cut_axis(x, axis_of("S", x, axes), first_key, num_keys)

    # Offsets have an entry per batch entry.
    shape = (1,) * len(call.batch)
    increases = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in positions]
    offsets = call.offsets.moved(*increases)
    return call.map_arrays(cut).replace(offsets=offsets)
