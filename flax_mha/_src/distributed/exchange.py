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
from flax_mha._src.call.operands import Call, Context, Result
from flax_mha._src.distributed import split


def ulysses(call: Call, context: Context, attend: Callable[[Call], Result]) -> Result:
    """Computes the result of this device's queries by "ulysses": `attend` computes some
    heads over all positions.
    """
    operands, options = call
    axis = context.axis
    is_zigzag = context.layout == "zigzag"
    order = split.chunk_order(context.layout, lax.axis_size(axis))

    def to_positions(x: Array, dimension: int) -> Array:
        x = split.reorder_chunks(x, order, dimension) if is_zigzag else x
        return lax.all_to_all(x, axis, dimension, dimension + 1, tiled=True)

    query, key, value = (
        lax.all_to_all(x, axis, x.ndim - 2, x.ndim - 3, tiled=True)
        for x in operands[:3]
    )
    operands = operands._replace(query=query, key=key, value=value)
    if is_zigzag:
        operands = split.reorder_keys(operands, np.argsort(order), and_queries=True)
    return jax.tree.map(
        lambda x: to_positions(x, query.ndim - 3), attend(Call(operands, options))
    )


def allgather(call: Call, context: Context, attend: Callable[[Call], Result]) -> Result:
    """Computes the result of this device's queries by "allgather": `attend` computes a
    chunk of them over all keys.
    """
    operands, options = call
    devices = lax.axis_size(context.axis)
    rank = lax.axis_index(context.axis)
    key, value = (
        # XLA cannot gather nothing.
        lax.all_gather(x, context.axis, axis=x.ndim - 3, tiled=True) if x.size else x
        for x in (operands.key, operands.value)
    )
    operands = operands._replace(key=key, value=value)
    chunks = 1
    if context.layout == "zigzag":
        operands = split.reorder_keys(
            operands, np.argsort(split.chunk_order("zigzag", devices))
        )
        chunks = 2
    length = operands.query.shape[-3] // chunks
    results = []
    for number in range(chunks):
        first = split.chunk_of(rank, number, devices) * length
        chunk = slices.slice_call(operands, (number * length, length), None, (first, 0))
        results.append(attend(Call(chunk, options)))
    return jax.tree.map(
        lambda *x: jnp.concatenate(x, operands.query.ndim - 3), *results
    )
