"""The base class of masks, windows, and masks combined by `&`, `|` and `~`.

A score is visible if its query attends to its key; a mask hides all others. `tile`
computes which scores of one tile, a rectangle of the T x S scores of one head, are
visible. `occupancy` classifies all tiles of a grid: tiles without visible scores are
skipped, and tiles without hidden scores need no masking.

Masks are pytrees: numbers such as the width of a window are static, arrays are leaves.
The metadata of an array's field names its axes, for example "B N T|1 S|1": all batch
axes, heads, queries and keys. "B", "N", "T|1" and "S|1" may have length 1. An array
with the empty name "" has any shape, and is the same for all heads. Users pass arrays
of any shapes that broadcast to these axes. `canonical` checks them against the sizes of
a call, and adds missing axes. `tile` and `occupancy` run on a mask for one head, whose
arrays have lost the axes "B" and "N".
"""

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from flax_mha._src.core.fields import WithAxes, static
from flax_mha._src.core.tile import BoolMatrix, Grid, Tile
from flax_mha._src.core.tracing import T, readable
from flax_mha._src.core.validation import INT32_MAX, INT32_MIN, Shape, is_int

M = TypeVar("M", bound=type)
# (left, right): how far a query attends before and after itself; None: no limit.
Window = tuple[int | None, int | None]


class Occupancy(NamedTuple):
    """For each tile of a grid, whether some scores may be visible, and whether all are;
    broadcasts to `Grid.counts`.
    """

    any_visible: BoolMatrix
    all_visible: BoolMatrix


def part_axes(axes: str) -> list[str]:
    """Lists the axes that an array has left when it is cut to one head: ["T", "S"] for
    axes "B N T S".
    """
    return [name for name in axes.split() if name not in "BN"]


@dataclasses.dataclass(frozen=True, eq=False)
class Mask(WithAxes):
    """The base class of masks. Combine masks with `&`, `|` and `~`, and draw a mask
    with `print`.

    Masks are equal if their types and values are equal. Traced arrays are equal only if
    they are the same object.
    """

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        """Computes which scores of the tile are visible, for one head; broadcasts to
        the tile's shape.
        """
        raise NotImplementedError

    def occupancy(self, grid: Grid) -> Occupancy:
        """Classifies all tiles of a grid. This default is right for every mask: no tile
        is skipped or left unmasked.
        """
        return Occupancy(np.ones(grid.counts, bool), np.zeros(grid.counts, bool))

    def canonical(self, shape: Shape) -> "Mask":
        """Returns the mask for a call with sizes `shape`: checks its arrays and adds
        missing axes with length 1.
        """
        return self

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S, the lengths of the mask's arrays along queries and keys; 0 if no
        array has such an axis.
        """
        return 0, 0

    @property
    def window(self) -> Window | None:
        """(left, right) if the mask is a window, equal to `LocalMask(left, right)`;
        otherwise None, also for masks combined by `&`.
        """
        return None

    def picture(self, queries: int, keys: int) -> Bool[np.ndarray, "queries keys"]:
        """Returns the mask of the first head and batch entry as an array, for the first
        `queries` and `keys`.
        """
        # `canonical` expects arrays as long as the call.
        lengths = (max(queries, self.lengths[0]), max(keys, self.lengths[1]))
        canonical = self.map_arrays(_first_head).canonical(Shape((), *lengths))
        first = canonical.map_arrays(_first_head)
        visible = first.tile(Tile(0, 0, lengths))
        return np.broadcast_to(visible, lengths)[:queries, :keys]

    def __str__(self) -> str:
        """Draws the mask: a row per query, a column per key."""
        queries, keys = (min(length or 8, 32) for length in self.lengths)
        # A middle dot and a full block, if the terminal can show them.
        characters = "\N{MIDDLE DOT}\N{FULL BLOCK}"
        try:
            characters.encode(sys.stdout.encoding or "utf-8")
        except (LookupError, UnicodeEncodeError):
            characters = ".#"
        lines = []
        for row in self.picture(queries, keys):
            lines.append("".join(characters[bool(seen)] for seen in row))
        return "\n".join(lines)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _operand("&", other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _operand("|", other))

    def __invert__(self) -> "Mask":
        return Not(self)

    # So that `array & mask` calls `__rand__` if the array is NumPy's.
    __array_ufunc__ = None

    def __rand__(self, other: object) -> "Mask":
        return And(_operand("&", other), self)

    def __ror__(self, other: object) -> "Mask":
        return Or(_operand("|", other), self)

    def __bool__(self) -> bool:
        raise ValueError(
            "masks must be combined with &, | and ~, but got `and`, `or`, `not` or "
            "`if`, which require a single bool."
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, structure = jax.tree.flatten(self)
        others, other_structure = jax.tree.flatten(other)
        same_structure = bool(structure == other_structure)  # type: ignore[operator]
        return same_structure and all(map(_equal, mine, others))

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self)
        # Not the values, which may be traced.
        return hash((structure, *(np.shape(x) for x in leaves)))


def _first_head(x: Array, axes: str) -> Array:
    """Returns the part of a mask's array for the first batch entry and head; `axes`
    names its axes ("B N T S").
    """
    rank = len(part_axes(axes))
    if not axes or np.ndim(x) <= rank:
        return x
    return x.reshape(-1, *x.shape[x.ndim - rank :])[0]


def _operand(operator: str, other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    got = repr(other)
    if hasattr(other, "shape"):
        got = (
            f"an array of shape {np.shape(other)}; wrap it: "
            "flax_mha.masks.ArrayMask(array)"
        )
    if isinstance(other, type) and issubclass(other, Mask):
        got = f"the class {other.__name__}; call it: {other.__name__}()"
    raise ValueError(f"{operator} must combine two masks, but got a mask and {got}.")


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (readable(a) and readable(b)):
        return False
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Combined(Mask):
    """The base class of masks that are made of other masks, their `parts`.

    A mask may be part of several others. It is computed once, and flattened once, so
    that arrays are passed to a program once. The methods `combined_tile` and
    `combined_occupancy` of subclasses compute `tile` and `occupancy` from those of the
    parts.
    """

    @property
    def parts(self) -> tuple[Mask, ...]:
        return tuple(vars(self).values())

    @property
    def lengths(self) -> tuple[int, int]:
        def largest(_: Mask, of_parts: list[tuple[int, int]]) -> tuple[int, int]:
            queries, keys = zip(*of_parts, strict=True)
            return max(queries), max(keys)

        return fold(self, lambda part: part.lengths, largest)

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return fold(
            self,
            lambda part: part.tile(tile),
            lambda mask, tiles: mask.combined_tile(tiles),
        )

    def occupancy(self, grid: Grid) -> Occupancy:
        return fold(
            self,
            lambda part: part.occupancy(grid),
            lambda mask, parts: mask.combined_occupancy(parts),
        )

    def canonical(self, shape: Shape) -> Mask:
        return fold(self, lambda part: part.canonical(shape), _remade)

    def map_arrays(self, change: Callable[[Array, str], Any]) -> Any:
        return fold(self, lambda part: part.map_arrays(change), _remade)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return _equal_parts(self, other, {})

    def __hash__(self) -> int:
        return fold(self, hash, lambda mask, parts: hash((type(mask), *parts)))


def fold(
    mask: Mask,
    of_part: Callable[[Mask], T],
    of_combined: Callable[[Any, list[T]], T],
) -> T:
    """Computes a value of a mask from those of its parts, each part once, however many
    masks it is part of.

    `of_part(mask)` returns the value of a mask without parts, and
    `of_combined(mask, values)` that of a combined one.
    """
    values: dict[int, T] = {}

    def value(mask: Mask) -> T:
        if id(mask) not in values:
            if isinstance(mask, _Combined):
                found = of_combined(mask, [value(part) for part in mask.parts])
            else:
                found = of_part(mask)
            values[id(mask)] = found
        return values[id(mask)]

    return value(mask)


def _remade(mask: Mask, parts: list[Mask]) -> Mask:
    return type(mask)(*parts)


def _equal_parts(first: Any, second: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Returns whether two masks are equal; `known` has the answers for pairs of parts,
    by their `id`.
    """
    if not isinstance(first, _Combined) or type(first) is not type(second):
        return bool(first == second)
    pair = (id(first), id(second))
    if pair not in known:
        parts = zip(first.parts, second.parts, strict=True)
        known[pair] = all(_equal_parts(a, b, known) for a, b in parts)
    return known[pair]


# How a flattened mask is made of the masks in its leaves: for each different mask, None
# for a leaf, or the class and the places of its parts, which come before it.
_Steps = tuple[tuple[Any, ...] | None, ...]


def _flatten(mask: Mask) -> tuple[list[Mask], _Steps]:
    leaves: list[Mask] = []
    steps: list[Any] = []

    def of_part(part: Mask) -> int:
        leaves.append(part)
        steps.append(None)
        return len(steps) - 1

    def of_combined(mask: Mask, places: list[int]) -> int:
        steps.append((type(mask), *places))
        return len(steps) - 1

    fold(mask, of_part, of_combined)
    return leaves, tuple(steps)


def _unflatten(steps: _Steps, leaves: Sequence[Any]) -> Mask:
    remaining = iter(leaves)
    made: list[Any] = []
    for step in steps:
        if step is None:
            made.append(next(remaining))
            continue
        kind, *places = step
        made.append(kind(*(made[i] for i in places)))
    return made[-1]


def _register(kind: M) -> M:
    """Registers a class of combined masks as a pytree."""
    jax.tree_util.register_pytree_node(kind, _flatten, _unflatten)
    return kind


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair(_Combined):
    """The base class of `And` and `Or`, which combine two masks by an operator."""

    left: Mask
    right: Mask
    operator: ClassVar[Callable[[Any, Any], Any]]

    def combined_tile(self, tiles: list[Array]) -> Bool[Array, "#t #s"]:
        # From the class: an instance would pass itself.
        return type(self).operator(*tiles)

    def combined_occupancy(self, parts: list[Occupancy]) -> Occupancy:
        # For `|`, `all_visible` may be False for a tile that both fill together.
        return Occupancy(*map(type(self).operator, *parts))


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class And(_Pair):
    """Lets queries attend to the keys that both masks leave visible: `left & right`."""

    operator = operator.and_


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Or(_Pair):
    """Lets queries attend to the keys that at least one of two masks leaves visible:
    `left | right`.
    """

    operator = operator.or_


def visible_at(
    mask: Mask | None, shape: Shape, offsets: tuple[Array, Array]
) -> Bool[Array, "*B 1 T S"]:
    """Evaluates a mask whose arrays have at most one entry for each sequence, as
    `offsets` do.
    """
    lengths = (shape.query_length, shape.key_length)
    if mask is None:
        return jnp.ones((*shape.batch, 1, *lengths), bool)

    def by_sequence(x: Array) -> Array:
        return jnp.broadcast_to(x, shape.batch).reshape(-1)

    def of_sequence(mask: Mask, first_query: Array, first_key: Array) -> Array:
        tile = Tile(0, 0, lengths, (first_query, first_key))
        return jnp.broadcast_to(mask.tile(tile), lengths)

    masks = mask.map_arrays(lambda x, _: by_sequence(x))
    first_queries, first_keys = map(by_sequence, offsets)
    visible = jax.vmap(of_sequence)(masks, first_queries, first_keys)
    return visible.reshape(*shape.batch, 1, *lengths)


class _Reach(NamedTuple):
    """What a mask certainly shows or hides, as far as `shows_future` needs it."""

    shows_past: bool = False  # each query's own key and all before
    hides_future: bool = False  # all keys after the query
    shows_future: bool = False


def shows_future(mask: Mask) -> bool:
    """Returns whether a mask certainly is meant to show keys after the query: it widens
    `CausalMask()` by `|`.

    A causal call would make such a mask pointless. Masks that a causal call narrows do
    not count, such as windows to both sides, or `LocalMask(8, 0) | mask` with a `mask`
    that shows more of the past.
    """

    def of_part(part: Mask) -> _Reach:
        if part.window is None:
            return _Reach()
        left, right = part.window
        return _Reach(
            shows_past=left is None and (right is None or right >= 0),
            hides_future=right is not None and right <= 0,
        )

    def of_combined(mask: Mask, parts: list[_Reach]) -> _Reach:
        if isinstance(mask, Not):
            return _Reach()
        shows_past, hides_future, shows_future = zip(*parts, strict=True)
        if isinstance(mask, And):
            hides = any(hides_future)
            return _Reach(all(shows_past), hides, any(shows_future) and not hides)
        hides = all(hides_future)
        widens_causal = any(shows_past) and not hides
        return _Reach(False, hides, any(shows_future) or widens_causal)

    return fold(mask, of_part, of_combined).shows_future


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Not(_Combined):
    """Lets queries attend to exactly the keys that a mask hides: `~mask`."""

    mask: Mask

    def combined_tile(self, tiles: list[Array]) -> Bool[Array, "#t #s"]:
        [visible] = tiles
        return ~visible

    def combined_occupancy(self, parts: list[Occupancy]) -> Occupancy:
        [occupancy] = parts
        return Occupancy(~occupancy.all_visible, ~occupancy.any_visible)


@dataclasses.dataclass(frozen=True, eq=False)
class _Window(Mask):
    """The base class of windows: visible keys form a range of
    positions around the query.
    """

    @property
    def window(self) -> Window:
        raise NotImplementedError

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        left, right = self.window
        visible = jnp.ones((1, 1), bool)
        ahead = tile.key_positions - tile.query_positions
        if left is not None:
            visible = visible & (ahead >= _int32(-left))
        if right is not None:
            visible = visible & (ahead <= _int32(right))
        return visible

    def occupancy(self, grid: Grid) -> Occupancy:
        left, right = self.window
        # Distances from a query to a key: least to greatest in a tile, first to last in
        # the window.
        least, greatest = grid.distance_bounds()
        first = INT32_MIN if left is None else _int32(-left)
        last = INT32_MAX if right is None else _int32(right)
        any_visible = (greatest >= first) & (least <= last)
        all_visible = (least >= first) & (greatest <= last)
        return Occupancy(any_visible, all_visible)


def _int32(distance: int) -> int:
    """Clips a window's bound to int32. The window stays the same, because distances
    between positions fit in int32.
    """
    return int(min(max(distance, INT32_MIN), INT32_MAX))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Band(_Window):
    """The window of several masks together: like `LocalMask`, but it may be empty."""

    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})

    @property
    def window(self) -> Window:
        return self.left, self.right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LocalMask(Band):
    """Lets queries attend to keys from `left` positions before to `right` positions
    after their own, inclusive.

    None means no limit on that side.

    Raises:
      ValueError: If `left` or `right` is neither an integer nor None, or if the window
        is empty: left + right < 0.

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

    def __post_init__(self) -> None:
        sides = (self.left, self.right)
        for name, side in zip(("left", "right"), sides, strict=True):
            if side is None:
                continue
            if not is_int(side):
                raise ValueError(
                    "LocalMask(left, right) requires integers or None, but got "
                    f"{sides}."
                )
            # NumPy's unsigned integers have no negative.
            object.__setattr__(self, name, int(side))
        if (
            self.left is not None
            and self.right is not None
            and self.left + self.right < 0
        ):
            raise ValueError(
                f"LocalMask(left, right) requires left + right >= 0, but {sides} is an "
                "empty window; left counts backward, so pass a positive left to "
                "include keys before the query."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CausalMask(_Window):
    """Lets queries attend to keys up to their own position plus `offset`.

    Raises:
      ValueError: If `offset` is not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import CausalMask, dot_product_attention
      >>> x = jnp.ones((1, 5, 2, 8))
      >>> dot_product_attention(x, x, x, mask=CausalMask()).shape
      (1, 5, 2, 8)
    """

    offset: int = static(default=0)

    def __post_init__(self) -> None:
        if not is_int(self.offset):
            raise ValueError(
                f"CausalMask(offset) requires an integer, but got {self.offset!r}; "
                "pass an array as query_offset=."
            )
        object.__setattr__(self, "offset", int(self.offset))

    @property
    def window(self) -> Window:
        return None, self.offset


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WrittenMask(Mask):
    """Hides slots of a ring cache that were never written: keys whose position is
    negative.
    """

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return tile.key_positions >= 0

    def occupancy(self, grid: Grid) -> Occupancy:
        first, last = grid.bounds(1, positions=True)
        return Occupancy(last >= 0, first >= 0)
