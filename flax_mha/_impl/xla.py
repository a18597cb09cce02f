"""The implementations that compute every call, "xla" and "blockwise": plain JAX, compiled by XLA.

The arrays of a call are put into the layout of one head, the math of one head (`dense.py` or `blockwise.py`) is mapped
over all heads, and its output is put back into the caller's layout.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._call import Call, Operands, Options, accumulation_dtype, numbers_as_arrays
from flax_mha._impl import block_mask, blockwise, decode, dense, dense_gpu, heads, layout, schedule
from flax_mha._impl.block_mask import BlockMask
from flax_mha._impl.head_operands import OfHeads, of_heads, params_and_scores, with_scores
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._impl.tiling import CELL, Tiling
from flax_mha._platform import varying_alike

OutputAndLse = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]


def dense_attention(call: Call) -> OutputAndLse:
    """Output and log-sum-exp, from all scores of a head at once: `implementation="xla"`."""
    call = numbers_as_arrays(call)
    scores = math.prod(call.operands.lengths)
    fuse_rows, sequential = schedule.fuses_rows(call, scores), schedule.sequential_axes_dense(call, scores)
    blocks = schedule.blocks_in_place(call)
    if blocks is not None:
        return _in_place(call.operands, call.options, blocks, sequential or 0)
    dtype, together = schedule.product_dtype(call, tiles=False), schedule.heads_together(call, scores)
    if schedule.on_gpu(call):
        return _dense_on_gpu(call.operands, call.options, dtype)
    return _dense(call.operands, call.options, sequential or 0, together, dtype, fuse_rows)


def blockwise_attention(call: Call, result: OutputAndLse | None = None) -> OutputAndLse:
    """Output and log-sum-exp, tile by tile: `implementation="blockwise"`.

    Args:
      call: The call.
      result: Output and log-sum-exp over these and other keys, if they are known: see `blockwise.blockwise_head`.
    """
    call = numbers_as_arrays(call)
    operands, options = call
    if operands.mask is not None and operands.has_known_offsets:
        mask = operands.mask.with_occupancy(operands.lengths, options.offsets, CELL)
        call = Call(operands._replace(mask=mask), options)
    tiling, blocks = schedule.tiles(call)
    scores = tiling.height * tiling.width
    sequential, fuse_rows = schedule.sequential_axes(call, scores), schedule.fuses_rows(call, scores, tiling.rows)
    together, dtype = schedule.heads_together(call, scores), schedule.product_dtype(call, tiles=True)
    try:
        return _blockwise(call.operands, call.options, tiling, blocks, sequential, together, fuse_rows, dtype, result)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            'implementation must be "xla" for forward-mode differentiation (jax.jvp, jax.jacfwd), but got "blockwise", '
            'or None, which chose it; pass implementation="xla".'
        ) from error


@functools.partial(jax.jit, static_argnames=("options", "sequential", "together", "dtype", "fuse_rows"))
def _dense(
    operands: Operands, options: Options, sequential: int, together: int | None, dtype: jnp.dtype, fuse_rows: bool
) -> OutputAndLse:
    arrays = of_heads(operands, options, sizes=True, dtype=dtype)
    return _all_heads(arrays, sequential, operands.query.dtype, together, fuse_rows)


@functools.partial(jax.jit, static_argnames=("options", "dtype"))
def _dense_on_gpu(operands: Operands, options: Options, dtype: jnp.dtype) -> OutputAndLse:
    query, *others, _ = of_heads(operands, options, sizes=False, dtype=dtype, replaces=False)
    output, lse = heads.over_heads(_dense_head_on_gpu, varying_alike((query, *others)), query.ndim - 2)
    return layout.to_caller(output, lse, operands.query.dtype)


def _dense_head_on_gpu(arrays: tuple) -> tuple[Array, Array]:
    return dense_gpu.dense_head_on_gpu(*arrays)


def _all_heads(
    arrays: OfHeads, sequential: int, dtype: DTypeLike, together: int | None = None, fuse_rows: bool = False
) -> OutputAndLse:
    one_head = functools.partial(_dense_head, fuse_rows)
    output, lse = heads.over_heads(one_head, arrays, arrays[0].ndim - 2, sequential, together)
    return layout.to_caller(output, lse, dtype)


def _dense_head(fuse_rows: bool, arrays: OfHeads) -> tuple[Array, Array]:
    return dense.dense_head(*arrays, fuse_rows)


@functools.partial(jax.jit, static_argnames=("options", "blocks", "sequential"))
def _in_place(operands: Operands, options: Options, blocks: decode.Blocks, sequential: int) -> OutputAndLse:
    params, scores = params_and_scores(operands, options)
    scale = jnp.asarray(options.scale, accumulation_dtype(operands.query.dtype))
    scale = scale if operands.scale is None else operands.scale
    return _read_in_place(blocks, sequential, operands.query, operands.key, operands.value, scale, params, scores)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _read_in_place(blocks: decode.Blocks, sequential: int, *operands: Any) -> OutputAndLse:
    return decode.attend(blocks, *operands)


@_read_in_place.defjvp
def _read_in_place_jvp(
    blocks: decode.Blocks, sequential: int, primals: tuple, tangents: tuple
) -> tuple[OutputAndLse, OutputAndLse]:
    *_, scores = primals  # what it holds has no gradient

    def dense_of(query: Array, key: Array, value: Array, scale: Array, params: ScoreParams) -> OutputAndLse:
        arrays = with_scores(query, key, value, scale, params, scores, False, accumulation_dtype(query.dtype))
        return _all_heads(arrays, sequential, query.dtype)

    return jax.jvp(dense_of, primals[:5], tangents[:5])


@functools.partial(jax.jit, static_argnames=("options", "tiling", "sequential", "together", "fuse_rows", "dtype"))
def _blockwise(
    operands: Operands,
    options: Options,
    tiling: Tiling,
    blocks: BlockMask | None,
    sequential: int | None,
    together: int | None,
    fuse_rows: bool,
    dtype: jnp.dtype,
    result: OutputAndLse | None,
) -> OutputAndLse:
    arrays, axes = of_heads(operands, options, sizes=fuse_rows, dtype=dtype), operands.query.ndim - 1
    if blocks is None:
        *_, scores, _ = arrays
        blocks = _block_mask(scores, tiling, axes)
    # Heads whose loops visit different numbers of tiles must not be vmapped together: each would run the longest loop.
    if sequential is not None and not blocks.single:
        sequential = max([sequential, *(axis + 1 for axis in range(axes) if blocks.column.shape[axis] > 1)])
    one_head = functools.partial(_blockwise_head, tiling, blocks.single and fuse_rows)
    known = None if result is None else layout.from_caller(*result, operands.groups)
    operands_of_heads = varying_alike((*arrays, blocks, known))
    output, lse = heads.over_heads(one_head, operands_of_heads, axes, sequential or 0, together)
    return layout.to_caller(output, lse, operands.query.dtype)


def _blockwise_head(tiling: Tiling, fuse_rows: bool, arrays: tuple) -> tuple[Array, Array]:
    return blockwise.blockwise_head(tiling, fuse_rows, *arrays)


def _block_mask(scores: Scores, tiling: Tiling, axes: int) -> BlockMask:
    """Which tiles to visit, once for all heads that share it, and without any tracing where it is static."""
    if not jax.tree.leaves((scores.mask, scores.offset_arrays)):
        blocks = schedule.block_mask_of_one(tiling, scores.mask, scores.offset_numbers)
        return jax.tree.map(lambda x: x[(None,) * (axes - 1)], blocks)

    def one_head(places: tuple) -> BlockMask:
        mask, offsets = places
        known = scores.offset_numbers
        query, key = (number if x is None else x for number, x in zip(known, offsets, strict=True))
        return block_mask.dynamic_block_mask(tiling, mask, (query, key))

    return heads.over_heads(one_head, (scores.mask, scores.offset_arrays), axes)
