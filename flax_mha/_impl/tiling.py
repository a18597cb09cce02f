"""How one head is cut into tiles, and which of them are visited: what blockwise needs to know before it starts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_mha._tiles import BoolMatrix, Grid, IntMatrix, Scalar
from flax_mha.masks import LengthMask, Mask, Occupancy

# Rows and columns of the squares by which is decided what is empty, where that can be known while tracing.
CELL = 128

# What a tile of n scores costs on a CPU, in scores of a large one, as measured. From PARALLEL scores on XLA uses all
# cores for its matrix products, and a tile costs n + STEP; a smaller one costs SERIAL * n.
PARALLEL, STEP, SERIAL = 128 * 1024, 24 * 1024, 2
# How much longer scores take that must be masked.
MASKED = 1.15


class Tiling(NamedTuple):
    """Rows and columns of a tile at most, and how many bands its rows are cut into: a tile may need some only."""

    height: int
    width: int
    bands: int = 1


class Layout(NamedTuple):
    """What is known while tracing: the lengths before padding, and the tiles.

    A row of tiles is cut into `bands` of rows and `cells` of columns, and it may begin a tile at every cell.
    """

    lengths: tuple[int, int]
    rows: int
    tile_shape: tuple[int, int]
    bands: int
    cells: int
    cell_width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The lengths after padding."""
        return self.rows * self.tile_shape[0], self.cells * self.cell_width

    @property
    def band_height(self) -> int:
        """Rows of a band."""
        return self.tile_shape[0] // self.bands

    @property
    def tile_cells(self) -> int:
        """Cells that a tile is wide."""
        return self.tile_shape[1] // self.cell_width

    def grid(self, offset: Scalar) -> Grid:
        """The pieces in which it is decided what is empty: a band high, a cell wide."""
        return Grid((self.rows * self.bands, self.cells), (self.band_height, self.cell_width), offset)


def layout(lengths: tuple[int, int], largest: Tiling, fine: bool = False) -> Layout:
    """The fewest tiles no larger than `largest`, all alike, and as little padding as they allow.

    Args:
      lengths: T, S.
      largest: What a tile is at most.
      fine: Whether to look at bands and cells; else at whole tiles, as is best for masks that are data.
    """
    bands = largest.bands if fine else 1
    rows, height = _cut_up(lengths[0], largest.height, bands)
    columns, width = _cut_up(lengths[1], largest.width, 1)
    parts = next(n for n in range(max(width // CELL, 1) if fine else 1, 0, -1) if width % n == 0)
    return Layout(lengths, rows, (height, width), bands, columns * parts, width // parts)


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """How many pieces of which size cover `length`, one at least; sizes are multiples of 16 where anything is cut."""
    count = max(-(-length // largest), 1)
    multiple = 16 * bands if count > 1 or bands > 1 else 1
    size = max(-(-length // (multiple * count)), 1) * multiple
    return max(-(-length // size), 1), size


class _Visits(NamedTuple):
    """For every row the tiles that it may visit, all arrays [rows, steps].

    First column; whether the tile is full; whether it must be masked; the first and one past the last band needed.
    """

    column: IntMatrix
    full: BoolMatrix
    partial: BoolMatrix
    first: IntMatrix
    end: IntMatrix


def _visits(layout: Layout, mask: Mask | None, offset: Scalar) -> _Visits:
    """Of one head; in numpy where the mask is known while tracing."""
    grid, mask = layout.grid(offset), to_the_grid(mask, layout)
    everything = np.ones(grid.counts, bool)
    occupancy = Occupancy(everything, everything) if mask is None else mask.occupancy(grid)
    split = (layout.rows, layout.bands, layout.cells)
    some, full = ((x & everything).reshape(split) for x in occupancy)
    if isinstance(some, jax.core.Tracer):  # then a tile is a cell
        start = np.broadcast_to(np.arange(layout.cells), (layout.rows, layout.cells))
    else:
        some, full, start = _of_tiles(np.asarray(some), np.asarray(full), layout)
    some_of_tile, all_of_tile = some.any(1), (some & full).all(1)
    first, last = some.argmax(1), some[:, ::-1].argmax(1)
    column = start.astype(np.int32) * np.int32(layout.cell_width)
    return _Visits(column, all_of_tile, some_of_tile & ~all_of_tile, first, layout.bands - last)  # type: ignore[arg-type]


def _of_tiles(some: np.ndarray, full: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From cells [rows, bands, cells] to tiles [rows, bands, steps], and the first cell of these [rows, steps]."""
    start = _starts(np.asarray(some.any(1)), layout.tile_cells)
    cells = np.minimum(start[:, None, :, None] + np.arange(layout.tile_cells), layout.cells - 1)
    row, band = np.arange(layout.rows)[:, None, None, None], np.arange(layout.bands)[None, :, None, None]
    is_tile = (start < layout.cells)[:, None]
    return some[row, band, cells].any(-1) & is_tile, full[row, band, cells].all(-1) & is_tile, start


def _starts(some: np.ndarray, width: int) -> np.ndarray:
    """For each row the first cells [rows, steps] of tiles, `width` cells wide, that cover all that is in `some`.

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


def cheapest(
    lengths: tuple[int, int], masks: Sequence[Mask | None], offset: int, tilings: Sequence[Tiling], fine: bool
) -> Layout:
    """The layout with the least to compute for the masks of some heads, which are known while tracing.

    Args:
      lengths: T, S.
      masks: Of one head each.
      offset: Position of the first query.
      tilings: To choose from.
      fine: As in `layout`.
    """

    def cost(candidate: Layout) -> float:
        total = 0.0
        for mask in masks:
            visits = _visits(candidate, mask, offset)
            band = candidate.band_height * candidate.tile_shape[1]
            scores = np.where(visits.full, candidate.bands, MASKED * (visits.end - visits.first)) * band
            each = np.where(scores < PARALLEL, SERIAL * scores, scores + STEP)
            total += each[np.asarray(visits.full | visits.partial)].sum()
        return total

    with jax.ensure_compile_time_eval():
        return min((layout(lengths, tiling, fine) for tiling in tilings), key=cost)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      column: First columns of tiles, in each row the full ones, the partial ones, the empty ones.
      part: For each of these the number of its part in `parts`.
      full: How many of a row are full.
      some: How many are not empty.
      parts: First and one past the last row, within the tile, that tiles to mask need.
      any_full: Whether there is a full tile at all, as far as it is known while tracing.
      any_partial: The same for tiles to mask.
      single: Whether it is known that every row has one tile, and that to be masked.
    """

    column: Int[Array, "... rows steps"] | np.ndarray
    part: Int[Array, "... rows steps"] | np.ndarray
    full: Int[Array, "... rows"] | np.ndarray
    some: Int[Array, "... rows"] | np.ndarray
    parts: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    any_full: bool = dataclasses.field(metadata={"static": True})
    any_partial: bool = dataclasses.field(metadata={"static": True})
    single: bool = dataclasses.field(metadata={"static": True})


def plan(layout: Layout, mask: Mask | None, offset: Scalar) -> Plan:
    """Of one head; decided while tracing where the mask is static, else by numbers that bound the loops."""
    column, full, partial, first, end = _visits(layout, mask, offset)
    static = isinstance(full, np.ndarray)
    ranges, single = [(0, layout.bands)], False
    part = np.zeros(column.shape, np.int32)
    if static and partial.any():
        single = column.shape[1] == 1 and bool((full | partial).all())
        if single:
            full, partial = np.zeros_like(full), full | partial
        ranges = sorted(set(zip(first[partial].tolist(), end[partial].tolist(), strict=True)))
        for number, (a, b) in enumerate(ranges):
            part[partial & (first == a) & (end == b)] = number
    numbers: Any = np if static else jnp
    order = numbers.argsort(2 - 2 * full.astype(np.int32) - partial.astype(np.int32), axis=1, stable=True)
    return Plan(
        numbers.take_along_axis(column, order, 1),
        numbers.take_along_axis(part, order, 1),
        full.sum(1, dtype=np.int32),
        full.sum(1, dtype=np.int32) + partial.sum(1, dtype=np.int32),
        parts=tuple((a * layout.band_height, b * layout.band_height) for a, b in ranges),
        any_full=not static or bool(full.any()),
        any_partial=not static or bool(partial.any()),
        single=single,
    )


# For masks without arrays: the layers of a model, and the traces of its training step, ask the same again and again.
static_cheapest = functools.lru_cache(maxsize=256)(cheapest)
static_plan = functools.lru_cache(maxsize=256)(plan)


def to_the_grid(mask: Mask | None, layout: Layout) -> Mask | None:
    """The mask over whole tiles: what was added to fill them is hidden."""
    if layout.shape == layout.lengths:
        return mask
    inside = LengthMask(key_value_lengths=layout.lengths[1], query_lengths=layout.lengths[0])
    return inside if mask is None else mask.padded(layout.shape) & inside
