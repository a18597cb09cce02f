"""How one head is cut into tiles, and which of them are visited: what blockwise needs to know before it starts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_mha._tiles import Grid, Scalar
from flax_mha.masks import LengthMask, Mask, Occupancy


class Layout(NamedTuple):
    """What is known while tracing: the lengths before padding, and the tiles."""

    lengths: tuple[int, int]
    counts: tuple[int, int]
    tile_shape: tuple[int, int]


def layout(lengths: tuple[int, int], largest_tile: tuple[int, int]) -> Layout:
    """The fewest tiles no larger than `largest_tile`, all alike, and as little padding as they allow."""
    (rows, height), (columns, width) = (_cut_up(*axis) for axis in zip(lengths, largest_tile, strict=True))
    return Layout(lengths, (rows, columns), (height, width))


def _cut_up(length: int, largest: int) -> tuple[int, int]:
    """How many pieces of which size cover `length`, one at least; sizes are multiples of 16 where there are several."""
    count = -(-length // largest)
    size = max(length, 1) if count <= 1 else -(-length // (16 * count)) * 16
    return max(-(-length // size), 1), size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """In which order each row of tiles meets its keys: the full tiles first, then those to mask; empty ones never.

    Attributes:
      order: Columns of tiles, in each row the full ones, the partial ones, the empty ones.
      full: How many of a row are full.
      some: How many are not empty.
      any_full: Whether there is a full tile at all, as far as it is known while tracing.
      any_partial: The same for tiles to mask.
    """

    order: Int[Array, "... rows columns"]
    full: Int[Array, "... rows"]
    some: Int[Array, "... rows"]
    any_full: bool = dataclasses.field(metadata={"static": True})
    any_partial: bool = dataclasses.field(metadata={"static": True})


def plan(layout: Layout, mask: Mask | None, offset: Scalar) -> Plan:
    """Of one head; decided while tracing where the mask is static, else by numbers that bound the loops."""
    mask = to_the_grid(mask, layout)
    everything = np.ones(layout.counts, bool)
    occupancy = Occupancy(everything, everything)
    if mask is not None:
        occupancy = mask.occupancy(Grid(layout.counts, layout.tile_shape, offset))
    some = occupancy.some & everything
    full, partial = some & occupancy.full, some & ~occupancy.full
    static = isinstance(full, np.ndarray)
    # numpy stays numpy, so that what is static is decided here.
    argsort = np.argsort if static else jnp.argsort
    return Plan(
        jnp.asarray(argsort(2 - 2 * full.astype(np.int32) - partial.astype(np.int32), axis=1, stable=True), jnp.int32),
        jnp.asarray(full.sum(1), jnp.int32),
        jnp.asarray(some.sum(1), jnp.int32),
        any_full=not static or bool(full.any()),
        any_partial=not static or bool(partial.any()),
    )


def to_the_grid(mask: Mask | None, layout: Layout) -> Mask | None:
    """The mask over whole tiles: what was added to fill them is hidden."""
    grid = Grid(layout.counts, layout.tile_shape)
    if grid.shape == layout.lengths:
        return mask
    inside = LengthMask(key_value_lengths=layout.lengths[1], query_lengths=layout.lengths[0])
    return inside if mask is None else mask.padded(grid.shape) & inside
