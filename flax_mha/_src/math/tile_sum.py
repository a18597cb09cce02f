"""Sums over the tiles of one head, with derivatives of every order in memory O(T + S).

A *tile sum* calls a function for each tile with the tile's parts of its arguments, and
adds the results to the tile's parts of the outputs. It is linear in some arguments; the
others are its *residuals*. Its tangent is a tile sum of the function's tangent, and its
transpose is a tile sum of the transposed function. So all derivatives visit the same
tiles, and hold the scores of one tile at a time. A *row of tiles* is all tiles with the
same queries.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from flax_mha._src.call.operands import accumulation_dtype
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_as
from flax_mha._src.math.derivatives import Function, differentiate
from flax_mha._src.math.scores import ScoreRule
from flax_mha._src.math.tiling import (
    BlockMask,
    Kind,
    TileVisit,
    Tiling,
    by_row,
    over_keys,
)


class Argument(NamedTuple):
    """Describes an argument or an output of `tile_sum`: which part of it a tile uses
    (`kind`), its shape and dtype.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: DTypeLike
    factor: float = 1.0  # the sum is multiplied by it, if this is an output

    @classmethod
    def of(
        cls, kinds: Iterable[Any], arrays: Iterable[Array]
    ) -> "tuple[Argument, ...]":
        return tuple(
            cls(kind, x.shape, x.dtype) for kind, x in zip(kinds, arrays, strict=True)
        )

    def start(self, height: int | None = None) -> Array:
        """Returns zeros to accumulate the output in; with `height`, only for one row of
        tiles of this height.

        The zeros for kind "keys" are transposed: a CPU multiplies matrices faster if
        the result is wide, [F, s].
        """
        shape = self.shape if height is None else (height, self.shape[1])
        shape = shape[::-1] if self.kind in ("queries transposed", "keys") else shape
        return jnp.zeros(shape, accumulation_dtype(jnp.dtype(self.dtype)))

    def finish(self, total: Array) -> Array:
        """Converts the sum accumulated from `start` to the output's layout and dtype,
        and multiplies it by `factor`.
        """
        total = total.T if self.kind in ("queries transposed", "keys") else total
        return (total if self.factor == 1.0 else total * self.factor).astype(self.dtype)


class TileSummand(NamedTuple):
    """The function that `tile_sum` calls for each tile, and the descriptions of its
    arguments and outputs.
    """

    # `compute(rule, tile, residuals, linear, is_safe)` returns the tile's parts of the
    # outputs, from its parts of the arguments. It is differentiated with `is_safe`:
    # then it must use `ScoreRule.differentiable_tile`.
    compute: Callable[..., Sequence[Array]]
    residuals: tuple[Argument, ...]  # the arguments in which it is not linear
    linear: tuple[Argument, ...]  # the arguments in which it is linear
    outputs: tuple[Argument, ...]

    def jvp(self, places: Sequence[int]) -> "TileSummand":
        """Returns the tangent with respect to some arguments, given by their indices
        `places` in (*residuals, *linear).

        It is a `TileSummand`, too, linear in these arguments' tangents; its residuals
        are all arguments of `self`.
        """
        count = len(self.residuals)

        def compute(
            rule: ScoreRule,
            tile: Tile,
            arguments: Sequence,
            tangents: Sequence,
            _: bool,
        ) -> Sequence[Array]:
            def primal(*arguments: Array) -> Sequence[Array]:
                return self.compute(
                    rule, tile, arguments[:count], arguments[count:], True
                )

            return differentiate(
                primal, arguments, dict(zip(places, tangents, strict=True))
            )

        arguments = (*self.residuals, *self.linear)
        return TileSummand(
            compute, arguments, tuple(arguments[i] for i in places), self.outputs
        )

    def transposed(self) -> "TileSummand":
        """Returns the function that computes the linear arguments' cotangents from the
        outputs' cotangents.
        """

        def compute(
            rule: ScoreRule,
            tile: Tile,
            residuals: Sequence,
            cotangents: Sequence,
            _: bool,
        ) -> list:
            def forward(linear: list[Array]) -> list[Array]:
                return list(self.compute(rule, tile, residuals, linear, True))

            like = residuals[0]
            zeros = [
                varying_as(like, jnp.zeros(_part_shape(x, tile), x.dtype))
                for x in self.linear
            ]
            outputs, pull = jax.vjp(forward, zeros)
            scaled = [
                (x * y.factor).astype(out.dtype)
                for x, y, out in zip(cotangents, self.outputs, outputs, strict=True)
            ]
            return pull(scaled)[0]

        outputs = tuple(Argument(x.kind, x.shape, x.dtype) for x in self.linear)
        return TileSummand(compute, self.residuals, self.outputs, outputs)


def _part_shape(argument: Argument, tile: Tile) -> tuple[int, ...]:
    """Returns the shape of the part of an argument that `TileVisit.cut` returns."""
    kind = argument.kind
    shape = argument.shape
    if kind == "whole":
        return shape
    if kind == "scores":
        return tuple(
            1 if size == 1 else part
            for size, part in zip(shape, tile.shape, strict=True)
        )
    length = tile.shape[int(kind.startswith("keys"))]
    if kind in ("queries", "keys"):
        return length, shape[1]
    return shape[0] if kind == "keys transposed" else shape[1], length


def tile_sum(
    tiling: Tiling,
    function: TileSummand,
    rule: ScoreRule,
    blocks: BlockMask,
    residuals: Sequence[Array],
    linear: Sequence[Array],
    backward: Callable[
        [ScoreRule, BlockMask, Sequence[Array], Sequence[Array]], Sequence[Array]
    ]
    | None = None,
) -> list[Array]:
    """Sums `function` over the tiles of one head that `blocks` lists; returns the sums,
    its outputs.

    `residuals` and `linear` are the arguments of `function`. The sum is linear in
    `linear`. `backward(rule, blocks, residuals, cotangents)` computes the transpose of
    the sum; None uses `function.transposed`.
    """
    context, structure = jax.tree.flatten((rule, blocks))
    return _sum_of(tiling, function, structure, backward)(*context, *residuals, *linear)


def _sum_of(
    tiling: Tiling, function: TileSummand, structure: Any, backward: Callable | None
) -> Function:
    """Makes the JAX operation that `tile_sum` calls, with its tangent and its
    transpose.

    It takes the leaves of (rule, blocks), whose pytree structure is `structure`, then
    residuals and linear arguments.
    """
    count = structure.num_leaves
    first = structure.num_leaves + len(function.residuals)

    def split(arguments: Sequence[Any]) -> tuple[ScoreRule, BlockMask, Sequence[Any]]:
        return (*jax.tree.unflatten(structure, arguments[:count]), arguments[count:])

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        rule, blocks, values = split(arguments)
        # Rule and block mask have no tangent.
        along = {i - count: x for i, x in sorted(tangents.items()) if i >= count}
        # Only along linear arguments: the same function of their tangents.
        if all(count + i >= first for i in along):
            linear = [along.get(i, jnp.zeros_like(x)) for i, x in enumerate(values)][
                len(function.residuals) :
            ]
            d_result = result(*arguments[:first], *linear)
        else:
            d_result = tile_sum(
                tiling,
                function.jvp(tuple(along)),
                rule,
                blocks,
                values,
                list(along.values()),
            )
        return result(*arguments), d_result

    def transpose(
        residuals: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        rule, blocks, values = split(residuals)
        if backward is not None:
            return backward(rule, blocks, values, cotangents)
        return tile_sum(tiling, function.transposed(), rule, blocks, values, cotangents)

    def evaluate(*arguments: Any) -> Sequence[Array]:
        return _sum_rows(tiling, function, *split(arguments))

    result = Function(function.outputs, evaluate, jvp, transpose, first)
    return result


def _sum_rows(
    tiling: Tiling,
    function: TileSummand,
    rule: ScoreRule,
    blocks: BlockMask,
    arguments: Sequence[Any],
) -> Sequence[Array]:
    """Evaluates a tile sum, one row of tiles after another; `arguments` are residuals,
    then linear arguments.
    """
    kinds = [x.kind for x in (*function.residuals, *function.linear)]
    outputs = function.outputs
    count = len(function.residuals)
    of_rows = [i for i, kind in enumerate(kinds) if kind.startswith("queries")]
    row_outputs = [i for i, x in enumerate(outputs) if x.kind.startswith("queries")]

    def row(
        sums: dict[int, Array], row_parts: tuple
    ) -> tuple[dict[int, Array], list[Array]]:
        i, blocks, *parts = row_parts
        values = list(arguments)
        for place, part in zip(of_rows, parts, strict=True):
            values[place] = part.T if kinds[place] == "queries transposed" else part

        def visit_tile(
            visit: TileVisit, rule: ScoreRule, state: dict[int, Array]
        ) -> dict[int, Array]:
            cut = [visit.cut(kind, x) for kind, x in zip(kinds, values, strict=True)]
            parts = function.compute(rule, visit.tile, cut[:count], cut[count:], False)
            return {
                n: visit.add(outputs[n].kind, state[n], part)
                for n, part in enumerate(parts)
            }

        start = {n: outputs[n].start(tiling.height) for n in row_outputs}
        state = over_keys(
            blocks,
            tiling,
            rule,
            i,
            visit_tile,
            {**sums, **varying_as(arguments[-1], start)},
        )
        return {n: state[n] for n in sums}, [
            outputs[n].finish(state[n]) for n in row_outputs
        ]

    sums = {n: x.start() for n, x in enumerate(outputs) if n not in row_outputs}
    rows = by_row(tiling, blocks, *(arguments[i] for i in of_rows))
    sums, by_rows = lax.scan(row, varying_as(arguments[-1], sums), rows)
    results = {n: outputs[n].finish(x) for n, x in sums.items()}
    results |= {
        n: x.reshape(outputs[n].shape)
        for n, x in zip(row_outputs, by_rows, strict=True)
    }
    return [results[n] for n in range(len(outputs))]
