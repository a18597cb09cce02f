"""`jax.linear_transpose` of attention as a function of the values, in which it is linear."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import JaxprTracer
from jaxtyping import Array

from flax_mha._src.call.operands import Call, Operands, Result
from flax_mha._src.math.derivatives import linear_function


def in_values(operands: Operands) -> bool:
    """Returns whether `jax.linear_transpose` is tracing a function of the values, in which attention is linear."""
    if not isinstance(operands.value, JaxprTracer):
        return False
    return sum(isinstance(x, JaxprTracer) for x in jax.tree.leaves(operands)) == 1


def of_values(call: Call, run: Callable[[Call], Result]) -> Result:
    """Computes `run(call)` as one linear function of the values, whose transpose is the gradient.

    The search for NaN in values is not linear, so the operations that compute attention cannot be transposed.
    """
    value = call.operands.value
    leaves, structure = jax.tree.flatten(call.operands)
    place = next(i for i, x in enumerate(leaves) if x is value)
    others = leaves[:place] + leaves[place + 1 :]

    def attend(*leaves: Array) -> Result:
        *others, value = leaves
        operands = jax.tree.unflatten(structure, [*others[:place], value, *others[place:]])
        return run(call._replace(operands=operands))

    def transpose(others: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        _, pull = jax.vjp(lambda value: attend(*others, value).output, jnp.zeros(value.shape, value.dtype))
        return pull(cotangents[0])

    # Log-sum-exp and largest scores do not depend on the values.
    needs_others = call.options.return_residual or call.options.return_max_score
    of_scores = attend(*others, jnp.zeros(value.shape, value.dtype)) if needs_others else Result(value, None)
    output = jax.eval_shape(attend, *others, jax.ShapeDtypeStruct(value.shape, value.dtype)).output
    function = linear_function([output], lambda *leaves: [attend(*leaves).output], transpose, len(others))
    return of_scores._replace(output=function(*others, value)[0])
