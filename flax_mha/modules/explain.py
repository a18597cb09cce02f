"""The method `explain` of the modules: a call whose attention is explained instead of computed."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array

from flax_mha.attention import explain_implementation
from flax_mha.cache.cached_attention import Scoring, over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.call.operands import Call
from flax_mha.core import validation
from flax_mha.distributed import dispatch
from flax_mha.impl.registry import Explanation, Implementation
from flax_mha.masks import Mask
from flax_mha.modules.attention_fn import ContextAttention, attention_fn
from flax_mha.modules.presets import without_partials


class ExplainedAttention:
    """A stand-in for the `attention_fn` of a module that computes nothing.

    Args:
      given: The module's.

    Attributes:
      attention_fn: Itself, with the keywords of the module's if that is a `functools.partial`.
      explanations: Of each call.

    Raises:
      ValueError: If the module has another attention function than ours.
    """

    def __init__(self, given: Callable[..., Array]):
        function, keywords = without_partials(given)
        self.context = function.context if isinstance(function, ContextAttention) else None
        if function is not attention_fn and self.context is None:
            raise ValueError(f"attention_fn must be flax_mha.attention_fn to be explained, but got {given!r}.")
        self.attention_fn = functools.partial(self, **keywords)
        self.explanations: list[Explanation] = []

    def __call__(self, query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        """Explains a call of `attention_fn`."""
        not_core = ("deterministic", "dtype", "promote_dtype", "module", "force_fp32_for_softmax")
        core = {name: x for name, x in arguments.items() if name not in not_core and "einsum" not in name}
        if arguments.get("deterministic"):
            core |= {"dropout_rate": 0.0, "dropout_rng": None}
        if not isinstance(core.get("mask"), Mask | None):
            core["mask"] = validation.mask_of_numbers(core["mask"])
        if self.context is not None:
            core["qkv_sharding"] = self.context.with_sharding(core.get("qkv_sharding"), query.ndim)
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
        self.explanations.append(explain_implementation(query, key, value, **core))
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    def over_cache(
        self,
        query: Array,
        key: Array,
        value: Array,
        cache: KVCache,
        *,
        bias: Any = None,
        mask: Any = None,
        lengths: Any = None,
        implementation: Implementation | None = None,
        **scoring: Any,
    ) -> tuple[Array, KVCache]:
        """Explains a call of `cached_attention`: of an empty cache first, if it is not known to hold something."""

        def explain(call: Call, implementation: Implementation | None) -> Array:
            self.explanations.append(dispatch.explain(call, implementation))
            return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

        return over_cache(explain, query, key, value, cache, bias, mask, lengths, implementation, Scoring(**scoring))
