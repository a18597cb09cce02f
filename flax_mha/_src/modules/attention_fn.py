"""`attention_fn`: `dot_product_attention` with the signature that the modules of
`flax.nnx` and `flax.linen` call.

If possible, the modules of this package skip the function and use its attribute `core`,
a `CoreAttention`, which computes a call or a decoding step directly, or explains it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.attention import dot_product_attention as linen_attention
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src import run
from flax_mha._src.attention import Implementation, ScoreMod, dot_product_attention
from flax_mha._src.cache.cached_attention import (
    Visibility,
    check_window_and_cache,
    in_order,
    nan_without,
    over_cache,
)
from flax_mha._src.cache.kv_cache import KVCache
from flax_mha._src.cache.latent import Latent
from flax_mha._src.cache.shared import Appended
from flax_mha._src.call.arguments import (
    Arguments,
    canonical,
    check_sharding,
    naming_siblings,
)
from flax_mha._src.call.operands import (
    NO_OFFSET,
    Call,
    Context,
    Result,
    Sharding,
    accumulation_dtype,
)
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import Platform
from flax_mha._src.explanation import Explanation
from flax_mha._src.masks import Mask
from flax_mha._src.masks.base import merged, visible_at

# Arguments of `attention_fn` that are arguments of `dot_product_attention`.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
# A call with an argument that is not in DIRECT, such as `module`, which sows weights,
# calls the attention function.
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}
# For Flax's own function.
EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
P = ParamSpec("P")
Heads = tuple[Array, Array, Array]  # query, key and value


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """The attribute `core` of an attention function of this package; modules use it
    instead of calling the function.
    """

    # The function itself, to recognize wrappers that copy its attributes.
    function: Callable[..., Array]
    names: frozenset[str]  # of the function's arguments
    context: Context | None = None  # how the function splits sequences over devices
    # Computes a call, or explains it. The engine is chosen if the implementation is
    # None.
    run: Callable[[Call, Implementation | None], Result] = run.run
    # Set by `functools.partial`s of the function.
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The platform to explain calls for; None: the one that computes them.
    platform: str | None = None

    def with_preset(
        self, arguments: Mapping[str, Any], without: Sequence[str]
    ) -> dict[str, Any]:
        """Returns a module's `arguments`; where they are None, `preset` counts, except
        for the names in `without`.
        """
        unknown = min(self.preset.keys() - self.names, default=None)
        if unknown is not None:
            raise TypeError(
                "flax_mha.attention_fn() got an unexpected keyword argument "
                f"{unknown!r} from functools.partial"
            )
        combined = {name: x for name, x in self.preset.items() if name not in without}
        for name, x in arguments.items():
            if x is not None or name not in combined:
                combined[name] = x
        return combined

    def computes(self, arrays: Sequence[Array], arguments: Mapping[str, Any]) -> bool:
        """Returns whether `run` can compute a call: all arguments are in `DIRECT`, or
        None, and no array is complex.

        If not, modules call the attention function instead.
        """
        given = {name for name, x in arguments.items() if x is not None}
        is_complex = any(jnp.iscomplexobj(x) for x in arrays)
        return given <= DIRECT and not is_complex

    def call_of(
        self, query: Array, key: Array, value: Array, **arguments: Any
    ) -> tuple[Call, Implementation | None]:
        """Converts arguments of `attention_fn` to those of `run`; drops the ones that
        `run` lacks, such as `module`.
        """
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        query, key, value = promote_dtype(
            (query, key, value), dtype=arguments.get("dtype")
        )
        known = _core_arguments(arguments)
        implementation = known.pop("implementation", None)
        if self.context is not None:
            sharding = check_sharding(known.get("qkv_sharding"), query.ndim)
            known["qkv_sharding"] = self.context.with_sharding(sharding, query.ndim)
        call = canonical(query, key, value, platform=self.platform, **known)
        return call, implementation


def _core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the arguments of `attention_fn` that `dot_product_attention` also takes;
    adds `return_max_score`.
    """
    selected = {}
    for name, x in arguments.items():
        if name in CORE and x is not None:
            selected[name] = x
    if arguments.get("deterministic"):
        selected.pop("dropout_rate", None)
        selected.pop("dropout_rng", None)
    selected["return_max_score"] = arguments.get("max_score_module") is not None
    return selected


@naming_siblings
def attention_fn(  # noqa: D417 - dot_product_attention has the others
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    broadcast_dropout: bool = False,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Any = None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    implementation: Implementation | None = None,
    scale: float | Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    query_offset: int | Array = NO_OFFSET,
    key_value_offset: int | Array = NO_OFFSET,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    key_indices: Array | None = None,
    qkv_sharding: Sharding | None = None,
    max_score_module: Any = None,
) -> Array:
    """Computes `flax_mha.dot_product_attention` with the signature that Flax's modules
    expect of an `attention_fn`.

    Arguments that are not listed here are the same as in `dot_product_attention`.

    Args:
      mask: A mask object, or an array that broadcasts to [B..., N, T, S]: bool, or the
        numbers 0 and 1, as from Flax's `make_causal_mask`. Other numbers are an error
        or, if they are traced, make the output NaN.
      deterministic: True disables dropout.
      dtype: Dtype of the computation; None infers it from query, key and value, which
        are promoted to it.
      module: The module that sows the softmax's weights [B..., N, T, S], before
        dropout, as `attention_weights`; None sows none.
      promote_dtype: Function that promotes (query, key, value); None uses Flax's.
      force_fp32_for_softmax: Sow float32 weights; the softmax itself is always computed
        in float32 or higher.
      einsum_dot_general: Function that computes the matrix products. If this or one of
        the next two is given, Flax linen's own `dot_product_attention` is called.
      qk_attn_weights_einsum: Einsum (such as a quantized one) of query and key; must be
        given with the next argument.
      attn_weights_value_einsum: Einsum of attention weights and value.
      max_score_module: The module that sows the largest visible score of each head
        [B..., N] as `attention_max_score`; None sows none.

    Raises:
      ValueError: As in `dot_product_attention`, and if complex inputs or custom
        einsums, which use Flax's own function, are combined with arguments that Flax's
        function does not support.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import flax_mha
      >>> layer = nn.MultiHeadDotProductAttention(
      ...     num_heads=2, attention_fn=flax_mha.attention_fn
      ... )
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
      (1, 3, 8)
    """
    if promote_dtype is None:
        promote_dtype = dtypes.promote_dtype
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    # Whether a mask of traced numbers holds numbers other than 0 and 1.
    mask_is_invalid = None
    if not isinstance(mask, Mask | None):
        mask, mask_is_invalid = validation.mask_of_numbers(mask)
    # What Flax's attention functions lack.
    extra: dict[str, Any] = {
        "scale": scale,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
        "query_offset": query_offset,
        "key_value_offset": key_value_offset,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "score_mod": score_mod,
        "key_indices": key_indices,
        "qkv_sharding": qkv_sharding,
    }
    dropout: dict[str, Any] = {"broadcast_dropout": broadcast_dropout}
    if not deterministic:
        dropout["dropout_rate"] = dropout_rate
        dropout["dropout_rng"] = dropout_rng

    # Our engines take neither complex numbers nor functions that multiply.
    einsums = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if jnp.iscomplexobj(query) or any(einsums):
        _check_flax_supports(
            mask,
            {
                "implementation": implementation,
                **extra,
                "max_score_module": max_score_module,
            },
        )
        output = _flax_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            bias=bias,
            module=module,
            force_fp32_for_softmax=force_fp32_for_softmax,
            precision=precision,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            **dropout,
        )
        return validation.nan_if(mask_is_invalid, output)

    scored: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "is_causal": is_causal,
        "precision": precision,
        **extra,
    }
    if module is not None:
        weights = _weights(query, key, **scored)
        if not force_fp32_for_softmax:
            weights = weights.astype(query.dtype)
        sow(module, "attention_weights", weights)
    attend = functools.partial(
        dot_product_attention, implementation=implementation, **scored, **dropout
    )
    if max_score_module is None:
        output = attend(query, key, value)
    else:
        output, max_score = attend(query, key, value, return_max_score=True)
        sow(max_score_module, "attention_max_score", max_score)
    return validation.nan_if(mask_is_invalid, output)


attention_fn.core = CoreAttention(  # type: ignore[attr-defined]
    attention_fn, frozenset(inspect.signature(attention_fn).parameters)
)


def sow(module: Any, name: str, x: Array) -> None:
    """Sows an array, such as attention weights, in a module of nnx or linen, like
    Flax's modules.
    """
    collection: Any = "intermediates"
    if isinstance(module, nnx.Module):
        collection = nnx.Intermediate
    module.sow(collection, name, x)


def _check_flax_supports(mask: Any, extra: Mapping[str, Any]) -> None:
    """Raises a ValueError for a mask object, or if `extra` has any but None and 0."""
    given = []
    for name, x in extra.items():
        is_default = x is None or (isinstance(x, int) and x == 0)
        if not is_default:
            given.append(name)
    if isinstance(mask, Mask):
        given.append("mask")
    if given:
        raise ValueError(
            "complex inputs and quantized einsums use Flax's own attention, which does "
            f"not support {', '.join(given)}; omit those arguments, or use real inputs "
            "without a custom einsum."
        )


def _flax_attention(
    query: Array, key: Array, value: Array, mask: Any, is_causal: bool, **arguments: Any
) -> Array:
    """Computes Flax's own attention, which takes neither `is_causal` nor fewer key
    heads than query heads.
    """
    if is_causal:
        batch_and_heads = (None,) * (query.ndim - 2)
        causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)[batch_and_heads]
        mask = causal if mask is None else mask & causal
    num_heads = query.shape[-2]
    key = jnp.repeat(key, num_heads // key.shape[-2], axis=-2)
    value = jnp.repeat(value, num_heads // value.shape[-2], axis=-2)
    return linen_attention(query, key, value, mask=mask, **arguments)


def _weights(
    query: Array, key: Array, bias: Array | None = None, **arguments: Any
) -> Float[Array, "*B N T S"]:
    """Computes the softmax's weights, before dropout, in float32, or in float64 for
    float64 inputs.

    The weights are 0 for queries whose keys are all masked, and NaN if the output is
    NaN. They are computed as the gradient of the log-sum-exp with respect to the bias,
    so that the engine itself computes and masks the scores.
    """
    *batch, query_length, num_heads, _ = query.shape
    key_length = key.shape[-3]
    dtype = accumulation_dtype(query.dtype)
    if bias is None:
        bias = jnp.zeros((), dtype)
    bias = jnp.asarray(bias).astype(dtype)

    def total(bias: Array) -> tuple[Array, Array]:
        # Values do not matter for the log-sum-exp.
        _, lse = dot_product_attention(
            query,
            key,
            key,
            bias,
            implementation="xla",
            return_residual=True,
            **arguments,
        )
        return jnp.sum(lse), lse

    # d lse / d bias = softmax(scores)
    scores_shape = (*batch, num_heads, query_length, key_length)
    every_bias = jnp.broadcast_to(bias, scores_shape)
    weights, lse = jax.grad(total, has_aux=True)(every_bias)
    # Such rows have no derivative.
    is_nan = jnp.isnan(jnp.swapaxes(lse, -1, -2))[..., None]
    # No array of NaN, at which `jax_debug_nans` would stop.
    return jnp.where(is_nan, jnp.nan, weights)


def core_of(attention_fn: Callable[..., Array]) -> CoreAttention | None:
    """Returns the `CoreAttention` of an attention function, or None if the function is
    not of this package.

    Keywords of `functools.partial`s around the function become its `preset`.
    """
    function: Any = attention_fn
    preset: dict[str, Any] = {}
    # No subclasses, whose calls may do more.
    partials = (functools.partial, jax.tree_util.Partial)
    while type(function) in partials and not function.args:
        preset = function.keywords | preset
        function = function.func
        # A jax.tree_util.Partial of a functools.partial.
        inner = getattr(function, "fun", None)
        if type(inner) is functools.partial:
            function = inner
    core = getattr(function, "core", None)
    # A wrapper that copies the attributes of a function computes something else.
    if not isinstance(core, CoreAttention) or core.function is not function:
        return None
    if preset:
        return dataclasses.replace(core, preset={**core.preset, **preset})
    return core


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
    """Adds new keys and values to a cache, unless `appended` has them already, and
    computes attention over the cache.

    `core` computes the attention or, if it cannot, `attention_fn`. `latent` is None
    unless keys and cache hold latents. For `top_k`, see `over_cache`. Returns the
    output and the cache with the new tokens.
    """
    if core is not None and core.context is not None:
        raise ValueError(
            "decode must be False with context_parallel, which cannot split a cache "
            "along the sequence, but got True; decode with "
            "attention_fn=flax_mha.attention_fn."
        )
    for name in arguments:
        if core is not None and name.startswith(("query_", "key_value_")):
            raise ValueError(
                f"attention_fn must not set {name} while decoding, because the cache "
                "tracks positions; remove it from the functools.partial, and pass "
                "lengths in the call."
            )
    query, key, value = heads
    # 8-bit keys and values are quantized by the cache.
    if cache.scale is None:
        key = key.astype(cache.key.dtype)
        value = value.astype(cache.value.dtype)
    if appended is None:
        appended = Appended(*cache.append(key, value, lengths))
    if core is None or not core.computes((query,), arguments):
        output = _decode_by(
            attention_fn if core is None else core.function,
            is_ours=core is not None,
            heads=(query, key, value),
            cache=cache,
            appended=appended,
            latent=latent,
            is_padded=lengths is not None,
            **arguments,
        )
        return output, appended
    (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
    output, *_ = over_cache(
        core.run,
        query,
        key,
        value,
        cache,
        lengths=lengths,
        latent=latent,
        platform=core.platform,
        top_k=top_k,
        appended=appended,
        **_core_arguments(arguments),
    )
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
    """Computes a decoding step by calling any attention function with all cached keys,
    all values, and a mask.

    `is_ours` says whether the function is of this package, and so accepts mask objects
    and offsets.
    """
    query, key, value = heads
    window = check_window_and_cache(
        cache, arguments.get("bias"), mask, local_window_size
    )
    is_ring = cache.window is not None
    if is_ring and "key_indices" in arguments:
        raise ValueError(
            "key_indices must be None over a ring cache if another function than "
            "flax_mha's computes attention, or if weights are sown, but got an array; "
            "use a cache without a window."
        )
    # The written keys, oldest first, and the position of the first.
    index = jnp.maximum(cache.index, 0)
    if is_ring:
        keys, values, first = in_order(cache, key, value)
    else:
        keys, values = appended.cache.floats(key.dtype)
        first = jnp.zeros_like(index)
    if latent is not None:
        keys, values = latent.expand(keys)

    # What is visible of them.
    *_, query_length, num_heads, _ = query.shape
    *_, key_length, num_kv_heads, head_size = keys.shape
    shape = validation.Shape(
        batch=cache.batch,
        query_length=query_length,
        key_length=key_length,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=values.shape[-1],
    )
    visibility = Visibility.of(is_causal, window, mask, query_length, is_padded)
    ends = index + appended.tokens

    # Flax's own attention, which ours calls for complex inputs and einsums, takes
    # arrays only.
    uses_flax = jnp.iscomplexobj(query) or any(map(arguments.get, EINSUMS))
    takes_objects = (is_ours and not uses_flax) or isinstance(mask, Mask)
    if takes_objects or "score_mod" in arguments:
        arguments["query_offset"] = index
        arguments["key_value_offset"] = first
    visible: Any
    if takes_objects:
        visible = merged(visibility.masks(mask, shape, ends, is_ring))
    else:
        object_of_all = merged(visibility.masks(None, shape, ends, is_ring))
        visible = visible_at(object_of_all, shape, (index, first))
        if mask is not None:
            visible = visible & validation.mask(mask, shape)
    output = function(query, keys, values, mask=visible, **arguments)
    return nan_without(appended.room, output, cache.batch)


class ExplainedAttention:
    """An `attention_fn` that only explains: it adds an explanation of each call to a
    list, and returns zeros.
    """

    def __init__(self, given: Callable[..., Array], platform: Platform | None):
        core = core_of(given)
        if core is None:
            raise ValueError(
                "only attention_fn=flax_mha.attention_fn can be explained, but got "
                f"{given!r}."
            )
        self.core = dataclasses.replace(
            core, function=self, run=self._explain, platform=platform
        )
        self.explanations: list[Explanation] = []

    def __call__(
        self, query: Array, key: Array, value: Array, **arguments: Any
    ) -> Array:
        """Records the explanation of a call, and returns zeros; ignores arguments like
        `module`.
        """
        call, implementation = self.core.call_of(query, key, value, **arguments)
        return self.core.run(call, implementation).output

    def _explain(self, call: Call, implementation: Implementation | None) -> Result:
        self.explanations.append(run.explain(call, implementation))
        query = call.operands.query
        value = call.operands.value
        zeros = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        return Result(zeros, None)


class Explain(Protocol[P]):
    """The type of a module's method `explain`: the arguments `P` of its call, and
    `platform`.
    """

    @overload
    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> Explanation: ...
    @overload
    def __call__(
        self, *arguments: Any, platform: Platform | None, **keywords: Any
    ) -> Explanation: ...


def explaining(call: Callable[Concatenate[Any, P], Array]) -> Explain[P]:
    """Makes the method `explain` of a module class, given its `__call__`.

    `explain` takes the same arguments, and also `platform`; it returns
    `self._explained(platform, *arguments)`.
    """

    def explain(
        self: Any, *arguments: Any, platform: Platform | None = None, **keywords: Any
    ) -> Explanation:
        """Explains which implementation computes a call with these arguments, and why
        the others do not.

        Pass the arguments of the call. With `platform`, the call is explained for
        "cpu", "cuda" or "tpu", even if there is no such device; see
        `flax_mha.explain_implementation`. Nothing is computed, and the module does not
        change. A decoding call is explained for the current cache or, under `jit`, for
        an empty cache.

        Raises:
          ValueError, NotImplementedError: If the call would raise it under `jit`;
            ValueError also if `attention_fn` is not `flax_mha.attention_fn`, or if the
            platform is unknown.
        """
        return self._explained(platform, *arguments, **keywords)

    # Shows the arguments of the call in `help` and editors.
    parameters = [
        *inspect.signature(call).parameters.values(),
        inspect.signature(explain).parameters["platform"],
    ]
    signature = inspect.Signature(parameters, return_annotation=Explanation)
    explain.__signature__ = signature  # type: ignore[attr-defined]
    return explain  # type: ignore[return-value]
