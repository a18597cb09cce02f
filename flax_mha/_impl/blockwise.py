"""Attention of one head, tile by tile: memory O(T + S), forward and backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao, FlashAttention-2,
arXiv:2307.08691, algorithm 2, with the rows outside: the scores of a tile are computed again from what was saved,
which is query, key, value, output and log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._impl import online_softmax
from flax_mha._impl.scores import Learned, Scores
from flax_mha._impl.tiling import Layout, Plan, to_the_grid
from flax_mha._tiles import Grid, pad
from flax_mha.masks import Mask

T = TypeVar("T")


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
    shape = Grid(layout.counts, layout.tile_shape).shape
    query = pad(query, (shape[0], query.shape[1]))
    key, value = pad(key, (shape[1], key.shape[1])), pad(value, (shape[1], value.shape[1]))
    learned = learned._replace(bias=None if learned.bias is None else pad(learned.bias, shape))
    poison = None if scores.poison is None else pad(scores.poison[None, :], shape)[0]
    output, lse = _attend(layout, query, key, value, learned, dataclasses.replace(scores, poison=poison), plan)
    return output[: layout.lengths[0]], lse[: layout.lengths[0]]


def _over_keys(
    plan: Plan, mask: Mask | None, i: Int[Array, ""], step: Callable[[Int[Array, ""], Mask | None, T], T], state: T
) -> T:
    """Folds `step(j, mask, state)` over the tiles of row i that hold something."""
    if plan.any_full:
        state = lax.fori_loop(0, plan.full[i], lambda n, s: step(plan.order[i, n], None, s), state)
    if plan.any_partial:
        state = lax.fori_loop(plan.full[i], plan.some[i], lambda n, s: step(plan.order[i, n], mask, s), state)
    return state


def _tiled(x: Float[Array, "L F"], count: int) -> Float[Array, "count side F"]:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    layout: Layout, query: Array, key: Array, value: Array, learned: Learned, scores: Scores, plan: Plan
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    rows, columns = layout.counts
    grid, mask = Grid(layout.counts, layout.tile_shape), to_the_grid(scores.mask, layout)
    queries, keys, values = _tiled(query, rows), _tiled(key, columns), _tiled(value, columns)

    def row(i: Int[Array, ""]) -> tuple[Array, Array]:
        def step(j: Int[Array, ""], mask: Mask | None, state: online_softmax.State) -> online_softmax.State:
            tile = grid.tile(i, j)
            s = scores.tile(queries[i], keys[j], learned.cut(tile), tile, mask)
            keep = scores.keep(tile)
            return online_softmax.update(state, s, lambda p: scores.dot(_times(p, keep), values[j]))

        nothing = online_softmax.start(layout.tile_shape[0], value.shape[1], learned.sink, value.dtype)
        return online_softmax.finish(_over_keys(plan, mask, i, step, nothing))

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
    grid, mask = Grid(layout.counts, layout.tile_shape), to_the_grid(scores.mask, layout)
    keys, values = _tiled(key, columns), _tiled(value, columns)
    row_data = _row_data(query, output, lse, cotangents)

    def row(sums: tuple, i: Int[Array, ""]) -> tuple[tuple, Array]:
        q, d_output, lse_i, delta = (_tiled(x, rows)[i] for x in row_data)

        def step(j: Int[Array, ""], mask: Mask | None, state: tuple) -> tuple:
            d_query, d_key, d_value, d_learned = state
            tile = grid.tile(i, j)
            s, pull = jax.vjp(lambda q, k, ours: scores.tile(q, k, ours, tile, mask), q, keys[j], learned.cut(tile))
            weights, keep = jnp.exp(s - lse_i), scores.keep(tile)
            d_weights = _times(scores.dot(d_output, values[j], transpose_b=True), keep)
            d_q, d_k, d_ours = pull(weights * (d_weights - delta))
            d_v = scores.dot(_times(weights, keep), d_output, transpose_a=True)
            return d_query + d_q, _add_at(d_key, j, d_k), _add_at(d_value, j, d_v), d_learned.add(tile, d_ours)

        d_query, *new_sums = _over_keys(plan, mask, i, step, (jnp.zeros_like(q), *sums))
        return tuple(new_sums), d_query

    sums = (jnp.zeros_like(keys), jnp.zeros_like(values), learned.zeros())
    (d_key, d_value, d_learned), d_query = lax.scan(row, sums, jnp.arange(rows, dtype=jnp.int32))
    if learned.sink is not None:
        _, _, lse_rows, delta_rows = row_data
        d_learned = d_learned._replace(sink=-jnp.sum(jnp.exp(learned.sink - lse_rows) * delta_rows))
    d_learned = jax.tree.map(lambda d, x: d.astype(x.dtype), d_learned, learned)
    return d_query.reshape(query.shape), d_key.reshape(key.shape), d_value.reshape(value.shape), d_learned, None, None


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


def _times(weights: Float[Array, "t s"], keep: Float[Array, "t s"] | None) -> Float[Array, "t s"]:
    return weights if keep is None else weights * keep.astype(weights.dtype)


def _add_at(x: Float[Array, "n s F"], j: Int[Array, ""], part: Float[Array, "s F"]) -> Float[Array, "n s F"]:
    return lax.dynamic_update_index_in_dim(x, x[j] + part, j, 0)
