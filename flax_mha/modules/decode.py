"""Decoding in a module: the attention of new tokens over a cache, by our function or by any other."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from flax_mha.cache.cached_attention import check_cache, in_order, over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.call.arguments import check_window
from flax_mha.core import validation
from flax_mha.masks import ArrayMask, CausalMask, Mask
from flax_mha.modules.core_attention import CoreAttention, core_arguments, is_direct


def decode_tokens(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
) -> tuple[Float[Array, "*B T N Hv"], KVCache]:
    """Computes the attention of new tokens over the cache and themselves, and adds them to the cache.

    The function itself is called only if it is not ours (`functools.partial`s aside), or if it has to do what only it
    can: sow the weights, compute complex numbers or quantized products.

    Args:
      attention_fn: The module's.
      core: Its core, if it is ours.
      query: Rotated.
      key: Likewise.
      value: Not yet in the dtype of the cache.
      cache: The tokens before them.
      lengths: As in the call of the module.
      arguments: Of the attention function.
    """
    if core is not None:
        attention_fn, arguments = core.function, _with_preset(core, arguments)
    arguments.pop("is_causal", None)  # the call is causal anyhow
    key, value = _as_cached(key, cache.key), _as_cached(value, cache.value)
    if core is None or not is_direct((query,), arguments):
        return _decode_by(attention_fn, core is not None, query, key, value, cache, lengths, arguments)
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    return over_cache(core.run, query, key, value, cache, lengths=lengths, **core_arguments(arguments))


def _with_preset(core: CoreAttention, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a decoding call, with the keywords that partials set."""
    if core.context is not None:
        raise ValueError(
            "decode must be False with context_parallel, which has no cache that is split along the sequence, but got "
            "True; decode with attention_fn=flax_mha.attention_fn."
        )
    arguments = core.combine(arguments) if core.preset else arguments
    for name in core.preset:
        if name.startswith(("query_", "key_value_")) and name in arguments:
            raise ValueError(
                f"attention_fn must not set {name} while decoding, where the cache counts positions, but got a "
                "functools.partial that does; use lengths of the call."
            )
    return arguments


def _decode_by(
    attention_fn: Callable[..., Array],
    is_ours: bool,
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
) -> tuple[Array, KVCache]:
    """Decodes by any function with Flax's signature, which gets all keys and values and a mask of what is visible."""
    arguments = dict(arguments)
    window, mask = check_window(arguments.pop("local_window_size", None)), arguments.pop("mask", None)
    mask = mask if mask is None or isinstance(mask, Mask) else validation.mask_of_numbers(mask)
    check_cache(cache, arguments.get("bias"), mask, window)
    appended = cache.append(key, value, lengths)
    index = jnp.maximum(cache.index, 0)
    keys, values, first = appended.cache.key, appended.cache.value, jnp.zeros_like(index)
    if cache.window is not None:
        keys, values, first = in_order(cache, key, value)
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
        shown = validation.mask(mask, validation.Shape(cache.batch, *sizes))
        mask = visible if shown is None else shown & visible
    mask = visible if mask is None else mask
    if isinstance(mask, Mask) or (is_ours and "score_mod" in arguments):
        # Of an array it is not known which positions are looked up.
        mask = CausalMask() & (mask if isinstance(mask, Mask) else ArrayMask(mask))
    output = attention_fn(query, keys, values, mask=mask, **arguments)
    return appended.checked(output), appended.cache


def _drops_by_position(query: Array, arguments: dict[str, Any]) -> bool:
    """Returns whether our function drops weights, and not Flax's, which computes complex and quantized products."""
    flax_computes = jnp.iscomplexobj(query) or any("einsum" in name and x for name, x in arguments.items())
    drops = arguments.get("dropout_rng") is not None and not arguments.get("deterministic")
    return drops and not flax_computes


def check_fits(name: str, new: Array, cached: Array, number: int) -> None:
    """Checks that so many new keys or values fit to those in a cache.

    Raises:
      ValueError: If they do not.
    """
    expected = (*cached.shape[:-3], number, *cached.shape[-2:])
    if new.shape != expected:
        raise ValueError(f"Autoregressive cache shape error, expected {name} shape {expected} instead got {new.shape}.")


def _as_cached(x: Array, cached: Array) -> Array:
    """Converts keys or values to the dtype of the cache, which may be narrower than that of the computation."""
    if jnp.iscomplexobj(x) and not jnp.iscomplexobj(cached):
        raise ValueError(
            f"the cache must have a dtype that holds {x.dtype}, but has {cached.dtype}; make it with that."
        )
    return x.astype(cached.dtype)
