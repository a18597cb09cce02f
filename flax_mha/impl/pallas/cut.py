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
from jaxtyping import Array

from flax_mha.core.jaxprs import inputs
from flax_mha.core.user_function import TracedFunction
from flax_mha.impl.pallas.tile_part import RESHAPING, Lookup, TilePart

# The largest table that is looked up, in entries; each 128 of them take a gather and a selection per score.
MOST_ENTRIES = 2048

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


def _lookup(equation: Any, inner: set[Any]) -> Lookup:
    array, *indices = equation.invars
    by_position = tuple(not isinstance(x, Literal) and x in inner for x in indices)
    lookup = Lookup(equation.outvars[0], array, tuple(indices), by_position)
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


def _table(lookup: Lookup, known: dict[Any, Array]) -> Array:
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
