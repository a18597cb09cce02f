"""Makes a `pallas_call` from a `Kernel`, which sums over tiles: its grid, its memory, and the blocks of each step.

The grid has the axes of batch and heads, then the *steps*, one for each tile to visit. A list in scalar memory says
which tile a step visits. A kernel has one block of results for each *group* of tiles: the forward kernel for each row
of tiles, the gradients of keys and values for each column of tiles. The tiles of a group follow one another. Empty
tiles (masked throughout) are not listed, so they are neither fetched nor computed; a group of empty tiles keeps one,
whose step only writes the result. If the mask is known only at run time, the list has room for all tiles, and its end
repeats the last tile, for which nothing is fetched.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from flax_mha._src.engines.pallas.inputs import Inputs, KernelPlan, LoadedTile, Sizes, load_tile, read_block
from flax_mha._src.engines.pallas.split_function import LANES
from flax_mha._src.math.tiling import Tiling
from flax_mha.masks import Occupancy

# Different cores may compute the results of different heads, but the steps of a list run in order.
ORDER_OF_STEPS: Literal["parallel", "arbitrary"] = "arbitrary"
Words = Int[Array, "*heads steps"] | np.ndarray

# Flags of a step: it is the first or the last of its group, its tile is computed, its tile must be masked.
FIRST, LAST, COMPUTE, MASKED = 1, 2, 4, 8
FLAG_BITS = 4

# The most words in lists of steps. Scalar memory has 1 MiB, and holds other numbers, too. Each step takes two words of
# four bytes; one of them holds the row and the column of its tile, in 16 bits each.
MOST_WORDS = 2 * 65535


class StepGrid(NamedTuple):
    """The grid of a kernel: its axes of batch and heads, and the sizes of the lists of steps."""

    sizes: Sizes  # sizes of the axes of batch and heads
    results: Sizes  # the same axes of the results, 1 if heads share a result
    lists: Sizes  # the same axes of the lists of steps, 1 if heads share a list
    length: int  # number of steps in each list

    def place(self, *indices: Any) -> tuple[Any, list[Any], Any, Any]:
        """Reads one step: returns its action (`list_steps`), the indices of its head, and its tile's row and column.

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
        """Makes the `BlockSpec` of an array, which selects the block that each step reads or writes.

        `stored` is the array's shape, and `heads` the sizes of its axes of batch and heads. `axes` has a letter for
        each other axis; blocks cut "T" and "S" to one tile. If `axes` is empty, all of the array is in scalar memory.
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
    """Returns the index in a flattened array [*heads] of the head with indices `head`; axes of size 1 are shared."""
    number: Any = 0
    for i, size in zip(head, heads, strict=True):
        number = number if size == 1 else number * size + i
    return number


def list_steps(occupancy: Occupancy, sizes: Sizes, results: Sizes, by: str) -> tuple[Words, Words]:
    """Lists the steps of a kernel, in NumPy if the occupancy is known while tracing.

    Args:
      occupancy: Which tiles [*heads, rows, columns] have some, and which only, visible scores.
      sizes: Sizes of the axes of batch and heads.
      results: The same axes of the results, 1 if heads share a result.
      by: The tiles that one result sums over: a row of tiles ("T"), a column ("S"), one tile ("TS"), or all ("").

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
    """Reshapes an array with an entry for each tile [*heads, rows, columns] to groups; arguments as in `list_steps`."""
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


class KernelCall(NamedTuple):
    """The arguments of all kernels: inputs with leading axes [B..., K, G], and which tiles have visible scores."""

    plan: KernelPlan
    inputs: Inputs
    occupancy: Occupancy


class Result(NamedTuple):
    """Describes an output array of a kernel: axis names and shape of one head's part, and its dtype."""

    names: str
    part: Sizes
    dtype: Any


class Kernel(NamedTuple):
    """A kernel that visits the tiles of each group in order, sums over them, and writes a result.

    For each group, the sums are filled with their initial values, `add` is called for each tile, and `end` once.
    """

    name: str  # name in programs and profiles
    heads: Sizes  # sizes of the results' axes of batch and heads, 1 if heads share a result
    # The outputs. A group is a row of tiles if the first output has an axis "T", a column for "S"; see `by`.
    results: Sequence[Result]
    sums: Sequence[tuple[tuple[int, int], float]]  # shape and initial value of each float32 sum in fast memory
    # `add(tile, results, sums)` adds a tile to the sums; results and sums are references.
    add: Callable[[LoadedTile, Sequence[Any], Sequence[Any]], None]
    end: Callable[[Inputs, Sequence[Any], Sequence[Any]], None]  # `end(inputs, results, sums)` writes the results
    transposed: bool = False  # whether tiles have queries along columns

    @property
    def by(self) -> str:
        """The tiles that one result sums over: a row of tiles ("T"), a column ("S"), one tile ("TS"), or all ("")."""
        return "".join(name for name in "TS" if name in self.results[0].names)

    def kept_rows(self, inputs: Inputs) -> list[Array]:
        """Lists the arrays of rows that are loaded once per group, or none if tiles of a group have different rows."""
        rows = inputs.of_rows(self.transposed)
        return rows if (self.by, rows[0].shape[:-2]) == ("S" if self.transposed else "T", self.heads) else []


def launch(kernel: Kernel, call: KernelCall) -> list[Array]:
    """Runs a kernel, and returns an array [*kernel.heads, *result.part] for each of `kernel.results`."""
    plan, inputs, occupancy = call
    sizes, tiling = inputs.query.shape[:-2], plan.tiling
    rank, arrays = len(sizes), jax.tree.leaves(inputs)
    action, tile = list_steps(occupancy, sizes, kernel.heads, kernel.by)
    grid = StepGrid(sizes, kernel.heads, action.shape[:-1], action.shape[-1])
    axes = [plan.stored_axes(names, x.shape[rank:]) for x, names in zip(arrays, inputs.axis_names(), strict=True)]
    stored = [plan.store(x, names, rank) for x, names in zip(arrays, axes, strict=True)]
    blocks = zip(axes, arrays, stored, strict=True)
    result_axes = [plan.stored_axes(x.names, x.part) for x in kernel.results]
    shapes = [_stored_shape(x, names, kernel, plan) for x, names in zip(kernel.results, result_axes, strict=True)]
    order: list[Any] = ["parallel"] * rank + [ORDER_OF_STEPS]
    outputs = pl.pallas_call(
        _run(kernel, inputs, axes, grid, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*kernel.heads, grid.length),
            in_specs=[grid.spec(names, x.shape[:rank], y.shape, tiling) for names, x, y in blocks],
            out_specs=[
                grid.spec(names, kernel.heads, x.shape, tiling) for names, x in zip(result_axes, shapes, strict=True)
            ],
            scratch_shapes=_scratch(kernel, inputs, plan),
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=plan.interpret,
        name=kernel.name,
    )(action.reshape(-1), tile.reshape(-1), *stored)
    outputs = [
        jnp.swapaxes(x, -1, -2) if names.startswith("H") else x for x, names in zip(outputs, result_axes, strict=True)
    ]
    parts = [x.part for x in kernel.results]
    return [x[(..., *map(slice, part))].reshape(*kernel.heads, *part) for x, part in zip(outputs, parts, strict=True)]


def _stored_shape(result: Result, axes: str, kernel: Kernel, plan: KernelPlan) -> jax.ShapeDtypeStruct:
    array = jax.ShapeDtypeStruct((*kernel.heads, *result.part), result.dtype)
    return jax.eval_shape(lambda x: plan.store(x, axes, len(kernel.heads)), array)


def _scratch(kernel: Kernel, inputs: Inputs, plan: KernelPlan) -> list[Any]:
    """Lists the buffers in fast memory: for the arrays of `kept_rows`, with features last, then for the sums."""
    length, rank = plan.tiling.width if kernel.transposed else plan.tiling.height, len(kernel.heads)
    widths = [(x.shape[-1] if x.ndim == rank + 2 else LANES, x.dtype) for x in kernel.kept_rows(inputs)]
    kept = [pltpu.VMEM((length, width), dtype) for width, dtype in widths]
    return [*kept, *(pltpu.VMEM(shape, jnp.float32) for shape, _ in kernel.sums)]


def _run(kernel: Kernel, inputs: Inputs, axes: Sequence[str], grid: StepGrid, plan: KernelPlan) -> Callable[..., None]:
    """Makes the function that `pallas_call` runs in each step; `axes` are the `stored_axes` of the `inputs`."""
    arrays, structure = jax.tree.flatten(inputs)
    rank, count = len(grid.sizes), len(arrays)

    def run(action_ref: Any, tile_ref: Any, *refs: Any) -> None:
        indices = [pl.program_id(axis) for axis in range(rank + 1)]
        action, head, row, column = grid.place(*indices, action_ref, tile_ref)
        results, scratch = refs[count : count + len(kernel.results)], refs[count + len(kernel.results) :]
        rows, sums = scratch[: len(scratch) - len(kernel.sums)], scratch[len(scratch) - len(kernel.sums) :]

        def load() -> Inputs:
            numbers = [flat_index(head, x.shape[:rank]) for x in arrays]
            blocks = [
                read_block(ref[...] if names else ref[0, number], names, x.dtype, kernel.transposed)
                for ref, names, x, number in zip(refs, axes, arrays, numbers, strict=False)
            ]
            return jax.tree.unflatten(structure, blocks)

        def add(masked: bool) -> None:
            kept = [ref[...] for ref in rows]
            kernel.add(load_tile(plan, load(), kept, (row, column), kernel.transposed, masked), results, sums)

        @pl.when(indices[-1] == 0)
        def _begin_list() -> None:
            for ref, result in zip(results, kernel.results, strict=True):
                if result.names == "L":  # added to in every step
                    ref[...] = jnp.zeros(ref.shape, ref.dtype)

        @pl.when((action & FIRST) != 0)
        def _begin() -> None:
            for ref, x in zip(rows, load().of_rows(kernel.transposed), strict=False):
                ref[...] = jnp.broadcast_to(x if x.shape[1] == 1 else plan.to_rows(x), ref.shape)
            for ref, (shape, start) in zip(sums, kernel.sums, strict=True):
                ref[...] = jnp.full(shape, start, jnp.float32)

        pl.when((action & (COMPUTE | MASKED)) == COMPUTE)(lambda: add(False))
        if inputs.mask is not None:
            pl.when((action & MASKED) != 0)(lambda: add(True))
        pl.when((action & LAST) != 0)(lambda: kernel.end(load(), results, sums))

    return run
