"""What kernels are given: every array of a call as its blocks lie in memory, and how a kernel reads its own block.

An array has leading axes for batch and heads, like all in the layout of one head (`head.py`), and then the part of
one head, whose axes are named: "T" and "S" for queries and keys, "H" for features, "C" for columns of tiles, "L" for
the entries of a table. Numbers go to scalar memory. All else is stored as [heads, rows, columns], because the memory of
a TPU has rows of 128 numbers: an array [T, 1] would take 128 times its size. And [T, 64] would take twice its size, so
where the number of features is no multiple of 128, they lie along rows: [64, T], as XLA itself lays out such arrays.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from flax_mha.core.tile import Offsets
from flax_mha.impl.pallas.numbering import Number
from flax_mha.masks import Mask

LANES = 128
Block = Any  # an array, inside a kernel its own block, None where there is none


class Inputs(NamedTuple):
    """Of a kernel; None where there is none.

    Attributes:
      values: Of the outer part of `score_mod`: numbers, then tables.
      mask: What is visible, if anything may be masked.
      offsets: Positions of the first query and the first key, as numbers or in scalar memory.
      seed: Two random words, for dropout.
      key_marks: 0, or infinity where a key or value is not finite.
      tile_marks: 0, or infinity for columns of tiles with such keys.
      query_marks: 0, or infinity where a query is not finite.
      d_output: The gradient of the output.
      lse: Log-sum-exp; infinity in rows without gradient.
      delta: What is subtracted from the gradients of the weights.
    """

    query: Block
    key: Block
    value: Block
    bias: Block
    sink: Block
    values: list[Any]
    mask: Mask | None
    offsets: Offsets
    seed: tuple[Block, Block] | None
    key_marks: Block
    tile_marks: Block
    query_marks: Block
    d_output: Block = None
    lse: Block = None
    delta: Block = None

    def map_arrays(self, rank: int, change: Callable[[Any, str], Any]) -> "Inputs":
        """The inputs with `change(array, names of the axes of one head)` for every array; `rank` leading axes."""

        def changed(x: Any, axes: str) -> Any:
            return None if x is None else change(x, axes)

        def of_mask(x: Any, axes: str) -> Any:
            return change(x, " ".join(name for name in axes.split() if name not in "BN"))

        return Inputs(
            query=changed(self.query, "T H"),
            key=changed(self.key, "S H"),
            value=changed(self.value, "S H"),
            bias=changed(self.bias, "T|1 S|1"),
            sink=changed(self.sink, ""),
            values=[change(x, "L" if x.ndim > rank else "") for x in self.values],
            mask=None if self.mask is None else self.mask.map_arrays(of_mask),
            offsets=self.offsets.map_arrays(lambda x: change(x, "")),
            seed=None if self.seed is None else (change(self.seed[0], ""), change(self.seed[1], "")),
            key_marks=changed(self.key_marks, "S"),
            tile_marks=changed(self.tile_marks, "C"),
            query_marks=changed(self.query_marks, "T"),
            d_output=changed(self.d_output, "T H"),
            lse=changed(self.lse, "T"),
            delta=changed(self.delta, "T"),
        )


def stored_axes(axes: str, part: tuple[int, ...], upright: bool) -> str:
    """The axes that an array is stored with: those of one entry are left out, and features come last if `upright`."""
    if axes.endswith(" H") and not upright:
        return f"H {axes[0]}"
    if axes != "T|1 S|1":
        return axes
    return " ".join(name for name, size in zip(("T", "S"), part, strict=True) if size != 1)


def stored(x: Array, axes: str, rank: int, upright: bool) -> Array:
    """The array as it lies in memory: [numbers] or [heads, rows, columns]."""
    axes = stored_axes(axes, x.shape[rank:], upright)
    x = jnp.swapaxes(x, -1, -2) if axes.startswith("H ") else x
    part = x.shape[rank:]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8 if axes == "T S" else jnp.int32)
    elif x.dtype == jnp.uint32:
        x = lax.bitcast_convert_type(x, jnp.int32)
    elif jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.int32)
    if axes in ("", "C"):
        return x.reshape(-1)
    if axes == "L":
        x = jnp.pad(x, [(0, 0)] * rank + [(0, -part[0] % LANES)])
    return x.reshape(-1, *(part if len(axes.split()) == 2 else (1, math.prod(part) if axes != "L" else x.shape[-1])))


def spec(
    axes: str, shape: tuple[int, ...], tile: tuple[int, int], place: Callable[..., tuple[Number, Number, Number]]
) -> pl.BlockSpec:
    """Which block of a stored array a step is given; `place(*indices)` is its head, row and column of tiles."""
    if axes in ("", "C"):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    names = axes.split()
    if axes == "L":
        return pl.BlockSpec((1, 1, shape[-1]), lambda *at: (place(*at)[0], 0, 0))
    sizes = {"T": tile[0], "S": tile[1], "H": shape[-1 if axes.endswith("H") else -2]}
    block = (1, *((1,) if len(names) == 1 else ()), *(sizes[name] for name in names))

    def index(*at: Any) -> tuple:
        head, row, column = place(*at)
        numbers = {"T": row, "S": column, "H": 0}
        return head, *((0,) if len(names) == 1 else ()), *(numbers[name] for name in names)

    return pl.BlockSpec(block, index)


def loaded(ref: Any, axes: str, dtype: Any, number: Number, column: Number, columns: int, across: bool) -> Array:
    """What a step is given of an array; with `across`, queries lie along columns."""
    if axes == "":
        x = ref[number]
    elif axes == "C":
        x = ref[number * columns + column]
    else:
        x = ref[0]
    x = x.astype(jnp.int32) if x.dtype == jnp.int8 else x
    if axes == ("S" if across else "T"):
        x = column_of(x)
    if axes == "T S" and across:
        x = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x).T
    return x != 0 if dtype == jnp.bool_ and axes != "L" else x


def column_of(row: Array, width: int = 1) -> Array:
    """A row [1, n] as columns [n, width] that are all alike; up to 128 of them."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :width]


def row_of(columns: Array) -> Array:
    """Columns [n, 128] that are all alike as a row [1, n]."""
    return jnp.transpose(columns)[:1]


def lanes(columns: Array, width: int) -> Array:
    """Columns [n, 128] that are all alike, so many of them; whole groups of 128 cost nothing."""
    wide = [columns] * -(-width // LANES)
    return (columns if len(wide) == 1 else jnp.concatenate(wide, axis=1))[:, :width]
