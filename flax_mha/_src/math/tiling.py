"""Cuts the scores of one head into tiles, and lists the tiles to visit in a *block
mask*, like FlexAttention.

A tile's *occupancy*: it is *full* if all of its scores are visible, *partial* if some
are, and *empty* if none is. Each row of tiles (tiles with the same queries) visits full
tiles first, without a mask, then partial tiles, and no empty ones. If the mask is known
while tracing, the block mask holds NumPy arrays, and a tile may be cut to the rows that
it needs. Otherwise the block mask is computed at run time, and bounds loops.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from flax_mha._src.core.tile import Grid, IntMatrix, Scalar, Tile
from flax_mha._src.core.tracing import T
from flax_mha._src.masks import Mask, Occupancy
from flax_mha._src.masks.base import part_axes
from flax_mha._src.math.scores import ScoreRule

# Size of the squares whose occupancy is computed if the mask is known while tracing; a
# tile may begin at each of them.
CELL = 128


class TileShape(NamedTuple):
    """The largest shape of a tile, and the number of bands into which its rows are cut;
    see `Tiling`.
    """

    height: int
    width: int
    bands: int = 1


class Tiling(NamedTuple):
    """The scores of one head cut into rows of tiles.

    A tile has `height` rows and `width` columns. The columns are divided into cells,
    and a tile may begin at any cell. The rows of a tile are divided into bands, and
    only the bands that it needs are computed. Example: with a height of 1024, a width
    of 512 and 2 bands, a causal mask has two tiles on the diagonal of each row of
    tiles: the first needs all 1024 rows, the second only its lower band of 512 rows.
    """

    lengths: tuple[int, int]  # T and S, before padding
    rows: int  # number of rows of tiles
    height: int  # rows of a tile
    width: int  # columns of a tile
    bands: int  # number of bands in a tile
    cells: int  # number of cells side by side, over all keys
    cell_width: int  # columns of a cell

    @property
    def shape(self) -> tuple[int, int]:
        """T and S after padding."""
        return self.rows * self.height, self.cells * self.cell_width

    @property
    def inside(self) -> tuple[int, int] | None:
        """`lengths`, the sizes without padding; None if the tiles need no padding."""
        return None if self.shape == self.lengths else self.lengths

    @property
    def band_height(self) -> int:
        return self.height // self.bands


def tiling_of(
    lengths: tuple[int, int], largest: TileShape, fine: bool = False
) -> Tiling:
    """Makes a tiling of T x S (`lengths`) with the fewest tiles no larger than
    `largest`, and with the least padding.

    With `fine`, tiles are divided into bands and cells (see `Tiling`), which needs a
    mask that is known while tracing.
    """
    bands = largest.bands if fine else 1
    rows, height = _cut_up(lengths[0], largest.height, bands)
    columns, width = _cut_up(lengths[1], largest.width, 1)
    cells_of_tile = 1
    if fine:
        cells_of_tile = max(width // CELL, 1)
        while width % cells_of_tile:
            cells_of_tile -= 1
    return Tiling(
        lengths=lengths,
        rows=rows,
        height=height,
        width=width,
        bands=bands,
        cells=columns * cells_of_tile,
        cell_width=width // cells_of_tile,
    )


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """Cuts `length` into the fewest equal pieces of at most `largest`; returns their
    number and their size.

    The size is a multiple of 16 * `bands`, so the last piece may need padding. But if
    one piece is enough and `bands` is 1, the size is `length`.
    """
    count = max(-(-length // largest), 1)
    multiple = 1
    if count > 1 or bands > 1:
        multiple = 16 * bands
    size = max(-(-length // (multiple * count)), 1) * multiple
    # Sizes are rounded up, so fewer pieces may be enough.
    count = max(-(-length // size), 1)
    return count, size


def occupancy(
    tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]
) -> Occupancy:
    """Computes whether any, and whether all, scores are visible in each rectangle that
    is one band high and one cell wide.
    """
    grid = Grid(
        counts=(tiling.rows * tiling.bands, tiling.cells),
        tile_shape=(tiling.band_height, tiling.cell_width),
        offsets=offsets,
        lengths=tiling.inside,
    )
    everything = np.ones(grid.counts, bool)
    mask = padded_mask(mask, tiling)
    if mask is None:
        return Occupancy(everything, everything)
    some, full = mask.occupancy(grid)
    # A mask's own result may have an axis of length 1; `&` broadcasts it.
    return Occupancy(some & everything, full & everything)


def padded_mask(mask: Mask | None, tiling: Tiling) -> Mask | None:
    """Extends one head's mask to the length of whole tiles, and hides the padding."""
    if tiling.inside is None:
        return mask
    inside = InsideMask(*tiling.lengths)
    if mask is None:
        return inside
    return mask.map_arrays(lambda x, axes: _padded(x, axes, tiling.shape)) & inside


def _padded(x: Array | np.ndarray, axes: str, shape: tuple[int, int]) -> Any:
    """Pads an array in one head's mask from T and S to `shape`, the lengths of whole
    tiles, by repeating its last entries.

    `axes` names its axes, such as "T|1 S|1"; an axis that may have length 1 (`|1`), and
    has it, stays as it is.
    """
    sizes = {"T": shape[0], "S": shape[1]}
    widths = []
    for name, size in zip(part_axes(axes), x.shape, strict=False):
        padding = sizes.get(name[0], size) - size
        is_broadcast = name.endswith("|1") and size == 1
        if is_broadcast:
            padding = 0
        widths.append((0, padding))
    if not any(after for _, after in widths):
        return x
    # An array without entries has no last one to repeat.
    mode = "edge" if x.size else "constant"
    return jnp.pad(x, widths, mode=mode)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InsideMask(Mask):
    """A mask that hides padding: the first `queries` rows and `keys` columns are
    visible.
    """

    queries: int = dataclasses.field(metadata={"static": True})
    keys: int = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return (tile.rows < self.queries) & (tile.columns < self.keys)

    def occupancy(self, grid: Grid) -> Occupancy:
        some = np.ones(grid.counts, bool)
        full = np.ones(grid.counts, bool)
        # With the grid's `lengths`, bounds would end at the last query or key.
        unlimited = grid._replace(lengths=None)
        for axis, length in enumerate((self.queries, self.keys)):
            first, last = unlimited.bounds(axis)
            some = some & (first < length)
            full = full & (last < length)
        return Occupancy(some, full)


def _join_cells(
    some: np.ndarray, full: np.ndarray, tiling: Tiling
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Converts `some` and `full` [rows, bands, cells], whether any and all scores are
    visible, from cells to tiles.

    Returns both arrays for tiles [rows, bands, tiles], and the first cell of each tile
    [rows, tiles].
    """
    cells_of_tile = tiling.width // tiling.cell_width
    start = _starts(np.asarray(some.any(1)), cells_of_tile)
    # Indices [rows, bands, tiles, cells of a tile].
    row = np.arange(tiling.rows)[:, None, None, None]
    band = np.arange(tiling.bands)[None, :, None, None]
    cells = start[:, None, :, None] + np.arange(cells_of_tile)
    cells = np.minimum(cells, tiling.cells - 1)
    is_tile = (start < tiling.cells)[:, None]
    some_of_tiles = some[row, band, cells].any(-1) & is_tile
    full_of_tiles = full[row, band, cells].all(-1) & is_tile
    return some_of_tiles, full_of_tiles, start


def _starts(some: np.ndarray, width: int) -> np.ndarray:
    """Chooses where tiles, `width` cells wide, begin, so that they cover all True cells
    of `some` [rows, cells].

    Each tile begins at the next True cell, if that takes fewer tiles than beginning at
    multiples of `width`.

    Returns:
      The first cell of each tile [rows, tiles]; an entry equal to the number of cells
      means no tile.
    """
    rows, cells = some.shape
    aligned = some.reshape(rows, -1, width).any(2)
    starts = np.sort(np.where(aligned, np.arange(0, cells, width), cells), axis=1)

    # The next True cell at or after each cell, and `cells` after the last one.
    following = np.where(some, np.arange(cells), cells)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    following = np.pad(following, ((0, 0), (0, 1)), constant_values=cells)

    greedy = np.full_like(starts, cells)
    place = np.zeros(rows, int)  # one past the last cell that a tile covers
    for step in range(starts.shape[1]):
        start = following[np.arange(rows), place]
        # At the end a tile begins earlier, if there is room.
        fits = np.minimum(start, cells - width)
        fits = np.maximum(fits, place)
        greedy[:, step] = np.where(start < cells, fits, cells)
        place = np.minimum(greedy[:, step] + width, cells)
        if (place == cells).all():
            break

    # Without room, the last tile would reach beyond the cells.
    last = np.where(greedy < cells, greedy, 0).max(1)
    is_inside = last + width <= cells
    is_shorter = (greedy < cells).sum(1) < (starts < cells).sum(1)
    is_better = is_inside & is_shorter
    starts = np.where(is_better[:, None], greedy, starts)
    most_tiles = (starts < cells).sum(1).max(initial=0)
    return starts[:, : max(most_tiles, 1)]


class TileBand(NamedTuple):
    """The rows of a tile that are computed, `first` to `end` (exclusive)."""

    first: int
    end: int


class RowTiles(NamedTuple):
    """One head's tiles to visit in each row of tiles: full, then partial; entries after
    `num_tiles` are arbitrary.
    """

    column: IntMatrix  # first column of each tile [rows, tiles]
    # First row, and one past the last, to compute [rows, tiles, 2]; None if not known
    # while tracing.
    band: Any
    # Number of tiles that are visible throughout.
    num_full: Int[Array, " rows"] | np.ndarray
    # Number of full tiles, and partial ones, which must be masked.
    num_tiles: Int[Array, " rows"] | np.ndarray


def tiles_of(
    tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]
) -> RowTiles:
    """Lists the tiles to visit for one head, in NumPy arrays if its mask is known while
    tracing.
    """
    cells = occupancy(tiling, mask, offsets)
    shape = (tiling.rows, tiling.bands, tiling.cells)
    some = cells.any_visible.reshape(shape)
    full = cells.all_visible.reshape(shape)
    is_traced = isinstance(some, jax.core.Tracer)
    xp: Any = np
    if is_traced:
        xp = jnp
        # The tiling was made without `fine`: tiles are cells.
        start = np.broadcast_to(np.arange(tiling.cells), (tiling.rows, tiling.cells))
    else:
        some, full, start = _join_cells(np.asarray(some), np.asarray(full), tiling)
    is_full = (some & full).all(1)
    is_visible = some.any(1)
    # Full 0, partial 1, empty 2: the order in which tiles are visited.
    rank = 2 - is_full.astype(np.int32) - is_visible.astype(np.int32)
    order = xp.argsort(rank, axis=1, stable=True)
    column = xp.asarray(start.astype(np.int32) * np.int32(tiling.cell_width))
    column = xp.take_along_axis(column, order, 1)
    num_full = is_full.sum(1, dtype=np.int32)
    num_tiles = is_visible.sum(1, dtype=np.int32)
    if is_traced:
        return RowTiles(column, None, num_full, num_tiles)

    # Known while tracing: drop the empty tiles, and compute only the bands in use.
    count = max(int(num_tiles.max(initial=0)), 1)
    order = order[:, :count]
    is_tile = np.arange(count) < num_tiles[:, None]
    column = np.where(is_tile, column[:, :count], 0)
    first = some.argmax(1)
    end = tiling.bands - some[:, ::-1].argmax(1)
    first = np.take_along_axis(first, order, 1)
    end = np.take_along_axis(end, order, 1)
    band = np.stack([first, end], -1) * tiling.band_height
    return RowTiles(column, band, num_full, num_tiles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """The tiles that each row of tiles visits, in order: full tiles, then partial ones,
    which must be masked.
    """

    column: Int[Array, "... rows tiles"] | np.ndarray  # first column of each tile
    # Index of each tile's band in `full_bands`, or in `partial_bands` for partial
    # tiles.
    band: Int[Array, "... rows tiles"] | np.ndarray
    num_full: Int[Array, "... rows"] | np.ndarray  # number of full tiles in each row
    # Number of full and partial tiles in each row.
    num_tiles: Int[Array, "... rows"] | np.ndarray
    # The distinct bands of full tiles; empty if it is known while tracing that no tile
    # is full.
    full_bands: tuple[TileBand, ...] = dataclasses.field(metadata={"static": True})
    # The distinct bands of partial tiles; empty if it is known that no tile is partial.
    partial_bands: tuple[TileBand, ...] = dataclasses.field(metadata={"static": True})
    # True if it is known while tracing that every row has one tile, and that these are
    # all full or all partial.
    single: bool = dataclasses.field(metadata={"static": True})


def static_block_mask(
    tiling: Tiling, masks: Sequence[Mask | None], offsets: tuple[int, int]
) -> BlockMask:
    """Makes the block mask [heads, ...] of heads whose masks are all known while
    tracing.
    """
    with jax.ensure_compile_time_eval():
        heads = [tiles_of(tiling, mask, offsets) for mask in masks]
    # Heads may visit different numbers of tiles.
    count = max(head.column.shape[1] for head in heads)
    columns = []
    parts = []
    for head in heads:
        padding = (0, count - head.column.shape[1])
        columns.append(np.pad(head.column, [(0, 0), padding]))
        parts.append(np.pad(head.band, [(0, 0), padding, (0, 0)]))
    column = np.stack(columns)
    part = np.stack(parts)
    num_full = np.stack([head.num_full for head in heads])
    num_tiles = np.stack([head.num_tiles for head in heads])

    # With at most one tile per row, rows without a tile and full tiles among partial
    # ones are treated as partial.
    if count == 1 and num_tiles.any():
        whole = (TileBand(0, tiling.height),)
        ones = np.ones_like(num_full)
        all_full = bool(num_full.all())
        return BlockMask(
            column=column,
            band=np.zeros_like(column),
            num_full=ones if all_full else np.zeros_like(num_full),
            num_tiles=ones,
            full_bands=whole if all_full else (),
            partial_bands=() if all_full else whole,
            single=True,
        )

    number = np.arange(count)
    is_full = number < num_full[..., None]
    is_partial = ~is_full & (number < num_tiles[..., None])
    band = np.zeros(part.shape[:-1], np.int32)
    full_bands = _number_bands(part, is_full, band)
    partial_bands = _number_bands(part, is_partial, band)
    return BlockMask(
        column=column,
        band=band,
        num_full=num_full,
        num_tiles=num_tiles,
        full_bands=full_bands,
        partial_bands=partial_bands,
        single=False,
    )


def _number_bands(
    part: np.ndarray, chosen: np.ndarray, band: np.ndarray
) -> tuple[TileBand, ...]:
    """Returns the distinct bands of the `chosen` tiles, and writes each such tile's
    index among them into `band`.

    `part` [..., 2] holds the first row of each tile, and one past the last.
    """
    bands = sorted({TileBand(*rows) for rows in part[chosen].tolist()})
    for index, one in enumerate(bands):
        band[chosen & (part == one).all(-1)] = index
    return tuple(bands)


def dynamic_block_mask(
    tiling: Tiling, mask: Mask | None, offsets: tuple[Scalar, Scalar]
) -> BlockMask:
    """Makes the block mask of one head as part of the program, for a mask or offsets
    known only at run time.
    """
    tiles = tiles_of(tiling, mask, offsets)
    # Which bands a tile needs is not known, so each tile has one band.
    whole = (TileBand(0, tiling.height),)
    return BlockMask(
        column=tiles.column,
        band=jnp.zeros_like(tiles.column),
        num_full=tiles.num_full,
        num_tiles=tiles.num_tiles,
        full_bands=whole,
        partial_bands=whole,
        single=False,
    )


@functools.lru_cache(maxsize=256)
def block_mask_of_one(
    tiling: Tiling, mask: Mask | None, offsets: tuple[int, int]
) -> BlockMask:
    """Lists the tiles to visit for a mask without arrays, and caches the list: one
    `BlockMask` [1, ...], which all heads share.
    """
    return static_block_mask(tiling, (mask,), offsets)


# How a tile's part is cut out of an array. "queries": the rows [t, F] of [T, F];
# "queries transposed": the same rows as [F, t]. "keys": the columns [s, F] of [S, F];
# "keys transposed": the columns [F, s] of [F, S]. "scores": the tile itself, of [T | 1,
# S | 1]. "whole": all of it.
ArgumentKind = Literal[
    "queries", "queries transposed", "keys", "keys transposed", "scores", "whole"
]


class TileVisit(NamedTuple):
    """A tile, or some bands of one, to compute; `first` is the offset of its first
    query within the row of tiles.
    """

    first: int
    tile: Tile

    def rows(self, x: Array, axis: int = 0) -> Array:
        """Returns the tile's part of `x`, whose `axis` has an entry for each query of
        the row of tiles.
        """
        height = self.tile.shape[0]
        if x.shape[axis] == height:
            return x
        return lax.slice_in_dim(x, self.first, self.first + height, axis=axis)

    def put_rows(self, x: Array, part: Array, axis: int = 0) -> Array:
        """Returns `x` with `part` in place of what `rows(x, axis)` returns."""
        if x.shape == part.shape:
            return part
        return lax.dynamic_update_slice_in_dim(x, part, self.first, axis)

    def cut(self, kind: ArgumentKind, x: Array) -> Array:
        """Cuts the part that this visit needs out of `x`. For both kinds of queries,
        `x` must already be cut to the row of tiles.
        """
        axis = int(kind.endswith("transposed"))
        if kind.startswith("queries"):
            return self.rows(x, axis)
        if kind.startswith("keys"):
            return self.tile.cut_columns(x, axis)
        if kind == "scores":
            return self.tile.cut(x)
        return x

    def add(self, kind: ArgumentKind, x: Array, part: Array) -> Array:
        """Adds a tile's `part` to `x`, the running sum that `Argument.start` created;
        for "queries", `x` covers one row of tiles.
        """
        part = part.astype(x.dtype)
        axis = int(kind.endswith("transposed"))
        if kind.startswith("queries"):
            return self.put_rows(x, self.rows(x, axis) + part, axis)
        if kind.startswith("keys"):
            # Sums over keys are [F, S], see `Argument.is_summed_transposed`.
            if kind == "keys":
                part = part.T
            features, width = part.shape
            columns = Tile(0, self.tile.column, (features, width))
            return columns.add(x, part)
        if kind == "scores":
            return self.tile.add(x, part)
        return x + part


def over_keys(
    tiles: BlockMask,
    tiling: Tiling,
    rule: ScoreRule,
    i: Int[Array, ""],
    step: Callable[[TileVisit, ScoreRule, T], T],
    state: T,
) -> T:
    """Runs `state = step(visit, rule, state)` for each tile to visit in row `i` of
    tiles; returns the last state.

    `tiles` is the block mask of the row. For full tiles, `step` gets the rule without
    its mask.
    """

    def visit(band: TileBand, rule: ScoreRule, n: Scalar, state: T) -> T:
        row = i * tiling.height + band.first
        column = element(tiles.column, n)
        shape = (band.end - band.first, tiling.width)
        tile = Tile(row, column, shape, rule.offsets.values, tiling.inside)
        return step(TileVisit(band.first, tile), rule, state)

    def visit_all(
        bands: tuple[TileBand, ...], rule: ScoreRule, first: Any, end: Any, state: T
    ) -> T:
        visits = [functools.partial(visit, band, rule) for band in bands]

        def visit_one(n: Scalar, state: T) -> T:
            if len(visits) == 1:
                return visits[0](n, state)
            # A band is a shape, so each has a branch of its own.
            return lax.switch(element(tiles.band, n), visits, n, state)

        if tiles.single:
            return visit_one(0, state)
        return lax.fori_loop(first, end, visit_one, state)

    # Full tiles first, without a mask, then partial tiles.
    mask = padded_mask(rule.mask, tiling) if tiles.partial_bands else None
    if tiles.full_bands:
        unmasked = rule.replace(mask=None)
        state = visit_all(tiles.full_bands, unmasked, 0, tiles.num_full, state)
    if tiles.partial_bands:
        masked = rule.replace(mask=mask)
        first = tiles.num_full
        end = tiles.num_tiles
        state = visit_all(tiles.partial_bands, masked, first, end, state)
    return state


def element(x: Any, place: Scalar) -> Int[Array, ""]:
    """Reads x[place] from a vector, without the operations that JAX adds for negative
    indices.
    """
    first = [jnp.asarray(place, jnp.int32)]
    return lax.dynamic_slice(x, first, (1,), allow_negative_indices=False).reshape(())


def by_row(tiling: Tiling, tiles: BlockMask, *arrays: Array | None) -> tuple:
    """Returns the inputs of a scan over rows of tiles: each row's number, block mask
    and part of `arrays` [T, ...].
    """
    numbers = jnp.arange(tiling.rows, dtype=jnp.int32)
    parts = []
    for x in arrays:
        if x is not None:
            x = x.reshape(tiling.rows, tiling.height, *x.shape[1:])
        parts.append(x)
    return numbers, tiles, *parts
