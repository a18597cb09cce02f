"""The strategies "ulysses" and "allgather" for a sequence that is split over devices.

"ulysses": an all-to-all gives each device some of the heads over the whole sequence;
the device computes their attention, and another all-to-all sends the output back:
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509. "allgather": each device collects
all keys and values, and computes the attention of its queries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha._src.call import slices
from flax_mha._src.call.call import Call, Context, Result
from flax_mha._src.distributed import split


def ulysses(call: Call, context: Context, attend: Callable[[Call], Result]) -> Result:
    """Computes the result of this device's queries by "ulysses": `attend` computes some
    heads over all positions.
    """
    axis = context.axis
    is_zigzag = context.layout == "zigzag"
    order = split.chunk_order(context.layout, lax.axis_size(axis))
    rows_axis = len(call.batch)

    def to_heads(x: Array) -> Array:
        """Exchanges some positions of all heads for all positions of some heads."""
        return lax.all_to_all(
            x, axis, split_axis=rows_axis + 1, concat_axis=rows_axis, tiled=True
        )

    def to_positions(x: Array) -> Array:
        if is_zigzag:
            x = split.reorder_chunks(x, order, rows_axis)
        return lax.all_to_all(
            x, axis, split_axis=rows_axis, concat_axis=rows_axis + 1, tiled=True
        )

    call = call.replace(
        query=to_heads(call.query),
        key=to_heads(call.key),
        value=to_heads(call.value),
    )
    # The chunks arrive in the order of devices. Masks and dropout depend on positions.
    if is_zigzag:
        by_position = np.argsort(order)
        call = split.reorder_keys(call, by_position, and_queries=True)
    return jax.tree.map(to_positions, attend(call))


def allgather(call: Call, context: Context, attend: Callable[[Call], Result]) -> Result:
    """Computes the result of this device's queries by "allgather": `attend` computes a
    chunk of them over all keys.
    """
    devices = lax.axis_size(context.axis)
    rank = lax.axis_index(context.axis)
    rows_axis = len(call.batch)

    def gather(x: Array) -> Array:
        # XLA cannot gather nothing.
        if x.size == 0:
            return x
        return lax.all_gather(x, context.axis, axis=rows_axis, tiled=True)

    call = call.replace(key=gather(call.key), value=gather(call.value))
    chunks = 1
    if context.layout == "zigzag":
        chunks = 2
        by_position = np.argsort(split.chunk_order("zigzag", devices))
        call = split.reorder_keys(call, by_position)
    # The two chunks of "zigzag" are not adjacent, and a call has one query offset.
    length = call.lengths[0] // chunks
    results = []
    for number in range(chunks):
        first = split.chunk_of(rank, number, devices) * length
        chunk = slices.slice_call(
            call,
            queries=(number * length, length),
            keys=None,
            positions=(first, 0),
        )
        results.append(attend(chunk))
    return jax.tree.map(lambda *x: jnp.concatenate(x, rows_axis), *results)
