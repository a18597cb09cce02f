"""How modules compute attention: directly, by the `CoreAttention` of a function, or by any function."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from flax_mha._src import run
from flax_mha._src.call.arguments import Arguments, canonical, check_sharding
from flax_mha._src.call.operands import Call, Context, Result
from flax_mha._src.core import validation
from flax_mha._src.run import Implementation
from flax_mha.cache.cached_attention import check_cache, in_order, over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.masks import ArrayMask, CausalMask, Mask

# Arguments of `attention_fn` that are arguments of `dot_product_attention`.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
# A call with others than these, such as `module`, which sows weights, is computed by the attention function itself.
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}
# Arguments that a module sets in every call, so that no `functools.partial` may set them.
FROM_MODULE = ("query", "key", "value", "dropout_rng", "dropout_rate", "module", "max_score_module")
EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")  # with which Flax computes
STATIC = (bool, int, float, str, tuple)  # types of arguments that are compared by their values


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """The attribute `core` of this package's attention functions: how modules compute calls directly."""

    function: Callable[..., Array]  # a wrapper that copies its attributes, as by `functools.wraps`, is another function
    defaults: Mapping[str, Any]  # of the function's arguments
    context: Context | None = None  # how the function splits sequences over devices
    run: Callable[[Call, Implementation | None], Result] = run.run  # computes a call, or explains it
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # set by `functools.partial`s of the function
    platform: str | None = None  # the platform to explain calls for, if it is not that on which they are computed

    def combine(self, arguments: Mapping[str, Any], without: Sequence[str], decoding: bool) -> dict[str, Any]:
        """Adds the preset arguments, except those named in `without`, to those that a module passes to the function."""
        if decoding and self.context is not None:
            raise ValueError(
                "decode must be False with context_parallel, which cannot split a cache along the sequence, but got "
                "True; decode with attention_fn=flax_mha.attention_fn."
            )
        result = dict(arguments)
        for name, preset in self.preset.items():
            if name not in self.defaults:
                raise TypeError(
                    f"flax_mha.attention_fn() got an unexpected keyword argument {name!r} from functools.partial"
                )
            if name not in without and not self._is_default(name, preset):
                self._check_preset(name, preset, result.get(name), decoding)
                result[name] = preset
        return result

    def _check_preset(self, name: str, preset: Any, given: Any, decoding: bool) -> None:
        if name in FROM_MODULE:
            raise ValueError(
                f"attention_fn must not set {name}, because the module sets it on every call; remove it from the "
                "functools.partial, and use the module's arguments."
            )
        if not self._is_default(name, given) and not _is_same(preset, given):
            raise ValueError(
                f"{name} must be given only once, but both the functools.partial in attention_fn and the module (or "
                "its call) set it; remove one of them."
            )
        if decoding and name.startswith(("query_", "key_value_")):
            raise ValueError(
                f"attention_fn must not set {name} while decoding, because the cache tracks positions; remove it "
                "from the functools.partial, and pass lengths in the call."
            )

    def _is_default(self, name: str, x: Any) -> bool:
        return x is None or _is_same(x, self.defaults[name])

    def computes(self, arrays: Sequence[Array], arguments: Mapping[str, Any]) -> bool:
        """Returns whether `run` can compute the call: no weights to sow, no einsums of Flax, no complex numbers."""
        given = {name for name, x in arguments.items() if x is not None}
        return given <= DIRECT and not any(map(jnp.iscomplexobj, arrays))

    def call(self, query: Array, key: Array, value: Array, **arguments: Any) -> Result:
        """Runs a call with arguments of `attention_fn`; ignores others than the core's, like `module`."""
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
        known = _core_arguments(arguments)
        implementation = known.pop("implementation", None)
        if self.context is not None:
            sharding = check_sharding(known.get("qkv_sharding"), query.ndim)
            known["qkv_sharding"] = self.context.with_sharding(sharding, query.ndim)
        return self.run(canonical(query, key, value, platform=self.platform, **known), implementation)


def _is_same(x: Any, y: Any) -> bool:
    """Returns True for one object, or for equal numbers, strings or tuples; the values of arrays are not read."""
    return x is y or (isinstance(x, STATIC) and isinstance(y, STATIC) and x == y)


def _core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turns arguments of `attention_fn` into those of `dot_product_attention`; leaves out others, such as `module`."""
    dropout = ("dropout_rate", "dropout_rng") if arguments.get("deterministic") else ()
    known = {name: x for name, x in arguments.items() if name in CORE and name not in dropout and x is not None}
    return known | {"return_max_score": arguments.get("max_score_module") is not None}


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


def attend(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    arguments: dict[str, Any],
    latent: Latent | None,
) -> Float[Array, "*B T N Hv"]:
    """Computes attention by the core or, if it cannot, by the attention function."""
    if latent is not None:
        key, value = latent.expand(key)
    if core is not None and core.computes((query, key, value), arguments):
        return core.call(query, key, value, **arguments).output
    return (attention_fn if core is None else core.function)(query, key, value, **arguments)


def decode(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
    latent: Latent | None,
) -> tuple[Array, tuple[Array, ...]]:
    """Computes attention over a cache by the core or, if it cannot, by the attention function; adds the new cache."""
    arguments.pop("is_causal", None)  # decoding is always causal
    if cache.scale is None:
        key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    if core is None or not core.computes((query,), arguments):
        return _decode_by(attention_fn, core, query, key, value, cache, lengths, arguments, latent)
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments) | {"lengths": lengths, "latent": latent, "platform": core.platform}
    output, new, *_ = over_cache(core.run, query, key, value, cache, **known)
    return output, new.arrays


def _decode_by(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    lengths: Any,
    arguments: dict[str, Any],
    latent: Latent | None,
) -> tuple[Array, tuple[Array, ...]]:
    """Decodes by an attention function, which gets all keys and values, and a mask of the visible ones."""
    mask, window_size = arguments.pop("mask", None), arguments.pop("local_window_size", None)
    window = check_cache(cache, arguments.get("bias"), mask, window_size)
    appended = cache.append(key, value, lengths)
    index = jnp.maximum(cache.index, 0)
    (keys, values), first = appended.cache.floats(key.dtype), jnp.zeros_like(index)
    if cache.window is not None:
        keys, values, first = in_order(cache, key, value)
    if latent is not None:
        keys, values = latent.expand(keys)
    steps = cache.counted(query.shape[-3])
    q_idx = (index[..., None] + steps)[..., :, None]
    kv_idx = (first[..., None] + cache.counted(keys.shape[-3]))[..., None, :]
    visible = (kv_idx >= 0) & (kv_idx <= q_idx) & (steps < appended.tokens[..., None])[..., :, None]
    if window is not None and window[0] is not None:
        visible = visible & (kv_idx >= q_idx - window[0])
    visible = jnp.broadcast_to(visible[..., None, :, :], (*cache.batch, 1, *visible.shape[-2:]))
    by_score_mod = "score_mod" in arguments
    flax_computes = core is None or jnp.iscomplexobj(query) or any(map(arguments.get, EINSUMS))
    if isinstance(mask, Mask) or by_score_mod or not flax_computes:
        arguments = arguments | {"query_offset": index, "key_value_offset": first}
    if mask is not None and not isinstance(mask, Mask):
        sizes = (query.shape[-3], keys.shape[-3], query.shape[-2], *keys.shape[-2:], values.shape[-1])
        visible, mask = validation.mask(mask, validation.Shape(cache.batch, *sizes)) & visible, None
    if mask is not None or (core is not None and by_score_mod):
        # With a causal mask, lookups by position can be checked.
        mask = CausalMask() & (ArrayMask(visible) if mask is None else mask & ArrayMask(visible))
    arguments["mask"] = visible if mask is None else mask
    output = (attention_fn if core is None else core.function)(query, keys, values, **arguments)
    return appended.checked(output), appended.cache.arrays
