"""How modules compute or explain attention: by a `CoreAttention` or, if it cannot, by calling `attention_fn`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from flax_mha._src import run
from flax_mha._src.call.arguments import Arguments, canonical, check_sharding
from flax_mha._src.call.operands import Call, Context, Result
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import Platform
from flax_mha._src.explanation import Explanation
from flax_mha._src.run import Implementation
from flax_mha.cache.cached_attention import Visibility, check_cache, in_order, nan_without, over_cache
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent
from flax_mha.cache.shared import Appended
from flax_mha.masks import Mask
from flax_mha.masks.base import merged, visible_at

# Arguments of `attention_fn` that are arguments of `dot_product_attention`.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
# A call with an argument that is not in DIRECT, such as `module`, which sows weights, calls the attention function.
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}
# Arguments that a module sets in every call, so that no `functools.partial` may set them.
FROM_MODULE = ("query", "key", "value", "dropout_rng", "dropout_rate", "module", "max_score_module")
EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")  # for Flax's own function
P = ParamSpec("P")
Heads = tuple[Array, Array, Array]  # query, key and value
STATIC = (bool, int, float, str, tuple)  # types of arguments that are compared by their values


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """The attribute `core` of an attention function of this package; modules use it instead of calling the function."""

    function: Callable[..., Array]  # the function itself, to recognize wrappers that copy its attributes
    defaults: Mapping[str, Any]  # of the function's arguments
    context: Context | None = None  # how the function splits sequences over devices
    run: Callable[[Call, Implementation | None], Result] = run.run  # computes a call, or explains it
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # set by `functools.partial`s of the function
    platform: str | None = None  # the platform to explain calls for; None: the one that computes them
    change: Callable[[Call], Call] = lambda call: call  # what the function does to a call before it is computed

    def compute(self, call: Call, implementation: Implementation | None) -> Result:
        """Applies `change` to a call and passes it to `run`, which chooses the engine if `implementation` is None."""
        return self.run(self.change(call), implementation)

    def combine(self, arguments: Mapping[str, Any], without: Sequence[str], decoding: bool) -> dict[str, Any]:
        """Adds `preset`, the arguments from `functools.partial`s, except those in `without`, to a module's `arguments`.

        Raises a TypeError if a preset is unknown, and a ValueError if the module sets it always, or otherwise. If
        `decoding`, also refuses preset offsets, lengths and segment ids, and context_parallel.
        """
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
        """Returns whether `run` can compute a call: all arguments are in `DIRECT`, or None, and no array is complex.

        If not, modules call the attention function instead.
        """
        given = {name for name, x in arguments.items() if x is not None}
        return given <= DIRECT and not any(map(jnp.iscomplexobj, arrays))

    def call_of(self, query: Array, key: Array, value: Array, **arguments: Any) -> tuple[Call, Implementation | None]:
        """Converts arguments of `attention_fn` to those of `run`; drops the ones that `run` lacks, such as `module`."""
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
        known = _core_arguments(arguments)
        implementation = known.pop("implementation", None)
        if self.context is not None:
            sharding = check_sharding(known.get("qkv_sharding"), query.ndim)
            known["qkv_sharding"] = self.context.with_sharding(sharding, query.ndim)
        return canonical(query, key, value, platform=self.platform, **known), implementation


def _is_same(x: Any, y: Any) -> bool:
    """Returns whether `x` and `y` are the same object, or equal numbers, strings or tuples; never compares arrays."""
    return x is y or (isinstance(x, STATIC) and isinstance(y, STATIC) and x == y)


def _core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the arguments of `attention_fn` that `dot_product_attention` takes, too; adds `return_max_score`."""
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


def decode(
    attention_fn: Callable[..., Array],
    core: CoreAttention | None,
    heads: Heads,
    cache: KVCache,
    lengths: Any,
    latent: Latent | None,
    appended: Appended | None,
    arguments: dict[str, Any],
    top_k: int = 0,
) -> tuple[Float[Array, "*B T N Hv"], Appended]:
    """Adds new keys and values to a cache, unless `appended` has them already, and computes attention over the cache.

    `core` computes the attention or, if it cannot, `attention_fn`. `latent` is None unless keys and cache hold latents.
    For `top_k`, see `over_cache`. Returns the output and the cache with the new tokens.
    """
    query, key, value = heads
    if cache.scale is None:
        key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    appended = Appended(*cache.append(key, value, lengths)) if appended is None else appended
    if core is None or not core.computes((query,), arguments):
        function = attention_fn if core is None else core.function
        output = _decode_by(
            function,
            core is not None,
            (query, key, value),
            cache,
            appended,
            latent,
            is_padded=lengths is not None,
            **arguments,
        )
        return output, appended
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    known = _core_arguments(arguments) | {"lengths": lengths, "latent": latent, "platform": core.platform}
    output, *_ = over_cache(core.compute, query, key, value, cache, top_k=top_k, appended=appended, **known)
    return output, appended


def _decode_by(
    function: Callable[..., Array],
    is_ours: bool,
    heads: Heads,
    cache: KVCache,
    appended: Appended,
    latent: Latent | None,
    is_padded: bool,
    mask: Any = None,
    is_causal: bool | None = None,
    local_window_size: Any = None,
    **arguments: Any,
) -> Float[Array, "*B T N Hv"]:
    """Computes a decoding step by calling any attention function with all cached keys, all values, and a mask.

    `is_ours` says whether the function is of this package, and so accepts mask objects and offsets.
    """
    query, key, value = heads
    window = check_cache(cache, arguments.get("bias"), mask, local_window_size)
    if cache.window is not None and "key_indices" in arguments:
        raise ValueError(
            "key_indices must be None over a ring cache if another function than flax_mha's computes attention, or if "
            "weights are sown, but got an array; use a cache without a window."
        )
    new, tokens, room = appended
    index = jnp.maximum(cache.index, 0)
    (keys, values), first = new.floats(key.dtype), jnp.zeros_like(index)
    if cache.window is not None:
        keys, values, first = in_order(cache, key, value)
    if latent is not None:
        keys, values = latent.expand(keys)
    visibility = Visibility.of(is_causal, window, mask, query.shape[-3], is_padded)
    ends, is_ring = index + tokens, cache.window is not None
    sizes = (query.shape[-3], keys.shape[-3], query.shape[-2], *keys.shape[-2:], values.shape[-1])
    shape = validation.Shape(cache.batch, *sizes)
    is_object = isinstance(mask, Mask)
    is_ours = is_ours and not jnp.iscomplexobj(query) and not any(map(arguments.get, EINSUMS))
    if is_ours or is_object or "score_mod" in arguments:
        arguments |= {"query_offset": index, "key_value_offset": first}
    if is_ours or is_object:
        visible: Any = merged(visibility.masks(mask, shape, ends, is_ring))
    else:
        visible = visible_at(merged(visibility.masks(None, shape, ends, is_ring)), shape, (index, first))
        visible = visible if mask is None else visible & validation.mask(mask, shape)
    return nan_without(room, function(query, keys, values, mask=visible, **arguments), cache.batch)


class ExplainedAttention:
    """An `attention_fn` that only explains: it adds an explanation of each call to a list, and returns zeros."""

    def __init__(self, given: Callable[..., Array], platform: Platform | None):
        core = core_of(given)
        if core is None:
            raise ValueError(f"only attention_fn=flax_mha.attention_fn can be explained, but got {given!r}.")
        self.core = dataclasses.replace(core, function=self, run=self._explain, platform=platform)
        self.explanations: list[Explanation] = []

    def __call__(self, query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        """Records the explanation of a call, and returns zeros; ignores arguments like `module`."""
        return self.core.compute(*self.core.call_of(query, key, value, **arguments)).output

    def _explain(self, call: Call, implementation: Implementation | None) -> Result:
        self.explanations.append(run.explain(call, implementation))
        query, value = call.operands.query, call.operands.value
        return Result(jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), None)


class Explain(Protocol[P]):
    """The type of a module's method `explain`: the arguments `P` of its call, and `platform`."""

    @overload
    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> Explanation: ...
    @overload
    def __call__(self, *arguments: Any, platform: Platform | None, **keywords: Any) -> Explanation: ...


def explaining(call: Callable[Concatenate[Any, P], Array]) -> Explain[P]:
    """Makes the method `explain` of a module class, given its `__call__`.

    `explain` takes the same arguments, and also `platform`; it returns `self._explained(platform, *arguments)`.
    """

    def explain(self: Any, *arguments: Any, platform: Platform | None = None, **keywords: Any) -> Explanation:
        """Explains which implementation computes a call with these arguments, and why the others do not.

        Pass the arguments of the call. With `platform`, the call is explained for "cpu", "cuda" or "tpu", even if there
        is no such device; see `flax_mha.explain_implementation`. Nothing is computed, and the module does not change. A
        decoding call is explained for the current cache or, under `jit`, for an empty cache.

        Raises:
          ValueError, NotImplementedError: If the call would raise it under `jit`; ValueError also if `attention_fn` is
            not `flax_mha.attention_fn`, or if the platform is unknown.
        """
        return self._explained(platform, *arguments, **keywords)

    parameters = [*inspect.signature(call).parameters.values(), inspect.signature(explain).parameters["platform"]]
    explain.__signature__ = inspect.Signature(parameters, return_annotation=Explanation)  # type: ignore[attr-defined]
    return explain  # type: ignore[return-value]
