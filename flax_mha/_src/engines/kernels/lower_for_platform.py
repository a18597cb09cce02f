"""Runs a kernel for one platform in a program that may be compiled for other platforms,
or for several together.

The platform is not known while a program is traced: `jit(backend="cpu")`, arrays on
another device and `jax.export` decide it later, and `jax.lax.platform_dependent`
chooses a branch then. But in a program for several platforms, JAX compiles every branch
for all of them, which fails for kernels; here the kernel is compiled only for its
platform.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from flax_mha._src.core.jaxprs import Program, as_function, traced


def compile_for(platform: str, program: Program) -> Callable[..., list[Array]]:
    """Makes a function that evaluates `program`. JAX compiles it only for `platform`,
    "cuda" or "tpu", and cannot differentiate it.
    """
    return functools.partial(_compiled_for_p.bind, jaxpr=program, name=platform)


_compiled_for_p = Primitive("compiled_for")
_compiled_for_p.multiple_results = True


@_compiled_for_p.def_abstract_eval
def _types(*_: object, jaxpr: Program, name: str) -> list[Any]:
    return jaxpr.out_avals


def _batched(arguments: Any, axes: Any, *, jaxpr: Program, name: str) -> Any:
    program = traced(jax.vmap(as_function(jaxpr), axes), *arguments)
    results = _compiled_for_p.bind(*arguments, jaxpr=program, name=name)
    return results, [0] * len(results)


def _lowered(
    context: mlir.LoweringRuleContext, *arguments: object, jaxpr: Program, name: str
) -> Any:
    # Within this program, only the kernel's platform exists.
    module = context.module_context.replace(platforms=(name,))
    rule = mlir.lower_fun(as_function(jaxpr), multiple_results=True)
    return rule(context.replace(module_context=module), *arguments)


batching.primitive_batchers[_compiled_for_p] = _batched
mlir.register_lowering(_compiled_for_p, _lowered)
