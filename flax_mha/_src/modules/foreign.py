"""Attention functions of other libraries: Flax's own, which computes what our engines
cannot, and those that users pass to modules.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from flax_mha._src.masks import Mask

# Arguments of `attention_fn` for Flax's own function: custom products.
EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
# All that it takes beside query, key, value and mask.
FLAX_NAMES = (
    *EINSUMS,
    "bias",
    "broadcast_dropout",
    "dropout_rng",
    "dropout_rate",
    "precision",
    "module",
    "force_fp32_for_softmax",
)
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


def flax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Any = None,
    is_causal: bool = False,
    deterministic: bool = False,
    dtype: object = None,
    promote_dtype: object = None,
    **arguments: Any,
) -> Array:
    """Computes Flax's own attention, which takes neither `is_causal` nor fewer key
    heads than query heads; the arguments are those of `attention_fn`.

    Query, key and value are promoted already, to `dtype`. Raises a ValueError for
    arguments that Flax's function lacks.
    """
    passed = {}
    extra = []
    for name, x in arguments.items():
        if name in FLAX_NAMES:
            passed[name] = x
            continue
        is_default = x is None or (isinstance(x, int) and x == 0)
        if not is_default:
            extra.append(name)
    if isinstance(mask, Mask):
        extra.append("mask")
    if extra:
        raise ValueError(
            "complex inputs and quantized einsums use Flax's own attention, which does "
            f"not support {', '.join(extra)}; omit those arguments, or use real inputs "
            "without a custom einsum."
        )
    if deterministic:
        passed.pop("dropout_rate", None)
        passed.pop("dropout_rng", None)
    if is_causal:
        batch_and_heads = (None,) * (query.ndim - 2)
        causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)[batch_and_heads]
        mask = causal if mask is None else mask & causal
    num_heads = query.shape[-2]
    key = jnp.repeat(key, num_heads // key.shape[-2], axis=-2)
    value = jnp.repeat(value, num_heads // value.shape[-2], axis=-2)
    flax_function = flax.linen.dot_product_attention
    return flax_function(query, key, value, mask=mask, **passed)


def _is_of_flax_or_jax(function: object) -> bool:
    """Returns whether the code of a function or of its type is Flax's or JAX's;
    `__module__` is copied by wrappers.
    """
    if isinstance(function, types.FunctionType):
        name = function.__globals__.get("__name__", "")
    else:
        name = type(function).__module__
    return name.split(".")[0] in ("flax", "jax", "jaxlib")
