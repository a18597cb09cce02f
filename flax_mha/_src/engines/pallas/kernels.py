"""The kernels: output and log-sum-exp, and the gradients of queries, of keys and values, and of a bias.

Dao, FlashAttention-2, arXiv:2307.08691. Forward is algorithm 1, the online softmax; the maximum and the sum of each row
of scores are stored 128 times side by side, because a vector register has 128 lanes. Backward is algorithm 2, in one
kernel for each direction in which gradients are summed, so that every sum stays in fast memory until it is complete.
The kernel for keys and values has queries along the columns of its tiles. Then none of its three matrix products needs
a transposed tile, and arrays with one entry per query are read as rows.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from flax_mha._src.engines.pallas.inputs import Inputs, LoadedTile, repeat_lanes
from flax_mha._src.engines.pallas.launch import Kernel, KernelCall, Result, launch
from flax_mha._src.engines.pallas.split_function import LANES
from flax_mha._src.math.scores import times

LOWEST = float(jnp.finfo(jnp.float32).min)
Refs = Sequence[Any]


def forward(call: KernelCall) -> tuple[Array, ...]:
    """Runs the forward kernel: returns output [..., T, Hv], log-sum-exp and perhaps largest scores [..., T]."""
    plan, inputs, _ = call
    (*heads, length, _), value_size, height = inputs.query.shape, inputs.value.shape[-1], plan.tiling.height

    def end(inputs: Inputs, results: Refs, sums: Refs) -> None:
        running_max, running_sum, weighted = (ref[...] for ref in sums)
        output, lse, *largest = results
        for ref in largest:
            ref[...] = jnp.transpose(running_max)[:1]
        if inputs.query_poison is not None:
            running_sum = jnp.where((inputs.query_poison > 0) & (running_max > -jnp.inf), jnp.nan, running_sum)
        if inputs.sink is not None:
            before, running_max = running_max, jnp.maximum(running_max, inputs.sink)
            shift = jnp.maximum(running_max, LOWEST)
            decay = jnp.exp(before - shift)
            running_sum = running_sum * decay + jnp.exp(inputs.sink - shift)
            weighted = weighted * repeat_lanes(decay, value_size)
        divisor = jnp.where(running_sum == 0, 1.0, running_sum)
        output[...] = plan.to_rows(weighted / repeat_lanes(divisor, value_size)).astype(output.dtype)
        lse[...] = jnp.transpose(jnp.log(divisor) + running_max)[:1]

    per_row = Result("T", (length,), jnp.float32)
    kernel = Kernel(
        name="flax_mha_forward",
        heads=tuple(heads),
        results=[Result("T H", (length, value_size), plan.dtype), *[per_row] * (1 + plan.rule.returns_max)],
        sums=[((height, LANES), -jnp.inf), ((height, LANES), 0.0), ((height, value_size), 0.0)],
        add=_add_to_softmax,
        end=end,
    )
    output, lse, *largest = launch(kernel, call)
    return output, lse, *largest


def _add_to_softmax(tile: LoadedTile, results: Refs, sums: Refs) -> None:
    """Adds a tile to `sums`, the running maximum, sum and output of the online softmax (`online_softmax.State`)."""
    running_max, running_sum, weighted = sums
    poison, is_masked = tile.inputs.key_poison, tile.rule.mask is not None
    s = tile.rule.tile(tile.products(), tile.params, tile.tile, poison if is_masked else None)
    before = running_max[...]
    after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    # A row without a visible key so far has the maximum -inf. Replace it: -inf - -inf would be NaN.
    may_be_masked = tile.inputs.mask is not None or tile.rule.masks_scores(tile.params)
    shift = jnp.maximum(after, LOWEST) if may_be_masked else after
    weights = jnp.exp(s - repeat_lanes(shift, s.shape[1]))
    decay = jnp.exp(before - shift)
    running_max[...] = after
    running_sum[...] = running_sum[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
    values = tile.over_columns(times(weights, tile.rule.dropout_multiplier(tile.tile)), tile.columns[1])
    weighted[...] = weighted[...] * repeat_lanes(decay, values.shape[1]) + values
    if not is_masked and poison is not None:  # all queries attend to all keys of this tile

        @pl.when(jnp.max(poison) > 0)
        def _make_nan() -> None:
            running_sum[...] = jnp.full(running_sum.shape, jnp.nan, jnp.float32)


def query_gradients(call: KernelCall, learned: tuple[bool, ...]) -> tuple[Array, list[Array | None]]:
    """Computes gradients of queries and of `score_mod`'s numbers and tables (`inputs.values`) if they are `learned`."""
    plan, inputs, _ = call
    *heads, length, head_size = inputs.query.shape
    shapes = [x.shape[len(heads) :] for x in inputs.values]
    results = [Result("L", shape or (1,), jnp.float32) for shape, mine in zip(shapes, learned, strict=True) if mine]

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        _, d_products, d_params = tile.gradients()
        sums[0][...] += tile.over_columns(d_products, tile.columns[0])
        pairs = [(x, entry) for x, entry in zip(d_params.captured, tile.entries, strict=True) if x is not None]
        for (d_value, entry), total in zip(pairs, results[1:], strict=True):
            _add_value(d_value, entry, total)

    def end(inputs: Inputs, results: Refs, sums: Refs) -> None:
        results[0][...] = plan.to_rows(sums[0][...] * plan.rule.scale).astype(plan.dtype)

    kernel = Kernel(
        name="flax_mha_dq",
        heads=tuple(heads),
        results=[Result("T H", (length, head_size), plan.dtype), *results],
        sums=[((plan.tiling.height, head_size), 0.0)],
        add=add,
        end=end,
    )
    d_query, *d_learned = launch(kernel, call._replace(plan=plan._replace(learned=learned)))
    following = iter(d_learned)
    pairs = zip(shapes, learned, strict=True)
    return d_query, [next(following).reshape(*heads, *shape) if mine else None for shape, mine in pairs]


def _add_value(d_value: Array, entry: Array | None, total: Any) -> None:
    """Adds a tile's gradients to `total`: of one number, or of a table whose index for each gradient is in `entry`.

    TPU kernels have no scatter: a loop from the least to the greatest index updates one table entry in each step.
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
    """Computes the gradients of keys and values, summed over the query heads that share them."""
    plan, inputs, _ = call
    pair = inputs.key, inputs.value

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        weights, d_products, _ = tile.gradients()
        sums[1][...] += tile.over_columns(weights, tile.columns[1])
        sums[0][...] += tile.over_columns(d_products, tile.columns[0])

    def end(inputs: Inputs, results: Refs, sums: Refs) -> None:
        results[0][...] = plan.to_rows(sums[0][...] * plan.rule.scale).astype(plan.dtype)
        results[1][...] = plan.to_rows(sums[1][...]).astype(plan.dtype)

    kernel = Kernel(
        name="flax_mha_dkv",
        heads=inputs.key.shape[:-2],
        results=[Result("S H", x.shape[-2:], plan.dtype) for x in pair],
        sums=[((plan.tiling.width, x.shape[-1]), 0.0) for x in pair],
        add=add,
        end=end,
        transposed=True,
    )
    d_key, d_value = launch(kernel, call)
    return d_key, d_value


def bias_gradient(call: KernelCall) -> Array:
    """Computes the gradient of the bias, summed in the kernel over the axes along which it is broadcast."""
    (plan, inputs, _), (*heads, rows, columns) = call, call.inputs.bias.shape
    names = " ".join("T" * (rows != 1) + "S" * (columns != 1))

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        *_, d_params = tile.gradients()
        sums[0][...] += d_params.bias

    def end(inputs: Inputs, results: Refs, sums: Refs) -> None:
        total, [d_bias] = sums[0][...], results
        if total.shape[1] == 1 != total.shape[0]:
            total = jnp.transpose(jnp.broadcast_to(total, (total.shape[0], LANES)))[:1]
        d_bias[...] = jnp.broadcast_to(total, d_bias.shape).astype(d_bias.dtype)

    part = tuple(n for n in (rows, columns) if n != 1) or (1,)
    shape = plan.tiling.height if rows != 1 else 1, plan.tiling.width if columns != 1 else 1
    kernel = Kernel(
        name="flax_mha_dbias",
        heads=tuple(heads),
        results=[Result(names or "L", part, inputs.bias.dtype)],
        sums=[(shape, 0.0)],
        add=add,
        end=end,
    )
    [d_bias] = launch(kernel, call)
    return d_bias.reshape(inputs.bias.shape)
