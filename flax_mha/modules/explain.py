"""The method `explain` of the modules, which traces a call and explains its attention instead of computing it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha.call.operands import Call, Output
from flax_mha.distributed import dispatch
from flax_mha.impl.registry import Explanation, Implementation
from flax_mha.modules.call import call_of, core_of

P = ParamSpec("P")
M = TypeVar("M")


class ExplainedAttention:
    """An `attention_fn` that computes nothing: it adds an explanation of each call to a list, and returns zeros."""

    def __init__(self, given: Callable[..., Array]):
        core = core_of(given)
        if core is None:
            raise ValueError(f"attention_fn must be flax_mha.attention_fn to be explained, but got {given!r}.")
        self.core = dataclasses.replace(core, function=self, run=self._explain)
        self.explanations: list[Explanation] = []

    def __call__(self, query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        """Records the explanation of a call, and returns zeros; ignores arguments like `module`."""
        return self.core.run(*call_of(self.core, query, key, value, **arguments))[0]

    def _explain(self, call: Call, implementation: Implementation | None) -> Output:
        self.explanations.append(dispatch.explain(call, implementation))
        query, value = call.operands.query, call.operands.value
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), None


def explaining(
    call: Callable[Concatenate[M, P], Array], explained: Callable[..., Explanation]
) -> Callable[Concatenate[M, P], Explanation]:
    """Makes the method `explain` of a module: it calls `explained`, and has the argument types of the method `call`."""

    @functools.wraps(call, assigned=("__annotations__",))
    def explain(self: M, *arguments: P.args, **keywords: P.kwargs) -> Explanation:
        """Explains which implementation computes a call with these arguments, and why the others cannot.

        The arguments are those of the call. Nothing is computed, and the module does not change. A decoding call is
        explained for the cache as it is now or, if its index is not known (under `jit`), for an empty one.

        Raises:
          ValueError, NotImplementedError: If the call would raise it under `jit`; ValueError also if `attention_fn` is
            not `flax_mha.attention_fn`.
        """
        return explained(self, *arguments, **keywords)

    return explain
