"""Splits a user's function of one score into an outer part, computed by XLA for each head, and a part for tiles.

The *outer part* is everything that depends only on the batch entry, the head and captured arrays. XLA computes and
differentiates it outside of the kernel, which gets its *values*: numbers, and small tables to look up by position.
Example: the outer part of `score - slopes[h] * (q_idx - kv_idx)` is `slopes[h]`, one number for each head. A lookup by
position is a gather along lanes, the only gather that Mosaic, the compiler of these kernels, supports.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Int

from flax_mha._src.core.tracing import inner_jaxprs
from flax_mha._src.core.user_function import TracedFunction

LANES = 128  # numbers in a row of a TPU's registers and memory
MOST_ENTRIES = 2048  # of a table; each 128 of them take a gather and a selection per score

RESHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}  # these do nothing to an array of one entry
# Primitives that Mosaic compiles for whole tiles, with their derivatives; benchmarks/pallas.py compiles each of them.
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp", "square", "integer_pow", "pow"),
    *("exp", "exp2", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "convert_element_type", "is_finite"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "stop_gradient", "copy", "round"),
}
DTYPES = ("float32", "int32", "bool")


class RefusedError(Exception):
    """Raised if a user's function cannot be computed in a kernel; the text is the reason."""


class Lookup(NamedTuple):
    """A lookup by position, `array[indices]`, in a user's function; the outer part computes or captures `array`."""

    array: Any  # variable of the jaxpr
    indices: Sequence[Any]  # for each axis, a variable or a literal
    by_position: Sequence[int]  # axes whose index depends on positions; the outer part knows the other indices

    def table(self, known: dict[Any, Array]) -> Array:
        """Returns the entries that positions can select, flattened; `known` has the values of the outer variables."""
        indices = [0 if i in self.by_position else _read(x, known) for i, x in enumerate(self.indices)]
        sizes = [size if i in self.by_position else 1 for i, size in enumerate(self.array.aval.shape)]
        return lax.dynamic_slice(known[self.array], indices, sizes).reshape(-1)

    def entry(self, known: dict[Any, Any]) -> Int[Array, "#t #s"]:
        """Computes where each score of a tile looks up a number in `table(...)`; `known` holds values in the tile."""
        entry: Any = 0
        for axis in self.by_position:
            size = self.array.aval.shape[axis]
            entry = entry * size + jnp.clip(_read(self.indices[axis], known), 0, size - 1)
        return entry


@dataclasses.dataclass(frozen=True, eq=False)
class TileFunction:
    """A user's function, split: XLA runs `outer_values`; a kernel calls `look_up`, then the object, for each tile."""

    outer: Jaxpr  # equations of the outer part
    arguments: Sequence[Any]  # variables of the arguments [score,] q_idx, kv_idx
    numbers: Sequence[Any]  # variables that the outer part computes as numbers
    lookups: dict[Any, Lookup]  # lookups in arrays of the outer part, by the variable that they compute, in order
    equations: Sequence[Any]  # equations of this part in order, lookups among them
    of_scores: set[Any]  # variables that depend on the argument `score`
    result: Any  # variable of the function's value

    def outer_values(self, captured: Sequence[Array], batch: Array, head: Array) -> list[Array]:
        """Computes the values of the outer part for one head: numbers, then flat tables. `batch` is b, `head` is h."""
        positions: Any = self.outer.invars[len(captured) :]
        *score, _, _, query, key = (jnp.zeros((), v.aval.dtype) for v in positions)
        computed = [*self.outer.invars, *(x for equation in self.outer.eqns for x in equation.outvars)]
        run = jaxpr_as_fun(ClosedJaxpr(self.outer.replace(outvars=computed), ()))
        known = dict(zip(computed, run(*captured, *score, batch, head, query, key), strict=True))
        return [known[x] for x in self.numbers] + [x.table(known) for x in self.lookups.values()]

    def __call__(self, arguments: Sequence[Array], values: Sequence[Array], shape: tuple[int, int]) -> Array:
        """Computes a tile of this `shape`. `arguments` are [score,] q_idx, kv_idx; `look_up` returns the `values`."""
        known = dict(zip((*self.arguments, *self.numbers, *self.lookups), (*arguments, *values), strict=True))
        for equation in self.equations:
            if equation.outvars[0] not in known:
                known[equation.outvars[0]] = _compute(equation, known)
        return jnp.broadcast_to(_read(self.result, known), shape)

    def look_up(
        self, positions: tuple[Array, Array], values: Sequence[Array]
    ) -> tuple[Sequence[Array], list[Int[Array, "#t #s"] | None]]:
        """Replaces each table [1, entries] in `values` (numbers, then tables) by the entry that each score looks up.

        `positions` are q_idx and kv_idx. Also returns, for each value, the indices of these entries; None for a number.
        """
        count = len(self.numbers)
        entries: list[Any] = [None] * count
        if not self.lookups:
            return values, entries
        known = dict(zip((*self.arguments[-2:], *self.numbers), (*positions, *values[:count]), strict=True))
        tables = dict(zip(self.lookups, values[count:], strict=True))
        for equation in self.equations:
            variable = equation.outvars[0]
            if variable in tables:
                entries.append(self.lookups[variable].entry(known))
                found = _gather(tables[variable], entries[-1])
                known[variable] = found != 0 if variable.aval.dtype == bool else found
            elif variable not in self.of_scores:
                known[variable] = _compute(equation, known)
        return [*values[:count], *(known[x] for x in self.lookups)], entries


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _read(atom: Any, known: dict[Any, Any]) -> Array:
    return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else known[atom]  # type: ignore[attr-defined]


def _compute(equation: Any, known: dict[Any, Any]) -> Array:
    """Evaluates an elementwise equation, which was traced for scalars, on whole tiles."""
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
    """Computes `lax.sign` by comparisons: its own lowering in Mosaic needs a TPU in the machine that compiles."""
    one, x = jnp.ones_like(x), lax.stop_gradient(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _gather(table: Array, entry: Int[Array, "#t #s"]) -> Array:
    """Returns `table[0, entry]` for a table [1, a multiple of 128], by gathers among 128 entries along lanes."""
    rows, columns = entry.shape
    wide = jnp.broadcast_to(entry, (max(rows, 8), -(-columns // LANES) * LANES))
    pieces = [_gather_lanes(table, wide[:, i : i + LANES]) for i in range(0, wide.shape[1], LANES)]
    return jnp.concatenate(pieces, axis=1)[:rows, :columns]


def _gather_lanes(table: Array, entry: Int[Array, "t 128"]) -> Array:
    lane, result = entry & (LANES - 1), None
    for first in range(0, table.shape[1], LANES):
        part = jnp.broadcast_to(table[:, first : first + LANES], entry.shape)
        found = jnp.take_along_axis(part, lane, axis=1, mode="promise_in_bounds")
        is_here = (entry >> (LANES.bit_length() - 1)) == first // LANES
        result = found if result is None else jnp.where(is_here, found, result)
    return result  # type: ignore[return-value]  # a table has entries


def split(function: TracedFunction, num_captured: int) -> TileFunction:
    """Splits a user's function, which captures `num_captured` arrays; raises a `RefusedError` if that is impossible."""
    jaxpr = function.jaxpr
    *score, _, _, query, key = jaxpr.invars[num_captured:]
    inner, of_scores = {*score, query, key}, set(score)
    outer, equations, used, lookups = [], [], [*jaxpr.outvars], {}
    for equation in jaxpr.eqns:
        atoms = _variables(equation.invars)
        if not inner.intersection(atoms):
            outer.append(equation)
            continue
        if equation.primitive.name == "dynamic_slice" and equation.invars[0] not in inner:
            lookup = lookups[equation.outvars[0]] = _lookup(equation, inner, of_scores)
            used += [lookup.indices[axis] for axis in lookup.by_position]
        else:
            _check(equation)
            used += atoms
        inner.update(equation.outvars)
        of_scores.update(equation.outvars if of_scores.intersection(atoms) else ())
        equations.append(equation)
    numbers = list(dict.fromkeys(x for x in _variables(used) if x not in inner))
    outside, arguments = jaxpr.replace(eqns=outer, outvars=[]), [*score, query, key]
    return TileFunction(outside, arguments, numbers, lookups, equations, of_scores, jaxpr.outvars[0])


def _check(equation: Any) -> None:
    name = equation.primitive.name
    is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    if name not in ELEMENTWISE | RESHAPING or (name == "rem" and is_float):
        kind, remedy = "a primitive", "use simpler arithmetic"
        if any(True for _ in inner_jaxprs(equation)):
            kind, remedy = "control flow or another function", "use jnp.where and simple arithmetic"
        raise RefusedError(
            f"must not apply {name} ({kind}) to values that depend on positions, because the kernels cannot compute "
            f"it: {remedy}, or look the values up in a table"
        )
    for aval in (x.aval for x in (*equation.invars, *equation.outvars)):
        if math.prod(aval.shape) != 1:
            raise RefusedError(
                f"must compute only scalars from values that depend on positions, but {name} uses an array of shape "
                f"{aval.shape}"
            )
        if aval.dtype.name not in DTYPES:
            raise RefusedError(
                f"must use {', '.join(DTYPES)} for values that depend on positions, but {name} has {aval.dtype}: use "
                "one of these dtypes"
            )


def _lookup(equation: Any, inner: set[Any], of_scores: set[Any]) -> Lookup:
    array, *indices = equation.invars
    lookup = Lookup(array, indices, [i for i, x in enumerate(indices) if not isinstance(x, Literal) and x in inner])
    shape, (sizes, dtype) = equation.params["slice_sizes"], (array.aval.shape, array.aval.dtype)
    count = math.prod(sizes[axis] for axis in lookup.by_position)
    if of_scores.intersection(_variables(indices)):
        raise RefusedError(
            "must index arrays only by position, but an index depends on the score: compute the index from b, h, q_idx "
            "and kv_idx"
        )
    if math.prod(shape) != 1:
        raise RefusedError(
            f"must not look up vectors by position, but dynamic_slice reads one of shape {shape}: look up a single "
            "entry"
        )
    if count > MOST_ENTRIES:
        got = f"{count} entries (shape {sizes})"
        raise RefusedError(
            f"must look up positions only in tables with at most {MOST_ENTRIES} entries, but one has {got}: use a "
            "smaller table, or compute its entries"
        )
    if dtype.name not in DTYPES:
        raise RefusedError(
            f"must use tables of dtype {', '.join(DTYPES)}, but one has dtype {dtype}: convert it to one of these"
        )
    return lookup
