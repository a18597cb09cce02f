"""Sums over the tiles of one head, linear in some arguments, with derivatives of every order in linear memory.

A *tile sum* applies a function to parts of arrays, those that belong to a tile, and adds what it returns to the parts
of other arrays. The tangent of a tile sum is a tile sum, whose function is the tangent of the function of a tile; and
the transpose of one is a tile sum, whose function is transposed. So all derivatives visit the same tiles, and none
holds more than one tile of scores.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from flax_mha.call.operands import accumulation_dtype
from flax_mha.core.tile import Scalar, Tile
from flax_mha.core.tracing import varying_as
from flax_mha.impl.shared.derivatives import Function
from flax_mha.impl.shared.scores import ScoreRule
from flax_mha.impl.shared.tiling import BlockMask, TileBand, Tiling, padded_mask

T = TypeVar("T")

# Which part of an array belongs to a tile: of queries [T, F] its rows, [t, F], or these transposed, [F, t]; of keys
# [S, F] its columns, [s, F], or of [F, S] [F, s]; of [T | 1, S | 1] the tile itself; all of any other array.
Kind = Literal["queries", "queries transposed", "keys", "keys transposed", "scores", "whole"]


class Argument(NamedTuple):
    """An argument or output of a tile sum; `factor` multiplies an output."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: DTypeLike
    factor: float = 1.0

    @classmethod
    def of(cls, kinds: Iterable[Any], arrays: Iterable[Array]) -> "tuple[Argument, ...]":
        return tuple(cls(kind, x.shape, x.dtype) for kind, x in zip(kinds, arrays, strict=True))

    def start(self, height: int | None = None) -> Array:
        """Makes zeros to add up an output in, or a row of tiles of this height.

        A CPU multiplies matrices faster if the result is wide, [F, s], not tall.
        """
        shape = self.shape if height is None else (height, self.shape[1])
        shape = shape[::-1] if self.kind in ("queries transposed", "keys") else shape
        return jnp.zeros(shape, accumulation_dtype(jnp.dtype(self.dtype)))

    def finish(self, total: Array) -> Array:
        """Turns such a sum into the output."""
        total = total.T if self.kind in ("queries transposed", "keys") else total
        return (total if self.factor == 1.0 else total * self.factor).astype(self.dtype)


class TileVisit(NamedTuple):
    """One tile to compute, which begins `first` rows below the top of its row of tiles."""

    first: int
    tile: Tile

    def rows(self, x: Array, axis: int = 0) -> Array:
        """Cuts the tile's part out of an array of its row of tiles."""
        height = self.tile.shape[0]
        return x if x.shape[axis] == height else lax.slice_in_dim(x, self.first, self.first + height, axis=axis)

    def put_rows(self, x: Array, part: Array, axis: int = 0) -> Array:
        """Replaces the tile's part of an array of its row of tiles."""
        return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, self.first, axis)

    def cut(self, kind: Kind, x: Array) -> Array:
        """Cuts the tile's part out of an argument; those of queries are of the row of tiles."""
        axis = int(kind.endswith("transposed"))
        if kind.startswith("queries"):
            return self.rows(x, axis)
        if kind.startswith("keys"):
            return self.tile.cut_columns(x, axis)
        return self.tile.cut(x) if kind == "scores" else x

    def add(self, kind: Kind, x: Array, part: Array) -> Array:
        """Adds the tile's part to a sum: of queries those of the row of tiles, of keys transposed, [F, S]."""
        part, axis = part.astype(x.dtype), int(kind.endswith("transposed"))
        if kind.startswith("queries"):
            return self.put_rows(x, self.rows(x, axis) + part, axis)
        if kind.startswith("keys"):
            part = part if axis else part.T
            return Tile(0, self.tile.column, (part.shape[0], part.shape[1])).add(x, part)
        return self.tile.add(x, part) if kind == "scores" else x + part


class TileFunction(NamedTuple):
    """A function of one tile.

    Attributes:
      compute: `compute(rule, tile, residuals, linear, is_safe)` returns parts of the outputs from parts of the
        arguments. Where `is_safe`, derivatives of it are finite if they are finite at all visible places.
      residuals: What it is not linear in.
      linear: What it is linear in.
      outputs: What it returns.
    """

    compute: Callable[..., Sequence[Array]]
    residuals: tuple[Argument, ...]
    linear: tuple[Argument, ...]
    outputs: tuple[Argument, ...]

    def jvp(self, places: Sequence[int]) -> "TileFunction":
        """The tangent along these arguments, residuals first, from all arguments and the tangents of these."""
        count = len(self.residuals)

        def compute(rule: ScoreRule, tile: Tile, values: Sequence, tangents: Sequence, _: bool) -> list:
            def moved(*some: Array) -> list[Array]:
                replaced = dict(zip(places, some, strict=True))
                mine = [replaced.get(i, x) for i, x in enumerate(values)]
                return list(self.compute(rule, tile, mine[:count], mine[count:], True))

            return jax.jvp(moved, tuple(values[i] for i in places), tuple(tangents))[1]

        arguments = (*self.residuals, *self.linear)
        return TileFunction(compute, arguments, tuple(arguments[i] for i in places), self.outputs)

    def transposed(self) -> "TileFunction":
        """The function that returns cotangents of the linear arguments from those of the outputs."""

        def compute(rule: ScoreRule, tile: Tile, residuals: Sequence, cotangents: Sequence, _: bool) -> list:
            def forward(linear: list[Array]) -> list[Array]:
                return list(self.compute(rule, tile, residuals, linear, True))

            like = residuals[0]
            zeros = [varying_as(like, jnp.zeros(_part_shape(x, tile), x.dtype)) for x in self.linear]
            outputs, pull = jax.vjp(forward, zeros)
            scaled = [
                (x * y.factor).astype(out.dtype) for x, y, out in zip(cotangents, self.outputs, outputs, strict=True)
            ]
            return pull(scaled)[0]

        outputs = tuple(Argument(x.kind, x.shape, x.dtype) for x in self.linear)
        return TileFunction(compute, self.residuals, self.outputs, outputs)


def _part_shape(argument: Argument, tile: Tile) -> tuple[int, ...]:
    kind, shape = argument.kind, argument.shape
    if kind == "whole":
        return shape
    if kind == "scores":
        return tuple(1 if size == 1 else part for size, part in zip(shape, tile.shape, strict=True))
    length = tile.shape[int(kind.startswith("keys"))]
    if kind in ("queries", "keys"):
        return length, shape[1]
    return shape[0] if kind == "keys transposed" else shape[1], length


def tile_sum(
    tiling: Tiling,
    function: TileFunction,
    rule: ScoreRule,
    blocks: BlockMask,
    residuals: Sequence[Array],
    linear: Sequence[Array],
    by_hand: Callable[[ScoreRule, BlockMask, Sequence[Array], Sequence[Array]], Sequence[Array]] | None = None,
) -> list[Array]:
    """Sums a function over all tiles of one head that are visited.

    `by_hand` computes the transpose, instead of the sum over transposed functions of tiles.
    """
    context, structure = jax.tree.flatten((rule, blocks))
    return _sum_of(tiling, function, structure, by_hand)(*context, *residuals, *linear)


def _sum_of(tiling: Tiling, function: TileFunction, structure: Any, by_hand: Callable | None) -> Function:
    """The sum as a function of the leaves of rule and block mask, which have this structure, and of all arguments."""
    count, first = structure.num_leaves, structure.num_leaves + len(function.residuals)

    def split(arguments: Sequence[Any]) -> tuple[ScoreRule, BlockMask, Sequence[Any]]:
        return (*jax.tree.unflatten(structure, arguments[:count]), arguments[count:])

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        rule, blocks, own = split(arguments)
        along = {i - count: x for i, x in sorted(tangents.items()) if i >= count}  # rule and block mask have none
        if all(count + i >= first for i in along):  # then it is a sum of the same function
            linear = [along.get(i, jnp.zeros_like(x)) for i, x in enumerate(own)][len(function.residuals) :]
            moved = result(*arguments[:first], *linear)
        else:
            moved = tile_sum(tiling, function.jvp(tuple(along)), rule, blocks, own, list(along.values()))
        return result(*arguments), moved

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        rule, blocks, own = split(residuals)
        if by_hand is not None:
            return by_hand(rule, blocks, own, cotangents)
        return tile_sum(tiling, function.transposed(), rule, blocks, own, cotangents)

    def evaluate(*arguments: Any) -> Sequence[Array]:
        return _sum_rows(tiling, function, *split(arguments))

    result = Function(function.outputs, evaluate, jvp, transpose, first)
    return result


def _sum_rows(
    tiling: Tiling, function: TileFunction, rule: ScoreRule, blocks: BlockMask, own: Sequence[Any]
) -> Sequence[Array]:
    """Computes the sum, a row of tiles after another."""
    kinds = [x.kind for x in (*function.residuals, *function.linear)]
    outputs, count = function.outputs, len(function.residuals)
    of_rows = [i for i, kind in enumerate(kinds) if kind.startswith("queries")]
    row_outputs = [i for i, x in enumerate(outputs) if x.kind.startswith("queries")]

    def row(sums: dict[int, Array], mine: tuple) -> tuple[dict[int, Array], list[Array]]:
        i, blocks, *parts = mine
        values = list(own)
        for place, part in zip(of_rows, parts, strict=True):
            values[place] = part.T if kinds[place] == "queries transposed" else part

        def visit_tile(visit: TileVisit, rule: ScoreRule, state: dict[int, Array]) -> dict[int, Array]:
            cut = [visit.cut(kind, x) for kind, x in zip(kinds, values, strict=True)]
            parts = function.compute(rule, visit.tile, cut[:count], cut[count:], False)
            return {n: visit.add(outputs[n].kind, state[n], part) for n, part in enumerate(parts)}

        start = {n: outputs[n].start(tiling.height) for n in row_outputs}
        state = over_keys(blocks, tiling, rule, i, visit_tile, {**sums, **varying_as(own[-1], start)})
        return {n: state[n] for n in sums}, [outputs[n].finish(state[n]) for n in row_outputs]

    sums = {n: x.start() for n, x in enumerate(outputs) if n not in row_outputs}
    rows = by_row(tiling, blocks, *(own[i] for i in of_rows))
    sums, by_rows = lax.scan(row, varying_as(own[-1], sums), rows)
    results = {n: outputs[n].finish(x) for n, x in sums.items()}
    results |= {n: x.reshape(outputs[n].shape) for n, x in zip(row_outputs, by_rows, strict=True)}
    return [results[n] for n in range(len(outputs))]


def over_keys(
    blocks: BlockMask,
    tiling: Tiling,
    rule: ScoreRule,
    i: Int[Array, ""],
    step: Callable[[TileVisit, ScoreRule, T], T],
    state: T,
) -> T:
    """Folds `step` over the tiles of row i that are visited; `blocks` is the row's own."""
    mask = padded_mask(rule.mask, tiling) if blocks.partial_bands else None

    def visit(band: TileBand, rule: ScoreRule, n: Scalar, state: T) -> T:
        row, shape = i * tiling.height + band.first, (band.end - band.first, tiling.width)
        tile = tiling.tile(row, element(blocks.column, n), shape, rule.offsets.values)
        return step(TileVisit(band.first, tile), rule, state)

    for bands, mask_of_tile, first, end in (
        (blocks.full_bands, None, 0, blocks.num_full),
        (blocks.partial_bands, mask, blocks.num_full, blocks.num_tiles),
    ):
        if not bands:
            continue
        visits = [functools.partial(visit, band, dataclasses.replace(rule, mask=mask_of_tile)) for band in bands]
        one = visits[0] if len(visits) == 1 else functools.partial(_visit_band, blocks.band, visits)
        state = one(0, state) if blocks.single else lax.fori_loop(first, end, one, state)
    return state


def _visit_band(band: Any, visits: Sequence[Callable[[Scalar, T], T]], n: Scalar, state: T) -> T:
    return lax.switch(element(band, n), visits, n, state)


def element(x: Any, place: Scalar) -> Int[Array, ""]:
    """One entry of an array, in place."""
    first = [jnp.asarray(place, jnp.int32)]
    return lax.dynamic_slice(x, first, (1,), allow_negative_indices=False).reshape(())


def by_row(tiling: Tiling, blocks: BlockMask, *arrays: Array | None) -> tuple:
    """Cuts by rows of tiles: their numbers, block masks, and parts of the arrays [T, ...]."""
    shape = (tiling.rows, tiling.height)
    parts = (None if x is None else x.reshape(*shape, *x.shape[1:]) for x in arrays)
    return jnp.arange(tiling.rows, dtype=jnp.int32), blocks, *parts
