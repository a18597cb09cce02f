"""`call_module`: the call of every module; a `FlaxModule` holds what differs between `flax.nnx` and `flax.linen`."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float

from flax_mha._src.call.arguments import check_is_causal, check_window
from flax_mha._src.core import validation
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.core.tracing import multiplies_bfloat16
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.distributed.split import names_of
from flax_mha._src.modules import sequences
from flax_mha._src.modules.core import CoreAttention, Heads, core_of, decode
from flax_mha._src.modules.indexer import IndexLayers, choose
from flax_mha._src.modules.output import apply_gate, as_stored, exclude_own
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.cache.shared import Appended, SharedKV
from flax_mha.masks import Mask

# Where the keys of a call come from. "inputs": from its inputs. "cache": from the cache and from its inputs, which are
# added to the cache. "to store": from its inputs, and later calls use these keys, too. "stored": from an earlier call.
# "shared": from the call of another module, and from that module's cache.
KeySource = Literal["inputs", "cache", "stored", "to store", "shared"]
Layer = Callable[[Array], Array]
Arrays = tuple[Array, ...]
OPTIONS = ("implementation", "scale", "local_window_size", "logits_soft_cap")
# Attention functions of Flax and JAX, whose masks are arrays.
FUNCTIONS_OF_ARRAYS = [nnx.dot_product_attention, flax.linen.dot_product_attention, jax.nn.dot_product_attention]
if hasattr(nnx, "dot_product_attention_with_rope"):  # from Flax 0.12.12 on
    FUNCTIONS_OF_ARRAYS.append(nnx.dot_product_attention_with_rope)


class FlaxModule(NamedTuple):
    """What `call_module` needs from a module of nnx or linen: layers, parameters, cache, arguments of the attention."""

    module: Any  # has the options
    query: Layer  # projects inputs [B..., T, D] to queries [B..., T, N, H]
    key: Layer | None  # projects inputs to keys; with `latent`, to the one key [latent, rotary key] of all heads
    out: Layer  # projects the attention's output [B..., T, N, Hv] back to features
    sinks: Array | None  # [N]
    cache: Callable[[Array, Array], Arrays | None]  # returns the cache, given query and key; None if this call makes it
    write: Callable[[Arrays, bool], None]  # sets the cache to new arrays or, if True, to keys, values and lengths
    arguments: dict[str, Any]  # arguments of the attention function as Flax's module passes them
    value: Layer | None = None  # projects inputs to values; None with `latent`, or if values are the projected keys
    value_norm: Layer | None = None
    norms: tuple[Layer, Layer | None] | None = None  # of queries and of keys
    norms_after_rope: bool = False
    gate: Layer | None = None  # projects inputs to the gate before its activation, [B..., T, N, Hv] or [B..., T, N]
    latent: Latent | None = None  # computes keys and values of heads from the latents that `key` returns
    stored: Arrays | None = None  # keys, values and lengths that a call stored
    indexer: IndexLayers | None = None  # chooses the keys that queries attend to
    features: tuple[int, int] | None = None  # of queries, and of keys and values; None if the projections check them
    exclusive: bool = False  # removes the component along each token's own value
    gate_activation: str = "sigmoid"
    out_norm: Layer | None = None  # over all features of the heads
    clip_qkv: float | None = None  # the largest magnitude of queries, keys and values, before they are rotated
    value_scale: float | None = None  # the factor of values, after their norm

    def output(self, x: Float[Array, "*B T N Hv"], value: Array, inputs_q: Array) -> Float[Array, "*B T Dout"]:
        """Applies the options for attention's output (`exclusive`, gate, norm), and projects it back to features."""
        x = exclude_own(x, value) if self.exclusive else x
        x = x if self.gate is None else apply_gate(x, self.gate(inputs_q), self.gate_activation)
        return self.out(x if self.out_norm is None else self.out_norm(x))


class Given(NamedTuple):
    """The arguments with which a user calls a module."""

    decode: bool
    inputs_q: Float[Array, "*B T D"]
    inputs_k: Float[Array, "*B S Dk"] | None = None
    inputs_v: Float[Array, "*B S Dv"] | None = None
    mask: Array | Mask | None = None
    is_causal: bool | None = None  # None: as the attention function sets it, otherwise causal only while decoding
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

    @property
    def is_cross(self) -> bool:
        return self.inputs_k is not None and self.inputs_k is not self.inputs_q


PASSED_ON = frozenset(Given._fields) - {"decode"}  # arguments of a module's call that it passes on to `call_module`


def call_module(flax: FlaxModule, given: Given) -> Any:
    """Computes a module's call and updates its cache; returns its output or, with `return_kv`, (output, `SharedKV`)."""
    _check_sharing(flax, given)
    keys, core = _source_of_keys(given, flax.stored is not None), core_of(flax.module.attention_fn)
    if keys == "stored":
        sequences.check_stored(flax.module, {} if core is None else core.preset, given.mask, given.score_mod)
    shares_kv = flax.value is None and flax.latent is None and keys != "shared"
    inputs = _check_inputs(given, None if keys in ("stored", "shared") else flax.features, shares_kv)
    _check_exclusive(flax.exclusive, given, keys)
    self_attention = keys in ("cache", "shared") or (keys == "inputs" and not given.is_cross)
    is_cached = keys == "cache" or (given.kv is not None and given.kv.cache is not None)
    per_sequence: dict[str, Any] = {}
    if given.segment_ids is not None or given.lengths is not None:
        inputs, per_sequence = sequences.per_sequence_arguments(
            inputs, given.segment_ids, given.lengths, self_attention, given.decode, is_cached
        )
    heads, cache, lengths = _heads(flax, given, keys, inputs, self_attention)
    takes_lengths = core is not None and core.context is None
    per_sequence |= {"key_value_seq_lengths": lengths} if lengths is not None and takes_lengths else {}
    arguments, is_no_mask = _arguments(flax, core, keys, given, per_sequence, heads[0], decoding=cache is not None)
    if lengths is not None and not takes_lengths:
        arguments["mask"] = sequences.mask_padding(arguments.get("mask"), lengths, heads[1])
    top_k, index_cache = 0, None
    if flax.indexer is not None:
        top_k, index_cache = _index(flax, flax.indexer, core, given, inputs[0], cache, arguments)
    x, appended = _attend(flax, core, given, heads, cache, arguments, top_k)
    own = as_stored(cache, *heads[1:]) if flax.exclusive else heads[2]
    output = flax.output(validation.nan_if(is_no_mask, x), own, inputs[0])
    if keys == "to store":
        lengths = sequences.key_lengths(per_sequence.get("key_value_seq_lengths"), heads[1])
        flax.write((*heads[1:], lengths), True)
    elif keys == "cache" and appended is not None:
        flax.write(appended.cache.arrays, False)
    if flax.indexer is not None and index_cache is not None:
        flax.indexer.write(tuple(x for x in (index_cache.key, index_cache.scale) if x is not None))
    if not given.return_kv:
        return output
    return output, given.kv or SharedKV(*heads[1:], cache, appended, given.decode, given.lengths is not None)


def _attend(
    flax: FlaxModule,
    core: CoreAttention | None,
    given: Given,
    heads: Heads,
    cache: KVCache | None,
    arguments: dict[str, Any],
    top_k: int,
) -> tuple[Float[Array, "*B T N Hv"], Appended | None]:
    """Computes the attention of projected heads, over the cache if there is one.

    `core` is None if the module's `attention_fn` is not from this package. `top_k` is the indexer's; 0 without one, or
    if a user chose the keys. Returns the output, and the cache with the new keys and values (None without a cache).
    """
    if cache is not None:
        appended = None if given.kv is None else given.kv.appended
        function, latent = flax.module.attention_fn, flax.latent
        return decode(function, core, heads, cache, given.lengths, latent, appended, arguments, top_k)
    heads = heads if flax.latent is None else (heads[0], *flax.latent.expand(heads[1]))
    if core is not None and core.computes(heads, arguments):
        return core.compute(*core.call_of(*heads, **arguments)).output, None
    return (flax.module.attention_fn if core is None else core.function)(*heads, **arguments), None


def _index(
    flax: FlaxModule,
    layers: IndexLayers,
    core: CoreAttention | None,
    given: Given,
    inputs: Array,
    cache: KVCache | None,
    arguments: dict[str, Any],
) -> tuple[int, KVCache | None]:
    """Adds the chosen `key_indices` to `arguments`; returns `top_k` (0 if a user chose) and the cache of index keys."""
    if core is None:
        raise ValueError("attention_fn must be flax_mha.attention_fn with an indexer, but got another function.")
    query, key, weights = layers.project(inputs)
    start = 0 if cache is None else jnp.maximum(cache.index, 0)
    if flax.module.rope is not None:
        rope, options, size = flax.module.rope, layers.indexer, flax.module.qk_rope_head_dim
        fraction = rope.fraction if options.rotary_last else rope.fraction * size / options.head_dim
        rope = dataclasses.replace(rope, interleaved=options.interleaved, fraction=fraction)
        by_position = (rope, given.positions, True, start, False, False, size if options.rotary_last else None)
        query, key = sequences.rotate(query, key, *by_position)
    index_cache = layers.cached(key, cache) if given.decode else None
    sow_to = flax.arguments.get("module")
    lists, index_cache = choose(layers.indexer, (query, key, weights), index_cache, given.lengths, arguments, sow_to)
    arguments |= {} if lists is None else {"key_indices": lists}
    return (layers.indexer.top_k if given.key_indices is None else 0), index_cache


def _source_of_keys(given: Given, has_stored: bool) -> KeySource:
    if validation.flag("store_keys", given.store_keys) and not given.decode:
        raise ValueError("store_keys=True requires decode=True; pass decode=True, or leave store_keys out.")
    if given.store_keys and given.inputs_k is None:
        raise ValueError("store_keys=True requires inputs_k, but got None; store_keys is for cross-attention.")
    if given.kv is not None:
        return "shared"
    if not given.decode:
        return "inputs"
    if given.store_keys or not has_stored:
        return "to store" if given.store_keys else "cache"
    if names := [name for name in ("inputs_k", "inputs_v", "lengths") if getattr(given, name) is not None]:
        raise ValueError(
            f"{' and '.join(names)} must be None if keys are already stored, but got an array; pass store_keys=True "
            "to replace them."
        )
    return "stored"


def _check_sharing(flax: FlaxModule, given: Given) -> None:
    """Raises a ValueError if only one of `reuse_kv` and `kv` is set, or if cross-attention reuses or returns keys."""
    if flax.latent is not None:
        return
    validation.flag("return_kv", given.return_kv)
    reuses = flax.module.reuse_kv
    if not isinstance(given.kv, SharedKV | None) or reuses == (given.kv is None):
        expected = "the SharedKV that the call of an earlier layer returns with return_kv=True" if reuses else "None"
        fix = "" if reuses else "; create the module with reuse_kv=True"
        raise ValueError(f"kv must be {expected} if reuse_kv={reuses}, but got {type(given.kv).__name__}{fix}.")
    others = [x for x in (given.inputs_k, given.inputs_v) if x is not None and x is not given.inputs_q]
    if (reuses or given.return_kv) and (others or given.store_keys or flax.stored is not None):
        name = "reuse_kv=True" if reuses else "return_kv=True"
        raise ValueError(
            f"{name} requires self-attention, but got other inputs or stored keys; leave out inputs_k, inputs_v and "
            "store_keys."
        )


def _check_inputs(given: Given, features: tuple[int, int] | None, shares_kv: bool) -> tuple[Array, Array, Array]:
    inputs_q, inputs_k, inputs_v = given.inputs_q, given.inputs_k, given.inputs_v
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    if shares_kv and inputs_v is not inputs_k:
        raise ValueError(
            "inputs_v must be None with share_kv=True, because values are projections of inputs_k, but got an array; "
            "leave inputs_v out."
        )
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


def _check_exclusive(exclusive: bool, given: Given, keys: KeySource) -> None:
    if exclusive and (given.is_cross or keys not in ("inputs", "cache")):
        got = "inputs_k" if given.is_cross else "the kv of an earlier layer" if keys == "shared" else "stored keys"
        raise ValueError(f"exclusive=True requires self-attention, but got {got}; use exclusive=False for those.")


def _heads(
    flax: FlaxModule, given: Given, keys: KeySource, inputs: tuple[Array, Array, Array], self_attention: bool
) -> tuple[Heads, KVCache | None, Array | None]:
    """Returns normalized, rotated (query, key, value); the cache or None; and the lengths of stored keys or None."""
    inputs_q, inputs_k, inputs_v = inputs
    query, cache, lengths = flax.query(inputs_q), None, None
    if keys == "stored":
        key, value, lengths = flax.stored  # type: ignore[misc]
    elif given.kv is not None:
        key, value, cache = given.kv.key, given.kv.value, given.kv.cache
        number = getattr(flax.module, "num_kv_heads", None) or flax.module.num_heads
        shape, value_size = (*query.shape[:-2], number, query.shape[-1]), flax.module.value_dim or query.shape[-1]
        given.kv.check(shape, value_size, given.decode, given.lengths is not None)
    else:
        key = flax.key(inputs_k)  # type: ignore[misc]
        value = _value(flax, key, inputs_v)
    if not flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    if flax.clip_qkv is not None:
        query, *others = (jnp.clip(x, -flax.clip_qkv, flax.clip_qkv) for x in (query, key, value))
        key, value = (key, value) if keys in ("stored", "shared") else others  # those were clipped by an earlier call
    if keys == "cache":
        cache = _cache_of(flax, query, key, value, given.is_cross)
    if flax.module.rope is not None or given.positions is not None:
        start = 0 if cache is None else jnp.maximum(cache.index, 0)
        size = None if flax.latent is None else key.shape[-1] - flax.latent.size
        was_rotated = keys == "stored", keys == "shared"
        by_position = (flax.module.rope, given.positions, self_attention, start, *was_rotated, size)
        query, key = sequences.rotate(query, key, *by_position)
    if flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    return (query, key, value), cache, lengths


def _value(flax: FlaxModule, key: Array, inputs_v: Array) -> Array:
    """Returns projected values, or `key` with `share_kv`, after norm and scale. With `latent`: no features."""
    if flax.latent is not None:
        return key[..., :0]
    value = key if flax.value is None else flax.value(inputs_v)
    value = value if flax.value_norm is None else flax.value_norm(value)
    return value if flax.value_scale is None else value * flax.value_scale


def _normalize(flax: FlaxModule, query: Array, key: Array, keys: KeySource) -> tuple[Array, Array]:
    """Normalizes query and key if there are norms; stored and shared keys were normalized by an earlier call."""
    if flax.norms is None:
        return query, key
    normalize_query, normalize_key = flax.norms
    return normalize_query(query), key if keys in ("stored", "shared") else normalize_key(key)  # type: ignore[misc]


def _cache_of(flax: FlaxModule, query: Array, key: Array, value: Array, is_cross: bool) -> KVCache | None:
    """Returns the module's cache after checking that it fits key and value; None if this call creates the cache."""
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
    cache = KVCache.of_arrays(reach(flax.module.local_window_size), flax.latent and flax.latent.size, arrays)
    cache.check_fits(key, value, queries)
    return cache


def reach(local_window_size: Any) -> int | None:
    """Returns how many earlier positions a query attends to with this `local_window_size`; None means all."""
    window = check_window(local_window_size)
    return None if window is None else window[0]


def _arguments(
    flax: FlaxModule,
    core: CoreAttention | None,
    keys: KeySource,
    given: Given,
    per_sequence: dict[str, Any],
    query: Array,
    decoding: bool,
) -> tuple[dict[str, Any], Bool[Array, ""] | None]:
    """Merges the attention function's arguments from Flax, module options, the call, and a `functools.partial`.

    Also returns a flag for `nan_if`: whether a mask of traced numbers holds any but 0 and 1; None for other masks.
    """
    ours = {name: getattr(flax.module, name) for name in OPTIONS} | {"sinks": flax.sinks} | per_sequence
    ours |= {name: getattr(given, name) for name in ("mask", "bias", "score_mod", "key_indices")}
    ours["is_causal"] = _is_causal(given, core)
    ours["max_score_module"] = flax.module if given.sow_max_score else None
    ours["qkv_sharding"] = _attention_sharding(flax.module, core, given.qkv_sharding, query)
    without = ("is_causal",) if keys in ("stored", "to store") else ()  # their queries have no known positions
    # Arguments of None are left out, so that a function with only Flax's signature works, too.
    arguments = flax.arguments | {name: x for name, x in ours.items() if x is not None and name not in without}
    if core is None:
        _check_takes_mask(flax.module.attention_fn, arguments.get("mask"))
    else:
        arguments = core.combine(arguments, ("is_causal",), decoding)
    if decoding:
        arguments["is_causal"] = ours["is_causal"]  # None is not the same as Flax's default of False
    elif given.is_causal is None and ours["is_causal"]:
        check_is_causal(ours["is_causal"], arguments.get("mask"))
    mask, is_no_mask = arguments.get("mask"), None
    if (core is not None or keys != "inputs") and not isinstance(mask, Mask | None):
        arguments["mask"], is_no_mask = validation.mask_of_numbers(mask)
    return arguments, is_no_mask


def _is_causal(given: Given, core: CoreAttention | None) -> bool | None:
    """Returns `is_causal` of the call or, if that is None, of a `functools.partial` around the attention function."""
    if given.is_causal is None and core is not None:
        return core.preset.get("is_causal")
    return given.is_causal


def _check_takes_mask(attention_fn: Callable[..., Array], mask: Array | Mask | None) -> None:
    """Raises a ValueError if `mask` is a mask object and `attention_fn` a function of Flax or JAX, which wants arrays.

    Looks through `functools.partial`, one of which may set the mask if the module sets none, and through wrappers of
    JAX and Flax, such as `jax.jit`. Functions of users may accept mask objects.
    """
    function: Any = attention_fn
    while not any(function is one for one in FUNCTIONS_OF_ARRAYS):
        if isinstance(function, functools.partial):
            mask = function.keywords.get("mask") if mask is None else mask
            function = getattr(function.func, "fun", function.func)  # `fun`: in a Partial of a functools.partial
        elif _is_of_flax_or_jax(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return
    if isinstance(mask, Mask):
        raise ValueError(
            f"mask must be an array for attention_fn={function.__module__}.{function.__name__}, but got a "
            f"{type(mask).__name__}; pass an array, or leave attention_fn at flax_mha.attention_fn: it, "
            "functools.partial of it and flax_mha.context_parallel take mask objects."
        )


def _is_of_flax_or_jax(function: Any) -> bool:
    """Returns whether the code of a function or of its type is Flax's or JAX's; `__module__` is copied by wrappers."""
    is_function = isinstance(function, types.FunctionType)
    name = function.__globals__.get("__name__", "") if is_function else type(function).__module__
    return name.split(".")[0] in ("flax", "jax", "jaxlib")


def _attention_sharding(module: Any, core: CoreAttention | None, qkv_sharding: Any, query: Array) -> Any:
    """Returns the `qkv_sharding` of the call or of a `functools.partial`, else one that splits heads over `head_axis`.

    Heads are split only on a mesh of Auto axes, and only if no other axis may split the batch; else returns None.
    """
    if module.head_axis is None:
        return qkv_sharding
    preset = None if core is None else core.preset.get("qkv_sharding")
    qkv_sharding, mesh = preset if qkv_sharding is None else qkv_sharding, jax.sharding.get_abstract_mesh()
    if qkv_sharding is not None or mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return qkv_sharding
    named = names_of(tensor_parallel.mesh_axis(module.head_axis))
    names_batch = core is not None and core.context is not None  # `context_parallel` knows which axes split the batch
    alone = names_batch or all(name in named or size == 1 for name, size in mesh.shape.items())
    return PartitionSpec(*(None,) * (query.ndim - 2), named or None, None) if alone else None


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *arguments: Any, **options: Any) -> Array:
    """`lax.dot_general` for projections: infers `out_sharding` on Explicit meshes; faster for bfloat16 on CPUs."""
    are_arrays = isinstance(lhs, jax.Array) and isinstance(rhs, jax.Array)
    if not are_arrays:
        # A quantized kernel is an object of the library that has replaced `lax.dot_general`.
        return lax.dot_general(lhs, rhs, dimension_numbers, *arguments, **options)
    by_types = any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in (lhs, rhs))
    if by_types and options.get("out_sharding") is None:
        options["out_sharding"] = tensor_parallel.sharding_of_product(lhs, rhs, dimension_numbers)
    is_plain = options.get("preferred_element_type") or products_are_replaced()
    if is_plain or not (lhs.dtype == rhs.dtype == jnp.bfloat16 and multiplies_bfloat16()):
        return lax.dot_general(lhs, rhs, dimension_numbers, *arguments, **options)
    # With a bfloat16 result, or a single row, XLA's CPU would convert all weights to float32. The barrier keeps it from
    # reading `lhs` transposed, for which it has no product.
    (contracted, _), (batch, _) = dimension_numbers
    is_row = not batch and 0 not in contracted and all(n == 1 for i, n in enumerate(lhs.shape) if i not in contracted)
    rows = lax.optimization_barrier(jnp.broadcast_to(lhs, (2, *lhs.shape[1:])) if is_row else lhs)
    options["preferred_element_type"] = jnp.float32
    product = lax.dot_general(rows, rhs, dimension_numbers, *arguments, **options).astype(jnp.bfloat16)
    return product[:1] if is_row else product
