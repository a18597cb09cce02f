"""A user's function of one score, split in two: what XLA computes once for each head, and the rest, for whole tiles.

What depends on the batch entry, the head and captured arrays alone is computed outside of the kernel, and
differentiated there. The kernel is given its values: numbers, and small tables that are looked up by position. Example:
of `score - slopes[h] * (q_idx - kv_idx)` the outer part is `slopes[h]`, a number for each head. A lookup by position is
a gather along lanes, the only kind that the compiler of these kernels, Mosaic, knows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Int

from flax_mha.core.jaxprs import inner_jaxprs, inputs
from flax_mha.core.user_function import TracedFunction

LANES = 128
# The largest table that is looked up, in entries; each 128 of them take a gather and a selection per score.
MOST_ENTRIES = 2048

# Of one entry, these do nothing.
RESHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}
# What Mosaic compiles for whole tiles, with the derivatives of these; benchmarks/pallas.py tries every one of them.
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp", "square", "integer_pow", "pow"),
    *("exp", "exp2", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "convert_element_type", "is_finite"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "stop_gradient", "copy", "round"),
}
DTYPES = ("float32", "int32", "bool")


class RefusedError(Exception):
    """Why a function cannot be computed in a kernel."""


class Lookup(NamedTuple):
    """An entry of an array: its index along every axis, and along which axes that depends on positions."""

    array: Any
    indices: tuple[Any, ...]
    by_position: tuple[bool, ...]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What belongs to the axes that are looked up by position, and what belongs to the others."""
        pairs = list(zip(values, self.by_position, strict=True))
        return [x for x, by_position in pairs if by_position], [x for x, by_position in pairs if not by_position]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the axes that are looked up by position."""
        return self.split(self.array.aval.shape)[0]


class TileFunction:
    """The part of a function that is computed for whole tiles, from the values of the outer part.

    Args:
      arguments: The variables of [score,] q_idx, kv_idx.
      equations: What is computed, in order; lookups among them.
      lookups: Lookups in arrays of the outer part, by the variable of the result, in order.
      result: The variable of the result.

    Attributes:
      numbers: Variables of the outer part that are numbers.
    """

    def __init__(self, arguments: Sequence[Any], equations: list[Any], lookups: dict[Any, Lookup], result: Any) -> None:
        self._arguments, self._result, self.lookups = arguments, result, lookups
        self._equations = [e for e in equations if e.outvars[0] not in lookups]
        indices = [x for lookup in lookups.values() for x in lookup.split(lookup.indices)[0]]
        used = [*(x for e in self._equations for x in e.invars), *indices, result]
        inner = {*arguments, *(e.outvars[0] for e in equations)}
        self.numbers = list(dict.fromkeys(x for x in used if not isinstance(x, Literal) and x not in inner))
        self._of_indices: list[Any] = []  # lookups, and what their indices are made of
        wanted = {*lookups, *_variables(indices)}
        for equation in reversed(equations):
            if equation.outvars[0] in wanted:
                wanted.update(() if equation.outvars[0] in lookups else _variables(equation.invars))
                self._of_indices.insert(0, equation)

    def __call__(self, arguments: Sequence[Array], values: Sequence[Array], shape: tuple[int, int]) -> Array:
        """The function's values in a tile of this shape, to which all arguments and values broadcast."""
        known = dict(zip((*self._arguments, *self.numbers, *self.lookups), (*arguments, *values), strict=True))
        for equation in self._equations:
            known[equation.outvars[0]] = _compute(equation, known)
        return jnp.broadcast_to(_read(self._result, known), shape)

    def look_up(
        self, positions: tuple[Array, Array], values: Sequence[Array]
    ) -> tuple[list[Array], list[Int[Array, "#t #s"] | None]]:
        """Replaces tables [1, entries] among the values by what a tile finds in them.

        Returns:
          The values that the function takes, and for each None or the number of the entry in its table.
        """
        variables = (*self._arguments[-2:], *self.numbers)
        known = dict(zip(variables, (*positions, *values[: len(self.numbers)]), strict=True))
        tables = dict(zip(self.lookups, values[len(self.numbers) :], strict=True))
        entries: list[Any] = [None] * len(self.numbers)
        for equation in self._of_indices:
            variable = equation.outvars[0]
            if variable not in tables:
                known[variable] = _compute(equation, known)
                continue
            entries.append(_entry(self.lookups[variable], known))
            found = _gather(tables[variable], entries[-1])
            known[variable] = found != 0 if variable.aval.dtype == bool else found
        return [*values[: len(self.numbers)], *(known[x] for x in self.lookups)], entries


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _read(atom: Any, known: dict[Any, Any]) -> Array:
    return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else known[atom]  # type: ignore[attr-defined]


def _compute(equation: Any, known: dict[Any, Any]) -> Array:
    """An elementwise equation on scalars, of whole tiles."""
    operands, name = [_read(x, known) for x in equation.invars], equation.primitive.name
    if name in RESHAPING:
        return operands[0]
    if name == "convert_element_type":
        return operands[0].astype(equation.params["new_dtype"])
    if name == "sign":
        return _sign(operands[0])
    if name == "abs":  # the derivative of lax.abs is lax.sign
        return operands[0] * _sign(operands[0])
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    return equation.primitive.bind(*(jnp.broadcast_to(x, shape) for x in operands), **equation.params)


def _sign(x: Array) -> Array:
    """As `lax.sign`, for which Mosaic asks the machine that compiles which TPU it has."""
    one, x = jnp.ones_like(x), lax.stop_gradient(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _entry(lookup: Lookup, known: dict[Any, Any]) -> Int[Array, "#t #s"]:
    """The number of the entry in the flattened table; like `lax.dynamic_slice`, inside the table."""
    entry: Any = 0
    for index, size in zip(lookup.split(lookup.indices)[0], lookup.sizes, strict=True):
        entry = entry * size + jnp.clip(_read(index, known), 0, size - 1)
    return entry


def _gather(table: Array, entry: Int[Array, "#t #s"]) -> Array:
    """Entries of a table [1, a multiple of 128]: gathers along lanes, of 128 entries each."""
    rows, columns = entry.shape
    wide = jnp.broadcast_to(entry, (max(rows, 8), -(-columns // LANES) * LANES))
    pieces = [_gather_lanes(table, wide[:, i : i + LANES]) for i in range(0, wide.shape[1], LANES)]
    return (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))[:rows, :columns]


def _gather_lanes(table: Array, entry: Int[Array, "t 128"]) -> Array:
    lane, result = entry & (LANES - 1), None
    for first in range(0, table.shape[1], LANES):
        part = jnp.broadcast_to(table[:, first : first + LANES], entry.shape)
        found = jnp.take_along_axis(part, lane, axis=1, mode="promise_in_bounds")
        is_here = (entry >> (LANES.bit_length() - 1)) == first // LANES
        result = found if result is None else jnp.where(is_here, found, result)
    return result  # type: ignore[return-value]  # a table has entries


Outer = Callable[[Sequence[Array], Array, Array], list[Array]]


def split(function: TracedFunction, num_captured: int) -> tuple[Outer, TileFunction]:
    """Splits a function of ([score,] b, h, q_idx, kv_idx).

    Returns:
      `outer(captured, batch, head)`, which returns numbers and flat tables [entries], and the part for tiles.

    Raises:
      RefusedError: If the part for tiles holds vectors, control flow, a primitive that Mosaic does not compile, or
        lookups by the score or in a table that is too large.
    """
    jaxpr = function.jaxpr
    *score, _, _, query, key = inputs(jaxpr)[num_captured:]
    inner, of_scores = {*score, query, key}, set(score)
    outer, equations, lookups = [], [], {}
    for equation in jaxpr.eqns:
        atoms = _variables(equation.invars)
        if not inner.intersection(atoms):
            outer.append(equation)
            continue
        if equation.primitive.name == "dynamic_slice" and equation.invars[0] not in inner:
            lookups[equation.outvars[0]] = _lookup(equation, inner, of_scores)
        else:
            _check(equation)
        inner.update(equation.outvars)
        of_scores.update(equation.outvars if of_scores.intersection(atoms) else ())
        equations.append(equation)
    tile = TileFunction([*score, query, key], equations, lookups, jaxpr.outvars[0])
    return _outer(function, outer, tile), tile


def _check(equation: Any) -> None:
    name = equation.primitive.name
    is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    if name not in ELEMENTWISE | RESHAPING or (name == "rem" and is_float):
        kind = "control flow or another function" if any(True for _ in inner_jaxprs(equation)) else "a primitive"
        raise RefusedError(
            f"must not apply {name} to what depends on positions: its kernels cannot compute this, {kind}"
        )
    for variable in (*equation.invars, *equation.outvars):
        aval: Any = variable.aval
        if math.prod(aval.shape) != 1:
            raise RefusedError(
                f"must not make vectors of what depends on positions, but {name} has one of shape {aval.shape}"
            )
        if aval.dtype.name not in DTYPES:
            raise RefusedError(
                f"must compute in {', '.join(DTYPES)} what depends on positions, but {name} has {aval.dtype}"
            )


def _lookup(equation: Any, inner: set[Any], of_scores: set[Any]) -> Lookup:
    array, *indices = equation.invars
    lookup = Lookup(array, tuple(indices), tuple(not isinstance(x, Literal) and x in inner for x in indices))
    shape, dtype = equation.params["slice_sizes"], array.aval.dtype
    if of_scores.intersection(_variables(indices)):
        raise RefusedError("must look up arrays by position, but an index depends on the score")
    if math.prod(shape) != 1:
        raise RefusedError(f"must not look up vectors by position, but dynamic_slice has one of shape {shape}")
    if math.prod(lookup.sizes) > MOST_ENTRIES:
        got = f"{math.prod(lookup.sizes)} entries, of shape {array.aval.shape}"
        raise RefusedError(f"must look up by position in tables of up to {MOST_ENTRIES} entries, but one has {got}")
    if dtype.name not in DTYPES:
        raise RefusedError(f"must look up {', '.join(DTYPES)} by position, but a table holds {dtype}")
    return lookup


def _outer(function: TracedFunction, equations: list[Any], tile: TileFunction) -> Outer:
    fixed = [x for lookup in tile.lookups.values() for x in (lookup.array, *lookup.split(lookup.indices)[1])]
    wanted = list(dict.fromkeys(_variables([*tile.numbers, *fixed])))
    jaxpr = function.jaxpr.replace(eqns=equations, outvars=wanted)

    def outer(captured: Sequence[Array], batch: Array, head: Array) -> list[Array]:
        *score, _, _, query, key = (jnp.zeros((), v.aval.dtype) for v in inputs(jaxpr)[len(captured) :])
        values = jaxpr_as_fun(ClosedJaxpr(jaxpr, captured))(*score, batch, head, query, key)
        known = dict(zip(wanted, values, strict=True))
        return [known[x] for x in tile.numbers] + [_table(x, known) for x in tile.lookups.values()]

    return outer


def _table(lookup: Lookup, known: dict[Any, Array]) -> Array:
    """What may be looked up by position, flattened."""
    zero, by_position = jnp.zeros((), jnp.int32), lookup.by_position
    indices = [
        zero if inner else _read(x, known).astype(jnp.int32)
        for x, inner in zip(lookup.indices, by_position, strict=True)
    ]
    sizes = [size if inner else 1 for size, inner in zip(lookup.array.aval.shape, by_position, strict=True)]
    return lax.dynamic_slice(known[lookup.array], indices, sizes).reshape(-1)
