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
from flax_mha._src.call.arguments import check_dropout_rate
from flax_mha._src.call.operands import Sharding
from flax_mha._src.core import validation
from flax_mha._src.core.tracing import Platform
from flax_mha._src.distributed.tensor_parallel import boxed, parameter_names
from flax_mha._src.masks import Mask
from flax_mha._src.modules.attention_fn import ExplainedAttention, core_of, explaining
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.call import (
    PASSED_ON,
    Arrays,
    FlaxModule,
    Given,
    ProcessHeads,
    call_module,
    reach,
)
from flax_mha._src.modules.dot_general import dot_general
from flax_mha._src.modules.layers import Gate, Norm, gate_of, norm_of
from flax_mha._src.modules.options import check_has_features, check_options
from flax_mha._src.rope import RoPE

# Variables that hold `KVCache.arrays`.
CACHED = ("cached_key", "cached_value", "cache_index", "cached_scale")
# Variables that a call with `store_keys` sets.
STORED = ("cached_key", "cached_value", "cached_lengths")


class AttentionModule:
    """The base class of both attention modules: manages the cache, dropout, tensor
    parallelism and `explain`.
    """

    def _explained(
        self: Any, platform: Platform | None, *inputs: Any, **arguments: Any
    ) -> Explanation:
        """Explains which implementation a call with these inputs and arguments uses;
        traces a copy of this module.
        """
        # Not traced, so that the cache's index is known.
        variables = None if self.scope is None else self.variables
        explained = ExplainedAttention(self.attention_fn, platform)
        layer = self.clone(attention_fn=explained, parent=None)

        def call(key: Array) -> Any:
            rngs = {"params": key, "dropout": key}
            if variables is None:
                return layer.init_with_output(rngs, *inputs, **arguments)[0]
            return layer.apply(
                variables,
                *inputs,
                rngs=rngs,
                mutable=["cache", "intermediates"],
                **arguments,
            )[0]

        jax.eval_shape(call, jax.random.key(0))
        return explained.explanations[0]

    def _split(
        self: Any, init: Callable[..., Any], parameter: str, bias: bool = False
    ) -> Callable[..., Any]:
        """Wraps an initializer so that Flax boxes the parameter with the names of its
        mesh axes, if `head_axis` is set.

        `parameter` is a key of `parameter_names`; with `bias`, the initializer is for
        the bias beside this kernel.
        """
        if self.head_axis is None or not self.is_initializing():
            return init
        num_kv_heads = getattr(self, "num_kv_heads", None) or self.num_heads
        names = parameter_names(self.head_axis, self.num_heads, num_kv_heads)[parameter]
        return boxed(init, self.head_axis, names[1:] if bias else names)

    def _flax_arguments(
        self: Any,
        mask: Array | Mask | None,
        deterministic: bool | None,
        dropout_rng: Array | None,
        sow_weights: bool,
        **others: Any,
    ) -> dict[str, Any]:
        """Returns Flax's arguments for `attention_fn`; omits optional ones that a
        user's function does not take.
        """
        rate = check_dropout_rate(self.dropout_rate)
        keeps_all = rate == 0.0 or merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if not keeps_all and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        arguments = {
            "mask": mask,
            "dropout_rng": dropout_rng,
            "dropout_rate": rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": keeps_all,
            "dtype": self.dtype,
            "precision": self.precision,
            **({"module": self} if sow_weights else {}),
            **others,
        }
        if core_of(self.attention_fn) is not None:
            return arguments
        known = inspect.signature(self.attention_fn).parameters
        takes_all = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()
        )
        # Never left out: a function without them must fail, instead of ignoring a mask
        # or dropout.
        needed = {"module"} | ({"mask"} if mask is not None else set())
        needed |= set() if keeps_all else {"dropout_rng", "dropout_rate"}
        return {
            name: x
            for name, x in arguments.items()
            if takes_all or name in known or name in needed
        }

    def _cache(
        self: Any,
        variables: list[nn.Variable],
        value_size: int | None,
        query: Array,
        key: Array,
    ) -> Arrays | None:
        """Returns the arrays of the cache, ordered as in `KVCache.arrays`; None if this
        call creates the cache.

        `query` and `key` are those of the new tokens. Appends the cache's variables to
        the list `variables`, for `_write`.
        """
        if not self.has_variable("cache", "cached_key"):
            *batch, length, num_heads, size = key.shape
            dtype = key.dtype if self.cache_dtype is None else self.cache_dtype
            window = reach(self.local_window_size)
            options = {"per_row": self.per_row, "value_size": value_size}
            options["value_head_size"] = getattr(self, "value_dim", None)
            made = KVCache.create(
                batch, length, num_heads, size, dtype, window, **options
            ).arrays
            names = CACHED if value_size is None else (CACHED[0], *CACHED[2:])
            for name, x in zip(names, made, strict=False):
                variables.append(self.variable("cache", name, lambda x=x: x))
            return None
        variables += [
            self.variable("cache", name, None)
            for name in CACHED
            if self.has_variable("cache", name)
        ]
        # A checkpoint may hold NumPy's arrays.
        key, *others = (jnp.asarray(variable.value) for variable in variables)
        size = key.shape[-1] if value_size is None else query.shape[-1]
        expected = (*key.shape[:-3], query.shape[-3], self.num_heads, size)
        if query.shape != expected:
            raise ValueError(
                f"Autoregressive cache shape error, expected query shape {expected} "
                f"instead got {query.shape}."
            )
        return key, *others

    def _write(
        self: Any, variables: list[nn.Variable], arrays: Arrays, stored: bool
    ) -> None:
        if stored:
            for name, x in zip(STORED, arrays, strict=True):
                self.put_variable("cache", name, x)
            return
        for variable, x in zip(variables, arrays, strict=True):
            variable.value = x


class MultiHeadDotProductAttention(AttentionModule, nn.MultiHeadDotProductAttention):
    """Multi-head attention, a drop-in replacement for
    `flax.linen.MultiHeadDotProductAttention`.

    The attributes, call, parameters, cache variables and sown weights are the same as
    in Flax, so Flax checkpoints load without conversion. For what differs, see
    :doc:`differences </differences>`. For all other attributes, see the constructor of
    `flax_mha.MultiHeadAttention`.

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
      >>> output, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)), is_causal=True)
      >>> output.shape, variables["params"]["key"]["kernel"].shape
      ((2, 10, 64), (64, 2, 8))
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
        kv: Any = None,
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
        inputs_k, inputs_v, may_be_mask = _inputs(inputs_k, inputs_v, inputs_kv)
        given = {name: x for name, x in locals().items() if name in PASSED_ON}
        parts = self._parts(
            inputs_q.shape[-1], mask, deterministic, dropout_rng, sow_weights
        )
        # Projected first: Flax reports its number of features first.
        if may_be_mask and parts.value is not None:
            values = parts.value(inputs_v)
            parts = parts._replace(value=lambda _: values)
        return call_module(parts, Given(**given, decode=self.decode))

    def _parts(self, features: int, *flax_arguments: Any) -> FlaxModule:
        if self.num_kv_heads is None:
            num_kv_heads = self.num_heads
        else:
            num_kv_heads = self.num_kv_heads
        qkv_features = features if self.qkv_features is None else self.qkv_features
        check_options(vars(self), qkv_features)
        validation.flag("per_row", self.per_row)
        head_size = qkv_features // self.num_heads
        init = self._split(nn.initializers.zeros_init(), "sinks")
        variables: list[nn.Variable] = []
        value_dim = head_size if self.value_dim is None else self.value_dim
        norm_of_qk = norm_of("normalize_qk", self.normalize_qk)
        has_key_norm = norm_of_qk is not None and not self.reuse_kv
        gating = gate_of(self.gate)
        return FlaxModule(
            module=self,
            query=self._dense("query", (self.num_heads, head_size)),
            key=None
            if self.reuse_kv
            else self._dense("key", (num_kv_heads, head_size)),
            value=None
            if self.share_kv or self.reuse_kv
            else self._dense("value", (num_kv_heads, value_dim)),
            out=self._dense("out", self.out_features or features),
            query_norm=self._norm("query_ln", norm_of_qk, "query"),
            key_norm=self._norm("key_ln", norm_of_qk, "key") if has_key_norm else None,
            norms_after_rope=norm_of_qk is not None and norm_of_qk.after_rope,
            value_norm=self._norm(
                "value_ln", norm_of("value_norm", self.value_norm), "key"
            ),
            process_heads=self.process_heads,
            gate=None
            if gating is None
            else self._dense("gate", gating.shape(self.num_heads, value_dim)),
            gating=gating,
            out_norm=self._norm(
                "out_norm", norm_of("out_norm", self.out_norm), "query"
            ),
            sinks=self.param("sinks", init, (self.num_heads,), self.param_dtype)
            if self.sinks
            else None,
            cache=functools.partial(self._cache, variables, None),
            write=functools.partial(self._write, variables),
            stored=self._stored()
            if self.has_variable("cache", "cached_lengths")
            else None,
            arguments=self._flax_arguments(
                *flax_arguments,
                force_fp32_for_softmax=self.force_fp32_for_softmax,
                qk_attn_weights_einsum=self.qk_attn_weights_einsum_cls
                and self.qk_attn_weights_einsum_cls(),
                attn_weights_value_einsum=self.attn_weights_value_einsum_cls
                and self.attn_weights_value_einsum_cls(),
            ),
        )

    explain = nn.nowrap(explaining(__call__))

    def _dense(self, name: str, features: int | tuple[int, ...]) -> nn.DenseGeneral:
        """Makes the projection `name`: "out" maps heads to features; all others map
        features to heads.
        """
        of_gate = "head_gate" if _is_per_head(self.gate) else "query"
        is_out = name == "out"
        axes = {"value": "key", "gate": of_gate}.get(name, name)
        kernel_init, bias_init = (
            (self.out_kernel_init, self.out_bias_init) if is_out else (None, None)
        )
        product = self.out_dot_general if is_out else self.qkv_dot_general
        product_cls = self.out_dot_general_cls if is_out else self.qkv_dot_general_cls
        return nn.DenseGeneral(
            features=features,
            axis=(-2, -1) if is_out else -1,
            kernel_init=self._split(kernel_init or self.kernel_init, axes),
            bias_init=self._split(
                bias_init or self.bias_init,
                "out_bias" if is_out else axes,
                bias=not is_out,
            ),
            dot_general=product or (None if product_cls else dot_general),
            dot_general_cls=product_cls,
            name=name,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            use_bias=self.use_bias,
            precision=self.precision,
        )

    def _norm(self, name: str, norm: Norm | None, heads: str) -> nn.Module | None:
        """Makes a norm of [B..., T, heads, size]; `heads`, "query" or "key", says which
        heads a scale of heads has.
        """
        if norm is None:
            return None
        options: dict[str, Any] = (
            {"use_bias": norm.bias} if norm.kind == "layer" else {}
        )
        if norm.scale == "heads":
            options["scale_init"] = self._split(
                nn.initializers.ones_init(), heads, bias=True
            )
        return (nn.LayerNorm if norm.kind == "layer" else nn.RMSNorm)(
            epsilon=float(norm.epsilon),
            use_scale=norm.scale is not None,
            reduction_axes=norm.reduced_axes,
            feature_axes=norm.scaled_axes,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
            **options,
        )

    def _stored(self) -> Any:
        return tuple(jnp.asarray(self.get_variable("cache", name)) for name in STORED)


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
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)), is_causal=True)[0].shape
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
        kv: Any = None,
        return_kv: bool = False,
        process_heads: ProcessHeads | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Calls `MultiHeadDotProductAttention` with `inputs_q` as queries, keys and
        values.
        """
        given = dict(locals())
        del given["self"], given["__class__"]  # `super` puts `__class__` there
        return super().__call__(**given)

    explain = nn.nowrap(explaining(__call__))  # type: ignore[arg-type]


def _is_per_head(gate: bool | Gate) -> bool:
    return isinstance(gate, Gate) and gate.per == "head"


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
    if (
        inputs_k is None
        or inputs_v is None
        or inputs_v.shape[-1:] != inputs_v.shape[-2:-1]
    ):
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
