"""Which tiles a kernel visits, in which order: lists that are data, read before each step of the kernel's grid.

A kernel has one result for every group of tiles: forward for each row of tiles, the gradients of keys and values for
each column. The tiles of a group follow one another. Empty tiles are not in the lists, so they are neither computed nor
fetched, but a group of empty tiles keeps one, which is not computed: its result has to be written. Where the mask is
data, a list is as long as if no tile were empty, and at its end repeats its last tile, which fetches nothing.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from flax_mha.impl.pallas.numbering import Sizes

# What is done in a step: begin a result, compute the tile, mask it, write the result.
FIRST, LAST, COMPUTE, MASKED = 1, 2, 4, 8
FLAG_BITS = 4

# Scalar memory has 1 MiB, and holds other numbers too. A list takes two words of four bytes for each step.
MOST_WORDS = 2 * 65536 + 4096
# Numbers of rows and columns of tiles share a word.
MOST_TILES_OF_AXIS = 2**15


class Groups(NamedTuple):
    """What the tiles have in common that contribute to one result: their row, their column, both, or nothing."""

    by_row: bool
    by_column: bool


BY_ROW, BY_COLUMN = Groups(True, False), Groups(False, True)


class Occupied(NamedTuple):
    """Which tiles hold a visible score, and in which every score is visible: [heads' own axes..., rows, columns]."""

    some: Bool[Array, "..."] | np.ndarray
    full: Bool[Array, "..."] | np.ndarray

    @property
    def is_known(self) -> bool:
        """Whether it is known while tracing."""
        return isinstance(self.some, np.ndarray)


class Steps(NamedTuple):
    """Lists of steps [own axes..., steps].

    Attributes:
      what: Flags, and 16 times the number of the head among those that share a result.
      where: Row of the tile times 2^16, and its column.
    """

    what: Int[Array, "... n"] | np.ndarray
    where: Int[Array, "... n"] | np.ndarray


def listed(occupied: Occupied, sizes: Sizes, results: Sizes, groups: Groups) -> Steps:
    """The steps of a kernel.

    Args:
      occupied: What is visible.
      sizes: Of the axes of all heads.
      results: Of these axes, the size where every head has its own results, and 1 where they share one.
      groups: Which tiles contribute to one result.
    """
    if not occupied.is_known:
        return _listed(occupied, sizes, results, groups)
    with jax.ensure_compile_time_eval():
        steps = _listed(occupied, sizes, results, groups)
        count = max(int(np.sum(np.asarray(steps.what) % (1 << FLAG_BITS) != 0, axis=-1).max()), 1)
    return Steps(*(np.asarray(x)[..., :count] for x in steps))


def _listed(occupied: Occupied, sizes: Sizes, results: Sizes, groups: Groups) -> Steps:
    own = tuple(n if r != 1 else 1 for n, r in zip(occupied.some.shape[:-2], results, strict=True))
    some, full = (_by_group(jnp.asarray(x), sizes, results, groups) for x in occupied)
    rows, columns = occupied.some.shape[-2:]
    heads = math.prod(s for s, r in zip(sizes, results, strict=True) if r == 1)
    head, row, column = (_ordered(x[None], groups)[0] for x in np.indices((heads, rows, columns), dtype=np.int32))
    place = Steps(jnp.asarray(head.ravel()) << FLAG_BITS, jnp.asarray(((row << 16) | column).ravel()))
    lists = jax.vmap(functools.partial(_one_list, place))(some, full)
    return Steps(*(x.reshape(*own, -1) for x in lists))


def _one_list(place: Steps, some: Bool[Array, "groups members"], full: Bool[Array, "groups members"]) -> Steps:
    """One list, given what the two words of all steps say of heads and tiles."""
    first = np.arange(some.shape[1]) == 0
    visited = (some | (~some.any(-1, keepdims=True) & first[None, :])).ravel()
    number, total = np.arange(visited.size, dtype=np.int32), visited.sum(dtype=jnp.int32)
    order = jnp.argsort(~visited, stable=True)[jnp.minimum(number, total - 1)]
    group = order // some.shape[1]
    changes, edge = group[1:] != group[:-1], jnp.ones((1,), bool)
    computed = some.ravel()[order]
    flags = {
        FIRST: jnp.concatenate([edge, changes]),
        LAST: jnp.concatenate([changes, edge]) | (number == total - 1),
        COMPUTE: computed,
        MASKED: computed & ~full.ravel()[order],
    }
    what = functools.reduce(operator.or_, (jnp.where(x, bit, 0) for bit, x in flags.items()))
    return Steps(place.what[order] + jnp.where(number < total, what, 0), place.where[order])


def _by_group(x: Array, sizes: Sizes, results: Sizes, groups: Groups) -> Bool[Array, "lists groups members"]:
    """With the heads that share a result beside the tiles of each."""
    rank = len(sizes)
    target = tuple(s if r == 1 else n for s, r, n in zip(sizes, results, x.shape, strict=False))
    x = jnp.broadcast_to(x, (*target, *x.shape[rank:]))
    lists, together = ([i for i in range(rank) if (results[i] == 1) == wanted] for wanted in (False, True))
    x = x.transpose(*lists, *together, rank, rank + 1)
    count = math.prod(target[i] for i in lists)
    return _ordered(x.reshape(count, -1, *x.shape[-2:]), groups)


def _ordered(x: Any, groups: Groups) -> Any:
    """[lists, heads, rows, columns] -> [lists, groups, members]."""
    axes = [2] * groups.by_row + [3] * groups.by_column
    rest = [axis for axis in (1, 2, 3) if axis not in axes]
    count = math.prod(x.shape[axis] for axis in axes)
    return x.transpose(0, *axes, *rest).reshape(x.shape[0], count, -1)
