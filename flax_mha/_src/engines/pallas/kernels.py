"""The kernels: output and log-sum-exp, and the gradients of queries, of keys and values, and of a bias.

Dao, FlashAttention-2, arXiv:2307.08691. Forward is algorithm 1, the online softmax; the maximum and the sum of each row
of scores are stored 128 times side by side, because a vector register has 128 lanes. Backward is algorithm 2, in one
kernel for each direction in which gradients are summed, so that every sum stays in fast memory until it is complete.
The kernel for keys and values has queries along the columns of its tiles, so its products need no transposed tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from flax_mha._src.engines.pallas.inputs import Arrays, LoadedTile, repeat_lanes
from flax_mha._src.engines.pallas.launch import Kernel, KernelCall, Refs, launch
from flax_mha._src.engines.pallas.split_function import LANES
from flax_mha._src.math.head import Head
from flax_mha._src.math.scores import times

LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(call: KernelCall) -> Arrays:
    """Computes output [..., T, Hv], log-sum-exp [..., T] and, if `rule.returns_max`, largest scores [..., T]."""
    plan, head = call.plan, call.inputs.head
    (*heads, length, _), value_size, height = head.query.shape, head.value.shape[-1], plan.tiling.height

    def end(head: Head, results: Refs, sums: Refs) -> None:
        running_max, running_sum, weighted = (ref[...] for ref in sums)
        (output, lse, *largest), sink = results, head.inputs.sink
        for ref in largest:
            ref[...] = jnp.transpose(running_max)[:1]
        if head.nonfinite is not None:
            running_sum = jnp.where((head.nonfinite.query > 0) & (running_max > -jnp.inf), jnp.nan, running_sum)
        if sink is not None:
            before, running_max = running_max, jnp.maximum(running_max, sink)
            shift = jnp.maximum(running_max, LOWEST)
            decay = jnp.exp(before - shift)
            running_sum = running_sum * decay + jnp.exp(sink - shift)
            weighted = weighted * repeat_lanes(decay, value_size)
        divisor = jnp.where(running_sum == 0, 1.0, running_sum)
        output[...] = plan.to_rows(weighted / repeat_lanes(divisor, value_size)).astype(output.dtype)
        lse[...] = jnp.transpose(jnp.log(divisor) + running_max)[:1]

    output = jax.ShapeDtypeStruct((*heads, length, value_size), plan.dtype)
    per_row = "T", jax.ShapeDtypeStruct((*heads, length), jnp.float32)
    kernel = Kernel(
        name="flax_mha_forward",
        results=[("T H", output), *[per_row] * (1 + head.rule.returns_max)],
        sums=[((height, LANES), -jnp.inf), ((height, LANES), 0.0), ((height, value_size), 0.0)],
        add=_add_to_softmax,
        end=end,
    )
    return tuple(launch(kernel, call))


def _add_to_softmax(tile: LoadedTile, results: Refs, sums: Refs) -> None:
    """Adds a tile to `sums`: each row's maximum, sum of weights, and weighted sum of values (online softmax)."""
    running_max, running_sum, weighted = sums
    poison = None if tile.head.nonfinite is None else tile.head.nonfinite.key
    is_masked = tile.rule.mask is not None
    s = tile.rule.tile(tile.products(), tile.params, tile.tile, poison if is_masked else None)
    before = running_max[...]
    after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    # A row without a visible key so far has the maximum -inf. Replace it: -inf - -inf would be NaN.
    may_be_masked = tile.head.rule.mask is not None or tile.rule.masks_scores(tile.params)
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


def query_gradients(call: KernelCall, learned: tuple[bool, ...]) -> list[Array]:
    """Computes each head's gradients of queries, then of the values of `score_mod` that are marked in `learned`."""
    plan, head = call.plan, call.inputs.head
    *heads, _, head_size = head.query.shape
    values = [x for x, is_learned in zip(head.inputs.captured, learned, strict=True) if is_learned]
    shapes = [(*heads, *(x.shape[len(heads) :] or (1,))) for x in values]
    tables = [("L", jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes]

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        _, d_products, d_params = tile.gradients()
        sums[0][...] += tile.over_columns(d_products, tile.columns[0])
        pairs = [(x, entry) for x, entry in zip(d_params.captured, tile.entries, strict=True) if x is not None]
        for (d_value, entry), total in zip(pairs, results[1:], strict=True):
            _add_value(d_value, entry, total)

    def end(head: Head, results: Refs, sums: Refs) -> None:
        results[0][...] = plan.to_rows(sums[0][...] * head.rule.scale).astype(plan.dtype)

    kernel = Kernel(
        name="flax_mha_dq",
        results=[("T H", jax.ShapeDtypeStruct(head.query.shape, plan.dtype)), *tables],
        sums=[((plan.tiling.height, head_size), 0.0)],
        add=add,
        end=end,
    )
    return launch(kernel, call._replace(plan=plan._replace(learned=learned)))


def _add_value(d_value: Array, entry: Array | None, total: Any) -> None:
    """Adds a tile's gradients of a number (`entry`: None) or of a table (`entry`: each score's index) to `total`.

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


def key_value_gradients(call: KernelCall) -> list[Array]:
    """Computes the gradients of keys and values, summed over the query heads that share them."""
    plan, head = call.plan, call.inputs.head
    pair = head.key, head.value

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        weights, d_products, _ = tile.gradients()
        sums[1][...] += tile.over_columns(weights, tile.columns[1])
        sums[0][...] += tile.over_columns(d_products, tile.columns[0])

    def end(head: Head, results: Refs, sums: Refs) -> None:
        results[0][...] = plan.to_rows(sums[0][...] * head.rule.scale).astype(plan.dtype)
        results[1][...] = plan.to_rows(sums[1][...]).astype(plan.dtype)

    kernel = Kernel(
        name="flax_mha_dkv",
        results=[("S H", jax.ShapeDtypeStruct(x.shape, plan.dtype)) for x in pair],
        sums=[((plan.tiling.width, x.shape[-1]), 0.0) for x in pair],
        add=add,
        end=end,
        transposed=True,
    )
    return launch(kernel, call)


def bias_gradient(call: KernelCall) -> Array:
    """Computes the gradient of the bias, summed in the kernel over the axes along which it is broadcast."""
    plan, bias = call.plan, call.inputs.head.inputs.bias
    assert bias is not None
    *heads, rows, columns = bias.shape
    names = " ".join("T" * (rows != 1) + "S" * (columns != 1))

    def add(tile: LoadedTile, results: Refs, sums: Refs) -> None:
        *_, d_params = tile.gradients()
        sums[0][...] += d_params.bias

    def end(head: Head, results: Refs, sums: Refs) -> None:
        total, [d_bias] = sums[0][...], results
        if total.shape[1] == 1 != total.shape[0]:
            total = jnp.transpose(jnp.broadcast_to(total, (total.shape[0], LANES)))[:1]
        d_bias[...] = jnp.broadcast_to(total, d_bias.shape).astype(d_bias.dtype)

    result = jax.ShapeDtypeStruct((*heads, *([n for n in (rows, columns) if n != 1] or [1])), bias.dtype)
    shape = plan.tiling.height if rows != 1 else 1, plan.tiling.width if columns != 1 else 1
    kernel = Kernel(name="flax_mha_dbias", results=[(names or "L", result)], sums=[(shape, 0.0)], add=add, end=end)
    return launch(kernel, call)[0].reshape(bias.shape)
