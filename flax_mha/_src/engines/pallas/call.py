"""The `Implementation` object of "pallas": its refusals, its choice of tiles, and its attention.

One set of kernels computes nearly every argument, forward and backward. They have never run on a TPU, so they are only
used if they are named.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from flax_mha._src import plan as schedule
from flax_mha._src.call.operands import DEFAULT_PRECISION, Call, Operands, Options, OutputAndLse
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.engines.engine import Implementation
from flax_mha._src.engines.kernels import tpu as tpu_kernels
from flax_mha._src.engines.pallas.attention import attend, prepare
from flax_mha._src.engines.pallas.grid import MOST_WORDS
from flax_mha._src.engines.pallas.split_function import RefusedError, split
from flax_mha._src.math import head
from flax_mha._src.math.tiling import Tiling
from flax_mha.masks.function import functions_of

HIGHEST = ("highest", "float32", lax.Precision.HIGHEST)
# The compiler holds about one tile in fast memory for each equation of a user's function and its derivative. With more
# equations than this, tiles of 512 x 512 do not fit, and with four times as many, neither do those of 256 x 256.
MOST_EQUATIONS = 32


def attention(
    call: Call, result: OutputAndLse | None = None, dtype: DTypeLike | None = None, interpret: Any = False
) -> OutputAndLse:
    """Computes output and log-sum-exp or, if `result` is given, returns that; see `Implementation.hop`.

    Query, key and value are rounded to `dtype` for the matrix products; None does not round. Output and gradients
    have the query's dtype. `interpret` is passed to `pallas_call`: True runs on any machine, slowly.
    """
    dtype = jnp.dtype(call.operands.query.dtype if dtype is None else dtype)
    return _attention(*schedule.with_occupancy(call), _tiling(call), dtype, interpret, result)


def _tiling(call: Call) -> Tiling:
    lengths, largest = call.operands.lengths, _largest_tile(call)
    height, width = (tpu_kernels.tile_size(length, largest) for length in lengths)
    rows, columns = -(-lengths[0] // height), -(-lengths[1] // width)
    return Tiling(lengths, rows, height, width, 1, columns, width)


def _largest_tile(call: Call) -> int:
    """Returns the largest side of a tile that fits in fast memory with the intermediate tiles of user functions."""
    count = sum(len(function.jaxpr.eqns) for _, function, _ in _functions(call))
    return 512 if count <= MOST_EQUATIONS else 256 if count <= 4 * MOST_EQUATIONS else 128


def _functions(call: Call) -> list[tuple[str, TracedFunction, int]]:
    """Lists the user's functions: argument name, traced function, and number of captured arrays."""
    operands, score_mod = call.operands, call.options.score_mod
    functions = [] if score_mod is None else [("score_mod", score_mod, len(operands.captured + operands.constants))]
    return functions + [("mask_mod", part.function, len(part.captured)) for part in functions_of(operands.mask)]


@functools.partial(jax.jit, static_argnames=("options", "tiling", "dtype", "interpret"))
def _attention(
    operands: Operands, options: Options, tiling: Tiling, dtype: jnp.dtype, interpret: Any, result: OutputAndLse | None
) -> OutputAndLse:
    known = None
    if result is not None:
        output, lse = head.from_caller(result[0], result[1], operands.groups)
        known = output.astype(operands.query.dtype), lse
    output, lse, *largest = attend(prepare(operands, options, tiling, dtype, interpret), known)
    return head.to_caller((output, lse, largest[0] if largest else None), operands.query.dtype)


def refusals(call: Call) -> list[str]:
    (operands, options), reasons = call, tpu_kernels.refusals(call)
    for name, function, num_captured in _functions(call):
        try:
            split(function, num_captured)
        except RefusedError as refused:
            reasons.append(f"{name} {refused}")
    if options.ring:
        reasons.append("it cannot read a ring cache in place: create the cache without a window")
    precision = options.precision or jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in DEFAULT_PRECISION and not (precision in HIGHEST and operands.query.dtype == jnp.float32):
        reasons.append(
            f"it supports only the default matmul precision (or the highest, for float32), not {precision}: leave "
            "precision out"
        )
    is_empty = 0 in (*operands.query.shape, *operands.key.shape, *operands.value.shape)
    return reasons if is_empty else reasons + _reasons_against_tiles(call)


def _reasons_against_tiles(call: Call) -> list[str]:
    """Returns [a reason] if the steps that visit all tiles (`list_steps`) do not fit in scalar memory, else []."""
    operands, tiling = call.operands, _tiling(call)
    heads = math.prod(operands.query.shape[:-3]) * operands.query.shape[-2]
    lists = [heads if jax.tree.leaves((operands.mask, operands.offsets)) else operands.groups[1]]
    if operands.bias is not None:  # heads that share a gradient of the bias share a list
        lists.append(heads // math.prod(operands.bias.shape[:-2]))
    words = 2 * max(lists) * tiling.rows * tiling.cells
    if words <= MOST_WORDS:
        return []
    return [
        f"its tile table does not fit: scalar memory has room for {MOST_WORDS} words, but {tiling.rows} x "
        f"{tiling.cells} tiles for {max(lists)} heads take {words}: use smaller batches or shorter sequences"
    ]


PALLAS = Implementation("pallas", attention, refusals, hop=attention)
