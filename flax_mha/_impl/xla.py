"""The implementations that compute every call, "xla" and "blockwise": plain JAX, compiled by XLA.

The arrays of a call are put into the layout of one head, the math of one head (`dense.py` or `blockwise.py`) is mapped
over all heads, and its output is put back into the caller's layout.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha._call import Call, Operands, Options, accumulation_dtype, numbers_as_arrays
from flax_mha._impl import block_mask, blockwise, dense, heads, layout, nonfinite, schedule
from flax_mha._impl.block_mask import BlockMask
from flax_mha._impl.nonfinite import Magnitudes
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._impl.tiling import CELL, Tiling
from flax_mha._platform import varying_alike

OutputAndLse = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]


def dense_attention(call: Call) -> OutputAndLse:
    """Output and log-sum-exp, from all scores of a head at once: `implementation="xla"`."""
    call = numbers_as_arrays(call)
    scores = math.prod(call.operands.lengths)
    sequential = 0 if schedule.fuses_rows(call, scores) else schedule.sequential_axes(call, scores)
    return _dense(call.operands, call.options, sequential or 0)


def blockwise_attention(call: Call) -> OutputAndLse:
    """Output and log-sum-exp, tile by tile: `implementation="blockwise"`."""
    call = numbers_as_arrays(call)
    operands, options = call
    if operands.mask is not None and operands.has_known_offsets:
        mask = operands.mask.with_occupancy(operands.lengths, options.offsets, CELL)
        call = Call(operands._replace(mask=mask), options)
    tiling, blocks = schedule.tiles(call)
    scores = tiling.height * tiling.width
    sequential, fuse_rows = schedule.sequential_axes(call, scores), schedule.fuses_rows(call, scores)
    try:
        return _blockwise(call.operands, call.options, tiling, blocks, sequential, fuse_rows)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            'implementation must be "xla" for forward-mode differentiation (jax.jvp, jax.jacfwd), but got "blockwise", '
            'or None, which chose it; pass implementation="xla".'
        ) from error


@functools.partial(jax.jit, static_argnames=("options", "sequential"))
def _dense(operands: Operands, options: Options, sequential: int) -> OutputAndLse:
    arrays, axes = _by_head(operands, options), operands.query.ndim - 1
    output, lse = heads.over_heads(_dense_head, arrays, axes, sequential)
    return layout.join_heads(output).astype(operands.query.dtype), layout.join_heads(lse[..., None])[..., 0]


def _dense_head(arrays: tuple) -> tuple[Array, Array]:
    return dense.dense_head(*arrays)


@functools.partial(jax.jit, static_argnames=("options", "tiling", "sequential", "fuse_rows"))
def _blockwise(
    operands: Operands,
    options: Options,
    tiling: Tiling,
    blocks: BlockMask | None,
    sequential: int | None,
    fuse_rows: bool,
) -> OutputAndLse:
    arrays, axes = _by_head(operands, options), operands.query.ndim - 1
    if blocks is None:
        *_, scores, _ = arrays
        blocks = _block_mask(scores, tiling, axes)
    # Heads whose loops visit different numbers of tiles must not be vmapped together: each would run the longest loop.
    if sequential is not None and not blocks.single:
        sequential = max([sequential, *(axis + 1 for axis in range(axes) if blocks.column.shape[axis] > 1)])
    one_head = functools.partial(_blockwise_head, tiling, blocks.single and fuse_rows)
    output, lse = heads.over_heads(one_head, varying_alike((*arrays, blocks)), axes, sequential or 0)
    return layout.join_heads(output).astype(operands.query.dtype), layout.join_heads(lse[..., None])[..., 0]


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


def _by_head(
    operands: Operands, options: Options
) -> tuple[Array, Array, Array, ScoreParams, Scores, Magnitudes | None]:
    """What the math of one head takes, with leading axes for batch and heads."""
    query, key, value, groups = operands.query, operands.key, operands.value, operands.groups
    rank = query.ndim - 3
    # On every platform the matrix products are computed in this dtype too; on CPUs, bfloat16 products are slower.
    dtype = accumulation_dtype(query.dtype)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    scale = options.scale if operands.scale is None else operands.scale.astype(dtype)
    captured = [layout.by_head(x, "", rank, groups) for x in operands.captured]
    is_learned = options.captured_trainable
    params = ScoreParams(
        bias=None if operands.bias is None else layout.by_head(operands.bias, "B N T S", rank, groups),
        sink=None if operands.sinks is None else layout.by_head(operands.sinks, "B N", rank, groups).astype(dtype),
        captured=[x for x, learned in zip(captured, is_learned, strict=True) if learned],
    )
    constants = [x for x, learned in zip(captured, is_learned, strict=True) if not learned]
    scores = _scores(operands, options, constants)
    magnitudes = None
    if scores.masks_scores(params):
        of_queries = nonfinite.magnitude_of(query * scale)
        if operands.scale is not None:  # else the gradient of the scale would be NaN
            query = nonfinite.finite(query, of_queries)
        key, value, of_keys = nonfinite.finite_keys(key, value)
        magnitudes = Magnitudes(
            layout.split_heads(of_queries[..., None], groups)[..., 0],
            layout.split_heads(of_keys[..., None], (groups[0], 1))[..., 0],
        )
    keys, values = (layout.split_heads(x, (groups[0], 1)) for x in (key, value))
    return layout.split_heads(query * scale, groups), keys, values, params, scores, magnitudes


def _scores(operands: Operands, options: Options, constants: list[Array]) -> Scores:
    batch, groups = operands.query.shape[:-3], operands.groups
    rank, num_heads = len(batch), operands.query.shape[-2]
    entry = head = seed = None
    if options.score_mod is not None:
        entry = layout.by_head(jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch), "B", rank, groups)
        head = layout.by_head(jnp.arange(num_heads, dtype=jnp.int32), "N", rank, groups)
    if operands.dropout_rng is not None:
        own = (1,) * (rank + 2) if options.broadcast_dropout else (*batch, *groups)
        seed = jax.random.bits(operands.dropout_rng, (*own, 2), jnp.uint32)
    query_offset, key_offset = (None if x is None else layout.by_head(x, "B", rank, groups) for x in operands.offsets)
    return Scores(
        mask=None if operands.mask is None else layout.mask_by_head(operands.mask, rank, groups),
        offset_arrays=(query_offset, key_offset),
        dropout_seed=seed,
        batch=entry,
        head=head,
        constants=constants,
        offset_numbers=options.offsets,
        soft_cap=options.soft_cap,
        score_mod=options.score_mod,
        captured_trainable=options.captured_trainable,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
    )
