"""Masks as functions of (query position, key position), never as T x S arrays.

A mask answers two questions. `tile` says which scores of one rectangle are visible. `occupancy` says, for every
rectangle of a grid at once and without looking inside, which may hold a visible score and which are visible
throughout: empty rectangles are then skipped and full ones run without masking.

Masks are pytrees: what is known while tracing (a window's width) is static, what is data (lengths, ids) is a leaf.
What is asked of a mask is asked for one head; until it is mapped over batch and heads its leaves have axes for these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from flax_mha import _check
from flax_mha._check import Shape
from flax_mha._program import Program, trace
from flax_mha._tiles import BoolMatrix, Grid, Scalar, Tile, array_by_head, pad, readable


class Occupancy(NamedTuple):
    """For every tile of a grid: may it hold a visible score, and is it visible throughout?"""

    some: BoolMatrix
    full: BoolMatrix


class Mask:
    """What every mask can do; `&`, `|` and `~` combine them, and `print` draws one."""

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:
        """Which scores of the tile are visible."""
        raise NotImplementedError

    def occupancy(self, grid: Grid) -> Occupancy:
        """Which tiles may hold something and which are full; not knowing is an allowed answer."""
        return Occupancy(np.ones(grid.counts, bool), np.zeros(grid.counts, bool))

    def padded(self, shape: tuple[int, int]) -> "Mask":
        """The mask with its arrays lengthened to [T, S] = `shape`; what it says of the added part is not used."""
        return self

    def checked(self, shape: Shape) -> "Mask":
        """The mask with arrays that fit a call of these sizes, with axes of length 1 where they are shared.

        Raises:
          ValueError: If they do not fit.
        """
        return self

    def known(self, lengths: tuple[int, int], query_offset: int, cell: int) -> "Mask":
        """A checked mask with what can be known before the call runs of squares of `cell` rows and columns."""
        return self

    def by_head(self, groups: tuple[int, int]) -> "Mask":
        """A checked mask with the axes [B..., K | 1, G | 1, one head's part] in every array."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __invert__(self) -> "Mask":
        return Not(self)

    def picture(self, queries: int, keys: int) -> Bool[np.ndarray, "queries keys"]:
        """What the first batch entry's first head sees, row by row."""
        shape = Shape((1,), queries, keys, 1, 1, 1, 1)
        first = jax.tree.map(lambda x: x[0, 0, 0], self.checked(shape).by_head((1, 1)))
        return np.broadcast_to(first.tile(Tile(0, 0, (queries, keys)), 0), (queries, keys))

    def __str__(self) -> str:
        """A small picture: a row a query, a column a key."""
        rows = self.picture(*_picture_size(self))
        return "\n".join("".join("\N{FULL BLOCK}" if seen else "\N{MIDDLE DOT}" for seen in row) for row in rows)


class _Combined(Mask):
    """A mask made of masks: what is done to it is done to its parts."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that it is made of."""
        return tuple(vars(self).values())

    def padded(self, shape: tuple[int, int]) -> Mask:
        return self._map(lambda mask: mask.padded(shape))

    def checked(self, shape: Shape) -> Mask:
        return self._map(lambda mask: mask.checked(shape))

    def known(self, lengths: tuple[int, int], query_offset: int, cell: int) -> Mask:
        return self._map(lambda mask: mask.known(lengths, query_offset, cell))

    def by_head(self, groups: tuple[int, int]) -> Mask:
        return self._map(lambda mask: mask.by_head(groups))

    def _map(self, change: Callable[[Mask], Mask]) -> Mask:
        return type(self)(*map(change, self.parts))

    __str__ = Mask.__str__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(_Combined):
    """Visible where both are."""

    left: Mask
    right: Mask

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return self.left.tile(tile, query_offset) & self.right.tile(tile, query_offset)

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        left, right = self.left.occupancy(grid), self.right.occupancy(grid)
        return Occupancy(left.some & right.some, left.full & right.full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(_Combined):
    """Visible where one of the two is."""

    left: Mask
    right: Mask

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return self.left.tile(tile, query_offset) | self.right.tile(tile, query_offset)

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        left, right = self.left.occupancy(grid), self.right.occupancy(grid)
        return Occupancy(left.some | right.some, left.full | right.full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(_Combined):
    """Visible where the other is not."""

    mask: Mask

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return ~self.mask.tile(tile, query_offset)

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        occupancy = self.mask.occupancy(grid)
        return Occupancy(~occupancy.full, ~occupancy.some)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalMask(Mask):
    """Keys from `left` positions before the query to `right` after it, both included; None does not limit."""

    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        ahead = tile.columns - (tile.rows + query_offset)
        visible = jnp.ones((1, 1), bool)
        if self.left is not None:
            visible = visible & (ahead >= -self.left)
        if self.right is not None:
            visible = visible & (ahead <= self.right)
        return visible

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        (q_first, q_last), (k_first, k_last) = grid.position_bounds(), grid.bounds(1)
        some, full = np.ones(grid.counts, bool), np.ones(grid.counts, bool)
        if self.left is not None:
            some, full = some & (k_last >= q_first - self.left), full & (k_first >= q_last - self.left)
        if self.right is not None:
            some, full = some & (k_first <= q_last + self.right), full & (k_last <= q_first + self.right)
        return Occupancy(some, full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalMask(Mask):
    """Keys up to the query's own position plus `offset`."""

    offset: int = dataclasses.field(default=0, metadata={"static": True})

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return LocalMask(None, self.offset).tile(tile, query_offset)

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        return LocalMask(None, self.offset).occupancy(grid)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LengthMask(Mask):
    """Keys, and queries, before the end of their sequence; None does not limit."""

    key_value_lengths: int | Int[Array, "..."] | None
    query_lengths: int | Int[Array, "..."] | None = None

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        visible = jnp.ones((1, 1), bool)
        if self.key_value_lengths is not None:
            visible = visible & (tile.columns < self.key_value_lengths)
        if self.query_lengths is not None:
            visible = visible & (tile.rows < self.query_lengths)
        return visible

    def checked(self, shape: Shape) -> Mask:  # noqa: D102
        return LengthMask(
            _check.per_sequence("key_value_lengths", self.key_value_lengths, shape),
            _check.per_sequence("query_lengths", self.query_lengths, shape),
        )

    def by_head(self, groups: tuple[int, int]) -> Mask:  # noqa: D102
        return jax.tree.map(lambda x: x[..., None, None], self)

    def occupancy(self, grid: Grid) -> Occupancy:  # noqa: D102
        some, full = np.ones(grid.counts, bool), np.ones(grid.counts, bool)
        for axis, length in enumerate((self.query_lengths, self.key_value_lengths)):
            if length is not None:
                first, last = grid.bounds(axis)
                some, full = some & (first < length), full & (last < length)
        return Occupancy(some, full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentMask(Mask):
    """Keys of the query's own segment, for sequences packed into one."""

    query_ids: Int[Array, "... T"]
    key_value_ids: Int[Array, "... S"]

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return tile.cut(self.query_ids[:, None]) == tile.cut(self.key_value_ids[None, :])

    def checked(self, shape: Shape) -> Mask:  # noqa: D102
        return SegmentMask(*_check.segment_ids(self.query_ids, self.key_value_ids, shape))

    def by_head(self, groups: tuple[int, int]) -> Mask:  # noqa: D102
        return jax.tree.map(lambda x: x[..., None, None, :], self)

    def occupancy(self, grid: Grid) -> Occupancy:
        """Tiles whose ranges of ids are apart are empty, whatever the order of the ids."""
        q_ids = self.query_ids.reshape(grid.counts[0], 1, grid.tile_shape[0])
        k_ids = self.key_value_ids.reshape(1, grid.counts[1], grid.tile_shape[1])
        q_low, q_high, k_low, k_high = q_ids.min(-1), q_ids.max(-1), k_ids.min(-1), k_ids.max(-1)
        return Occupancy((q_low <= k_high) & (k_low <= q_high), (q_low == k_high) & (k_low == q_high))

    def padded(self, shape: tuple[int, int]) -> Mask:  # noqa: D102
        ids = zip((self.query_ids, self.key_value_ids), shape, strict=True)
        return SegmentMask(*(jnp.pad(x, (0, length - x.shape[0]), mode="edge") for x, length in ids))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayMask(Mask):
    """What a boolean array says: the one mask that holds T x S values, because its maker already did."""

    visible: Bool[Array, "... T S"]

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:  # noqa: D102
        return tile.cut(self.visible)

    def padded(self, shape: tuple[int, int]) -> Mask:  # noqa: D102
        return ArrayMask(pad(self.visible, shape))

    def checked(self, shape: Shape) -> Mask:  # noqa: D102
        return ArrayMask(_check.mask(self.visible, shape))  # type: ignore[arg-type]

    def by_head(self, groups: tuple[int, int]) -> Mask:  # noqa: D102
        return ArrayMask(array_by_head(self.visible, groups))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionMask(Mask):
    """What a function of single positions says: `mask_mod(b, h, q_idx, kv_idx) -> bool`, as FlexAttention's.

    Its arguments are int32 scalars: batch entry (of several batch axes, counted through), head, position of the query
    (`query_offset` included) and of the key. It may capture arrays. Where those are known while tracing, and the
    offset is a number, tiles are looked at once, then, and the empty ones skipped ever after; else in every call.
    """

    mask_mod: Callable[[Array, Array, Array, Array], Array] = dataclasses.field(metadata={"static": True})

    def checked(self, shape: Shape) -> Mask:  # noqa: D102
        signature = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), jnp.int32)
        program, captured = trace("mask_mod", self.mask_mod, signature, "bool")
        batch, head = shape.indices(program.uses(0), program.uses(1))
        return _TracedMask(captured, batch, head, program)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _TracedMask(Mask):
    """A traced `mask_mod`, with the batch entry and head that it is asked for.

    Attributes:
      seen: What was found by looking at it: the occupancy of squares of `cell` rows and columns.
    """

    captured: list[Array]
    batch: Int[Array, "..."] | np.ndarray
    head: Int[Array, "..."] | np.ndarray
    program: Program = dataclasses.field(metadata={"static": True})
    seen: Occupancy | None = None
    cell: int = dataclasses.field(default=0, metadata={"static": True})

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:
        one = functools.partial(self.program, self.captured, jnp.asarray(self.batch), jnp.asarray(self.head))
        each = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
        return each((tile.rows + query_offset)[:, 0], tile.columns[0])

    def occupancy(self, grid: Grid) -> Occupancy:
        """Looks at every score, a row of tiles at a time, unless that has been done."""
        if self.seen is not None:
            return _coarser(self.seen, self.cell, grid)
        (rows, columns), (height, width) = grid.counts, grid.tile_shape

        def row(i: Int[Array, ""]) -> tuple[Array, Array]:
            seen = self.tile(Tile(i * height, 0, (height, columns * width)), grid.query_offset)
            seen = seen.reshape(height, columns, width)
            return seen.any((0, 2)), seen.all((0, 2))

        return Occupancy(*lax.map(row, jnp.arange(rows, dtype=jnp.int32)))

    def known(self, lengths: tuple[int, int], query_offset: int, cell: int) -> Mask:
        if not all(map(readable, self.captured)):
            return self
        counts = (max(1, -(-lengths[0] // cell)), max(1, -(-lengths[1] // cell)))
        batch, head = np.broadcast_arrays(self.batch[..., None], self.head)
        if not self.captured and batch.size == 1:
            return _fixed(self.program, query_offset, counts, cell)
        places = dataclasses.replace(self, batch=batch.ravel(), head=head.ravel())
        seen = Occupancy(*(x.reshape(*batch.shape, *counts) for x in _look(places, query_offset, counts, cell)))
        return dataclasses.replace(self, seen=seen, cell=cell)

    def by_head(self, groups: tuple[int, int]) -> Mask:
        rank = self.batch.ndim
        own = groups if self.head.size > 1 else (1, 1)
        return dataclasses.replace(
            self,
            captured=[x[(None,) * (rank + 2)] for x in self.captured],
            batch=self.batch[..., None, None],
            head=self.head.reshape((1,) * rank + own),
            seen=jax.tree.map(lambda x: array_by_head(x, groups), self.seen),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _FixedMask(Mask):
    """A traced `mask_mod` that captures nothing and is the same for all heads: all of it is known while tracing."""

    program: Program = dataclasses.field(metadata={"static": True})
    some: bytes = dataclasses.field(metadata={"static": True})
    full: bytes = dataclasses.field(metadata={"static": True})
    counts: tuple[int, int] = dataclasses.field(metadata={"static": True})
    cell: int = dataclasses.field(metadata={"static": True})

    def tile(self, tile: Tile, query_offset: Scalar) -> Bool[Array, "#t #s"]:
        return _TracedMask([], np.zeros((), np.int32), np.zeros((), np.int32), self.program).tile(tile, query_offset)

    def occupancy(self, grid: Grid) -> Occupancy:
        seen = Occupancy(*(np.frombuffer(x, bool).reshape(self.counts) for x in (self.some, self.full)))
        return _coarser(seen, self.cell, grid)


def _coarser(seen: Occupancy, cell: int, grid: Grid) -> Occupancy:
    """What is known of the tiles of `grid` from that of squares of `cell` rows and columns."""
    some, full = seen
    for axis in (0, 1):
        first, last = (np.minimum(x.ravel() // cell, some.shape[axis] - 1) for x in grid.bounds(axis))
        places = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
        rows = (slice(None),) * axis
        some, full = some[(*rows, places)].any(axis + 1), full[(*rows, places)].all(axis + 1)  # type: ignore[assignment]
    return Occupancy(some, full)


@functools.lru_cache(maxsize=64)
def _fixed(program: Program, offset: int, counts: tuple[int, int], cell: int) -> _FixedMask:
    """The mask of a program, after a look at all of it."""
    place = np.zeros(1, np.int32)
    some, full = _look(_TracedMask([], place, place, program), offset, counts, cell)
    return _FixedMask(program, some.tobytes(), full.tobytes(), counts, cell)


def _look(places: _TracedMask, offset: int, counts: tuple[int, int], cell: int) -> Occupancy:
    """The occupancy [places, rows, columns], at once, for one batch entry and head after the other."""
    with jax.ensure_compile_time_eval():
        return Occupancy(*map(np.asarray, _occupancies(places, offset, Grid(counts, (cell, cell)))))


@functools.partial(jax.jit, static_argnames="grid")
def _occupancies(places: _TracedMask, offset: Scalar, grid: Grid) -> Occupancy:
    def one(place: tuple[Array, Array]) -> Occupancy:
        mask = dataclasses.replace(places, batch=place[0], head=place[1])
        return mask.occupancy(grid._replace(query_offset=offset))

    return lax.map(one, (jnp.asarray(places.batch), jnp.asarray(places.head)))


def _picture_size(mask: Mask) -> tuple[int, int]:
    """The lengths of the mask's arrays, up to 32; where it has none, 8 each."""
    masks = [mask]
    while masks:
        part = masks.pop()
        if isinstance(part, SegmentMask):
            return min(part.query_ids.shape[-1], 32), min(part.key_value_ids.shape[-1], 32)
        if isinstance(part, ArrayMask):
            return min(part.visible.shape[-2], 32), min(part.visible.shape[-1], 32)
        masks += part.parts if isinstance(part, _Combined) else ()
    return 8, 8
