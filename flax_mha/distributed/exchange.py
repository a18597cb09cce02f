"""Attention over a sequence that is split over devices, by exchanges before and after a call of a usual kind.

"ulysses" exchanges heads for positions, so that a device computes some heads over the whole sequence: Jacobs et al.,
DeepSpeed Ulysses, arXiv:2309.14509. "allgather" collects all keys and values, for a device's own queries.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha.call.context import Context, chunk_of, chunk_order, chunks_in_order
from flax_mha.call.operands import Call
from flax_mha.distributed import slices

Attend = Callable[[Call], tuple[Array, Array | None]]


def ulysses(call: Call, context: Context, attend: Attend) -> tuple[Array, Array | None]:
    """Output and log-sum-exp of a device's queries, by `attend` of a part of the heads over all positions."""
    operands, options = call
    order = chunk_order(context.layout, lax.axis_size(context.axis))

    def to_heads(x: Array) -> Array:
        return lax.all_to_all(x, context.axis, x.ndim - 2, x.ndim - 3, tiled=True)

    def to_positions(x: Array, dimension: int) -> Array:
        x = chunks_in_order(x, order, dimension) if context.chunks > 1 else x
        return lax.all_to_all(x, context.axis, dimension, dimension + 1, tiled=True)

    query, key, value = map(to_heads, operands[:3])
    operands = operands._replace(query=query, key=key, value=value)
    if context.chunks > 1:
        operands = slices.reordered(operands, np.argsort(order), ("T", "S"))
    output, lse = attend(Call(operands, options))
    dimension = output.ndim - 3
    return to_positions(output, dimension), None if lse is None else to_positions(lse, dimension)


def all_gathered(call: Call, context: Context, attend: Attend) -> tuple[Array, Array | None]:
    """Output and log-sum-exp of a device's queries, by `attend` over all keys for each of its chunks."""
    operands, options = call
    devices, rank = lax.axis_size(context.axis), lax.axis_index(context.axis)
    key, value = (
        lax.all_gather(x, context.axis, axis=x.ndim - 3, tiled=True) if x.size else x  # XLA gathers nothing empty
        for x in (operands.key, operands.value)
    )
    operands = operands._replace(key=key, value=value)
    if context.chunks > 1:
        order = chunk_order(context.layout, devices)
        operands = slices.reordered(operands, np.argsort(order), ("S",))
    length, results = operands.query.shape[-3] // context.chunks, []
    for number in range(context.chunks):
        part = slices.of_queries(operands, number * length, length)
        first = chunk_of(rank, number, devices) * length
        results.append(attend(Call(slices.at_positions(part, first, 0), options)))
    outputs, residuals = zip(*results, strict=True)
    lse = None if residuals[0] is None else jnp.concatenate(residuals, -2)
    return jnp.concatenate(outputs, -3), lse
