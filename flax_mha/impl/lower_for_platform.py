"""A kernel of one platform in a program that may be compiled for others, or for several at once.

Where a program will run is not known while it is traced: `jit(backend="cpu")`, arrays on another device and
`jax.export` decide it later. `jax.lax.platform_dependent` chooses then. But in a program for several platforms it
compiles every branch for all of them, which kernels do not allow; here, the kernel's branch is compiled for its
platform alone.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import Array

from flax_mha.call.operands import Operands

Attend = Callable[[Operands], Array]
Inputs = tuple[Array, Array, Array]


def lower_for_platform(platform: str, kernel: Attend, elsewhere: Attend, operands: Operands) -> Array:
    """`kernel(operands)` where the program is compiled for `platform` ("gpu" or "tpu"), else `elsewhere(operands)`.

    The kernel has gradients of queries, keys and values only.
    """
    name = {"gpu": "cuda"}.get(platform, platform)
    branches = {name: _compiled_with_gradients(name, kernel)}
    return lax.platform_dependent(operands, **branches, default=elsewhere)


def _compiled_with_gradients(name: str, kernel: Attend) -> Attend:
    """The kernel, it and its derivative compiled for one platform."""

    def attend(inputs: Inputs, others: Operands) -> Array:
        query, key, value = inputs
        return kernel(others._replace(query=query, key=key, value=value))

    @jax.custom_vjp
    def run(inputs: Inputs, others: Operands) -> Array:
        return _compiled_for(name, attend, inputs, others)

    def forward(inputs: Inputs, others: Operands) -> Any:
        return _compiled_for(name, lambda inputs, others: jax.vjp(lambda x: attend(x, others), inputs), inputs, others)

    def backward(pull: Any, d_output: Array) -> Any:
        return *_compiled_for(name, lambda pull, d_output: pull(d_output), pull, d_output), None

    run.defvjp(forward, backward)
    return lambda operands: run(operands[:3], operands._replace(query=None, key=None, value=None))  # type: ignore


def _compiled_for(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    results = []

    def flat(*leaves: Array) -> list[Array]:
        answer, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        results.append(tree)
        return answer

    answer = _compiled_for_p.bind(*leaves, jaxpr=jax.make_jaxpr(flat)(*leaves), name=name)
    return jax.tree.unflatten(results[0], answer)


_compiled_for_p = Primitive("compiled_for")
_compiled_for_p.multiple_results = True


@_compiled_for_p.def_abstract_eval
def _types(*_: Any, jaxpr: ClosedJaxpr, name: str) -> list[Any]:
    return jaxpr.out_avals


def _batched(arguments: Any, axes: Any, *, jaxpr: ClosedJaxpr, name: str) -> Any:
    together = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), axes))(*arguments)
    return _compiled_for_p.bind(*arguments, jaxpr=together, name=name), [0] * len(together.out_avals)


def _lowered(context: Any, *arguments: Any, jaxpr: ClosedJaxpr, name: str) -> Any:
    module = context.module_context.replace(platforms=(name,))
    rule = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
    return rule(context.replace(module_context=module), *arguments)


batching.primitive_batchers[_compiled_for_p] = _batched
mlir.register_lowering(_compiled_for_p, _lowered)
