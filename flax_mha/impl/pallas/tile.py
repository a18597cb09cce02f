"""One tile inside a kernel: its positions, its arrays, and its scores by the rules of `shared/scores.py`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha.core.tile import Grid, Tile
from flax_mha.impl.pallas.launch import Inputs, Plan, Step
from flax_mha.impl.pallas.split_function import TileFunction
from flax_mha.impl.shared import nonfinite
from flax_mha.impl.shared.scores import ScoreInputs, ScoreRule
from flax_mha.impl.shared.threefry import random_words
from flax_mha.masks import Mask, Occupancy


class KernelTile(Tile):
    """A tile whose arrays are blocks that hold its part alone, so that nothing is left to cut."""

    @property
    def score_shape(self) -> tuple[int, int]:
        """The shape of its scores."""
        return self.shape

    def cut(self, x: Any) -> Array:
        return x

    def cut_queries(self, x: Any) -> Array:
        return x

    def cut_keys(self, x: Any) -> Array:
        return x


class TransposedTile(KernelTile):
    """The same with queries along columns."""

    @property
    def score_shape(self) -> tuple[int, int]:
        return self.shape[::-1]

    @property
    def rows(self) -> Int[Array, "1 t"]:
        return self.row + lax.broadcasted_iota(jnp.int32, (1, self.shape[0]), 1)

    @property
    def columns(self) -> Int[Array, "s 1"]:
        return self.runs[0] + lax.broadcasted_iota(jnp.int32, (self.shape[1], 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TileMask(Mask):
    """The part of a `mask_mod` that is computed for whole tiles, and the values of its outer part."""

    numbers: tuple[Array, ...] = dataclasses.field(metadata={"axes": "B N"})
    tables: tuple[Array, ...] = dataclasses.field(metadata={"axes": "B N L"})
    function: TileFunction = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        positions = tile.query_positions, tile.key_positions
        values, _ = self.function.look_up(positions, [*self.numbers, *self.tables])
        return self.function(positions, values, tile.score_shape)  # type: ignore[attr-defined]

    def occupancy(self, grid: Grid) -> Occupancy:
        raise NotImplementedError("occupancy is that of the mask that this was made of.")


@dataclasses.dataclass(frozen=True)
class TileRule(ScoreRule):
    """The score rule of a kernel's tile.

    Attributes:
      function: The part of `score_mod` that is computed for whole tiles.
      values: What that takes, except what gets gradients; this stands in `ScoreInputs.captured`, and None elsewhere.
      differentiated: Whether derivatives are taken.
    """

    function: TileFunction | None = None
    values: Sequence[Array] = ()
    differentiated: bool = True

    def guarded(self, products: Float[Array, "..."], visible: Bool[Array, "..."]) -> Float[Array, "..."]:
        return super().guarded(products, visible) if self.differentiated else products

    def modified(self, scores: Float[Array, "..."], inputs: ScoreInputs, tile: Tile) -> Float[Array, "..."]:
        values = [x if y is None else y for x, y in zip(self.values, inputs.captured, strict=True)]
        arguments = scores, tile.query_positions, tile.key_positions
        return self.function(arguments, values, tile.score_shape)  # type: ignore[misc, attr-defined]

    def tile_vjp(
        self, products: Float[Array, "..."], inputs: ScoreInputs, tile: Tile, mask: Mask | None
    ) -> tuple[Float[Array, "..."], Callable[[Array], tuple[Array, ScoreInputs]]]:
        """The scores of a tile, and what turns their gradients into those of products and `inputs`.

        The gradient of a captured value is a sum over all scores. It is returned score by score, 0 where masked, so
        that what a function's derivative is at masked places reaches nothing.
        """
        scores, pull = jax.vjp(lambda x, p: self.tile(x, p, tile, mask), products, inputs)
        if self.score_mod is None:
            return scores, pull  # of masked scores it is 0 already

        def pull_visible(d_scores: Array) -> tuple[Array, ScoreInputs]:
            visible = scores != -jnp.inf
            d_products, d_inputs = pull(jnp.where(visible, d_scores, jnp.zeros_like(d_scores)))
            d_products, captured = jax.tree.map(
                lambda x: jnp.where(visible, x, jnp.zeros_like(x)), (d_products, d_inputs.captured)
            )
            return d_products, d_inputs._replace(captured=captured)

        return scores, pull_visible

    def dropout_multiplier(self, tile: Tile, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."] | None:
        """As in all implementations: of the seed and positions alone."""
        if self.dropout_seed is None:
            return None
        shape = tile.score_shape  # type: ignore[attr-defined]
        position, key = (jnp.broadcast_to(x, shape) for x in (tile.rows + tile.offsets[0], tile.key_positions))
        even, odd = random_words(self.dropout_seed, (position >> 1, key))  # type: ignore[arg-type]
        words = jnp.where((position & 1) == 0, even, odd)
        most = min(round(self.dropout_rate * 2**32), 2**32 - 1) - 2**31
        dropped = (words ^ np.int32(-(2**31))) < np.int32(most)  # compares them without sign
        return jnp.where(dropped, jnp.zeros((), dtype), jnp.asarray(1 / (1 - self.dropout_rate), dtype))


class LoadedTile(NamedTuple):
    """The arrays of one step.

    Arrays of the rows of the tile have features last, arrays of its columns are as they are stored.

    Attributes:
      inputs: What the step is given.
      tile: Its positions.
      rule: How products become scores.
      params: What gets gradients besides products.
      mask: What is visible; None if everything is.
      entries: For each value of `score_mod` None, or the entry of its table that was looked up.
      features_last: How arrays of columns are stored.
    """

    inputs: Inputs
    tile: KernelTile
    rule: TileRule
    params: ScoreInputs
    mask: Mask | None
    entries: list[Array | None]
    features_last: bool

    def over_features(self, rows: Float[Array, "m F"], columns: Array) -> Float[Array, "m n"]:
        """The products, summed over features, of what belongs to rows and what belongs to columns."""
        return self.rule.dot(rows, columns, transpose_b=self.features_last)

    def over_columns(self, tile: Float[Array, "m n"], columns: Array) -> Float[Array, "m F"]:
        """For each row the sum, weighted by the tile, of what belongs to columns."""
        return self.rule.dot(tile, columns, transpose_b=not self.features_last)

    def products(self) -> Float[Array, "..."]:
        """Scaled products of queries and keys."""
        query, key = self.inputs.query, self.inputs.key
        pair = (key, query) if isinstance(self.tile, TransposedTile) else (query, key)
        products = self.over_features(*pair)
        return products if self.rule.scale == 1.0 else products * self.rule.scale

    def gradients(
        self, lse: Float[Array, "..."], delta: Float[Array, "..."]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."], ScoreInputs]:
        """The weights after dropout, and the gradients of the products before scaling and of `params`."""
        s, pull = self.rule.tile_vjp(self.products(), self.params, self.tile, self.mask)
        may_be_nan = self.params.bias is not None or self.rule.score_mod is not None
        weights, kept = nonfinite.backward_weights(s, lse, may_be_nan), self.rule.dropout_multiplier(self.tile)
        pair = self.inputs.d_output, self.inputs.value
        d_weights = self.over_features(*(pair[::-1] if isinstance(self.tile, TransposedTile) else pair))
        if kept is not None:
            d_weights = d_weights * kept
        d_products, d_params = pull(weights * (d_weights - delta))
        return weights if kept is None else weights * kept, d_products, d_params


def load_tile(
    plan: Plan,
    step: Step,
    masked: bool,
    transposed: bool = False,
    rows: Sequence[Any] = (),
    learned: Sequence[bool] = (),
) -> LoadedTile:
    """Reads the arrays of one step.

    Args:
      plan: What is static.
      step: The step.
      masked: Whether the tile must be masked; else it is visible throughout.
      transposed: Whether queries lie along columns.
      rows: References to query and d_output, or in a transposed tile key and value, if they were loaded before.
      learned: Which values of `score_mod` get gradients.
    """
    inputs, tiling = step.load(), plan.tiling
    names = ("key", "value") if transposed else ("query", "d_output")
    blocks = [getattr(inputs, name) for name in names]
    loaded = [x[...] for x in rows] or [None if x is None else plan.to_rows(x) for x in blocks]
    inputs = inputs._replace(**dict(zip(names, loaded, strict=False)))
    kind: Any = TransposedTile if transposed else KernelTile
    tile = kind(step.row, step.column, (tiling.height, tiling.width), inputs.offsets.values, tiling.inside)
    bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
    if bias is not None and bias.ndim == 0:
        bias = lax.broadcast(bias, (1, 1))
    captured: list[Any] = []
    entries: list[Array | None] = []
    values = [*inputs.numbers, *inputs.tables]
    if plan.rule.function is not None:
        values, entries = plan.rule.function.look_up((tile.query_positions, tile.key_positions), values)
        pairs = zip(values, learned or [False] * len(values), strict=True)
        captured = [jnp.broadcast_to(x, tile.score_shape) if is_learned else None for x, is_learned in pairs]
    rule = dataclasses.replace(plan.rule, dropout_seed=inputs.seed, values=values)
    params = ScoreInputs(bias, None, captured)
    return LoadedTile(inputs, tile, rule, params, inputs.mask if masked else None, entries, plan.features_last)
