"""The grid of a kernel: the axes of batch and heads, then the steps, one for each tile that is visited.

The tiles are listed in data that a kernel reads before each step. A kernel has one block of results for each *group* of
tiles: the forward kernel for each row of tiles, the gradients of keys and values for each column of tiles. The tiles of
a group follow one another. Empty tiles are not listed, so they are neither fetched nor computed; a group of empty tiles
keeps one, whose step only writes the result. If the mask is data, a list is as long as if no tile were empty, and
its end repeats the last tile, for which nothing is fetched.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from flax_mha._src.math.tiling import Tiling
from flax_mha.masks import Occupancy

Sizes = tuple[int, ...]
Words = Int[Array, "*heads steps"] | np.ndarray

# Flags of a step: it is the first or the last of its group, its tile is computed, its tile must be masked.
FIRST, LAST, COMPUTE, MASKED = 1, 2, 4, 8
FLAG_BITS = 4

LANES = 128
# The most words in lists of steps. Scalar memory has 1 MiB, and holds other numbers, too. Each step takes two words of
# four bytes; one of them holds the row and the column of its tile, in 16 bits each.
MOST_WORDS = 2 * 65535


class StepGrid(NamedTuple):
    """The grid of a kernel: its axes of batch and heads, and the lists that say which tile each step visits."""

    sizes: Sizes  # sizes of the axes of batch and heads
    results: Sizes  # the same axes of the results, 1 if heads share a result
    lists: Sizes  # the same axes of the lists of steps, 1 if heads share a list
    length: int  # number of steps in each list

    def place(self, *indices: Any) -> tuple[Any, list[Any], Any, Any]:
        """Reads one step: returns its action, the indices of its head, and the row and the column of its tile.

        Args:
          *indices: The step's indices in the grid, then references to the two flat results of `list_steps`.
        """
        *head, step, action_ref, tile_ref = indices
        at = flat_index(head, self.lists) * self.length + step
        action, tile = action_ref[at], tile_ref[at]
        shared = [axis for axis, size in enumerate(self.sizes) if self.results[axis] < size]
        number = action >> FLAG_BITS
        for axis in shared[:0:-1]:
            head[axis], number = lax.rem(number, self.sizes[axis]), lax.div(number, self.sizes[axis])
        if shared:
            head[shared[0]] = number
        return action, head, lax.shift_right_logical(tile, 16), tile & 0xFFFF

    def spec(self, axes: str, heads: Sizes, stored: Sizes, tiling: Tiling) -> pl.BlockSpec:
        """Makes the spec that tells which block of an array of shape `stored` each step reads or writes.

        `heads` are the array's sizes of batch and heads. `axes` names its other axes, a letter each; if there are
        none, all of the array is in scalar memory.
        """
        if not axes:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        sizes, row = {"T": tiling.height, "S": tiling.width}, (0,) * (len(axes) == 1)
        block = [sizes.get(name, n) for name, n in zip(axes, stored[-len(axes) :], strict=True)]

        def index(*indices: Any) -> tuple:
            _, head, i, j = self.place(*indices)
            head = [0 if size == 1 else n for n, size in zip(head, heads, strict=True)]
            numbers = {"T": i, "S": j}
            return *head, *row, *(numbers.get(name, 0) for name in axes)

        return pl.BlockSpec((*(None for _ in heads), *(1 for _ in row), *block), index)


def flat_index(head: Sequence[Any], heads: Sizes) -> Any:
    """Returns the index of the head with indices `head` in a flattened array [*heads]; heads share axes of size 1."""
    number: Any = 0
    for i, size in zip(head, heads, strict=True):
        number = number if size == 1 else number * size + i
    return number


def list_steps(occupancy: Occupancy, sizes: Sizes, results: Sizes, by: str) -> tuple[Words, Words]:
    """Lists the steps of a kernel, in NumPy if the occupancy is known while tracing.

    Args:
      occupancy: Occupancy of all tiles [*heads, rows, columns].
      sizes: Sizes of the axes of batch and heads.
      results: The same axes of the results, 1 if heads share a result.
      by: Groups of tiles with one result: "T" rows, "S" columns, "TS" single tiles, "" all tiles.

    Returns:
      Actions and tiles, each an int32 array [*lists, steps], where all heads along an axis of length 1 share a list.
      An action is the sum of the step's flags (such as `FIRST`) and 2^4 times the index of its head among the heads
      that share a result. A tile is 2^16 times its row plus its column.
    """
    group = functools.partial(_group, sizes=sizes, results=results, by=by)
    some, full = (group(x) for x in occupancy)
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    is_first_member = np.arange(some.shape[-1]).reshape((1,) * (some.ndim - 1) + (-1,)) == 0
    visited = some | (~some.any(-1, keepdims=True) & is_first_member)
    flags = {FIRST: _first(visited), LAST: _first(visited[..., ::-1])[..., ::-1], COMPUTE: some, MASKED: some & ~full}
    shared = tuple(size if result == 1 else 1 for size, result in zip(sizes, results, strict=True))
    head, row, column = np.indices((math.prod(shared), *occupancy.any_visible.shape[-2:]), dtype=np.int32)
    head, tile = (group(x.reshape(*shared, *x.shape[1:])) for x in (head, (row << 16) | column))
    action = sum(xp.where(x, np.int32(bit), np.int32(0)) for bit, x in flags.items()) + (head << FLAG_BITS)
    lists, count = some.shape[:-2], math.prod(some.shape[-2:])
    visited, action, tile = (xp.broadcast_to(x, some.shape).reshape(-1, count) for x in (visited, action, tile))
    number, total = np.arange(count, dtype=np.int32)[None], visited.sum(-1, keepdims=True, dtype=np.int32)
    steps = number if xp is jnp else number[:, : int(total.max())]
    order = xp.argsort(xp.where(visited, number, number + count), axis=-1)
    order = xp.take_along_axis(order, xp.minimum(steps, total - 1), -1)
    action, tile = (xp.take_along_axis(x, order, -1) for x in (action, tile))
    action = xp.where(steps < total, action, action >> FLAG_BITS << FLAG_BITS)
    return action.reshape(*lists, -1), tile.reshape(*lists, -1)


def _first(x: Any) -> Bool[Array, "*heads groups members"]:
    """Sets all but the first True of each group to False."""
    return x & (x.cumsum(-1) == 1)


def _group(x: Any, sizes: Sizes, results: Sizes, by: str) -> Bool[Array, "*heads groups members"]:
    """Reshapes `x` [*heads, rows, columns] to one group for all tiles of a result; arguments as in `list_steps`."""
    rank = len(sizes)
    shared = [axis for axis in range(rank) if results[axis] == 1]
    separate = [axis for axis in range(rank) if results[axis] != 1]
    tiles = [rank + "TS".index(name) for name in by]
    members = [axis for axis in (rank, rank + 1) if axis not in tiles]
    whole = tuple(sizes[axis] if axis in shared else x.shape[axis] for axis in range(rank))
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    x = xp.broadcast_to(x, (*whole, *x.shape[rank:]))
    heads = tuple(1 if axis in shared else x.shape[axis] for axis in range(rank))
    groups = math.prod(x.shape[axis] for axis in tiles)
    return x.transpose(*separate, *tiles, *shared, *members).reshape(*heads, groups, -1)
