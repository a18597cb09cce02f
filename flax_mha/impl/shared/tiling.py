"""The cut of one head's scores into tiles, and the block mask: which of these are visited, in which order."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from flax_mha.core.tile import BoolMatrix, Grid, IntMatrix, Scalar, Tile
from flax_mha.masks import Mask, Occupancy
from flax_mha.masks.base import part_axes

# Rows and columns of the squares for which it is decided whether they are empty, where that is known while tracing.
CELL = 128


class TileShape(NamedTuple):
    """The largest shape of a tile.

    Attributes:
      height: Rows.
      width: Columns.
      bands: How many bands its rows are cut into; a tile may need only some of them.
    """

    height: int
    width: int
    bands: int = 1


class Tiling(NamedTuple):
    """A cut of the scores of one head into rows of tiles.

    Each row of tiles is divided into `bands` horizontally and into `cells` vertically. A tile has `height` rows and
    `width` columns; it may begin at any cell, and may be cut to the bands that it needs. Example: with a height of
    1024, a width of 512 and 2 bands, a causal mask has two tiles on the diagonal of each row of tiles: the first needs
    all 1024 rows, the second only its lower band of 512 rows.

    Attributes:
      lengths: T and S, before padding.
      rows: How many rows of tiles there are.
      shape: T and S after padding.
      band_height: Rows of a band.
      tile_cells: How many cells wide a tile is.
      inside: `lengths`, if tiles reach beyond T or S; else None.
    """

    lengths: tuple[int, int]
    rows: int
    height: int
    width: int
    bands: int
    cells: int
    cell_width: int

    shape: tuple[int, int]
    band_height: int
    tile_cells: int
    inside: tuple[int, int] | None

    @classmethod
    def make(
        cls, lengths: tuple[int, int], rows: int, height: int, width: int, bands: int, cells: int, size: int
    ) -> "Tiling":
        """The tiling with cells of this size; what follows from the numbers is stored with them."""
        shape = (rows * height, cells * size)
        inside = None if shape == lengths else lengths
        return cls(lengths, rows, height, width, bands, cells, size, shape, height // bands, width // size, inside)

    def grid(self, offsets: tuple[Scalar, Scalar]) -> Grid:
        """The pieces for which it is decided whether they are empty: a band high, a cell wide."""
        counts, shape = (self.rows * self.bands, self.cells), (self.band_height, self.cell_width)
        return Grid(counts, shape, offsets, self.inside)

    def tile(self, row: Scalar, column: Scalar, shape: tuple[int, int], offsets: tuple[Scalar, Scalar]) -> Tile:
        return Tile(row, column, shape, offsets, self.inside)


def tiling_of(lengths: tuple[int, int], largest: TileShape, fine: bool = False) -> Tiling:
    """The fewest tiles no larger than `largest`, all alike, and as little padding as they allow.

    Args:
      lengths: T and S.
      largest: What a tile is at most.
      fine: Whether to look at bands and cells; else at whole tiles, as is best for masks that are data.
    """
    bands = largest.bands if fine else 1
    rows, height = _cut_up(lengths[0], largest.height, bands)
    columns, width = _cut_up(lengths[1], largest.width, 1)
    parts = next(n for n in range(max(width // CELL, 1) if fine else 1, 0, -1) if width % n == 0)
    return Tiling.make(lengths, rows, height, width, bands, columns * parts, width // parts)


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """The number (at least 1) and size of equal pieces that cover `length`; sizes of several are multiples of 16."""
    count = max(-(-length // largest), 1)
    multiple = 16 * bands if count > 1 or bands > 1 else 1
    size = max(-(-length // (multiple * count)), 1) * multiple
    return max(-(-length // size), 1), size


def occupancy(tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]) -> Occupancy:
    """Computes the occupancy of the grid of one head; in numpy where the mask is known while tracing."""
    grid, mask = tiling.grid(offsets), padded_mask(mask, tiling)
    everything = np.ones(grid.counts, bool)
    some, full = (everything, everything) if mask is None else mask.occupancy(grid)
    return Occupancy(some & everything, full & everything)


def padded_mask(mask: Mask | None, tiling: Tiling) -> Mask | None:
    """The mask of one head over whole tiles, which masks the padding that fills them."""
    if tiling.inside is None:
        return mask
    inside = InsideMask(*tiling.lengths)
    return inside if mask is None else mask.map_arrays(lambda x, axes: _padded(x, axes, tiling.shape)) & inside


def _padded(x: Array | np.ndarray, axes: str, shape: tuple[int, int]) -> Any:
    """An array of one head's mask, with entries for the rows and columns of padding that are like the last one."""
    sizes = {"T": shape[0], "S": shape[1]}
    widths = [
        (0, 0 if name.endswith("|1") and size == 1 else sizes.get(name[0], size) - size)
        for name, size in zip(part_axes(axes), x.shape, strict=False)
    ]
    if not any(after for _, after in widths):
        return x
    return jnp.pad(x, widths, mode="edge" if x.size else "constant")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InsideMask(Mask):
    """Rows and columns before the padding."""

    queries: int = dataclasses.field(metadata={"static": True})
    keys: int = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return (tile.rows < self.queries) & (tile.columns < self.keys)

    def occupancy(self, grid: Grid) -> Occupancy:
        some, full = np.ones(grid.counts, bool), np.ones(grid.counts, bool)
        for axis, length in enumerate((self.queries, self.keys)):
            first, last = grid._replace(lengths=None).bounds(axis)
            some, full = some & (first < length), full & (last < length)
        return Occupancy(some, full)


# Which tiles are visited, and in which order: FlexAttention's block mask.
#
# A row of tiles first visits the tiles that are visible throughout, without masking, then those that must be masked.
# Empty tiles are never visited. Where the mask is known while tracing, all of this is NumPy, and a tile may be cut to
# the rows that it needs; else the numbers are data, and bound loops.


class _Tiles(NamedTuple):
    """For every row the tiles that it may visit, all arrays [rows, tiles].

    First column; whether all of it is visible; whether it must be masked; the first and one past the last band needed.
    """

    column: IntMatrix
    full: BoolMatrix
    partial: BoolMatrix
    first: IntMatrix
    end: IntMatrix


def _tiles(tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]) -> _Tiles:
    """Finds the tiles of one head; in numpy where the mask is known while tracing."""
    some, full = (x.reshape(tiling.rows, tiling.bands, tiling.cells) for x in occupancy(tiling, mask, offsets))
    if isinstance(some, jax.core.Tracer):  # then a tile is a cell
        start = np.broadcast_to(np.arange(tiling.cells), (tiling.rows, tiling.cells))
    else:
        some, full, start = _from_cells(np.asarray(some), np.asarray(full), tiling)
    some_of_tile, all_of_tile = some.any(1), (some & full).all(1)
    first, last = some.argmax(1), some[:, ::-1].argmax(1)
    column = start.astype(np.int32) * np.int32(tiling.cell_width)
    return _Tiles(column, all_of_tile, some_of_tile & ~all_of_tile, first, tiling.bands - last)  # type: ignore[arg-type]


def _from_cells(some: np.ndarray, full: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From cells [rows, bands, cells] to tiles [rows, bands, tiles], and the first cell of these [rows, tiles]."""
    start = _starts(np.asarray(some.any(1)), tiling.tile_cells)
    cells = np.minimum(start[:, None, :, None] + np.arange(tiling.tile_cells), tiling.cells - 1)
    row, band = np.arange(tiling.rows)[:, None, None, None], np.arange(tiling.bands)[None, :, None, None]
    is_tile = (start < tiling.cells)[:, None]
    return some[row, band, cells].any(-1) & is_tile, full[row, band, cells].all(-1) & is_tile, start


def _starts(some: np.ndarray, width: int) -> np.ndarray:
    """For each row the first cells [rows, tiles] of tiles, `width` cells wide, that cover all that is in `some`.

    A tile begins where something is, if that saves some, and else at a multiple of its width. The number of cells
    stands for no tile.
    """
    rows, cells = some.shape
    aligned = some.reshape(rows, -1, width).any(2)
    starts = np.sort(np.where(aligned, np.arange(0, cells, width), cells), axis=1)
    following = np.where(some, np.arange(cells), cells)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    following = np.pad(following, ((0, 0), (0, 1)), constant_values=cells)
    greedy, place = np.full_like(starts, cells), np.zeros(rows, int)
    for step in range(starts.shape[1]):
        start = following[np.arange(rows), place]
        fits = np.minimum(start, cells - width)  # at the end a tile begins earlier, if there is room
        greedy[:, step] = np.where(start < cells, np.maximum(fits, place), cells)
        place = np.minimum(greedy[:, step] + width, cells)
        if (place == cells).all():
            break
    inside = np.where(greedy < cells, greedy, 0).max(1) + width <= cells
    fewer = (greedy < cells).sum(1) < (starts < cells).sum(1)
    starts = np.where((inside & fewer)[:, None], greedy, starts)
    return starts[:, : max((starts < cells).sum(1).max(initial=0), 1)]


class TileBand(NamedTuple):
    """The computed part of a full-size tile: rows `first` to `end` (exclusive)."""

    first: int
    end: int


class RowTiles(NamedTuple):
    """For every row its tiles, the full ones first: column [rows, tiles], band [rows, tiles, 2], how many."""

    column: np.ndarray
    band: np.ndarray
    num_full: np.ndarray
    num_tiles: np.ndarray


def tiles_of(tiling: Tiling, mask: Mask | None, offsets: tuple[int, int]) -> RowTiles:
    """The tiles of one head whose mask is known while tracing."""
    tiles = _tiles(tiling, mask, offsets)
    order = np.argsort(2 - 2 * tiles.full.astype(int) - tiles.partial, axis=1, kind="stable")
    column, first, end = (np.take_along_axis(x, order, 1) for x in (tiles.column, tiles.first, tiles.end))
    num_full, num_partial = (np.asarray(kind).sum(1) for kind in (tiles.full, tiles.partial))
    num_tiles = num_full + num_partial
    count = max(int(num_tiles.max(initial=0)), 1)
    column = np.where(np.arange(column.shape[1]) < num_tiles[:, None], column, 0).astype(np.int32)
    band = np.stack([first, end], -1) * tiling.band_height
    return RowTiles(column[:, :count], band[:, :count], num_full, num_tiles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      column: First columns of all tiles.
      band: For every tile the index of its band in `full_bands`, or in `partial_bands` for tiles that must be masked.
      num_full: The number of full tiles in each row.
      num_tiles: The number of tiles in each row, full and partial.
      full_bands: The distinct bands of full tiles; empty if it is known at trace time that no tile is full.
      partial_bands: The distinct bands of tiles that must be masked, likewise.
      single: Whether it is known at trace time that every row has exactly one tile, and that all of these tiles are
        full or all must be masked.
    """

    column: Int[Array, "... rows tiles"] | np.ndarray
    band: Int[Array, "... rows tiles"] | np.ndarray
    num_full: Int[Array, "... rows"] | np.ndarray
    num_tiles: Int[Array, "... rows"] | np.ndarray
    full_bands: tuple[TileBand, ...] = dataclasses.field(metadata={"static": True})
    partial_bands: tuple[TileBand, ...] = dataclasses.field(metadata={"static": True})
    single: bool = dataclasses.field(metadata={"static": True})


def static_block_mask(tiling: Tiling, masks: Sequence[Mask | None], offsets: tuple[int, int]) -> BlockMask:
    """Makes the block mask of some heads, the first axis of its arrays, whose masks are known while tracing."""
    with jax.ensure_compile_time_eval():
        heads = [tiles_of(tiling, mask, offsets) for mask in masks]
    count = max(head.band.shape[1] for head in heads)
    column = np.stack([np.pad(head.column, [(0, 0), (0, count - head.column.shape[1])]) for head in heads])
    part = np.stack([np.pad(head.band, [(0, 0), (0, count - head.band.shape[1]), (0, 0)]) for head in heads])
    full, some = (np.stack([head[i] for head in heads]).astype(np.int32) for i in (2, 3))
    # With at most one tile per row, rows without a tile and full tiles among partial ones are treated as partial.
    if count == 1 and some.any():
        whole, chosen, ones = (TileBand(0, tiling.height),), np.zeros_like(column), np.ones_like(full)
        if full.all():
            return BlockMask(column, chosen, ones, ones, whole, (), single=True)
        return BlockMask(column, chosen, np.zeros_like(full), ones, (), whole, single=True)
    number = np.arange(count)
    is_full, is_partial = number < full[..., None], (number >= full[..., None]) & (number < some[..., None])
    full_bands, partial_bands = (
        tuple(sorted({TileBand(*p) for p in part[mine].tolist()})) for mine in (is_full, is_partial)
    )
    chosen = np.zeros(part.shape[:-1], np.int32)
    for mine, parts in ((is_full, full_bands), (is_partial, partial_bands)):
        for index, one in enumerate(parts):
            chosen[mine & (part == one).all(-1)] = index
    return BlockMask(column, chosen, full, some, full_bands, partial_bands, single=False)


def dynamic_block_mask(tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]) -> BlockMask:
    """Makes the block mask of one head whose mask or offset is data: numbers that bound the loops."""
    column, full, partial, *_ = _tiles(tiling, mask, offsets)
    order = jnp.argsort(2 - 2 * full.astype(jnp.int32) - partial.astype(jnp.int32), axis=1, stable=True)
    counts = jnp.sum(full, 1, dtype=jnp.int32), jnp.sum(full | partial, 1, dtype=jnp.int32)
    whole = (TileBand(0, tiling.height),)
    columns = jnp.take_along_axis(jnp.asarray(column), order, 1)
    return BlockMask(columns, jnp.zeros_like(columns), *counts, whole, whole, single=False)
