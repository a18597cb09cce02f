"""Traces a user's function of one score or one position into a value that `jit` can
compare.

A Python function is a poor static argument of `jit`: two lambdas are never equal, and a
function whose closure has changed still equals itself. So every attention call traces
the function again (inside a user's `jit`, only while JAX traces the program). Two
traces are equal if their printed jaxprs, and what these omit, are equal.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_mha._src.core.jaxprs import (
    POSITIONS,
    Body,
    FunctionOfScalars,
    custom_functions,
    evaluate,
    is_jaxpr,
    missing_in_text,
    open_program,
    types_of,
)
from flax_mha._src.core.tracing import without_mesh

COUNTED = {
    "b": "batch entries",
    "h": "heads",
    "q_idx": "query positions",
    "kv_idx": "key positions",
}


class TracedFunction(FunctionOfScalars):
    """The jaxpr of a user's function of ([score,] b, h, q_idx, kv_idx). Equal instances
    compute the same function.

    Attributes:
      name: Name of the function in errors; not compared.
      body: Its inputs are the captured arrays, then the arguments of the function.
      made_for: The sizes that the function declares by `recipes.masks.made_for`, such
        as {"h": 8}; not compared.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        made_for: Mapping[str, int],
        rules: Sequence[Any] = (),
    ) -> None:
        self.name = name
        self.body = body
        self.made_for = made_for
        # Kept alive, because the key holds the `id` of objects in it.
        self._compared = (body, *rules)
        self._key = tuple(map(_key, self._compared))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, captured: Sequence[Array], *arguments: Array) -> Array:
        return evaluate(self.body, (*captured, *arguments))[0]

    def size(self, position: str) -> int | None:
        """Returns how many values `position`, such as "q_idx", may have by `lookups`
        and `made_for`; None: no limit.
        """
        sizes = [shape[axis] for name, axis, shape in self.lookups if name == position]
        if position in self.made_for:
            sizes.append(self.made_for[position])
        return min(sizes, default=None)

    def check(self, last: Mapping[str, int | None]) -> None:
        """Raises a ValueError if the call does not fit `made_for`, or if an index is
        certainly beyond a captured array.

        JAX clamps an index that is too large, so an array that is too short would give
        wrong numbers and no error. `last` maps b, h, q_idx and kv_idx to their largest
        visible value, or to None if it is not known.
        """
        for name, size in self.made_for.items():
            value = last[name]
            if value is None:
                continue
            # A call may have fewer positions, but not fewer batch entries or heads.
            has_fewer = name in "bh" and value + 1 < size
            if value >= size or has_fewer:
                raise ValueError(
                    f"{self.name} was created for {size} {COUNTED[name]}, but the call "
                    f"has {value + 1}."
                )
        for name, axis, shape in self.lookups:
            value = last[name]
            if value is not None and value >= shape[axis]:
                raise ValueError(
                    f"{self.name} must not index arrays out of bounds, but at {name} = "
                    f"{value}, it uses index {value} on axis {axis} of an array with "
                    f"shape {shape}; extend that axis to at least {value + 1}, or clip "
                    f"the index with jnp.clip(index, 0, {shape[axis] - 1})."
                )


class Trace(NamedTuple):
    """A traced function and the arrays that it captures: `learned` get gradients,
    `constants` do not.

    The first inputs of the jaxpr are the arrays `learned`, then `constants`.
    """

    function: TracedFunction
    learned: list[Array]
    constants: list[Array]


def trace(name: str, function: object, score: jnp.dtype | None = None) -> Trace:
    """Traces a `score_mod` (`score`: dtype of scores) or `mask_mod` (`score`: None);
    copies captured NumPy arrays.

    Raises:
      ValueError: If `function` is not callable, raises an error, or does not return one
        score or one bool.
    """
    if not callable(function):
        raise ValueError(f"{name} must be a function of scalars, but got {function!r}.")
    is_score_mod = score is not None
    names = list(POSITIONS)
    dtypes: list[Any] = [jnp.int32] * len(POSITIONS)
    result = jnp.dtype(bool)
    if score is not None:
        names.insert(0, "score")
        dtypes.insert(0, score)
        result = score
    arguments = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    wanted = (
        f"{name}({', '.join(names)}) must return a {result.name} scalar for scalar "
        "arguments"
    )

    def run(*scalars: Array) -> Any:
        # JAX would reuse old traces of jitted helpers, even if their closures have
        # changed.
        with jax.disable_jit():
            return function(*scalars)

    try:
        with without_mesh():
            program = jax.make_jaxpr(run)(*arguments)
    except Exception as error:
        first_line, *_ = str(error).split("\n")
        reason = f"{type(error).__name__}: {first_line.rstrip('.')}"
        raise ValueError(
            f"{wanted}, but {_name_of(function)} raised {reason}{_fix(error)}."
        ) from error
    if [(x.shape, x.dtype) for x in program.out_avals] != [((), result)]:
        got = ", ".join(aval.str_short() for aval in program.out_avals) or "nothing"
        raise ValueError(
            f"{wanted}, but {_name_of(function)} returned {got}; convert the "
            "result with .astype, or select one scalar with jnp.where."
        )

    # Sort the captured arrays: those that may get gradients come first.
    learned = {}
    constants = {}
    for i, x in enumerate(program.consts):
        # NumPy arrays are copied: JAX would keep the first values of one that changes,
        # for as long as it holds the array.
        if not isinstance(x, jax.Array):
            x = jnp.asarray(np.array(x))
        if is_score_mod and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ValueError(
                f"{name} must not capture complex arrays, but {function!r} does; "
                "capture x.real and x.imag."
            )
        # An array that is differentiated is a tracer.
        is_traced_float = isinstance(x, jax.core.Tracer) and jnp.issubdtype(
            x.dtype, jnp.floating
        )
        if is_score_mod and is_traced_float:
            learned[i] = x
        else:
            constants[i] = x
    body = open_program(program, [*learned, *constants])
    traced = TracedFunction(
        name=f"{name} {_name_of(function)}",
        body=body,
        made_for=getattr(function, "made_for", {}),
        # A mask_mod is not differentiated.
        rules=_rules(body, function) if is_score_mod else (),
    )
    return Trace(traced, [*learned.values()], [*constants.values()])


def _name_of(function: object) -> str:
    """Returns the name of a function, of the function inside a `functools.partial`, or
    of a callable's class.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.replace("<locals>.", "")


def _fix(error: Exception) -> str:
    """Returns advice on an error that a user's function raised, or an empty string."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            "; use jnp.where instead of `if`, and & | ~ instead of `and`, `or`, `not`"
        )
    if type(error).__name__ == "ShardingTypeError":
        return (
            "; capture jax.reshard(array, jax.P()) instead of a sharded array: every "
            "device needs all its entries"
        )
    conversions = (
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    # The latter from torch.
    if isinstance(error, conversions) or "len() of unsized" in str(error):
        return (
            "; captured NumPy arrays, lists and torch tensors cannot be indexed by "
            "positions: use jnp.asarray(...)"
        )
    return ""


def _key(compared: object) -> tuple:
    """Returns what `==` compares: a function's `id`, or a jaxpr's text and the `id`s of
    its constants and callbacks.
    """
    if not is_jaxpr(compared):
        return (id(compared),)
    return (str(compared), *map(id, missing_in_text(compared)))


def _rules(body: Body, function: object) -> list[Any]:
    """Lists what must be equal, besides the jaxprs, for two functions to be equal: the
    jaxprs of their derivatives, because a jaxpr hides the rules of custom derivatives.

    If these cannot show all rules, `function` is in the list: it equals only itself.
    """

    def pull(values: list[Array], cotangents: list[Array]) -> Any:
        with jax.disable_jit():
            _, transpose = jax.vjp(lambda *values: evaluate(body, values), *values)
            pulled = transpose(cotangents)
        # The gradients of integers.
        return [x for x in pulled if x.dtype != jax.dtypes.float0]

    found: list[Any] = []
    known: set[tuple] = set()
    # A rule may contain functions that have rules themselves.
    for _ in range(4):
        new = custom_functions(body) - known
        if not new:
            return found
        known |= new
        values, cotangents = types_of(body)
        try:
            derivative = jax.make_jaxpr(pull)(values, cotangents)
        except Exception:  # the function may still be used without derivatives
            return [*found, function]
        found.append(derivative)
        body = open_program(derivative)
    if custom_functions(body) - known:
        return [*found, function]
    return found
