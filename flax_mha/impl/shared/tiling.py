"""How the scores of one head are cut into tiles."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from flax_mha.core.tile import Grid, Offsets, Scalar, Tile
from flax_mha.masks import Mask, Occupancy

# Rows and columns of the squares for which it is decided whether they are empty, where that is known while tracing.
CELL = 128


class TileShape(NamedTuple):
    """What a tile is at most.

    Attributes:
      height: Rows.
      width: Columns that lie side by side: a run.
      bands: How many bands its rows are cut into; a tile may need only some of them.
      runs: How many runs it may gather.
    """

    height: int
    width: int
    bands: int = 1
    runs: int = 1


class Tiling(NamedTuple):
    """How the scores of one head are cut into rows of tiles.

    Each row of tiles is divided into `bands` horizontally and into `cells` vertically. A tile has `height` rows and up
    to `runs` runs of `width` adjacent columns; a run may begin at any cell, and a tile may be cut to the bands that it
    needs. Example: with a height of 1024, a width of 512 and 2 bands, a causal mask has two tiles on the diagonal of
    each row of tiles: the first needs all 1024 rows, the second only its lower band of 512 rows.

    Attributes:
      lengths: T and S, before padding.
      rows: How many rows of tiles there are.
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
        """T and S after padding."""
        return self.rows * self.height, self.cells * self.cell_width

    @property
    def has_padding(self) -> bool:
        """Whether tiles reach beyond T or S."""
        return self.shape != self.lengths

    @property
    def band_height(self) -> int:
        """Rows of a band."""
        return self.height // self.bands

    @property
    def run_cells(self) -> int:
        """How many cells wide a run is."""
        return self.width // self.cell_width

    def grid(self, offsets: Offsets) -> Grid:
        """The pieces for which it is decided whether they are empty: a band high, a cell wide."""
        counts, shape = (self.rows * self.bands, self.cells), (self.band_height, self.cell_width)
        return Grid(counts, shape, offsets, self.lengths if self.has_padding else None)

    def tile(self, row: Scalar, column: Scalar | tuple[Scalar, ...], shape: tuple[int, int], offsets: Offsets) -> Tile:
        """The tile of this shape that begins there."""
        return Tile(row, column, shape, offsets, self.lengths if self.has_padding else None)


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
    return Tiling(lengths, rows, height, width, bands, largest.runs, columns * parts, width // parts)


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """The number (at least 1) and size of equal pieces that cover `length`; sizes of several are multiples of 16."""
    count = max(-(-length // largest), 1)
    multiple = 16 * bands if count > 1 or bands > 1 else 1
    size = max(-(-length // (multiple * count)), 1) * multiple
    return max(-(-length // size), 1), size


def padded_mask(mask: Mask | None, tiling: Tiling) -> Mask | None:
    """The mask of one head over whole tiles, which masks the padding that fills them."""
    if not tiling.has_padding:
        return mask
    inside = InsideMask(*tiling.lengths)
    return inside if mask is None else mask.map_arrays(lambda x, axes: _padded(x, axes, tiling.shape)) & inside


def _padded(x: Array | np.ndarray, axes: str, shape: tuple[int, int]) -> Any:
    """An array of one head's mask, with entries for the rows and columns of padding that are like the last one."""
    sizes = {"T": shape[0], "S": shape[1]}
    names = [name for name in axes.split() if name not in "BN"]
    broadcast = [name.endswith("|1") and size == 1 for name, size in zip(names, x.shape, strict=False)]
    targets = [
        size if shared else sizes.get(name[0], size)
        for name, size, shared in zip(names, x.shape, broadcast, strict=False)
    ]
    widths = [(0, target - size) for target, size in zip(targets, x.shape, strict=False)]
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
