"""`attention_fn`: `dot_product_attention` with the signature that the modules of
`flax.nnx` and `flax.linen` call.

Both it and the modules of this package call `AttentionFn.attend`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src.attention import Implementation, ScoreMod, dot_product_attention
from flax_mha._src.cache.cached_attention import NewTokens, Run, over_cache
from flax_mha._src.call.arguments import (
    Arguments,
    canonical,
    check_sharding,
    naming_siblings,
)
from flax_mha._src.call.call import (
    Call,
    Context,
    Result,
    Sharding,
    accumulation_dtype,
)
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import Platform, with_shapes
from flax_mha._src.explanation import Explanation
from flax_mha._src.masks import Mask
from flax_mha._src.modules import foreign
from flax_mha._src.run import explain, run

# Arguments of `attention_fn` that are arguments of `dot_product_attention`.
CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
P = ParamSpec("P")
Heads = tuple[Array, Array, Array]  # query, key and value
Module = nnx.Module | nn.Module


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
    module: Module | None = None,
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
    query_offset: int | Array | None = None,
    key_value_offset: int | Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    score_mod: ScoreMod | None = None,
    key_indices: Array | None = None,
    qkv_sharding: Sharding | None = None,
    max_score_module: Module | None = None,
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
    return AttentionFn().attend(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        precision=precision,
        module=module,
        promote_dtype=promote_dtype,
        is_causal=is_causal,
        force_fp32_for_softmax=force_fp32_for_softmax,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        implementation=implementation,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
        key_value_offset=key_value_offset,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        key_indices=key_indices,
        qkv_sharding=qkv_sharding,
        max_score_module=max_score_module,
    )


def uses_flax(query: Array, arguments: Mapping[str, Any]) -> bool:
    """Returns whether Flax's own function computes a call, because our engines take
    neither complex numbers nor functions that multiply.
    """
    return jnp.iscomplexobj(query) or any(map(arguments.get, foreign.EINSUMS))


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


def _check_splittable(query: Array, arguments: Mapping[str, Any]) -> None:
    """Raises a ValueError if `context_parallel` cannot split the call's sequences: for
    complex inputs, custom einsums and weights to be sown, which need whole sequences.
    """
    got = None
    for name, x in arguments.items():
        needs_whole = name == "module" or "einsum" in name
        if needs_whole and x is not None:
            got = "module (sow_weights)" if name == "module" else name
            break
    if got is None and jnp.iscomplexobj(query):
        got = f"a query of {query.dtype}"
    if got is not None:
        raise ValueError(
            "context_parallel does not support complex inputs, custom einsums or "
            f"sow_weights, but got {got}, which needs whole sequences on one device; "
            "use flax_mha.attention_fn."
        )


def sow(module: Module, name: str, x: Array) -> None:
    """Sows an array, such as attention weights, in a module of nnx or linen, like
    Flax's modules.
    """
    if isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, name, x)
    else:
        module.sow("intermediates", name, x)


def _sow_max_score(arguments: Mapping[str, Any], result: Result) -> None:
    module = arguments.get("max_score_module")
    # An explanation has no scores.
    if module is not None and result.largest is not None:
        sow(module, "attention_max_score", result.largest)


def _weights(
    query: Array, key: Array, bias: Array | None = None, **arguments: Any
) -> Float[Array, "*B N T S"]:
    """Computes the softmax's weights, before dropout, in float32, or in float64 for
    float64 inputs; ignores arguments of dropout.

    The weights are 0 for queries whose keys are all masked, and NaN if the output is
    NaN. They are computed as the gradient of the log-sum-exp with respect to the bias,
    so that the engine itself computes and masks the scores.
    """
    for name in ("dropout_rate", "dropout_rng", "return_max_score"):
        arguments.pop(name, None)
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


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """An attention function of this package: `attention_fn`, perhaps with sequences
    split over devices, or called only to be explained.

    A dataclass, because `jit` compiles once for equal functions.
    """

    context: Context | None = None  # how `context_parallel` splits sequences
    # Computes a call, or explains it, for a platform.
    run: Run = dataclasses.field(default=run, repr=False)
    platform: Platform | None = dataclasses.field(default=None, repr=False)
    # Arguments that `functools.partial`s set, for modules.
    preset: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(
        self,
        query: Array,
        *others: Any,
        qkv_sharding: Sharding | None = None,
        **arguments: Any,
    ) -> Array:
        """Calls `attention_fn`, split by `context`; `qkv_sharding` may add the mesh and
        its other axes.
        """
        # Flax's modules call this. Ours call `attend`, which uses `run` and `platform`.
        sharding = self.sharding(qkv_sharding, np.ndim(query))
        return attention_fn(query, *others, qkv_sharding=sharding, **arguments)

    def attend(
        self, query: Array, key: Array, value: Array, **arguments: Any
    ) -> Float[Array, "*B T N Hv"]:
        """Computes attention, given the `arguments` of `attention_fn`; a `qkv_sharding`
        may be a `Context`.
        """
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        dtype = arguments.get("dtype")
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        # Whether a mask of traced numbers holds numbers other than 0 and 1.
        mask_is_invalid = None
        mask = arguments.get("mask")
        if not isinstance(mask, Mask | None):
            mask, mask_is_invalid = validation.mask_of_numbers(mask)
            arguments["mask"] = mask
        if isinstance(arguments.get("qkv_sharding"), Context):
            _check_splittable(query, arguments)
        if uses_flax(query, arguments):
            output = foreign.flax_attention(query, key, value, **arguments)
            return validation.nan_if(mask_is_invalid, output)

        core = _core_arguments(arguments)
        implementation = core.pop("implementation", None)
        module = arguments.get("module")
        # An explanation sows nothing.
        if module is not None and self.run is run:
            weights = _weights(query, key, **core)
            if not arguments.get("force_fp32_for_softmax"):
                weights = weights.astype(query.dtype)
            sow(module, "attention_weights", weights)
        call = canonical(query, key, value, platform=self.platform, **core)
        result = self.run(call, implementation)
        _sow_max_score(arguments, result)
        return validation.nan_if(mask_is_invalid, result.output)

    def attend_over_cache(
        self, query: Array, tokens: NewTokens, top_k: int = 0, **arguments: Any
    ) -> Float[Array, "*B T N Hv"]:
        """Computes a decoding step; for `top_k`, see `over_cache`.

        Weights cannot be sown, Flax's function cannot be called, and `promote_dtype`
        is not used: see `all_written`.
        """
        # `call.py` has converted a mask of numbers.
        (query,) = dtypes.promote_dtype((query,), dtype=arguments.get("dtype"))
        core = _core_arguments(arguments)
        result = over_cache(
            self.run, query, tokens, platform=self.platform, top_k=top_k, **core
        )
        _sow_max_score(arguments, result)
        return result.output

    def sharding(self, qkv_sharding: Sharding | None, rank: int) -> Sharding | None:
        """Returns the context with what `qkv_sharding`, for a query with `rank` axes,
        adds to it; without a context, `qkv_sharding` itself.
        """
        if self.context is None:
            return qkv_sharding
        sharding = check_sharding(qkv_sharding, rank)
        return self.context.with_sharding(sharding, rank)

    def with_preset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a module's `arguments`, with those that are None taken from `preset`,
        except for `is_causal`, which modules read themselves.
        """
        combined = dict(self.preset)
        combined.pop("is_causal", None)
        for name, x in arguments.items():
            if x is not None or name not in combined:
                combined[name] = x
        unknown = min(combined.keys() - _SIGNATURE.parameters.keys(), default=None)
        if unknown is not None:
            source = ""
            if unknown in self.preset:
                source = " from functools.partial"
            raise TypeError(
                "flax_mha.attention_fn() got an unexpected keyword argument "
                f"{unknown!r}{source}"
            )
        return combined


# Shows the arguments of `attention_fn` in `help` and editors.
_SIGNATURE = inspect.signature(attention_fn)
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
AttentionFn.__call__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[_SELF, *_SIGNATURE.parameters.values()]
)


def ours(function: Callable[..., Array]) -> AttentionFn | None:
    """Returns a module's attention function as an `AttentionFn`, or None if it is not
    of this package.

    Keywords of `functools.partial`s around the function become its `preset`.
    """
    preset: dict[str, Any] = {}
    inner: Any = function
    # No subclasses, whose calls may do more.
    partials = (functools.partial, jax.tree_util.Partial)
    while type(inner) in partials and not inner.args:
        preset = inner.keywords | preset
        inner = inner.func
        # A jax.tree_util.Partial of a functools.partial.
        nested = getattr(inner, "fun", None)
        if type(nested) is functools.partial:
            inner = nested
    if inner is attention_fn:
        return AttentionFn(preset=preset)
    if type(inner) is AttentionFn:
        return dataclasses.replace(inner, preset={**inner.preset, **preset})
    return None


def explained(
    function: Callable[..., Array],
    platform: Platform | None,
    call: Callable[[AttentionFn], Any],
) -> Explanation:
    """Explains a call of a module whose attention function is `function`.

    `call(attention_fn)` calls a copy of the module with `attention_fn` instead, which
    records the explanation and returns zeros.
    """
    found = ours(function)
    if found is None:
        raise ValueError(
            "only attention_fn=flax_mha.attention_fn can be explained, but got "
            f"{function!r}."
        )
    explanations: list[Explanation] = []

    def record(call: Call, implementation: Implementation | None) -> Result:
        explanations.append(explain(call, implementation))
        query = call.query
        output = jnp.zeros((*query.shape[:-1], call.value.shape[-1]), query.dtype)
        return Result(output, None)

    recorder = dataclasses.replace(found, run=record, platform=platform)
    jax.eval_shape(lambda: call(recorder))
    if not explanations:
        raise ValueError(
            "calls with complex inputs or custom einsums cannot be explained, "
            "because Flax's own function computes them; use real inputs without a "
            "custom einsum."
        )
    return explanations[0]


class Explain(Protocol[P]):
    """The type of a module's method `explain`: the arguments `P` of its call, and
    `platform`.
    """

    @overload
    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> Explanation: ...
    @overload
    def __call__(
        self, *arguments: object, platform: Platform | None, **keywords: object
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

        Pass the arguments of the call, or shapes (`jax.ShapeDtypeStruct`) in place of
        arrays. With `platform`, the call is explained for
        "cpu", "cuda" or "tpu", even if there is no such device; see
        `flax_mha.explain_implementation`. Nothing is computed, and the module does not
        change. A decoding call is explained for the current cache or, under `jit`, for
        an empty cache.

        Raises:
          ValueError, NotImplementedError: If the call would raise it under `jit`;
            ValueError also if `attention_fn` is not `flax_mha.attention_fn`, or if the
            platform is unknown.
        """
        return with_shapes(self._explained, platform, *arguments, **keywords)

    # Shows the arguments of the call in `help` and editors.
    parameters = [
        *inspect.signature(call).parameters.values(),
        inspect.signature(explain).parameters["platform"],
    ]
    signature = inspect.Signature(parameters, return_annotation=Explanation)
    explain.__signature__ = signature  # type: ignore[attr-defined]
    return explain  # type: ignore[return-value]
