"""`MultiHeadAttention` for `flax.nnx`: Flax's parameters and arguments around the attention of this package."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha import _check
from flax_mha.adapter import attention_fn as default_attention_fn
from flax_mha.attention import Implementation, ScoreMod
from flax_mha.kv_cache import KVCache, nan_without
from flax_mha.masks import Mask


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Multi-head attention, a drop-in for `flax.nnx.MultiHeadAttention`.

    Same constructor and call, same parameters (`query`, `key`, `value`: kernel [in, heads, head size], bias [heads,
    head size]; `out`: kernel [heads, head size, out], bias [out]), same cache variables and sown weights, so Flax
    checkpoints load unconverted. What differs is listed in the README.

    Args:
      num_heads: Number of query heads N; divides `qkv_features`.
      in_features: Features of the queries, and of keys and values unless `in_kv_features` says otherwise.
      qkv_features: N times the head size; None means `in_features`.
      out_features: Features of the output; None means `in_features`.
      num_kv_heads: Number of key and value heads K, a divisor of N (grouped-query attention); None means N.
      in_kv_features: Features of keys and values; None means `in_features`.
      broadcast_dropout: Drop the same weights in every batch entry and head. (Flax's default is True.)
      attention_fn: A function with the signature of Flax's `dot_product_attention`.
      implementation: Which implementation of the attention; None chooses. See `dot_product_attention`.
      local_window_size: (left, right): how many positions before and after its own a query sees; see
        `dot_product_attention`.
      logits_soft_cap: What no scaled score exceeds; see `dot_product_attention`.
      sinks: Learn one more logit a head, the parameter `sinks` [N], that takes part in the softmax's sum only.
      normalize_qk: Normalize each head's query and key, with a learned scale [head size]: True or "layer_norm" as Flax
        does, "rms_norm" without subtracting the mean.
      **flax_arguments: All the others of `flax.nnx.MultiHeadAttention`: `dtype`, `param_dtype`, `dropout_rate`,
        `deterministic`, `precision`, `kernel_init`, `out_kernel_init`, `bias_init`, `out_bias_init`, `use_bias`,
        `decode`, `rngs`, `keep_rngs`, ...

    Raises:
      ValueError: If heads and features do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> attention = flax_mha.MultiHeadAttention(8, 64, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
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
        broadcast_dropout: bool = False,
        attention_fn: Callable[..., Array] = default_attention_fn,
        implementation: Implementation | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        normalize_qk: bool | Literal["layer_norm", "rms_norm"] = False,
        rngs: nnx.Rngs,
        **flax_arguments: Any,
    ) -> None:
        _check.module_heads(num_heads, num_kv_heads, in_features if qkv_features is None else qkv_features)
        _check.window(local_window_size)
        _check.flag("sinks", sinks)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            broadcast_dropout=broadcast_dropout,
            attention_fn=attention_fn,
            normalize_qk=bool(_check.normalization(normalize_qk)),
            rngs=rngs,
            **flax_arguments,
        )
        if normalize_qk == "rms_norm":
            self.query_ln, self.key_ln = (  # type: ignore[assignment]
                self._rms_norm(layer_norm, rngs) for layer_norm in (self.query_ln, self.key_ln)
            )
        self.implementation = implementation
        self.local_window_size = local_window_size
        self.logits_soft_cap = _check.soft_cap(logits_soft_cap)
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if sinks else nnx.data(None)

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
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | tuple[Array, Array] | None = None,
        score_mod: ScoreMod | None = None,
        **attention_arguments: Any,
    ) -> Float[Array, "*B T Dout"]:
        """Projects to heads, attends, and projects back.

        Args:
          inputs_q: Queries.
          inputs_k: Keys; None means `inputs_q` (self-attention).
          inputs_v: Values; None means `inputs_k`.
          mask: Broadcasts to [B..., N, T, S]; True (or 1) attends. Or a mask object of `flax_mha.masks`.
          deterministic: True switches dropout off; None means what the constructor got.
          rngs: Whose stream `dropout` gives the dropout key; None means the constructor's.
          sow_weights: Sow the weights [B..., N, T, S] as `nnx.Intermediate` variable `attention_weights`.
          decode: Take one token a call and keep its key and value in the cache; None means the constructor's.
          is_causal: A query sees keys up to its own position. A decoding call always does.
          out_sharding: Sharding of the output, for `out`.
          qkv_sharding: Sharding of query, key and value, for their projections.
          bias: Broadcasts to [B..., N, T, S]; added to the scores.
          segment_ids: Documents packed into one sequence: [B..., T], or a pair for queries and keys.
          score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`; see `dot_product_attention`.
          **attention_arguments: Passed on to `attention_fn`, such as the `input_positions` of newer Flax.

        Returns:
          The output.

        Raises:
          ValueError: If inputs do not fit the module or each other, if the cache is missing, of another shape or, where
            its index is known, full. Under `jit` a step past the end answers NaN and leaves the cache as it was.
        """
        inputs_k, inputs_v = self._check_inputs(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)

        ours: dict[str, Any] = {
            "bias": bias,
            "implementation": self.implementation,
            "local_window_size": self.local_window_size,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...],
            "score_mod": score_mod,
        }
        ours |= _check.module_segment_ids(segment_ids)
        attention_arguments = {n: given for n, given in (attention_arguments | ours).items() if given is not None}
        room: Bool[Array, ""] | bool = True
        if self._first_given("decode", decode):
            if segment_ids is not None:
                raise ValueError("segment_ids must be None while decoding, but got ids; a cache holds one document.")
            variables = self._cache_variables(key)
            cache = KVCache(*(variable[...] for variable in variables))
            room, longer = cache.room, cache.append(key, value)
            for variable, new in zip(variables, (longer.key, longer.value, longer.index), strict=True):
                variable[...] = new
            key, value = longer.key, longer.value
            # A decoding query is the newest token: nothing that it must not see is in the cache yet.
            by_position = isinstance(mask, Mask) or self.local_window_size is not None or score_mod is not None
            mask, is_causal = cache.masked(mask), False
            if by_position:
                attention_arguments["query_offset"] = cache.index

        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            broadcast_dropout=self.broadcast_dropout,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal,
            **self._dropout(deterministic, rngs),
            **attention_arguments,
        )
        out = self.out(x, out_sharding=out_sharding)
        return nan_without(room, out)

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache, which decoding needs.

        Args:
          input_shape: [B..., S, D] of the inputs that are to come, one token a call; S tokens fit.
          dtype: Of the cached keys and values; None means that in which the module computes them.
        """
        if dtype is None:
            dtype = self.dtype if self.dtype is not None else self.param_dtype
        super().init_cache(input_shape, dtype)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` calls: switches dropout and decoding, and makes the cache if its size is given.

        Args:
          deterministic: True switches dropout off; None leaves it.
          decode: True makes calls decode; None leaves it.
          batch_size: Batch axes of a new cache, given together with `max_length`.
          max_length: Tokens that fit in it.

        Raises:
          TypeError: If one of the two is given without the other, or decoding starts without a cache.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        for name, size, partner in (("batch_size", batch_size, max_length), ("max_length", max_length, batch_size)):
            if size is None and (partner is not None or (decode and self.cached_key is None)):
                raise TypeError(f"'{name}' must be provided when initializing cache.")
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else batch_size
            self.init_cache((*batch, max_length, self.in_features))

    def _check_inputs(self, inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
        """Keys and values, by default the queries, if all three fit the module and each other."""
        inputs_k, inputs_v = _check.given_or_same(inputs_q, inputs_k, inputs_v)
        _check.module_inputs(inputs_q, inputs_k, inputs_v)
        for name, x, features in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            if x.shape[-1] != features:
                raise ValueError(
                    f"Incompatible input dimension, got {x.shape[-1]} but module expects {features} ({name} {x.shape})."
                )
        return inputs_k, inputs_v

    def _rms_norm(self, layer_norm: nnx.LayerNorm | None, rngs: nnx.Rngs) -> nnx.RMSNorm:
        """The same parameter `scale`, another norm."""
        norm = nnx.RMSNorm(
            self.head_dim,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            promote_dtype=self.ln_promote_dtype,
            rngs=rngs,
        )
        norm.scale = layer_norm.scale  # type: ignore[union-attr]
        return norm

    def _first_given(self, name: str, argument: bool | None) -> bool:
        """The call's argument, else the module's attribute."""
        return first_from(
            argument,
            getattr(self, name),
            error_msg=f"No `{name}` argument was provided to MultiHeadAttention as either a __call__ argument, class "
            "attribute, or nnx.flag.",
        )

    def _dropout(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> dict[str, Any]:
        """The arguments for dropout; a key is drawn where weights are dropped, and only there."""
        if self.dropout_rate == 0.0 or self._first_given("deterministic", deterministic):
            return {"deterministic": True, "dropout_rng": None}
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                "'rngs' must be provided to __call__ method if MultiHeadAttention instance is defined with "
                "keep_rngs=False."
            )
        return {"deterministic": False, "dropout_rng": (rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs)()}

    def _cache_variables(self, key: Float[Array, "*B 1 K H"]) -> tuple[nnx.Cache, nnx.Cache, nnx.Cache]:
        """Keys, values and index of the cache, if one more `key` fits their shape."""
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("Autoregressive cache not initialized, call ``init_cache`` first.")
        *batch, _, heads, size = self.cached_key.shape
        if key.shape != (*batch, 1, heads, size):
            raise ValueError(
                "Autoregressive cache shape error, "
                f"expected key shape {(*batch, 1, heads, size)} instead got {key.shape}."
            )
        return self.cached_key, self.cached_value, self.cache_index
