"""Sums over the tiles of one head, with derivatives of every order in memory O(T + S).

A *tile sum* calls a function for each tile with the tile's parts of its arguments, and
adds the results to the tile's parts of the outputs. It is linear in some arguments x;
the others are its *residuals* r::

    y = sum of f(r, x) over the tiles          the sum
    dy = sum of (df/dr dr + f(r, dx))          its tangent, the sum of f's tangent
    dx = sum of f(r, .)^T dy                   its transpose, the sum of f's transpose

So all derivatives visit the same tiles, and hold the scores of one tile at a time. A
*row of tiles* is all tiles with the same queries.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from flax_mha._src.call.call import accumulation_dtype
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_as
from flax_mha._src.math.derivatives import Function, differentiate
from flax_mha._src.math.scores import ScoreRule
from flax_mha._src.math.tiling import (
    ArgumentKind,
    BlockMask,
    TileVisit,
    Tiling,
    by_row,
    over_keys,
)


class Argument(NamedTuple):
    """Describes an argument or an output of `tile_sum`: which part of it a tile uses
    (`kind`), its shape and dtype.
    """

    kind: ArgumentKind
    shape: tuple[int, ...]
    dtype: DTypeLike
    factor: float = 1.0  # the sum is multiplied by it, if this is an output

    @classmethod
    def of(
        cls, kinds: Iterable[Any], arrays: Iterable[Array]
    ) -> "tuple[Argument, ...]":
        pairs = zip(kinds, arrays, strict=True)
        return tuple(cls(kind, x.shape, x.dtype) for kind, x in pairs)

    @property
    def is_of_queries(self) -> bool:
        """Whether it has an entry for each query: a row of tiles has its part of it."""
        return self.kind.startswith("queries")

    @property
    def is_summed_transposed(self) -> bool:
        # A CPU multiplies matrices faster if the result is wide, [F, s], not [s, F].
        return self.kind in ("queries transposed", "keys")

    def start(self, height: int | None = None) -> Array:
        """Returns zeros to accumulate the output in; with `height`, only for one row of
        tiles of this height.
        """
        shape = self.shape
        if height is not None:
            shape = (height, self.shape[1])
        if self.is_summed_transposed:
            shape = shape[::-1]
        return jnp.zeros(shape, accumulation_dtype(jnp.dtype(self.dtype)))

    def finish(self, total: Array) -> Array:
        """Converts the sum accumulated from `start` to the output's layout and dtype,
        and multiplies it by `factor`.
        """
        if self.is_summed_transposed:
            total = total.T
        if self.factor != 1.0:
            total = total * self.factor
        return total.astype(self.dtype)


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

        It is also a `TileSummand`, linear in these arguments' tangents; its residuals
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
                residuals = arguments[:count]
                linear = arguments[count:]
                return self.compute(rule, tile, residuals, linear, True)

            by_place = dict(zip(places, tangents, strict=True))
            return differentiate(primal, arguments, by_place)

        arguments = (*self.residuals, *self.linear)
        return TileSummand(
            compute=compute,
            residuals=arguments,
            linear=tuple(arguments[i] for i in places),
            outputs=self.outputs,
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

            # The function is linear, so its derivative at 0 is the function itself.
            zeros = []
            for x in self.linear:
                part = jnp.zeros(_part_shape(x, tile), x.dtype)
                zeros.append(varying_as(residuals[0], part))
            outputs, pull = jax.vjp(forward, zeros)
            scaled = []
            for x, argument, out in zip(cotangents, self.outputs, outputs, strict=True):
                scaled.append((x * argument.factor).astype(out.dtype))
            return pull(scaled)[0]

        return TileSummand(
            compute=compute,
            residuals=self.residuals,
            linear=self.outputs,
            outputs=tuple(x._replace(factor=1.0) for x in self.linear),
        )


def _part_shape(argument: Argument, tile: Tile) -> tuple[int, ...]:
    """Returns the shape of the part of an argument that `TileVisit.cut` returns."""
    if argument.kind == "whole":
        return argument.shape
    rows, columns = argument.shape
    height, width = tile.shape
    if argument.kind == "queries":
        return height, columns
    if argument.kind == "queries transposed":
        return columns, height
    if argument.kind == "keys":
        return width, columns
    if argument.kind == "keys transposed":
        return rows, width
    # An axis of length 1 is kept, to be broadcast.
    return min(rows, height), min(columns, width)


def tile_sum(
    tiling: Tiling,
    function: TileSummand,
    rule: ScoreRule,
    tiles: BlockMask,
    residuals: Sequence[Array],
    linear: Sequence[Array],
    backward: Callable[
        [ScoreRule, BlockMask, Sequence[Array], Sequence[Array]], Sequence[Array]
    ]
    | None = None,
) -> list[Array]:
    """Sums `function` over the tiles of one head that `tiles` lists; returns the sums,
    its outputs.

    `residuals` and `linear` are the arguments of `function`. The sum is linear in
    `linear`. `backward(rule, tiles, residuals, cotangents)` computes the transpose of
    the sum; None uses `function.transposed`.
    """
    context, structure = jax.tree.flatten((rule, tiles))
    operation = _sum_of(tiling, function, structure, backward)
    return operation(*context, *residuals, *linear)


def _sum_of(
    tiling: Tiling, function: TileSummand, structure: Any, backward: Callable | None
) -> Function:
    """Makes the JAX operation that `tile_sum` calls, with its tangent and its
    transpose.

    It takes the leaves of (rule, tiles), whose pytree structure is `structure`, then
    residuals and linear arguments.
    """
    count = structure.num_leaves
    num_residuals = len(function.residuals)
    first_linear = count + num_residuals

    def split(arguments: Sequence[Any]) -> tuple[ScoreRule, BlockMask, Sequence[Any]]:
        rule, tiles = jax.tree.unflatten(structure, arguments[:count])
        return rule, tiles, arguments[count:]

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        rule, tiles, values = split(arguments)
        # Rule and block mask have no tangent.
        along = {i - count: x for i, x in sorted(tangents.items()) if i >= count}
        is_linear = all(i >= num_residuals for i in along)
        if is_linear:
            # The tangent is the same function of the linear arguments' tangents.
            linear = []
            for i in range(num_residuals, len(values)):
                linear.append(along.get(i, jnp.zeros_like(values[i])))
            d_result = operation(*arguments[:first_linear], *linear)
        else:
            d_result = tile_sum(
                tiling=tiling,
                function=function.jvp(tuple(along)),
                rule=rule,
                tiles=tiles,
                residuals=values,
                linear=list(along.values()),
            )
        return operation(*arguments), d_result

    def transpose(
        residuals: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        rule, tiles, values = split(residuals)
        if backward is not None:
            return backward(rule, tiles, values, cotangents)
        return tile_sum(
            tiling=tiling,
            function=function.transposed(),
            rule=rule,
            tiles=tiles,
            residuals=values,
            linear=cotangents,
        )

    def evaluate(*arguments: Any) -> Sequence[Array]:
        rule, tiles, values = split(arguments)
        return _sum_rows(tiling, function, rule, tiles, values)

    operation = Function(
        outputs=function.outputs,
        evaluate=evaluate,
        jvp=jvp,
        transpose=transpose,
        first_linear=first_linear,
    )
    return operation


def _sum_rows(
    tiling: Tiling,
    function: TileSummand,
    rule: ScoreRule,
    tiles: BlockMask,
    arguments: Sequence[Any],
) -> Sequence[Array]:
    """Evaluates a tile sum, one row of tiles after another; `arguments` are residuals,
    then linear arguments.
    """
    described = (*function.residuals, *function.linear)
    outputs = function.outputs
    count = len(function.residuals)
    # A row of tiles needs only its part of these arguments, and finishes its part of
    # these outputs. To all other outputs every row adds something.
    row_arguments = [i for i, x in enumerate(described) if x.is_of_queries]
    row_outputs = [n for n, x in enumerate(outputs) if x.is_of_queries]
    sum_outputs = [n for n, x in enumerate(outputs) if not x.is_of_queries]

    def row(
        sums: dict[int, Array], row_parts: tuple
    ) -> tuple[dict[int, Array], list[Array]]:
        i, tiles, *parts = row_parts
        values = list(arguments)
        for place, part in zip(row_arguments, parts, strict=True):
            if described[place].kind == "queries transposed":
                part = part.T
            values[place] = part

        def visit_tile(
            visit: TileVisit, rule: ScoreRule, state: dict[int, Array]
        ) -> dict[int, Array]:
            cut = []
            for argument, x in zip(described, values, strict=True):
                cut.append(visit.cut(argument.kind, x))
            parts = function.compute(rule, visit.tile, cut[:count], cut[count:], False)
            added = {}
            for n, part in enumerate(parts):
                added[n] = visit.add(outputs[n].kind, state[n], part)
            return added

        of_row = {n: outputs[n].start(tiling.height) for n in row_outputs}
        of_row = varying_as(arguments[-1], of_row)
        state = over_keys(
            tiles=tiles,
            tiling=tiling,
            rule=rule,
            i=i,
            step=visit_tile,
            state={**sums, **of_row},
        )
        sums = {n: state[n] for n in sums}
        return sums, [outputs[n].finish(state[n]) for n in row_outputs]

    start = {n: outputs[n].start() for n in sum_outputs}
    start = varying_as(arguments[-1], start)
    rows = by_row(tiling, tiles, *(arguments[i] for i in row_arguments))
    sums, parts_of_rows = lax.scan(row, start, rows)

    results = {n: outputs[n].finish(x) for n, x in sums.items()}
    for n, parts in zip(row_outputs, parts_of_rows, strict=True):
        results[n] = parts.reshape(outputs[n].shape)
    return [results[n] for n in range(len(outputs))]
