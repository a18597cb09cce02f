"""Visiting the tiles of a row: which part of each array a tile concerns, and the loops over them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha.core.tile import Scalar, Tile
from flax_mha.impl.shared.block_mask import BlockMask, Part
from flax_mha.impl.shared.scores import Scores
from flax_mha.impl.shared.tiling import Tiling, padded_mask
from flax_mha.masks import Mask

T = TypeVar("T")


class Visit(NamedTuple):
    """One tile to compute, which begins `first` rows below the top of its row of tiles."""

    first: int
    tile: Tile

    def rows(self, x: Array, axis: int = 0) -> Array:
        """The tile's part of what belongs to its row of tiles."""
        height = self.tile.shape[0]
        return x if x.shape[axis] == height else lax.slice_in_dim(x, self.first, self.first + height, axis=axis)

    def put_rows(self, x: Array, part: Array) -> Array:
        """What belongs to the row of tiles, with the tile's part replaced."""
        return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, self.first, 0)

    def keys(self, x: Float[Array, "S *F"]) -> Float[Array, "s *F"]:
        """The tile's part of what belongs to keys."""
        return self.tile.cut_columns(x, 0)

    def add_keys(self, x: Float[Array, "F S"], part: Float[Array, "F s"]) -> Float[Array, "F S"]:
        """Sums of keys or values, transposed, with the tile's part added."""
        return Tile(0, self.tile.column, (part.shape[0], part.shape[1])).add(x, part)


def over_keys(
    blocks: BlockMask,
    tiling: Tiling,
    scores: Scores,
    i: Int[Array, ""],
    step: Callable[[Visit, Mask | None, T], T],
    state: T,
) -> T:
    """Folds `step` over the tiles of row i that are visited; `blocks` is the row's own."""
    mask = padded_mask(scores.mask, tiling) if blocks.partial_parts else None

    def visit(part: Part, mask: Mask | None, n: Scalar, state: T) -> T:
        columns = tuple(element(blocks.column, n, run) for run in range(part.runs))
        shape = (part.end - part.first, part.runs * tiling.width)
        tile = tiling.tile(i * tiling.height + part.first, columns, shape, scores.offsets)
        return step(Visit(part.first, tile), mask, state)

    def visit_all(parts: tuple[Part, ...], mask: Mask | None, first: Any, end: Any, state: T) -> T:
        visits = [functools.partial(visit, part, mask) for part in parts]
        one = visits[0] if len(parts) == 1 else lambda n, state: lax.switch(element(blocks.part, n), visits, n, state)
        return one(0, state) if blocks.single else lax.fori_loop(first, end, one, state)

    if blocks.full_parts:
        state = visit_all(blocks.full_parts, None, 0, blocks.num_full, state)
    if blocks.partial_parts:
        state = visit_all(blocks.partial_parts, mask, blocks.num_full, blocks.num_tiles, state)
    return state


def element(x: Any, *place: Scalar) -> Int[Array, ""]:
    first = [jnp.asarray(i, jnp.int32) for i in place]
    return lax.dynamic_slice(x, first, (1,) * x.ndim, allow_negative_indices=False).reshape(())


def by_row(tiling: Tiling, blocks: BlockMask, *arrays: Array | None) -> tuple:
    """What belongs to each row of tiles: its number, its block mask, its part of the arrays [T, ...]."""
    shape = (tiling.rows, tiling.height)
    parts = (None if x is None else x.reshape(*shape, *x.shape[1:]) for x in arrays)
    return jnp.arange(tiling.rows, dtype=jnp.int32), blocks, *parts
