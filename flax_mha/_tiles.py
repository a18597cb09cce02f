"""The geometry of tiles: rectangles of the score matrix of one head, and the grid that they form."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

Scalar = int | Int[Array, ""]
BoolMatrix = Bool[Array, "rows columns"] | np.ndarray
IntMatrix = Int[Array, "rows columns"] | np.ndarray


class Tile(NamedTuple):
    """A rectangle of the score matrix of one head: first row, first column, shape; row i is query i."""

    row: Scalar
    column: Scalar
    shape: tuple[int, int]

    @property
    def rows(self) -> Int[Array, "t 1"]:
        """Row numbers, one below the other."""
        return self.row + lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0)

    @property
    def columns(self) -> Int[Array, "1 s"]:
        """Column numbers, one beside the other."""
        return self.column + lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)

    def cut(self, x: Array) -> Array:
        """The tile's part of `x` [T | 1, S | 1]; an axis of length 1 is broadcast and stays whole."""
        for axis, start in enumerate((self.row, self.column)):
            if x.shape[axis] != 1:
                x = lax.dynamic_slice_in_dim(x, start, self.shape[axis], axis, allow_negative_indices=False)
        return x

    def add(self, x: Array, part: Array) -> Array:
        """`x` with `part` added where `cut` takes it from."""
        origin = (jnp.asarray(x, jnp.int32) for x in (self.row, self.column))
        start = [first * 0 if n == 1 else first for n, first in zip(x.shape, origin, strict=True)]
        return lax.dynamic_update_slice(x, self.cut(x) + part, start, allow_negative_indices=False)


class Grid(NamedTuple):
    """The score matrix [T, S] of one head cut into tiles; query i stands at position `query_offset + i`."""

    counts: tuple[int, int]
    tile_shape: tuple[int, int]
    query_offset: Scalar = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        return self.counts[0] * self.tile_shape[0], self.counts[1] * self.tile_shape[1]

    def tile(self, i: Scalar, j: Scalar) -> Tile:
        """The tile in row `i` and column `j` of the grid."""
        return Tile(i * self.tile_shape[0], j * self.tile_shape[1], self.tile_shape)

    def bounds(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last row (axis 0, shape [rows, 1]) or column (axis 1, shape [1, columns]) of the tiles."""
        first = np.arange(self.counts[axis], dtype=np.int32) * np.int32(self.tile_shape[axis])
        first = np.expand_dims(first, 1 - axis)
        return first, first + np.int32(self.tile_shape[axis] - 1)

    def position_bounds(self) -> tuple[IntMatrix, IntMatrix]:
        """First and last query position of the tiles, shape [rows, 1]."""
        first, last = self.bounds(0)
        return first + self.query_offset, last + self.query_offset


def readable(x: Array | np.ndarray) -> bool:
    """Whether values are known while tracing, and to this process."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def pad(x: Array | np.ndarray, shape: tuple[int, int]) -> Array:
    """`x` [T | 1, S | 1] lengthened with zeros to `shape`; axes of length 1 are broadcast and stay."""
    widths = [(0, 0 if size == 1 else length - size) for size, length in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else jnp.asarray(x)


def array_by_head(x: Any, groups: tuple[int, int]) -> Any:
    """[B..., N | 1, ., .] -> [B..., K | 1, G | 1, ., .]."""
    return x.reshape(*x.shape[:-3], *(groups if x.shape[-3] != 1 else (1, 1)), *x.shape[-2:])
