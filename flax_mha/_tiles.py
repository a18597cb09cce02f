"""The geometry of tiles: parts of the score matrix of one head, and the grid that rectangles of it form."""

import functools
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
    """A part of the score matrix of one head: first row, first column, shape; row i is query i.

    With several first columns it is gathered from as many runs of columns, which are all of one length.
    """

    row: Scalar
    column: Scalar | tuple[Scalar, ...]
    shape: tuple[int, int]

    @property
    def runs(self) -> tuple[Scalar, ...]:
        """The first columns of its runs."""
        return self.column if isinstance(self.column, tuple) else (self.column,)

    @property
    def rows(self) -> Int[Array, "t 1"]:
        """Row numbers, one below the other."""
        return self.row + lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0)

    @property
    def columns(self) -> Int[Array, "1 s"]:
        """Column numbers, one beside the other."""
        numbers = lax.broadcasted_iota(jnp.int32, (1, self.shape[1] // len(self.runs)), 1)
        return _joined([first + numbers for first in self.runs], 1)

    def cut(self, x: Array) -> Array:
        """The tile's part of `x` [T | 1, S | 1]; an axis of length 1 is broadcast and stays whole."""
        if x.shape[0] != 1:
            x = lax.dynamic_slice_in_dim(x, self.row, self.shape[0], 0, allow_negative_indices=False)
        return x if x.shape[1] == 1 else self.cut_columns(x, 1)

    def cut_columns(self, x: Array, axis: int) -> Array:
        """The tile's part of an axis with a place for every column."""
        width = self.shape[1] // len(self.runs)
        cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=width, axis=axis, allow_negative_indices=False)
        return _joined([cut(x, first) for first in self.runs], axis)

    def add(self, x: Array, part: Array) -> Array:
        """`x` with `part` added where `cut` takes it from."""
        row = jnp.asarray(0 if x.shape[0] == 1 else self.row, jnp.int32)
        runs = (0,) if x.shape[1] == 1 else self.runs
        for first, piece in zip(runs, jnp.split(part, len(runs), axis=1) if len(runs) > 1 else [part], strict=True):
            start = (row, jnp.asarray(first, jnp.int32))
            piece = piece + lax.dynamic_slice(x, start, piece.shape, allow_negative_indices=False)
            x = lax.dynamic_update_slice(x, piece, start, allow_negative_indices=False)
        return x


def _joined(pieces: list[Array], axis: int) -> Array:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, axis)


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
