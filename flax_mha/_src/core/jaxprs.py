"""Programs that JAX has traced (jaxprs): how to read, shorten and evaluate them.

JAX changes the classes of its jaxprs from time to time, so only this file uses them.
Elsewhere, a jaxpr with its constants is a `Program`, and one that takes all its arrays
as arguments is a `Body`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import Array

from flax_mha._src.core.tracing import varies_over_devices, varying_alike

Program = ClosedJaxpr
Body = Jaxpr


def as_function(program: Program) -> Callable[..., list[Array]]:
    """Returns a function that evaluates `program` and returns its results as a list."""
    return jaxpr_as_fun(program)


def traced(function: Callable, *arguments: Any) -> Program:
    """Traces a function to a program that an operation may keep as a parameter.

    JAX 0.12 refuses a parameter that holds operations which it expands before it
    compiles, such as `jnp.nonzero`, and `custom_vjp` with its flag jax_custom_vjp3.
    """
    program = jax.make_jaxpr(function)(*arguments)
    if getattr(program, "is_high", False) and hasattr(partial_eval, "lower_jaxpr2"):
        return partial_eval.lower_jaxpr2(program)
    return program


def with_outputs(program: Program, wanted: Sequence[bool]) -> Program:
    """Reduces a program to the outputs that `wanted` marks, and the equations that
    these need.
    """
    body, _ = partial_eval.dce_jaxpr(program.jaxpr, list(wanted), instantiate=True)
    return ClosedJaxpr(body, program.consts)


def captured_variables(program: Program) -> list[Any]:
    """Lists the variables of the captured arrays, in the order of `program.consts`."""
    return list(program.jaxpr.constvars)


def open_program(program: Program, captured: Sequence[Any] | None = None) -> Body:
    """Turns the constants of a program into its first inputs, in the order of their
    variables in `captured`.

    `captured` is an order of `captured_variables(program)`; None keeps theirs.
    """
    body = program.jaxpr
    if captured is None:
        captured = body.constvars
    return body.replace(constvars=[], invars=[*captured, *body.invars])


def is_jaxpr(x: Any) -> bool:
    """Returns whether `x` is a traced program, with or without its constants."""
    return isinstance(x, Jaxpr | ClosedJaxpr)


def is_literal(atom: Any) -> bool:
    """Returns whether an operand of an equation is a number rather than a variable."""
    return isinstance(atom, Literal)


def equations(jaxpr: Body | Program) -> Iterator[Any]:
    """Iterates over the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Iterates over an equation's jaxprs: branches, loop bodies, functions with custom
    derivatives.
    """
    for parameter in equation.params.values():
        # The branches of `lax.cond` are a tuple.
        several = parameter if isinstance(parameter, tuple | list) else (parameter,)
        yield from filter(is_jaxpr, several)


def custom_call(equation: Any) -> tuple[str, Body] | None:
    """Returns the name and the jaxpr of a function with custom derivatives that an
    equation calls, otherwise None.

    The name is "custom_jvp_call" or "custom_vjp_call", also with JAX's flags
    jax_custom_jvp3 and jax_custom_vjp3.
    """
    name = equation.primitive.name
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return name, equation.params["call_jaxpr"].jaxpr
    if name != "call_hi_primitive":
        return None
    # With the flags, the primitive is an object that holds the traced function.
    primitive = equation.params["_prim"]
    names = {"CustomJVPTraced": "custom_jvp_call", "CustomVJPTraced": "custom_vjp_call"}
    name = names.get(type(primitive).__name__)
    if name is None:
        return None
    return name, primitive.traced.jaxpr.jaxpr


def evaluate(body: Body, values: Sequence[Array]) -> list[Array]:
    """Evaluates the jaxpr of a user's function.

    In `jax.shard_map`, it casts the operands of each equation by `varying_alike`, and
    refuses control flow.
    """
    if not any(map(varies_over_devices, values)):
        return jaxpr_as_fun(ClosedJaxpr(body, ()))(*values)
    known = dict(zip(body.invars, values, strict=True))

    def value_of(atom: Any) -> Array:
        return jnp.asarray(atom.val) if is_literal(atom) else known[atom]

    def read(atoms: Sequence[Any]) -> list[Array]:
        return varying_alike([value_of(atom) for atom in atoms])

    for equation in body.eqns:
        # The equations inside would also need casts.
        if any(True for _ in inner_jaxprs(equation)):
            raise NotImplementedError(
                "score_mod and mask_mod must not use control flow or custom "
                f"derivatives inside jax.shard_map, but got {equation.primitive.name}; "
                "use jnp.where, or jax.shard_map(..., check_vma=False)."
            )
        results = read(equation.invars)
        # These cast captured arrays.
        if equation.primitive.name not in ("pvary", "pcast"):
            results = equation.primitive.bind(*results, **equation.params)
        if not isinstance(results, list | tuple):
            results = [results]
        known.update(zip(equation.outvars, results, strict=True))
    return read(body.outvars)
