"""One tile inside a kernel: its positions, and its scores, by the rules of `scores.py` on the blocks that lie there."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha.core.tile import Grid, Tile
from flax_mha.impl.pallas.tile_part import TilePart
from flax_mha.impl.shared.scores import ScoreInputs, ScoreRule
from flax_mha.impl.shared.threefry import random_words
from flax_mha.masks import Mask, Occupancy


class HeldTile(Tile):
    """A tile whose parts of all arrays are given, so that nothing is left to cut."""

    @property
    def rows(self) -> Int[Array, "t 1"]:
        return lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0) + self.row

    @property
    def columns(self) -> Int[Array, "1 s"]:
        return lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1) + self.runs[0]

    @property
    def block(self) -> tuple[int, int]:
        """The shape of its scores."""
        return self.shape

    def cut(self, x: Any) -> Array:
        return x

    def cut_queries(self, x: Any) -> Array:
        return x

    def cut_keys(self, x: Any) -> Array:
        return x


class TileAcross(HeldTile):
    """The same with queries along columns."""

    @property
    def rows(self) -> Int[Array, "1 t"]:
        return lax.broadcasted_iota(jnp.int32, (1, self.shape[0]), 1) + self.row

    @property
    def columns(self) -> Int[Array, "s 1"]:
        return lax.broadcasted_iota(jnp.int32, (self.shape[1], 1), 0) + self.runs[0]

    @property
    def block(self) -> tuple[int, int]:
        return self.shape[::-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TileMask(Mask):
    """The part of a `mask_mod` that is computed for whole tiles, and the values of its outer part."""

    numbers: tuple[Array, ...] = dataclasses.field(metadata={"axes": "B N"})
    tables: tuple[Array, ...] = dataclasses.field(metadata={"axes": "B N L"})
    part: TilePart = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        arguments = (tile.query_positions, tile.key_positions)
        return self.part([*self.numbers, *self.tables], arguments, tile.block)[0]  # type: ignore[attr-defined]

    def occupancy(self, grid: Grid) -> Occupancy:
        raise NotImplementedError("occupancy is that of the mask that this was made of.")


@dataclasses.dataclass(frozen=True)
class TileScores(ScoreRule):
    """The score rule of a kernel's tile; `ScoreInputs.captured` are the values of the outer part of `score_mod`.

    Attributes:
      part: The part of `score_mod` that is computed for whole tiles.
      differentiated: Whether derivatives are taken.
      learned: Which of its values get gradients.
      added: For each value None, or what is added to it, for its gradient.
      entries: Where the entries are put that its lookups find.
    """

    part: TilePart | None = None
    differentiated: bool = True
    learned: tuple[bool, ...] = ()
    added: Sequence[Any] = ()
    entries: list[Array] = dataclasses.field(default_factory=list)

    def guarded(self, products: Float[Array, "..."], visible: Bool[Array, "..."]) -> Float[Array, "..."]:
        return super().guarded(products, visible) if self.differentiated else products

    def modified(self, scores: Float[Array, "..."], params: ScoreInputs, tile: Tile) -> Float[Array, "..."]:
        arguments = (scores, tile.query_positions, tile.key_positions)
        block = tile.block  # type: ignore[attr-defined]
        result, entries = self.part(params.captured, arguments, block, self.added)  # type: ignore[misc]
        self.entries[:] = entries
        return result

    def tile_vjp(  # type: ignore[override]
        self, products: Float[Array, "..."], params: ScoreInputs, tile: Tile, mask: Mask | None
    ) -> tuple[Float[Array, "..."], Callable[[Array], tuple[Array, Array | None, list[Array | None]]]]:
        """The scores of a tile, and what turns their gradients into those of products, bias and values.

        The gradient of a value is a sum over all scores. It is returned score by score, 0 where masked, so that what a
        function's derivative is at masked places reaches nothing.
        """
        zeros = [jnp.zeros_like(products) if learned else None for learned in self.learned]

        def run(products: Array, bias: Array | None, added: list[Array | None]) -> Array:
            scores = dataclasses.replace(self, added=added)
            return scores.tile(products, params._replace(bias=bias), tile, mask)

        scores, pull = jax.vjp(run, products, params.bias, zeros)
        if self.score_mod is None:
            return scores, pull  # of masked scores it is 0 already
        visible = scores != -jnp.inf

        def pull_visible(d_scores: Array) -> tuple[Array, Array | None, list[Array | None]]:
            d_products, d_bias, d_values = pull(jnp.where(visible, d_scores, jnp.zeros_like(d_scores)))
            shown = [None if x is None else jnp.where(visible, x, jnp.zeros_like(x)) for x in d_values]
            return jnp.where(visible, d_products, jnp.zeros_like(d_products)), d_bias, shown

        return scores, pull_visible

    def dropout_multiplier(self, tile: Tile, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."] | None:
        """As in all implementations: of the seed and positions alone."""
        if self.dropout_seed is None:
            return None
        position = tile.rows + tile.offsets[0]
        shape = tile.block  # type: ignore[attr-defined]
        pair, key = (jnp.broadcast_to(x, shape) for x in (position >> 1, tile.key_positions))
        first, second = random_words(self.dropout_seed, (pair, key))  # type: ignore[arg-type]
        words = jnp.where(jnp.broadcast_to((position & 1) == 0, shape), first, second)
        most = min(round(self.dropout_rate * 2**32), 2**32 - 1) - 2**31
        dropped = (words ^ np.int32(-(2**31))) < np.int32(most)  # compares them without sign
        return jnp.where(dropped, jnp.zeros((), dtype), jnp.asarray(1 / (1 - self.dropout_rate), dtype))
