"""The geometry of tiles, rectangles of the T x S scores of one head, and the grid that
they form.

Row i of the scores belongs to query i, column j to key j. Rows and columns are indices
into the arrays of a call. A *position* is an index into the sequence: query i has
position `offsets[0] + i`, and key j `offsets[1] + j`. Masks, `score_mod` and dropout
use positions; arrays are cut by rows and columns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.core.fields import static

Scalar = int | Int[Array, ""]
BoolMatrix = Bool[Array, "rows columns"] | np.ndarray
IntMatrix = Int[Array, "rows columns"] | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offsets:
    """The positions of the first query and the first key: each a static int, or an
    int32 array [B...].
    """

    query_array: Any = None  # position of the first query; None if it is an int
    key_array: Any = None  # position of the first key; None if it is an int
    # The ints; 0 for an array.
    numbers: tuple[int, int] = static(default=(0, 0))

    @classmethod
    def of(cls, query: Any, key: Any) -> "Offsets":
        query_array = None
        key_array = None
        query_number = 0
        key_number = 0
        if isinstance(query, int):
            query_number = query
        else:
            query_array = query
        if isinstance(key, int):
            key_number = key
        else:
            key_array = key
        return cls(query_array, key_array, (query_number, key_number))

    @property
    def values(self) -> tuple[Any, Any]:
        """Positions of the first query and the first key, as ints or arrays."""
        query, key = self.numbers
        if self.query_array is not None:
            query = self.query_array
        if self.key_array is not None:
            key = self.key_array
        return query, key

    @property
    def are_known(self) -> bool:
        """Whether both positions are ints, not arrays."""
        return self.query_array is None and self.key_array is None

    def moved(self, query: Any, key: Any) -> "Offsets":
        """Returns the offsets of a slice that begins `query` queries and `key` keys
        later.
        """
        first_query, first_key = self.values
        return Offsets.of(first_query + query, first_key + key)


class Tile(NamedTuple):
    """A rectangle of the scores of one head; its methods return positions and the parts
    of arrays that belong to it.
    """

    row: Scalar  # its first row
    column: Scalar  # its first column
    shape: tuple[int, int]  # number of its rows (t) and columns (s)
    offsets: tuple[Scalar, Scalar] = (0, 0)  # positions of query 0 and of key 0
    # T and S if the tile may reach beyond them, into padding. Padding gets the position
    # of the last query or key, so that users' functions are only called for positions
    # that exist.
    lengths: tuple[int, int] | None = None
    # Number S of slots of a ring cache: the key at position p is in column p mod S, and
    # slots that were never written have negative positions. `offsets` then holds the
    # position of the newest key, not of key 0.
    ring: int | None = None
    # The key of each score if every query lists its own keys; -1 means no key. Columns
    # are then places in these lists.
    indices: Int[Array, "t s"] | None = None

    @property
    def rows(self) -> Int[Array, "t 1"]:
        return self.row + lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0)

    @property
    def columns(self) -> Int[Array, "#t s"]:
        if self.indices is not None:
            return jnp.maximum(self.indices, 0)
        return self.column + lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)

    @property
    def query_positions(self) -> Int[Array, "#t #s"]:
        """Positions of the tile's queries, [t, 1]."""
        return self._within(self.rows, 0) + self.offsets[0]

    @property
    def key_positions(self) -> Int[Array, "#t #s"]:
        """Positions of the tile's keys: [1, s], or [t, s] with `indices`."""
        columns = self._within(self.columns, 1)
        if self.ring is None:
            return columns + self.offsets[1]
        # The newest position p with p mod S = column.
        newest = self.offsets[1]
        return newest - (newest - columns) % self.ring

    def _within(self, indices: Array, axis: int) -> Array:
        if self.lengths is None:
            return indices
        return jnp.minimum(indices, jnp.int32(max(self.lengths[axis] - 1, 0)))

    def cut(self, x: Array | np.ndarray) -> Array:
        """Returns the tile's part of `x` [T | 1, S | 1]; an axis of length 1 is kept,
        to be broadcast.
        """
        if x.shape[0] != 1:
            x = lax.dynamic_slice_in_dim(
                x, self.row, self.shape[0], 0, allow_negative_indices=False
            )
        if x.shape[1] == 1:
            return jnp.asarray(x)
        if self.indices is None:
            return self.cut_columns(x, 1)
        return jnp.take_along_axis(jnp.asarray(x), self.columns, axis=1, mode="clip")

    def map_positions(
        self, function: Callable[..., Array], *scores: Float[Array, "t s"]
    ) -> Array:
        """Calls `function(*scores, query position, key position)` for each score of the
        tile, with scalars (`vmap`).
        """
        if self.indices is not None:
            positions = jnp.broadcast_arrays(self.query_positions, self.key_positions)
            return jax.vmap(jax.vmap(function))(*scores, *positions)
        # A row has one query position, and a column has one key position.
        by_score = [0] * len(scores)
        along_row = jax.vmap(function, (*by_score, None, 0))
        by_tile = jax.vmap(along_row, (*by_score, 0, None))
        return by_tile(*scores, self.query_positions[:, 0], self.key_positions[0])

    def cut_columns(self, x: Array | np.ndarray, axis: int) -> Array:
        """Returns the entries of `x` for the tile's keys; `axis` is the axis of `x`
        with an entry for each key.
        """
        return lax.dynamic_slice_in_dim(
            x, self.column, self.shape[1], axis, allow_negative_indices=False
        )

    def add(self, x: Array, part: Array) -> Array:
        """Returns `x` with `part` added to the entries that `cut(x)` would return."""
        rows, columns = x.shape
        first_row = 0 if rows == 1 else self.row
        first_column = 0 if columns == 1 else self.column
        start = (
            jnp.asarray(first_row, jnp.int32),
            jnp.asarray(first_column, jnp.int32),
        )
        before = lax.dynamic_slice(x, start, part.shape, allow_negative_indices=False)
        part = part + before
        return lax.dynamic_update_slice(x, part, start, allow_negative_indices=False)


class Grid(NamedTuple):
    """The scores of one head cut into tiles of one shape; the last tiles may reach
    beyond T and S, into padding.
    """

    counts: tuple[int, int]  # rows and columns of tiles
    tile_shape: tuple[int, int]  # rows and columns of a tile
    offsets: tuple[Scalar, Scalar] = (0, 0)  # positions of query 0 and of key 0
    # T and S if tiles reach beyond them, otherwise None.
    lengths: tuple[int, int] | None = None

    def bounds(self, axis: int, positions: bool = False) -> tuple[IntMatrix, IntMatrix]:
        """Returns each tile's first and last row, [n, 1], if `axis` is 0, or first and
        last column, [1, n], if it is 1.

        With `positions`, returns the positions of these queries or keys instead.
        """
        size = np.int32(self.tile_shape[axis])
        first = np.arange(self.counts[axis], dtype=np.int32) * size
        first = np.expand_dims(first, 1 - axis)
        last = first + np.int32(size - 1)
        if self.lengths is not None:
            end = np.int32(max(self.lengths[axis] - 1, 0))
            first = np.minimum(first, end)
            last = np.minimum(last, end)
        if positions:
            return first + self.offsets[axis], last + self.offsets[axis]
        return first, last

    def distance_bounds(self) -> tuple[IntMatrix, IntMatrix]:
        """Returns, for each tile, the least and the greatest difference of key position
        minus query position.
        """
        q_first, q_last = self.bounds(0, positions=True)
        k_first, k_last = self.bounds(1, positions=True)
        return k_first - q_last, k_last - q_first
