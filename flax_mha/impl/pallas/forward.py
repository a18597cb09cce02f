"""The forward kernel: output and log-sum-exp of a row of tiles, by the running softmax of FlashAttention.

Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1. What is kept of each row of scores, its maximum and its sum, is
kept 128 times side by side: a vector register has 128 lanes, and a column of single numbers would fill as many.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha.impl.pallas import operands
from flax_mha.impl.pallas.held import Rules
from flax_mha.impl.pallas.launch import Kernel, Machine, Result, Visit, launch
from flax_mha.impl.pallas.operands import LANES, Inputs, lanes
from flax_mha.impl.pallas.steps import BY_ROW, FIRST, LAST, Occupied, listed

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
            *rules.room_to_turn(height, inputs.query),
        ],
        upright=rules.upright,
    )
    output, lse = launch(kernel, inputs, sizes, sizes, listed(occupied, sizes, sizes, BY_ROW), machine)
    return output, lse


def _body(rules: Rules, visit: Visit, output: Any, lse: Any, largest: Any, total: Any, sums: Any, *turned: Any) -> None:
    row = _Row(rules, visit, output, lse, largest, total, sums, turned)
    visit.when(FIRST)(row.begin)
    visit.compute(row.tile, rules.has_mask)
    visit.when(LAST)(row.end)


class _Row(NamedTuple):
    """A row of tiles, in one step: references to its results and to what is kept of it from tile to tile.

    Attributes:
      rules: What is static.
      visit: The step.
      output: The result.
      lse: Likewise.
      largest: Of each row of scores, its greatest.
      total: The sum of exp(score - largest).
      sums: The values, weighted by the same.
      turned: The queries, if they are kept turned.
    """

    rules: Rules
    visit: Visit
    output: Any
    lse: Any
    largest: Any
    total: Any
    sums: Any
    turned: Sequence[Any]

    def begin(self) -> None:
        self.largest[...] = jnp.full(self.largest.shape, -jnp.inf, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.sums[...] = jnp.zeros(self.sums.shape, jnp.float32)
        for query in self.turned:
            query[...] = self.rules.turned(self.visit.load().query)

    def tile(self, masked: bool) -> None:
        held = self.rules.held(self.visit, masked, turned=self.turned)
        marks = held.inputs.key_marks if masked else None
        s = held.scores.tile(held.products(), held.params, held.tile, held.mask, marks)
        before = self.largest[...]
        after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        # What is subtracted is finite: a row that saw nothing has -inf, and -inf - -inf is NaN.
        shift = jnp.maximum(after, LOWEST) if self.rules.masks_rows else after
        weights = jnp.exp(s - lanes(shift, s.shape[1]))
        decay = jnp.exp(before - shift)
        self.largest[...] = after
        self.total[...] = self.total[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        values = held.over_columns(held.dropped(weights), held.inputs.value)
        self.sums[...] = self.sums[...] * lanes(decay, values.shape[1]) + values
        if not masked and held.inputs.tile_marks is not None:
            # All rows see all keys of this tile, one of which may be not finite: that makes their sums NaN.
            pl.when(held.inputs.tile_marks > 0)(self.spoil)

    def spoil(self) -> None:
        self.total[...] = jnp.full(self.total.shape, jnp.nan, jnp.float32)

    def end(self) -> None:
        inputs = self.visit.load()
        largest, total, sums = self.largest[...], self.total[...], self.sums[...]
        if inputs.query_marks is not None:
            total = jnp.where((inputs.query_marks > 0) & (largest > -jnp.inf), jnp.nan, total)
        if inputs.sink is not None:
            with_sink = jnp.maximum(largest, inputs.sink)
            shift = jnp.maximum(with_sink, LOWEST)
            decay = jnp.exp(largest - shift)
            total = total * decay + jnp.exp(inputs.sink - shift)
            sums, largest = sums * lanes(decay, sums.shape[1]), with_sink
        divisor = jnp.where(total == 0, 1.0, total)
        self.output[0] = self.rules.turned(sums / lanes(divisor, sums.shape[1])).astype(self.output.dtype)
        self.lse[0] = operands.row_of(jnp.log(divisor) + largest)
