"""Makes a `pallas_call` from a `Kernel`, which sums over tiles: its grid, its memory, and the blocks of each step."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha._src.engines.pallas.grid import (
    COMPUTE,
    FIRST,
    LANES,
    LAST,
    MASKED,
    Sizes,
    StepGrid,
    flat_index,
    list_steps,
)
from flax_mha._src.engines.pallas.inputs import Inputs, KernelPlan, LoadedTile, load_tile, read_block
from flax_mha.masks import Occupancy

# Different cores may compute the results of different heads, but the steps of a list run in order.
ORDER_OF_STEPS: Literal["parallel", "arbitrary"] = "arbitrary"


class KernelCall(NamedTuple):
    """The arguments of the kernels of a call: inputs with leading axes [B..., K, G], and the occupancy of tiles."""

    plan: KernelPlan
    inputs: Inputs
    occupancy: Occupancy


class Result(NamedTuple):
    """An output array of a kernel: axis names and shape of one head's part, and its dtype."""

    names: str
    part: Sizes
    dtype: Any


class Kernel(NamedTuple):
    """A kernel that visits the tiles of each group (see `grid.py`) in order, sums over them, and writes a result.

    For each group, the sums are filled with their initial values, `add` is called for each tile, and `end` once.
    """

    name: str  # name in programs and profiles
    heads: Sizes  # sizes of the results' axes of batch and heads, 1 if heads share a result
    # The outputs. The axes "T" and "S" of the first tell whether a group is a row or a column of tiles, one tile, or
    # all.
    results: Sequence[Result]
    sums: Sequence[tuple[tuple[int, int], float]]  # shape and initial value of each float32 sum in fast memory
    # `add(tile, results, sums)` adds a tile to the sums; results and sums are references.
    add: Callable[[LoadedTile, Sequence[Any], Sequence[Any]], None]
    end: Callable[[Inputs, Sequence[Any], Sequence[Any]], None]  # `end(inputs, results, sums)` writes the results
    transposed: bool = False  # whether its tiles have queries along columns

    @property
    def by(self) -> str:
        """Groups of tiles with one result: "T" rows, "S" columns, "TS" single tiles, "" all tiles."""
        return "".join(name for name in "TS" if name in self.results[0].names)

    def kept_rows(self, inputs: Inputs) -> list[Array]:
        """Lists the arrays of a tile's rows if a group's tiles share them, to be loaded once per group; else none."""
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
    """Lists the buffers in fast memory: first for the arrays of `kept_rows`, with features last, then for the sums."""
    length, rank = plan.tiling.width if kernel.transposed else plan.tiling.height, len(kernel.heads)
    widths = [(x.shape[-1] if x.ndim == rank + 2 else LANES, x.dtype) for x in kernel.kept_rows(inputs)]
    kept = [pltpu.VMEM((length, width), dtype) for width, dtype in widths]
    return [*kept, *(pltpu.VMEM(shape, jnp.float32) for shape, _ in kernel.sums)]


def _run(kernel: Kernel, inputs: Inputs, axes: Sequence[str], grid: StepGrid, plan: KernelPlan) -> Callable[..., None]:
    """Makes the body that `pallas_call` runs in each step; `axes` are the `stored_axes` of each array in `inputs`."""
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
