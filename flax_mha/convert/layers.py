"""Layers that replace those of `MultiHeadAttention` in models whose attention differs; `from_hf` puts them there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import flax_mha.nnx
from flax_mha._src.call.operands import Call
from flax_mha._src.core.eight_bits import dequantize_cache
from flax_mha._src.distributed.split import is_explicit
from flax_mha._src.math.head import by_blocks
from flax_mha._src.modules.attention_fn import CoreAttention, attention_fn
from flax_mha._src.modules.indexer import MAX_SCORES
from flax_mha.cache.kv_cache import KVCache
from flax_mha.recipes.scores import difference
from flax_mha.rope import RoPE, apply_rope

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")  # of DiffLlama
SIZES = ("indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio", "indexer_budget")  # of Qwen4-Exp


def check_no_explicit_axes(x: Array) -> None:
    if is_explicit(x):
        raise ValueError(
            f"inputs_q of DiffLlama and Qwen4-Exp must not be on a mesh with Explicit axes, but got {jax.typeof(x)}; "
            "create the mesh with axis_types=(AxisType.Auto, ...)."
        )


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


def make_differential(module: Any, values: dict[str, Any], layer: int) -> None:
    """Turns a new `MultiHeadAttention` into the differential attention of DiffLlama, whose cache holds pairs."""
    if module.num_kv_heads % 2:
        raise ValueError(f"num_key_value_heads must be even, because values form pairs, but got {module.num_kv_heads}.")
    module.value.__class__, module.out.__class__ = PairedValues, Difference  # their parameters and options stay
    module.value_dim, module.out.layer, module.out.epsilon = 2 * module.head_dim, layer, values["rms_norm_eps"]
    for name in VECTORS:
        setattr(module.out, name, nnx.Param(jnp.zeros(module.head_dim, module.param_dtype)))


class ValueBias(nnx.Module):
    """A causal `attention_fn` that adds exp(A softplus(weight v + bias)) to all scores of a key (Doge).

    There is one such number for each key head and token, where v are the values of all heads. Of more than `largest`
    keys, Doge hides those with the smallest numbers; calls with so many keys are refused.
    """

    def __init__(self, module: Any, largest: int) -> None:
        heads, dtype = module.num_kv_heads, module.param_dtype
        self.largest = largest
        self.A = nnx.Param(jnp.zeros(heads, dtype))
        self.weight = nnx.Param(jnp.zeros((heads, heads * module.head_dim), dtype))
        self.bias: Any = nnx.data(None) if module.query.bias is None else nnx.Param(jnp.zeros(heads, dtype))

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


def add_value_bias(module: Any, values: dict[str, Any], layer: int) -> None:
    """Turns a new `MultiHeadAttention` into the attention of Doge."""
    module.attention_fn = nnx.data(ValueBias(module, values["keep_window_size"]))


class BlockIndexer(nnx.Module):
    """Chooses the blocks of `ratio` keys with the largest index scores, `budget` keys in all, for each query.

    With small heads j, the score of a block is sum_j relu(q[t, j] . k). Its key k is the normalized mean of the index
    keys in the block, rotated by the position of its first token. Queries also attend to the tokens after their last
    whole block. The choice has no gradient.
    """

    def __init__(self, module: Any, rope: RoPE | None, heads: int, size: int, ratio: int, budget: int) -> None:
        self.heads, self.size, self.ratio, self.budget, self.rope = heads, size, ratio, budget, rope
        self.epsilon = module.query_ln.epsilon
        dtype = module.param_dtype
        self.index_qk_proj = nnx.Param(jnp.zeros(((heads + 1) * size, module.in_features), dtype))
        self.q_layernorm, self.k_layernorm = (nnx.Param(jnp.zeros(size, dtype)) for _ in range(2))

    def project(self, inputs: Float[Array, "*B T D"]) -> tuple[Float[Array, "*B T N X"], Float[Array, "*B T 1 X"]]:
        """Returns normalized queries, and keys."""
        both = lax.stop_gradient(inputs) @ self.index_qk_proj[...].T.astype(inputs.dtype)
        both = both.reshape(*both.shape[:-1], self.heads + 1, self.size)
        return self._normalize(both[..., :-1, :], self.q_layernorm[...]), both[..., -1:, :]

    def choose(
        self, query: Float[Array, "*B T N X"], key: Float[Array, "*B S X"], positions: Int[Array, "*B T"]
    ) -> Int[Array, "*B T k"] | None:
        """Returns the positions of the keys that each query attends to, -1 for none; None if these are all."""
        number, count = key.shape[-2] // self.ratio, self.budget // self.ratio
        if number <= count:
            return None
        key = key[..., : number * self.ratio, :].reshape(*key.shape[:-2], number, self.ratio, self.size)
        means = jnp.mean(key, axis=-2, dtype=jnp.promote_types(key.dtype, jnp.float32)).astype(key.dtype)
        starts = jnp.arange(number, dtype=jnp.int32) * self.ratio
        means = self._rotate(self._normalize(means, self.k_layernorm[...])[..., None, :], starts)[..., 0, :]
        query, axis = self._rotate(query, positions), query.ndim - 3
        height = min(query.shape[-3], max(1, MAX_SCORES // (self.heads * number)))

        def block(first: Int[Array, ""]) -> Int[Array, "*B t k"]:
            of_block, places = (lax.dynamic_slice_in_dim(x, first, height, axis) for x in (query, positions))
            return self._listed(of_block, places, means, count)

        return by_blocks(block, query.shape[-3], height, axis)

    def _listed(self, query: Array, positions: Array, means: Array, count: int) -> Int[Array, "*B t k"]:
        wide = jnp.promote_types(query.dtype, jnp.float32)
        products = jnp.einsum("...tnx,...bx->...tnb", query, means, preferred_element_type=wide)
        scores = jax.nn.relu(products).sum(-2)
        scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)  # the output of such queries is NaN
        whole, position = (positions[..., None] + 1) // self.ratio, positions[..., None]
        is_whole = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1) < whole
        best, blocks = lax.top_k(jnp.where(is_whole, scores, -jnp.inf), count)
        steps = lax.broadcast_to_rank(jnp.arange(self.ratio, dtype=jnp.int32), blocks.ndim + 1)
        tokens = blocks[..., None] * self.ratio + steps
        tokens = jnp.where(best[..., None] > -jnp.inf, tokens, -1)
        rest = whole * self.ratio + steps[..., 0, :-1]
        return jnp.concatenate([lax.collapse(tokens, tokens.ndim - 2), jnp.where(rest <= position, rest, -1)], axis=-1)

    def _rotate(self, x: Float[Array, "*B T N X"], positions: Array) -> Float[Array, "*B T N X"]:
        return x if self.rope is None else apply_rope(x, positions, self.rope)

    def _normalize(self, x: Float[Array, "*B X"], weight: Float[Array, " X"]) -> Float[Array, "*B X"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (wide * lax.broadcast_to_rank(1 + weight, x.ndim)).astype(x.dtype)


class BlockSparseAttention(flax_mha.nnx.MultiHeadAttention):
    """Causal self-attention to the keys that a `BlockIndexer` chooses; the cache also holds one index key per token."""

    indexer: BlockIndexer

    def __call__(self, inputs_q: Float[Array, "*B T D"], *others: Any, **arguments: Any) -> Any:
        """Does `MultiHeadAttention.__call__` with `key_indices`, unless these are given."""
        names = ("inputs_k", "inputs_v", "mask", "segment_ids", "positions")
        given = [name for name in names if arguments.get(name) is not None]
        if given or others:
            raise ValueError(
                f"{', '.join(given) or 'inputs_k'} must be None, because an indexer chooses the keys of causal "
                "self-attention, but got an array; pass lengths for padding."
            )
        inputs_q = jnp.asarray(inputs_q)
        if inputs_q.ndim < 2 or inputs_q.shape[-1] != self.in_features:
            raise ValueError(
                f"inputs_q must have shape [..., length, {self.in_features}], but got {inputs_q.shape}; pass the "
                "states that this layer projects."
            )
        check_no_explicit_axes(inputs_q)
        if not inputs_q.size:
            return super().__call__(inputs_q, **arguments)
        decode, lengths = self._first_given("decode", arguments.get("decode")), arguments.get("lengths")
        query, key = self.indexer.project(inputs_q)
        start, cache = jnp.int32(0), None
        if decode:
            cache = self._with_keys(key, lengths)
            start, key = jnp.maximum(self.cache_index[...], 0), cache.floats(query.dtype)[0]
        positions = start[..., None] + lax.broadcast_to_rank(
            jnp.arange(query.shape[-3], dtype=jnp.int32), start.ndim + 1
        )
        positions = jnp.broadcast_to(positions, query.shape[:-2])
        chosen = self.indexer.choose(query, key[..., 0, :], positions)
        arguments["key_indices"] = chosen if arguments.get("key_indices") is None else arguments["key_indices"]
        output = super().__call__(inputs_q, **arguments)
        if cache is not None:
            self._write_index(tuple(x for x in (cache.key, cache.scale) if x is not None))
        return output

    def _with_keys(self, key: Float[Array, "*B T 1 X"], lengths: Any) -> KVCache:
        """Returns the cache of index keys with the new ones."""
        self._cache()  # raises if there is none
        arrays = self._cached_index()
        if arrays is None:
            raise ValueError("the cache must have index keys (cached_index_key) for the indexer; create a new cache.")
        index = jnp.asarray(self.cache_index[...])
        cache = KVCache.of_arrays(None, key.shape[-1], (arrays[0], index, *arrays[1:]))
        cache.check_fits(key, key[..., :0], key.shape[-3])
        stored = key if cache.scale is not None else key.astype(cache.key.dtype)
        return cache.append(stored, stored[..., :0], lengths)[0]

    def _index_size(self) -> int | None:
        return self.indexer.size


def add_block_indexer(module: Any, values: dict[str, Any], layer: int) -> None:
    """Turns a new `MultiHeadAttention` into a `BlockSparseAttention`."""
    if module.head_axis is not None:
        raise ValueError(
            f"head_axis must be None for Qwen4-Exp, whose index keys have one head, but got {module.head_axis!r}."
        )
    sizes = [values[name] for name in SIZES]
    if None in sizes or values["indexer_kv_heads"] != 1 or sizes[3] % sizes[2] or sizes[3] < sizes[2]:
        raise ValueError(
            f"config must set {', '.join(SIZES)}, and indexer_kv_heads to 1; the ratio must divide the budget, but got "
            f"{sizes} and {values['indexer_kv_heads']}."
        )
    rope: RoPE | None = module.rope
    if rope is not None:  # positions of text have one coordinate
        fraction = rope.fraction * module.head_dim / sizes[1]
        rope = dataclasses.replace(rope, fraction=fraction, sections=None, section_layout="contiguous")
    module.__class__ = BlockSparseAttention
    module.indexer = BlockIndexer(module, rope, *sizes)
    module.cached_index_key = module.cached_index_scale = nnx.data(None)


# What turns the module of a family into that of one layer, given its values and the index of the layer.
CHANGES: dict[str, Callable[[Any, dict[str, Any], int], None]] = {
    "diffllama": make_differential,
    "doge": add_value_bias,
    "qwen4_exp_text": add_block_indexer,
}
