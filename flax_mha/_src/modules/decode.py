"""`decode_by`: decodes by any attention function, which gets all keys and values and a mask of the visible ones."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha._src.core import validation
from flax_mha.cache.cached_attention import check_cache, in_order
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.masks import ArrayMask, CausalMask, Mask


def decode_by(
    attention_fn: Callable[..., Array],
    is_ours: bool,
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
    latent: Latent | None = None,
) -> tuple[Array, KVCache]:
    """Computes attention over a cache by any function with Flax's signature; returns the output and the new cache.

    Of `flax_mha.attention_fn` (`is_ours`), these are the calls that sow weights, are complex or have Flax's einsums;
    `over_cache` computes all others. Key and value have the dtype of the cache.
    """
    arguments = dict(arguments)
    window_size, mask = arguments.pop("local_window_size", None), arguments.pop("mask", None)
    window = check_cache(cache, arguments.get("bias"), mask, window_size)
    appended = cache.append(key, value, lengths)
    index = jnp.maximum(cache.index, 0)
    (keys, values), first = appended.cache.floats(key.dtype), jnp.zeros_like(index)
    if cache.window is not None:
        keys, values, first = in_order(cache, key, value)
    if latent is not None:
        keys, values = latent.expand(keys)
    elif cache.value_size is not None:
        values = keys[..., : cache.value_size]
    steps = cache.counted(query.shape[-3])
    q_idx = (index[..., None] + steps)[..., :, None]
    kv_idx = (first[..., None] + cache.counted(keys.shape[-3]))[..., None, :]
    visible = (kv_idx >= 0) & (kv_idx <= q_idx) & (steps < appended.tokens[..., None])[..., :, None]
    if window is not None and window[0] is not None:
        visible = visible & (kv_idx >= q_idx - window[0])
    visible = jnp.broadcast_to(visible[..., None, :, :], (*cache.batch, 1, *visible.shape[-2:]))
    if isinstance(mask, Mask) or "score_mod" in arguments or (is_ours and _drops_by_position(query, arguments)):
        arguments |= {"query_offset": index, "key_value_offset": first}
    if isinstance(mask, Mask):
        mask = mask & ArrayMask(visible)
    elif mask is not None:
        sizes = (query.shape[-3], keys.shape[-3], query.shape[-2], *keys.shape[-2:], values.shape[-1])
        mask = validation.mask(mask, validation.Shape(cache.batch, *sizes)) & visible
    mask = visible if mask is None else mask
    if isinstance(mask, Mask) or (is_ours and "score_mod" in arguments):
        # With a causal mask, lookups by position can be checked.
        mask = CausalMask() & (mask if isinstance(mask, Mask) else ArrayMask(mask))
    output = attention_fn(query, keys, values, mask=mask, **arguments)
    return appended.checked(output), appended.cache


def _drops_by_position(query: Array, arguments: dict[str, Any]) -> bool:
    """Returns whether `attention_fn` itself drops weights, which depends on positions; Flax may do it instead."""
    flax_computes = jnp.iscomplexobj(query) or any("einsum" in name and x for name, x in arguments.items())
    drops = arguments.get("dropout_rng") is not None and not arguments.get("deterministic")
    return drops and not flax_computes
