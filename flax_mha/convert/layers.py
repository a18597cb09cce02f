"""Layers that replace those of `MultiHeadAttention` in models whose attention differs; `from_hf` puts them there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src.call.operands import Call
from flax_mha._src.core.eight_bits import dequantize_cache
from flax_mha._src.modules.attention_fn import attention_fn
from flax_mha._src.modules.core import CoreAttention
from flax_mha.convert.sparse import add_block_indexer, check_no_explicit_axes
from flax_mha.recipes.scores import difference

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class PairedValues(nnx.LinearGeneral):
    """Projects to the values of K heads, and returns pairs: head k and head k + K / 2 have both of their values."""

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Float[Array, "*B T K 2*H"]:
        check_no_explicit_axes(inputs)
        pairs = jnp.concatenate(jnp.split(super().__call__(inputs, out_sharding), 2, axis=-2), axis=-1)
        return jnp.concatenate([pairs, pairs], axis=-2)


class Difference(nnx.LinearGeneral):
    """Subtracts the second half of the heads from the first, as in `recipes.differential`, and projects the result."""

    layer: int
    epsilon: float

    def __call__(self, inputs: Float[Array, "*B T N 2*H"], out_sharding: Any = None) -> Float[Array, "*B T Dout"]:
        vectors = jnp.stack([getattr(self, name)[...] for name in VECTORS])
        first, second = jnp.split(inputs, 2, axis=-2)
        heads = difference(first, second, vectors, self.layer, self.epsilon)
        return super().__call__(heads.reshape(*inputs.shape[:-1], inputs.shape[-1] // 2), out_sharding)


def make_differential(module: Any, layer: int, epsilon: float) -> None:
    """Turns a new `MultiHeadAttention` into the differential attention of DiffLlama, whose cache holds pairs."""
    if module.num_kv_heads % 2:
        raise ValueError(f"num_key_value_heads must be even, because values form pairs, but got {module.num_kv_heads}.")
    module.value.__class__, module.out.__class__ = PairedValues, Difference  # their parameters and options stay
    module.value_dim, module.out.layer, module.out.epsilon = 2 * module.head_dim, layer, epsilon
    for name in VECTORS:
        setattr(module.out, name, nnx.Param(jnp.zeros(module.head_dim, module.param_dtype)))


class ValueBias(nnx.Module):
    """A causal `attention_fn` that adds exp(A softplus(weight v + bias)) to all scores of a key (Doge).

    There is one such number for each key head and token, where v are the values of all heads. Of more than `largest`
    keys, Doge hides those with the smallest numbers; calls with so many keys are refused.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, largest: int, use_bias: bool, param_dtype: Any) -> None:
        self.largest = largest
        self.A = nnx.Param(jnp.zeros(num_kv_heads, param_dtype))
        self.weight = nnx.Param(jnp.zeros((num_kv_heads, num_kv_heads * head_dim), param_dtype))
        self.bias: Any = nnx.Param(jnp.zeros(num_kv_heads, param_dtype)) if use_bias else nnx.data(None)

    @property
    def core(self) -> CoreAttention:
        """What modules of this package call, also while decoding."""
        return CoreAttention(self, attention_fn.core.defaults, preset={"is_causal": True}, change=self._change)  # type: ignore

    def __call__(self, query: Array, key: Array, value: Array, bias: Any = None, **arguments: Any) -> Array:
        return attention_fn(query, key, value, self._added(value, query.shape[-2], bias), **arguments)

    def _change(self, call: Call) -> Call:
        operands, value = call.operands, call.operands.value
        if operands.cache_scale is not None:
            size, dtype = call.options.value_size, operands.query.dtype
            value = dequantize_cache(operands.key, value, operands.cache_scale, size, dtype)[1]
        bias = self._added(value, operands.query.shape[-2], operands.bias)
        return call._replace(operands=operands._replace(bias=bias))

    def _added(self, value: Float[Array, "*B S K H"], num_heads: int, bias: Any) -> Float[Array, "*B N T S"]:
        if value.shape[-3] > self.largest:
            raise ValueError(
                f"the number of keys must be at most keep_window_size ({self.largest}), above which Doge hides some, "
                f"but got {value.shape[-3]}; use shorter sequences or a smaller cache."
            )
        # A visible value that is not finite makes the output so; a masked one must not reach any gradient.
        flat = lax.collapse(jnp.where(jnp.isfinite(value), value, 0), value.ndim - 2)
        logits = jnp.einsum("...sf,kf->...sk", flat, self.weight[...])
        logits = logits if self.bias is None else logits + lax.broadcast_to_rank(self.bias[...], logits.ndim)
        own = jnp.exp(lax.broadcast_to_rank(self.A[...], logits.ndim) * jax.nn.softplus(logits))
        own = jnp.repeat(jnp.swapaxes(own, -1, -2), num_heads // own.shape[-1], axis=-2)[..., None, :]
        return own if bias is None else own + bias


def add_value_bias(module: Any, largest: int) -> None:
    """Turns a new `MultiHeadAttention` into the attention of Doge."""
    use_bias = module.query.bias is not None
    made = ValueBias(module.num_kv_heads, module.head_dim, largest, use_bias, module.param_dtype)
    module.attention_fn = nnx.data(made)


# What turns the module of a family into that of one layer, given its values and the index of the layer.
CHANGES: dict[str, Callable[[Any, dict[str, Any], int], None]] = {
    "diffllama": lambda module, values, layer: make_differential(module, layer, values.get("rms_norm_eps", 1e-5)),
    "doge": lambda module, values, layer: add_value_bias(module, values["keep_window_size"]),
    "qwen4_exp_text": lambda module, values, layer: add_block_indexer(module, values),
}
