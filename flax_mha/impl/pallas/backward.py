"""The backward kernels: gradients of queries, of keys and values, and of a bias.

Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2, in one kernel for each direction in which gradients are summed, so
that every sum stays in fast memory until it is complete. Keys and values have queries along columns: then none of the
three matrix products needs a transposed tile, and what belongs to queries is read as a row.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha.impl.pallas.held import Held, Rules
from flax_mha.impl.pallas.launch import Kernel, Machine, Result, Visit, launch
from flax_mha.impl.pallas.operands import LANES, Inputs, lanes
from flax_mha.impl.pallas.steps import BY_COLUMN, BY_ROW, FIRST, LAST, Groups, Occupied, listed


def of_queries(rules: Rules, inputs: Inputs, occupied: Occupied, machine: Machine) -> tuple[Array, list[Array | None]]:
    """The gradients of queries, and of the values of the outer part of `score_mod`, of every head: [..., entries]."""
    sizes, (height, features) = inputs.query.shape[:-2], (machine.tiling.height, inputs.query.shape[-1])
    entries = [_padded(x.shape[len(sizes) :]) for x in inputs.values]
    kernel = Kernel(
        name="flax_mha_dq",
        body=functools.partial(_dq, rules),
        results=[
            Result("T H", inputs.query.shape[-2:], rules.dtype),
            *(Result("L", (n,), jnp.float32) for n, learned in zip(entries, rules.learned, strict=True) if learned),
        ],
        scratch=[
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, LANES), jnp.float32),
            pltpu.VMEM((height, features), jnp.float32),
            *rules.room_to_turn(height, inputs.query, inputs.d_output),
        ],
        upright=rules.upright,
    )
    d_query, *learned = launch(kernel, inputs, sizes, sizes, listed(occupied, sizes, sizes, BY_ROW), machine)
    following = iter(learned)
    parts = [x.shape[len(sizes) :] for x in inputs.values]
    d_values = [
        next(following)[..., : part[0] if part else 1].reshape(*sizes, *part) if is_learned else None
        for part, is_learned in zip(parts, rules.learned, strict=True)
    ]
    return d_query, d_values


def _padded(part: tuple[int, ...]) -> int:
    return -(-(part[0] if part else 1) // LANES) * LANES


def _dq(rules: Rules, visit: Visit, d_query: Any, *references: Any) -> None:
    number = sum(rules.learned)
    d_values, (lse, delta, sums, *turned) = list(references[:number]), references[number:]

    @visit.when(FIRST)
    def _begin() -> None:
        inputs = visit.load()
        lse[...] = jnp.broadcast_to(inputs.lse, lse.shape)
        delta[...] = jnp.broadcast_to(inputs.delta, delta.shape)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)
        for own, x in zip(turned, (inputs.query, inputs.d_output), strict=False):
            own[...] = rules.turned(x)

    @pl.when(visit.begins)
    def _begin_head() -> None:
        for x in d_values:
            x[...] = jnp.zeros(x.shape, jnp.float32)

    def tile(masked: bool) -> None:
        held = rules.held(visit, masked, turned=turned)
        width = held.tile.shape[1]
        s, pull = held.scores.tile_vjp(held.products(), held.params, held.tile, held.mask)
        weights = held.weights(s, lanes(lse[...], width))
        d_weights = held.dropped(held.over_features(held.inputs.d_output, held.inputs.value))
        d_products, _, added = pull(weights * (d_weights - lanes(delta[...], width)))
        sums[...] += held.over_columns(d_products, held.inputs.key)
        _add_values(held, rules, [x for x in added if x is not None], d_values)

    visit.compute(tile, rules.has_mask)

    @visit.when(LAST)
    def _end() -> None:
        d_query[0] = rules.turned(sums[...] * rules.scores.scale).astype(d_query.dtype)


def _add_values(held: Held, rules: Rules, added: list[Array], d_values: list[Any]) -> None:
    """Adds the gradients of a tile to those of numbers, and to the entries of tables."""
    if rules.part is None:
        return
    places = [None] * len(rules.part.numbers) + list(held.scores.entries)
    learned = [x for x, is_learned in zip(places, rules.learned, strict=True) if is_learned]
    for entry, d_tile, reference in zip(learned, added, d_values, strict=True):
        if entry is None:
            reference[0] += jnp.broadcast_to(jnp.sum(d_tile, keepdims=True), reference.shape[1:])
        else:
            _add_entries(jnp.broadcast_to(entry, d_tile.shape), d_tile, reference)


def _add_entries(entry: Array, d_tile: Array, reference: Any) -> None:
    """Sums the gradients of each entry. There is no scatter: one pass for every entry between least and greatest."""
    numbers = entry.astype(jnp.float32)  # small integers; a TPU reduces floats
    least, greatest = jnp.min(numbers).astype(jnp.int32), jnp.max(numbers).astype(jnp.int32)

    def one(n: Any, _: None) -> None:
        mine = jnp.sum(jnp.where(entry == n, d_tile, jnp.zeros_like(d_tile)), keepdims=True)
        place = lax.broadcasted_iota(jnp.int32, reference.shape[1:], 1)
        reference[0] += jnp.where(place == n, jnp.broadcast_to(mine, place.shape), jnp.zeros(place.shape, mine.dtype))

    lax.fori_loop(least, greatest + 1, one, None)


def of_keys(rules: Rules, inputs: Inputs, occupied: Occupied, machine: Machine) -> tuple[Array, Array]:
    """The gradients of keys and values, summed over the query heads that share them."""
    sizes, results = inputs.query.shape[:-2], inputs.key.shape[:-2]
    width = machine.tiling.width
    kernel = Kernel(
        name="flax_mha_dkv",
        body=functools.partial(_dkv, rules),
        results=[Result("S H", x.shape[-2:], rules.dtype) for x in (inputs.key, inputs.value)],
        scratch=[
            *(pltpu.VMEM((width, x.shape[-1]), jnp.float32) for x in (inputs.key, inputs.value)),
            *rules.room_to_turn(width, inputs.key, inputs.value),
        ],
        upright=rules.upright,
        across=True,
    )
    d_key, d_value = launch(kernel, inputs, sizes, results, listed(occupied, sizes, results, BY_COLUMN), machine)
    return d_key, d_value


def _dkv(rules: Rules, visit: Visit, d_key: Any, d_value: Any, key_sums: Any, value_sums: Any, *turned: Any) -> None:
    @visit.when(FIRST)
    def _begin() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, jnp.float32)
        value_sums[...] = jnp.zeros(value_sums.shape, jnp.float32)
        if turned:
            inputs = visit.load()
            for own, x in zip(turned, (inputs.key, inputs.value), strict=True):
                own[...] = rules.turned(x)

    def tile(masked: bool) -> None:
        held = rules.held(visit, masked, across=True, turned=turned)
        inputs = held.inputs
        s, pull = held.scores.tile_vjp(held.products(), held.params, held.tile, held.mask)
        weights = held.weights(s, inputs.lse)
        kept = held.scores.dropout_multiplier(held.tile)
        d_weights = held.over_features(inputs.value, inputs.d_output)
        if kept is not None:
            d_weights = d_weights * kept
        value_sums[...] += held.over_columns(weights if kept is None else weights * kept, inputs.d_output)
        d_products, *_ = pull(weights * (d_weights - inputs.delta))
        key_sums[...] += held.over_columns(d_products, inputs.query)

    visit.compute(tile, rules.has_mask)

    @visit.when(LAST)
    def _end() -> None:
        d_key[0] = rules.turned(key_sums[...] * rules.scores.scale).astype(d_key.dtype)
        d_value[0] = rules.turned(value_sums[...]).astype(d_value.dtype)


def of_bias(rules: Rules, inputs: Inputs, occupied: Occupied, machine: Machine) -> Array:
    """The gradient of the bias, in its own shape: what it is broadcast over is summed up in the kernel."""
    sizes, tiling = inputs.query.shape[:-2], machine.tiling
    results, part = inputs.bias.shape[:-2], inputs.bias.shape[-2:]
    groups = Groups(by_row=part[0] != 1, by_column=part[1] != 1)
    block = tuple(n if mine else 1 for n, mine in zip((tiling.height, tiling.width), groups, strict=True))
    kernel = Kernel(
        name="flax_mha_dbias",
        body=functools.partial(_dbias, rules),
        results=[_result_of_bias(part, inputs.bias.dtype)],
        scratch=[pltpu.VMEM(block, jnp.float32)],
        upright=rules.upright,
    )
    [d_bias] = launch(kernel, inputs, sizes, results, listed(occupied, sizes, results, groups), machine)
    return (d_bias[..., :1] if part == (1, 1) else d_bias).reshape(inputs.bias.shape)


def _result_of_bias(part: tuple[int, ...], dtype: Any) -> Result:
    """Stored as it is read: one row for what is broadcast along an axis."""
    if 1 not in part:
        return Result("T S", part, dtype)
    if part == (1, 1):
        return Result("L", (LANES,), dtype)
    return Result("S" if part[0] == 1 else "T", (max(part),), dtype)


def _dbias(rules: Rules, visit: Visit, d_bias: Any, sums: Any) -> None:
    @visit.when(FIRST)
    def _begin() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def tile(masked: bool) -> None:
        held = rules.held(visit, masked)
        inputs = held.inputs
        s, pull = held.scores.tile_vjp(held.products(), held.params, held.tile, held.mask)
        weights = held.weights(s, inputs.lse)
        d_weights = held.dropped(held.over_features(inputs.d_output, inputs.value))
        _, d_tile, _ = pull(weights * (d_weights - inputs.delta))
        sums[...] += d_tile

    visit.compute(tile, rules.has_mask)

    @visit.when(LAST)
    def _end() -> None:
        total = sums[...]
        if total.shape[1] == 1 != total.shape[0]:
            total = jnp.transpose(jnp.broadcast_to(total, (total.shape[0], LANES)))[:1]
        d_bias[0] = jnp.broadcast_to(total, d_bias.shape[1:]).astype(d_bias.dtype)
