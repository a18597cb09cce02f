"""`attention_fn`: `dot_product_attention` with the signature that the modules of `flax.nnx` and `flax.linen` call.

If possible, the modules of this package skip this function, and use its attribute `core`, a `CoreAttention`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.attention import dot_product_attention as linen_attention
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src.call.arguments import Arguments, naming_siblings
from flax_mha._src.call.operands import NO_OFFSET, Sharding, accumulation_dtype
from flax_mha._src.core import validation
from flax_mha._src.modules.core import EINSUMS, CoreAttention
from flax_mha.attention import Implementation, ScoreMod, dot_product_attention
from flax_mha.masks import Mask

# Arguments that Flax's attention functions do not have.
EXTRA = Arguments.__optional_keys__ - {"is_causal", "precision", "dropout_rate", "dropout_rng", "broadcast_dropout"}


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
    """Computes `flax_mha.dot_product_attention` with the signature that Flax's modules expect of an `attention_fn`.

    Arguments that are not listed here are the same as in `dot_product_attention`.

    Args:
      mask: A mask object, or an array that broadcasts to [B..., N, T, S]: bool, or the numbers 0 and 1, as from Flax's
        `make_causal_mask`. Other numbers are an error or, if they are traced, make the output NaN.
      deterministic: True disables dropout.
      dtype: Dtype of the computation; None infers it from query, key and value, which are promoted to it.
      module: The module that sows the softmax's weights [B..., N, T, S], before dropout, as `attention_weights`; None
        sows none.
      promote_dtype: Function that promotes (query, key, value); None uses Flax's.
      force_fp32_for_softmax: Sow float32 weights; the softmax itself is always computed in float32 or higher.
      einsum_dot_general: Function that computes the matrix products. If this or one of the next two is given, Flax
        linen's own `dot_product_attention` is called.
      qk_attn_weights_einsum: Einsum (such as a quantized one) of query and key; must be given with the next argument.
      attn_weights_value_einsum: Einsum of attention weights and value.
      max_score_module: The module that sows the largest visible score of each head [B..., N] as
        `attention_max_score`; None sows none.

    Raises:
      ValueError: As in `dot_product_attention`, and if complex inputs or custom einsums, which use Flax's own function,
        are combined with arguments that Flax's function does not support.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import flax_mha
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=flax_mha.attention_fn)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
      (1, 3, 8)
    """
    given = dict(locals())
    query, key, value = (promote_dtype or dtypes.promote_dtype)((query, key, value), dtype=dtype)
    is_no_mask = None  # whether a mask of traced numbers holds numbers other than 0 and 1
    if not isinstance(mask, Mask | None):
        mask, is_no_mask = validation.mask_of_numbers(mask)
    extra = {name: x for name, x in given.items() if name in EXTRA}
    dropout: dict[str, Any] = {"broadcast_dropout": broadcast_dropout}
    dropout |= {} if deterministic else {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    if jnp.iscomplexobj(query) or any(given[name] for name in EINSUMS):
        extra = {"implementation": implementation} | extra | {"max_score_module": max_score_module}
        flax_arguments = {name: given[name] for name in ("module", "force_fp32_for_softmax", "precision", *EINSUMS)}
        output = _flax_attention(query, key, value, bias, mask, is_causal, extra, **dropout, **flax_arguments)
        return validation.nan_if(is_no_mask, output)
    scored: dict[str, Any] = {"bias": bias, "mask": mask, "is_causal": is_causal, "precision": precision, **extra}
    if module is not None:
        weights = _weights(query, key, **scored)
        sow(module, "attention_weights", weights if force_fp32_for_softmax else weights.astype(query.dtype))
    attend = functools.partial(dot_product_attention, implementation=implementation, **scored, **dropout)
    if max_score_module is None:
        output = attend(query, key, value)
    else:
        output, max_score = attend(query, key, value, return_max_score=True)
        sow(max_score_module, "attention_max_score", max_score)
    return validation.nan_if(is_no_mask, output)


attention_fn.core = CoreAttention(  # type: ignore[attr-defined]
    attention_fn, {name: parameter.default for name, parameter in inspect.signature(attention_fn).parameters.items()}
)


def sow(module: Any, name: str, x: Array) -> None:
    """Sows an array, such as attention weights, in a module of nnx or linen, like Flax's modules."""
    module.sow(nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates", name, x)


def _flax_attention(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, is_causal: bool, extra: dict, **arguments: Any
) -> Array:
    """Computes Flax's own attention; raises a ValueError for a mask object, or if `extra` has any but None and 0."""
    extra["mask"] = mask if isinstance(mask, Mask) else None
    given = [name for name, x in extra.items() if x is not None and not (isinstance(x, int) and x == 0)]
    if given:
        raise ValueError(
            f"complex inputs and quantized einsums use Flax's own attention, which does not support "
            f"{', '.join(given)}; omit those arguments, or use real inputs without a custom einsum."
        )
    if is_causal:
        causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)[(None,) * (query.ndim - 2)]
        mask = causal if mask is None else mask & causal
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], axis=-2) for x in (key, value))
    return linen_attention(query, key, value, bias, mask, **arguments)


def _weights(query: Array, key: Array, bias: Array | None = None, **arguments: Any) -> Float[Array, "*B N T S"]:
    """Computes the softmax's weights, before dropout, in float32, or in float64 for float64 inputs.

    The weights are 0 for queries whose keys are all masked, and NaN if the output is NaN. They are computed as the
    gradient of the log-sum-exp with respect to the bias, so that the engine itself computes and masks the scores.
    """
    batch, (length, heads, _) = query.shape[:-3], query.shape[-3:]
    dtype = accumulation_dtype(query.dtype)
    bias = jnp.zeros((), dtype) if bias is None else jnp.asarray(bias).astype(dtype)

    def total(bias: Array) -> tuple[Array, Array]:
        _, lse = dot_product_attention(query, key, key, bias, implementation="xla", return_residual=True, **arguments)
        return jnp.sum(lse), lse

    weights, lse = jax.grad(total, has_aux=True)(jnp.broadcast_to(bias, (*batch, heads, length, key.shape[-3])))
    is_nan = jnp.isnan(jnp.swapaxes(lse, -1, -2))[..., None]  # such rows have no derivative
    return jnp.where(is_nan, jnp.nan, weights)  # no array of NaN, at which `jax_debug_nans` would stop
