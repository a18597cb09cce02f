"""The method `explain` of the modules, which traces a call and explains its attention instead of computing it."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha._src import run
from flax_mha._src.call.operands import Call, Result
from flax_mha._src.core.tracing import Platform
from flax_mha._src.explanation import Explanation
from flax_mha._src.modules.core import core_of
from flax_mha._src.run import Implementation

P = ParamSpec("P")


class ExplainedAttention:
    """An `attention_fn` that computes nothing: it adds an explanation of each call to a list, and returns zeros."""

    def __init__(self, given: Callable[..., Array], platform: Platform | None):
        core = core_of(given)
        if core is None:
            raise ValueError(f"only attention_fn=flax_mha.attention_fn can be explained, but got {given!r}.")
        self.core = dataclasses.replace(core, function=self, run=self._explain, platform=platform)
        self.explanations: list[Explanation] = []

    def __call__(self, query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        """Records the explanation of a call, and returns zeros; ignores arguments like `module`."""
        return self.core.call(query, key, value, **arguments).output

    def _explain(self, call: Call, implementation: Implementation | None) -> Result:
        self.explanations.append(run.explain(call, implementation))
        query, value = call.operands.query, call.operands.value
        return Result(jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), None)


class Explain(Protocol[P]):
    """The type of a module's method `explain`: the arguments `P` of its call, and `platform`."""

    @overload
    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> Explanation: ...
    @overload
    def __call__(self, *arguments: Any, platform: Platform | None, **keywords: Any) -> Explanation: ...


def explaining(call: Callable[Concatenate[Any, P], Array], explained: Callable[..., Explanation]) -> Explain[P]:
    """Makes the method `explain` of a module: it calls `explained`, and has the arguments of the method `call`."""

    def explain(self: Any, *arguments: Any, platform: Platform | None = None, **keywords: Any) -> Explanation:
        """Explains which implementation computes a call with these arguments, and why the others do not.

        Pass the arguments of the call. With `platform`, the call is explained for "cpu", "cuda" or "tpu", even if there
        is no such device; see `flax_mha.explain_implementation`. Nothing is computed, and the module does not change. A
        decoding call is explained for the current cache or, under `jit`, for an empty cache.

        Raises:
          ValueError, NotImplementedError: If the call would raise it under `jit`; ValueError also if `attention_fn` is
            not `flax_mha.attention_fn`, or if the platform is unknown.
        """
        return explained(self, platform, *arguments, **keywords)

    parameters = [*inspect.signature(call).parameters.values(), inspect.signature(explain).parameters["platform"]]
    explain.__signature__ = inspect.Signature(parameters, return_annotation=Explanation)  # type: ignore[attr-defined]
    return explain  # type: ignore[return-value]
