"""From the inputs of a kernel to one `pallas_call`: how arrays are stored, and what a step is given.

An array has leading axes for batch and heads, like all in the layout of one head (`head.py`), and then the part of
one head, whose axes are named: "T" and "S" for queries and keys, "H" for features, "L" for the entries of a table.
Numbers go to scalar memory. All else is stored as [*heads, rows, columns], because the memory of a TPU has rows of 128
numbers: an array [T, 1] would take 128 times its size. And [T, 64] would take twice its size, so where the number of
features is no multiple of 128, they come first: [64, T], as XLA itself lays out such arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from flax_mha.core.tile import Offsets
from flax_mha.impl.pallas.grid import COMPUTE, MASKED, Grid, Sizes, flat_index, list_steps
from flax_mha.impl.shared.tiling import Tiling
from flax_mha.masks import Mask, Occupancy

LANES = 128
Block = Any  # an array of all heads, inside a kernel the block of one step; None where there is none
# Results of different heads may be computed by different cores, but the steps of a list follow one another.
ORDER_OF_STEPS: Literal["parallel", "arbitrary"] = "arbitrary"


class Inputs(NamedTuple):
    """The arrays that a kernel is given.

    Attributes:
      numbers: Values of the outer part of `score_mod`.
      tables: The same, to look entries up.
      mask: What is visible, if anything may be masked.
      offsets: Positions of the first query and the first key.
      seed: Two random words, for dropout.
      key_poison: 0, or infinity where a key or value is not finite.
      query_poison: 0, or infinity where a query is not finite.
      d_output: The gradient of the output.
      lse: Log-sum-exp; infinity in rows without gradient.
      delta: What is subtracted from the gradients of the weights.
    """

    query: Block
    key: Block
    value: Block
    bias: Block
    sink: Block
    numbers: tuple[Block, ...]
    tables: tuple[Block, ...]
    mask: Mask | None
    offsets: Offsets
    seed: tuple[Block, Block] | None
    key_poison: Block
    query_poison: Block
    d_output: Block = None
    lse: Block = None
    delta: Block = None

    def axis_names(self) -> list[str]:
        """Lists the names of the axes of one head's part of each array, in the order of `jax.tree.leaves`."""
        names = {"query": "T H", "key": "S H", "value": "S H", "bias": "T|1 S|1", "tables": "L", "key_poison": "S"}
        names |= {"query_poison": "T", "d_output": "T H", "lse": "T", "delta": "T"}
        lists = {field: [names.get(field, "")] * len(jax.tree.leaves(x)) for field, x in self._asdict().items()}
        if self.mask is not None:
            of_mask = jax.tree.leaves(self.mask.map_arrays(_axes))
            lists["mask"] = [" ".join(name for name in axes.split() if name not in "BN") for axes in of_mask]
        return [axes for axes_of_field in lists.values() for axes in axes_of_field]


def _axes(x: Any, axes: str) -> Any:
    return axes


class Plan(NamedTuple):
    """How the kernels of a call compute scores and store arrays: all that is static.

    Attributes:
      rule: How products become scores, without arrays: a `tile.TileRule`.
      tiling: How scores are cut; arrays are padded to whole tiles.
      features_last: Whether features come last in memory.
      product_dtype: To which query, key and value are rounded for the matrix products.
      dtype: Of the output, and of the gradients of queries, keys and values.
      interpret: As `jax.experimental.pallas.pallas_call` takes it.
    """

    rule: Any
    tiling: Tiling
    features_last: bool
    product_dtype: jnp.dtype
    dtype: jnp.dtype
    interpret: Any

    def stored_axes(self, names: str, part: Sizes) -> str:
        """The axes with which a part of these axes is stored: "T|1" and "S|1" are left out if they have one entry."""
        pairs = zip(names.split(), part, strict=True)
        kept = "".join(name[0] for name, size in pairs if not (name.endswith("|1") and size == 1))
        return kept[::-1] if kept.endswith("H") and not self.features_last else kept

    def store(self, x: Array, axes: str, rank: int) -> Array:
        """An array with `rank` leading axes, as [*heads, rows, columns], or numbers [1, n]."""
        heads = x.shape[:rank]
        x = jnp.swapaxes(x, -1, -2) if axes.startswith("H") else x
        part = x.shape[rank:] if x.ndim - rank == len(axes) else tuple(n for n in x.shape[rank:] if n != 1)
        sizes = dict(zip("TS", self.tiling.shape, strict=True)) | {"L": -(-part[-1] // LANES) * LANES if part else 0}
        padding = [(0, sizes.get(name, n) - n, 0) for name, n in zip(axes, part, strict=True)]
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.int8 if len(axes) == 2 else jnp.int32)
        elif jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.int32)
        x = lax.pad(x.reshape(*heads, *part), jnp.zeros((), x.dtype), [(0, 0, 0)] * rank + padding)
        return x.reshape(1, -1) if not axes else x if len(axes) == 2 else jnp.expand_dims(x, -2)

    def to_rows(self, block: Array) -> Array:
        """A block with features last, as matrix products take what belongs to rows of a tile, or back."""
        return block if self.features_last else jnp.transpose(block.astype(jnp.float32)).astype(block.dtype)


class KernelCall(NamedTuple):
    """What the kernels of a call take: inputs with the axes [B..., K, G] in front, and which tiles are visible."""

    plan: Plan
    inputs: Inputs
    occupancy: Occupancy


class Step(NamedTuple):
    """One step of a kernel.

    Attributes:
      what: Its flags.
      row: First row of its tile.
      column: First column of its tile.
      is_first: Whether it is the first step on its list.
      has_mask: Whether tiles may have to be masked.
      load: Reads the step's blocks of the inputs.
    """

    what: Int[Array, ""]
    row: Int[Array, ""]
    column: Int[Array, ""]
    is_first: Bool[Array, ""]
    has_mask: bool
    load: Callable[[], Inputs]

    def when(self, flag: int) -> Callable[[Callable[[], None]], Any]:
        """Runs the function that it decorates if the step has this flag."""
        return pl.when((self.what & flag) != 0)

    def compute(self, tile: Callable[[bool], None]) -> None:
        """Runs `tile(masked)` unless the tile is empty."""
        pl.when((self.what & (COMPUTE | MASKED)) == COMPUTE)(lambda: tile(False))
        if self.has_mask:
            self.when(MASKED)(lambda: tile(True))


class Result(NamedTuple):
    """A result of a kernel: the names of the axes of one head's part, their sizes and the dtype."""

    names: str
    part: Sizes
    dtype: Any


class Kernel(NamedTuple):
    """A kernel: all that is static.

    Attributes:
      name: What it is called in programs and profiles.
      body: `body(step, *results, *scratch)` does what a step does; results and scratch are references.
      heads: The sizes of the results' axes of batch and heads: 1 where heads share a result.
      by: Which axes of tiles tell results apart: "T" rows, "S" columns.
      results: What it computes.
      scratch: Memory that it keeps from step to step.
      transposed: Whether its tiles have queries along columns.
    """

    name: str
    body: Callable[..., None]
    heads: Sizes
    by: str
    results: Sequence[Result]
    scratch: Sequence[Any]
    transposed: bool = False


def launch(kernel: Kernel, call: KernelCall) -> list[Array]:
    """Computes the results [*kernel.heads, *part]."""
    plan, inputs, occupancy = call
    sizes, tiling = inputs.query.shape[:-2], plan.tiling
    rank, arrays = len(sizes), jax.tree.leaves(inputs)
    steps = list_steps(occupancy, sizes, kernel.heads, kernel.by)
    grid = Grid(sizes, kernel.heads, steps.what.shape[:-1], steps.what.shape[-1])
    axes = [plan.stored_axes(names, x.shape[rank:]) for x, names in zip(arrays, inputs.axis_names(), strict=True)]
    stored = [plan.store(x, names, rank) for x, names in zip(arrays, axes, strict=True)]
    blocks = zip(axes, arrays, stored, strict=True)
    result_axes = [plan.stored_axes(x.names, x.part) for x in kernel.results]
    shapes = [_stored_shape(x, names, kernel, plan) for x, names in zip(kernel.results, result_axes, strict=True)]
    order: list[Any] = ["parallel"] * rank + [ORDER_OF_STEPS]
    outputs = pl.pallas_call(
        _run(kernel, inputs, axes, grid, tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*kernel.heads, grid.length),
            in_specs=[grid.spec(names, x.shape[:rank], y.shape, tiling) for names, x, y in blocks],
            out_specs=[
                grid.spec(names, kernel.heads, x.shape, tiling) for names, x in zip(result_axes, shapes, strict=True)
            ],
            scratch_shapes=list(kernel.scratch),
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=plan.interpret,
        name=kernel.name,
    )(steps.what.reshape(-1), steps.where.reshape(-1), *stored)
    outputs = [
        jnp.swapaxes(x, -1, -2) if names.startswith("H") else x for x, names in zip(outputs, result_axes, strict=True)
    ]
    parts = [x.part for x in kernel.results]
    return [x[(..., *map(slice, part))].reshape(*kernel.heads, *part) for x, part in zip(outputs, parts, strict=True)]


def _stored_shape(result: Result, axes: str, kernel: Kernel, plan: Plan) -> jax.ShapeDtypeStruct:
    array = jax.ShapeDtypeStruct((*kernel.heads, *result.part), result.dtype)
    return jax.eval_shape(lambda x: plan.store(x, axes, len(kernel.heads)), array)


def _run(kernel: Kernel, inputs: Inputs, axes: Sequence[str], grid: Grid, tiling: Tiling) -> Callable[..., None]:
    """What Pallas runs in each step: the kernel's body, with the blocks of the step."""
    rank = len(grid.sizes)
    arrays, structure = jax.tree.flatten(inputs)

    def run(what_ref: Any, where_ref: Any, *refs: Any) -> None:
        indices = [pl.program_id(axis) for axis in range(rank + 1)]
        what, head, row, column = grid.place(*indices, what_ref, where_ref)

        def load() -> Inputs:
            given = zip(refs, axes, arrays, strict=False)
            numbers = [flat_index(head, x.shape[:rank]) for x in arrays]
            blocks = [
                _load(ref[...] if names else ref[0, number], names, x.dtype, kernel.transposed)
                for (ref, names, x), number in zip(given, numbers, strict=True)
            ]
            return jax.tree.unflatten(structure, blocks)

        has_mask = inputs.mask is not None
        step = Step(what, row * tiling.height, column * tiling.width, indices[-1] == 0, has_mask, load)
        kernel.body(step, *refs[len(arrays) :])

    return run


def _load(x: Array, axes: str, dtype: Any, transposed: bool) -> Array:
    """What a block of an array of this dtype holds; in transposed tiles, queries lie along columns."""
    x = x.astype(jnp.int32) if x.dtype == jnp.int8 else x
    if axes == ("S" if transposed else "T"):
        x = jnp.transpose(jnp.broadcast_to(x, (LANES, x.shape[1])))[:, :1]
    if axes == "TS" and transposed:
        x = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x).T
    return x != 0 if dtype == jnp.bool_ and axes != "L" else x


def repeat_lanes(columns: Array, width: int) -> Array:
    """Columns [n, 128] that are all alike, so many of them; whole groups of 128 cost nothing."""
    wide = [columns] * -(-width // LANES)
    return (columns if len(wide) == 1 else jnp.concatenate(wide, axis=1))[:, :width]
