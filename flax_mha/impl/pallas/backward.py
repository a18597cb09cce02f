"""The backward kernels: gradients of queries, of keys and values, and of a bias.

Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2, in one kernel for each direction in which gradients are summed, so
that every sum stays in fast memory until it is complete. Keys and values have queries along columns: then none of the
three matrix products needs a transposed tile, and what belongs to queries is read as a row.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha.impl.pallas.grid import FIRST, LAST
from flax_mha.impl.pallas.launch import LANES, Kernel, KernelCall, Plan, Result, Step, launch, repeat_lanes
from flax_mha.impl.pallas.tile import load_tile


def query_gradients(call: KernelCall, learned: Sequence[bool]) -> tuple[Array, list[Array | None]]:
    """The gradients of queries, and for every head of those values of `score_mod` that are learned, else None."""
    plan, inputs, _ = call
    (*heads, _, head_size), height = inputs.query.shape, plan.tiling.height
    shapes = [x.shape[len(heads) :] for x in (*inputs.numbers, *inputs.tables)]
    results = [Result("L", shape or (1,), jnp.float32) for shape, mine in zip(shapes, learned, strict=True) if mine]
    kernel = Kernel(
        name="flax_mha_dq",
        body=functools.partial(_dq, plan, tuple(learned)),
        heads=tuple(heads),
        by="T",
        results=[Result("T H", inputs.query.shape[-2:], plan.dtype), *results],
        scratch=[
            pltpu.VMEM((height, head_size), inputs.query.dtype),
            pltpu.VMEM((height, inputs.d_output.shape[-1]), inputs.d_output.dtype),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, head_size), jnp.float32),
        ],
    )
    d_query, *d_learned = launch(kernel, call)
    following = iter(d_learned)
    d_values = [
        next(following).reshape(*heads, *shape) if mine else None for shape, mine in zip(shapes, learned, strict=True)
    ]
    return d_query, d_values


def _dq(plan: Plan, learned: tuple[bool, ...], step: Step, d_query: Any, *references: Any) -> None:
    d_values, (query, d_output, lse, delta, d_scaled) = references[:-5], references[-5:]

    @step.when(FIRST)
    def _begin() -> None:
        inputs = step.load()
        query[...], d_output[...] = plan.to_rows(inputs.query), plan.to_rows(inputs.d_output)
        lse[...] = jnp.broadcast_to(inputs.lse, lse.shape)
        delta[...] = jnp.broadcast_to(inputs.delta, delta.shape)
        d_scaled[...] = jnp.zeros(d_scaled.shape, jnp.float32)

    @pl.when(step.is_first)
    def _begin_head() -> None:
        for x in d_values:
            x[...] = jnp.zeros(x.shape, jnp.float32)

    def add(masked: bool) -> None:
        tile = load_tile(plan, step, masked, rows=[query, d_output], learned=learned)
        width = tile.tile.shape[1]
        _, d_products, d_params = tile.gradients(repeat_lanes(lse[...], width), repeat_lanes(delta[...], width))
        d_scaled[...] += tile.over_columns(d_products, tile.inputs.key)
        pairs = [(x, entry) for x, entry in zip(d_params.captured, tile.entries, strict=True) if x is not None]
        for (d_value, entry), total in zip(pairs, d_values, strict=True):
            _add_value(d_value, entry, total)

    step.compute(add)

    @step.when(LAST)
    def _end() -> None:
        d_query[...] = plan.to_rows(d_scaled[...] * plan.rule.scale).astype(d_query.dtype)


def _add_value(d_value: Array, entry: Array | None, total: Any) -> None:
    """Adds a tile's gradients to that of a number, or to those of the entries of a table.

    There is no scatter: of a table, one pass for every entry between the least and the greatest.
    """
    if entry is None:
        total[...] += jnp.broadcast_to(jnp.sum(d_value, keepdims=True), total.shape)
        return
    entry = jnp.broadcast_to(entry, d_value.shape)
    numbers = entry.astype(jnp.float32)  # small integers; a TPU reduces floats
    least, greatest = jnp.min(numbers).astype(jnp.int32), jnp.max(numbers).astype(jnp.int32)

    def add_entry(n: Any, _: None) -> None:
        mine = jnp.sum(jnp.where(entry == n, d_value, jnp.zeros_like(d_value)), keepdims=True)
        place = lax.broadcasted_iota(jnp.int32, total.shape, 1)
        total[...] += jnp.where(place == n, jnp.broadcast_to(mine, place.shape), jnp.zeros(place.shape, mine.dtype))

    lax.fori_loop(least, greatest + 1, add_entry, None)


def key_value_gradients(call: KernelCall) -> tuple[Array, Array]:
    """The gradients of keys and values, summed over the query heads that share them."""
    plan, inputs, _ = call
    width, pair = plan.tiling.width, (inputs.key, inputs.value)
    kernel = Kernel(
        name="flax_mha_dkv",
        body=functools.partial(_dkv, plan),
        heads=inputs.key.shape[:-2],
        by="S",
        results=[Result("S H", x.shape[-2:], plan.dtype) for x in pair],
        scratch=[pltpu.VMEM((width, x.shape[-1]), dtype) for dtype in (inputs.key.dtype, jnp.float32) for x in pair],
        transposed=True,
    )
    d_key, d_value = launch(kernel, call)
    return d_key, d_value


def _dkv(plan: Plan, step: Step, d_key: Any, d_value: Any, key: Any, value: Any, d_scaled: Any, d_values: Any) -> None:
    @step.when(FIRST)
    def _begin() -> None:
        inputs = step.load()
        key[...], value[...] = plan.to_rows(inputs.key), plan.to_rows(inputs.value)
        d_scaled[...] = jnp.zeros(d_scaled.shape, jnp.float32)
        d_values[...] = jnp.zeros(d_values.shape, jnp.float32)

    def add(masked: bool) -> None:
        tile = load_tile(plan, step, masked, transposed=True, rows=[key, value])
        weights, d_products, _ = tile.gradients(tile.inputs.lse, tile.inputs.delta)
        d_values[...] += tile.over_columns(weights, tile.inputs.d_output)
        d_scaled[...] += tile.over_columns(d_products, tile.inputs.query)

    step.compute(add)

    @step.when(LAST)
    def _end() -> None:
        d_key[...] = plan.to_rows(d_scaled[...] * plan.rule.scale).astype(d_key.dtype)
        d_value[...] = plan.to_rows(d_values[...]).astype(d_value.dtype)


def bias_gradient(call: KernelCall) -> Array:
    """The gradient of the bias, in its own shape: what it is broadcast over is summed up in the kernel."""
    plan, inputs, _ = call
    *heads, rows, columns = inputs.bias.shape
    by = "T" * (rows != 1) + "S" * (columns != 1)
    part = tuple(n for n in (rows, columns) if n != 1) or (1,)
    tiling = plan.tiling
    kernel = Kernel(
        name="flax_mha_dbias",
        body=functools.partial(_dbias, plan),
        heads=tuple(heads),
        by=by,
        results=[Result(" ".join(by) or "L", part, inputs.bias.dtype)],
        scratch=[pltpu.VMEM((tiling.height if rows != 1 else 1, tiling.width if columns != 1 else 1), jnp.float32)],
    )
    [d_bias] = launch(kernel, call)
    return d_bias.reshape(inputs.bias.shape)


def _dbias(plan: Plan, step: Step, d_bias: Any, total: Any) -> None:
    @step.when(FIRST)
    def _begin() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)

    def add(masked: bool) -> None:
        tile = load_tile(plan, step, masked)
        _, _, d_params = tile.gradients(tile.inputs.lse, tile.inputs.delta)
        total[...] += d_params.bias

    step.compute(add)

    @step.when(LAST)
    def _end() -> None:
        sums = total[...]
        if sums.shape[1] == 1 != sums.shape[0]:
            sums = jnp.transpose(jnp.broadcast_to(sums, (sums.shape[0], LANES)))[:1]
        d_bias[...] = jnp.broadcast_to(sums, d_bias.shape).astype(d_bias.dtype)
