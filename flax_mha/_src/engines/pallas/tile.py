"""Tiles, masks and score rules inside a kernel, where arrays are blocks and functions are `TileFunction`s."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.core.tile import Tile
from flax_mha._src.engines.pallas.split_function import TileFunction
from flax_mha._src.math.scores import ScoreInputs, ScoreRule
from flax_mha.masks import Mask


class KernelTile(Tile):
    """A tile in a kernel, which gets only the tile's part of every array, so that its `cut` methods change nothing."""

    def cut(self, x: Any) -> Array:
        return x

    def cut_queries(self, x: Any) -> Array:
        return x

    def cut_keys(self, x: Any) -> Array:
        return x


class TransposedTile(KernelTile):
    """A tile with queries along columns; its `shape` is [s, t]."""

    @property
    def rows(self) -> Int[Array, "1 t"]:
        return self.row + lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)

    @property
    def columns(self) -> Int[Array, "s 1"]:
        return self.column + lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TileMask(Mask):
    """A mask by a `mask_mod` that `split_function.py` has split: a function of tiles, and its outer values."""

    values: tuple[Array, ...] = dataclasses.field(metadata={"axes": "B N L"})
    function: TileFunction = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        positions = tile.query_positions, tile.key_positions
        values, _ = self.function.look_up(positions, self.values)
        return self.function(positions, values, tile.shape)


@dataclasses.dataclass(frozen=True)
class TileRule(ScoreRule):
    """The `ScoreRule` inside a kernel, with a `TileFunction` in place of `score_mod`."""

    function: TileFunction | None = None  # the part of `score_mod` for tiles
    values: Sequence[Array] = ()  # its values; those that get gradients are in `ScoreInputs.captured` instead
    differentiated: bool = True  # whether derivatives are taken

    def zero_masked(self, products: Float[Array, "..."], visible: Bool[Array, "..."]) -> Float[Array, "..."]:
        return super().zero_masked(products, visible) if self.differentiated else products

    def apply_score_mod(self, scores: Float[Array, "..."], inputs: ScoreInputs, tile: Tile) -> Float[Array, "..."]:
        values = [x if y is None else y for x, y in zip(self.values, inputs.captured, strict=True)]
        arguments = scores, tile.query_positions, tile.key_positions
        return self.function(arguments, values, tile.shape)  # type: ignore[misc]

    def tile_vjp(
        self, products: Float[Array, "..."], inputs: ScoreInputs, tile: Tile
    ) -> tuple[Float[Array, "..."], Callable[[Array], tuple[Array, ScoreInputs]]]:
        """Computes the scores of a tile, and the function from their gradients to those of products and `inputs`.

        The gradient of a captured value has an entry for each score [t, s], which the caller sums. It is 0 for masked
        scores, even if the derivative of `score_mod` there is NaN.
        """
        scores, pull = jax.vjp(lambda x, p: self.tile(x, p, tile), products, inputs)
        if self.score_mod is None:
            return scores, pull  # gradients of masked scores are 0 already

        def pull_visible(d_scores: Array) -> tuple[Array, ScoreInputs]:
            visible = scores != -jnp.inf
            d_products, d_inputs = pull(jnp.where(visible, d_scores, jnp.zeros_like(d_scores)))
            d_products, captured = jax.tree.map(
                lambda x: jnp.where(visible, x, jnp.zeros_like(x)), (d_products, d_inputs.captured)
            )
            return d_products, d_inputs._replace(captured=captured)

        return scores, pull_visible

    def dropout_multiplier(self, tile: Tile, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."] | None:
        return self.dropout_by_query(tile, dtype)
