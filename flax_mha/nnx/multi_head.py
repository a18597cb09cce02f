"""`MultiHeadAttention` for `flax.nnx`: Flax's module with the attention of this package."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.call.arguments import check_dropout_rate, check_soft_cap
from flax_mha._src.call.operands import Sharding
from flax_mha._src.core.tracing import Platform
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.distributed.split import is_explicit
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.call import PASSED_ON, Arrays, FlaxModule, call_module, dot_general, reach
from flax_mha._src.modules.explain import ExplainedAttention, explaining
from flax_mha._src.modules.options import Norm, NormKind, check_features, check_options, check_rngs, norm_of
from flax_mha.attention import Explanation, Implementation, ScoreMod
from flax_mha.cache.kv_cache import KVCache
from flax_mha.masks import Mask
from flax_mha.rope import RoPE

NO_METADATA: Mapping[str, Any] = MappingProxyType({})
FLAX_ARGUMENTS = tuple(inspect.signature(nnx.MultiHeadAttention.__init__).parameters)[1:]


class _ConstructorSignature:
    """The attribute `__signature__` of a class, which its metaclass would hide from `help` and editors.

    Instances have no such attribute, so that `inspect.signature` returns the signature of their call.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        _, *parameters = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(parameters)


class AttentionModule(nnx.Module):
    """The base class of both attention modules: the cache, dropout, and `explain`; subclasses set the attributes."""

    __signature__ = _ConstructorSignature()

    num_heads: int
    in_features: int
    in_kv_features: int
    dtype: Any
    param_dtype: Any
    dropout_rate: float
    broadcast_dropout: bool
    precision: Any
    deterministic: Any
    decode: Any
    rngs: Any
    attention_fn: Any
    local_window_size: int | tuple[int | None, int | None] | None
    head_axis: str | None
    cached_key: Any
    cached_value: Any
    cache_index: Any
    cached_scale: Any
    cached_lengths: Any

    def _cached_heads(self) -> tuple[int, int, int | None]:
        """Returns `num_kv_heads`, `head_size` and `value_size` of the cache; see `KVCache.create`."""
        raise NotImplementedError

    def _explained(self, platform: Platform | None, *inputs: Any, **arguments: Any) -> Explanation:
        """Explains the attention in a call, which a copy of this module traces."""
        graph, state = nnx.split(self)
        explained = ExplainedAttention(self.attention_fn, platform)

        def call() -> Array:
            # New variables with the same arrays, not traced, so that the cache's index is known.
            module = nnx.merge(graph, jax.tree.map(lambda array: array, state))
            module.attention_fn = explained
            return module(*inputs, **arguments)

        jax.eval_shape(call)
        return explained.explanations[0]

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: DTypeLike | None = None,
        *,
        per_row: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """Creates an empty cache for decoding.

        With a `local_window_size` and a large enough S, the cache is a ring buffer, which never overflows; see
        `flax_mha.kv_cache.KVCache.create`.

        Args:
          input_shape: [B..., S, D]: the inputs of all calls concatenated; the cache has room for S tokens.
          dtype: Dtype of the cached keys and values; None means the module's `dtype`, or else its `param_dtype`. `int8`
            and `float8_e4m3fn` use half the memory of bfloat16; see `flax_mha.kv_cache.KVCache.create`.
          per_row: True gives each sequence its own index, which `lengths` require; `cache_index` is then [B...].
          sharding: How a mesh splits the batch axes and heads of cached keys and values [B..., S, K, H]; None splits
            the heads along `head_axis`.

        Raises:
          ValueError: If a size is missing, negative or does not fit the module, or if the dtype is not floating point.
        """
        if dtype is None:
            dtype = self.dtype if self.dtype is not None else self.param_dtype
        if len(input_shape) < 2:
            raise ValueError(f"input_shape must be (batch..., length, features), but got {tuple(input_shape)}.")
        *batch, length, features = input_shape
        if features not in (self.in_features, self.in_kv_features):
            raise ValueError(
                f"input_shape must be (batch..., length, {self.in_features}), the shape of the inputs, but got "
                f"{tuple(input_shape)}; the module sets the number of heads and the head size."
            )
        heads, size, value_size = self._cached_heads()
        window = reach(self.local_window_size)
        names: tuple[str | None, ...] | None = None
        if self.head_axis is not None and sharding is None:
            split = tensor_parallel.parameter_names(self.head_axis, self.num_heads, heads)["key"]
            names = (*(None,) * len(batch), *(split if value_size is None else (None,) * len(split)))
        cache = KVCache.create(batch, length, heads, size, dtype, window, per_row, sharding, value_size)

        def variable(x: Array | None) -> Any:
            if x is None:
                return nnx.data(None)
            return nnx.Cache(x) if names is None else split_variable(nnx.Cache(x), names)

        self.cached_key, self.cached_scale = variable(cache.key), variable(cache.scale)
        self.cached_value = variable(cache.value if value_size is None else None)
        self.cache_index, self.cached_lengths = nnx.Cache(cache.index), nnx.data(None)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
        per_row: bool = False,
    ) -> None:
        """Sets `deterministic` and `decode`, and creates a cache if its size is given; `nnx.view` calls this.

        Args:
          deterministic: True disables dropout; None leaves the setting unchanged.
          decode: True makes calls decode; None leaves the setting unchanged.
          batch_size: Batch axes of a new cache; requires `max_length`.
          max_length: Number of tokens that the new cache has room for; requires `batch_size`.
          per_row: True gives each sequence its own index; see `init_cache`.

        Raises:
          TypeError: If only one of `batch_size` and `max_length` is given, or if decoding starts without a cache.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        for name, size, partner in (("batch_size", batch_size, max_length), ("max_length", max_length, batch_size)):
            if size is None and (partner is not None or (decode and self.cached_key is None)):
                raise TypeError(f"'{name}' must be provided when initializing cache.")
        if batch_size is not None and max_length is not None:
            batch = batch_size if isinstance(batch_size, Sequence) else (batch_size,)
            self.init_cache((*batch, max_length, self.in_features), per_row=per_row)

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            # Errors of Python about the arguments of a call print `__qualname__`, or else the whole module.
            if name == "__qualname__":
                return type(self).__qualname__
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _stored(self) -> Arrays:
        return _read(self.cached_key, self.cached_value, self.cached_lengths)

    def _cache(self, *_: Array) -> Arrays:
        """Returns the arrays of the cache; see `KVCache.of_window`."""
        if self.cached_key is None or self.cache_index is None:
            raise ValueError(
                "Autoregressive cache not initialized, call ``init_cache`` first: "
                f"layer.init_cache((*batch, max_length, {self.in_features}))."
            )
        key, *others = _read(*self._variables())
        return (key, key[..., :0], *others) if self.cached_value is None else (key, *others)

    def _write(self, arrays: Arrays, stored: bool) -> None:
        """Sets the cache's variables to a call's arrays: a new cache, or keys, values and lengths that it `stored`."""
        if stored:
            self.cached_key, self.cached_value, self.cached_lengths = map(nnx.Cache, arrays)
            self.cache_index = self.cached_scale = None
            return
        arrays = arrays if self.cached_value is not None else (arrays[0], *arrays[2:])
        for variable, array in zip(self._variables(), arrays, strict=True):
            _own(variable)[...] = array

    def _variables(self) -> list[Any]:
        """Returns the cache's variables: key, value (none in latent attention), index, and scale (only of 8 bits)."""
        variables = self.cached_key, self.cached_value, self.cache_index, self.cached_scale
        return [variable for variable in variables if variable is not None]

    def _first_given(self, name: str, argument: bool | None) -> bool:
        """Returns the argument of the call or, if that is None, the module's attribute `name`; one must not be None."""
        return first_from(
            argument,
            getattr(self, name),
            error_msg=f"No `{name}` argument was provided to {type(self).__name__} as either a __call__ argument, "
            "class attribute, or nnx.flag.",
        )

    def _flax_arguments(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None, sow_weights: bool
    ) -> dict[str, Any]:
        """Returns the arguments that Flax's module passes to its attention function, with a new key for dropout."""
        if rngs is not None:
            check_rngs(rngs, nnx.Rngs, nnx.RngStream)
        dropout_rng = None
        if self.dropout_rate != 0.0 and not self._first_given("deterministic", deterministic):
            rngs = self.rngs if rngs is None else rngs
            if rngs is None:
                raise ValueError(
                    f"'rngs' must be provided to __call__ method if {type(self).__name__} instance is defined with "
                    "keep_rngs=False."
                )
            stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
            _own(stream.count)
            dropout_rng = stream()
        return {
            "mask": None,
            "is_causal": False,
            "broadcast_dropout": self.broadcast_dropout,
            "dropout_rate": self.dropout_rate,
            "dtype": self.dtype,
            "precision": self.precision,
            "module": self if sow_weights else None,
            "deterministic": dropout_rng is None,
            "dropout_rng": dropout_rng,
        }


class MultiHeadAttention(AttentionModule, nnx.MultiHeadAttention):
    """Multi-head attention, a drop-in replacement for `flax.nnx.MultiHeadAttention`.

    The constructor, call, parameters, cache variables and sown weights are the same as in Flax, so Flax checkpoints
    load without conversion. The parameters are `query`, `key` and `value` (kernel [in, heads, head size], bias [heads,
    head size]) and `out` (kernel [heads, head size, out], bias [out]). For what differs, see
    :doc:`differences </differences>`.

    Args:
      num_heads: Number of query heads N; must divide `qkv_features`.
      in_features: Features of the queries, and of keys and values unless `in_kv_features` is set.
      qkv_features: N times the head size; None means `in_features`.
      out_features: Features of the output; None means `in_features`.
      num_kv_heads: Number of key and value heads K, a divisor of N (grouped-query attention); None means N.
      in_kv_features: Features of keys and values; None means `in_features`.
      dtype: Dtype of the computation; None infers it from inputs and parameters.
      param_dtype: Dtype of the parameters.
      broadcast_dropout: Drop the same weights in every batch entry and head. (Flax's default is True.)
      dropout_rate: Fraction of the softmax's weights to drop, in [0, 1).
      deterministic: True disables dropout; None leaves it to the call.
      precision: Precision of all matrix products, a `jax.lax.Precision` or its name; None means
        `jax.default_matmul_precision`.
      kernel_init: Initializer of the kernels.
      out_kernel_init: Initializer of the kernel of `out`; None means `kernel_init`.
      bias_init: Initializer of the biases.
      out_bias_init: Initializer of the bias of `out`; None means `bias_init`.
      use_bias: Add a learned bias in every projection.
      attention_fn: A function with the signature of Flax's `dot_product_attention`. To set arguments of the default
        function, pass a `functools.partial` of `flax_mha.attention_fn`.
      decode: True makes calls decode; None leaves it to the call.
      normalize_qk: Normalize each head of query and key, with a learned scale [head size]. True or "layer_norm":
        LayerNorm, as in Flax. "layer_norm_bias": LayerNorm with a learned bias (Phi). "layer_norm_each_head": LayerNorm
        with a scale [heads, head size] (Command R+). "rms_norm": RMSNorm. "rms_norm_after_rope": RMSNorm after the
        rotation (Hunyuan). "rms_norm_all_heads": RMSNorm over all heads of a token together, with a scale [heads, head
        size] (OLMo 2).
      qk_norm_epsilon: Added to the variance in these norms; None means 1e-6, as in Flax.
      qkv_promote_dtype: Function that casts inputs and parameters to `dtype` in the projections `query`, `key`, `value`
        and `gate`.
      out_promote_dtype: Same as `qkv_promote_dtype`, for `out`.
      ln_promote_dtype: Same as `qkv_promote_dtype`, for the norms of queries and keys.
      qkv_dot_general: Function with the signature of `jax.lax.dot_general` that computes the products of `query`,
        `key`, `value` and `gate`, for example a quantized one; None uses the default.
      out_dot_general: Same as `qkv_dot_general`, for `out`.
      qkv_dot_general_cls: Class that each projection instantiates, without arguments, as its `qkv_dot_general`.
      out_dot_general_cls: Same as `qkv_dot_general_cls`, for `out`.
      rngs: Random streams for parameters and dropout.
      keep_rngs: Keep a dropout stream in the module if `dropout_rate > 0`; with False, calls must pass `rngs`.
      kernel_metadata: Metadata of the kernels, for example `{"out_sharding": (None, "model")}`.
      out_kernel_metadata: Metadata of the kernel of `out`; if empty, `kernel_metadata` is used.
      bias_metadata: Metadata of the biases.
      out_bias_metadata: Metadata of the bias of `out`; if empty, `bias_metadata` is used.
      query_ln_scale_metadata: Metadata of the scale in the queries' norm.
      key_ln_scale_metadata: Metadata of the scale in the keys' norm.
      implementation: Name of the attention implementation; None lets the library choose. See `dot_product_attention`.
      scale: Factor that multiplies query . key; None means 1 / sqrt(head size).
      local_window_size: (left, right): how many positions before and after its own a query attends to; see
        `dot_product_attention`.
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); at most 1e30. None means no cap.
      sinks: Learn one additional logit per head, the parameter `sinks` [N], which is added only to the softmax's
        denominator.
      gate: Multiply each head's output, before `out`, by the sigmoid of another projection of the input (Qwen3-Next,
        arXiv:2505.06708). The projection `gate` has parameters with the same shapes as `query`.
      rope: Rotary position embeddings (`flax_mha.rope.RoPE`) for queries and keys, after their norms; None means none.
      head_axis: Split the heads over this mesh axis, or the mesh axis of this logical axis (tensor parallelism).
        Parameters and caches get the metadata `out_sharding`, and are placed accordingly if the module is created under
        `jax.set_mesh`. If there are fewer key heads than devices on this axis, all devices hold all key heads; the mesh
        must then be set by `jax.set_mesh`.

    Raises:
      ValueError: If an argument is out of range, or if heads and features do not fit together.

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
        normalize_qk: bool | NormKind = False,
        qk_norm_epsilon: float | None = None,
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
        gate: bool = False,
        rope: RoPE | None = None,
        head_axis: str | None = None,
    ) -> None:
        check_features(in_features=in_features, out_features=out_features, in_kv_features=in_kv_features)
        dropout_rate, logits_soft_cap = check_dropout_rate(dropout_rate), check_soft_cap(logits_soft_cap)
        given = dict(locals())
        check_options(given, in_features if qkv_features is None else qkv_features)
        check_rngs(rngs, nnx.Rngs)
        self.implementation = implementation
        self.scale = scale
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.rope = rope
        self.head_axis = head_axis
        changed = {
            "normalize_qk": bool(normalize_qk),
            "qkv_dot_general": qkv_dot_general or (None if qkv_dot_general_cls else dot_general),
            "out_dot_general": out_dot_general or (None if out_dot_general_cls else dot_general),
        }
        super().__init__(**{name: given[name] for name in FLAX_ARGUMENTS if name in given} | changed)
        self.norms_after_rope = bool(normalize_qk) and norm_of(normalize_qk).after_rope
        if normalize_qk not in (False, True, "layer_norm"):
            self.query_ln, self.key_ln = (  # type: ignore[assignment]
                self._norm(norm_of(normalize_qk), layer_norm, heads, rngs)
                for layer_norm, heads in ((self.query_ln, num_heads), (self.key_ln, self.num_kv_heads))
            )
        if qk_norm_epsilon is not None:
            self.query_ln.epsilon = self.key_ln.epsilon = float(qk_norm_epsilon)  # type: ignore[union-attr]
        self.cached_lengths = self.cached_scale = nnx.data(None)
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if sinks else nnx.data(None)
        self.gate: nnx.LinearGeneral | None = nnx.data(None)
        if gate:
            names = ("kernel_init", "bias_init", "use_bias", "kernel_metadata", "bias_metadata", "rngs")
            self.gate = nnx.LinearGeneral(
                in_features,
                (num_heads, self.head_dim),
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                promote_dtype=qkv_promote_dtype,
                dot_general=self.qkv_dot_general,
                dot_general_cls=qkv_dot_general_cls,
                **{name: given[name] for name in names},
            )
        if head_axis is not None:
            self._split_parameters(tensor_parallel.parameter_names(head_axis, num_heads, self.num_kv_heads))

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
        input_positions: Array | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | tuple[Array, Array] | None = None,
        lengths: Int[Array, "*B"] | tuple[Array | None, Array | None] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | tuple[Array, Array] | None = None,
        store_keys: bool = False,
        sow_max_score: bool = False,
    ) -> Float[Array, "*B T Dout"]:
        """Projects the inputs to heads, computes attention, and projects the result to `out_features`.

        Args:
          inputs_q: Queries.
          inputs_k: Keys; None means `inputs_q` (self-attention).
          inputs_v: Values; None means `inputs_k`.
          mask: Broadcasts to [B..., N, T, S]; True (or 1) attends. Or a mask object such as `flax_mha.CausalMask()`.
            While decoding, S is the number of slots of the cache, as for `bias`; mask objects use positions.
          deterministic: True disables dropout; None uses the constructor's value.
          rngs: Random streams with a stream `dropout`, or one stream, for the dropout key; None uses the constructor's
            stream, if `keep_rngs` is True.
          sow_weights: Sow the weights [B..., N, T, S] as `nnx.Intermediate` variable `attention_weights`.
          decode: Add the T tokens of this call to the cache, and attend to all tokens in it; None uses the
            constructor's value.
          is_causal: Queries attend only to keys up to their own position. Decoding calls are always causal.
          out_sharding: Sharding of the output, for `out`.
          qkv_sharding: Sharding of query, key and value [B..., T, N, H], for the attention (see
            `dot_product_attention`) and, on a mesh with Explicit axes, for their projections.
          input_positions: Passed to `attention_fn`, as in Flax; the default function does not accept it.
          bias: Broadcasts to [B..., N, T, S]; added to the scores.
          segment_ids: Segment ids of documents packed into one sequence: [B..., T], or a pair for queries and keys.
            Must be None while decoding.
          lengths: Number of tokens before the padding in each sequence: [B...], or a pair for queries and keys, which
            is required if keys and queries have different inputs. Padded keys are masked; the attention output of
            padded queries is 0, before the output projection. While decoding, one array: how many of the T tokens are
            not padding; this requires a cache with an index for each sequence (`per_row`).
          score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`; see `dot_product_attention`.
          positions: Positions of the tokens for `rope`: [B..., T] or [T], or a pair for queries and keys, which is
            required if keys and queries have different inputs; with a last axis of coordinates if `rope` has sections.
            None counts from 0, or from the index of the cache. Masks and windows ignore `positions`: they use the index
            in the sequence.
          store_keys: Store this call's keys, values and their `lengths` in the cache for cross-attention. Later
            decoding calls without `inputs_k` attend to all stored keys, and add none. Requires `inputs_k` and `decode`.
            The later calls accept no mask object, `score_mod` or window, because they do not count positions.
          sow_max_score: Sow the largest visible score of each head [B..., N] as `nnx.Intermediate` variable
            `attention_max_score`, for example for QK-Clip.

        Raises:
          ValueError: If inputs do not fit the module or each other, or if the cache is missing, has another shape, or
            is full. Under `jit`, a full cache is not an error: the output of the sequence is NaN, and its cache does
            not change.
        """
        given = {name: x for name, x in locals().items() if name in PASSED_ON}
        query, key, value, gate = layers = self.query, self.key, self.value, self.gate
        if qkv_sharding is not None and is_explicit(inputs_q):
            query, key, value, gate = (x and functools.partial(x, out_sharding=qkv_sharding) for x in layers)  # type: ignore
        flax_arguments = self._flax_arguments(deterministic, rngs, sow_weights)
        if input_positions is not None:
            flax_arguments["input_positions"] = input_positions
        parts = FlaxModule(
            query=query,
            key=key,
            value=value,
            out=self.out if out_sharding is None else functools.partial(self.out, out_sharding=out_sharding),
            norms=None if self.query_ln is None or self.key_ln is None else (self.query_ln, self.key_ln),
            norms_after_rope=self.norms_after_rope,
            sinks=None if self.sinks is None else self.sinks[...],
            gate=gate,
            cache=self._cache,
            stored=None if self.cached_lengths is None else self._stored,
            arguments=flax_arguments,
            features=(self.in_features, self.in_kv_features),
        )
        output, arrays = call_module(self, parts, **given, decode=self._first_given("decode", decode))
        if arrays is not None:  # now that nothing has raised
            self._write(arrays, store_keys)
        return output

    explain = explaining(__call__, AttentionModule._explained)

    def _split_parameters(self, names: Mapping[str, tuple[str | None, ...]]) -> None:
        """Splits each parameter over the mesh axes in `names` (`tensor_parallel.parameter_names`)."""
        layers = (self.query, "query"), (self.key, "key"), (self.value, "key"), (self.out, "out"), (self.gate, "query")
        for layer, name in layers:
            if layer is None:
                continue
            layer.kernel = split_variable(layer.kernel, names[name])
            if layer.bias is not None:
                layer.bias = split_variable(layer.bias, names["out_bias"] if layer is self.out else names[name][1:])
        if self.sinks is not None:
            self.sinks = split_variable(self.sinks, names["sinks"])

    def _cached_heads(self) -> tuple[int, int, int | None]:
        return self.num_kv_heads, self.head_dim, None

    def _norm(self, kind: Norm, flax_norm: Any, heads: int, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """Makes a norm of this kind with the scale of `flax_norm` or, for one scale per head, a new one like it."""
        options: dict[str, Any] = {} if kind.is_rms else {"use_bias": False}
        norm: Any = (nnx.RMSNorm if kind.is_rms else nnx.LayerNorm)(
            self.head_dim,
            reduction_axes=kind.axes,
            feature_axes=kind.scale_axes,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            promote_dtype=self.ln_promote_dtype,
            rngs=rngs,
            **options,
        )
        norm.scale = scale = flax_norm.scale
        if len(kind.scale_axes) > 1:
            norm.scale = nnx.Param(jnp.ones((heads, self.head_dim), scale.dtype), **scale.get_metadata())
        if kind.has_bias:
            norm.bias = nnx.Param(jnp.zeros(self.head_dim, scale.dtype), **scale.get_metadata())
        return norm


def _read(*variables: Any) -> Arrays:
    return tuple(jnp.asarray(variable[...]) for variable in variables)


def _own(variable: nnx.Variable) -> nnx.Variable:
    """Copies a NumPy array in the variable, as in a restored state: Flax would write into the caller's array."""
    if isinstance(variable.get_value(), np.ndarray | np.generic):
        variable.set_value(jnp.array(variable.get_value()))
    return variable


def split_variable(variable: nnx.Variable, names: tuple[str | None, ...]) -> Any:
    """Returns a copy of the variable, split over the mesh axes `names`: its metadata `out_sharding`."""
    metadata = {name: x for name, x in variable.get_metadata().items() if name != "eager_sharding"}
    if "out_sharding" in metadata:
        raise ValueError(
            f"head_axis must be None if metadata sets out_sharding, but got out_sharding={metadata['out_sharding']}."
        )
    eager = False if jax.sharding.get_abstract_mesh().empty else None
    return type(variable)(variable[...], eager_sharding=eager, **metadata | {"out_sharding": names})
