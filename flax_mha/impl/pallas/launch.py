"""Launching a kernel: from its inputs, its lists of steps and its results to one `pallas_call`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from flax_mha.impl.pallas import operands
from flax_mha.impl.pallas.numbering import Number, Sizes, full_number, own_number, shared
from flax_mha.impl.pallas.operands import Inputs
from flax_mha.impl.pallas.steps import COMPUTE, FLAG_BITS, MASKED, Steps
from flax_mha.impl.shared.tiling import Tiling

# Different results may be computed by different cores, but the steps that contribute to one follow one another.
SEMANTICS: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "arbitrary")


class Result(NamedTuple):
    """One result of a kernel: [axes of the results..., part], by name as in `operands.py`."""

    axes: str
    part: tuple[int, ...]
    dtype: Any


class Visit(NamedTuple):
    """One step of a kernel.

    Attributes:
      what: Its flags.
      row: First row of its tile.
      column: First column of its tile.
      begins: Whether it is the first step of all on this list.
      load: Reads the inputs' own blocks.
    """

    what: Int[Array, ""]
    row: Int[Array, ""]
    column: Int[Array, ""]
    begins: Bool[Array, ""]
    load: Callable[[], Inputs]

    def when(self, flag: int) -> Callable[[Callable[[], None]], Any]:
        """Runs the function that it decorates if the step has this flag."""
        return pl.when((self.what & flag) != 0)

    def compute(self, tile: Callable[[bool], None], has_mask: bool) -> None:
        """Runs `tile(masked)` unless the tile is empty."""
        pl.when((self.what & (COMPUTE | MASKED)) == COMPUTE)(lambda: tile(False))
        if has_mask:
            self.when(MASKED)(lambda: tile(True))


class Kernel(NamedTuple):
    """A kernel: all that is static.

    Attributes:
      name: What it is called in programs and profiles.
      body: `body(visit, *results, *scratch)` does what a step does; the results and the scratch are references.
      results: What it computes.
      scratch: Memory that it keeps from step to step.
      across: Whether scores are computed with queries along columns.
      upright: Whether features lie along columns, in inputs and results.
    """

    name: str
    body: Callable[..., None]
    results: Sequence[Result]
    scratch: Sequence[Any]
    upright: bool
    across: bool = False


class Machine(NamedTuple):
    """Where and how kernels run: the tiles, the bytes of fast memory that they may take, and who interprets them."""

    tiling: Tiling
    memory: int | None
    interpret: Any


class Places(NamedTuple):
    """Where each step finds its inputs and its results.

    Attributes:
      sizes: Of the axes of batch and heads.
      results: Likewise of the results: 1 where heads share one.
      lists: Likewise of the lists of steps.
      length: Steps of each list.
    """

    sizes: Sizes
    results: Sizes
    lists: tuple[int, ...]
    length: int

    def head(self, number: Number, what: Number) -> Number:
        """The number of the head among all of them, in a step of a result."""
        number = full_number(number, self.sizes, self.results)
        if self.results == self.sizes:
            return number
        return number + full_number(what >> FLAG_BITS, self.sizes, shared(self.sizes, self.results))

    def step(self, number: Any, i: Any, what_ref: Any, where_ref: Any) -> tuple[Any, Any, Any]:
        """The flags of a step, and the row and the column of its tile among the tiles."""
        place = own_number(number, self.results, self.lists) * self.length + i if math.prod(self.lists) > 1 else i
        return what_ref[place], where_ref[place] >> 16, where_ref[place] & 0xFFFF

    def blocks(self, own: Sizes | None) -> Callable[..., tuple[Number, Number, Number]]:
        """What Pallas asks for the block of an array whose axes have the sizes `own`; None: of a result."""

        def place(number: Any, i: Any, what_ref: Any, where_ref: Any) -> tuple[Number, Number, Number]:
            what, row, column = self.step(number, i, what_ref, where_ref)
            if own is None or own == self.results:
                return number, row, column
            return own_number(self.head(number, what), self.sizes, own), row, column

        return place


def launch(kernel: Kernel, inputs: Inputs, sizes: Sizes, results: Sizes, steps: Steps, machine: Machine) -> list[Array]:
    """The results [results..., part].

    Args:
      kernel: What is computed.
      inputs: Its inputs, with leading axes for batch and heads.
      sizes: Of these axes.
      results: Likewise of the results: 1 where heads share one.
      steps: What is visited.
      machine: Where it runs.
    """
    rank, tile = len(sizes), (machine.tiling.height, machine.tiling.width)
    places = Places(sizes, results, steps.what.shape[:-1], steps.what.shape[-1])
    axes = jax.tree.leaves(
        inputs.map_arrays(rank, lambda x, names: operands.stored_axes(names, x.shape[rank:], kernel.upright))
    )
    flat = jax.tree.leaves(inputs.map_arrays(rank, lambda x, names: operands.stored(x, names, rank, kernel.upright)))
    own_sizes = [x.shape[:rank] for x in jax.tree.leaves(inputs)]
    number = math.prod(results)
    shapes = [_shape(x, number, kernel.upright) for x in kernel.results]
    outputs = pl.pallas_call(
        _run(kernel, inputs, axes, places, machine),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(number, places.length),
            in_specs=[
                operands.spec(names, x.shape, tile, places.blocks(own))
                for names, x, own in zip(axes, flat, own_sizes, strict=True)
            ],
            out_specs=[
                operands.spec(
                    operands.stored_axes(x.axes, x.part, kernel.upright), shape.shape, tile, places.blocks(None)
                )
                for x, shape in zip(kernel.results, shapes, strict=True)
            ],
            scratch_shapes=list(kernel.scratch),
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS, vmem_limit_bytes=machine.memory),
        interpret=machine.interpret,
        name=kernel.name,
    )(steps.what.reshape(-1), steps.where.reshape(-1), *flat)
    pairs = zip(outputs, kernel.results, strict=True)
    upright = [x if kernel.upright or "H" not in result.axes else jnp.swapaxes(x, -1, -2) for x, result in pairs]
    return [x.reshape(*results, *result.part) for x, result in zip(upright, kernel.results, strict=True)]


def _shape(result: Result, number: int, upright: bool) -> jax.ShapeDtypeStruct:
    """Of so many results, as they are stored."""
    zeros = functools.partial(jnp.zeros, (number, *result.part), result.dtype)
    return jax.eval_shape(lambda: operands.stored(zeros(), result.axes, 1, upright))


def _run(kernel: Kernel, inputs: Inputs, axes: Sequence[str], places: Places, machine: Machine) -> Callable[..., None]:
    """What Pallas runs in each step: the kernel's body, with the blocks of the step."""
    tiling, rank = machine.tiling, len(places.sizes)
    given, structure = jax.tree.flatten(inputs)
    kinds = [(x.dtype, x.shape[:rank]) for x in given]

    def run(what_ref: Any, where_ref: Any, *refs: Any) -> None:
        number, i = pl.program_id(0), pl.program_id(1)
        what, row, column = places.step(number, i, what_ref, where_ref)

        def load() -> Inputs:
            full = places.head(number, what)
            values = [
                operands.loaded(
                    ref, names, dtype, own_number(full, places.sizes, own), column, tiling.cells, kernel.across
                )
                for ref, names, (dtype, own) in zip(refs, axes, kinds, strict=False)
            ]
            return jax.tree.unflatten(structure, values)

        visit = Visit(what, row * tiling.height, column * tiling.width, i == 0, load)
        kernel.body(visit, *refs[len(kinds) :])

    return run
