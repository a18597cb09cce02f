"""The call of a module, of `flax.nnx` and `flax.linen` alike: from its inputs to its output and what caches then hold.

What Flax's two APIs do differently, the modules pass in a `FlaxModule`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha.cache.kv_cache import KVCache
from flax_mha.call.arguments import check_window
from flax_mha.core import validation
from flax_mha.distributed.tensor_parallel import attention_sharding
from flax_mha.masks import Mask
from flax_mha.modules import stored_keys
from flax_mha.modules.core_attention import CoreAttention, core_of
from flax_mha.modules.decode import check_fits, decode_tokens
from flax_mha.modules.rotate import rotate

KeySource = Literal["inputs", "cache", "stored", "to store"]
Layer = Callable[[Array], Array]
Arrays = tuple[Array, Array, Array]
OPTIONS = ("implementation", "scale", "local_window_size", "logits_soft_cap")


class FlaxModule(NamedTuple):
    """The layers and variables of a module in one call.

    Attributes:
      query: Projects queries [B..., T, D] to heads [B..., T, N, H].
      key: Projects keys.
      value: Projects values.
      out: Projects heads back to features.
      norms: Normalize the heads of queries and keys; None if there are none.
      sinks: The learned sinks [N].
      cache: Reads the cache, given query and key; None where this call makes it.
      stored: Reads keys, values and lengths that an earlier call stored; None if none did.
      arguments: Flax's own arguments of the attention function.
      features: Of queries, and of keys and values; None where the projections check them.
    """

    query: Layer
    key: Layer
    value: Layer
    out: Layer
    norms: tuple[Layer, Layer] | None
    sinks: Array | None
    cache: Callable[[Array, Array], KVCache | None]
    stored: Callable[[], Arrays] | None
    arguments: dict[str, Any]
    features: tuple[int, int] | None = None


def call_module(
    module: Any,
    flax: FlaxModule,
    inputs_q: Float[Array, "*B T D"],
    inputs_k: Float[Array, "*B S Dk"] | None,
    inputs_v: Float[Array, "*B S Dv"] | None,
    *,
    decode: bool,
    mask: Array | Mask | None,
    is_causal: bool,
    bias: Array | None,
    segment_ids: Any,
    lengths: Any,
    score_mod: Any,
    positions: Any,
    store_keys: bool,
    qkv_sharding: Any,
) -> tuple[Float[Array, "*B T Dout"], Arrays | None]:
    """Computes the output of a module, and what its cache then holds: keys, values, and their index or lengths.

    Of the module only attributes are read; its call documents the other arguments.
    """
    keys = source_of_keys(decode, store_keys, flax.stored is not None, inputs_k, inputs_v, lengths)
    self_attention = keys == "cache" or (keys == "inputs" and (inputs_k is None or inputs_k is inputs_q))
    sequences = sequence_arguments(segment_ids, lengths, self_attention, decode, keys)
    core = core_of(module.attention_fn)
    if keys == "stored":
        stored_keys.check(module, core, mask, score_mod)
        check_inputs(inputs_q, inputs_q, inputs_q, None)
        query = flax.query(inputs_q)
        key, value, used = flax.stored()  # type: ignore[misc]
        mask = stored_keys.mask_of(core, sequences, mask, used, key)  # type: ignore[arg-type]
    else:
        inputs_k, inputs_v = check_inputs(inputs_q, inputs_k, inputs_v, flax.features)
        query, key, value = flax.query(inputs_q), flax.key(inputs_k), flax.value(inputs_v)
    if flax.norms is not None:
        query, key = flax.norms[0](query), key if keys == "stored" else flax.norms[1](key)
    cache = flax.cache(query, key) if keys == "cache" else None
    if cache is not None:
        check_fits("key", key, cache.key, query.shape[-3])
        check_fits("value", value, cache.value, query.shape[-3])
    if module.rope is not None or positions is not None:
        start = 0 if cache is None else jnp.maximum(cache.index, 0)
        query, key = rotate(query, key, module.rope, positions, self_attention, start, keys == "stored")
    ours = sequences | {
        "mask": mask,
        "is_causal": is_causal if is_causal is not False and keys in ("inputs", "cache") else None,
        "bias": bias,
        "sinks": flax.sinks,
        "score_mod": score_mod,
        "qkv_sharding": _attention_sharding(module, core, qkv_sharding, query),
        **{name: getattr(module, name) for name in OPTIONS},
    }
    # Without those that are not given, any function with Flax's signature will do.
    arguments = flax.arguments | {name: x for name, x in ours.items() if x is not None}
    if cache is not None:
        x, new = decode_tokens(module.attention_fn, core, query, key, value, cache, lengths, arguments)
        return flax.out(x), new.arrays
    x = _attend(module.attention_fn, core, query, key, value, keys, arguments)
    stored = (key, value, stored_keys.lengths_of(sequences, key)) if keys == "to store" else None
    return flax.out(x), stored


def _attend(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    keys: KeySource,
    arguments: dict[str, Any],
) -> Float[Array, "*B T N Hv"]:
    """Computes the attention of a call that has no cache to add to."""
    if core is None:
        return attention_fn(query, key, value, **arguments)
    if core.preset:
        if keys in ("stored", "to store"):  # the queries' positions are not known
            core = dataclasses.replace(core, preset={n: x for n, x in core.preset.items() if n != "is_causal"})
        arguments = core.combine(arguments)
    return core.attend(query, key, value, arguments)


def _attention_sharding(module: Any, core: CoreAttention | None, qkv_sharding: Any, query: Array) -> Any:
    """Returns how the query of the attention is split: as the call or a partial says, or by `head_axis`."""
    if module.head_axis is None:
        return qkv_sharding
    preset = None if core is None else core.preset.get("qkv_sharding")
    names_batch = core is not None and core.context is not None
    qkv_sharding = preset if qkv_sharding is None else qkv_sharding
    return attention_sharding(qkv_sharding, module.head_axis, query.ndim, names_batch)


def check_inputs(
    inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None, features: tuple[int, int] | None
) -> tuple[Array, Array]:
    """Returns keys, by default the queries, and values, by default the keys, if they are [batch..., length, features].

    Raises:
      ValueError: If they do not fit each other, or `features`, of queries and of keys and values, if that is given.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    shapes = f"inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}, inputs_v {inputs_v.shape}"
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(f"inputs must have same rank, 2 or more ([batch..., length, features]), but got {shapes}.")
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")
    if features is not None:
        of_query, of_keys = features
        inputs = ("inputs_q", inputs_q, of_query), ("inputs_k", inputs_k, of_keys), ("inputs_v", inputs_v, of_keys)
        for name, x, expected in inputs:
            if x.shape[-1] != expected:
                raise ValueError(
                    f"Incompatible input dimension, got {x.shape[-1]} but module expects {expected} ({name} {x.shape})."
                )
    return inputs_k, inputs_v


def source_of_keys(
    decode: bool, store_keys: bool, has_stored: bool, inputs_k: Any, inputs_v: Any, lengths: Any
) -> KeySource:
    """Returns where a call's keys come from, or go to.

    "inputs": its own inputs. "cache": its own inputs and those of earlier calls. "stored": an earlier call stored them,
    for cross-attention. "to store": its own inputs, which later calls use.
    """
    validation.flag("store_keys", store_keys)
    if store_keys and not decode:
        raise ValueError("store_keys must be False where nothing is decoded, but got True; pass decode=True.")
    if store_keys and inputs_k is None:
        raise ValueError("inputs_k must be given with store_keys, but got None; store_keys is for cross-attention.")
    if not decode:
        return "inputs"
    if store_keys or not has_stored:
        return "to store" if store_keys else "cache"
    given = [
        name for name, x in (("inputs_k", inputs_k), ("inputs_v", inputs_v), ("lengths", lengths)) if x is not None
    ]
    if given:
        raise ValueError(
            f"{' and '.join(given)} must be None where keys are stored already, but got an array; pass store_keys=True "
            "to store others."
        )
    return "stored"


def sequence_arguments(
    segment_ids: Array | tuple[Array, Array] | None,
    lengths: Array | tuple[Array | None, Array | None] | None,
    self_attention: bool,
    decode: bool,
    keys: KeySource,
) -> dict[str, Array | None]:
    """Splits segment ids and lengths into arguments of the attention: one of each for queries and for keys."""
    if decode and segment_ids is not None:
        raise ValueError("segment_ids must be None while decoding, but got an array; a cache holds one document.")
    if keys == "cache" and isinstance(lengths, tuple):
        raise ValueError("lengths must be one array while decoding, the new tokens of each sequence, but got a pair.")
    if keys == "cache":
        return {}
    if lengths is not None and not isinstance(lengths, tuple) and not self_attention:
        raise ValueError(
            "lengths must be a pair (of queries, of keys) where keys are not the queries, but got one array; use "
            "(None, lengths) for the keys alone."
        )
    for name, given in (("segment_ids", segment_ids), ("lengths", lengths)):
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"{name} must be one array or a pair (of queries, of keys), but got {len(given)} arrays.")
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    query_lengths, key_lengths = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    return {
        "query_segment_ids": query_ids,
        "key_value_segment_ids": key_ids,
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


def reach(local_window_size: Any) -> int | None:
    """Returns how many positions before its own a query sees; None means all."""
    window = check_window(local_window_size)
    return None if window is None else window[0]
