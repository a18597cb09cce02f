"""`MultiHeadLatentAttention` for `flax.nnx`: DeepSeek's parameters, and the attention
of this package.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.attention import Implementation, ScoreMod
from flax_mha._src.cache.latent import Latent
from flax_mha._src.call.arguments import (
    check_dropout_rate,
    check_soft_cap,
    check_window,
)
from flax_mha._src.call.call import Sharding, accumulation_dtype
from flax_mha._src.core import validation
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.masks import Mask
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.attention_fn import explaining
from flax_mha._src.modules.call import Given, ModuleParts, call_module
from flax_mha._src.modules.dot_general import dot_general
from flax_mha._src.modules.indexer import Indexer, IndexParts
from flax_mha._src.modules.layers import Gate, gate_axes, gate_of
from flax_mha._src.modules.options import (
    AttentionOptions,
    check_features,
    check_latent,
    check_rngs,
    scale_of,
)
from flax_mha._src.nnx.module import (
    CACHE,
    AttentionModule,
    assign,
    read,
    with_sharding,
)
from flax_mha._src.nnx.multi_head import NO_METADATA
from flax_mha._src.rope import RoPE


def _only_multiplies(layer: object) -> bool:
    """Returns whether a layer is as this module makes it: its call is a product of the
    last axis with its kernel.

    False for a wrapper (LoRA, quantization), a subclass, a bias, and a product of the
    user's.
    """
    if type(layer) is not nnx.LinearGeneral:
        return False
    has_our_product = layer.dot_general is dot_general and layer.dot_general_cls is None
    has_flax_dtypes = (
        layer.promote_dtype is dtypes.promote_dtype
        and layer.preferred_element_type is None
    )
    contracts_last_axis = layer.axis == (-1,) and not layer.batch_axis
    has_no_bias = layer.bias is None
    return has_our_product and has_flax_dtypes and contracts_last_axis and has_no_bias


class IndexerLayers(nnx.Module):
    """The projections and the norm of an `Indexer`, which chooses the keys that each
    query attends to.

    The inputs have `features` features. The compressed queries have `q_rank` features
    (`q_lora_rank` of the attention).
    """

    def __init__(
        self,
        config: Indexer,
        features: int,
        q_rank: int,
        linear: Callable[..., nnx.LinearGeneral],
        dtype: Dtype | None,
        param_dtype: Dtype,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.wq_b = linear(q_rank, (config.num_heads, config.head_dim), use_bias=False)
        self.wk = linear(features, config.head_dim, use_bias=False)
        self.k_norm = nnx.LayerNorm(
            config.head_dim,
            epsilon=config.norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_fast_variance=False,
            rngs=rngs,
        )
        self.weights_proj = linear(features, config.num_heads, use_bias=False)

    def __call__(
        self, inputs: Float[Array, "*B T D"], compressed: Float[Array, "*B T R"]
    ) -> tuple[Array, Array, Array]:
        """Returns index queries [B..., T, N, H], index keys [B..., T, 1, H] and scaled
        weights of heads [B..., T, N].
        """
        query = self.wq_b(compressed)
        # All heads share one key, which gets an axis of heads.
        key = self.k_norm(self.wk(inputs))[..., None, :]
        key = key.astype(query.dtype)
        # The factor of the scores is in the weights: there are fewer of them.
        weights = self.weights_proj(inputs)
        factor = (self.config.num_heads * self.config.head_dim) ** -0.5
        weights = weights.astype(accumulation_dtype(weights.dtype)) * factor
        return query, key, weights


class MultiHeadLatentAttention(AttentionModule):
    """Multi-head latent attention, as in DeepSeek-V2, DeepSeek-V3 and Kimi K2.

    The keys and values of all heads are projections of one latent vector per token with
    `kv_lora_rank` features. All heads share the rotary part of the key, which has
    `qk_rope_head_dim` features. A call that does not decode computes keys and values
    for all heads. A decoding call caches only latents and rotary keys, `kv_lora_rank +
    qk_rope_head_dim` numbers per token, and projects the queries to latents instead,
    except for a prompt of more than 16 tokens in an empty cache. The results are the
    same up to rounding.

    If `kv_b_proj` is replaced by another layer (LoRA, quantization), or has a bias or a
    `dot_general` of its own, a decoding call instead computes keys and values for all
    tokens in the cache by calling the layer. This takes more time and memory, which
    merging LoRA into the kernel avoids.

    The parameters are named as in DeepSeek's files: `q_proj` [in, heads, size] or, with
    `q_lora_rank`, `q_a_proj` [in, q_lora_rank], `q_a_layernorm` and `q_b_proj`
    [q_lora_rank, heads, size]; `kv_a_proj_with_mqa` [in, kv_lora_rank +
    qk_rope_head_dim], `kv_a_layernorm`, `kv_b_proj` [kv_lora_rank, heads,
    qk_nope_head_dim + v_head_dim], `o_proj` [heads, v_head_dim, out]. A query head has
    `size` = qk_nope_head_dim + qk_rope_head_dim features; the rotary ones are last.

    All other arguments are the same as in `MultiHeadAttention`.

    Args:
      num_heads: Number of heads N.
      in_features: Features of the input.
      out_features: Features of the output; None means `in_features`.
      kv_lora_rank: Features of the latent.
      qk_nope_head_dim: Non-rotary features of each head's query and key.
      qk_rope_head_dim: Rotary features of each head's query, and of the key that all
        heads share.
      v_head_dim: Features of each head's value.
      q_lora_rank: Features of the compressed queries, which are then projected to
        heads; None projects the input directly.
      use_bias: Add biases to `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`
        (`attention_bias` in configs).
      norm_epsilon: Added to the variance in the norms.
      kernel_metadata: Metadata of all kernels, for example `{"out_sharding": ...}`.
      scale: Factor that multiplies query . key; None means 1 / sqrt(qk_nope_head_dim +
        qk_rope_head_dim), times (0.1 mscale_all_dim ln(factor) + 1)^2 if `rope` has a
        `YaRN` with `mscale_all_dim`, as in DeepSeek.
      rope: Rotary position embeddings for the rotary features; None means none.
        DeepSeek's are interleaved.
      head_axis: Split the heads over this mesh axis (tensor parallelism). Every device
        holds the whole cache, which has only one key head, and all projections that
        have no axis of heads.
      indexer: Chooses the keys that each query attends to (DeepSeek V3.2, GLM 5);
        requires `q_lora_rank`. The cache then also holds one index key per token. See
        `flax_mha.Indexer`.
      gate: As in `MultiHeadAttention` (HY 4; `Gate("head")`: Ling 3). The gate has no
        bias.
      query_residual: Use the compressed queries both after and before their norm,
        concatenated to 2 * q_lora_rank features, as the input of `q_b_proj` and `gate`
        (A.X K2).

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> attention = flax_mha.MultiHeadLatentAttention(
      ...     4,
      ...     64,
      ...     kv_lora_rank=32,
      ...     qk_nope_head_dim=16,
      ...     qk_rope_head_dim=8,
      ...     v_head_dim=16,
      ...     rope=flax_mha.rope.RoPE(interleaved=True),
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> attention.init_cache((2, 100, 64))
      >>> attention(jnp.ones((2, 10, 64)), decode=True).shape
      (2, 10, 64)
      >>> attention.cached_key.shape
      (2, 100, 1, 40)

    Source: Liu et al., DeepSeek-V2, arXiv:2405.04434.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int | None = None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        use_bias: bool = False,
        norm_epsilon: float = 1e-6,
        attention_fn: Callable[..., Array] = default_attention_fn,
        decode: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        implementation: Implementation | None = None,
        scale: float | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        rope: RoPE | None = None,
        head_axis: str | None = None,
        indexer: Indexer | None = None,
        gate: bool | Gate = False,
        query_residual: bool = False,
    ) -> None:
        check_features(in_features=in_features, out_features=out_features)
        validation.check_bool("sinks", sinks)
        check_rngs(rngs, nnx.Rngs)
        # Python's TypeErrors about a call's arguments print this or, without it, the
        # whole module.
        self.__qualname__ = type(self).__qualname__
        self.num_heads = num_heads
        self.in_features = in_features
        self.in_kv_features = in_features
        self.kv_lora_rank = kv_lora_rank
        self.q_lora_rank = q_lora_rank
        self.v_head_dim = v_head_dim
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.out_features = in_features if out_features is None else out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dropout_rate = check_dropout_rate(dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.decode = decode
        self.norm_epsilon = norm_epsilon
        self.attention_fn = attention_fn
        self.implementation = implementation
        self.scale = scale
        # Checked first, because Flax rejects a pair of arrays with its own error.
        check_window(local_window_size)
        self.local_window_size = local_window_size
        self.logits_soft_cap = check_soft_cap(logits_soft_cap)
        self.rope = rope
        self.head_axis = head_axis
        self.query_residual = query_residual
        self.gating = gate_of(gate)
        check_latent(self, indexer)
        options = self._options()
        keeps_stream = keep_rngs and options.dropout_rate > 0
        self.rngs = rngs.dropout.fork() if keeps_stream else None

        # What all layers have in common.
        linear = functools.partial(
            nnx.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            dot_general=dot_general,
            rngs=rngs,
        )
        norm = functools.partial(
            nnx.RMSNorm,
            epsilon=norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

        # Queries: x -> q_a -> norm -> q_b, or x -> q.
        in_of_heads = in_features
        self.q_a_proj: Any = nnx.data(None)
        self.q_a_layernorm: Any = nnx.data(None)
        if q_lora_rank is not None:
            self.q_a_proj = linear(in_features, q_lora_rank, use_bias=use_bias)
            self.q_a_layernorm = norm(q_lora_rank)
            in_of_heads = q_lora_rank * (1 + query_residual)
        of_query = (num_heads, qk_nope_head_dim + qk_rope_head_dim)
        setattr(self, self._query_name, linear(in_of_heads, of_query, use_bias=False))

        # Latents and the rotary key: x -> kv_a; then latents -> norm -> kv_b.
        of_latent_key = kv_lora_rank + qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(in_features, of_latent_key, use_bias=use_bias)
        self.kv_a_layernorm = norm(kv_lora_rank)
        of_key_and_value = (num_heads, qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = linear(kv_lora_rank, of_key_and_value, use_bias=False)

        # The output, its gate, and sinks.
        of_value = (num_heads, v_head_dim)
        self.o_proj = linear(
            of_value,
            self.out_features,
            axis=(-2, -1),
            use_bias=use_bias,
            kernel_init=out_kernel_init or kernel_init,
        )
        self.gate: Any = nnx.data(None)
        if self.gating is not None:
            in_of_gate = in_of_heads if query_residual else in_features
            self.gate = linear(in_of_gate, self.gating.shape(*of_value), use_bias=False)
        self.sinks = nnx.data(None)
        if sinks:
            self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype))
        self.indexer = nnx.data(None)
        if indexer is not None and q_lora_rank is not None:
            self.indexer = IndexerLayers(
                indexer,
                features=in_features,
                q_rank=q_lora_rank,
                linear=linear,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        # `init_cache` makes the cache.
        for name in CACHE:
            setattr(self, name, nnx.data(None))

        # The other projections have no axis of heads.
        self._split_heads(
            num_heads,
            (
                (self._query_name, "query"),
                ("kv_b_proj", "key"),
                ("o_proj", "out"),
                ("gate", gate_axes(self.gating)),
            ),
        )

    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        *,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Sharding | None = None,
        qkv_sharding: Sharding | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | None = None,
        lengths: Int[Array, "*B"] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | None = None,
        sow_max_score: bool = False,
        key_indices: Int[Array, "..."] | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Computes latent attention; for the arguments, see
        `flax_mha.MultiHeadAttention.__call__`.
        """
        options = self._options()
        flax_arguments = self._flax_arguments(
            options.dropout_rate, deterministic, rngs, sow_weights
        )
        given = Given(
            decode=self._first_given("decode", decode),
            inputs_q=inputs_q,
            mask=mask,
            is_causal=is_causal,
            bias=bias,
            segment_ids=segment_ids,
            lengths=lengths,
            score_mod=score_mod,
            positions=positions,
            qkv_sharding=qkv_sharding,
            sow_max_score=sow_max_score,
            key_indices=key_indices,
        )
        parts = ModuleParts(
            module=self,
            options=options,
            query=self._query,
            key=self._latent_key,
            latent=self._latent(),
            out=with_sharding(self.o_proj, out_sharding),
            sinks=None if self.sinks is None else self.sinks[...],
            cache=self._cache,
            write=self._write,
            arguments=flax_arguments,
            indexer=self._index_parts(),
            gate=None if self.gate is None else self._gate,
            features=(self.in_features, self.in_features),
        )
        return call_module(parts, given)

    explain = explaining(__call__)

    def _options(self) -> AttentionOptions:
        return AttentionOptions.of(
            self,
            scale=scale_of(self),
            norms_after_rope=False,
            num_kv_heads=1,
            head_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
        )

    def _latent(self) -> Latent:
        layer = self.kv_b_proj
        latent = Latent(
            size=self.kv_lora_rank, key_size=self.qk_nope_head_dim, layer=layer
        )
        # Queries absorb a kernel only if the layer does nothing else with it.
        if not _only_multiplies(layer) or products_are_replaced():
            return latent
        kernel = layer.kernel[...]
        # A restored kernel may be a NumPy array; a quantized one is an object of its
        # library.
        if not isinstance(kernel, jax.Array | np.ndarray):
            return latent
        return latent._replace(
            kernel=jnp.asarray(kernel), dtype=layer.dtype, precision=layer.precision
        )

    def _latent_key(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T 1 CR"]:
        """Computes the one key of all heads: the normalized latent, then the rotary
        key.
        """
        both = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(both[..., : self.kv_lora_rank])
        rotary = both[..., self.kv_lora_rank :].astype(latent.dtype)
        return jnp.concatenate([latent, rotary], axis=-1)[..., None, :]

    @property
    def _query_name(self) -> str:
        if self.q_lora_rank is None:
            return "q_proj"
        return "q_b_proj"

    def _query(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T N H"]:
        if self.q_lora_rank is not None:
            x = self._query_features(x)
        return getattr(self, self._query_name)(x)

    def _gate(self, x: Float[Array, "*B T D"]) -> Float[Array, "..."]:
        if self.query_residual:
            x = self._query_features(x)
        return self.gate(x)

    def _query_features(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T R"]:
        """Compresses inputs to the features that `q_b_proj` (with `query_residual`,
        also `gate`) projects to heads.
        """
        compressed = self.q_a_proj(x)
        normalized = self.q_a_layernorm(compressed)
        if self.query_residual:
            return jnp.concatenate([normalized, compressed], axis=-1)
        return normalized

    def _index_parts(self) -> IndexParts | None:
        layers = self.indexer
        if layers is None:
            return None

        # The indexer trains only its own layers.
        def project(x: Array) -> tuple[Array, Array, Array]:
            x = lax.stop_gradient(x)
            compressed = self.q_a_layernorm(self.q_a_proj(x))
            return layers(x, lax.stop_gradient(compressed))

        variables = (self.cached_index_key, self.cached_index_scale)
        return IndexParts(
            indexer=layers.config,
            project=project,
            cache=functools.partial(read, variables),
            write=functools.partial(assign, variables),
        )

    def _sizes_of_token(self) -> dict[str, Any]:
        return {
            "num_kv_heads": 1,
            "head_size": self.kv_lora_rank + self.qk_rope_head_dim,
            "value_size": self.kv_lora_rank,
        }
