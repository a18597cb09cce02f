"""Multi-head attention modules for `flax.linen`: `MultiHeadDotProductAttention` and its
two subclasses.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import merge_param
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.attention import Explanation, Implementation, ScoreMod
from flax_mha._src.cache.kv_cache import KVCache
from flax_mha._src.cache.shared import SharedKV
from flax_mha._src.call.call import Sharding
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import Platform
from flax_mha._src.distributed.tensor_parallel import boxed, parameter_names
from flax_mha._src.masks import Mask
from flax_mha._src.modules.attention_fn import (
    AttentionFn,
    explained,
    explaining,
    ours,
)
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.call import (
    Arrays,
    Given,
    ModuleParts,
    ProcessHeads,
    call_module,
    reach,
)
from flax_mha._src.modules.dot_general import dot_general
from flax_mha._src.modules.layers import Gate, Norm, gate_axes, gate_of, norm_of
from flax_mha._src.modules.options import (
    AttentionOptions,
    check_has_features,
    check_heads,
    check_layers,
    check_not_of_nnx,
)
from flax_mha._src.rope import RoPE

# Variables that hold `KVCache.arrays`.
CACHED = ("cached_key", "cached_value", "cache_index", "cached_scale")
# Variables that a call with `store_keys` sets.
STORED = ("cached_key", "cached_value", "cached_lengths")


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Multi-head attention, a drop-in replacement for
    `flax.linen.MultiHeadDotProductAttention`.

    The attributes, call, parameters, cache variables and sown weights are the same as
    in Flax, so Flax checkpoints load without conversion. For what differs, see
    docs/semantics.md.

    The attributes come in the groups of `flax_mha.MultiHeadAttention`, whose
    constructor explains those that are not listed here:

    - Flax's, up to `attn_weights_value_einsum_cls`.
    - Positions and masks: `rope` and `local_window_size`.
    - Heads and norms: `scale`, `logits_soft_cap`, `sinks`, `gate`, `value_norm`,
      `out_norm`, `process_heads`, `value_dim`, `share_kv` and `reuse_kv`.
    - Execution: `implementation`, `per_row`, `cache_dtype` and `head_axis`.

    Attributes:
      qkv_features: Heads times head size; None means the features of the queries.
      out_features: Features of the output; None means the features of the queries.
      deterministic: True disables dropout; None leaves it to the call.
      decode: True makes calls decode; the first call creates the cache, with room for
        as many tokens as its input has.
      force_fp32_for_softmax: Sow float32 weights; the softmax itself is always computed
        in float32 or higher.
      qk_attn_weights_einsum_cls: Class that is instantiated, without arguments, as the
        einsum of query and key, for example a quantized one; requires the next
        attribute. Flax's own function then computes the attention.
      attn_weights_value_einsum_cls: Class of the einsum of attention weights and value.
      per_row: True gives each sequence of a cache its own index, which `lengths`
        require; `cache_index` is then [B...].
      cache_dtype: Dtype of the cached keys and values; None means the dtype of the
        keys. `int8` and `float8_e4m3fn` use half the memory of bfloat16. With a
        `local_window_size` and long inputs, the cache is a ring buffer. See
        `flax_mha.cache.KVCache.create`.
      head_axis: Split the heads over this mesh axis, or the mesh axis of this logical
        axis (tensor parallelism). Parameters are boxed with their axis names, as by
        `nn.with_partitioning`. If there are fewer key heads than devices on this axis,
        all devices hold all key heads; the mesh must then be set by `jax.set_mesh`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import linen
      >>> layer = linen.MultiHeadDotProductAttention(num_heads=8, num_kv_heads=2)
      >>> x = jnp.ones((2, 10, 64))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x, is_causal=True).shape
      (2, 10, 64)
      >>> variables["params"]["key"]["kernel"].shape
      (64, 2, 8)
    """

    broadcast_dropout: bool = False
    attention_fn: Callable[..., Array] = default_attention_fn
    num_kv_heads: int | None = None
    implementation: Implementation | None = None
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    gate: bool | Gate = False
    normalize_qk: bool | Norm = False  # type: ignore[assignment]
    rope: RoPE | None = None
    per_row: bool = False
    head_axis: str | None = None
    cache_dtype: DTypeLike | None = None
    _: dataclasses.KW_ONLY
    value_norm: Norm | None = None
    out_norm: Norm | None = None
    process_heads: ProcessHeads | None = None
    value_dim: int | None = None
    share_kv: bool = False
    reuse_kv: bool = False

    @nn.compact
    def __call__(  # noqa: D417 - see the docstring
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Float[Array, "*B S Dk"] | None = None,
        inputs_v: Float[Array, "*B S Dv"] | None = None,
        *,
        inputs_kv: Float[Array, "*B S Dk"] | None = None,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        is_causal: bool | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | tuple[Array, Array] | None = None,
        lengths: Int[Array, "*B"] | tuple[Array | None, Array | None] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | tuple[Array, Array] | None = None,
        store_keys: bool = False,
        qkv_sharding: Sharding | None = None,
        sow_max_score: bool = False,
        key_indices: Int[Array, "..."] | None = None,
        kv: SharedKV | None = None,
        return_kv: bool = False,
        process_heads: ProcessHeads | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Projects the inputs to heads, computes attention, and projects the result to
        `out_features`.

        See `flax_mha.MultiHeadAttention.__call__` for the arguments that both modules
        share.

        Args:
          inputs_q: Queries.
          inputs_kv: Keys and values in one array; deprecated, as in Flax.
          deterministic: True disables dropout; None uses the attribute.
          dropout_rng: Key for dropout; None draws one from the collection `dropout`.
          sow_weights: Sow the weights [B..., N, T, S] as `attention_weights` in the
            collection `intermediates`.
          lengths: As in `flax_mha.MultiHeadAttention.__call__`; while decoding, they
            require the attribute `per_row`.
          sow_max_score: Sow the largest visible score of each head [B..., N] as
            `attention_max_score` in the collection `intermediates`, for example for
            QK-Clip.

        Raises:
          ValueError: If inputs do not fit the module or each other, or if the cache has
            another shape or is full. Under `jit`, a full cache is not an error: the
            output of the sequence is NaN, and its cache does not change.
        """
        check_has_features(
            inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v, inputs_kv=inputs_kv
        )
        attributes = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        check_not_of_nnx(attributes)
        check_not_of_nnx({"process_heads": process_heads, "score_mod": score_mod})
        inputs_k, inputs_v, may_be_mask = _inputs(inputs_k, inputs_v, inputs_kv)

        # Check the options.
        features = inputs_q.shape[-1]
        num_heads = self.num_heads
        qkv_features = features if self.qkv_features is None else self.qkv_features
        num_kv_heads, head_size = check_heads(
            num_heads, self.num_kv_heads, qkv_features
        )
        check_layers(
            sinks=self.sinks,
            share_kv=self.share_kv,
            reuse_kv=self.reuse_kv,
            value_dim=self.value_dim,
            value_norm=self.value_norm,
            process_heads=self.process_heads,
        )
        validation.check_bool("per_row", self.per_row)
        norm_of_qk = norm_of("normalize_qk", self.normalize_qk)
        norm_of_values = norm_of("value_norm", self.value_norm)
        norm_of_output = norm_of("out_norm", self.out_norm)
        gating = gate_of(self.gate)
        value_dim = head_size if self.value_dim is None else self.value_dim
        options = AttentionOptions.of(
            self,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            value_dim=value_dim,
            norms_after_rope=norm_of_qk is not None and norm_of_qk.after_rope,
            gating=gating,
        )

        # What a module may lack. Keys that are reused come from an earlier layer,
        # which has normalized them.
        key = None
        key_norm = None
        value: Any = None
        if not self.reuse_kv:
            key = self._dense("key", (num_kv_heads, head_size))
            key_norm = self._norm("key_ln", norm_of_qk, "key")
        if not self.reuse_kv and not self.share_kv:
            value = self._dense("value", (num_kv_heads, value_dim))
        gate = None
        if gating is not None:
            gate = self._dense("gate", gating.shape(num_heads, value_dim))
        sinks = None
        if self.sinks:
            init = self._split(nn.initializers.zeros_init(), "sinks")
            sinks = self.param("sinks", init, (num_heads,), self.param_dtype)
        stored = None
        if self.has_variable("cache", "cached_lengths"):
            stored = tuple(
                jnp.asarray(self.get_variable("cache", name)) for name in STORED
            )

        # Filled by `_cache`, for `_write`.
        variables: list[nn.Variable] = []
        flax_arguments = self._flax_arguments(
            options.dropout_rate, deterministic, dropout_rng, sow_weights
        )
        parts = ModuleParts(
            module=self,
            options=options,
            query=self._dense("query", (num_heads, head_size)),
            key=key,
            value=value,
            out=self._dense("out", self.out_features or features),
            query_norm=self._norm("query_ln", norm_of_qk, "query"),
            key_norm=key_norm,
            value_norm=self._norm("value_ln", norm_of_values, "key"),
            process_heads=self.process_heads,
            gate=gate,
            out_norm=self._norm("out_norm", norm_of_output, "query"),
            sinks=sinks,
            cache=functools.partial(self._cache, variables),
            write=functools.partial(self._write, variables),
            stored=stored,
            arguments=flax_arguments,
        )
        # Projected first: Flax reports its number of features first.
        if may_be_mask and value is not None:
            values = value(inputs_v)
            parts = parts._replace(value=lambda _: values)
        given = Given(
            decode=self.decode,
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
        return call_module(parts, given)

    explain = nn.nowrap(explaining(__call__))

    def _dense(self, name: str, features: int | tuple[int, ...]) -> nn.DenseGeneral:
        """Makes the projection `name`: "out" maps heads to features; all others map
        features to heads.
        """
        options: dict[str, Any] = {
            "features": features,
            "name": name,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "use_bias": self.use_bias,
            "precision": self.precision,
        }
        if name == "out":
            kernel_init = self.out_kernel_init or self.kernel_init
            bias_init = self.out_bias_init or self.bias_init
            return nn.DenseGeneral(
                axis=(-2, -1),
                kernel_init=self._split(kernel_init, "out"),
                bias_init=self._split(bias_init, "out_bias"),
                dot_general=_product(self.out_dot_general, self.out_dot_general_cls),
                dot_general_cls=self.out_dot_general_cls,
                **options,
            )
        # The key in `parameter_names`.
        axes = name
        if name == "value":
            axes = "key"
        if name == "gate":
            axes = gate_axes(gate_of(self.gate))
        return nn.DenseGeneral(
            axis=-1,
            kernel_init=self._split(self.kernel_init, axes),
            bias_init=self._split(self.bias_init, axes, bias=True),
            dot_general=_product(self.qkv_dot_general, self.qkv_dot_general_cls),
            dot_general_cls=self.qkv_dot_general_cls,
            **options,
        )

    def _norm(self, name: str, norm: Norm | None, heads: str) -> nn.Module | None:
        """Makes a norm of [B..., T, heads, size], or None.

        `heads`, "query" or "key", says which heads these are. It names the mesh axes of
        a scale with an entry for each head.
        """
        if norm is None:
            return None
        kind: Callable[..., nn.Module] = nn.RMSNorm
        if norm.kind == "layer":
            kind = functools.partial(nn.LayerNorm, use_bias=norm.bias)
        if norm.scale == "heads":
            init = self._split(nn.initializers.ones_init(), heads, bias=True)
            kind = functools.partial(kind, scale_init=init)
        return kind(
            **norm.arguments,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
        )

    @nn.nowrap
    def _explained(
        self, platform: Platform | None, *inputs: Any, **arguments: Any
    ) -> Explanation:
        """Explains which implementation a call with these inputs and arguments uses;
        traces a copy of this module.
        """
        # Not traced, so that the cache's index is known.
        variables = None if self.scope is None else self.variables

        def call(attention_fn: AttentionFn) -> Any:
            layer = self.clone(attention_fn=attention_fn, parent=None)
            key = jax.random.key(0)
            rngs = {"params": key, "dropout": key}
            if variables is None:
                return layer.init_with_output(rngs, *inputs, **arguments)
            collections = ["cache", "intermediates"]
            return layer.apply(
                variables, *inputs, rngs=rngs, mutable=collections, **arguments
            )

        return explained(self.attention_fn, platform, call)

    @nn.nowrap
    def _split(
        self, init: Callable[..., Any], parameter: str, bias: bool = False
    ) -> Callable[..., Any]:
        """Wraps an initializer so that Flax boxes the parameter with the names of its
        mesh axes, if `head_axis` is set.

        `parameter` is a key of `parameter_names`; with `bias`, the initializer is for
        the bias beside this kernel.
        """
        if self.head_axis is None or not self.is_initializing():
            return init
        num_kv_heads = self.num_kv_heads or self.num_heads
        names = parameter_names(self.head_axis, self.num_heads, num_kv_heads)[parameter]
        if bias:
            # A bias has no axis of the input.
            names = names[1:]
        return boxed(init, self.head_axis, names)

    @nn.nowrap
    def _flax_arguments(
        self,
        dropout_rate: float,
        deterministic: bool | None,
        dropout_rng: Array | None,
        sow_weights: bool,
    ) -> dict[str, Any]:
        """Returns Flax's arguments for `attention_fn`; omits optional ones that a
        user's function does not take.
        """
        keeps_all = dropout_rate == 0.0 or merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if not keeps_all and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        arguments = {
            "mask": None,
            "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": keeps_all,
            "dtype": self.dtype,
            "precision": self.precision,
            "force_fp32_for_softmax": self.force_fp32_for_softmax,
            "qk_attn_weights_einsum": _made(self.qk_attn_weights_einsum_cls),
            "attn_weights_value_einsum": _made(self.attn_weights_value_einsum_cls),
        }
        if sow_weights:
            arguments["module"] = self
        if ours(self.attention_fn) is not None:
            return arguments

        parameters = inspect.signature(self.attention_fn).parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return arguments
        # Never left out: a function without them must fail, instead of ignoring
        # dropout. `call_module` passes masks.
        passed = {"module", *parameters}
        if not keeps_all:
            passed |= {"dropout_rng", "dropout_rate"}
        return {name: x for name, x in arguments.items() if name in passed}

    @nn.nowrap
    def _cache(
        self, variables: list[nn.Variable], query: Array, key: Array
    ) -> Arrays | None:
        """Returns the arrays of the cache, ordered as in `KVCache.arrays`; None if this
        call creates the cache.

        `query` and `key` are those of the new tokens. Appends the cache's variables to
        the list `variables`, for `_write`.
        """
        if not self.has_variable("cache", "cached_key"):
            *batch, length, num_heads, size = key.shape
            made = KVCache.create(
                batch,
                max_length=length,
                num_kv_heads=num_heads,
                head_size=size,
                dtype=key.dtype if self.cache_dtype is None else self.cache_dtype,
                window=reach(self.local_window_size),
                per_row=self.per_row,
                value_head_size=self.value_dim,
            )
            # Only a cache with 8 bits has the last array, of scales.
            for name, x in zip(CACHED, made.arrays, strict=False):
                variables.append(self.variable("cache", name, lambda x=x: x))
            return None

        for name in CACHED:
            if self.has_variable("cache", name):
                variables.append(self.variable("cache", name, None))
        # A checkpoint may hold NumPy's arrays.
        key, *others = (jnp.asarray(variable.value) for variable in variables)
        *batch, _, _, size = key.shape
        expected = (*batch, query.shape[-3], self.num_heads, size)
        if query.shape != expected:
            raise ValueError(
                f"Autoregressive cache shape error, expected query shape {expected} "
                f"instead got {query.shape}."
            )
        return key, *others

    @nn.nowrap
    def _write(
        self, variables: list[nn.Variable], arrays: Arrays, stored: bool
    ) -> None:
        if stored:
            for name, x in zip(STORED, arrays, strict=True):
                self.put_variable("cache", name, x)
            return
        for variable, x in zip(variables, arrays, strict=True):
            variable.value = x


class MultiHeadAttention(MultiHeadDotProductAttention):
    """The same as `MultiHeadDotProductAttention`; its default name is
    `MultiHeadAttention_0`, as in Flax.
    """


class SelfAttention(MultiHeadDotProductAttention):
    """Self-attention, a drop-in replacement for `flax.linen.SelfAttention`.

    This is `MultiHeadDotProductAttention` with one input and the same parameters. As in
    Flax, its default name is `SelfAttention_0`, and `mask`, `deterministic`,
    `dropout_rng` and `sow_weights` may be passed by position. Flax's class is
    deprecated; this one does not warn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import linen
      >>> layer = linen.SelfAttention(num_heads=8)
      >>> x = jnp.ones((2, 10, 64))
      >>> output, variables = layer.init_with_output(jax.random.key(0), x)
      >>> output.shape
      (2, 10, 64)
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: Float[Array, "*B T D"],
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        *,
        is_causal: bool | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | None = None,
        lengths: Int[Array, "*B"] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | None = None,
        qkv_sharding: Sharding | None = None,
        sow_max_score: bool = False,
        key_indices: Int[Array, "..."] | None = None,
        kv: SharedKV | None = None,
        return_kv: bool = False,
        process_heads: ProcessHeads | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Calls `MultiHeadDotProductAttention` with `inputs_q` as queries, keys and
        values.
        """
        return super().__call__(
            inputs_q,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
            is_causal=is_causal,
            bias=bias,
            segment_ids=segment_ids,
            lengths=lengths,
            score_mod=score_mod,
            positions=positions,
            qkv_sharding=qkv_sharding,
            sow_max_score=sow_max_score,
            key_indices=key_indices,
            kv=kv,
            return_kv=return_kv,
            process_heads=process_heads,
        )

    explain = nn.nowrap(explaining(__call__))  # type: ignore[arg-type]


def _made(cls: Callable | None) -> Any:
    """Returns an instance of a class, or None without one."""
    if cls is None:
        return None
    return cls()


def _product(product: object, product_cls: object) -> Any:
    """Returns the `dot_general` of a projection: ours unless a user sets another."""
    if product or product_cls:
        return product
    return dot_general


def _inputs(
    inputs_k: Array | None, inputs_v: Array | None, inputs_kv: Array | None
) -> tuple[Any, Any, bool]:
    """Returns the inputs of keys and of values, and whether `inputs_v` looks like a
    mask (is square); if so, warns.

    Until Flax 0.7.4, `mask` was the third positional argument. `inputs_kv`, if given,
    is returned as both inputs.
    """
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                "If either `inputs_k` or `inputs_v` is not None, `inputs_kv` must be "
                "None. If `inputs_kv` is not None, both `inputs_k` and `inputs_v` must "
                "be None."
            )
        text = (
            "The inputs_kv arg will be deprecated soon. Use inputs_k and inputs_v "
            "instead. See https://github.com/google/flax/discussions/3389 for more "
            "information."
        )
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return inputs_kv, inputs_kv, False
    if inputs_k is None or inputs_v is None:
        return inputs_k, inputs_v, False
    is_square = inputs_v.shape[-1:] == inputs_v.shape[-2:-1]
    if not is_square:
        return inputs_k, inputs_v, False
    text = (
        f"You are passing an array of shape {inputs_v.shape} to the `inputs_v` arg, "
        "when you may have intended to pass it to the `mask` arg. As of Flax version "
        "0.7.4, the function signature of MultiHeadDotProductAttention's `__call__` "
        "method has changed: use the kwarg `mask` instead. See "
        "https://github.com/google/flax/discussions/3389 for more information."
    )
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return inputs_k, inputs_v, True
