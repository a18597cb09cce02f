"""Checks that a user's function fits a call, and looks up only entries that its arrays have.

JAX clamps an index that is too large, so a table with too few entries gives wrong numbers and no error. `check` finds
such lookups while tracing: it evaluates the integers and booleans of the function at the last batch entry and head of a
call, and at its first and last visible positions. Example: `score - slopes[h] * (q_idx - kv_idx)` in a call with 8
heads looks up entry 7; slopes of shape (4,) are refused.

A lookup is refused only if it certainly leaves its array. So these are not checked: positions that a mask other than a
window may hide, an index that is computed from captured arrays, an array of indices, a `mode` of `jnp.take` or of
`array.at[indices].get`, lookups inside `jax.vmap` and control flow, and a lookup that a condition on the same index may
discard, such as `jnp.where(kv_idx < length, table[kv_idx], 0)`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from flax_mha._src.core.integers import LARGEST
from flax_mha._src.core.jaxprs import inner_jaxprs
from flax_mha._src.core.user_function import POSITIONS, TracedFunction

Window = tuple[int | None, int | None] | None
Span = tuple[int, int] | None
"""The first and the last position of a call's queries or keys; None if they are not known while tracing."""
Spans = tuple[Span, Span]
NAMES = {"b": "batch entries", "h": "heads", "q_idx": "query positions", "kv_idx": "key positions"}


class _Scalar(NamedTuple):
    """A scalar in a jaxpr: its value, None if unknown, and which of b, h, q_idx, kv_idx it is computed from.

    An entry of an array counts as computed from the array alone, not from the index.
    """

    value: Any
    sources: frozenset[str]


_UNKNOWN = _Scalar(None, frozenset())


def check(function: TracedFunction, batch: Any, heads: Any, queries: Span, keys: Span, window: Window) -> None:
    """Refuses a function of ([score,] b, h, q_idx, kv_idx) that is made for other sizes, or looks up missing entries.

    Args:
      function: The traced function.
      batch: The number of batch entries; a symbol in `jax.export`.
      heads: The number of heads; a symbol in `jax.export`.
      queries: The positions of the queries.
      keys: The positions of the keys.
      window: (left, right), if a query sees all keys in this window and no others; None if that is not known, so that
        positions are not checked.

    Raises:
      ValueError: If the sizes differ, or if a lookup leaves its array, whatever the captured arrays hold.
    """
    last = tuple(size - 1 if isinstance(size, int) and size else None for size in (batch, heads))
    for corner in _corners(queries, keys, window):
        arguments = (*last, *corner)
        if fault := _misfit(function, arguments) or _fault(function, arguments):
            raise ValueError(f"{function.name} {fault}")


def _misfit(function: TracedFunction, arguments: tuple[int | None, ...]) -> str | None:
    """Returns an error message if `made_for` excludes a call with last b, h, q_idx, kv_idx = `arguments`, else None."""
    for name, value in zip(POSITIONS, arguments, strict=True):
        size = function.made_for.get(name)
        if size is not None and value is not None and (value >= size or (name in "bh" and value + 1 < size)):
            return f"was created for {size} {NAMES[name]}, but the call has {value + 1}."
    return None


def _corners(queries: Span, keys: Span, window: Window) -> list[tuple[int | None, int | None]]:
    """Lists pairs (q_idx, kv_idx): the first and the last query that see a key, each with its first and last key.

    A position is None if it is unknown or may be hidden.
    """
    if window == (None, None):
        return [(q, k) for q in (queries or (None,))[::-1] for k in (keys or (None,))[::-1]]
    if queries is None or keys is None or window is None:
        return [(None, None)]
    left, right = (2 * LARGEST + 1 if side is None else side for side in window)  # all distances, if not limited
    first, last = max(queries[0], keys[0] - right), min(queries[1], keys[1] + left)
    if first > last or left + right < 0:
        return [(None, None)]
    return [(q, k) for q in (last, first) for k in (min(keys[1], q + right), max(keys[0], q - left))]


@functools.lru_cache(maxsize=256)
def _fault(function: TracedFunction, arguments: tuple[int | None, ...]) -> str | None:
    """Returns an error message on the first lookup that leaves its array at (b, h, q_idx, kv_idx), or None."""
    variables = function.jaxpr.invars[-len(POSITIONS) :]
    scalars = {
        variable: _Scalar(None if value is None else np.int32(value), frozenset({name}))
        for variable, name, value in zip(variables, POSITIONS, arguments, strict=True)
    }
    conditions = _conditions(function.jaxpr, _evaluate(function.jaxpr, scalars))
    for equation in function.jaxpr.eqns:
        if equation.primitive.name != "dynamic_slice" or equation.outvars[0] not in conditions:
            continue
        shape: Any = equation.invars[0].aval.shape  # type: ignore[attr-defined]
        sizes = equation.params["slice_sizes"]
        decisive = conditions[equation.outvars[0]]
        for axis, (index, sources) in enumerate(_read(x, scalars) for x in equation.invars[1:]):
            is_certain = index is not None and not (decisive & sources if sources else decisive)
            largest = shape[axis] - sizes[axis]
            if is_certain and not 0 <= index <= largest:
                at = [f"{name} = {value}" for name, value in zip(POSITIONS, arguments, strict=True) if name in sources]
                place = f"at {' and '.join(at)}, " if at else ""
                entry = int(index) - (shape[axis] if index < 0 else 0)  # negative ones count from the end
                length = max(entry + sizes[axis], -entry)
                return (
                    f"must not index arrays out of bounds, but {place}it uses index {entry} on axis {axis} of an array "
                    f"with shape {shape}; extend that axis to at least {length}, or clip the index with "
                    f"jnp.clip(index, 0, {largest})."
                )
    return None


def _trunc_divide(x: Any, y: Any) -> Any:
    return np.sign(x) * np.sign(y) * (abs(x) // abs(y))


# What is evaluated: integers and booleans, as XLA computes them.
_FUNCTIONS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "div": _trunc_divide,
    "rem": np.fmod,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "convert_element_type": lambda x: x,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _read(atom: Any, scalars: dict[Any, _Scalar]) -> _Scalar:
    if not isinstance(atom, Literal):
        return scalars.get(atom, _UNKNOWN)
    aval: Any = atom.aval
    return _UNKNOWN if aval.shape else _Scalar(np.asarray(atom.val, aval.dtype)[()], frozenset())


def _evaluate(jaxpr: Jaxpr, scalars: dict[Any, _Scalar]) -> list[dict[int, frozenset[str]]]:
    """Evaluates the jaxpr: adds the `_Scalar` of every variable to `scalars`, given those of the arguments.

    Returns the result of `_needed` for each equation.
    """
    needed = []
    for equation in jaxpr.eqns:
        operands = [_read(x, scalars) for x in equation.invars]
        needed.append(_needed(equation, operands))
        value = None if equation.primitive.multiple_results else _value(equation, operands, list(needed[-1]))
        if equation.primitive.name in ("dynamic_slice", "gather"):
            operands = operands[:1]  # a condition on an entry is none on its index
        sources = frozenset().union(*(x.sources for x in operands))
        scalars.update((variable, _Scalar(value, sources)) for variable in equation.outvars)
    return needed


def _value(equation: Any, operands: list[_Scalar], needed: list[int]) -> Any:
    """Computes the result of an equation if that is an integer, a boolean or a boolean cast to float; None if unknown.

    `needed` lists the operands that the equation uses, by number; if it uses one of several, that one is the result.
    """
    name, aval = equation.primitive.name, equation.outvars[0].aval
    is_switch = name == "convert_element_type" and equation.invars[0].aval.dtype == bool
    if aval.shape or not (is_switch or jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool):
        return None
    if len(needed) < len(operands):
        return operands[needed[0]].value
    values = [x.value for x in operands]
    if name not in _FUNCTIONS or any(x is None for x in values) or (name in ("div", "rem") and not values[1]):
        return None
    with np.errstate(all="ignore"):  # XLA wraps around
        return np.asarray(_FUNCTIONS[name](*values)).astype(aval.dtype)[()]


def _needed(equation: Any, operands: list[_Scalar]) -> dict[int, frozenset[str]]:
    """Finds the operands that an equation may use, by number, and for each what decides whether it is used.

    What decides is the set of those of b, h, q_idx, kv_idx from which a condition with unknown value is computed; empty
    if the operand is used for certain. Only one operand is used by a select_n whose condition is known, an `and` with a
    False, an `or` with a True, and a product with a False as a float, as in `table[kv_idx] * (kv_idx < length)`.
    """
    name, nothing, dtypes = equation.primitive.name, frozenset[str](), [x.aval.dtype for x in equation.outvars]
    if name == "select_n":
        condition, *cases = operands
        if condition.value is not None:
            return {1 + int(condition.value): nothing}
        return {0: nothing} | {i: condition.sources for i, _ in enumerate(cases, 1)}
    is_logical = name in ("and", "or") and dtypes == [bool]
    if is_logical or (name == "mul" and not jnp.issubdtype(dtypes[0], jnp.integer)):
        for i, x in enumerate(operands):
            if x.value is not None and x.value == (name == "or"):
                return {i: nothing}
    if not is_logical and not any(True for _ in inner_jaxprs(equation)):
        return dict.fromkeys(range(len(operands)), nothing)
    unknown = [x.sources if x.value is None else nothing for x in operands]
    return {i: nothing.union(*unknown[:i], *unknown[i + 1 :]) for i, _ in enumerate(operands)}


def _conditions(jaxpr: Jaxpr, needed: list[dict[int, frozenset[str]]]) -> dict[Any, frozenset[str]]:
    """Finds the variables that the result may use, and for each what decides whether it is used; see `_needed`."""
    conditions: dict[Any, frozenset[str]] = {v: frozenset() for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation, operands in zip(reversed(jaxpr.eqns), reversed(needed), strict=True):
        results = [conditions[v] for v in equation.outvars if v in conditions]
        for i, inner in operands.items() if results else ():
            atom, found = equation.invars[i], frozenset.intersection(*results) | inner
            if not isinstance(atom, Literal):
                conditions[atom] = conditions.get(atom, found) & found
    return conditions
