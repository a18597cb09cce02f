"""Attention of one head, tile by tile: memory O(T + S), forward and backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao, FlashAttention-2,
arXiv:2307.08691, algorithm 2, with the rows outside: the scores of a tile are computed again from what was saved,
which is query, key, value, output and log-sum-exp.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._impl import dense, online_softmax
from flax_mha._impl.scores import Learned, Scores, poison, usable
from flax_mha._impl.tiling import Layout, Part, Plan, to_the_grid
from flax_mha._tiles import Scalar, Tile, pad
from flax_mha.masks import Mask

T = TypeVar("T")


class Step(NamedTuple):
    """What is computed at once: a tile, whose first row is this one of its row of tiles."""

    first: int
    tile: Tile

    def rows(self, x: Array, axis: int = 0) -> Array:
        """The tile's part of what belongs to its row of tiles."""
        height = self.tile.shape[0]
        return x if x.shape[axis] == height else lax.slice_in_dim(x, self.first, self.first + height, axis=axis)

    def put_rows(self, x: Array, part: Array) -> Array:
        """What belongs to the row of tiles, with the tile's part replaced."""
        return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, self.first, 0)

    def keys(self, x: Float[Array, "S F"]) -> Float[Array, "s F"]:
        """The tile's part of keys or values."""
        return self.tile.cut_columns(x, 0)

    def add_keys(self, x: Float[Array, "F S"], part: Float[Array, "F s"]) -> Float[Array, "F S"]:
        """Sums of keys or values, on their side, with the tile's part added."""
        return Tile(0, self.tile.column, (part.shape[0], part.shape[1])).add(x, part)


def attend(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    learned: Learned,
    scores: Scores,
    plan: Plan,
    layout: Layout,
    rows_together: bool = False,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Output and log-sum-exp of one head.

    Args:
      query: Scaled.
      key: Keys; NaN where they are unusable (`Scores.hides`).
      value: Values.
      learned: What gets gradients besides.
      scores: What the products become.
      plan: Which tiles are visited.
      layout: How they are cut.
      rows_together: Whether to compute all rows of tiles at once, if there is no gradient; for a plan of single tiles.
    """
    shape = layout.shape
    query = pad(query, (shape[0], query.shape[1]))
    key, value = pad(key, (shape[1], key.shape[1])), pad(value, (shape[1], value.shape[1]))
    learned = learned._replace(bias=None if learned.bias is None else pad(learned.bias, shape))
    output, lse = _attend(layout, rows_together, query, key, value, learned, scores, plan)
    return output[: layout.lengths[0]], lse[: layout.lengths[0]]


def _over_keys(
    plan: Plan,
    layout: Layout,
    mask: Mask | None,
    i: Int[Array, ""],
    step: Callable[[Step, Mask | None, T], T],
    state: T,
) -> T:
    """Folds `step` over the tiles of row i that hold something; of tiles to mask, over the rows that hold something.

    `plan` is the row's own.
    """

    def visit(part: Part, mask: Mask | None, n: Scalar, state: T) -> T:
        columns = tuple(_at(plan.column, n, run) for run in range(part.runs))
        tile = Tile(i * layout.height + part.first, columns, (part.end - part.first, part.runs * layout.width))
        return step(Step(part.first, tile), mask, state)

    def visit_all(parts: tuple[Part, ...], mask: Mask | None, first: Any, end: Any, state: T) -> T:
        visits = [functools.partial(visit, part, mask) for part in parts]
        one = visits[0] if len(parts) == 1 else lambda n, state: lax.switch(_at(plan.part, n), visits, n, state)
        return one(0, state) if plan.single else lax.fori_loop(first, end, one, state)

    if plan.full_parts:
        state = visit_all(plan.full_parts, None, 0, plan.full, state)
    if plan.partial_parts:
        state = visit_all(plan.partial_parts, mask, plan.full, plan.some, state)
    return state


def _at(x: Any, *place: Scalar) -> Int[Array, ""]:
    first = [jnp.asarray(i, jnp.int32) for i in place]
    return lax.dynamic_slice(x, first, (1,) * x.ndim, allow_negative_indices=False).reshape(())


def _by_row(layout: Layout, plan: Plan, *arrays: Array) -> tuple:
    """What belongs to each row of tiles: its number, its plan, its part of the arrays [T, F]."""
    shape = (layout.rows, layout.height)
    return jnp.arange(layout.rows, dtype=jnp.int32), plan, *(x.reshape(*shape, *x.shape[1:]) for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(layout: Layout, rows_together: bool, *operands: Any) -> tuple[Array, Array]:
    if rows_together:
        return _output_of_single_tiles(layout, *operands)
    # In the context in which jax traces the forward rule, so that it finds this trace and makes no other.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return _output(layout, *operands)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _output(
    layout: Layout, query: Array, key: Array, value: Array, learned: Learned, scores: Scores, plan: Plan
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    mask = to_the_grid(scores.mask, layout)
    # The score of an unusable key is NaN, but a score_mod may make a number of it.
    unusable = None if scores.program is None else poison(key)

    def row(own: tuple) -> tuple[Array, Array]:
        i, plan, q = own

        def step(step: Step, mask: Mask | None, state: online_softmax.State) -> online_softmax.State:
            tile = step.tile
            keys, keep = step.keys(key), scores.keep(tile)
            products = scores.dot(step.rows(q), keys, transpose_b=True)
            s = scores.tile(products, learned.cut(tile), tile, mask, None if unusable is None else tile.cut(unusable))
            before = online_softmax.State(*map(step.rows, state))
            after = online_softmax.update(before, s, lambda p: scores.dot(_times(p, keep), step.keys(value)))
            return online_softmax.State(*map(step.put_rows, state, after))

        nothing = online_softmax.start(layout.height, value.shape[1], learned.sink, value.dtype)
        return online_softmax.finish(_over_keys(plan, layout, mask, i, step, nothing))

    output, lse = lax.map(row, _by_row(layout, plan, query))
    return output.reshape(-1, value.shape[1]), lse.reshape(-1)


def _output_of_single_tiles(
    layout: Layout, query: Array, key: Array, value: Array, learned: Learned, scores: Scores, plan: Plan
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    mask = to_the_grid(scores.mask, layout) if plan.partial_parts else None

    def row(i: Array, plan: Plan, q: Array) -> tuple[Array, Array]:
        tile = Tile(i * layout.height, _at(plan.column, 0, 0), (layout.height, layout.width))
        keys, values = tile.cut_columns(key, 0), tile.cut_columns(value, 0)
        return dense.answer(q, keys, values, learned.cut(tile), scores, tile, mask)

    output, lse = jax.vmap(row)(*_by_row(layout, plan, query))
    return output.reshape(-1, value.shape[1]), lse.reshape(-1)


def _attend_forward(layout: Layout, rows_together: bool, *operands: Any) -> tuple[tuple[Array, Array], tuple]:
    output, lse = _output(layout, *operands)
    return (output, lse), (*operands, output, lse)


def _attend_backward(layout: Layout, rows_together: bool, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    query, key, value, learned, scores, plan, output, lse = saved
    # A row that saw an unusable key answered NaN, and sends nothing back.
    key = usable(key)
    mask = to_the_grid(scores.mask, layout)
    row_data = _row_data(query, output, lse, cotangents)

    def row(sums: tuple, own: tuple) -> tuple[tuple, Array]:
        i, plan, q, d_output, lse_i, delta = own
        q_on_side, d_output_on_side = q.T, d_output.T

        def step(step: Step, mask: Mask | None, state: tuple) -> tuple:
            d_query, d_key, d_value, d_learned = state
            tile, keys, keep = step.tile, step.keys(key), scores.keep(step.tile)
            products = scores.dot(step.rows(q), keys, transpose_b=True)
            s, pull = jax.vjp(lambda x, ours: scores.tile(x, ours, tile, mask), products, learned.cut(tile))
            weights = jnp.exp(s - step.rows(lse_i))
            d_weights = _times(scores.dot(step.rows(d_output), step.keys(value), transpose_b=True), keep)
            d_products, d_ours = pull(weights * (d_weights - step.rows(delta)))
            d_query = step.put_rows(d_query, step.rows(d_query) + scores.dot(d_products, keys))
            d_key = step.add_keys(d_key, scores.dot(step.rows(q_on_side, 1), d_products))
            d_value = step.add_keys(d_value, scores.dot(step.rows(d_output_on_side, 1), _times(weights, keep)))
            return d_query, d_key, d_value, d_learned.add(tile, d_ours)

        d_query, *new_sums = _over_keys(plan, layout, mask, i, step, (jnp.zeros_like(q), *sums))
        return tuple(new_sums), d_query

    # A CPU multiplies matrices up to three times faster if the result is wide, [F, s], not tall.
    sums = (jnp.zeros_like(key.T), jnp.zeros_like(value.T), learned.zeros())
    (d_key, d_value, d_learned), d_query = lax.scan(row, sums, _by_row(layout, plan, *row_data))
    if learned.sink is not None:
        _, _, lse_rows, delta_rows = row_data
        d_learned = d_learned._replace(sink=-jnp.sum(jnp.exp(learned.sink - lse_rows) * delta_rows))
    d_learned = jax.tree.map(lambda d, x: d.astype(x.dtype), d_learned, learned)
    return d_query.reshape(query.shape), d_key.T, d_value.T, d_learned, None, None


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
