"""How one head is cut into tiles, and which of them are visited: what blockwise needs to know before it starts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

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
    """What a tile is at most.

    Attributes:
      height: Rows.
      width: Columns that lie side by side: a run.
      bands: How many bands its rows are cut into; a tile may need some only.
      runs: How many runs it may gather.
    """

    height: int
    width: int
    bands: int = 1
    runs: int = 1


class Layout(NamedTuple):
    """What is known while tracing: the lengths before padding, and the tiles.

    A row of tiles is cut into `bands` of rows and `cells` of columns, and a run may begin at every cell. A tile has
    `height` rows and up to `runs` runs of `width` columns.
    """

    lengths: tuple[int, int]
    rows: int
    height: int
    width: int
    bands: int
    runs: int
    cells: int
    cell_width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The lengths after padding."""
        return self.rows * self.height, self.cells * self.cell_width

    @property
    def band_height(self) -> int:
        """Rows of a band."""
        return self.height // self.bands

    @property
    def run_cells(self) -> int:
        """Cells that a run is wide."""
        return self.width // self.cell_width

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
    return Layout(lengths, rows, height, width, bands, largest.runs, columns * parts, width // parts)


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """How many pieces of which size cover `length`, one at least; sizes are multiples of 16 where anything is cut."""
    count = max(-(-length // largest), 1)
    multiple = 16 * bands if count > 1 or bands > 1 else 1
    size = max(-(-length // (multiple * count)), 1) * multiple
    return max(-(-length // size), 1), size


class _Runs(NamedTuple):
    """For every row the runs that it may visit, all arrays [rows, runs].

    First column; whether all of it is visible; whether it must be masked; the first and one past the last band needed.
    """

    column: IntMatrix
    full: BoolMatrix
    partial: BoolMatrix
    first: IntMatrix
    end: IntMatrix


def _runs(layout: Layout, mask: Mask | None, offset: Scalar) -> _Runs:
    """Of one head; in numpy where the mask is known while tracing."""
    grid, mask = layout.grid(offset), to_the_grid(mask, layout)
    everything = np.ones(grid.counts, bool)
    occupancy = Occupancy(everything, everything) if mask is None else mask.occupancy(grid)
    split = (layout.rows, layout.bands, layout.cells)
    some, full = ((x & everything).reshape(split) for x in occupancy)
    if isinstance(some, jax.core.Tracer):  # then a run is a cell
        start = np.broadcast_to(np.arange(layout.cells), (layout.rows, layout.cells))
    else:
        some, full, start = _of_runs(np.asarray(some), np.asarray(full), layout)
    some_of_run, all_of_run = some.any(1), (some & full).all(1)
    first, last = some.argmax(1), some[:, ::-1].argmax(1)
    column = start.astype(np.int32) * np.int32(layout.cell_width)
    return _Runs(column, all_of_run, some_of_run & ~all_of_run, first, layout.bands - last)  # type: ignore[arg-type]


def _of_runs(some: np.ndarray, full: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From cells [rows, bands, cells] to runs [rows, bands, runs], and the first cell of these [rows, runs]."""
    start = _starts(np.asarray(some.any(1)), layout.run_cells)
    cells = np.minimum(start[:, None, :, None] + np.arange(layout.run_cells), layout.cells - 1)
    row, band = np.arange(layout.rows)[:, None, None, None], np.arange(layout.bands)[None, :, None, None]
    is_run = (start < layout.cells)[:, None]
    return some[row, band, cells].any(-1) & is_run, full[row, band, cells].all(-1) & is_run, start


def _starts(some: np.ndarray, width: int) -> np.ndarray:
    """For each row the first cells [rows, runs] of runs, `width` cells wide, that cover all that is in `some`.

    A run begins where something is, if that saves some, and else at a multiple of its width. The number of cells
    stands for no run.
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
        fits = np.minimum(start, cells - width)  # at the end a run begins earlier, if there is room
        greedy[:, step] = np.where(start < cells, np.maximum(fits, place), cells)
        place = np.minimum(greedy[:, step] + width, cells)
        if (place == cells).all():
            break
    inside = np.where(greedy < cells, greedy, 0).max(1) + width <= cells
    fewer = (greedy < cells).sum(1) < (starts < cells).sum(1)
    starts = np.where((inside & fewer)[:, None], greedy, starts)
    return starts[:, : max((starts < cells).sum(1).max(initial=0), 1)]


class Part(NamedTuple):
    """What a tile needs of the largest one: rows from `first` on to before `end`, and so many runs."""

    first: int
    end: int
    runs: int


class _Tiles(NamedTuple):
    """For every row its tiles, the full ones first: column [rows, tiles, runs], part [rows, tiles, 3], how many."""

    column: np.ndarray
    part: np.ndarray
    full: np.ndarray
    some: np.ndarray


def _tiles(layout: Layout, runs: _Runs) -> _Tiles:
    """Gathers the runs of each row, those that are full and those that are not, into tiles of about the same size."""
    order = np.argsort(2 - 2 * runs.full.astype(int) - runs.partial, axis=1, kind="stable")
    column, first, end = (np.take_along_axis(x, order, 1) for x in (runs.column, runs.first, runs.end))
    row = np.broadcast_to(np.arange(layout.rows)[:, None], column.shape)
    number = np.arange(column.shape[1])
    full, partial = (np.asarray(kind).sum(1, keepdims=True) for kind in (runs.full, runs.partial))
    full_tiles, partial_tiles = (-(-count // layout.runs) for count in (full, partial))
    some = full_tiles + partial_tiles
    shape = (layout.rows, max(int(some.max(initial=0)), 1))
    columns, part = np.zeros((*shape, layout.runs), np.int32), np.zeros((*shape, 3), int)
    part[..., 0] = layout.bands
    kinds = ((full * 0, full, full * 0, full_tiles), (full, partial, full_tiles, partial_tiles))
    for first_run, count, first_tile, tiles in kinds:
        place = number - first_run
        tile = place * tiles // np.maximum(count, 1)
        slot = place - -(-tile * count // np.maximum(tiles, 1))
        mine = (place >= 0) & (place < count)
        at = (row[mine], (first_tile + tile)[mine])
        columns[(*at, slot[mine])] = column[mine]
        np.minimum.at(part[..., 0], at, first[mine])
        np.maximum.at(part[..., 1], at, end[mine])
        np.add.at(part[..., 2], at, 1)
    part[..., :2] *= layout.band_height
    return _Tiles(columns, part, full_tiles[:, 0], some[:, 0])


def cheapest(lengths: tuple[int, int], masks: Sequence[Mask | None], offset: int, tilings: Sequence[Tiling]) -> Layout:
    """The layout with the least to compute for the masks of some heads, which are known while tracing.

    Args:
      lengths: T, S.
      masks: Of one head each.
      offset: Position of the first query.
      tilings: To choose from.
    """

    def cost(candidate: Layout) -> float:
        total = 0.0
        for mask in masks:
            _, part, full, some = _tiles(candidate, _runs(candidate, mask, offset))
            number = np.arange(part.shape[1])
            scores = (part[..., 1] - part[..., 0]) * part[..., 2] * candidate.width
            scores = np.where(number < full[:, None], scores, MASKED * scores)
            each = np.where(scores < PARALLEL, SERIAL * scores, scores + STEP)
            total += each[number < some[:, None]].sum()
        return total

    with jax.ensure_compile_time_eval():
        return min((layout(lengths, tiling, fine=True) for tiling in tilings), key=cost)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      column: First columns of the runs of every tile.
      part: For every tile the number of its part, in `full_parts` or `partial_parts`.
      full: How many tiles of a row are full.
      some: How many there are.
      full_parts: What full tiles need; none if it is known while tracing that there is no such tile.
      partial_parts: The same for tiles to mask.
      single: Whether it is known that every row has one tile, of one run; all full, or all to mask.
    """

    column: Int[Array, "... rows tiles runs"] | np.ndarray
    part: Int[Array, "... rows tiles"] | np.ndarray
    full: Int[Array, "... rows"] | np.ndarray
    some: Int[Array, "... rows"] | np.ndarray
    full_parts: tuple[Part, ...] = dataclasses.field(metadata={"static": True})
    partial_parts: tuple[Part, ...] = dataclasses.field(metadata={"static": True})
    single: bool = dataclasses.field(metadata={"static": True})


def plan(layout: Layout, masks: Sequence[Mask | None], offset: int) -> Plan:
    """Of some heads, the first axis of its arrays, whose masks are known while tracing."""
    with jax.ensure_compile_time_eval():
        heads = [_tiles(layout, _runs(layout, mask, offset)) for mask in masks]
    count = max(head.part.shape[1] for head in heads)
    column, part = (
        np.stack([np.pad(head[i], [(0, 0), (0, count - head[i].shape[1]), (0, 0)]) for head in heads]) for i in (0, 1)
    )
    full, some = (np.stack([head[i] for head in heads]).astype(np.int32) for i in (2, 3))
    if count == 1 and part[..., 2].max() == 1:  # then a tile that is missing, and a full one among others, is masked
        whole, chosen, ones = (Part(0, layout.height, 1),), np.zeros_like(column[..., 0]), np.ones_like(full)
        if full.all():
            return Plan(column, chosen, ones, ones, whole, (), single=True)
        return Plan(column, chosen, np.zeros_like(full), ones, (), whole, single=True)
    number = np.arange(count)
    is_full, is_partial = number < full[..., None], (number >= full[..., None]) & (number < some[..., None])
    full_parts, partial_parts = (
        tuple(sorted({Part(*p) for p in part[mine].tolist()})) for mine in (is_full, is_partial)
    )
    chosen = np.zeros(part.shape[:-1], np.int32)
    for mine, parts in ((is_full, full_parts), (is_partial, partial_parts)):
        for index, one in enumerate(parts):
            chosen[mine & (part == one).all(-1)] = index
    return Plan(column, chosen, full, some, full_parts, partial_parts, single=False)


def plan_of_data(layout: Layout, mask: Mask | None, offset: Scalar) -> Plan:
    """Of one head, whose mask or offset is data: by numbers that bound the loops."""
    column, full, partial, *_ = _runs(layout, mask, offset)
    order = jnp.argsort(2 - 2 * full.astype(jnp.int32) - partial.astype(jnp.int32), axis=1, stable=True)
    counts = jnp.sum(full, 1, dtype=jnp.int32), jnp.sum(full | partial, 1, dtype=jnp.int32)
    whole = (Part(0, layout.height, 1),)
    columns = jnp.take_along_axis(jnp.asarray(column), order, 1)
    return Plan(columns[..., None], jnp.zeros_like(columns), *counts, whole, whole, single=False)


# For masks without arrays: the layers of a model, and the traces of its training step, ask the same again and again.
static_cheapest = functools.lru_cache(maxsize=256)(cheapest)
static_plan = functools.lru_cache(maxsize=256)(plan)


def to_the_grid(mask: Mask | None, layout: Layout) -> Mask | None:
    """The mask over whole tiles: what was added to fill them is hidden."""
    if layout.shape == layout.lengths:
        return mask
    inside = LengthMask(key_value_lengths=layout.lengths[1], query_lengths=layout.lengths[0])
    return inside if mask is None else mask.padded(layout.shape) & inside
