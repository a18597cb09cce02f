"""A user's function of one score or one position, traced into a value that `jit` can compare.

`jit` compiles again when a static argument is unequal to those that it has seen. A Python function is a poor static
argument: a lambda that is made anew in every call is never equal to the last one, and a function whose closure has
changed still is. So the function is traced in every call, and two traces are equal if they compute the same with the
same constants. What may differ between equal traces is passed to the compiled program as arrays: the arrays that the
function captures, and the floats in it.

Example: after `slope = 0.5`, the function `lambda score, b, h, q_idx, kv_idx: score - slope * (q_idx - kv_idx)` has one
captured array, 0.5. With `slope = 0.6` it is traced into an equal value with another captured array, and nothing is
compiled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from flax_mha.core.captured import with_jax_arrays
from flax_mha.core.jaxprs import (
    RULES,
    derivative_is_finite,
    equations,
    evaluated_alike,
    inputs,
    key_of,
    key_of_derivative,
)
from flax_mha.core.tracing import any_varies, without_mesh


class TracedFunction:
    """The jaxpr of a function of scalars. Two are equal if they compute the same from the same captured arrays.

    Args:
      name: What errors call the function; it does not count when two are compared.
      jaxpr: The function's jaxpr. It takes the captured arrays, then the function's arguments.
      captured: How many arrays are captured.
      numbers: How many of these, the last ones, are finite numbers lifted out of the jaxpr.
      derivative: The jaxpr of its vector-Jacobian product if it calls functions with custom derivatives, else None.
    """

    def __init__(self, name: str, jaxpr: Jaxpr, captured: int, numbers: int, derivative: ClosedJaxpr | None) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self._key = (key_of(jaxpr), None if derivative is None else key_of_derivative(derivative))
        self._hash = hash(self._key)
        self._captured = captured
        self.derivative_is_finite = derivative_is_finite(jaxpr, captured - numbers, captured)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, captured: Sequence[Array], *arguments: Array) -> Array:
        """The function's value, given the arrays that it captured."""
        if any_varies((*captured, *arguments)):
            return evaluated_alike(self.jaxpr, captured, arguments)
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, captured))(*arguments)[0]

    @property
    def has_custom_vjp(self) -> bool:
        """True if it calls a function with a custom_vjp, which jax cannot differentiate in forward mode."""
        return any(equation.primitive.name == "custom_vjp_call" for equation in equations(self.jaxpr))

    @property
    def has_callback(self) -> bool:
        """True if it calls Python while it runs, which may return something else next time."""
        return any("callback" in equation.primitive.name for equation in equations(self.jaxpr))

    @property
    def arguments(self) -> list[Any]:
        """The variables of the function's arguments."""
        return inputs(self.jaxpr)[self._captured :]

    def uses(self, argument: int) -> bool:
        """Returns whether the value may depend on this argument."""
        variable = self.arguments[argument]
        used = (*(v for equation in self.jaxpr.eqns for v in equation.invars), *self.jaxpr.outvars)
        return any(v is variable for v in used)


class Trace(NamedTuple):
    """A function's trace: what is static, the arrays that it captured, and which of them get gradients."""

    function: TracedFunction
    captured: list[Array]
    trainable: tuple[bool, ...]


def trace(name: str, function: Callable, signature: dict[str, Any], result_dtype: str) -> Trace:
    """Traces `function` as it is now, and checks the dtype of its value.

    Args:
      name: What to call it in errors.
      function: Of scalars.
      signature: Names and dtypes of its arguments.
      result_dtype: Name of the dtype of its value.

    Raises:
      ValueError: If it raises, or does not return one scalar of the dtype `result_dtype`.
    """
    wanted = f"{name}({', '.join(signature)}) must return one {result_dtype} scalar for scalar arguments"
    try:
        closed = _traced(function, tuple(jax.ShapeDtypeStruct((), dtype) for dtype in signature.values()))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
        raise ValueError(f"{wanted}, but {function!r} raised {reason}{_fix(error)}.") from error
    answers = closed.out_avals
    if len(answers) != 1 or answers[0].shape != () or answers[0].dtype != jnp.dtype(result_dtype):
        got = ", ".join(aval.str_short() for aval in answers)
        raise ValueError(
            f"{wanted}, but {function!r} returned {got or 'nothing'}; use .astype or jnp.where on scalars."
        )
    captured = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in closed.consts]
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in captured) and result_dtype != "bool":
        raise ValueError(f"{name} must not capture complex arrays, but {function!r} does; capture x.real and x.imag.")
    without = _without_derivative(closed.jaxpr)
    trainable = tuple(
        jnp.issubdtype(x.dtype, jnp.floating) and (isinstance(x, jax.core.Tracer) or variable not in without)
        for x, variable in zip(captured, closed.jaxpr.constvars, strict=True)
    )
    jaxpr, floats = _floats_as_arguments(closed.jaxpr)
    captured, trainable = captured + floats, trainable + (False,) * len(floats)
    derivative = None
    if jnp.issubdtype(jnp.dtype(result_dtype), jnp.floating) and any(
        p.primitive.name in RULES for p in equations(jaxpr)
    ):
        derivative = _derivative(jaxpr, captured, trainable, result_dtype)
    known_as = f"{name} {_qualified_name(function)}"
    return Trace(TracedFunction(known_as, jaxpr, len(captured), len(floats), derivative), captured, trainable)


def _qualified_name(function: Any) -> str:
    """Returns Python's name of the function, or of the function in a partial, or of the class of another object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def _fix(error: Exception) -> str:
    """Returns advice about an error that a user's function raised, where there is some."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "; use jnp.where in the place of `if`, and & | ~ in the place of `and`, `or`, `not`"
    if type(error).__name__ == "ShardingTypeError":
        return "; capture jax.reshard(array, jax.P()) of arrays that are split, whose entries every device needs"
    conversions = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)
    if isinstance(error, conversions) or "len() of unsized" in str(error):  # the latter from torch
        return "; capture lists, torch tensors and NumPy arrays in other objects as jnp.asarray(...) of them"
    return ""


def _traced(function: Callable, arguments: tuple[jax.ShapeDtypeStruct, ...]) -> ClosedJaxpr:
    """The jaxpr of the function as it is now.

    jax keeps the traces of functions and of the jitted helpers that they call, whatever has become of their closures.
    So a new function is traced, which calls everything without `jit`; the arrays that helpers capture then are captured
    like all others.
    """

    def anew(*scalars: Array) -> Any:
        with jax.disable_jit():
            try:
                return function(*scalars)
            except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError):
                # NumPy cannot index its arrays with traced numbers; JAX can.
                return with_jax_arrays(function)(*scalars)

    with without_mesh():
        return jax.make_jaxpr(anew)(*arguments)


def _without_derivative(jaxpr: Jaxpr) -> set[Any]:
    """The variables that functions with a custom_vjp close over, and what these are computed from.

    jax refuses to differentiate by them. They may be used as constants.
    """
    variables: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        if variables.intersection(equation.outvars):
            variables.update(v for v in equation.invars if not isinstance(v, Literal))
        if equation.primitive.name == "custom_vjp_call":
            variables.update(equation.invars[: equation.params["num_consts"]])
    return variables


def _floats_as_arguments(jaxpr: Jaxpr) -> tuple[Jaxpr, list[Array]]:
    """The jaxpr with its finite floats as captured arrays, so that another number compiles nothing.

    Exponents stay: XLA computes x ** 2.0 faster if it knows the 2.0.
    """
    variables, values = [], []

    def lifted(atom: Any, primitive: str) -> Any:
        is_float = isinstance(atom, Literal) and jnp.issubdtype(atom.aval.dtype, jnp.floating)  # type: ignore[attr-defined]
        if not is_float or atom.aval.shape or primitive == "pow" or not np.isfinite(atom.val):
            return atom
        variables.append(Var(atom.aval))
        values.append(jnp.asarray(atom.val, atom.aval.dtype))
        return variables[-1]

    equations = [
        equation.replace(invars=[lifted(atom, equation.primitive.name) for atom in equation.invars])
        for equation in jaxpr.eqns
    ]
    if not variables:
        return jaxpr, []
    return jaxpr.replace(constvars=[*jaxpr.constvars, *variables], eqns=equations), values


def _derivative(jaxpr: Jaxpr, captured: list[Array], trainable: tuple[bool, ...], dtype: str) -> ClosedJaxpr:
    """The vector-Jacobian product of a `score_mod` that calls functions with custom derivatives.

    Their rules are Python functions, of which it cannot be said whether they are equal. What they compute can.
    """

    def pulled(learned: list[Array], fixed: list[Array], arguments: tuple[Array, ...], cotangent: Array) -> Any:
        def run(score: Array, learned: list[Array]) -> Array:
            queues = {True: iter(learned), False: iter(fixed)}
            values = [next(queues[is_learned]) for is_learned in trainable]
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, values))(score, *arguments[1:])[0]

        with jax.disable_jit():
            return jax.vjp(run, arguments[0], learned)[1](cotangent)

    learned = [x for x, is_learned in zip(captured, trainable, strict=True) if is_learned]
    fixed = [x for x, is_learned in zip(captured, trainable, strict=True) if not is_learned]
    arguments = tuple(jax.ShapeDtypeStruct((), v.aval.dtype) for v in inputs(jaxpr)[len(captured) :])
    # With its constants: the arrays that the rules capture are compared by value.
    return jax.make_jaxpr(pulled)(learned, fixed, arguments, jax.ShapeDtypeStruct((), dtype))
