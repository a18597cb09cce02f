"""A user's function of one score or one position, traced into a value that `jit` can compare.

`jit` compiles again when a static argument is unequal to those that it has seen. A Python function is a poor static
argument: a lambda that is made anew in every call is never equal to the last one, and a function whose closure has
changed still is. So the function is traced in every call, and two traces are equal if they compute the same with the
same arrays. These are passed to the compiled program, and may differ between equal traces: the arrays that the function
captures, and the floats in it.

Example: after `slope = 0.5`, the function `lambda score, b, h, q_idx, kv_idx: score - slope * (q_idx - kv_idx)` has one
float, 0.5. With `slope = 0.6` it is traced into an equal value with another float, and nothing is compiled.

That is so for every call that Python makes. A program that a user has jitted calls no Python function again: there the
slope stays that of its trace, unless it is an argument of that program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from flax_mha._src.core.captured import with_jax_arrays
from flax_mha._src.core.jaxprs import RULES, derivative_is_finite, equations, evaluate_varying, is_float, key_of
from flax_mha._src.core.tracing import any_varies, without_mesh

POSITIONS = ("b", "h", "q_idx", "kv_idx")
F = TypeVar("F", bound=Callable)


class TracedFunction:
    """The jaxpr of a function of ([score,] b, h, q_idx, kv_idx). Two are equal if they compute the same.

    Attributes:
      name: Name of the function in errors; not compared.
      jaxpr: Its arguments are the captured arrays, then those of the function.
      derivative_is_finite: See `jaxprs.derivative_is_finite`.
      made_for: The sizes given to the decorator `made_for`; not compared.
    """

    def __init__(
        self,
        name: str,
        jaxpr: Jaxpr,
        derivative: ClosedJaxpr | None,
        derivative_is_finite: bool,
        made_for: Mapping[str, int],
    ) -> None:
        self.name, self.jaxpr, self.derivative_is_finite, self.made_for = name, jaxpr, derivative_is_finite, made_for
        self._derivative = derivative  # kept alive, because the key holds the `id` of objects in it
        with_rules = (equation for equation in equations(jaxpr) if equation.primitive.name in RULES)
        differentiated = frozenset(key_of(equation.params["call_jaxpr"]) for equation in with_rules)
        self._key = key_of(jaxpr), key_of(derivative, differentiated)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, captured: Sequence[Array], *arguments: Array) -> Array:
        values = (*captured, *arguments)
        return evaluate_varying(self.jaxpr, values) if any_varies(values) else _evaluate(self.jaxpr, values)

    @property
    def has_custom_vjp(self) -> bool:
        """True if it calls a function with a `jax.custom_vjp`, which has no forward mode."""
        return any(equation.primitive.name == "custom_vjp_call" for equation in equations(self.jaxpr))

    @property
    def has_callback(self) -> bool:
        """True if it calls back into Python, so that its value may differ from call to call."""
        return any("callback" in equation.primitive.name for equation in equations(self.jaxpr))

    def uses(self, position: str) -> bool:
        """Returns whether the function reads this argument, one of `POSITIONS`."""
        variable = self.jaxpr.invars[POSITIONS.index(position) - len(POSITIONS)]
        used = (*(v for equation in self.jaxpr.eqns for v in equation.invars), *self.jaxpr.outvars)
        return any(v is variable for v in used)


def made_for(**sizes: int) -> Callable[[F], F]:
    """Declares the sizes that a `mask_mod` or a `score_mod` is made for, such as `@made_for(h=8, kv_idx=1024)`.

    `lookups.check` refuses calls with other numbers of batch entries or heads, and with positions beyond these sizes.
    """

    def mark(function: Any) -> Any:
        function.made_for = sizes
        return function

    return mark


class Trace(NamedTuple):
    """A traced function, and the arrays that its jaxpr takes first: those that get gradients, then all others."""

    function: TracedFunction
    learned: list[Array]
    constants: list[Array]


def trace(name: str, function: Any, score: jnp.dtype | None = None) -> Trace:
    """Traces a user's function of scalars, and the values that it captures now, to a form that `jit` can compare.

    Args:
      name: Name of the argument, for errors.
      function: A `mask_mod` or a `score_mod`.
      score: The dtype of scores; None for a `mask_mod`.

    Raises:
      ValueError: If it is no function, raises an error, or returns anything but one bool, or one score.
    """
    closed = _checked_jaxpr(name, function, score)
    pairs = [(v, jnp.asarray(x)) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)]
    if score is not None and any(jnp.issubdtype(x.dtype, jnp.complexfloating) for _, x in pairs):
        raise ValueError(f"{name} must not capture complex arrays, but {function!r} does; capture x.real and x.imag.")

    def is_constant(pair: tuple[Any, Array]) -> bool:  # an array that is differentiated is a tracer
        return score is None or not is_float(pair[0]) or not isinstance(pair[1], jax.core.Tracer)

    eqns, floats = _floats_as_arguments(closed.jaxpr)
    pairs = sorted(pairs, key=is_constant) + floats
    variables, captured = [v for v, _ in pairs], [x for _, x in pairs]
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*variables, *closed.jaxpr.invars], eqns=eqns)
    number = sum(not is_constant(pair) for pair in pairs)
    learned, constants = captured[:number], captured[number:]
    derivative = None
    if score is not None and any(equation.primitive.name in RULES for equation in equations(jaxpr)):
        derivative = _derivative(jaxpr, learned, constants)
    name = f"{name} {_qualified_name(function)}"
    sizes = getattr(function, "made_for", {})
    traced = TracedFunction(name, jaxpr, derivative, derivative_is_finite(closed.jaxpr), sizes)
    return Trace(traced, learned, constants)


def _checked_jaxpr(name: str, function: Any, score: jnp.dtype | None) -> ClosedJaxpr:
    """Traces a function and checks that it returns one bool, or one score."""
    if not callable(function):
        raise ValueError(f"{name} must be a function of scalars, but got {function!r}.")
    scores = [] if score is None else [score]
    [result] = scores or [jnp.dtype(bool)]
    names = ", ".join([*("score" for _ in scores), *POSITIONS])
    wanted = f"{name}({names}) must return a {result.name} scalar for scalar arguments"
    try:
        closed = _jaxpr_of(function, *scores, *[jnp.int32] * len(POSITIONS))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
        raise ValueError(f"{wanted}, but {function!r} raised {reason}{_fix(error)}.") from error
    if [(x.shape, x.dtype) for x in closed.out_avals] != [((), result)]:
        got = ", ".join(aval.str_short() for aval in closed.out_avals) or "nothing"
        raise ValueError(f"{wanted}, but {function!r} returned {got}; use .astype or jnp.where on scalars.")
    return closed


def _qualified_name(function: Any) -> str:
    """Returns the name of a function, of the function in a partial, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def _fix(error: Exception) -> str:
    """Returns advice on an error that a user's function raised, or an empty string."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "; use jnp.where instead of `if`, and & | ~ instead of `and`, `or`, `not`"
    if type(error).__name__ == "ShardingTypeError":
        return (
            "; capture jax.reshard(array, jax.P()) instead of a sharded array, because every device needs all entries"
        )
    conversions = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)
    if isinstance(error, conversions) or "len() of unsized" in str(error):  # the latter from torch
        return "; convert captured lists, torch tensors and NumPy arrays inside other objects with jnp.asarray(...)"
    return ""


def _jaxpr_of(function: Callable, *dtypes: Any) -> ClosedJaxpr:
    """Traces a function of scalars of these dtypes, with the values that it captures now, not those in JAX's caches.

    JAX reuses the trace of a function, and of jitted helpers that it calls, even if their closures have changed. So a
    new function is traced here, and everything runs without `jit`; arrays that helpers capture are then captured, too.
    """

    def anew(*scalars: Array) -> Any:
        with jax.disable_jit():
            try:
                return function(*scalars)
            except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError):
                # NumPy cannot index its arrays with traced numbers; JAX can.
                return with_jax_arrays(function)(*scalars)

    with without_mesh():
        return jax.make_jaxpr(anew)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))


def _evaluate(jaxpr: Jaxpr, values: Sequence[Array]) -> Array:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values)[0]


def _floats_as_arguments(jaxpr: Jaxpr) -> tuple[list[Any], list[tuple[Any, Array]]]:
    """Replaces finite float literals in a jaxpr by variables, so that functions that differ in them compile once.

    Exponents stay literals: XLA computes x ** 2.0 faster if it knows the 2.0.

    Returns:
      The equations, and the new variables with their values.
    """
    floats: list[tuple[Any, Array]] = []

    def lifted(atom: Any, primitive: str) -> Any:
        is_number = isinstance(atom, Literal) and is_float(atom) and not atom.aval.shape  # type: ignore[attr-defined]
        if not is_number or primitive == "pow" or not np.isfinite(atom.val):
            return atom
        floats.append((Var(atom.aval), jnp.asarray(atom.val, atom.aval.dtype)))
        return floats[-1][0]

    return [e.replace(invars=[lifted(x, e.primitive.name) for x in e.invars]) for e in jaxpr.eqns], floats


def _derivative(jaxpr: Jaxpr, learned: list[Array], constants: list[Array]) -> ClosedJaxpr:
    """Traces the vector-Jacobian product of a `score_mod` that calls functions with custom derivatives.

    `learned` and `constants` are the captured arrays that `jaxpr` takes first. Derivative rules are Python functions,
    which cannot be compared; the jaxpr of what they compute can.
    """

    def pulled(score: Array, cotangent: Array, positions: list[Array], learned: list, constants: list) -> Any:
        def run(score: Array, learned: list[Array]) -> Array:
            return _evaluate(jaxpr, (*learned, *constants, score, *positions))

        with jax.disable_jit():
            return jax.vjp(run, score, learned)[1](cotangent)

    arguments = jaxpr.invars[len(learned) + len(constants) :]
    score, *positions = (jax.ShapeDtypeStruct((), v.aval.dtype) for v in arguments)  # type: ignore[attr-defined]
    return jax.make_jaxpr(pulled)(score, score, positions, learned, constants)
