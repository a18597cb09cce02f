"""The engine "pallas": what it refuses, its choice of tiles, and its attention.

One set of kernels computes nearly every argument, forward and backward. They have never run on a TPU, so they are only
used if they are named.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_mha._src.call.operands import DEFAULT_PRECISION, Call, Result
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.engines.engine import Engine
from flax_mha._src.engines.kernels import tpu as tpu_kernels
from flax_mha._src.engines.pallas.attention import attend, prepare
from flax_mha._src.engines.pallas.grid import MOST_WORDS
from flax_mha._src.engines.pallas.split_function import RefusedError, split
from flax_mha._src.math import head
from flax_mha._src.math.tiling import Tiling
from flax_mha._src.plan import Plan, with_occupancy
from flax_mha.masks.function import functions_of

HIGHEST = ("highest", "float32", lax.Precision.HIGHEST)
# The compiler holds about one tile in fast memory for each equation of a user's function and its derivative. With more
# equations than this, tiles of 512 x 512 do not fit, and with four times as many, neither do those of 256 x 256.
MOST_EQUATIONS = 32


@dataclasses.dataclass(frozen=True)
class Pallas(Engine):
    """This package's kernels for TPUs. `interpret` is passed to `pallas_call`: True runs on any machine, slowly."""

    name = "pallas"
    platform = "tpu"
    shares = True
    interpret: Any = False

    def supports(self, call: Call) -> list[str]:
        return refusals(call)

    def plan(self, call: Call) -> tuple[Plan, Call]:
        return Plan(call.operands.query.dtype, tiling=_tiling(call)), with_occupancy(call)

    def forward(self, plan: Plan, call: Call) -> Result:
        return self._attend(plan, call, None)

    def share(self, plan: Plan, call: Call, result: Result) -> Result:
        output, lse = head.from_caller(result, call.operands.groups)
        return self._attend(plan, call, (output.astype(call.operands.query.dtype), lse))

    def _attend(self, plan: Plan, call: Call, known: tuple[Array, Array] | None) -> Result:
        output, lse, *largest = attend(prepare(plan, call, self.interpret), known)
        return head.to_caller((output, lse, largest[0] if largest else None), call.operands.query.dtype)


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
