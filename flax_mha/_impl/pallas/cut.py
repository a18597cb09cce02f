"""A user's function of one score, cut in two: what XLA computes once for each head, and the rest, for whole tiles.

What depends on the batch entry, the head and captured arrays alone is computed outside of the kernel, and
differentiated there. The kernel is given its values: numbers, and small tables that are looked up by position. Example:
of `score - slopes[h] * (q_idx - kv_idx)` the outer part is `slopes[h]`, a number for each head.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Int

from flax_mha._jaxprs import inputs
from flax_mha._traced_function import TracedFunction

# The largest table that is looked up, in entries; each 128 of them take a gather and a selection per score.
MOST_ENTRIES = 2048
LANES = 128

# What Mosaic compiles for whole tiles, with the derivatives of these; benchmarks/pallas.py tries every one of them.
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp", "square", "integer_pow", "pow"),
    *("exp", "exp2", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "convert_element_type", "is_finite"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "stop_gradient", "copy", "round"),
}
# Of one entry, these do nothing.
RESHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}
DTYPES = ("float32", "int32", "bool")


class RefusedError(Exception):
    """Why a function cannot be computed in a kernel."""


class _Lookup(NamedTuple):
    """An entry of an array: its index along every axis, and along which axes that depends on positions."""

    result: Any
    array: Any
    indices: tuple[Any, ...]
    by_position: tuple[bool, ...]

    @property
    def outside(self) -> list[Any]:
        """What the outer part computes: the array, and indices that are the same for all positions."""
        fixed = [x for x, inner in zip(self.indices, self.by_position, strict=True) if not inner]
        return [self.array, *(x for x in fixed if not isinstance(x, Literal))]

    @property
    def sizes(self) -> list[int]:
        """Of the axes that are looked up."""
        return [n for n, inner in zip(self.array.aval.shape, self.by_position, strict=True) if inner]


class TilePart:
    """The part of a function that is computed for whole tiles, from the values of the outer part.

    Attributes:
      numbers: Variables of the outer part that are numbers.
      lookups: Lookups in arrays of the outer part.
      from_learned: For each value, numbers first, whether it may depend on captured arrays that get gradients.
    """

    def __init__(
        self, arguments: Sequence[Any], equations: list[Any], lookups: list[_Lookup], result: Any, learned: set[Any]
    ) -> None:
        self._arguments, self._equations, self._result = arguments, equations, result
        inner = {v for e in equations for v in e.outvars} | {x.result for x in lookups} | set(arguments)
        used = [x for e in equations for x in e.invars] + [result]
        used += [i for x in lookups for i, by_position in zip(x.indices, x.by_position, strict=True) if by_position]
        self.lookups = lookups
        self.numbers = list(dict.fromkeys(x for x in used if not isinstance(x, Literal) and x not in inner))
        values = [*self.numbers, *(x.array for x in lookups)]
        self.from_learned = tuple(x in learned and jnp.issubdtype(x.aval.dtype, jnp.floating) for x in values)

    def __call__(
        self, values: Sequence[Array], arguments: Sequence[Array], shape: tuple[int, int], added: Sequence[Any] = ()
    ) -> tuple[Array, list[Array]]:
        """The function's values in a tile, and the entry that every lookup found.

        Args:
          values: Of the outer part: numbers, then tables [1, entries].
          arguments: Score, and positions of queries and keys, that broadcast to `shape`.
          shape: Of the tile.
          added: For each of the values something to add to it, of that shape, or None: for derivatives by it.
        """
        known = dict(zip(self._arguments, arguments, strict=True))
        numbers, tables = values[: len(self.numbers)], values[len(self.numbers) :]
        plus = list(added) or [None] * len(values)
        known |= {v: _plus(x, y) for v, x, y in zip(self.numbers, numbers, plus, strict=False)}
        waiting = {x.result: (x, *pair) for x, *pair in zip(self.lookups, tables, plus[len(numbers) :], strict=True)}
        entries: dict[Any, Array] = {}

        def read(x: Any) -> Any:
            if isinstance(x, Literal):
                return jnp.asarray(x.val, x.aval.dtype)  # type: ignore[attr-defined]
            if x in waiting and x not in known:
                lookup, table, more = waiting[x]
                entries[x] = _entry(lookup, read)
                found = looked_up(table, entries[x])
                known[x] = found != 0 if x.aval.dtype == bool else _plus(found, more)
            return known[x]

        for equation in self._equations:
            known[equation.outvars[0]] = _computed(equation, [read(x) for x in equation.invars])
        result = jnp.broadcast_to(read(self._result), shape)
        return result, [entries.get(x.result, jnp.zeros((1, 1), jnp.int32)) for x in self.lookups]


def _plus(x: Array, more: Array | None) -> Array:
    return x if more is None else x + more


def _computed(equation: Any, operands: list[Any]) -> Array:
    """An elementwise equation on scalars, of whole tiles."""
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    if equation.primitive.name in RESHAPING:
        return operands[0]
    operands = [jnp.broadcast_to(x, shape) for x in operands]
    params = equation.params
    if equation.primitive.name == "convert_element_type":
        return operands[0].astype(params["new_dtype"])
    if equation.primitive.name == "sign":
        return _sign(operands[0])
    if equation.primitive.name == "abs":  # the derivative of lax.abs is lax.sign
        return operands[0] * _sign(operands[0])
    return equation.primitive.bind(*operands, **params)


def _sign(x: Array) -> Array:
    """As `lax.sign`, for which Mosaic asks the machine that compiles which TPU it has."""
    one, x = jnp.ones_like(x), lax.stop_gradient(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _entry(lookup: _Lookup, read: Callable[[Any], Any]) -> Int[Array, "#t #s"]:
    """The number of the entry in the flattened table; like `lax.dynamic_slice`, inside the table."""
    entry: Any = 0
    inner = [x for x, by_position in zip(lookup.indices, lookup.by_position, strict=True) if by_position]
    for index, size in zip(inner, lookup.sizes, strict=True):
        entry = entry * size + jnp.clip(read(index), 0, size - 1)
    return entry


def looked_up(table: Array, entry: Int[Array, "#t #s"]) -> Array:
    """Entries of a table [1, a multiple of 128]: gathers along lanes, of 128 entries each."""
    rows, columns = entry.shape
    wide = jnp.broadcast_to(entry, (max(rows, 8), -(-columns // LANES) * LANES))
    pieces = [_gathered(table, wide[:, i : i + LANES]) for i in range(0, wide.shape[1], LANES)]
    return (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))[:rows, :columns]


def _gathered(table: Array, entry: Int[Array, "t 128"]) -> Array:
    lane, result = entry & (LANES - 1), None
    for first in range(0, table.shape[1], LANES):
        part = jnp.broadcast_to(table[:, first : first + LANES], entry.shape)
        found = jnp.take_along_axis(part, lane, axis=1, mode="promise_in_bounds")
        is_here = (entry >> (LANES.bit_length() - 1)) == first // LANES
        result = found if result is None else jnp.where(is_here, found, result)
    return result  # type: ignore[return-value]  # a table has entries


class Cut(NamedTuple):
    """Both parts: `outer(captured, batch, head)` returns the values that the part for tiles takes."""

    outer: Callable[[list[Array], Array, Array], list[Array]]
    tile: TilePart


def cut(function: TracedFunction, num_captured: int, trainable: Sequence[bool] = ()) -> Cut:
    """Cuts a function of ([score,] b, h, q_idx, kv_idx).

    Raises:
      RefusedError: If the part for tiles holds vectors, control flow, a primitive that Mosaic does not compile, or
        lookups in a table that is too large.
    """
    jaxpr = function.jaxpr
    variables = inputs(jaxpr)
    captured, arguments = variables[:num_captured], variables[num_captured:]
    *score, _, _, query, key = arguments
    inner, learned = {*score, query, key}, {v for v, t in zip(captured, trainable, strict=False) if t}
    equations, outer, lookups = [], [], []
    for equation in jaxpr.eqns:
        atoms = [x for x in equation.invars if not isinstance(x, Literal)]
        if learned.intersection(atoms):
            learned.update(equation.outvars)
        if not inner.intersection(atoms):
            outer.append(equation)
            continue
        inner.update(equation.outvars)
        if equation.primitive.name == "dynamic_slice" and equation.invars[0] not in inner:
            lookups.append(_lookup(equation, inner))
        else:
            _check(equation)
            equations.append(equation)
    [result] = jaxpr.outvars
    tile = TilePart([*score, query, key], equations, lookups, result, learned)
    return Cut(_outer(jaxpr, outer, tile), tile)


def _check(equation: Any) -> None:
    name = equation.primitive.name
    is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    if name not in ELEMENTWISE | RESHAPING or (name == "rem" and is_float):
        kind = "control flow or another function" if _holds_jaxpr(equation) else "a primitive"
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


def _holds_jaxpr(equation: Any) -> bool:
    values = [x for p in equation.params.values() for x in (p if isinstance(p, tuple | list) else (p,))]
    return any(isinstance(x, Jaxpr | ClosedJaxpr) for x in values)


def _lookup(equation: Any, inner: set[Any]) -> _Lookup:
    array, *indices = equation.invars
    by_position = tuple(not isinstance(x, Literal) and x in inner for x in indices)
    lookup = _Lookup(equation.outvars[0], array, tuple(indices), by_position)
    shape, dtype = equation.params["slice_sizes"], array.aval.dtype
    if math.prod(shape) != 1:
        raise RefusedError(f"must not look up vectors by position, but dynamic_slice has one of shape {shape}")
    if math.prod(lookup.sizes) > MOST_ENTRIES:
        got = f"{math.prod(lookup.sizes)} entries, of shape {array.aval.shape}"
        raise RefusedError(f"must look up by position in tables of up to {MOST_ENTRIES} entries, but one has {got}")
    if dtype.name not in DTYPES:
        raise RefusedError(f"must look up {', '.join(DTYPES)} by position, but a table holds {dtype}")
    return lookup


def _outer(jaxpr: Jaxpr, equations: list[Any], tile: TilePart) -> Callable[[list[Array], Array, Array], list[Array]]:
    """The outer part as a function: numbers, then flat tables [entries]."""
    wanted = [*tile.numbers, *(x for lookup in tile.lookups for x in lookup.outside)]
    wanted = list(dict.fromkeys(wanted))
    closed = jaxpr.replace(eqns=equations, outvars=wanted)

    def outer(captured: list[Array], batch: Array, head: Array) -> list[Array]:
        *score, _, _, query, key = (jnp.zeros((), v.aval.dtype) for v in inputs(jaxpr)[len(captured) :])
        values = jaxpr_as_fun(ClosedJaxpr(closed, captured))(*score, batch, head, query, key)
        known = dict(zip(wanted, values, strict=True))
        return [known[x] for x in tile.numbers] + [_table(x, known) for x in tile.lookups]

    return outer


def _table(lookup: _Lookup, known: dict[Any, Array]) -> Array:
    """What may be looked up by position, flattened."""
    indices, sizes = [], []
    for index, size, inner in zip(lookup.indices, lookup.array.aval.shape, lookup.by_position, strict=True):
        fixed = 0 if inner else index.val if isinstance(index, Literal) else known[index]
        indices.append(jnp.asarray(fixed, jnp.int32))
        sizes.append(size if inner else 1)
    return lax.dynamic_slice(known[lookup.array], indices, sizes).reshape(-1)


def reason_against(name: str, function: TracedFunction, num_captured: int) -> list[str]:
    """Why this function of the call cannot be computed in a kernel, if so."""
    try:
        cut(function, num_captured)
    except RefusedError as refused:
        return [f"{name} {refused}"]
    return []
