"""Makes a `pallas_call` from a `Kernel`, which sums over tiles: its grid, its memory, and the blocks of each step.

The grid has the axes of batch and heads, then the *steps*, one for each tile to visit. A list in scalar memory says
which tile a step visits. The tiles of a *group*, whose sum is one block of results, follow one another. Empty tiles
(masked throughout) are not listed, so they are neither fetched nor computed; a group of empty tiles keeps one, whose
step only writes the result. If the mask is known only at run time, the list has room for all tiles, and its end repeats
the last tile, for which nothing is fetched.
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
from jaxtyping import Array, Shaped

from flax_mha._src.engines.pallas.inputs import Inputs, KernelPlan, LoadedTile, Sizes, load_tile, read_block
from flax_mha._src.engines.pallas.split_function import LANES
from flax_mha._src.math.head import Head
from flax_mha._src.math.tiling import Tiling
from flax_mha.masks import Occupancy

# Different cores may compute the results of different heads, but the steps of a list run in order.
ORDER_OF_STEPS: Literal["parallel", "arbitrary"] = "arbitrary"
Refs = Sequence[Any]

# Flags of a step: it is the first or the last of its group, its tile is computed, its tile must be masked.
FIRST, LAST, COMPUTE, MASKED = 1, 2, 4, 8
FLAG_BITS = 4

# The most words in lists of steps, two for each step. Scalar memory has 2^18 words, and holds other numbers, too.
MOST_WORDS = 2 * 65535


class StepGrid(NamedTuple):
    """The grid of a kernel: axes of batch and heads, then steps. Finds the tile and the blocks of each step."""

    sizes: Sizes  # sizes of the axes of batch and heads
    results: Sizes  # sizes of these axes in results (and in the grid): 1 if all heads along an axis share a result
    lists: Sizes  # shape of the lists of steps (`list_steps`): these axes, 1 if heads share a list; number of steps
    tiling: Tiling

    def place(self, *indices: Any) -> tuple[Any, list[Any], Any, Any]:
        """Returns a step's action, its head's index along each axis, and its tile's row and column, counted in tiles.

        `indices` are the step's indices in the grid, then references to the actions and tiles of `list_steps`, flat.
        """
        *place, action_ref, tile_ref = indices
        at, head = flat_index(place, self.lists), place[:-1]
        action, tile = action_ref[at], tile_ref[at]
        shared = [axis for axis, size in enumerate(self.sizes) if self.results[axis] < size]
        number = action >> FLAG_BITS
        for axis in shared[:0:-1]:
            head[axis], number = lax.rem(number, self.sizes[axis]), lax.div(number, self.sizes[axis])
        if shared:
            head[shared[0]] = number
        return action, head, lax.shift_right_logical(tile, 16), tile & 0xFFFF

    def spec(self, axes: str, stored: Sizes) -> pl.BlockSpec:
        """Makes the `BlockSpec` of an array, which selects the block that each step reads or writes.

        `stored` is the array's shape, [*heads, rows, columns], and `axes` are its `stored_axes`. A block spans one
        tile along "T" and "S". If `axes` is empty, all of the array is in scalar memory.
        """
        if not axes:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        rank, names = len(self.sizes), axes.rjust(2)  # a vector is stored as one row
        sizes = {"T": self.tiling.height, "S": self.tiling.width}
        block = [sizes.get(name, n) for name, n in zip(names, stored[rank:], strict=True)]

        def index(*indices: Any) -> tuple:
            _, head, i, j = self.place(*indices)
            head = [0 if size == 1 else n for n, size in zip(head, stored[:rank], strict=True)]
            numbers = {"T": i, "S": j}
            return *head, *(numbers.get(name, 0) for name in names)

        return pl.BlockSpec((*[None] * rank, *block), index)


def flat_index(indices: Sequence[Any], sizes: Sizes) -> Any:
    """Converts `indices` in an array [*sizes] to one in the flattened array; in axes of size 1, any index means 0."""
    number: Any = 0
    for i, size in zip(indices, sizes, strict=True):
        number = number if size == 1 else number * size + i
    return number


def list_steps(occupancy: Occupancy, sizes: Sizes, results: Sizes, by: str) -> tuple[Array, Array]:
    """Lists the steps of a kernel. For `sizes` and `results`, see `StepGrid`; for `by`, see `Kernel.by`.

    Returns int32 arrays [*lists, steps] of actions and tiles, in NumPy if `occupancy` is. All heads along an
    axis of length 1 share a list. An action is the sum of the step's flags (such as `FIRST`) and 2^4 times the index of
    its head among the heads that share a result. A tile is 2^16 times its row plus its column.
    """
    group = functools.partial(_group, sizes=sizes, results=results, by=by)
    some, full = (group(x) for x in occupancy)
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    is_first_member = np.arange(some.shape[-1]).reshape((1,) * (some.ndim - 1) + (-1,)) == 0
    visited = some | (~some.any(-1, keepdims=True) & is_first_member)
    first, last = visited.cumsum(-1) == 1, visited[..., ::-1].cumsum(-1)[..., ::-1] == 1
    flags = {FIRST: first, LAST: last, COMPUTE: some, MASKED: some & ~full}  # tiles that are not visited have no flags
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


def _group(x: Any, sizes: Sizes, results: Sizes, by: str) -> Shaped[Array, "*lists groups members"]:
    """Rearranges `x` [*heads, rows, columns], one entry per tile, so that the last axis has the tiles of one group."""
    rank = len(sizes)
    separate = [axis for axis, size in enumerate(results) if size != 1]
    tiles = [rank + "TS".index(name) for name in by]
    members = [axis for axis in range(rank + 2) if axis not in separate + tiles]
    heads = [x.shape[axis] if axis in separate else size for axis, size in enumerate(sizes)]
    lists = [size if axis in separate else 1 for axis, size in enumerate(heads)]
    groups = math.prod(x.shape[axis] for axis in tiles)
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    x = xp.broadcast_to(x, (*heads, *x.shape[rank:]))
    return x.transpose(*separate, *tiles, *members).reshape(*lists, groups, -1)


class KernelCall(NamedTuple):
    """The arguments of all kernels: inputs with leading axes [B..., K, G], and the tiles that have visible scores."""

    plan: KernelPlan
    inputs: Inputs
    occupancy: Occupancy


class Kernel(NamedTuple):
    """A kernel that sums over *groups* of tiles: each group gives one block of each result.

    For output, a group is a row of tiles; for gradients of keys and values, a column. In each group, the sums get their
    initial values, `add` is called for each tile that is not empty, and then `end` writes the block.
    """

    name: str  # name in programs and profiles
    # Each result's axes in one head's part, such as "T H", and its shape: axes of heads that share it have size 1.
    results: Sequence[tuple[str, jax.ShapeDtypeStruct]]
    sums: Sequence[tuple[tuple[int, int], float]]  # shape and initial value of each float32 sum in fast memory
    add: Callable[[LoadedTile, Refs, Refs], None]  # `add(tile, results, sums)` adds to sums, or to "L" results
    end: Callable[[Head, Refs, Refs], None]  # `end(head, results, sums)` writes the results
    transposed: bool = False  # whether tiles have queries along columns

    @property
    def by(self) -> str:
        """Which tiles form a group, in heads that share a result: row ("T"), column ("S"), one ("TS") or all ("")."""
        return "".join(name for name in "TS" if name in self.results[0][0])


def launch(kernel: Kernel, call: KernelCall) -> list[Array]:
    """Runs a kernel on the arrays of all heads, and returns arrays of the shapes in `kernel.results`."""
    plan, inputs, occupancy = call
    sizes, arrays = inputs.head.query.shape[:-2], jax.tree.leaves(inputs)
    rank, results = len(sizes), [x for _, x in kernel.results]
    heads = results[0].shape[:rank]
    action, tile = list_steps(occupancy, sizes, heads, kernel.by)
    grid = StepGrid(sizes, heads, action.shape, plan.tiling)
    axes = [plan.stored_axes(names, x.shape[rank:]) for x, names in zip(arrays, inputs.axis_names(), strict=True)]
    stored = [plan.store(x, names, rank) for x, names in zip(arrays, axes, strict=True)]
    result_axes = [plan.stored_axes(names, x.shape[rank:]) for names, x in kernel.results]
    shapes = jax.eval_shape(lambda *x: [plan.store(*pair, rank) for pair in zip(x, result_axes, strict=True)], *results)
    order: list[Any] = ["parallel"] * rank + [ORDER_OF_STEPS]
    [outputs] = pl.pallas_call(
        _run(kernel, inputs, axes, grid, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*heads, action.shape[-1]),
            in_specs=[[grid.spec(names, x.shape) for names, x in zip(axes, stored, strict=True)]],
            out_specs=[[grid.spec(names, x.shape) for names, x in zip(result_axes, shapes, strict=True)]],
            scratch_shapes=_scratch(kernel, inputs, heads, plan.tiling),
        ),
        out_shape=[shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=plan.interpret,
        name=kernel.name,
    )(action.reshape(-1), tile.reshape(-1), stored)
    outputs = zip(outputs, result_axes, results, strict=True)
    return [plan.restore(x, names, result.shape, rank) for x, names, result in outputs]


def _scratch(kernel: Kernel, inputs: Inputs, result_heads: Sizes, tiling: Tiling) -> list[list[Any]]:
    """Lists buffers in fast memory: for the arrays `inputs.of_rows`, if tiles of a group share them, and for sums."""
    rows, by, length = inputs.of_rows(kernel.transposed), "T", tiling.height
    if kernel.transposed:
        by, length = "S", tiling.width
    rows = rows if (kernel.by, result_heads) == (by, rows[0].shape[:-2]) else []
    widths = [x.shape[-1] if x.ndim == len(result_heads) + 2 else LANES for x in rows]
    kept = [pltpu.VMEM((length, width), x.dtype) for x, width in zip(rows, widths, strict=True)]
    return [kept, [pltpu.VMEM(shape, jnp.float32) for shape, _ in kernel.sums]]


def _run(kernel: Kernel, inputs: Inputs, axes: Sequence[str], grid: StepGrid, plan: KernelPlan) -> Callable[..., None]:
    """Makes the function that `pallas_call` runs in each step; `axes` are the `stored_axes` of the `inputs`."""
    (arrays, structure), rank = jax.tree.flatten(inputs), len(grid.sizes)

    def run(action_ref: Any, tile_ref: Any, refs: Refs, results: Refs, rows: Refs, sums: Refs) -> None:
        action, head, row, column = grid.place(*map(pl.program_id, range(rank + 1)), action_ref, tile_ref)

        def load() -> Inputs:
            blocks = []
            for ref, names, x in zip(refs, axes, arrays, strict=True):
                block = ref[...] if names else ref[0, flat_index(head, x.shape[:rank])]
                blocks.append(read_block(block, names, x.dtype, kernel.transposed))
            return jax.tree.unflatten(structure, blocks)

        def add(masked: bool) -> None:
            kept = [ref[...] for ref in rows]
            kernel.add(load_tile(plan, load(), kept, (row, column), kernel.transposed, masked), results, sums)

        @pl.when(pl.program_id(rank) == 0)
        def _begin_list() -> None:
            for ref, (names, _) in zip(results, kernel.results, strict=True):
                if names == "L":  # added to in every step
                    ref[...] = jnp.zeros(ref.shape, ref.dtype)

        @pl.when((action & FIRST) != 0)
        def _begin() -> None:
            for ref, x in zip(rows, load().of_rows(kernel.transposed), strict=False):
                ref[...] = jnp.broadcast_to(x if x.shape[1] == 1 else plan.to_rows(x), ref.shape)
            for ref, (shape, start) in zip(sums, kernel.sums, strict=True):
                ref[...] = jnp.full(shape, start, jnp.float32)

        pl.when((action & (COMPUTE | MASKED)) == COMPUTE)(lambda: add(False))
        if inputs.head.rule.mask is not None:
            pl.when((action & MASKED) != 0)(lambda: add(True))
        pl.when((action & LAST) != 0)(lambda: kernel.end(load().head, results, sums))

    return run
