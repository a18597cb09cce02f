"""How one head is cut into tiles, and which of them are visited: what blockwise needs to know before it starts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_mha._tiles import BoolMatrix, Grid, IntMatrix, Scalar
from flax_mha.masks import LengthMask, Mask, Occupancy

# What visiting a tile costs, in scores: as measured on a CPU, n scores of a tile take time in proportion to n + STEP.
STEP = 96 * 1024
# How much longer scores take that must be masked.
MASKED = 1.25


class Tiling(NamedTuple):
    """Rows and columns of a tile at most, and how many bands its rows are cut into: a tile may need some only."""

    height: int
    width: int
    bands: int = 1


class Layout(NamedTuple):
    """What is known while tracing: the lengths before padding, and the tiles."""

    lengths: tuple[int, int]
    counts: tuple[int, int]
    tile_shape: tuple[int, int]
    bands: int

    @property
    def shape(self) -> tuple[int, int]:
        """The lengths after padding."""
        return Grid(self.counts, self.tile_shape).shape

    @property
    def band_height(self) -> int:
        """Rows of a band."""
        return self.tile_shape[0] // self.bands

    def band_grid(self, offset: Scalar) -> Grid:
        """The bands, each as if it were a tile."""
        return Grid((self.counts[0] * self.bands, self.counts[1]), (self.band_height, self.tile_shape[1]), offset)


def layout(lengths: tuple[int, int], largest: Tiling) -> Layout:
    """The fewest tiles no larger than `largest`, all alike, and as little padding as they allow."""
    rows, height = _cut_up(lengths[0], largest.height, largest.bands)
    columns, width = _cut_up(lengths[1], largest.width, 1)
    return Layout(lengths, (rows, columns), (height, width), largest.bands)


def _cut_up(length: int, largest: int, bands: int) -> tuple[int, int]:
    """How many pieces of which size cover `length`, one at least; sizes are multiples of 16 where anything is cut."""
    count = max(-(-length // largest), 1)
    multiple = 16 * bands if count > 1 or bands > 1 else 1
    size = max(-(-length // (multiple * count)), 1) * multiple
    return max(-(-length // size), 1), size


class _Visits(NamedTuple):
    """Which tiles are full, which are to be masked, and the first and one past the last band that these need."""

    full: BoolMatrix
    partial: BoolMatrix
    first: IntMatrix
    end: IntMatrix


def _visits(layout: Layout, mask: Mask | None, offset: Scalar) -> _Visits:
    """Of one head; numpy stays numpy, so that what is static is decided while tracing."""
    grid, mask = layout.band_grid(offset), to_the_grid(mask, layout)
    everything = np.ones(grid.counts, bool)
    occupancy = Occupancy(everything, everything) if mask is None else mask.occupancy(grid)
    split = (layout.counts[0], layout.bands, layout.counts[1])
    some, full = (x.reshape(split) for x in (occupancy.some & everything, occupancy.full & everything))
    some_of_tile, all_of_tile = some.any(1), (some & full).all(1)
    first, last = some.argmax(1), some[:, ::-1].argmax(1)
    return _Visits(all_of_tile, some_of_tile & ~all_of_tile, first, layout.bands - last)  # type: ignore[arg-type]


def cheapest(lengths: tuple[int, int], mask: Mask | None, offset: int, tilings: Sequence[Tiling]) -> Layout:
    """The layout with the least to compute for a mask that is known while tracing."""

    def cost(candidate: Layout) -> float:
        visits = _visits(candidate, mask, offset)
        full, partial = np.asarray(visits.full), np.asarray(visits.partial)
        bands = candidate.bands * full.sum() + MASKED * ((visits.end - visits.first) * partial).sum()
        return (full.sum() + partial.sum()) * STEP + bands * candidate.band_height * candidate.tile_shape[1]

    return min((layout(lengths, tiling) for tiling in tilings), key=cost)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      order: Columns of tiles, in each row the full ones, the partial ones, the empty ones.
      part: For each of these the number of its part in `parts`.
      full: How many of a row are full.
      some: How many are not empty.
      parts: First and one past the last row, within the tile, that tiles to mask need.
      any_full: Whether there is a full tile at all, as far as it is known while tracing.
      any_partial: The same for tiles to mask.
    """

    order: Int[Array, "... rows columns"]
    part: Int[Array, "... rows columns"]
    full: Int[Array, "... rows"]
    some: Int[Array, "... rows"]
    parts: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    any_full: bool = dataclasses.field(metadata={"static": True})
    any_partial: bool = dataclasses.field(metadata={"static": True})


def plan(layout: Layout, mask: Mask | None, offset: Scalar) -> Plan:
    """Of one head; decided while tracing where the mask is static, else by numbers that bound the loops."""
    full, partial, first, end = _visits(layout, mask, offset)
    static = isinstance(full, np.ndarray)
    ranges = [(0, layout.bands)]
    part = np.zeros(layout.counts, np.int32)
    if static and partial.any():
        ranges = sorted(set(zip(first[partial].tolist(), end[partial].tolist(), strict=True)))
        for number, (a, b) in enumerate(ranges):
            part[partial & (first == a) & (end == b)] = number
    argsort = np.argsort if static else jnp.argsort
    order = argsort(2 - 2 * full.astype(np.int32) - partial.astype(np.int32), axis=1, stable=True)
    return Plan(
        jnp.asarray(order, jnp.int32),
        jnp.asarray(np.take_along_axis(part, np.asarray(order), 1) if static else part),
        jnp.asarray(full.sum(1), jnp.int32),
        jnp.asarray(full.sum(1) + partial.sum(1), jnp.int32),
        parts=tuple((a * layout.band_height, b * layout.band_height) for a, b in ranges),
        any_full=not static or bool(full.any()),
        any_partial=not static or bool(partial.any()),
    )


def to_the_grid(mask: Mask | None, layout: Layout) -> Mask | None:
    """The mask over whole tiles: what was added to fill them is hidden."""
    if layout.shape == layout.lengths:
        return mask
    inside = LengthMask(key_value_lengths=layout.lengths[1], query_lengths=layout.lengths[0])
    return inside if mask is None else mask.padded(layout.shape) & inside
