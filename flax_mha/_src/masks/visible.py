"""`Visible`, the form in which a call holds all its masks: limits, segments, and the
rest.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from flax_mha._src.core.fields import static, with_axes
from flax_mha._src.core.tile import Grid, Tile
from flax_mha._src.core.tracing import readable
from flax_mha._src.masks.arrays import LengthMask, SegmentMask
from flax_mha._src.masks.base import And, Band, Mask, Occupancy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Visible(Mask):
    """What all masks of a call leave visible together. A part that is None hides
    nothing.

    Limits are positions, as in other masks.
    """

    # The tightest limits of all causal masks and windows; together, they may hide all.
    left: int | None = static(default=None)
    right: int | None = static(default=None)
    # The smallest lengths of each sequence.
    query_lengths: Int[Array, "..."] | None = with_axes("B", default=None)
    key_lengths: Int[Array, "..."] | None = with_axes("B", default=None)
    segments: SegmentMask | None = None
    # All other masks, combined by `&`. One mask, not a list: what several masks share
    # is then computed once, and its arrays are passed to a program once.
    rest: Mask | None = None

    @classmethod
    def of(cls, masks: Sequence[Mask | None]) -> "Visible | None":
        """Combines masks from `Mask.canonical` by `&`. Returns None if nothing is
        masked.
        """
        left = right = query_lengths = key_lengths = segments = None
        rest: list[Mask] = []
        for part in _conjuncts(masks):
            if part.window is not None:
                before, after = part.window
                left = _smaller(left, before)
                right = _smaller(right, after)
            elif isinstance(part, LengthMask):
                query_lengths = _smaller(query_lengths, part.query_lengths)
                key_lengths = _smaller(key_lengths, part.key_value_lengths)
            elif isinstance(part, SegmentMask) and segments is None:
                segments = part
            else:
                rest.append(part)
        visible = cls(left, right, query_lengths, key_lengths, segments, merged(rest))
        if visible.hides_keys:
            return visible
        return None

    @property
    def hides_keys(self) -> bool:
        """Whether any key may be hidden."""
        return any(part is not None for part in vars(self).values())

    @property
    def others(self) -> list[Mask]:
        """The masks that `rest` combines."""
        return _conjuncts([self.rest])

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        return self._combined().tile(tile)

    def occupancy(self, grid: Grid) -> Occupancy:
        return self._combined().occupancy(grid)

    def _combined(self) -> Mask:
        """Combines the parts by `&`."""
        window = None
        lengths = None
        if self.left is not None or self.right is not None:
            window = Band(self.left, self.right)
        if self.query_lengths is not None or self.key_lengths is not None:
            lengths = LengthMask(self.key_lengths, self.query_lengths)
        combined = merged([window, lengths, self.segments, self.rest])
        if combined is None:
            return Band(None, None)
        return combined


def merged(masks: Sequence[Mask | None]) -> Mask | None:
    """Combines masks by `&`; None in the list masks nothing."""
    present = [mask for mask in masks if mask is not None]
    if present:
        return functools.reduce(operator.and_, present)
    return None


def _conjuncts(masks: Sequence[Mask | None]) -> list[Mask]:
    """Splits masks at `&`: returns [a, b, c] for [a & b, None, c]. Lists each part
    once, and those of a `Visible`.
    """
    # By `id`, in the order of the list.
    seen: dict[int, Mask] = {}

    def visit(mask: Mask | None) -> None:
        if mask is None or id(mask) in seen:
            return
        seen[id(mask)] = mask
        if isinstance(mask, Visible):
            visit(mask._combined())
        if isinstance(mask, And):
            visit(mask.left)
            visit(mask.right)

    for mask in masks:
        visit(mask)
    return [part for part in seen.values() if not isinstance(part, And | Visible)]


def _smaller(first: Any, second: Any) -> Any:
    """Returns the smaller one of two limits, ints or arrays; None is no limit."""
    if first is None:
        return second
    if second is None:
        return first
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    # Arrays that are known while tracing stay known.
    if readable(first) and readable(second):
        return np.minimum(first, second)
    return jnp.minimum(first, second)
