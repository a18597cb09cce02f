"""The call of a module, of `flax.nnx` and `flax.linen` alike: from its inputs to its output and what caches then hold.

What Flax's two APIs do differently, the modules pass in a `FlaxModule`.
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

from flax_mha.cache.cached_attention import over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.call.arguments import Arguments, canonical, check_sharding, check_window
from flax_mha.call.operands import Call
from flax_mha.core import validation
from flax_mha.distributed import tensor_parallel
from flax_mha.distributed.split import names_of
from flax_mha.impl.registry import Implementation
from flax_mha.masks import Mask
from flax_mha.modules import sequences
from flax_mha.modules.attention_fn import CoreAttention
from flax_mha.modules.decode import decode_by

KeySource = Literal["inputs", "cache", "stored", "to store"]
Layer = Callable[[Array], Array]
Arrays = tuple[Array, ...]
OPTIONS = ("implementation", "scale", "local_window_size", "logits_soft_cap")
# Arguments of `attention_fn` that the core knows. Of a call with others the function itself takes care.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}


class FlaxModule(NamedTuple):
    """The layers and variables of a module in one call."""

    query: Layer  # projects queries [B..., T, D] to heads [B..., T, N, H]
    key: Layer  # to [latent, rotary key], if there is a `latent`
    value: Layer | None  # None if there is a `latent`
    out: Layer  # projects heads back to features
    norms: tuple[Layer, Layer] | None  # of the heads of queries and keys
    sinks: Array | None  # [N]
    cache: Callable[[Array, Array], Arrays | None]  # reads it, given query and key; None where this call makes it
    stored: Callable[[], Arrays] | None  # reads keys, values and lengths that an earlier call stored; None if none did
    arguments: dict[str, Any]  # Flax's own of the attention function
    features: tuple[int, int] | None = None  # of queries, and of keys and values; None where the projections check them
    norms_after_rope: bool = False  # if they normalize what is rotated
    gate: Layer | None = None  # projects inputs [B..., T, D] to what the sigmoid makes a gate [B..., T, N, H] of
    latent: Latent | None = None  # computes keys and values of heads; None if `key` and `value` do

    def output(self, x: Float[Array, "*B T N H"], inputs_q: Float[Array, "*B T D"]) -> Float[Array, "*B T Dout"]:
        """Multiplies the attention's output by the gate that the inputs make, if there is one, and projects it back."""
        if self.gate is None:
            return self.out(x)
        gate = jax.nn.sigmoid(self.gate(inputs_q))
        # Where there is no output the gate is not asked: what stands in padding stays there.
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
    """Computes the output of a module, and what its cache then holds: keys, values, and lengths or index and scale.

    Of the module only attributes are read; its call documents the other arguments.
    """
    keys = source_of_keys(decode, store_keys, flax.stored is not None, inputs_k, inputs_v, lengths)
    self_attention = keys == "cache" or (keys == "inputs" and (inputs_k is None or inputs_k is inputs_q))
    by_sequence: dict[str, Array | None] = {}
    if segment_ids is not None or lengths is not None:
        by_sequence = sequences.arguments_of(segment_ids, lengths, self_attention, decode, keys == "cache")
    core = core_of(module.attention_fn)
    if keys == "stored":
        sequences.check_stored(module, {} if core is None else core.preset, mask, score_mod)
    query, key, value, used = _project(flax, keys, inputs_q, inputs_k, inputs_v)
    if used is not None:  # by the keys that are stored, not by the padding after them
        takes_lengths = core is not None and core.context is None
        mask = sequences.mask_of_stored(by_sequence, mask, used, key, takes_lengths)
    cache = _cache_of(module, flax, query, key, value) if keys == "cache" else None
    if module.rope is not None or positions is not None:
        start = 0 if cache is None else jnp.maximum(cache.index, 0)
        rotated = None if flax.latent is None else key.shape[-1] - flax.latent.size
        query, key = sequences.rotate(
            query, key, module.rope, positions, self_attention, start, keys == "stored", rotated
        )
    if flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    ours = by_sequence | {"mask": mask, "bias": bias, "sinks": flax.sinks, "score_mod": score_mod}
    ours |= {name: getattr(module, name) for name in OPTIONS}
    ours["is_causal"] = is_causal if is_causal is not False and keys in ("inputs", "cache") else None
    ours["max_score_module"] = module if sow_max_score else None
    ours["qkv_sharding"] = _attention_sharding(module, core, qkv_sharding, query)
    # Without those that are not given, any function with Flax's signature will do.
    arguments = flax.arguments | {name: x for name, x in ours.items() if x is not None}
    if cache is not None:
        x, new = _decoding(module.attention_fn, core, query, key, value, cache, lengths, arguments, flax.latent)()
        arrays = new.key, new.value, new.index
        return flax.output(x, inputs_q), arrays if new.scale is None else (*arrays, new.scale)
    if flax.latent is not None:
        key, value = flax.latent.expand(key)
    if core is not None and core.preset:
        # Of queries that use stored keys the positions are not known.
        arguments = core.combine(arguments, without=("is_causal",) if keys in ("stored", "to store") else ())
    if core is not None and knows_all((query, key, value), arguments):
        x = core.run(*call_of(core, query, key, value, **arguments))[0]
    else:
        x = (module.attention_fn if core is None else core.function)(query, key, value, **arguments)
    stored = (key, value, sequences.lengths_of(by_sequence, key)) if keys == "to store" else None
    return flax.output(x, inputs_q), stored


# The arguments of a module's call that it takes as they are.
PASSED_ON = frozenset(inspect.signature(call_module).parameters) - {"module", "flax", "decode"}


def _project(
    flax: FlaxModule, keys: KeySource, inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Array | None]:
    """Returns query, key and value, normalized unless rotation comes first, and the lengths of keys that are stored."""
    used = None
    if keys == "stored":
        check_inputs(inputs_q, inputs_q, inputs_q, None)
        query = flax.query(inputs_q)
        key, value, used = flax.stored()  # type: ignore[misc]
    else:
        inputs_k, inputs_v = check_inputs(inputs_q, inputs_k, inputs_v, flax.features)
        query, key = flax.query(inputs_q), flax.key(inputs_k)
        value = key[..., :0] if flax.value is None else flax.value(inputs_v)
    if not flax.norms_after_rope:
        query, key = _normalize(flax, query, key, keys)
    return query, key, value, used


def _normalize(
    flax: FlaxModule, query: Array, key: Array, keys: KeySource
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"]]:
    """Normalizes query and key; stored keys were normalized when they were stored."""
    if flax.norms is None:
        return query, key
    return flax.norms[0](query), key if keys == "stored" else flax.norms[1](key)


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *arguments: Any, **options: Any) -> Array:
    """Multiplies as `jax.lax.dot_general`; the result is split as its operands are, if their types say how."""
    by_types = any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in (lhs, rhs))
    if by_types and options.get("out_sharding") is None:
        options["out_sharding"] = tensor_parallel.sharding_of_product(lhs, rhs, dimension_numbers)
    return lax.dot_general(lhs, rhs, dimension_numbers, *arguments, **options)


def _cache_of(module: Any, flax: FlaxModule, query: Array, key: Array, value: Array) -> KVCache | None:
    arrays = flax.cache(query, key)
    if arrays is None:
        return None
    value_size = None if flax.latent is None else flax.latent.size
    cache = KVCache.of_window(*arrays, window=reach(module.local_window_size), value_size=value_size)
    cache.check_fits(key, value, query.shape[-3])
    return cache


def core_of(attention_fn: Callable[..., Array]) -> CoreAttention | None:
    """Returns the core of an attention function, through `functools.partial`s that set keywords; None of another's."""
    function: Any = attention_fn
    preset: dict[str, Any] = {}
    # Of exactly these types: a subclass may do more in its call.
    while type(function) in (functools.partial, jax.tree_util.Partial) and not function.args:
        function, preset = function.func, function.keywords | preset
        inner = getattr(function, "fun", None)  # by which jax.tree_util.Partial keeps another partial
        function = inner if type(inner) is functools.partial else function
    core = getattr(function, "core", None)
    if not isinstance(core, CoreAttention) or core.function is not function:
        return None
    return dataclasses.replace(core, preset={**core.preset, **preset}) if preset else core


def knows_all(arrays: Sequence[Array], arguments: Mapping[str, Any]) -> bool:
    """Returns whether the core knows all arguments: no weights to sow, no einsums of Flax, no complex numbers."""
    given = {name for name, x in arguments.items() if x is not None}
    return given <= DIRECT and not any(map(jnp.iscomplexobj, arrays))


def call_of(
    core: CoreAttention, query: Array, key: Array, value: Array, **arguments: Any
) -> tuple[Call, Implementation | None]:
    """Makes the call with arguments of `attention_fn`, without those that the core does not know."""
    promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
    query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments)
    implementation = known.pop("implementation", None)
    if core.context is not None:
        sharding = check_sharding(known.get("qkv_sharding"), query.ndim)
        known["qkv_sharding"] = core.context.with_sharding(sharding, query.ndim)
    return canonical(query, key, value, **known), implementation


def _core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the arguments of `dot_product_attention` among those of `attention_fn`."""
    dropout = ("dropout_rate", "dropout_rng") if arguments.get("deterministic") else ()
    known = {name: x for name, x in arguments.items() if name in CORE and name not in dropout and x is not None}
    if not isinstance(known.get("mask"), Mask | None):
        known["mask"] = validation.mask_of_numbers(known["mask"])
    return known | {"return_max_score": arguments.get("max_score_module") is not None}


def _decoding(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
    latent: Latent | None,
) -> Callable[[], Any]:
    """Returns what computes attention of new tokens over the cache and themselves, and adds them to the cache.

    The function itself is called only if it is not ours (`functools.partial`s aside), or if it has to do what only it
    can: sow the weights, compute complex numbers or quantized products.
    """
    if core is not None:
        attention_fn = core.function
        arguments = core.combine(arguments, decoding=True) if core.preset or core.context else arguments
    arguments.pop("is_causal", None)  # the call is causal anyhow
    if cache.scale is None:
        key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    if core is None or not knows_all((query,), arguments):
        is_ours = core is not None
        return functools.partial(decode_by, attention_fn, is_ours, query, key, value, cache, lengths, arguments, latent)
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments)
    return functools.partial(over_cache, core.run, query, key, value, cache, lengths=lengths, latent=latent, **known)


def _attention_sharding(module: Any, core: CoreAttention | None, qkv_sharding: Any, query: Array) -> Any:
    """Returns how the query of the attention is split: as the call or a partial says, or by `head_axis`.

    The latter on a mesh with Auto axes, as far as the module knows what else is split.
    """
    if module.head_axis is None:
        return qkv_sharding
    preset = None if core is None else core.preset.get("qkv_sharding")
    qkv_sharding, mesh = preset if qkv_sharding is None else qkv_sharding, jax.sharding.get_abstract_mesh()
    if qkv_sharding is not None or mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return qkv_sharding
    named = names_of(tensor_parallel.mesh_axis(module.head_axis))
    # Other mesh axes may split the batch, and it is not known how, unless the attention function knows it by itself.
    names_batch = core is not None and core.context is not None
    alone = names_batch or all(name in named or size == 1 for name, size in mesh.shape.items())
    return PartitionSpec(*(None,) * (query.ndim - 2), named or None, None) if alone else None


def check_inputs(
    inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None, features: tuple[int, int] | None
) -> tuple[Array, Array]:
    """Returns keys, by default the queries, and values, by default the keys, if they are [batch..., length, features].

    They fit each other, and `features`, of queries and of keys and values, if that is given.
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
    if store_keys is not False:
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


def reach(local_window_size: Any) -> int | None:
    """Returns how many positions before its own a query sees; None means all."""
    window = None if local_window_size is None else check_window(local_window_size)
    return None if window is None else window[0]
