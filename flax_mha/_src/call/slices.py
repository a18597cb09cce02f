"""Slices the arrays of a call along its sequences: the queries and keys of a ring's
step, or a block of queries.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_mha._src.call.operands import Call
from flax_mha._src.core.tile import Scalar


def sequence_axes(
    x: Array, axes: str, batch_axes: int
) -> tuple[int | None, int | None]:
    """Returns which axis of an array has an entry for each query, and which for each
    key; None if it has none.

    `axes` names its axes, as in `Call.axis_names`; "B" stands for `batch_axes` axes.
    """
    names: list[str] = []
    for name in axes.split():
        count = batch_axes if name == "B" else 1
        names += [name] * count
    numbers = {}
    for i, name in enumerate(names):
        # An axis "T|1" or "S|1" of length 1 is broadcast.
        is_broadcast = name.endswith("|1") and x.shape[i] == 1
        if not is_broadcast:
            numbers[name[0]] = i
    return numbers.get("T"), numbers.get("S")


def travels_with_keys(names: Sequence[str]) -> bool:
    """Returns whether an array is split over devices by its keys, so that it travels
    with the keys around a ring.

    `names` are the names of its axes, as in `Call.axis_names`. If it also has an
    axis of queries, it is split along that axis instead.
    """
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
    batch_axes = call.query.ndim - 3

    def cut_axis(x: Array, axis: int | None, first: Scalar, length: int) -> Array:
        if axis is None or x.shape[axis] == length:
            return x
        return lax.dynamic_slice_in_dim(x, first, length, axis)

    def cut(x: Array, axes: str) -> Array:
        query_axis, key_axis = sequence_axes(x, axes, batch_axes)
        first_key = first_of_all
        if travels_with_keys(axes.split()):
            first_key = first_held
        x = cut_axis(x, query_axis, first_query, num_queries)
        return cut_axis(x, key_axis, first_key, num_keys)

    # Offsets have an entry per batch entry.
    shape = (1,) * batch_axes
    increases = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in positions]
    offsets = call.offsets.moved(*increases)
    return dataclasses.replace(call.map_arrays(cut), offsets=offsets)
