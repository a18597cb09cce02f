"""Which tiles of one head are visited, and in which order: FlexAttention's block mask.

A row of tiles first visits the tiles that are visible throughout, without masking, then those that must be masked.
Empty tiles are never visited. Where the mask is known while tracing, all of this is NumPy, and a tile may be cut to the
rows that it needs and gather runs of columns that lie apart; else the numbers are data, and bound loops.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_mha.core.tile import BoolMatrix, IntMatrix, Offsets
from flax_mha.impl.shared.tiling import Tiling, padded_mask
from flax_mha.masks import Mask, Occupancy


class _Runs(NamedTuple):
    """For every row the runs that it may visit, all arrays [rows, runs].

    First column; whether all of it is visible; whether it must be masked; the first and one past the last band needed.
    """

    column: IntMatrix
    full: BoolMatrix
    partial: BoolMatrix
    first: IntMatrix
    end: IntMatrix


def _runs(tiling: Tiling, mask: Mask | None, offsets: Offsets) -> _Runs:
    """Of one head; in numpy where the mask is known while tracing."""
    grid, mask = tiling.grid(offsets), padded_mask(mask, tiling)
    everything = np.ones(grid.counts, bool)
    occupancy = Occupancy(everything, everything) if mask is None else mask.occupancy(grid)
    split = (tiling.rows, tiling.bands, tiling.cells)
    some, full = ((x & everything).reshape(split) for x in occupancy)
    if isinstance(some, jax.core.Tracer):  # then a run is a cell
        start = np.broadcast_to(np.arange(tiling.cells), (tiling.rows, tiling.cells))
    else:
        some, full, start = _of_runs(np.asarray(some), np.asarray(full), tiling)
    some_of_run, all_of_run = some.any(1), (some & full).all(1)
    first, last = some.argmax(1), some[:, ::-1].argmax(1)
    column = start.astype(np.int32) * np.int32(tiling.cell_width)
    return _Runs(column, all_of_run, some_of_run & ~all_of_run, first, tiling.bands - last)  # type: ignore[arg-type]


def _of_runs(some: np.ndarray, full: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From cells [rows, bands, cells] to runs [rows, bands, runs], and the first cell of these [rows, runs]."""
    start = _starts(np.asarray(some.any(1)), tiling.run_cells)
    cells = np.minimum(start[:, None, :, None] + np.arange(tiling.run_cells), tiling.cells - 1)
    row, band = np.arange(tiling.rows)[:, None, None, None], np.arange(tiling.bands)[None, :, None, None]
    is_run = (start < tiling.cells)[:, None]
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
    """The part of a full-size tile that is computed: rows `first` to `end` (exclusive), and the number of runs."""

    first: int
    end: int
    runs: int


class RowTiles(NamedTuple):
    """For every row its tiles, the full ones first: column [rows, tiles, runs], part [rows, tiles, 3], how many."""

    column: np.ndarray
    part: np.ndarray
    num_full: np.ndarray
    num_tiles: np.ndarray


def tiles_of(tiling: Tiling, mask: Mask | None, offsets: Offsets) -> RowTiles:
    """The tiles of one head whose mask is known while tracing.

    The runs of each row, those that are full and those that are not, are gathered into tiles of about the same size.
    """
    runs = _runs(tiling, mask, offsets)
    order = np.argsort(2 - 2 * runs.full.astype(int) - runs.partial, axis=1, kind="stable")
    column, first, end = (np.take_along_axis(x, order, 1) for x in (runs.column, runs.first, runs.end))
    row = np.broadcast_to(np.arange(tiling.rows)[:, None], column.shape)
    number = np.arange(column.shape[1])
    full, partial = (np.asarray(kind).sum(1, keepdims=True) for kind in (runs.full, runs.partial))
    full_tiles, partial_tiles = (-(-count // tiling.runs) for count in (full, partial))
    some = full_tiles + partial_tiles
    shape = (tiling.rows, max(int(some.max(initial=0)), 1))
    columns, part = np.zeros((*shape, tiling.runs), np.int32), np.zeros((*shape, 3), int)
    part[..., 0] = tiling.bands
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
    part[..., :2] *= tiling.band_height
    return RowTiles(columns, part, full_tiles[:, 0], some[:, 0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      column: First columns of the runs of every tile.
      part: For every tile the index of its part in `full_parts`, or in `partial_parts` for tiles that must be masked.
      num_full: The number of full tiles in each row.
      num_tiles: The number of tiles in each row, full and partial.
      full_parts: The distinct parts of full tiles; empty if it is known at trace time that no tile is full.
      partial_parts: The distinct parts of tiles that must be masked, likewise.
      single: Whether it is known at trace time that every row has exactly one tile, of one run, and that all of these
        tiles are full or all must be masked.
    """

    column: Int[Array, "... rows tiles runs"] | np.ndarray
    part: Int[Array, "... rows tiles"] | np.ndarray
    num_full: Int[Array, "... rows"] | np.ndarray
    num_tiles: Int[Array, "... rows"] | np.ndarray
    full_parts: tuple[Part, ...] = dataclasses.field(metadata={"static": True})
    partial_parts: tuple[Part, ...] = dataclasses.field(metadata={"static": True})
    single: bool = dataclasses.field(metadata={"static": True})


def static_block_mask(tiling: Tiling, masks: Sequence[Mask | None], offsets: Offsets) -> BlockMask:
    """Of some heads, the first axis of its arrays, whose masks are known while tracing."""
    with jax.ensure_compile_time_eval():
        heads = [tiles_of(tiling, mask, offsets) for mask in masks]
    count = max(head.part.shape[1] for head in heads)
    column, part = (
        np.stack([np.pad(head[i], [(0, 0), (0, count - head[i].shape[1]), (0, 0)]) for head in heads]) for i in (0, 1)
    )
    full, some = (np.stack([head[i] for head in heads]).astype(np.int32) for i in (2, 3))
    # With at most one tile per row, rows without a tile and full tiles among partial ones are treated as partial.
    if count == 1 and part[..., 2].max() == 1:
        whole, chosen, ones = (Part(0, tiling.height, 1),), np.zeros_like(column[..., 0]), np.ones_like(full)
        if full.all():
            return BlockMask(column, chosen, ones, ones, whole, (), single=True)
        return BlockMask(column, chosen, np.zeros_like(full), ones, (), whole, single=True)
    number = np.arange(count)
    is_full, is_partial = number < full[..., None], (number >= full[..., None]) & (number < some[..., None])
    full_parts, partial_parts = (
        tuple(sorted({Part(*p) for p in part[mine].tolist()})) for mine in (is_full, is_partial)
    )
    chosen = np.zeros(part.shape[:-1], np.int32)
    for mine, parts in ((is_full, full_parts), (is_partial, partial_parts)):
        for index, one in enumerate(parts):
            chosen[mine & (part == one).all(-1)] = index
    return BlockMask(column, chosen, full, some, full_parts, partial_parts, single=False)


def dynamic_block_mask(tiling: Tiling, mask: Mask | None, offsets: Offsets) -> BlockMask:
    """Of one head, whose mask or offset is data: by numbers that bound the loops."""
    column, full, partial, *_ = _runs(tiling, mask, offsets)
    order = jnp.argsort(2 - 2 * full.astype(jnp.int32) - partial.astype(jnp.int32), axis=1, stable=True)
    counts = jnp.sum(full, 1, dtype=jnp.int32), jnp.sum(full | partial, 1, dtype=jnp.int32)
    whole = (Part(0, tiling.height, 1),)
    columns = jnp.take_along_axis(jnp.asarray(column), order, 1)
    return BlockMask(columns[..., None], jnp.zeros_like(columns), *counts, whole, whole, single=False)
