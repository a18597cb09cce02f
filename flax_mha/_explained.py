"""The method `explain` of the modules: a call whose attention is explained instead of computed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array

from flax_mha import _check
from flax_mha.adapter import attention_fn
from flax_mha.attention import Explanation, explain_implementation
from flax_mha.context_parallel import ContextAttention
from flax_mha.masks import Mask


@contextlib.contextmanager
def explain_attention(given: Callable[..., Array]) -> Iterator[tuple[Callable[..., Array], list[Explanation]]]:
    """A stand-in for `attention_fn` that computes nothing, and the list to which it adds its explanation of each call.

    Raises:
      ValueError: If the module has another attention function.
    """
    context = given.context if isinstance(given, ContextAttention) else None
    if given is not attention_fn and context is None:
        raise ValueError(f"attention_fn must be flax_mha.attention_fn to be explained, but got {given!r}.")
    explanations: list[Explanation] = []

    def explained(query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        not_core = ("deterministic", "dtype", "promote_dtype", "module", "force_fp32_for_softmax")
        core = {name: x for name, x in arguments.items() if name not in not_core and "einsum" not in name}
        if arguments.get("deterministic"):
            core |= {"dropout_rate": 0.0, "dropout_rng": None}
        if not isinstance(core.get("mask"), Mask | None):
            core["mask"] = _check.mask_of_numbers(core["mask"])
        if context is not None:
            core["qkv_sharding"] = context.with_sharding(core.get("qkv_sharding"), query.ndim)
        query, key, value = dtypes.promote_dtype((query, key, value), dtype=arguments.get("dtype"))
        explanations.append(explain_implementation(query, key, value, **core))
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    yield explained, explanations
