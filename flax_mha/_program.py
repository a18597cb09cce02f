"""A user's function of one score or one position, traced once into a value that `jit` can recognize."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array


class Program:
    """The jaxpr of a function. Two are equal if they read the same, so that tracing again compiles nothing again."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.text = jaxpr, str(jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __call__(self, captured: Sequence[Array], *arguments: Array) -> Array:
        """The function's answer, given the arrays that it captured."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, captured))(*arguments)[0]

    def uses(self, argument: int) -> bool:
        """Whether the answer may depend on this argument."""
        variable = self.jaxpr.invars[argument]
        return any(v is variable for equation in self.jaxpr.eqns for v in equation.invars)


class Traced(NamedTuple):
    """A program, and the arrays that the function captured."""

    program: Program
    captured: list[Array]


def trace(name: str, function: Callable, signature: dict[str, Any], answer: str) -> Traced:
    """Traces `function`, whose arguments are scalars of the dtypes in `signature`, and checks its answer's dtype.

    Raises:
      ValueError: If it raises, or does not answer one scalar of the dtype `answer`; the message names `name`.
    """
    wanted = f"{name}({', '.join(signature)}) must answer one {answer} scalar for scalar arguments"
    try:
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in signature.values()))
    except Exception as error:
        raise ValueError(f"{wanted}, but {function!r} raised {type(error).__name__}: {error}") from error
    answers = closed.out_avals
    if len(answers) != 1 or answers[0].shape != () or answers[0].dtype != jnp.dtype(answer):
        got = ", ".join(aval.str_short() for aval in answers)
        raise ValueError(
            f"{wanted}, but {function!r} answered {got or 'nothing'}; use .astype or jnp.where on scalars."
        )
    return Traced(Program(closed.jaxpr), [jnp.asarray(c) for c in closed.consts])
