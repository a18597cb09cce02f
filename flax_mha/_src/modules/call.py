"""`call_module`: the call of every module, as a formula; a `ModuleParts` holds what
differs between the two APIs.

out(norm(gate * attention(rotate(process_heads(norm(project(x)))))))
(or the norm of queries and keys after rotate)
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float

from flax_mha._src.attention import ScoreMod
from flax_mha._src.cache.cached_attention import NewTokens, all_written, nan_without
from flax_mha._src.cache.kv_cache import Appended, KVCache
from flax_mha._src.cache.latent import Latent, Layer
from flax_mha._src.cache.shared import SharedKV
from flax_mha._src.call.arguments import check_is_causal, check_window
from flax_mha._src.call.call import Sharding
from flax_mha._src.core import validation
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.distributed.split import is_explicit, names_of
from flax_mha._src.masks import Mask
from flax_mha._src.modules import foreign, sequences
from flax_mha._src.modules.attention_fn import (
    AttentionFn,
    Heads,
    Module,
    ours,
    uses_flax,
)
from flax_mha._src.modules.indexer import IndexParts, top_k_keys
from flax_mha._src.modules.options import (
    AttentionOptions,
    check_process_heads,
    check_score_mod,
)

# Where the keys of a call come from.
# "inputs": from its inputs.
# "cache": from the cache and from its inputs, which are added to the cache.
# "to store": from its inputs, and later calls also use these keys.
# "stored": from an earlier call.
# "shared": from the call of another module, and from that module's cache.
KeySource = Literal["inputs", "cache", "to store", "stored", "shared"]
Arrays = tuple[Array, ...]
ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


class ModuleParts(NamedTuple):
    """What `call_module` needs of a module of nnx or linen: layers, parameters, cache,
    arguments of the attention.
    """

    module: Module  # to sow weights in
    options: AttentionOptions
    query: Layer  # projects inputs [B..., T, D] to queries [B..., T, N, H]
    # Projects inputs to keys; with `latent`, to the one key [latent, rotary key] of all
    # heads.
    key: Layer | None
    out: Layer  # projects the attention's output [B..., T, N, Hv] back to features
    sinks: Array | None  # [N]
    # Returns the cache, given query and key; None if this call makes it.
    cache: Callable[[Array, Array], Arrays | None]
    # `write(arrays, stored)` sets the cache or, if `stored`, keys, values and lengths.
    write: Callable[[Arrays, bool], None]
    # Arguments of the attention function as Flax's module passes them.
    arguments: dict[str, Any]
    # Projects inputs to values; None with `latent`, or if values are the projected
    # keys.
    value: Layer | None = None
    query_norm: Layer | None = None
    key_norm: Layer | None = None
    value_norm: Layer | None = None
    process_heads: ProcessHeads | None = None
    score_mod: ScoreMod | None = None  # of calls that pass none
    gate: Layer | None = None  # projects inputs to the gate, before its activation
    out_norm: Layer | None = None  # of the gated output [B..., T, N, Hv]
    # Computes keys and values of heads from the latents that `key` returns.
    latent: Latent | None = None
    stored: Arrays | None = None  # keys, values and lengths that a call stored
    indexer: IndexParts | None = None  # chooses the keys that queries attend to
    # Numbers of features of `inputs_q`, and of `inputs_k` and `inputs_v`; None if the
    # projections check them.
    features: tuple[int, int] | None = None


class Given(NamedTuple):
    """The arguments with which a user calls a module."""

    decode: bool
    inputs_q: Float[Array, "*B T D"]
    inputs_k: Float[Array, "*B S Dk"] | None = None
    inputs_v: Float[Array, "*B S Dv"] | None = None
    mask: Array | Mask | None = None
    # None: as the attention function sets it, otherwise causal only while decoding.
    is_causal: bool | None = None
    bias: Array | None = None
    segment_ids: sequences.OneOrPair = None
    lengths: Any = None  # an array or, except with a cache, a pair
    score_mod: ScoreMod | None = None
    positions: sequences.OneOrPair = None
    qkv_sharding: Sharding | None = None
    sow_max_score: bool = False
    store_keys: bool = False
    key_indices: Array | None = None
    kv: SharedKV | None = None
    return_kv: bool = False
    process_heads: ProcessHeads | None = None

    @property
    def is_cross(self) -> bool:
        """Whether keys have inputs of their own."""
        return self.inputs_k is not None and self.inputs_k is not self.inputs_q


class Checked(NamedTuple):
    """A call whose arguments are checked, with what follows from them."""

    given: Given
    source: KeySource
    ours: AttentionFn | None  # None for an `attention_fn` of another library
    # Of the call or, without one, of a partial around the attention function.
    is_causal: bool | None
    is_self_attention: bool  # queries and keys are of the same tokens
    # The inputs of queries, keys and values, 0 at padding.
    inputs_q: Float[Array, "*B T D"]
    inputs_k: Float[Array, "*B S Dk"]
    inputs_v: Float[Array, "*B S Dv"]
    # Arguments of the attention function that name lengths and segments.
    per_sequence: dict[str, Any]


def call_module(parts: ModuleParts, given: Given) -> Any:
    """Computes a module's call and updates its cache.

    Returns the output or, with `return_kv`, a pair (output, `SharedKV`).
    """
    call = check(parts, given)
    # query [B..., T, N, H], key [B..., S, K, H], value [B..., S, K, Hv]
    query, key, value = project(parts, call)
    norms_after_rope = parts.options.norms_after_rope
    if not norms_after_rope:
        query, key = normalize(parts, call, query, key)
    query, key, value = process(parts, call, query, key, value)
    cache = cache_of(parts, call, query, key, value)
    query, key = rotate_heads(parts, call, query, key, cache)
    if norms_after_rope:
        query, key = normalize(parts, call, query, key)
    output, appended, index_cache = attend_to_keys(
        parts, call, query, key, value, cache
    )
    gating = parts.options.gating
    if parts.gate is not None and gating is not None:
        output = gating.apply(output, parts.gate(call.inputs_q))
    if parts.out_norm is not None:
        output = parts.out_norm(output)

    # Store what the call adds.
    if call.source == "to store":
        lengths = call.per_sequence.get("key_value_seq_lengths")
        lengths = sequences.key_lengths(lengths, key)
        parts.write((key, value, lengths), True)
    # The cache of shared keys is the earlier layer's to write.
    if call.source == "cache" and appended is not None:
        parts.write(appended.cache.arrays, False)
    if parts.indexer is not None and index_cache is not None:
        parts.indexer.store(index_cache)

    output = parts.out(output)
    if not given.return_kv:
        return output
    # A layer that reuses keys passes them on.
    if given.kv is not None:
        return output, given.kv
    kv = SharedKV(
        key=key,
        value=value,
        cache=cache,
        appended=appended,
        decode=given.decode,
        has_lengths=given.lengths is not None,
    )
    return output, kv


def check(parts: ModuleParts, given: Given) -> Checked:
    """Checks the arguments, and sets the inputs to 0 at padding."""
    attention_fn = ours(parts.options.attention_fn)
    # The constructor's functions count unless the call has its own.
    if given.process_heads is None:
        given = given._replace(process_heads=parts.process_heads)
    if given.score_mod is None:
        given = given._replace(score_mod=parts.score_mod)
    is_causal = given.is_causal
    if is_causal is None and attention_fn is not None:
        is_causal = attention_fn.preset.get("is_causal")
    # Arguments that exclude each other.
    _check_sharing(parts, given)
    source = _source_of_keys(parts, given)
    if source == "stored":
        preset = {} if attention_fn is None else attention_fn.preset
        window = parts.options.local_window_size
        sequences.check_stored(window, preset, given.mask, given.score_mod)
    if source in ("stored", "to store") and is_causal:
        raise ValueError(sequences.NO_POSITIONS.format("is_causal"))
    check_process_heads(given.process_heads)
    several_use_keys = {
        "shared": "an earlier layer (kv)",
        "stored": "an earlier call",
        "to store": "store_keys=True",
    }
    if given.process_heads is not None and source in several_use_keys:
        raise ValueError(
            "process_heads must be None if keys are used by several calls or layers, "
            "because it returns queries, keys and values together, but got keys from "
            f"{several_use_keys[source]}; leave process_heads out."
        )
    check_score_mod(parts.score_mod, attention_fn)

    # Inputs, and the arguments that say which of their tokens belong together.
    inputs_q, inputs_k, inputs_v = _check_inputs(parts, given, source)
    takes_own_inputs = source == "inputs" and not given.is_cross
    is_self_attention = source in ("cache", "shared") or takes_own_inputs
    shares_cache = given.kv is not None and given.kv.cache is not None
    is_cached = source == "cache" or shares_cache
    lengths = given.lengths
    if given.decode and given.segment_ids is not None:
        raise ValueError(
            "segment_ids must be None while decoding, but got an array; a cache holds "
            "one document per sequence."
        )
    if is_cached and isinstance(lengths, tuple):
        raise ValueError(
            "lengths must be a single array while decoding (the number of new tokens "
            "per sequence), but got a pair."
        )
    is_one_array = lengths is not None and not isinstance(lengths, tuple)
    if is_one_array and not is_self_attention:
        raise ValueError(
            "lengths must be a pair (queries, keys) if inputs_k is not inputs_q, but "
            "got one array; pass (None, lengths) to set only the key lengths."
        )
    query_lengths, key_lengths = sequences.pair("lengths", lengths)
    query_ids, key_ids = sequences.check_segment_ids(
        given.segment_ids, inputs_q, inputs_k
    )
    inputs_k = sequences.zero_after(inputs_k, key_lengths)
    inputs_v = sequences.zero_after(inputs_v, key_lengths)
    inputs_q = sequences.zero_after(inputs_q, query_lengths)
    per_sequence: dict[str, Any] = {}
    # A cache gets its lengths as an argument of its own.
    if not is_cached:
        per_sequence = {
            "query_segment_ids": query_ids,
            "key_value_segment_ids": key_ids,
            "query_seq_lengths": query_lengths,
            "key_value_seq_lengths": key_lengths,
        }
    return Checked(
        given=given,
        source=source,
        ours=attention_fn,
        is_causal=is_causal,
        is_self_attention=is_self_attention,
        inputs_q=inputs_q,
        inputs_k=inputs_k,
        inputs_v=inputs_v,
        per_sequence=per_sequence,
    )


def _check_sharing(parts: ModuleParts, given: Given) -> None:
    """Raises a ValueError if only one of `reuse_kv` and `kv` is set, or if
    cross-attention reuses or returns keys.
    """
    validation.check_bool("return_kv", given.return_kv)
    reuses = parts.options.reuse_kv
    if reuses and not isinstance(given.kv, SharedKV):
        raise ValueError(
            "kv must be the SharedKV that the call of an earlier layer returns with "
            f"return_kv=True if reuse_kv=True, but got {type(given.kv).__name__}."
        )
    if not reuses and given.kv is not None:
        raise ValueError(
            f"kv must be None if reuse_kv=False, but got {type(given.kv).__name__}; "
            "create the module with reuse_kv=True."
        )
    if not reuses and not given.return_kv:
        return
    # Layers share only the keys of tokens that are also queries, from a single step.
    inputs = (given.inputs_k, given.inputs_v)
    has_other_inputs = any(x is not None and x is not given.inputs_q for x in inputs)
    if has_other_inputs or given.store_keys or parts.stored is not None:
        name = "reuse_kv=True" if reuses else "return_kv=True"
        raise ValueError(
            f"{name} requires self-attention, but got other inputs or stored keys; "
            "leave out inputs_k, inputs_v and store_keys."
        )


def _source_of_keys(parts: ModuleParts, given: Given) -> KeySource:
    stores = validation.check_bool("store_keys", given.store_keys)
    if stores and not given.decode:
        raise ValueError(
            "store_keys=True requires decode=True; pass decode=True, or leave "
            "store_keys out."
        )
    if stores and given.inputs_k is None:
        raise ValueError(
            "store_keys=True requires inputs_k, but got None; store_keys is for "
            "cross-attention."
        )
    if given.kv is not None:
        return "shared"
    if not given.decode:
        return "inputs"
    if stores:
        return "to store"
    if parts.stored is None:
        return "cache"
    about_keys = {
        "inputs_k": given.inputs_k,
        "inputs_v": given.inputs_v,
        "lengths": given.lengths,
    }
    passed = [name for name, x in about_keys.items() if x is not None]
    if passed:
        raise ValueError(
            f"{' and '.join(passed)} must be None if keys are already stored, but got "
            "an array; pass store_keys=True to replace them."
        )
    return "stored"


def _check_inputs(
    parts: ModuleParts, given: Given, source: KeySource
) -> tuple[Array, Array, Array]:
    """Fills in missing inputs and checks all; returns those of queries, keys and
    values.
    """
    inputs_q = given.inputs_q
    inputs_k = given.inputs_k
    inputs_v = given.inputs_v
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the "
            "same value, pass it as `inputs_k` and leave `inputs_v` None."
        )
    if inputs_k is None:
        inputs_k = inputs_q
    if inputs_v is None:
        inputs_v = inputs_k
    has_no_values = parts.value is None and parts.latent is None
    values_are_keys = has_no_values and source != "shared"
    if values_are_keys and inputs_v is not inputs_k:
        raise ValueError(
            "inputs_v must be None with share_kv=True, because values are projections "
            "of inputs_k, but got an array; leave inputs_v out."
        )
    inputs = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
    shapes = ", ".join(f"{name} {x.shape}" for name, x in inputs.items())
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(
            "inputs must have the same rank, at least 2 ([batch..., length, "
            f"features]), but got {shapes}."
        )
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")
    # Keys of an earlier call or layer need no projection here.
    if parts.features is not None and source not in ("stored", "shared"):
        query_size, key_size = parts.features
        expected = {"inputs_q": query_size, "inputs_k": key_size, "inputs_v": key_size}
        for name, x in inputs.items():
            if x.shape[-1] != expected[name]:
                raise ValueError(
                    f"Incompatible input dimension, got {x.shape[-1]} but module "
                    f"expects {expected[name]} ({name} {x.shape})."
                )
    return inputs_q, inputs_k, inputs_v


def project(parts: ModuleParts, call: Checked) -> Heads:
    """Projects the inputs to query, key and value.

    Values are normalized here, not in `normalize`: with `share_kv` they are the
    projected keys before the key norm.
    """
    query = parts.query(call.inputs_q)
    if call.source == "stored":
        key, value, _ = parts.stored  # type: ignore[misc]
        return query, key, value
    kv = call.given.kv
    if kv is not None:
        *batch_and_length, _, size = query.shape
        of_keys = (*batch_and_length, parts.options.num_kv_heads, size)
        of_values = (*of_keys[:-1], parts.options.value_dim)
        if kv.key.shape != of_keys or kv.value.shape != of_values:
            raise ValueError(
                f"kv must have keys of shape {of_keys} and values of shape "
                f"{of_values}, but got {kv.key.shape} and {kv.value.shape}; pass kv "
                "from the same step, and from an earlier layer with the same number of "
                "key heads and the same head sizes."
            )
        has_lengths = call.given.lengths is not None
        for name, here, there in (
            ("decode", call.given.decode, kv.decode),
            ("lengths", has_lengths, kv.has_lengths),
        ):
            if here != there:
                where = "this call" if here else "the call that returned kv"
                raise ValueError(
                    f"{name} must be passed when calling both layers or neither, but "
                    f"was passed only in {where}."
                )
        return query, kv.key, kv.value
    key = parts.key(call.inputs_k)  # type: ignore[misc]
    # Latents are keys and values in one, and expanded later.
    if parts.latent is not None:
        no_value = key[..., :0]
        return query, key, no_value
    value = key
    if parts.value is not None:
        value = parts.value(call.inputs_v)
    if parts.value_norm is not None:
        value = parts.value_norm(value)
    return query, key, value


def normalize(
    parts: ModuleParts, call: Checked, query: Array, key: Array
) -> tuple[Array, Array]:
    """Normalizes queries and keys, if the layer has norms."""
    if parts.query_norm is not None:
        query = parts.query_norm(query)
    # Another call has normalized these keys.
    has_earlier_keys = call.source in ("stored", "shared")
    if parts.key_norm is not None and not has_earlier_keys:
        key = parts.key_norm(key)
    return query, key


def process(
    parts: ModuleParts, call: Checked, query: Array, key: Array, value: Array
) -> Heads:
    """Applies `process_heads`, if there is one."""
    function = call.given.process_heads
    if function is None:
        return query, key, value
    processed: object = function(query, key, value)
    if not isinstance(processed, tuple | list) or len(processed) != 3:
        raise ValueError(
            "process_heads must return three arrays (query, key, value), but got "
            f"{_described(processed)}; return all three, changed or not."
        )
    heads = {"query": query, "key": key, "value": value}
    for (name, before), x in zip(heads.items(), processed, strict=True):
        given = (getattr(x, "shape", None), getattr(x, "dtype", None))
        if given != (before.shape, before.dtype):
            raise ValueError(
                f"process_heads must return the {name} with shape {before.shape} and "
                f"dtype {before.dtype}, but got {_described(x)}; use .astype if only "
                "the dtype differs."
            )
    # It may have returned NumPy arrays.
    query, key, value = map(jnp.asarray, processed)
    return query, key, value


def _described(x: Any) -> str:
    if hasattr(x, "shape"):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, tuple | list):
        return f"{len(x)} of them"
    return type(x).__name__


def cache_of(
    parts: ModuleParts, call: Checked, query: Array, key: Array, value: Array
) -> KVCache | None:
    """Returns the cache after checking that it fits the heads; None without one, or if
    this call creates it.
    """
    if call.given.kv is not None:
        return call.given.kv.cache
    if call.source != "cache":
        return None
    arrays = parts.cache(query, key)
    if arrays is None:
        return None
    queries = query.shape[-3]
    keys = key.shape[-3]
    # The cache counts one position per token, for its query and its key.
    if call.given.is_cross and not queries == keys == 1:
        raise ValueError(
            "Autoregressive cache shape error: while decoding, inputs_k must be "
            "inputs_q or contain one token, because its tokens are added to the cache, "
            f"but got {queries=} and a separate array with {keys=}; for "
            "cross-attention, pass store_keys=True in the first call, or decode=False "
            "in every call."
        )
    value_size = None
    if parts.latent is not None:
        value_size = parts.latent.size
    window = reach(parts.options.local_window_size)
    cache = KVCache.of_arrays(window, value_size, arrays)
    cache.check_fits(key, value, queries)
    return cache


def reach(local_window_size: object) -> int | None:
    """Returns how many earlier positions a query attends to with this
    `local_window_size`; None means all.
    """
    window = check_window(local_window_size)
    if window is None:
        return None
    return window[0]


def rotate_heads(
    parts: ModuleParts,
    call: Checked,
    query: Array,
    key: Array,
    cache: KVCache | None,
) -> tuple[Array, Array]:
    """Rotates queries and keys by their positions; stored and shared keys are rotated
    already.
    """
    rope = parts.options.rope
    positions = call.given.positions
    if rope is None:
        if positions is not None:
            raise ValueError(
                "positions must be None without rope, but got an array; pass "
                "rope=RoPE() to the module."
            )
        return query, key
    # Only the end of a latent key [latent, rotary key] is rotated.
    size = None
    if parts.latent is not None:
        size = key.shape[-1] - parts.latent.size
    # How many queries there were before is not known with stored keys.
    if call.source == "stored":
        if positions is None or isinstance(positions, tuple):
            got = "None" if positions is None else "a pair"
            raise ValueError(
                "positions must be a single array (for the queries) if rope is used "
                f"with stored keys, but got {got}."
            )
        return sequences.rotate_features(query, positions, rope, size), key
    query_positions, key_positions = sequences.positions_of(
        positions,
        rope,
        query.shape[-3],
        key.shape[-3],
        call.is_self_attention,
        _next_position(cache),
    )
    query = sequences.rotate_features(query, query_positions, rope, size)
    if call.source != "shared":
        key = sequences.rotate_features(key, key_positions, rope, size)
    return query, key


def _next_position(cache: KVCache | None) -> Any:
    """Returns the position of a call's first token."""
    if cache is None:
        return 0
    # A negative index marks a sequence that was cut too far; its output is NaN.
    return jnp.maximum(cache.index, 0)


def attend_to_keys(
    parts: ModuleParts,
    call: Checked,
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache | None,
) -> tuple[Float[Array, "*B T N Hv"], Appended | None, KVCache | None]:
    """Computes the attention of projected heads, over the cache if there is one.

    Returns the output, the cache with the new keys and values, and the cache with the
    indexer's new keys; None without these caches.
    """
    arguments, mask_is_invalid = attention_arguments(parts, call, query, key, cache)
    attention_fn = call.ours
    given = call.given

    # Let the indexer choose keys.
    index_cache = None
    top_k = 0
    if parts.indexer is not None:
        if attention_fn is None:
            raise ValueError(
                "With an indexer, attention_fn must be flax_mha.attention_fn, but got "
                "another function."
            )
        indexer = parts.indexer.indexer
        index_query, index_key, weights = parts.indexer.project(call.inputs_q)
        rope = parts.options.rope
        if rope is not None:
            rotated_size = parts.options.head_dim
            size = None
            fraction = rope.fraction
            if indexer.rotary_last:
                size = rotated_size
            else:
                # The first features of the whole head, as RoPE's fraction counts them.
                fraction = fraction * rotated_size / indexer.head_dim
            rope = dataclasses.replace(
                rope, interleaved=indexer.interleaved, fraction=fraction
            )
            number = index_query.shape[-3]
            query_positions, key_positions = sequences.positions_of(
                given.positions, rope, number, number, True, _next_position(cache)
            )
            index_query = sequences.rotate_features(
                index_query, query_positions, rope, size
            )
            index_key = sequences.rotate_features(index_key, key_positions, rope, size)
        if given.decode:
            index_cache = parts.indexer.cached(index_key, cache)
        key_indices, index_cache = top_k_keys(
            indexer,
            projected=(index_query, index_key, weights),
            cache=index_cache,
            lengths=given.lengths,
            arguments=arguments,
            sow_to=parts.arguments.get("module"),
        )
        if key_indices is not None:
            arguments["key_indices"] = key_indices
        # A user may have chosen the keys.
        if given.key_indices is None:
            top_k = indexer.top_k

    # Attend to the keys of this call, or to those of the cache with the new ones.
    appended = None
    if cache is None:
        if parts.latent is not None:
            key, value = parts.latent.expand(key)
    else:
        _check_decodes(attention_fn, arguments)
        # 8-bit keys and values are quantized by the cache.
        if cache.scale is None:
            key = key.astype(cache.key.dtype)
            value = value.astype(cache.value.dtype)
        # A layer that reuses keys finds them in the cache of the earlier layer.
        if given.kv is not None:
            appended = given.kv.appended
        if appended is None:
            appended = cache.append(key, value, given.lengths)
        tokens = NewTokens(
            key,
            value,
            cache,
            appended,
            is_padded=given.lengths is not None,
            latent=parts.latent,
        )
        # Only our engines read a cache. Other functions get all keys and values as
        # arrays, and so do those that compute weights to be sown, or promote arrays.
        of_arrays = [arguments.get(name) for name in ("module", "promote_dtype")]
        uses_our_engines = attention_fn is not None and not uses_flax(query, arguments)
        reads_cache = uses_our_engines and all(x is None for x in of_arrays)
        if attention_fn is not None and reads_cache:
            output = attention_fn.attend_over_cache(
                query, tokens, top_k=top_k, **arguments
            )
            output = validation.nan_if(mask_is_invalid, output)
            return output, appended, index_cache
        key, value, arguments = all_written(
            query, tokens, uses_our_engines, **arguments
        )
    if attention_fn is not None:
        output = attention_fn.attend(query, key, value, **arguments)
    else:
        # Flax's modules do not pass `qkv_sharding`: the arrays are split here.
        sharding = arguments.pop("qkv_sharding", None)
        heads = (query, key, value)
        if sharding is not None:
            split = jax.lax.with_sharding_constraint
            if is_explicit(query):
                split = jax.reshard
            heads = tuple(split(x, sharding) for x in heads)
        output = parts.options.attention_fn(*heads, **arguments)
    if cache is not None and appended is not None:
        output = nan_without(appended.room, output, cache.batch)
    return validation.nan_if(mask_is_invalid, output), appended, index_cache


def _check_decodes(attention_fn: AttentionFn | None, arguments: Iterable[str]) -> None:
    """Raises a ValueError if an attention function of this package cannot decode, or
    if a partial sets an argument that the cache sets.
    """
    if attention_fn is None:
        return
    if attention_fn.context is not None:
        raise ValueError(
            "decode must be False with context_parallel, which cannot split a cache "
            "along the sequence, but got True; decode with "
            "attention_fn=flax_mha.attention_fn."
        )
    for name in arguments:
        if name.startswith(("query_", "key_value_")):
            raise ValueError(
                f"attention_fn must not set {name} while decoding, because the cache "
                "tracks positions; remove it from the functools.partial, and pass "
                "lengths in the call."
            )


def attention_arguments(
    parts: ModuleParts,
    call: Checked,
    query: Array,
    key: Array,
    cache: KVCache | None,
) -> tuple[dict[str, Any], Bool[Array, ""] | None]:
    """Returns the arguments of the attention function: from Flax, the module's options,
    the call, and a partial.

    Also returns a flag for `nan_if`: whether a mask of traced numbers holds any but 0
    and 1; None for other masks.
    """
    options = parts.options
    attention_fn = call.ours
    given = call.given
    # The number of keys before the padding in each sequence, [B...].
    stored_lengths = None
    if parts.stored is not None and call.source == "stored":
        *_, stored_lengths = parts.stored
    takes_lengths = attention_fn is not None and attention_fn.context is None

    # The module's options and the call's arguments.
    own = {
        "implementation": options.implementation,
        "scale": options.scale,
        "local_window_size": options.local_window_size,
        "logits_soft_cap": options.logits_soft_cap,
        "sinks": parts.sinks,
        "mask": given.mask,
        "bias": given.bias,
        "score_mod": given.score_mod,
        "key_indices": given.key_indices,
        "qkv_sharding": _attention_sharding(parts, call, query),
        "max_score_module": parts.module if given.sow_max_score else None,
        **call.per_sequence,
    }
    if takes_lengths and stored_lengths is not None:
        own["key_value_seq_lengths"] = stored_lengths
    # Queries over stored keys have no known positions.
    if call.source not in ("stored", "to store"):
        own["is_causal"] = call.is_causal

    # Arguments of None are left out, so that a function with only Flax's signature also
    # works.
    arguments = dict(parts.arguments)
    for name, x in own.items():
        if x is not None:
            arguments[name] = x
    if attention_fn is None:
        foreign.check_takes_mask(options.attention_fn, arguments.get("mask"))
    else:
        arguments = attention_fn.with_preset(arguments)
    if cache is not None:
        # Also pass None: while decoding it means causal, but Flax's default is False.
        arguments["is_causal"] = call.is_causal
    elif given.is_causal is None and call.is_causal:
        # Without a cache, a call's own is_causal=True narrows any mask. That of a
        # partial is easily forgotten, so a mask that shows later tokens is then an
        # error.
        check_is_causal(call.is_causal, arguments.get("mask"))

    # Other functions get arrays of numbers as Flax's modules pass them.
    mask: Any = arguments.get("mask")
    mask_is_invalid = None
    has_bool_masks = attention_fn is not None or call.source != "inputs"
    if has_bool_masks and not isinstance(mask, Mask | None):
        mask, mask_is_invalid = validation.mask_of_numbers(mask)
    if stored_lengths is not None and not takes_lengths:
        mask = sequences.mask_padding(mask, stored_lengths, key)
    if mask is not None:
        arguments["mask"] = mask
    return arguments, mask_is_invalid


def _attention_sharding(parts: ModuleParts, call: Checked, query: Array) -> Any:
    """Returns the `qkv_sharding` of the call or of a `functools.partial`, otherwise one
    that splits heads over `head_axis`, or None.

    Heads are split only if all axes of the mesh are Auto axes, and if no other axis may
    split the batch. For functions of other libraries, the compiler splits heads,
    because the parameters are split.
    """
    sharding = call.given.qkv_sharding
    attention_fn = call.ours
    if attention_fn is None:
        return sharding
    if sharding is None:
        sharding = attention_fn.preset.get("qkv_sharding")
    head_axis = parts.options.head_axis
    mesh = jax.sharding.get_abstract_mesh()
    is_auto = set(mesh.axis_types) == {AxisType.Auto}
    if sharding is None and head_axis is not None and is_auto:
        named = names_of(tensor_parallel.mesh_axis(head_axis))
        other_sizes = [size for name, size in mesh.shape.items() if name not in named]
        # `context_parallel` knows which axes split the batch.
        knows_batch_axes = attention_fn.context is not None
        if knows_batch_axes or all(size == 1 for size in other_sizes):
            batch_and_length = (None,) * (query.ndim - 2)
            sharding = PartitionSpec(*batch_and_length, named or None, None)
    return attention_fn.sharding(sharding, query.ndim)
