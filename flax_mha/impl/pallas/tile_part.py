"""The part of a user's function that is computed for whole tiles: elementwise operations and lookups by position.

A lookup is a gather along lanes, the only kind that the compiler of these kernels, Mosaic, knows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Array, Int

LANES = 128

# Of one entry, these do nothing.
RESHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}


class Lookup(NamedTuple):
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
        self, arguments: Sequence[Any], equations: list[Any], lookups: list[Lookup], result: Any, learned: set[Any]
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


def _entry(lookup: Lookup, read: Callable[[Any], Any]) -> Int[Array, "#t #s"]:
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
