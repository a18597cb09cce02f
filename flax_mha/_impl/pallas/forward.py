"""The forward kernel: output and log-sum-exp of a row of tiles, by the running softmax of FlashAttention.

Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1. What is kept of each row of scores, its maximum and its sum, is
kept 128 times side by side: a vector register has 128 lanes, and a column of single numbers would fill as many.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha._impl.pallas import operands
from flax_mha._impl.pallas.held import Rules
from flax_mha._impl.pallas.launch import Kernel, Machine, Result, Visit, launch
from flax_mha._impl.pallas.operands import LANES, Inputs, lanes
from flax_mha._impl.pallas.steps import BY_ROW, FIRST, LAST, Occupied, listed

LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(rules: Rules, inputs: Inputs, occupied: Occupied, machine: Machine) -> tuple[Array, Array]:
    """Output [..., T, Hv] and log-sum-exp [..., T] of padded queries."""
    sizes, tiling = inputs.query.shape[:-2], machine.tiling
    features, height = inputs.value.shape[-1], tiling.height
    kernel = Kernel(
        name="flax_mha_forward",
        body=functools.partial(_body, rules),
        results=[
            Result("T H", (tiling.shape[0], features), rules.dtype),
            Result("T", (tiling.shape[0],), jnp.float32),
        ],
        scratch=[
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, features), jnp.float32),
        ],
    )
    output, lse = launch(kernel, inputs, sizes, sizes, listed(occupied, sizes, sizes, BY_ROW), machine)
    return output, lse


def _body(rules: Rules, visit: Visit, output: Any, lse: Any, largest: Any, total: Any, sums: Any) -> None:
    @visit.when(FIRST)
    def _begin() -> None:
        largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def tile(masked: bool) -> None:
        held = rules.held(visit, masked)
        s = held.scores.tile(
            held.products(), held.params, held.tile, held.mask, held.inputs.key_marks if masked else None
        )
        before = largest[...]
        after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        # What is subtracted is finite: a row that saw nothing has -inf, and -inf - -inf is NaN.
        shift = jnp.maximum(after, LOWEST) if rules.masks_rows else after
        weights = jnp.exp(s - lanes(shift, s.shape[1]))
        decay = jnp.exp(before - shift)
        largest[...] = after
        total[...] = total[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        sums[...] = sums[...] * lanes(decay, sums.shape[1]) + held.scores.dot(held.dropped(weights), held.inputs.value)
        if not masked and held.inputs.tile_marks is not None:
            # All rows see all keys of this tile, one of which may be not finite: that makes their sums NaN.
            @pl.when(held.inputs.tile_marks > 0)
            def _mark() -> None:
                total[...] = jnp.full(total.shape, jnp.nan, jnp.float32)

    visit.compute(tile, rules.has_mask)

    @visit.when(LAST)
    def _end() -> None:
        inputs = visit.load()
        seen, own_total, own_sums = largest[...], total[...], sums[...]
        if inputs.query_marks is not None:
            own_total = jnp.where((inputs.query_marks > 0) & (seen > -jnp.inf), jnp.nan, own_total)
        if inputs.sink is not None:
            with_sink = jnp.maximum(seen, inputs.sink)
            shift = jnp.maximum(with_sink, LOWEST)
            decay = jnp.exp(seen - shift)
            own_total = own_total * decay + jnp.exp(inputs.sink - shift)
            own_sums, seen = own_sums * lanes(decay, own_sums.shape[1]), with_sink
        divisor = jnp.where(own_total == 0, 1.0, own_total)
        output[0] = (own_sums / lanes(divisor, own_sums.shape[1])).astype(output.dtype)
        lse[0] = operands.row_of(jnp.log(divisor) + seen)
