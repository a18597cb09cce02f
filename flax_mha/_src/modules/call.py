"""`call_module`: the call of every module, as a formula; a `FlaxModule` holds what
differs between the two APIs.

out(norm(gate * attention(rotate(process_heads(norm(project(x)))))))
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float

from flax_mha._src.cache.kv_cache import KVCache
from flax_mha._src.cache.latent import Latent
from flax_mha._src.cache.shared import Appended, SharedKV
from flax_mha._src.call.arguments import check_is_causal, check_window
from flax_mha._src.core import validation
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.distributed.split import names_of
from flax_mha._src.masks import Mask
from flax_mha._src.modules import sequences
from flax_mha._src.modules.attention_fn import CoreAttention, Heads, core_of, decode
from flax_mha._src.modules.foreign import check_takes_mask
from flax_mha._src.modules.indexer import IndexLayers, choose
from flax_mha._src.modules.layers import Gate

# Where the keys of a call come from.
# "inputs": from its inputs.
# "cache": from the cache and from its inputs, which are added to the cache.
# "to store": from its inputs, and later calls also use these keys.
# "stored": from an earlier call.
# "shared": from the call of another module, and from that module's cache.
KeySource = Literal["inputs", "cache", "to store", "stored", "shared"]
Layer = Callable[[Array], Array]
Arrays = tuple[Array, ...]
ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]
# Options of the constructor that the attention function takes under the same names.
OPTIONS = ("implementation", "scale", "local_window_size", "logits_soft_cap")


class FlaxModule(NamedTuple):
    """What `call_module` needs of a module of nnx or linen: layers, parameters, cache,
    arguments of the attention.
    """

    module: Any  # has the options
    query: Layer  # projects inputs [B..., T, D] to queries [B..., T, N, H]
    # Projects inputs to keys; with `latent`, to the one key [latent, rotary key] of all
    # heads.
    key: Layer | None
    out: Layer  # projects the attention's output [B..., T, N, Hv] back to features
    sinks: Array | None  # [N]
    # Returns the cache, given query and key; None if this call makes it.
    cache: Callable[[Array, Array], Arrays | None]
    # Sets the cache to new arrays or, if the flag is True, to keys, values and lengths.
    write: Callable[[Arrays, bool], None]
    # Arguments of the attention function as Flax's module passes them.
    arguments: dict[str, Any]
    # Projects inputs to values; None with `latent`, or if values are the projected
    # keys.
    value: Layer | None = None
    query_norm: Layer | None = None
    key_norm: Layer | None = None
    norms_after_rope: bool = False
    value_norm: Layer | None = None
    process_heads: ProcessHeads | None = None
    gate: Layer | None = None  # projects inputs to the gate, before its activation
    gating: Gate | None = None  # how the gate changes the output
    out_norm: Layer | None = None  # of the gated output [B..., T, N, Hv]
    # Computes keys and values of heads from the latents that `key` returns.
    latent: Latent | None = None
    stored: Arrays | None = None  # keys, values and lengths that a call stored
    indexer: IndexLayers | None = None  # chooses the keys that queries attend to
    # Numbers of features of queries, and of keys and values; None if the projections
    # check them.
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
    segment_ids: Any = None
    lengths: Any = None
    score_mod: Any = None
    positions: Any = None
    qkv_sharding: Any = None
    sow_max_score: bool = False
    store_keys: bool = False
    key_indices: Any = None
    kv: SharedKV | None = None
    return_kv: bool = False
    process_heads: ProcessHeads | None = None

    @property
    def is_cross(self) -> bool:
        """Whether keys have inputs of their own."""
        return self.inputs_k is not None and self.inputs_k is not self.inputs_q

    @property
    def has_lengths(self) -> bool:
        return self.lengths is not None


# Arguments of a module's call that it passes on to `call_module`.
PASSED_ON = frozenset(Given._fields) - {"decode"}


def call_module(layer: FlaxModule, call: Given) -> Any:
    """Computes a module's call and updates its cache.

    Returns the output or, with `return_kv`, a pair (output, `SharedKV`).
    """
    source = check(layer, call)
    core = core_of(layer.module.attention_fn)
    inputs, per_sequence = inputs_of(layer, call, source)

    heads = project(layer, call, source, inputs)
    if not layer.norms_after_rope:
        heads = normalize(layer, source, heads)
    heads = process(layer, call, heads)
    cache = cache_of(layer, call, source, heads)
    heads = rotate(layer, call, source, heads, cache)
    if layer.norms_after_rope:
        heads = normalize(layer, source, heads)

    arguments, is_no_mask = attention_arguments(
        layer, core, call, source, per_sequence, heads, cache
    )
    top_k, index_cache = choose_keys(layer, core, call, inputs[0], cache, arguments)
    output, appended = attend(layer, core, call, heads, cache, arguments, top_k)
    output = validation.nan_if(is_no_mask, output)
    output = gate_and_normalize(layer, output, inputs[0])
    write(layer, source, heads, per_sequence, appended, index_cache)
    output = layer.out(output)
    if not call.return_kv:
        return output
    if call.kv is not None:
        return output, call.kv
    _, key, value = heads
    return output, SharedKV(key, value, cache, appended, call.decode, call.has_lengths)


def check(layer: FlaxModule, call: Given) -> KeySource:
    """Checks arguments that exclude each other, and returns where keys come from."""
    if layer.latent is None:
        _check_sharing(layer, call)
    source = _source_of_keys(layer, call)
    if source == "stored":
        core = core_of(layer.module.attention_fn)
        preset = {} if core is None else core.preset
        sequences.check_stored(layer.module, preset, call.mask, call.score_mod)
    _check_process_heads(layer, call, source)
    return source


def _check_sharing(layer: FlaxModule, call: Given) -> None:
    """Raises a ValueError if only one of `reuse_kv` and `kv` is set, or if
    cross-attention reuses or returns keys.
    """
    validation.flag("return_kv", call.return_kv)
    reuses = layer.module.reuse_kv
    if reuses and not isinstance(call.kv, SharedKV):
        raise ValueError(
            "kv must be the SharedKV that the call of an earlier layer returns with "
            f"return_kv=True if reuse_kv=True, but got {type(call.kv).__name__}."
        )
    if not reuses and call.kv is not None:
        raise ValueError(
            f"kv must be None if reuse_kv=False, but got {type(call.kv).__name__}; "
            "create the module with reuse_kv=True."
        )
    if not reuses and not call.return_kv:
        return
    inputs = (call.inputs_k, call.inputs_v)
    has_other_inputs = any(x is not None and x is not call.inputs_q for x in inputs)
    if has_other_inputs or call.store_keys or layer.stored is not None:
        name = "reuse_kv=True" if reuses else "return_kv=True"
        raise ValueError(
            f"{name} requires self-attention, but got other inputs or stored keys; "
            "leave out inputs_k, inputs_v and store_keys."
        )


def _source_of_keys(layer: FlaxModule, call: Given) -> KeySource:
    stores = validation.flag("store_keys", call.store_keys)
    if stores and not call.decode:
        raise ValueError(
            "store_keys=True requires decode=True; pass decode=True, or leave "
            "store_keys out."
        )
    if stores and call.inputs_k is None:
        raise ValueError(
            "store_keys=True requires inputs_k, but got None; store_keys is for "
            "cross-attention."
        )
    if call.kv is not None:
        return "shared"
    if not call.decode:
        return "inputs"
    if stores:
        return "to store"
    if layer.stored is None:
        return "cache"
    given = [
        name
        for name in ("inputs_k", "inputs_v", "lengths")
        if getattr(call, name) is not None
    ]
    if given:
        raise ValueError(
            f"{' and '.join(given)} must be None if keys are already stored, but got "
            "an array; pass store_keys=True to replace them."
        )
    return "stored"


def _check_process_heads(layer: FlaxModule, call: Given, source: KeySource) -> None:
    function = call.process_heads
    if function is None:
        function = layer.process_heads
    if function is None:
        return
    if not callable(function):
        raise ValueError(
            "process_heads must be a function of (query, key, value) or None, but got "
            f"{function!r}."
        )
    if source in ("to store", "stored", "shared"):
        names = {
            "shared": "an earlier layer (kv)",
            "stored": "an earlier call",
            "to store": "store_keys=True",
        }
        raise ValueError(
            "process_heads must be None if keys are used by several calls or layers, "
            "because it returns queries, keys and values together, but got keys from "
            f"{names[source]}; leave process_heads out."
        )


def inputs_of(
    layer: FlaxModule, call: Given, source: KeySource
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    """Returns the inputs of queries, keys and values, 0 at padding, and the arguments
    that name lengths and segments.

    A cache gets its lengths as an argument of its own.
    """
    inputs = _check_inputs(layer, call, source)
    if call.segment_ids is None and call.lengths is None:
        return inputs, {}
    is_cached = source == "cache" or (call.kv is not None and call.kv.cache is not None)
    return sequences.per_sequence_arguments(
        inputs,
        call.segment_ids,
        call.lengths,
        _attends_to_itself(call, source),
        call.decode,
        is_cached,
    )


def _attends_to_itself(call: Given, source: KeySource) -> bool:
    return source in ("cache", "shared") or (source == "inputs" and not call.is_cross)


def _check_inputs(
    layer: FlaxModule, call: Given, source: KeySource
) -> tuple[Array, Array, Array]:
    inputs_q = call.inputs_q
    inputs_k = call.inputs_k
    inputs_v = call.inputs_v
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the "
            "same value, pass it as `inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    values_are_keys = (
        layer.value is None and layer.latent is None and source != "shared"
    )
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
    if layer.features is not None and source not in ("stored", "shared"):
        of_queries, of_keys = layer.features
        expected = {"inputs_q": of_queries, "inputs_k": of_keys, "inputs_v": of_keys}
        for name, x in inputs.items():
            if x.shape[-1] != expected[name]:
                raise ValueError(
                    f"Incompatible input dimension, got {x.shape[-1]} but module "
                    f"expects {expected[name]} ({name} {x.shape})."
                )
    return inputs_q, inputs_k, inputs_v


def project(
    layer: FlaxModule,
    call: Given,
    source: KeySource,
    inputs: tuple[Array, Array, Array],
) -> Heads:
    """Returns query, key and value; values are normalized already, because shared
    values are keys without a norm.
    """
    inputs_q, inputs_k, inputs_v = inputs
    query = layer.query(inputs_q)
    if source == "stored":
        key, value, _ = layer.stored  # type: ignore[misc]
        return query, key, value
    if call.kv is not None:
        num_kv_heads = (
            getattr(layer.module, "num_kv_heads", None) or layer.module.num_heads
        )
        value_size = layer.module.value_dim or query.shape[-1]
        shape = (*query.shape[:-2], num_kv_heads, query.shape[-1])
        call.kv.check(shape, value_size, call.decode, call.has_lengths)
        return query, call.kv.key, call.kv.value
    key = layer.key(inputs_k)  # type: ignore[misc]
    if layer.latent is not None:
        return query, key, key[..., :0]
    value = key if layer.value is None else layer.value(inputs_v)
    if layer.value_norm is not None:
        value = layer.value_norm(value)
    return query, key, value


def normalize(layer: FlaxModule, source: KeySource, heads: Heads) -> Heads:
    """Normalizes queries and keys; stored and shared keys were normalized by an earlier
    call.
    """
    query, key, value = heads
    if layer.query_norm is not None:
        query = layer.query_norm(query)
    if layer.key_norm is not None and source not in ("stored", "shared"):
        key = layer.key_norm(key)
    return query, key, value


def process(layer: FlaxModule, call: Given, heads: Heads) -> Heads:
    """Applies `process_heads` of the call or, without one, of the constructor."""
    function = layer.process_heads if call.process_heads is None else call.process_heads
    if function is None:
        return heads
    processed: Any = function(*heads)
    if not isinstance(processed, tuple | list) or len(processed) != len(heads):
        raise ValueError(
            "process_heads must return three arrays (query, key, value), but got "
            f"{_described(processed)}; return all three, changed or not."
        )
    for name, x, before in zip(
        ("query", "key", "value"), processed, heads, strict=True
    ):
        if not hasattr(x, "shape") or (x.shape, x.dtype) != (
            before.shape,
            before.dtype,
        ):
            raise ValueError(
                f"process_heads must return the {name} with shape {before.shape} and "
                f"dtype {before.dtype}, but got {_described(x)}; use .astype if only "
                "the dtype differs."
            )
    query, key, value = processed
    return query, key, value


def _described(x: Any) -> str:
    if hasattr(x, "shape"):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    if isinstance(x, tuple | list):
        return f"{len(x)} of them"
    return type(x).__name__


def cache_of(
    layer: FlaxModule, call: Given, source: KeySource, heads: Heads
) -> KVCache | None:
    """Returns the cache after checking that it fits the heads; None without one, or if
    this call creates it.
    """
    if call.kv is not None:
        return call.kv.cache
    if source != "cache":
        return None
    query, key, value = heads
    arrays = layer.cache(query, key)
    if arrays is None:
        return None
    queries = query.shape[-3]
    keys = key.shape[-3]
    if call.is_cross and not queries == keys == 1:
        raise ValueError(
            "Autoregressive cache shape error: while decoding, inputs_k must be "
            "inputs_q or contain one token, because its tokens are added to the cache, "
            f"but got a separate array of {keys} tokens for {queries} queries; for "
            "cross-attention, pass store_keys=True in the first call, or decode=False "
            "in every call."
        )
    value_size = None if layer.latent is None else layer.latent.size
    cache = KVCache.of_arrays(reach(layer.module.local_window_size), value_size, arrays)
    cache.check_fits(key, value, queries)
    return cache


def reach(local_window_size: Any) -> int | None:
    """Returns how many earlier positions a query attends to with this
    `local_window_size`; None means all.
    """
    window = check_window(local_window_size)
    if window is None:
        return None
    return window[0]


def rotate(
    layer: FlaxModule,
    call: Given,
    source: KeySource,
    heads: Heads,
    cache: KVCache | None,
) -> Heads:
    """Rotates queries and keys by their positions; stored and shared keys are rotated
    already.
    """
    rope = layer.module.rope
    if rope is None and call.positions is None:
        return heads
    query, key, value = heads
    query, key = sequences.rotate(
        query,
        key,
        rope,
        call.positions,
        self_attention=_attends_to_itself(call, source),
        start=0 if cache is None else jnp.maximum(cache.index, 0),
        stored=source == "stored",
        shared=source == "shared",
        size=None if layer.latent is None else key.shape[-1] - layer.latent.size,
    )
    return query, key, value


def attention_arguments(
    layer: FlaxModule,
    core: CoreAttention | None,
    call: Given,
    source: KeySource,
    per_sequence: dict[str, Any],
    heads: Heads,
    cache: KVCache | None,
) -> tuple[dict[str, Any], Bool[Array, ""] | None]:
    """Returns the arguments of the attention function: from Flax, the module's options,
    the call, and a partial.

    Also returns a flag for `nan_if`: whether a mask of traced numbers holds any but 0
    and 1; None for other masks.
    """
    query, key, _ = heads
    is_causal = _is_causal(core, call)
    ours = {name: getattr(layer.module, name) for name in OPTIONS}
    ours |= {"sinks": layer.sinks, "mask": call.mask, "bias": call.bias}
    ours |= {"score_mod": call.score_mod, "key_indices": call.key_indices}
    ours |= {
        "qkv_sharding": _attention_sharding(
            layer.module, core, call.qkv_sharding, query
        )
    }
    ours |= {"max_score_module": layer.module if call.sow_max_score else None}
    ours |= per_sequence
    if layer.stored is not None and source == "stored":
        lengths = layer.stored[2]
    else:
        lengths = None
    takes_lengths = core is not None and core.context is None
    if takes_lengths and lengths is not None:
        ours["key_value_seq_lengths"] = lengths
    if source not in ("stored", "to store"):  # those queries have no known positions
        ours["is_causal"] = is_causal
    # Arguments of None are left out, so that a function with only Flax's signature also
    # works.
    arguments = layer.arguments | {name: x for name, x in ours.items() if x is not None}
    if core is None:
        check_takes_mask(layer.module.attention_fn, arguments.get("mask"))
    else:
        arguments = core.with_preset(arguments, without=("is_causal",))
    if cache is not None:
        # None is not the same as Flax's default of False.
        arguments["is_causal"] = is_causal
    elif call.is_causal is None and is_causal:
        check_is_causal(is_causal, arguments.get("mask"))

    is_no_mask = None
    mask = arguments.get("mask")
    is_array = mask is not None and not isinstance(mask, Mask)
    if is_array and (core is not None or source != "inputs"):
        arguments["mask"], is_no_mask = validation.mask_of_numbers(mask)
    if lengths is not None and not takes_lengths:
        arguments["mask"] = sequences.mask_padding(arguments.get("mask"), lengths, key)
    return arguments, is_no_mask


def _is_causal(core: CoreAttention | None, call: Given) -> bool | None:
    """Returns `is_causal` of the call or, if that is None, of a `functools.partial`
    around the attention function.
    """
    if call.is_causal is None and core is not None:
        return core.preset.get("is_causal")
    return call.is_causal


def _attention_sharding(
    module: Any, core: CoreAttention | None, qkv_sharding: Any, query: Array
) -> Any:
    """Returns the `qkv_sharding` of the call or of a `functools.partial`, otherwise one
    that splits heads.

    Heads are split over `head_axis`, but only on a mesh of Auto axes, and only if no
    other axis may split the batch; otherwise returns None.
    """
    if module.head_axis is None:
        return qkv_sharding
    if qkv_sharding is None and core is not None:
        qkv_sharding = core.preset.get("qkv_sharding")
    mesh = jax.sharding.get_abstract_mesh()
    if (
        qkv_sharding is not None
        or mesh.empty
        or set(mesh.axis_types) != {AxisType.Auto}
    ):
        return qkv_sharding
    named = names_of(tensor_parallel.mesh_axis(module.head_axis))
    # `context_parallel` knows which axes split the batch.
    names_batch = core is not None and core.context is not None
    splits_nothing_else = all(
        name in named or size == 1 for name, size in mesh.shape.items()
    )
    if not names_batch and not splits_nothing_else:
        return None
    batch_and_length = (None,) * (query.ndim - 2)
    return PartitionSpec(*batch_and_length, named or None, None)


def choose_keys(
    layer: FlaxModule,
    core: CoreAttention | None,
    call: Given,
    inputs: Array,
    cache: KVCache | None,
    arguments: dict[str, Any],
) -> tuple[int, KVCache | None]:
    """Lets the indexer choose `key_indices`, which it adds to `arguments`.

    Returns its `top_k`, 0 without an indexer or if a user chose, and the cache of its
    keys.
    """
    layers = layer.indexer
    if layers is None:
        return 0, None
    if core is None:
        raise ValueError(
            "With an indexer, attention_fn must be flax_mha.attention_fn, but got "
            "another function."
        )
    query, key, weights = layers.project(inputs)
    start = 0 if cache is None else jnp.maximum(cache.index, 0)
    rope = layer.module.rope
    if rope is not None:
        rotated_size = layer.module.qk_rope_head_dim
        options = layers.indexer
        # Rotates `rotated_size` features: the last ones, or the first ones of the whole
        # head.
        fraction = rope.fraction
        if not options.rotary_last:
            fraction = rope.fraction * rotated_size / options.head_dim
        query, key = sequences.rotate(
            query,
            key,
            dataclasses.replace(
                rope, interleaved=options.interleaved, fraction=fraction
            ),
            call.positions,
            self_attention=True,
            start=start,
            stored=False,
            shared=False,
            size=rotated_size if options.rotary_last else None,
        )
    index_cache = layers.cached(key, cache) if call.decode else None
    sow_to = layer.arguments.get("module")
    projected = (query, key, weights)
    lists, index_cache = choose(
        layers.indexer, projected, index_cache, call.lengths, arguments, sow_to
    )
    if lists is not None:
        arguments["key_indices"] = lists
    top_k = layers.indexer.top_k if call.key_indices is None else 0
    return top_k, index_cache


def attend(
    layer: FlaxModule,
    core: CoreAttention | None,
    call: Given,
    heads: Heads,
    cache: KVCache | None,
    arguments: dict[str, Any],
    top_k: int,
) -> tuple[Float[Array, "*B T N Hv"], Appended | None]:
    """Computes the attention of projected heads, over the cache if there is one.

    `core` is None if the module's `attention_fn` is not from this package. `top_k` is
    the indexer's; 0 without one, or if a user chose the keys. Returns the output, and
    the cache with the new keys and values (None without a cache).
    """
    attention_fn = layer.module.attention_fn
    if cache is not None:
        appended = None if call.kv is None else call.kv.appended
        return decode(
            attention_fn,
            core,
            heads,
            cache,
            call.lengths,
            layer.latent,
            appended,
            arguments,
            top_k,
        )
    query, key, value = heads
    if layer.latent is not None:
        key, value = layer.latent.expand(key)
    if core is None:
        return attention_fn(query, key, value, **arguments), None
    if not core.computes((query, key, value), arguments):
        return core.function(query, key, value, **arguments), None
    made, implementation = core.call_of(query, key, value, **arguments)
    return core.run(made, implementation).output, None


def gate_and_normalize(
    layer: FlaxModule, x: Float[Array, "*B T N Hv"], inputs_q: Array
) -> Float[Array, "*B T N Hv"]:
    if layer.gate is not None and layer.gating is not None:
        x = layer.gating.apply(x, layer.gate(inputs_q))
    if layer.out_norm is not None:
        x = layer.out_norm(x)
    return x


def write(
    layer: FlaxModule,
    source: KeySource,
    heads: Heads,
    per_sequence: Mapping[str, Any],
    appended: Appended | None,
    index_cache: KVCache | None,
) -> None:
    """Sets the module's cache to the new keys and values."""
    _, key, value = heads
    if source == "to store":
        lengths = sequences.key_lengths(per_sequence.get("key_value_seq_lengths"), key)
        layer.write((key, value, lengths), True)
    if source == "cache" and appended is not None:
        layer.write(appended.cache.arrays, False)
    if layer.indexer is not None and index_cache is not None:
        layer.indexer.store(index_cache)
