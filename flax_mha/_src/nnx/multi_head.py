"""`MultiHeadAttention` for `flax.nnx`: Flax's module with the attention of this
package.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn
from jaxtyping import Array, Float, Int

from flax_mha._src.attention import Implementation, ScoreMod
from flax_mha._src.cache.shared import SharedKV
from flax_mha._src.call.arguments import (
    check_dropout_rate,
    check_soft_cap,
    check_window,
)
from flax_mha._src.call.call import Sharding
from flax_mha._src.distributed.split import is_explicit
from flax_mha._src.masks import Mask
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.attention_fn import explaining, ours
from flax_mha._src.modules.call import Given, ModuleParts, ProcessHeads, call_module
from flax_mha._src.modules.dot_general import dot_general
from flax_mha._src.modules.layers import Gate, Norm, gate_axes, gate_of, norm_of
from flax_mha._src.modules.options import (
    AttentionOptions,
    check_features,
    check_heads,
    check_layers,
    check_rngs,
    check_score_mod,
    check_shows_parameters,
)
from flax_mha._src.nnx.module import AttentionModule, with_sharding
from flax_mha._src.rope import RoPE

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class MultiHeadAttention(AttentionModule, nnx.MultiHeadAttention):
    """Multi-head attention, a drop-in replacement for `flax.nnx.MultiHeadAttention`.

    The constructor, call, parameters, cache variables and sown weights are the same as
    in Flax, so Flax checkpoints load without conversion. The parameters are `query`,
    `key` and `value` (kernel [in, heads, head size], bias [heads, head size]) and `out`
    (kernel [heads, head size, out], bias [out]). For what differs, see
    docs/semantics.md.

    The arguments come in four groups:

    - Flax's, from `num_heads` to `key_ln_scale_metadata`. Only `normalize_qk` takes
      more than in Flax, a `Norm`.
    - Positions and masks: `rope` and `local_window_size`.
    - Heads, norms and scores, from `scale` to `score_mod`.
    - Execution: `implementation` and `head_axis`.

    Args:
      num_heads: Number of query heads N; must divide `qkv_features`.
      in_features: Features of the queries, and of keys and values unless
        `in_kv_features` is set.
      qkv_features: N times the head size; None means `in_features`.
      out_features: Features of the output; None means `in_features`.
      num_kv_heads: Number of key and value heads K, a divisor of N (grouped-query
        attention); None means N.
      in_kv_features: Features of keys and values; None means `in_features`.
      dtype: Dtype of the computation; None infers it from inputs and parameters.
      param_dtype: Dtype of the parameters.
      broadcast_dropout: Drop the same weights in every batch entry and head. (Flax's
        default is True.)
      dropout_rate: Fraction of the softmax's weights to drop, in [0, 1).
      deterministic: True disables dropout; None leaves it to the call.
      precision: Precision of all matrix products, a `jax.lax.Precision` or its name;
        None means `jax.default_matmul_precision`.
      kernel_init, bias_init: Initializers of the kernels and of the biases.
      out_kernel_init, out_bias_init: The same for `out`; None means `kernel_init` or
        `bias_init`.
      use_bias: Add a learned bias in every projection.
      attention_fn: A function with the signature of Flax's `dot_product_attention`. To
        set arguments of the default function, pass a `functools.partial` of
        `flax_mha.attention_fn`; the module's options and a call's arguments replace its
        keywords. Only one of the partial and the constructor may set `score_mod`.
      decode: True makes calls decode; None leaves it to the call.
      normalize_qk: A norm of queries and keys, before the rotation, such as
        `Norm("rms")` (Qwen 3). True is Flax's LayerNorm, `Norm("layer")`.
      qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: Functions that cast inputs
        and parameters to `dtype`: in the projections `query`, `key`, `value` and
        `gate`, in `out`, and in the norms of queries and keys.
      qkv_dot_general, out_dot_general: Functions with the signature of
        `jax.lax.dot_general` that multiply by the kernels (of `query`, `key`, `value`
        and `gate`; of `out`), for example quantized; None uses the default.
      qkv_dot_general_cls, out_dot_general_cls: Classes that each projection
        instantiates, without arguments, as its `qkv_dot_general` or `out_dot_general`.
      rngs: Random streams for parameters and dropout.
      keep_rngs: Keep a dropout stream in the module if `dropout_rate > 0`; with False,
        calls must pass `rngs`.
      kernel_metadata, bias_metadata: Metadata of kernels, for example `{"out_sharding":
        (None, "model")}`, and biases.
      out_kernel_metadata, out_bias_metadata: The same for `out`; empty means
        `kernel_metadata` or `bias_metadata`.
      query_ln_scale_metadata, key_ln_scale_metadata: Metadata of the scales in the
        norms of queries and keys.
      rope: Rotary position embeddings (`flax_mha.rope.RoPE`) for queries and keys,
        after their norms; None means none.
      local_window_size: (left, right): how many positions before and after its own a
        query attends to; see `dot_product_attention`.
      scale: Factor that multiplies query . key; None means 1 / sqrt(head size).
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); at most 1e30.
        None means no cap.
      sinks: Learn one additional logit per head, the parameter `sinks` [N], which is
        added only to the softmax's denominator.
      gate: Multiply each head's output, before `out`, by the sigmoid of another
        projection of the input, `gate`. True is `Gate()`: a number for each feature of
        each head. `Gate("head")`: a number for each head.
      value_norm: A norm of the values, such as `Norm("rms", scale=None)` (Gemma 3n,
        Gemma 4); None means no norm.
      out_norm: A norm of the heads' outputs, after `gate` and before `out`, such as
        `Norm("rms", scale="heads", over="all_heads")` (BitNet b1.58). None means no
        norm.
      process_heads: A function `(query, key, value) -> (query, key, value)` of the new
        tokens' projections, [B..., T, heads, head size], or an `nnx.Module` with such a
        call. It runs after the norms and before the rotation, and returns arrays of the
        same shapes and dtypes; the results are cached. Examples: clipping, and values
        mixed with those of the first layer; see docs/everyday.md. None changes
        nothing.
      value_dim: Head size of the values, and so of `out`, of `gate` and of `out_norm`;
        None means the head size of queries and keys (MiMo-V2: 128 and 192).
      share_kv: Use the projected keys, before their norm and rotation, as values (Gemma
        4's `attention_k_eq_v`); there is no parameter `value`, and calls accept no
        `inputs_v`.
      reuse_kv: Attend to the keys and values of an earlier layer, which every call
        passes as `kv` (Gemma 3n, Gemma 4): no parameters `key`, `value` and `key_ln`,
        and no cache. Both layers must have the same key heads and head size.
      score_mod: The `score_mod` of calls that pass none: a function
        `score_mod(score, b, h, q_idx, kv_idx) -> score`, or an `nnx.Module` with such a
        call, whose parameters become parameters of this module, such as
        `recipes.RelativeBias`. Layers that are given the same module share it.
      implementation: Name of the attention implementation; None lets the library
        choose. See `dot_product_attention`.
      head_axis: Split the heads over this mesh axis, or the mesh axis of this logical
        axis (tensor parallelism). Parameters and caches get the metadata
        `out_sharding`, and are placed accordingly if the module is created under
        `jax.set_mesh`. If there are fewer key heads than devices on this axis, all
        devices hold all key heads; the mesh must then be set by `jax.set_mesh`.

    Raises:
      ValueError: If an argument is out of range, or if heads and features do not fit
        together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> attention = flax_mha.MultiHeadAttention(
      ...     8, 64, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> attention(jnp.ones((2, 10, 64)), is_causal=True).shape
      (2, 10, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., Array] = default_attention_fn,
        decode: bool | None = None,
        normalize_qk: bool | Norm = False,
        qkv_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        out_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        implementation: Implementation | None = None,
        scale: float | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        gate: bool | Gate = False,
        rope: RoPE | None = None,
        head_axis: str | None = None,
        value_norm: Norm | None = None,
        out_norm: Norm | None = None,
        process_heads: ProcessHeads | None = None,
        value_dim: int | None = None,
        share_kv: bool = False,
        reuse_kv: bool = False,
        score_mod: ScoreMod | None = None,
    ) -> None:
        check_features(
            in_features=in_features,
            out_features=out_features,
            in_kv_features=in_kv_features,
        )
        if qkv_features is None:
            qkv_features = in_features
        key_heads, head_dim = check_heads(num_heads, num_kv_heads, qkv_features)
        check_layers(
            sinks=sinks,
            share_kv=share_kv,
            reuse_kv=reuse_kv,
            value_dim=value_dim,
            value_norm=value_norm,
            process_heads=process_heads,
        )
        check_score_mod(score_mod, ours(attention_fn))
        check_shows_parameters(process_heads=process_heads, score_mod=score_mod)
        check_rngs(rngs, nnx.Rngs)
        norm_of_qk = norm_of("normalize_qk", normalize_qk)
        norm_of_values = norm_of("value_norm", value_norm)
        norm_of_output = norm_of("out_norm", out_norm)
        # Python's TypeErrors about a call's arguments print this or, without it, the
        # whole module.
        self.__qualname__ = type(self).__qualname__
        self.gating = gate_of(gate)
        self.process_heads = process_heads
        self.score_mod = score_mod
        self.norms_after_rope = norm_of_qk is not None and norm_of_qk.after_rope

        # The attributes of `AttentionOptions`, some of which Flax sets again.
        self.attention_fn = attention_fn
        self.dropout_rate = check_dropout_rate(dropout_rate)
        self.implementation = implementation
        self.scale = scale
        # Checked first, because Flax rejects a pair of arrays with its own error.
        check_window(local_window_size)
        self.local_window_size = local_window_size
        self.logits_soft_cap = check_soft_cap(logits_soft_cap)
        self.rope = rope
        self.head_axis = head_axis
        self.reuse_kv = reuse_kv
        self.num_kv_heads = key_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else int(value_dim)
        AttentionOptions.of(self)

        # Flax's layers. It gets deprecated arguments only if a user passes them.
        deprecated = {
            "qkv_dot_general": qkv_dot_general,
            "out_dot_general": out_dot_general,
            "qkv_dot_general_cls": qkv_dot_general_cls,
            "out_dot_general_cls": out_dot_general_cls,
        }
        super().__init__(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            in_kv_features=in_kv_features,
            dtype=dtype,
            param_dtype=param_dtype,
            broadcast_dropout=broadcast_dropout,
            dropout_rate=self.dropout_rate,
            deterministic=deterministic,
            precision=precision,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            bias_init=bias_init,
            out_bias_init=out_bias_init,
            use_bias=use_bias,
            attention_fn=attention_fn,
            decode=decode,
            normalize_qk=norm_of_qk is not None,
            qkv_promote_dtype=qkv_promote_dtype,
            out_promote_dtype=out_promote_dtype,
            ln_promote_dtype=ln_promote_dtype,
            rngs=rngs,
            keep_rngs=keep_rngs,
            kernel_metadata=kernel_metadata,
            out_kernel_metadata=out_kernel_metadata,
            bias_metadata=bias_metadata,
            out_bias_metadata=out_bias_metadata,
            query_ln_scale_metadata=query_ln_scale_metadata,
            key_ln_scale_metadata=key_ln_scale_metadata,
            **{name: x for name, x in deprecated.items() if x is not None},
        )

        # Norms; those of queries and keys replace Flax's, and take over their metadata.
        if isinstance(normalize_qk, Norm):
            self.query_ln = self._norm(
                normalize_qk, num_heads, self.head_dim, rngs, of_flax=self.query_ln
            )
            self.key_ln = self._norm(
                normalize_qk,
                self.num_kv_heads,
                self.head_dim,
                rngs,
                of_flax=self.key_ln,
            )
        self.value_ln = self._norm(
            norm_of_values, self.num_kv_heads, self.value_dim, rngs
        )
        self.out_norm = self._norm(norm_of_output, num_heads, self.value_dim, rngs)

        # Layers that Flax has and this module lacks.
        if share_kv:
            self.value: Any = nnx.data(None)
        if reuse_kv:
            self.key: Any = nnx.data(None)
            self.value = nnx.data(None)
            self.key_ln = nnx.data(None)

        # Layers and parameters that Flax lacks.
        self.sinks = nnx.data(None)
        if sinks:
            self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype))
        linear = functools.partial(
            nnx.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            use_bias=use_bias,
            rngs=rngs,
        )
        to_heads = functools.partial(
            linear,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
        )
        self.gate = nnx.data(None)
        if self.gating is not None:
            of_gate = self.gating.shape(num_heads, self.value_dim)
            self.gate = to_heads(self.in_features, of_gate)

        # Flax's layers have the head size of queries and keys.
        if self.value_dim != self.head_dim:
            if not reuse_kv:
                of_values = (self.num_kv_heads, self.value_dim)
                self.value = to_heads(self.in_kv_features, of_values)
            self.out = linear(
                (num_heads, self.value_dim),
                self.out_features,
                axis=(-2, -1),
                kernel_init=out_kernel_init or kernel_init,
                bias_init=out_bias_init or bias_init,
                kernel_metadata=out_kernel_metadata or kernel_metadata,
                bias_metadata=out_bias_metadata or bias_metadata,
                promote_dtype=out_promote_dtype,
                dot_general=out_dot_general,
                dot_general_cls=out_dot_general_cls,
            )

        # Our product, unless a user has set another.
        for layer in (self.query, self.key, self.value, self.gate, self.out):
            if layer is None:
                continue
            if layer.dot_general is None and layer.dot_general_cls is None:
                layer.dot_general = dot_general

        # Flax's module lacks these variables of the cache.
        self.cached_lengths = nnx.data(None)
        self.cached_scale = nnx.data(None)
        self._split_heads(
            self.num_kv_heads,
            (
                ("query", "query"),
                ("key", "key"),
                ("value", "key"),
                ("out", "out"),
                ("gate", gate_axes(self.gating)),
            ),
        )

    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Float[Array, "*B S Dk"] | None = None,
        inputs_v: Float[Array, "*B S Dk"] | None = None,
        *,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Sharding | None = None,
        qkv_sharding: Sharding | None = None,
        input_positions: Array | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | tuple[Array, Array] | None = None,
        lengths: Int[Array, "*B"] | tuple[Array | None, Array | None] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | tuple[Array, Array] | None = None,
        store_keys: bool = False,
        sow_max_score: bool = False,
        key_indices: Int[Array, "..."] | None = None,
        kv: SharedKV | None = None,
        return_kv: bool = False,
        process_heads: ProcessHeads | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Projects the inputs to heads, computes attention, and projects the result to
        `out_features`.

        Args:
          inputs_q: Queries.
          inputs_k: Keys; None means `inputs_q` (self-attention).
          inputs_v: Values; None means `inputs_k`.
          mask: Broadcasts to [B..., N, T, S]; True (or 1) attends. Or a mask object
            such as `flax_mha.CausalMask()`. While decoding, S is the number of slots of
            the cache, as for `bias`; mask objects use positions.
          deterministic: True disables dropout; None uses the constructor's value.
          rngs: Random streams with a stream `dropout`, or one stream, for the dropout
            key; None uses the constructor's stream, if `keep_rngs` is True.
          sow_weights: Sow the weights [B..., N, T, S] as `nnx.Intermediate` variable
            `attention_weights`.
          decode: Add the T tokens of this call to the cache, and attend to all tokens
            in it; None uses the constructor's value.
          is_causal: True: queries attend only to keys up to their own position. None
            means True while decoding, and otherwise what a `functools.partial` in
            `attention_fn` sets, or False. A decoding call with False attends to all
            written tokens that the mask leaves visible, later ones of the call
            included; masks that show later tokens (`recipes.prefix_lm`) require it.
          out_sharding: Sharding of the module's output, passed to the projection `out`.
          qkv_sharding: Sharding of query, key and value [B..., T, N, H], for the
            attention (see `dot_product_attention`) and, on a mesh with Explicit axes,
            for their projections.
          input_positions: Passed to `attention_fn`, as in Flax; the default function
            does not accept it.
          bias: Broadcasts to [B..., N, T, S]; added to the scores.
          segment_ids: Segment ids of documents packed into one sequence: [B..., T], or
            a pair for queries and keys. Must be None while decoding.
          lengths: Number of tokens before the padding in each sequence: [B...], or a
            pair for queries and keys, which is required if keys and queries have
            different inputs. Padded keys are masked; the attention output of padded
            queries is 0, before the output projection. While decoding, one array: how
            many of the T tokens are not padding; this requires a cache with an index
            for each sequence (`per_row`).
          score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, a function or an
            `nnx.Module`; see `dot_product_attention`. Replaces the `score_mod` of the
            constructor, or of a partial in `attention_fn`, in this call.
          positions: Positions of the tokens for `rope`: [B..., T] or [T], or a pair for
            queries and keys, which is required if keys and queries have different
            inputs; with a last axis of coordinates if `rope` has sections. None counts
            from 0, or from the index of the cache. Masks and windows ignore
            `positions`: they use the index in the sequence.
          store_keys: Store this call's keys, values and their `lengths` in the cache
            for cross-attention. Later decoding calls without `inputs_k` attend to all
            stored keys, and add none. Requires `inputs_k` and `decode`. The later calls
            accept no mask object, `score_mod` or window, because they do not count
            positions.
          sow_max_score: Sow the largest visible score of each head [B..., N] as
            `nnx.Intermediate` variable `attention_max_score`, for example for QK-Clip.
          key_indices: The keys that each query attends to: [B..., T, k] or [B..., T, K,
            k], as in `dot_product_attention`. While decoding, these are positions of
            tokens in the sequence.
          kv: Keys and values of an earlier layer's call in the same step, a
            `flax_mha.cache.SharedKV`; required if `reuse_kv` is True, otherwise None.
            Pass masks, `lengths` and `positions` to both layers.
          return_kv: Return a pair: the output, and this call's
            `flax_mha.cache.SharedKV`, for later layers. Requires self-attention.
          process_heads: Replaces the `process_heads` of the constructor in this call.

        Raises:
          ValueError: If inputs do not fit the module or each other, or if the cache is
            missing, has another shape, or is full. Under `jit`, a full cache is not an
            error: the output of the sequence is NaN, and its cache does not change.
        """
        options = AttentionOptions.of(self)
        flax_arguments = self._flax_arguments(
            options.dropout_rate, deterministic, rngs, sow_weights
        )
        if input_positions is not None:
            flax_arguments["input_positions"] = input_positions
        given = Given(
            decode=self._first_given("decode", decode),
            inputs_q=inputs_q,
            inputs_k=inputs_k,
            inputs_v=inputs_v,
            mask=mask,
            is_causal=is_causal,
            bias=bias,
            segment_ids=segment_ids,
            lengths=lengths,
            score_mod=score_mod,
            positions=positions,
            qkv_sharding=qkv_sharding,
            sow_max_score=sow_max_score,
            store_keys=store_keys,
            key_indices=key_indices,
            kv=kv,
            return_kv=return_kv,
            process_heads=process_heads,
        )

        # On a mesh with Explicit axes, the projections need the sharding of the heads.
        of_heads = None
        if qkv_sharding is not None and is_explicit(inputs_q):
            of_heads = qkv_sharding
        of_gate = of_heads
        if self.gating is not None and self.gating.per == "head":
            # Its projection has no axis of features.
            of_gate = None
        parts = ModuleParts(
            module=self,
            options=options,
            query=with_sharding(self.query, of_heads),
            key=with_sharding(self.key, of_heads),
            value=with_sharding(self.value, of_heads),
            out=with_sharding(self.out, out_sharding),
            query_norm=self.query_ln,
            key_norm=self.key_ln,
            value_norm=self.value_ln,
            process_heads=self.process_heads,
            score_mod=self.score_mod,
            sinks=None if self.sinks is None else self.sinks[...],
            gate=with_sharding(self.gate, of_gate),
            out_norm=self.out_norm,
            cache=self._cache,
            write=self._write,
            stored=None if self.cached_lengths is None else self._stored(),
            arguments=flax_arguments,
            features=(self.in_features, self.in_kv_features),
        )
        return call_module(parts, given)

    explain = explaining(__call__)

    def _sizes_of_token(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_dim,
            "value_head_size": self.value_dim,
        }

    def _norm(
        self,
        norm: Norm | None,
        heads: int,
        size: int,
        rngs: nnx.Rngs,
        of_flax: Any = None,
    ) -> Any:
        """Makes a norm of [B..., T, heads, size], or None; `of_flax` is the norm that
        it replaces, with metadata.
        """
        if norm is None:
            return nnx.data(None)
        kind: Any = nnx.RMSNorm
        if norm.kind == "layer":
            # The bias is made below, with metadata.
            kind = functools.partial(nnx.LayerNorm, use_bias=False)
        layer = kind(
            size,
            **norm.arguments,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            promote_dtype=self.ln_promote_dtype,
            rngs=rngs,
        )
        if norm.scale is None:
            return layer
        # The scale that Flax makes has no metadata of the norm that it replaces.
        shape = (heads, size) if norm.scale == "heads" else (size,)
        metadata = {} if of_flax is None else of_flax.scale.get_metadata()
        layer.scale = nnx.Param(jnp.ones(shape, self.param_dtype), **metadata)
        if norm.bias:
            layer.bias = nnx.Param(jnp.zeros(size, self.param_dtype), **metadata)
        return layer
