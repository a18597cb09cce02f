"""What modules know of attention functions of other libraries."""

import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
from flax import nnx
from jaxtyping import Array

from flax_mha._src.distributed.split import is_explicit
from flax_mha._src.masks import Mask

# Functions that accept masks only as arrays.
FUNCTIONS_OF_ARRAYS = [
    nnx.dot_product_attention,
    flax.linen.dot_product_attention,
    jax.nn.dot_product_attention,
]
if hasattr(nnx, "dot_product_attention_with_rope"):  # from Flax 0.12.12 on
    FUNCTIONS_OF_ARRAYS.append(nnx.dot_product_attention_with_rope)


def check_takes_mask(
    attention_fn: Callable[..., Array], mask: Array | Mask | None
) -> None:
    """Raises a ValueError if `mask` is a mask object and `attention_fn` a function of
    Flax or JAX, which wants arrays.

    Looks through `functools.partial`, one of which may set the mask if the module sets
    none, and through wrappers of JAX and Flax, such as `jax.jit`. Functions of users
    may accept mask objects.
    """
    function: Any = attention_fn
    while not any(function is one for one in FUNCTIONS_OF_ARRAYS):
        if isinstance(function, functools.partial):
            if mask is None:
                mask = function.keywords.get("mask")
            # `fun`: in a Partial of a functools.partial.
            function = getattr(function.func, "fun", function.func)
        elif _is_of_flax_or_jax(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return
    if isinstance(mask, Mask):
        raise ValueError(
            "mask must be an array for "
            f"attention_fn={function.__module__}.{function.__name__}, but got a "
            f"{type(mask).__name__}; pass an array, or leave attention_fn at "
            "flax_mha.attention_fn: it, functools.partial of it and "
            "flax_mha.context_parallel take mask objects."
        )


def with_split_heads(
    attention_fn: Callable[..., Array], qkv_sharding: Any
) -> Callable[..., Array]:
    """Returns a function that splits query, key and value as `qkv_sharding` says, and
    calls `attention_fn`, which Flax's modules do not pass this argument.
    """
    if qkv_sharding is None:
        return attention_fn

    def attend(*heads: Array, **arguments: Any) -> Array:
        split = jax.lax.with_sharding_constraint
        if is_explicit(heads[0]):
            split = jax.reshard
        return attention_fn(*(split(x, qkv_sharding) for x in heads), **arguments)

    return attend


def _is_of_flax_or_jax(function: Any) -> bool:
    """Returns whether the code of a function or of its type is Flax's or JAX's;
    `__module__` is copied by wrappers.
    """
    is_function = isinstance(function, types.FunctionType)
    if is_function:
        name = function.__globals__.get("__name__", "")
    else:
        name = type(function).__module__
    return name.split(".")[0] in ("flax", "jax", "jaxlib")
