"""`call_module`: the call of every module, from its inputs to its output and to the arrays of its cache.

The modules pass what differs between `flax.nnx` and `flax.linen` in a `FlaxModule`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from flax_mha._src.call.arguments import Arguments, canonical, check_sharding, check_window
from flax_mha._src.call.operands import Call
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import multiplies_bfloat16
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.distributed.split import names_of
from flax_mha._src.modules import sequences
from flax_mha._src.modules.attention_fn import CoreAttention
from flax_mha._src.modules.decode import decode_by
from flax_mha._src.run import Implementation
from flax_mha.cache.cached_attention import over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.masks import Mask

KeySource = Literal["inputs", "cache", "stored", "to store"]
Layer = Callable[[Array], Array]
Arrays = tuple[Array, ...]
OPTIONS = ("implementation", "scale", "local_window_size", "logits_soft_cap")
# Arguments of `attention_fn` that are arguments of `dot_product_attention`.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
# A call with others than these, such as `module`, which sows weights, is computed by the attention function itself.
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}


class FlaxModule(NamedTuple):
    """The layers, parameters, cache and Flax's arguments of an nnx or linen module, for one run of `call_module`."""

    query: Layer  # projects inputs [B..., T, D] to queries [B..., T, N, H]
    key: Layer  # projects inputs to keys; with `latent`, to the one key [latent, rotary key] that all heads share
    out: Layer  # projects the attention's output [B..., T, N, Hv] back to features
    sinks: Array | None  # [N]
    cache: Callable[[Array, Array], Arrays | None]  # returns the cache, given query and key; None if this call makes it
    arguments: dict[str, Any]  # arguments of the attention function as Flax's module passes them
    value: Layer | None = None  # projects inputs to values; None with `latent`
    norms: tuple[Layer, Layer] | None = None  # of queries and of keys
    norms_after_rope: bool = False
    gate: Layer | None = None  # projects inputs to the gate before its sigmoid, [B..., T, N, H]
    latent: Latent | None = None  # computes keys and values of heads from the latents that `key` returns
    stored: Callable[[], Arrays] | None = None  # returns stored keys, values and lengths; None if no call stored any
    features: tuple[int, int] | None = None  # of queries, and of keys and values; None if the projections check them

    def output(self, x: Float[Array, "*B T N H"], inputs_q: Float[Array, "*B T D"]) -> Float[Array, "*B T Dout"]:
        """Multiplies the attention's output by a sigmoid gate of the inputs, if there is one, and projects it back."""
        if self.gate is None:
            return self.out(x)
        gate = jax.nn.sigmoid(self.gate(inputs_q))
        # Outputs of padding are 0, and stay 0 although its inputs, and so its gate, may be NaN.
        return self.out(x * jnp.where((x == 0) & jnp.isnan(gate), 0, gate).astype(x.dtype))


def call_module(
    module: Any,
    flax: FlaxModule,
    inputs_q: Float[Array, "*B T D"],
    inputs_k: Float[Array, "*B S Dk"] | None = None,
    inputs_v: Float[Array, "*B S Dv"] | None = None,
    *,
    decode: bool,
    mask: Array | Mask | None,
    is_causal: bool,
    bias: Array | None,
    segment_ids: Any,
    lengths: Any,
    score_mod: Any,
    positions: Any,
    qkv_sharding: Any,
    sow_max_score: bool,
    store_keys: bool = False,
) -> tuple[Float[Array, "*B T Dout"], Arrays | None]:
    """Computes the output of a module, and the new arrays of its cache; None if the cache does not change.

    The arrays are those of `KVCache.arrays`, or the keys, values and lengths that the call stores. `module` is read for
    its options; the other arguments are those of its call.
    """
    keys = source_of_keys(decode, store_keys, flax.stored is not None, inputs_k, inputs_v, lengths)
    is_cross = inputs_k is not None and inputs_k is not inputs_q
    self_attention = keys == "cache" or (keys == "inputs" and not is_cross)
    per_sequence: dict[str, Array | None] = {}
    if segment_ids is not None or lengths is not None:
        per_sequence = sequences.per_sequence_arguments(segment_ids, lengths, self_attention, decode, keys == "cache")
    core = core_of(module.attention_fn)
    if keys == "stored":
        sequences.check_stored(module, {} if core is None else core.preset, mask, score_mod)
    inputs = check_inputs(inputs_q, inputs_k, inputs_v, None if keys == "stored" else flax.features)
    if segment_ids is not None:
        sequences.check_segment_ids(segment_ids, inputs[0], inputs[1])
    if lengths is not None:
        inputs = sequences.zero_padding(inputs, lengths)
    query, key, value, stored_lengths = _project(flax, keys, *inputs)
    takes_lengths = core is not None and core.context is None
    if stored_lengths is not None and takes_lengths:
        per_sequence["key_value_seq_lengths"] = stored_lengths
    cache = _cache_of(module, flax, query, key, value, is_cross) if keys == "cache" else None
    if module.rope is not None or positions is not None:
        start = 0 if cache is None else jnp.maximum(cache.index, 0)
        size = None if flax.latent is None else key.shape[-1] - flax.latent.size
        query, key = sequences.rotate(query, key, module.rope, positions, self_attention, start, keys == "stored", size)
    if flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    given = per_sequence | {
        "mask": mask,
        "bias": bias,
        "score_mod": score_mod,
        "is_causal": None if is_causal is False else is_causal,
        "max_score_module": module if sow_max_score else None,
        "qkv_sharding": _attention_sharding(module, core, qkv_sharding, query),
    }
    arguments = _attention_arguments(module, flax, core, keys, given, decoding=cache is not None)
    is_no_mask = None  # whether a mask of traced numbers holds others than 0 and 1
    if (core is not None or keys != "inputs") and not isinstance(arguments.get("mask"), Mask | None):
        arguments["mask"], is_no_mask = validation.mask_of_numbers(arguments["mask"])
    if stored_lengths is not None and not takes_lengths:
        arguments["mask"] = sequences.mask_padding(arguments.get("mask"), stored_lengths, key)
    if cache is not None:
        x, new = _decode(module.attention_fn, core, query, key, value, cache, lengths, arguments, flax.latent)
        return flax.output(validation.nan_if(is_no_mask, x), inputs[0]), new.arrays
    if flax.latent is not None:
        key, value = flax.latent.expand(key)
    if core is not None and core_computes((query, key, value), arguments):
        x = core.run(*call_of(core, query, key, value, **arguments)).output
    else:
        x = (module.attention_fn if core is None else core.function)(query, key, value, **arguments)
    stored = None
    if keys == "to store":
        stored = key, value, sequences.key_lengths(per_sequence.get("key_value_seq_lengths"), key)
    return flax.output(validation.nan_if(is_no_mask, x), inputs[0]), stored


# The arguments that modules pass on from their own call.
PASSED_ON = frozenset(inspect.signature(call_module).parameters) - {"module", "flax", "decode"}


def _project(
    flax: FlaxModule, keys: KeySource, inputs_q: Array, inputs_k: Array, inputs_v: Array
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Array | None]:
    """Returns query, key, value, and the lengths of stored keys or None; normalized, unless norms come after RoPE."""
    lengths, query = None, flax.query(inputs_q)
    if keys == "stored":
        key, value, lengths = flax.stored()  # type: ignore[misc]
    else:
        key = flax.key(inputs_k)
        value = key[..., :0] if flax.value is None else flax.value(inputs_v)
    if not flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    return query, key, value, lengths


def _normalize(flax: FlaxModule, query: Array, key: Array, keys: KeySource) -> tuple[Array, Array]:
    """Normalizes query and key if there are norms; stored keys were normalized when they were stored."""
    if flax.norms is None:
        return query, key
    return flax.norms[0](query), key if keys == "stored" else flax.norms[1](key)


def _attention_arguments(
    module: Any, flax: FlaxModule, core: CoreAttention | None, keys: KeySource, given: dict[str, Any], decoding: bool
) -> dict[str, Any]:
    """Joins the attention function's arguments: Flax's, the module's options, the call's (`given`), a partial's."""
    # The positions of queries that use stored keys are not known.
    without = ("is_causal",) if keys in ("stored", "to store") else ()
    ours = given | {name: getattr(module, name) for name in OPTIONS} | {"sinks": flax.sinks}
    # Without None, any function with Flax's signature will do.
    arguments = flax.arguments | {name: x for name, x in ours.items() if x is not None and name not in without}
    return arguments if core is None else core.combine(arguments, without, decoding)


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *arguments: Any, **options: Any) -> Array:
    """Computes `jax.lax.dot_general`; on a mesh with Explicit axes, the result is split as its operands are."""
    by_types = any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in (lhs, rhs))
    if by_types and options.get("out_sharding") is None:
        options["out_sharding"] = tensor_parallel.sharding_of_product(lhs, rhs, dimension_numbers)
    if options.get("preferred_element_type") or not (lhs.dtype == rhs.dtype == jnp.bfloat16 and multiplies_bfloat16()):
        return lax.dot_general(lhs, rhs, dimension_numbers, *arguments, **options)
    # With a bfloat16 result, or a single row, XLA's CPU would convert all weights to float32. The barrier keeps it from
    # reading `lhs` transposed, for which it has no product.
    (contracted, _), (batch, _) = dimension_numbers
    is_row = not batch and 0 not in contracted and all(n == 1 for i, n in enumerate(lhs.shape) if i not in contracted)
    rows = lax.optimization_barrier(jnp.broadcast_to(lhs, (2, *lhs.shape[1:])) if is_row else lhs)
    options["preferred_element_type"] = jnp.float32
    product = lax.dot_general(rows, rhs, dimension_numbers, *arguments, **options).astype(jnp.bfloat16)
    return product[:1] if is_row else product


def _cache_of(module: Any, flax: FlaxModule, query: Array, key: Array, value: Array, is_cross: bool) -> KVCache | None:
    """Returns the module's cache, checked to fit key and value; None if this call makes the cache."""
    arrays = flax.cache(query, key)
    if arrays is None:
        return None
    queries, keys = query.shape[-3], key.shape[-3]
    if is_cross and (queries, keys) != (1, 1):
        raise ValueError(
            "Autoregressive cache shape error: while decoding, inputs_k must be inputs_q or contain one token, because "
            f"its tokens are added to the cache, but got a separate array of {keys} tokens for {queries} queries; for "
            "cross-attention, pass store_keys=True in the first call, or decode=False in every call."
        )
    value_size = None if flax.latent is None else flax.latent.size
    cache = KVCache.of_window(*arrays, window=reach(module.local_window_size), value_size=value_size)
    cache.check_fits(key, value, query.shape[-3])
    return cache


def core_of(attention_fn: Callable[..., Array]) -> CoreAttention | None:
    """Returns the `CoreAttention` of an attention function, or None if the function is not of this package.

    Keywords of `functools.partial`s around the function become its `preset`.
    """
    function: Any = attention_fn
    preset: dict[str, Any] = {}
    # No subclasses, whose calls may do more.
    while type(function) in (functools.partial, jax.tree_util.Partial) and not function.args:
        function, preset = function.func, function.keywords | preset
        inner = getattr(function, "fun", None)  # a jax.tree_util.Partial of a functools.partial
        function = inner if type(inner) is functools.partial else function
    core = getattr(function, "core", None)
    if not isinstance(core, CoreAttention) or core.function is not function:
        return None
    return dataclasses.replace(core, preset={**core.preset, **preset}) if preset else core


def core_computes(arrays: Sequence[Array], arguments: Mapping[str, Any]) -> bool:
    """Returns whether the core can compute the call: no weights to sow, no einsums of Flax, no complex numbers."""
    given = {name for name, x in arguments.items() if x is not None}
    return given <= DIRECT and not any(map(jnp.iscomplexobj, arrays))


def call_of(
    core: CoreAttention, query: Array, key: Array, value: Array, **arguments: Any
) -> tuple[Call, Implementation | None]:
    """Makes a `Call` and an implementation's name from arguments of `attention_fn`; ignores others, like `module`."""
    promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
    query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments)
    implementation = known.pop("implementation", None)
    if core.context is not None:
        sharding = check_sharding(known.get("qkv_sharding"), query.ndim)
        known["qkv_sharding"] = core.context.with_sharding(sharding, query.ndim)
    return canonical(query, key, value, platform=core.platform, **known), implementation


def _core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turns arguments of `attention_fn` into those of `dot_product_attention`; leaves out others, such as `module`."""
    dropout = ("dropout_rate", "dropout_rng") if arguments.get("deterministic") else ()
    known = {name: x for name, x in arguments.items() if name in CORE and name not in dropout and x is not None}
    return known | {"return_max_score": arguments.get("max_score_module") is not None}


def _decode(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
    latent: Latent | None,
) -> tuple[Array, KVCache]:
    """Computes attention over a cache by the core or, if it cannot (`core_computes`), by the attention function."""
    arguments.pop("is_causal", None)  # decoding is always causal
    if cache.scale is None:
        key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    if core is None or not core_computes((query,), arguments):
        attend = attention_fn if core is None else core.function
        return decode_by(attend, core is not None, query, key, value, cache, lengths, arguments, latent)
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments) | {"lengths": lengths, "latent": latent, "platform": core.platform}
    output, new, *_ = over_cache(core.run, query, key, value, cache, **known)
    return output, new


def _attention_sharding(module: Any, core: CoreAttention | None, qkv_sharding: Any, query: Array) -> Any:
    """Returns the attention's `qkv_sharding`: the call's or a partial's, else one that splits heads over `head_axis`.

    The heads are only split so on a mesh with Auto axes, and only if no other axis may split the batch; else None.
    """
    if module.head_axis is None:
        return qkv_sharding
    preset = None if core is None else core.preset.get("qkv_sharding")
    qkv_sharding, mesh = preset if qkv_sharding is None else qkv_sharding, jax.sharding.get_abstract_mesh()
    if qkv_sharding is not None or mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return qkv_sharding
    named = names_of(tensor_parallel.mesh_axis(module.head_axis))
    # Other axes may split the batch in a way that only `context_parallel` knows.
    names_batch = core is not None and core.context is not None
    alone = names_batch or all(name in named or size == 1 for name, size in mesh.shape.items())
    return PartitionSpec(*(None,) * (query.ndim - 2), named or None, None) if alone else None


def check_inputs(
    inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None, features: tuple[int, int] | None
) -> tuple[Array, Array, Array]:
    """Returns the inputs of queries, of keys, by default the queries', and of values, by default the keys'.

    `features` are the expected sizes of the last axis: one for queries, and one for keys and values.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    inputs = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
    shapes = ", ".join(f"{name} {x.shape}" for name, x in inputs.items())
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(
            f"inputs must have the same rank, at least 2 ([batch..., length, features]), but got {shapes}."
        )
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")
    if features is not None:
        for (name, x), expected in zip(inputs.items(), (*features, features[1]), strict=True):
            if x.shape[-1] != expected:
                raise ValueError(
                    f"Incompatible input dimension, got {x.shape[-1]} but module expects {expected} ({name} {x.shape})."
                )
    return inputs_q, inputs_k, inputs_v


def source_of_keys(
    decode: bool, store_keys: bool, has_stored: bool, inputs_k: Any, inputs_v: Any, lengths: Any
) -> KeySource:
    """Returns where the keys of a call come from, and checks that its inputs fit that.

    "inputs": from its inputs. "cache": from the cache and from its inputs, which go into the cache. "to store": from
    its inputs, and later calls use these keys, too, for cross-attention. "stored": from an earlier call (`has_stored`).
    """
    if validation.flag("store_keys", store_keys) and not decode:
        raise ValueError("store_keys=True requires decode=True; pass decode=True, or leave store_keys out.")
    if store_keys and inputs_k is None:
        raise ValueError("store_keys=True requires inputs_k, but got None; store_keys is for cross-attention.")
    if not decode:
        return "inputs"
    if store_keys or not has_stored:
        return "to store" if store_keys else "cache"
    inputs = {"inputs_k": inputs_k, "inputs_v": inputs_v, "lengths": lengths}
    if given := [name for name, x in inputs.items() if x is not None]:
        raise ValueError(
            f"{' and '.join(given)} must be None if keys are already stored, but got an array; pass store_keys=True "
            "to replace them."
        )
    return "stored"


def reach(local_window_size: Any) -> int | None:
    """Returns the number of positions before its own that a query attends to; None means all."""
    window = check_window(local_window_size)
    return None if window is None else window[0]
