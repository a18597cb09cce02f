"""Attention of one head, tile by tile: memory O(T + S), forward and backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao, FlashAttention-2,
arXiv:2307.08691, algorithm 2, with the rows outside: the scores of a tile are computed again from what was saved,
which is query, key, value, output and log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._impl import online_softmax
from flax_mha._impl.scores import Learned, Scores
from flax_mha._impl.tiling import Layout, Plan, to_the_grid
from flax_mha._tiles import Tile, pad
from flax_mha.masks import Mask

T = TypeVar("T")


class Step(NamedTuple):
    """What is computed at once: some rows, within their row of tiles, of the tile in column `j`."""

    j: Int[Array, ""]
    rows: slice
    tile: Tile


def attend(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    learned: Learned,
    scores: Scores,
    plan: Plan,
    layout: Layout,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Output and log-sum-exp of one head."""
    shape = layout.shape
    query = pad(query, (shape[0], query.shape[1]))
    key, value = pad(key, (shape[1], key.shape[1])), pad(value, (shape[1], value.shape[1]))
    learned = learned._replace(bias=None if learned.bias is None else pad(learned.bias, shape))
    poison = None if scores.poison is None else pad(scores.poison[None, :], shape)[0]
    output, lse = _attend(layout, query, key, value, learned, dataclasses.replace(scores, poison=poison), plan)
    return output[: layout.lengths[0]], lse[: layout.lengths[0]]


def _over_keys(
    plan: Plan,
    layout: Layout,
    mask: Mask | None,
    i: Int[Array, ""],
    step: Callable[[Step, Mask | None, T], T],
    state: T,
) -> T:
    """Folds `step` over the tiles of row i that hold something; of tiles to mask, over the rows that hold something."""
    (height, width), every_row = layout.tile_shape, slice(0, layout.tile_shape[0])

    def visit(rows: slice, mask: Mask | None, n: Int[Array, ""], state: T) -> T:
        j = plan.order[i, n]
        tile = Tile(i * height + rows.start, j * width, (rows.stop - rows.start, width))
        return step(Step(j, rows, tile), mask, state)

    if plan.any_full:
        state = lax.fori_loop(0, plan.full[i], functools.partial(visit, every_row, None), state)
    if plan.any_partial:
        parts = [functools.partial(visit, slice(*rows), mask) for rows in plan.parts]
        one = parts[0] if len(parts) == 1 else lambda n, state: lax.switch(plan.part[i, n], parts, n, state)
        state = lax.fori_loop(plan.full[i], plan.some[i], one, state)
    return state


def _tiled(x: Float[Array, "L F"], count: int) -> Float[Array, "count side F"]:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    layout: Layout, query: Array, key: Array, value: Array, learned: Learned, scores: Scores, plan: Plan
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    rows, columns = layout.counts
    mask = to_the_grid(scores.mask, layout)
    queries, keys, values = _tiled(query, rows), _tiled(key, columns), _tiled(value, columns)

    def row(i: Int[Array, ""]) -> tuple[Array, Array]:
        def step(step: Step, mask: Mask | None, state: online_softmax.State) -> online_softmax.State:
            j, rows, tile = step
            products = scores.dot(queries[i][rows], keys[j], transpose_b=True)
            s, keep = scores.tile(products, learned.cut(tile), tile, mask), scores.keep(tile)
            before = jax.tree.map(lambda x: x[rows], state)
            after = online_softmax.update(before, s, lambda p: scores.dot(_times(p, keep), values[j]))
            return jax.tree.map(lambda x, part: x.at[rows].set(part), state, after)

        nothing = online_softmax.start(layout.tile_shape[0], value.shape[1], learned.sink, value.dtype)
        return online_softmax.finish(_over_keys(plan, layout, mask, i, step, nothing))

    output, lse = lax.map(row, jnp.arange(rows, dtype=jnp.int32))
    return output.reshape(-1, value.shape[1]), lse.reshape(-1)


def _attend_forward(layout: Layout, *operands: Array | Learned | Scores | Plan) -> tuple[tuple[Array, Array], tuple]:
    output, lse = _attend(layout, *operands)
    return (output, lse), (*operands, output, lse)


def _attend_backward(layout: Layout, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    query, key, value, learned, scores, plan, output, lse = saved
    # The scores again, this time without the poison: a row that answered NaN sends nothing back.
    scores = dataclasses.replace(scores, poison=None)
    rows, columns = layout.counts
    mask = to_the_grid(scores.mask, layout)
    keys, values = _tiled(key, columns), _tiled(value, columns)
    row_data = _row_data(query, output, lse, cotangents)

    def row(sums: tuple, i: Int[Array, ""]) -> tuple[tuple, Array]:
        q, d_output, lse_i, delta = (_tiled(x, rows)[i] for x in row_data)
        q_on_side, d_output_on_side = q.T, d_output.T

        def step(step: Step, mask: Mask | None, state: tuple) -> tuple:
            d_query, d_key, d_value, d_learned = state
            j, rows, tile = step
            keep, d_out = scores.keep(tile), d_output[rows]
            products = scores.dot(q[rows], keys[j], transpose_b=True)
            s, pull = jax.vjp(lambda x, ours: scores.tile(x, ours, tile, mask), products, learned.cut(tile))
            weights = jnp.exp(s - lse_i[rows])
            d_weights = _times(scores.dot(d_out, values[j], transpose_b=True), keep)
            d_products, d_ours = pull(weights * (d_weights - delta[rows]))
            d_query = d_query.at[rows].add(scores.dot(d_products, keys[j]))
            d_key = _add_at(d_key, j, scores.dot(q_on_side[:, rows], d_products))
            d_value = _add_at(d_value, j, scores.dot(d_output_on_side[:, rows], _times(weights, keep)))
            return d_query, d_key, d_value, d_learned.add(tile, d_ours)

        d_query, *new_sums = _over_keys(plan, layout, mask, i, step, (jnp.zeros_like(q), *sums))
        return tuple(new_sums), d_query

    sums = (jnp.zeros_like(_on_side(keys)), jnp.zeros_like(_on_side(values)), learned.zeros())
    (d_key, d_value, d_learned), d_query = lax.scan(row, sums, jnp.arange(rows, dtype=jnp.int32))
    if learned.sink is not None:
        _, _, lse_rows, delta_rows = row_data
        d_learned = d_learned._replace(sink=-jnp.sum(jnp.exp(learned.sink - lse_rows) * delta_rows))
    d_learned = jax.tree.map(lambda d, x: d.astype(x.dtype), d_learned, learned)
    d_key, d_value = (_on_side(d).reshape(-1, d.shape[1]) for d in (d_key, d_value))
    return d_query.reshape(query.shape), d_key, d_value, d_learned, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _row_data(
    query: Array, output: Array, lse: Array, cotangents: tuple[Array, Array]
) -> tuple[Float[Array, "T H"], Float[Array, "T Hv"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """What the backward pass needs of every row; FlashAttention-2, algorithm 2, line 4.

    The log-sum-exp's own cotangent d enters through `weights * d`, so it is subtracted from delta.
    """
    d_output, d_lse = cotangents
    answered = jnp.isfinite(lse)
    d_output = jnp.where(answered[:, None], d_output, jnp.zeros_like(d_output))
    delta = jnp.sum(d_output * jnp.where(answered[:, None], output, jnp.zeros_like(output)), axis=1)
    delta = jnp.where(answered, delta - d_lse, jnp.zeros_like(delta))
    # exp(score - inf) = 0, also where the score is -inf
    lse = jnp.where(answered, lse, jnp.full_like(lse, jnp.inf))
    return query, d_output, lse[:, None], delta[:, None]


def _on_side(x: Float[Array, "count side F"]) -> Float[Array, "count F side"]:
    """A CPU multiplies matrices up to three times faster if the result is wide, [F, side], not tall."""
    return jnp.swapaxes(x, 1, 2)


def _times(weights: Float[Array, "t s"], keep: Float[Array, "t s"] | None) -> Float[Array, "t s"]:
    return weights if keep is None else weights * keep.astype(weights.dtype)


def _add_at(x: Float[Array, "n F s"], j: Int[Array, ""], part: Float[Array, "F s"]) -> Float[Array, "n F s"]:
    return lax.dynamic_update_index_in_dim(x, x[j] + part, j, 0)
