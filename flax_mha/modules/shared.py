"""What both modules share: checks of their arguments, rotary positions, and decoding."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Int

from flax_mha.cache.cached_attention import cached_attention, check_cache, in_order
from flax_mha.cache.kv_cache import KVCache
from flax_mha.call.arguments import check_dropout_rate, check_scale, check_soft_cap, check_window
from flax_mha.core import validation
from flax_mha.core.integers import int32, is_int, is_number
from flax_mha.distributed.tensor_parallel import attention_sharding, check_head_axis
from flax_mha.impl.registry import Explanation, check_name
from flax_mha.masks import ArrayMask, CausalMask, Mask
from flax_mha.modules.attention_fn import ContextAttention
from flax_mha.modules.attention_fn import attention_fn as our_attention_fn
from flax_mha.modules.explain import ExplainedAttention
from flax_mha.modules.presets import combined, without_partials
from flax_mha.rope import RoPE, apply_rope

PerSequence = Int[Array, "*B"]
P = ParamSpec("P")
M = TypeVar("M")


def check_options(
    num_heads: int,
    num_kv_heads: int | None,
    qkv_features: int,
    dropout_rate: float,
    implementation: str | None,
    local_window_size: Any,
    logits_soft_cap: float | None,
    sinks: bool,
    scale: float | None,
    normalize_qk: bool | str,
    qk_norm_epsilon: float | None,
    rope: RoPE | None,
    head_axis: str | None,
) -> None:
    """What the constructors of both modules accept.

    Raises:
      ValueError: If an argument is none of that.
    """
    _heads(num_heads, num_heads if num_kv_heads is None else num_kv_heads, qkv_features)
    check_dropout_rate(dropout_rate)
    check_name(implementation)
    check_window(local_window_size)
    check_soft_cap(logits_soft_cap)
    validation.flag("sinks", sinks)
    check_scale(scale, validation.Shape((), 1, 1, 1, 1, 1, 1))
    if normalize_qk not in (False, True, "layer_norm", "rms_norm", "rms_norm_all_heads"):
        raise ValueError(
            'normalize_qk must be False, True, "layer_norm", "rms_norm" or "rms_norm_all_heads", but got '
            f"{normalize_qk!r}."
        )
    if qk_norm_epsilon is not None:
        _norm_epsilon(qk_norm_epsilon, normalize_qk)
    check_head_axis(head_axis)
    if rope is not None:
        if not isinstance(rope, RoPE):
            raise ValueError(f"rope must be a flax_mha.rope.RoPE or None, but got {rope!r}.")
        rope.rotated_size(qkv_features // num_heads)


def _heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    """Heads that divide the features, and key/value heads that divide the heads."""
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("qkv_features", qkv_features)):
        if not is_int(number):
            raise ValueError(f"{name} must be an int, but got {number!r}.")
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, but got {num_heads} and {num_kv_heads}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads}).")
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension ({qkv_features}) must be divisible by 'num_heads' heads ({num_heads}); choose "
            "qkv_features to be a multiple of num_heads."
        )


def _norm_epsilon(epsilon: float, normalize_qk: bool | str) -> None:
    if not is_number(epsilon) or not 0 < epsilon < float("inf"):
        raise ValueError(f"qk_norm_epsilon must be a finite number > 0, but got {epsilon!r}.")
    if not normalize_qk:
        raise ValueError(
            f'qk_norm_epsilon must be None without normalize_qk, but got {epsilon!r}; pass normalize_qk="rms_norm".'
        )


def check_rngs(rngs: Any, *kinds: type) -> None:
    """One of these kinds of random streams, or None."""
    if rngs is not None and not isinstance(rngs, kinds):
        names = " or ".join(f"nnx.{kind.__name__}" for kind in kinds)
        raise ValueError(f"rngs must be {names}, but got {type(rngs).__name__}; a key becomes nnx.Rngs(key).")


def given_or_same(inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
    """Keys, by default the queries, and values, by default the keys."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def check_inputs(inputs_q: Array, inputs_k: Array, inputs_v: Array) -> None:
    """Inputs [batch..., length, features] that fit each other."""
    shapes = f"inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}, inputs_v {inputs_v.shape}"
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(f"inputs must have same rank, 2 or more ([batch..., length, features]), but got {shapes}.")
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")


KeySource = Literal["inputs", "cache", "stored", "to store"]


def source_of_keys(
    decode: bool, store_keys: bool, has_stored: bool, inputs_k: Any, inputs_v: Any, lengths: Any
) -> KeySource:
    """Where a call's keys come from, or go to.

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


def stored_lengths(sequences: dict[str, Array | None], key: Float[Array, "*B S K H"]) -> PerSequence:
    """How many of the stored keys of each sequence are none of the padding."""
    lengths = sequences["key_value_seq_lengths"]
    lengths = int32("lengths", key.shape[-3] if lengths is None else lengths)
    return jnp.broadcast_to(lengths if key.ndim > 3 else lengths.reshape(()), key.shape[:-3])


def check_stored(module: Any, mask: Array | Mask | None, score_mod: Any) -> None:
    """Nothing that depends on the positions of queries: the cache does not count the calls that use stored keys.

    Raises:
      ValueError: If there is such an argument, of the call, the module, or its attention function.
    """
    _, preset = ours(module.attention_fn)
    given = {
        "mask": isinstance(mask, Mask) or isinstance(preset.get("mask"), Mask),
        "score_mod": score_mod is not None or preset.get("score_mod") is not None,
        "local_window_size": any(
            check_window(window) is not None for window in (module.local_window_size, preset.get("local_window_size"))
        ),
    }
    for name, is_given in given.items():
        if is_given:
            got = "a mask object" if name == "mask" else "one"
            raise ValueError(
                f"{name} must not depend on positions where keys are stored, whose calls are not counted, but got "
                f"{got}; use a mask or bias array [..., queries, keys]."
            )


def with_stored_lengths(
    attention_fn: Callable[..., Array],
    sequences: dict[str, Array | None],
    mask: Array | None,
    lengths: PerSequence,
    key: Float[Array, "*B S K H"],
) -> Array | None:
    """The mask of stored keys; their lengths are put into `sequences` for our attention, into the mask for others."""
    if _reads_caches(ours(attention_fn)[0]):
        sequences["key_value_seq_lengths"] = lengths
        return mask
    places = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape((1,) * lengths.ndim + (-1,))
    shown = (places < lengths[..., None])[..., None, None, :]
    return shown if mask is None else validation.mask_of_numbers(mask) & shown


def sequence_arguments(
    segment_ids: Array | tuple[Array, Array] | None,
    lengths: PerSequence | tuple[PerSequence | None, PerSequence | None] | None,
    self_attention: bool,
    decode: bool,
    keys: KeySource,
) -> dict[str, Array | None]:
    """Segment ids and lengths as arguments of the attention: one of each for queries and for keys."""
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
    """How many positions before its own a query sees; None means all."""
    window = check_window(local_window_size)
    return None if window is None else window[0]


def extra_arguments(
    module: Any, bias: Array | None, sinks: Array | None, score_mod: Any, qkv_sharding: Any, query: Array
) -> dict[str, Any]:
    """The arguments that only our attention knows, of a module of either kind and of its call; None where not given."""
    of_module = ("implementation", "scale", "local_window_size", "logits_soft_cap")
    function, preset = ours(module.attention_fn)
    names_batch = isinstance(function, ContextAttention)
    qkv_sharding = preset.get("qkv_sharding") if qkv_sharding is None else qkv_sharding
    return {
        "bias": bias,
        "sinks": sinks,
        "score_mod": score_mod,
        "qkv_sharding": attention_sharding(qkv_sharding, module.head_axis, query.ndim, names_batch),
        **{name: getattr(module, name) for name in of_module},
    }


def without_none(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are given; without the others, any function with Flax's signature will do."""
    return {name: value for name, value in arguments.items() if value is not None}


def ours(attention_fn: Callable[..., Array]) -> tuple[Callable[..., Array], dict[str, Any]]:
    """Returns our attention function and the keywords that `functools.partial`s around it set; others as they are."""
    function, keywords = without_partials(attention_fn)
    known = _reads_caches(function) or isinstance(function, ContextAttention)
    return (function, keywords) if known else (attention_fn, {})


def _reads_caches(function: Callable[..., Array]) -> bool:
    """Whether this is the function of which `cached_attention` is the counterpart, without partials around it."""
    return function is our_attention_fn or isinstance(function, ExplainedAttention)


def attended(
    attention_fn: Callable[..., Array],
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    keys: KeySource,
    arguments: dict[str, Any],
) -> Float[Array, "*B T N Hv"]:
    """Calls the module's attention function, for a call that has no cache to add to."""
    function, preset = ours(attention_fn)
    if keys in ("stored", "to store"):  # the queries' positions are not known
        preset = {name: x for name, x in preset.items() if name != "is_causal"}
    return function(query, key, value, **combined(preset, arguments))


def explaining(
    call: Callable[Concatenate[M, P], Array], explained: Callable[..., Explanation]
) -> Callable[Concatenate[M, P], Explanation]:
    """The method `explain` of a module: `explained`, with the signature of its `call`."""

    @functools.wraps(call, assigned=("__annotations__",))
    def explain(self: M, *arguments: P.args, **keywords: P.kwargs) -> Explanation:
        """Which implementation computes a call with these arguments, and why the others cannot.

        The arguments are those of the call. Nothing is computed, and the module stays as it is. While decoding, the
        call is explained that meets the cache as it is now, or an empty one where that is not known (under `jit`).

        Raises:
          ValueError, NotImplementedError: As the call under `jit`; ValueError also if `attention_fn` is not
            `flax_mha.attention_fn`.
        """
        return explained(self, *arguments, **keywords)

    return explain


def rotated(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    rope: RoPE | None,
    positions: Array | tuple[Array, Array] | None,
    self_attention: bool,
    start: Int[Array, "..."] | int = 0,
    stored: bool = False,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"]]:
    """Query and key, rotated by their positions if there are rotary embeddings.

    Args:
      query: Normalized, if that is asked for.
      key: Likewise.
      rope: The rotary embeddings, or None.
      positions: [B..., T] or [T], or a pair for queries and keys; None counts from `start`.
      self_attention: Whether keys are those of the queries' tokens.
      start: The position of the first query, [] or [B...]; that of the first key is 0, if it is another's.
      stored: Whether the keys were rotated when they were stored.
    """
    if rope is None:
        if positions is not None:
            raise ValueError("positions must be None without rope, but got an array; pass rope=RoPE() to the module.")
        return query, key
    if stored:
        if positions is None or isinstance(positions, tuple):
            raise ValueError(
                "positions must be one array, of the queries, where rope is used with stored keys, but got "
                f"{'None' if positions is None else 'a pair'}."
            )
        return apply_rope(query, positions, rope), key
    if positions is None:
        start = jnp.asarray(start, jnp.int32)[..., None]
        query_positions = start + jnp.arange(query.shape[-3], dtype=jnp.int32).reshape((1,) * (start.ndim - 1) + (-1,))
        key_positions = query_positions if self_attention else jnp.arange(key.shape[-3], dtype=jnp.int32)
    elif isinstance(positions, tuple):
        if len(positions) != 2:
            raise ValueError(
                f"positions must be one array or a pair (of queries, of keys), but got {len(positions)} arrays."
            )
        query_positions, key_positions = positions
    elif self_attention:
        query_positions = key_positions = positions
    else:
        raise ValueError(
            "positions must be a pair (of queries, of keys) where keys are not the queries, but got one array."
        )
    return apply_rope(query, query_positions, rope), apply_rope(key, key_positions, rope)


def decoded(
    attention_fn: Callable[..., Array],
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    mask: Array | Mask | None,
    lengths: Any,
    flax_arguments: dict[str, Any],
    extra: dict[str, Any],
) -> tuple[Float[Array, "*B T N Hv"], KVCache]:
    """Attention of new tokens over the cache and themselves, and the cache with them.

    The function itself is called only if it is not ours (`functools.partial`s aside), or if it has to do what only it
    can: sow the weights, explain, compute complex numbers or quantized products.

    Args:
      attention_fn: The module's.
      query: Rotated.
      key: Likewise.
      value: Not yet in the dtype of the cache.
      cache: The tokens before them.
      mask: As in the call of the module.
      lengths: Likewise.
      flax_arguments: Those that the module passes to any attention function.
      extra: Those that only ours knows, or None.
    """
    attention_fn, preset = ours(attention_fn)
    mask, flax_arguments, extra = _with_preset(preset, mask, flax_arguments, extra)
    explained = attention_fn if isinstance(attention_fn, ExplainedAttention) else None
    if isinstance(attention_fn, ContextAttention) or (explained and explained.context):
        raise ValueError(
            "decode must be False with context_parallel, which has no cache that is split along the sequence, but got "
            "True; decode with attention_fn=flax_mha.attention_fn."
        )
    mask = mask if mask is None or isinstance(mask, Mask) else validation.mask_of_numbers(mask)
    key, value = _as_cached("key", key, cache.key, query), _as_cached("value", value, cache.value, query)
    given = {name for name, x in flax_arguments.items() if x is not None}
    needs_function = bool(given & {"module", "input_positions", "promote_dtype"}) or any(
        "einsum" in name for name in given
    )
    if not _reads_caches(attention_fn) or needs_function or jnp.iscomplexobj(query):
        return _decoded_by(attention_fn, query, key, value, cache, mask, lengths, flax_arguments, extra)
    (query,) = dtypes.promote_dtype((query,), dtype=flax_arguments["dtype"])
    dropout = () if flax_arguments["deterministic"] else ("dropout_rate", "dropout_rng", "broadcast_dropout")
    known = {name: flax_arguments[name] for name in ("precision", *dropout)}
    attend = explained.over_cache if explained else cached_attention
    return attend(query, key, value, cache, mask=mask, lengths=lengths, **known, **extra)


def _with_preset(
    preset: dict[str, Any], mask: Array | Mask | None, flax_arguments: dict[str, Any], extra: dict[str, Any]
) -> tuple[Array | Mask | None, dict[str, Any], dict[str, Any]]:
    """The arguments of a decoding call, with the keywords that partials set; the call is causal anyhow."""
    arguments = combined(preset, {**flax_arguments, **extra, "mask": mask})
    for name in arguments:
        if name.startswith(("query_", "key_value_")):
            raise ValueError(
                f"attention_fn must not set {name} while decoding, where the cache counts positions, but got a "
                "functools.partial that does; use lengths of the call."
            )
    arguments.pop("is_causal", None)
    mask, extra = arguments.pop("mask"), {name: arguments.pop(name) for name in extra}
    return mask, arguments, extra


def _decoded_by(
    attention_fn: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    mask: Array | Mask | None,
    lengths: Any,
    flax_arguments: dict[str, Any],
    extra: dict[str, Any],
) -> tuple[Array, KVCache]:
    """The same by any function with Flax's signature, which gets all keys and values and a mask of what is visible."""
    window, number = check_window(extra["local_window_size"]), query.shape[-3]
    check_cache(cache, extra["bias"], mask, window)
    appended = cache.append(key, value, lengths)
    new, tokens = appended.cache, appended.tokens
    index = jnp.maximum(cache.index, 0)
    keys, values, first = new.key, new.value, jnp.zeros_like(index)
    if cache.window is not None:
        keys, values, first = in_order(cache, key, value)
    steps = cache.counted(number)
    q_idx = (index[..., None] + steps)[..., :, None]
    kv_idx = (first[..., None] + cache.counted(keys.shape[-3]))[..., None, :]
    left = None if window is None else window[0]
    visible = (kv_idx >= 0) & (kv_idx <= q_idx) & (steps < tokens[..., None])[..., :, None]
    visible = visible if left is None else visible & (kv_idx >= q_idx - left)
    visible = jnp.broadcast_to(visible[..., None, :, :], (*cache.batch, 1, *visible.shape[-2:]))
    # What is dropped belongs to positions too, if ours computes it; complex and quantized products Flax computes.
    flax_computes = jnp.iscomplexobj(query) or any("einsum" in name for name in without_none(flax_arguments))
    drops = flax_arguments["dropout_rng"] is not None and not flax_arguments["deterministic"]
    ours_drops = drops and _reads_caches(attention_fn) and not flax_computes
    by_position = isinstance(mask, Mask) or extra["score_mod"] is not None or ours_drops
    places = {"query_offset": index, "key_value_offset": first} if by_position else {}
    if isinstance(mask, Mask):
        mask = mask & ArrayMask(visible)
    elif mask is not None:
        (num_kv_heads, size), value_size = keys.shape[-2:], values.shape[-1]
        sizes = (number, keys.shape[-3], query.shape[-2], num_kv_heads, size, value_size)
        shown = validation.mask(mask, validation.Shape(cache.batch, *sizes))
        mask = visible if shown is None else shown & visible
    mask = visible if mask is None else mask
    if isinstance(mask, Mask) or (extra["score_mod"] is not None and _reads_caches(attention_fn)):
        # Of an array it is not known which positions are looked up.
        mask = CausalMask() & (mask if isinstance(mask, Mask) else ArrayMask(mask))
    extra = without_none({**extra, **places, "local_window_size": None})
    output = attention_fn(query, keys, values, mask=mask, **flax_arguments, **extra)
    return appended.checked(output), new


def check_fits(name: str, new: Array, cached: Array, number: int) -> None:
    """So many new keys or values fit to those in a cache.

    Raises:
      ValueError: If they do not.
    """
    expected = (*cached.shape[:-3], number, *cached.shape[-2:])
    if new.shape != expected:
        raise ValueError(f"Autoregressive cache shape error, expected {name} shape {expected} instead got {new.shape}.")


def _as_cached(name: str, x: Array, cached: Array, query: Array) -> Array:
    """Keys or values in the dtype of the cache, which may be narrower than that of the computation."""
    check_fits(name, x, cached, query.shape[-3])
    if jnp.iscomplexobj(x) and not jnp.iscomplexobj(cached):
        raise ValueError(
            f"the cache must have a dtype that holds {x.dtype}, but has {cached.dtype}; make it with that."
        )
    return x.astype(cached.dtype)
