"""The forward kernel: output and log-sum-exp of a row of tiles, by the running softmax of FlashAttention.

Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1. What is kept of each row of scores, its maximum and its sum, is
kept 128 times side by side: a vector register has 128 lanes, and a column of single numbers would fill as many.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha.impl.pallas.grid import FIRST, LAST
from flax_mha.impl.pallas.launch import LANES, Kernel, KernelCall, Plan, Result, Step, launch, repeat_lanes
from flax_mha.impl.pallas.tile import load_tile

LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(call: KernelCall) -> tuple[Array, Array]:
    """Output [..., T, Hv] and log-sum-exp [..., T]."""
    plan, inputs, _ = call
    (*heads, length, head_size), value_size = inputs.query.shape, inputs.value.shape[-1]
    height = plan.tiling.height
    kernel = Kernel(
        name="flax_mha_forward",
        body=functools.partial(_step, plan),
        heads=tuple(heads),
        by="T",
        results=[Result("T H", (length, value_size), plan.dtype), Result("T", (length,), jnp.float32)],
        scratch=[
            pltpu.VMEM((height, head_size), inputs.query.dtype),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, value_size), jnp.float32),
        ],
    )
    output, lse = launch(kernel, call)
    return output, lse


def _step(plan: Plan, step: Step, *references: Any) -> None:
    row = _Row(plan, step, *references)
    step.when(FIRST)(row.begin)
    step.compute(row.add)
    step.when(LAST)(row.end)


class _Row(NamedTuple):
    """A row of tiles in one step: references to its results, and to what is kept of it from tile to tile.

    Attributes:
      query: The queries, with features last.
      running_max: The greatest score of each row.
      running_sum: The sum of exp(score - running_max).
      weighted: The values, weighted by the same.
    """

    plan: Plan
    step: Step
    output: Any
    lse: Any
    query: Any
    running_max: Any
    running_sum: Any
    weighted: Any

    def begin(self) -> None:
        self.query[...] = self.plan.to_rows(self.step.load().query)
        self.running_max[...] = jnp.full(self.running_max.shape, -jnp.inf, jnp.float32)
        self.running_sum[...] = jnp.zeros(self.running_sum.shape, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)

    def add(self, masked: bool) -> None:
        tile = load_tile(self.plan, self.step, masked, rows=[self.query])
        poison = tile.inputs.key_poison
        s = tile.rule.tile(tile.products(), tile.params, tile.tile, tile.mask, poison if masked else None)
        before = self.running_max[...]
        after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        # What is subtracted is finite: a row that saw nothing has -inf, and -inf - -inf is NaN.
        may_see_nothing = self.plan.rule.masks_tile(tile.params, tile.inputs.mask)
        shift = jnp.maximum(after, LOWEST) if may_see_nothing else after
        weights = jnp.exp(s - repeat_lanes(shift, s.shape[1]))
        decay = jnp.exp(before - shift)
        self.running_max[...] = after
        self.running_sum[...] = self.running_sum[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        kept = tile.rule.dropout_multiplier(tile.tile)
        values = tile.over_columns(weights if kept is None else weights * kept, tile.inputs.value)
        self.weighted[...] = self.weighted[...] * repeat_lanes(decay, values.shape[1]) + values
        if not masked and poison is not None:  # all rows see all keys of this tile
            pl.when(jnp.max(poison) > 0)(self.spoil)

    def spoil(self) -> None:
        self.running_sum[...] = jnp.full(self.running_sum.shape, jnp.nan, jnp.float32)

    def end(self) -> None:
        inputs = self.step.load()
        largest, total, weighted = self.running_max[...], self.running_sum[...], self.weighted[...]
        if inputs.query_poison is not None:
            total = jnp.where((inputs.query_poison > 0) & (largest > -jnp.inf), jnp.nan, total)
        if inputs.sink is not None:
            with_sink = jnp.maximum(largest, inputs.sink)
            shift = jnp.maximum(with_sink, LOWEST)
            decay = jnp.exp(largest - shift)
            total = total * decay + jnp.exp(inputs.sink - shift)
            weighted, largest = weighted * repeat_lanes(decay, weighted.shape[1]), with_sink
        divisor = jnp.where(total == 0, 1.0, total)
        output = self.plan.to_rows(weighted / repeat_lanes(divisor, weighted.shape[1]))
        self.output[...] = output.astype(self.output.dtype)
        self.lse[...] = jnp.transpose(jnp.log(divisor) + largest)[:1]
