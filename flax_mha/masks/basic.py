"""Masks given by positions, lengths, segments and arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from flax_mha._src.core import validation
from flax_mha._src.core.integers import LARGEST, SMALLEST, is_int
from flax_mha._src.core.tile import Grid, Tile
from flax_mha._src.core.validation import Shape
from flax_mha.masks.base import Mask, Occupancy, Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LocalMask(Mask):
    """Shows keys from `left` positions before the query to `right` positions after it, inclusive; None means no limit.

    Raises:
      ValueError: If `left` or `right` is not an integer, or if the window is empty because left + right < 0.

    Example:
      >>> from flax_mha import LocalMask
      >>> print(LocalMask(2, 1))
      ██······
      ███·····
      ████····
      ·████···
      ··████··
      ···████·
      ····████
      ·····███
    """

    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        sides = (self.left, self.right)
        if not all(side is None or type(side) is int or is_int(side) for side in sides):
            raise ValueError(f"LocalMask(left, right) requires integers or None, but got {sides}.")
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            raise ValueError(
                f"LocalMask(left, right) requires left + right >= 0, but {sides} is an empty window; left counts "
                "backward, so pass a positive left to include keys before the query."
            )

    @property
    def window(self) -> Window:
        return self.left, self.right

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        ahead, visible = tile.key_positions - tile.query_positions, jnp.ones((1, 1), bool)
        if self.left is not None:
            visible = visible & (ahead >= _int32(-self.left))
        if self.right is not None:
            visible = visible & (ahead <= _int32(self.right))
        return visible

    def occupancy(self, grid: Grid) -> Occupancy:
        least, greatest = grid.distance_bounds()
        left = SMALLEST if self.left is None else _int32(-self.left)
        right = LARGEST if self.right is None else _int32(self.right)
        return Occupancy((greatest >= left) & (least <= right), (least >= left) & (greatest <= right))


def _int32(distance: int) -> int:
    """Clips a distance to the range of int32, which holds all distances between positions."""
    return int(min(max(distance, SMALLEST), LARGEST))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CausalMask(Mask):
    """Shows keys up to the query's own position plus `offset`.

    Raises:
      ValueError: If `offset` is not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import CausalMask, dot_product_attention
      >>> x = jnp.ones((1, 5, 2, 8))
      >>> dot_product_attention(x, x, x, mask=CausalMask()).shape
      (1, 5, 2, 8)
    """

    offset: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self) -> None:
        if type(self.offset) is not int and not is_int(self.offset):
            raise ValueError(
                f"CausalMask(offset) requires an integer, but got {self.offset!r}; pass an array as query_offset=."
            )

    @property
    def window(self) -> Window:
        return None, self.offset

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.key_positions - tile.query_positions <= _int32(self.offset)

    def occupancy(self, grid: Grid) -> Occupancy:
        (least, greatest), offset = grid.distance_bounds(), _int32(self.offset)
        return Occupancy(least <= offset, greatest <= offset)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LengthMask(Mask):
    """Shows keys and queries at positions below the lengths of their sequences, int [B...]; None means no limit.

    Example:
      >>> from flax_mha import LengthMask
      >>> print(LengthMask(3, query_lengths=2))
      ███·····
      ███·····
      ········
      ········
      ········
      ········
      ········
      ········
    """

    key_value_lengths: int | Int[Array, "..."] | None = dataclasses.field(metadata={"axes": "B"})
    query_lengths: int | Int[Array, "..."] | None = dataclasses.field(default=None, metadata={"axes": "B"})

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        visible = jnp.ones((1, 1), bool)
        if self.key_value_lengths is not None:
            visible = visible & (tile.key_positions < self.key_value_lengths)
        if self.query_lengths is not None:
            visible = visible & (tile.query_positions < self.query_lengths)
        return visible

    def canonical(self, shape: Shape) -> Mask:
        return LengthMask(
            validation.lengths("key_value_lengths", self.key_value_lengths, shape),
            validation.lengths("query_lengths", self.query_lengths, shape),
        )

    def occupancy(self, grid: Grid) -> Occupancy:
        some, full = np.ones(grid.counts, bool), np.ones(grid.counts, bool)
        for axis, length in enumerate((self.query_lengths, self.key_value_lengths)):
            if length is not None:
                first, last = grid.bounds(axis, positions=True)
                some, full = some & (first < length), full & (last < length)
        return Occupancy(some, full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WrittenMask(Mask):
    """Shows keys at positions >= 0: in a ring or with a negative first position, the others were never written."""

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.key_positions >= 0

    def occupancy(self, grid: Grid) -> Occupancy:
        first, last = grid.bounds(1, positions=True)
        return Occupancy(last >= 0, first >= 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SegmentMask(Mask):
    """Shows keys in the same segment as the query, for packed sequences: int [B..., T] and [B..., S].

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import SegmentMask
      >>> ids = jnp.array([0, 0, 0, 1, 1])
      >>> print(SegmentMask(ids, ids))
      ███··
      ███··
      ███··
      ···██
      ···██
    """

    query_ids: Int[Array, "... T"] = dataclasses.field(metadata={"axes": "B T"})
    key_value_ids: Int[Array, "... S"] = dataclasses.field(metadata={"axes": "B S"})

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.cut_queries(self.query_ids) == tile.cut_keys(self.key_value_ids)

    @property
    def lengths(self) -> tuple[int, int]:
        return (0, *np.shape(self.query_ids))[-1], (0, *np.shape(self.key_value_ids))[-1]

    def canonical(self, shape: Shape) -> Mask:
        return SegmentMask(*validation.segment_ids(self.query_ids, self.key_value_ids, shape))

    def occupancy(self, grid: Grid) -> Occupancy:
        """Computes occupancy by the least and greatest id in each tile; ids may be in any order."""
        q_ids = self.query_ids.reshape(grid.counts[0], 1, grid.tile_shape[0])
        k_ids = self.key_value_ids.reshape(1, grid.counts[1], grid.tile_shape[1])
        q_low, q_high, k_low, k_high = q_ids.min(-1), q_ids.max(-1), k_ids.min(-1), k_ids.max(-1)
        return Occupancy((q_low <= k_high) & (k_low <= q_high), (q_low == k_high) & (k_low == q_high))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayMask(Mask):
    """Wraps a boolean array (True attends), so that it combines with other masks.

    The array broadcasts to [B..., N, T, S]. No other mask needs T x S values.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import CausalMask
      >>> from flax_mha.masks import ArrayMask
      >>> print(CausalMask() & ArrayMask(jnp.array([[True, False, True, True]])))
      █···
      █···
      █·█·
      █·██
      █·██
      █·██
      █·██
      █·██
    """

    visible: Bool[Array, "... T S"] = dataclasses.field(metadata={"axes": "B N T|1 S|1"})

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.cut(self.visible)

    @property
    def lengths(self) -> tuple[int, int]:
        queries, keys = (1, 1, *np.shape(self.visible))[-2:]
        return 0 if queries == 1 else queries, 0 if keys == 1 else keys

    def canonical(self, shape: Shape) -> Mask:
        return ArrayMask(validation.mask(self.visible, shape))
