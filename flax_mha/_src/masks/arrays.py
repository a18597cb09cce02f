"""Masks that hold arrays: lengths of sequences, segment ids, or booleans."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int

from flax_mha._src.core import validation
from flax_mha._src.core.tile import Grid, Tile
from flax_mha._src.core.tracing import readable
from flax_mha._src.core.validation import Shape
from flax_mha._src.masks.base import Mask, Occupancy


@dataclasses.dataclass(frozen=True, eq=False)
class _OfArrays(Mask):
    """The base class of the masks in this file: converts lists to arrays."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # JAX would treat each number as a leaf.
            if field.metadata.get("axes") and type(value) is list:
                leaves = jax.tree.leaves(value)
                is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
                numpy: Any = jnp if is_traced else np
                object.__setattr__(self, field.name, numpy.asarray(value))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LengthMask(_OfArrays):
    """Hides key positions >= `key_value_lengths` and query positions >=
    `query_lengths`: int [B...] or None (no limit).

    Example:
      >>> from flax_mha import LengthMask
      >>> LengthMask(3).picture(queries=1, keys=5)
      array([[ True,  True,  True, False, False]])
    """

    key_value_lengths: int | Int[Array, "..."] | None = dataclasses.field(
        metadata={"axes": "B"}
    )
    query_lengths: int | Int[Array, "..."] | None = dataclasses.field(
        default=None, metadata={"axes": "B"}
    )

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        visible = jnp.ones((1, 1), bool)
        if self.key_value_lengths is not None:
            visible = visible & (tile.key_positions < self.key_value_lengths)
        if self.query_lengths is not None:
            visible = visible & (tile.query_positions < self.query_lengths)
        return visible

    def canonical(self, shape: Shape) -> Mask:
        keys = validation.lengths("key_value_lengths", self.key_value_lengths, shape)
        queries = validation.lengths("query_lengths", self.query_lengths, shape)
        return LengthMask(keys, queries)

    def occupancy(self, grid: Grid) -> Occupancy:
        some = np.ones(grid.counts, bool)
        full = np.ones(grid.counts, bool)
        for axis, length in enumerate((self.query_lengths, self.key_value_lengths)):
            if length is not None:
                first, last = grid.bounds(axis, positions=True)
                some = some & (first < length)
                full = full & (last < length)
        return Occupancy(some, full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SegmentMask(_OfArrays):
    """Lets queries attend to keys with the same segment id; the ids are int [B..., T]
    and [B..., S].

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
        of_queries = tile.cut(self.query_ids[:, None])
        of_keys = tile.cut(self.key_value_ids[None, :])
        return of_queries == of_keys

    @property
    def lengths(self) -> tuple[int, int]:
        return _last_axis(self.query_ids), _last_axis(self.key_value_ids)

    def canonical(self, shape: Shape) -> Mask:
        ids = validation.segment_ids(self.query_ids, self.key_value_ids, shape)
        return SegmentMask(*ids)

    def occupancy(self, grid: Grid) -> Occupancy:
        """A tile may be visible if the ranges (min to max) of its query and key ids
        overlap, even if all ids differ.
        """
        q_ids = self.query_ids.reshape(grid.counts[0], 1, grid.tile_shape[0])
        k_ids = self.key_value_ids.reshape(1, grid.counts[1], grid.tile_shape[1])
        q_low = q_ids.min(-1)
        q_high = q_ids.max(-1)
        k_low = k_ids.min(-1)
        k_high = k_ids.max(-1)
        overlap = (q_low <= k_high) & (k_low <= q_high)
        # low <= high on both sides, so these make all four equal.
        all_same = (q_low == k_high) & (k_low == q_high)
        return Occupancy(overlap, all_same)


def _last_axis(x: Any) -> int:
    shape = np.shape(x)
    return shape[-1] if shape else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayMask(_OfArrays):
    """Wraps a boolean array (True attends), so that it combines with other masks.

    The array broadcasts to [B..., N, T, S]. All other masks store fewer than
    T x S values.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import CausalMask
      >>> from flax_mha.masks import ArrayMask
      >>> print(CausalMask() & ~ArrayMask(jnp.eye(4, dtype=bool)))
      ····
      █···
      ██··
      ███·
    """

    visible: Bool[Array, "... T S"] = dataclasses.field(
        metadata={"axes": "B N T|1 S|1"}
    )

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.cut(self.visible)

    @property
    def lengths(self) -> tuple[int, int]:
        queries, keys = (1, 1, *np.shape(self.visible))[-2:]
        # An axis of length 1 is broadcast.
        if queries == 1:
            queries = 0
        if keys == 1:
            keys = 0
        return queries, keys

    def canonical(self, shape: Shape) -> Mask:
        return ArrayMask(validation.mask(self.visible, shape))


def segments_from_offsets(
    offsets: Int[Array, " N+1"], length: int
) -> Int[Array, " length"]:
    """Makes segment ids of packed documents from the positions where they begin, as in
    the argument `cu_seqlens` of FlashAttention.

    Args:
      offsets: Ints that do not decrease: document i has the tokens from `offsets[i]`
        to `offsets[i + 1]`. The first is 0.
      length: The number of tokens in the packed sequence, an int or a symbol of
        `jax.export`. Tokens after the last offset are padding, and get an id of their
        own.

    Returns:
      int32 ids [length], for `segment_ids` of the modules or a `SegmentMask`.

    Raises:
      ValueError: If offsets are not ints [N + 1], or if known offsets do not begin with
        0, decrease, or end after `length`.

    Example:
      >>> import numpy as np
      >>> from flax_mha.masks import segments_from_offsets
      >>> segments_from_offsets(np.array([0, 3, 5]), 6).tolist()
      [0, 0, 0, 1, 1, 2]
    """
    has_known_length = not export.is_symbolic_dim(length)
    if has_known_length:
        validation.int_at_least("length", length, 0)
    offsets = jnp.asarray(offsets)
    if offsets.ndim != 1 or offsets.size < 1 or offsets.dtype.kind not in "iu":
        raise ValueError(
            "offsets must be ints [N + 1], 0 and the end of each document, but got "
            f"{offsets.dtype} with shape {offsets.shape}."
        )
    if readable(offsets):
        # Differences of unsigned numbers would never be negative.
        known = np.asarray(offsets, np.int64)
        ends_later = has_known_length and known[-1] > length
        if known[0] != 0 or ends_later or np.any(np.diff(known) < 0):
            raise ValueError(
                "offsets must begin with 0, not decrease, and end at most at length "
                f"({length}), but got {known.tolist()}."
            )
    # Positions may not fit in the dtype of the offsets.
    ends = offsets[1:].astype(jnp.int32)
    # How many documents end at each position, and how many have ended there or before.
    ended = jnp.zeros(length, jnp.int32).at[ends].add(1, mode="drop")
    return jnp.cumsum(ended, dtype=jnp.int32)
