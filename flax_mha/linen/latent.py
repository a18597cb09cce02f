"""`MultiHeadLatentAttention` for `flax.linen`: DeepSeek's parameters, and the attention of this package."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init
from flax.typing import PrecisionLike
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.call.operands import Sharding
from flax_mha._src.core import validation
from flax_mha._src.modules.attention_fn import attention_fn as default_attention_fn
from flax_mha._src.modules.call import PASSED_ON, Arrays, FlaxModule, Given, Layer, call_module, dot_general, reach
from flax_mha._src.modules.core import explaining
from flax_mha._src.modules.indexer import Indexer, IndexLayers
from flax_mha._src.modules.options import check_has_features, check_latent, yarn_scale
from flax_mha.attention import Implementation, ScoreMod
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.latent import Latent, compress
from flax_mha.linen.multi_head import AttentionModule
from flax_mha.masks import Mask
from flax_mha.rope import RoPE

Init = Callable[..., Any]
CACHED_INDEX = ("cached_index_key", "cached_index_scale")


class MultiHeadLatentAttention(AttentionModule, nn.Module):
    """Multi-head latent attention with the parameters of `flax_mha.MultiHeadLatentAttention`, which describes it.

    Attributes that are not listed here are the arguments of its constructor with the same names.

    Attributes:
      out_features: Features of the output; None means the features of the input.
      decode: True makes calls decode. The cache contains latents and rotary keys.
      per_row: True gives each sequence of a cache its own index.
      cache_dtype: Dtype of the cache; None means the dtype of the keys.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import linen
      >>> sizes = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
      >>> layer = linen.MultiHeadLatentAttention(num_heads=4, **sizes)
      >>> output, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)), is_causal=True)
      >>> output.shape, variables["params"]["kv_b_proj"]["kernel"].shape
      ((2, 10, 64), (32, 4, 32))
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    out_features: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    broadcast_dropout: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Init = default_kernel_init
    out_kernel_init: Init | None = None
    bias_init: Init = nn.initializers.zeros_init()
    use_bias: bool = False
    norm_epsilon: float = 1e-6
    attention_fn: Callable[..., Array] = default_attention_fn
    decode: bool = False
    implementation: Implementation | None = None
    scale: float | None = None
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    rope: RoPE | None = None
    per_row: bool = False
    head_axis: str | None = None
    cache_dtype: DTypeLike | None = None
    indexer: Indexer | None = None
    gate: bool | Literal["elementwise", "head"] = False
    query_residual: bool = False
    normalize_rotary_key: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        *,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        is_causal: bool | None = None,
        bias: Float[Array, "..."] | None = None,
        segment_ids: Int[Array, "*B T"] | None = None,
        lengths: Int[Array, "*B"] | None = None,
        score_mod: ScoreMod | None = None,
        positions: Int[Array, "..."] | None = None,
        qkv_sharding: Sharding | None = None,
        sow_max_score: bool = False,
        key_indices: Int[Array, "..."] | None = None,
    ) -> Float[Array, "*B T Dout"]:
        """Computes latent attention; `flax_mha.linen.MultiHeadDotProductAttention.__call__` describes the arguments."""
        given = {name: x for name, x in locals().items() if name in PASSED_ON}
        check_has_features(inputs_q=inputs_q)
        check_latent(vars(self))
        validation.flag("per_row", self.per_row)
        variables: list[nn.Variable] = []
        init = self._split(nn.initializers.zeros_init(), "sinks")
        out_init = self._split(self.out_kernel_init or self.kernel_init, "out")
        out_features = inputs_q.shape[-1] if self.out_features is None else self.out_features
        query, gate, index_layers = self._query()
        parts = FlaxModule(
            module=self,
            query=query,
            key=functools.partial(
                compress,
                self._dense("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, use_bias=self.use_bias),
                self._norm("kv_a_layernorm"),
                self._norm("k_rope_only_layernorm") if self.normalize_rotary_key else None,
                self.kv_lora_rank,
            ),
            latent=Latent(
                size=self.kv_lora_rank,
                key_size=self.qk_nope_head_dim,
                kernel=self._kernel(),
                dtype=self.dtype,
                precision=self.precision,
            ),
            out=self._dense("o_proj", out_features, self.use_bias, axis=(-2, -1), kernel_init=out_init),
            sinks=self.param("sinks", init, (self.num_heads,), self.param_dtype) if self.sinks else None,
            indexer=None if index_layers is None else index_layers(),
            gate=gate,
            cache=functools.partial(self._cache, variables, self.kv_lora_rank),
            write=functools.partial(self._write, variables),
            arguments=self._flax_arguments(mask, deterministic, dropout_rng, sow_weights) | yarn_scale(self),
        )
        return call_module(parts, Given(**given, decode=self.decode))

    explain = nn.nowrap(explaining(__call__))

    def _dense(self, name: str, features: int | tuple[int, ...], use_bias: bool = False, **options: Any) -> Any:
        return self._linear()(features, use_bias=use_bias, name=name, **options)

    def _linear(self) -> Any:
        """Returns `nn.DenseGeneral`, preset with the options that all projections share."""
        options = {name: getattr(self, name) for name in ("kernel_init", "bias_init", "dtype", "param_dtype")}
        return functools.partial(nn.DenseGeneral, precision=self.precision, dot_general=dot_general, **options)

    def _norm(self, name: str) -> nn.Module:
        return nn.RMSNorm(dtype=self.dtype, param_dtype=self.param_dtype, epsilon=self.norm_epsilon, name=name)

    def _query(self) -> tuple[Layer, Layer | None, Callable[[], IndexLayers] | None]:
        """Returns the projections of inputs to queries and to the gate, and a function that makes the `IndexLayers`.

        With `q_lora_rank`, inputs are compressed before they are projected to queries. The projection to the gate is
        None without a gate, and the function is None without an indexer.
        """
        head = self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        init = self._split(self.kernel_init, "query")
        of_gate = (self.num_heads,) if self.gate == "head" else (self.num_heads, self.v_head_dim)
        gate_init = self._split(self.kernel_init, "head_gate" if self.gate == "head" else "query")
        gate = self._dense("gate", of_gate, kernel_init=gate_init) if self.gate else None
        if self.q_lora_rank is None:
            return self._dense("q_proj", head, kernel_init=init), gate, None
        compress = self._dense("q_a_proj", self.q_lora_rank, use_bias=self.use_bias)
        normalize, project = self._norm("q_a_layernorm"), self._dense("q_b_proj", head, kernel_init=init)
        index = functools.partial(self._index_layers, lambda x: normalize(compress(x)))
        made = None if self.indexer is None else index
        if not self.query_residual:
            return lambda x: project(normalize(compress(x))), gate, made

        def both(x: Array) -> Array:
            compressed = compress(x)
            return jnp.concatenate([normalize(compressed), compressed], axis=-1)

        return lambda x: project(both(x)), None if gate is None else lambda x: gate(both(x)), made

    def _index_layers(self, compressed: Callable[[Array], Array]) -> IndexLayers:
        indexer: Any = self.indexer
        layers = _IndexerLayers(indexer, self._linear(), self.dtype, self.param_dtype, name="indexer")
        variables: list[nn.Variable] = []

        def query(x: Array) -> Array:
            return layers.query(lax.stop_gradient(compressed(x)))

        cache = functools.partial(self._cached_index, variables)
        write = functools.partial(self._write, variables, stored=False)
        return IndexLayers(indexer, query, layers.key, layers.weights, cache, write)

    def _cached_index(self, variables: list[nn.Variable], key: Float[Array, "*B T 1 H"]) -> Arrays | None:
        """Returns the indexer's cached keys, and their scales if they have 8 bits; None if this call makes the cache.

        `key` holds the new keys. Appends the cache's variables to the list `variables`, for `_write`.
        """
        is_made, (*batch, length, _, size) = self.has_variable("cache", CACHED_INDEX[0]), key.shape
        arrays: tuple[Array | None, ...] = (None, None)
        if not is_made:
            dtype, window = key.dtype if self.cache_dtype is None else self.cache_dtype, reach(self.local_window_size)
            made = KVCache.create(batch, length, 1, size, dtype, window, value_size=size)
            arrays = made.key, made.scale
        for name, x in zip(CACHED_INDEX, arrays, strict=True):
            if x is not None or self.has_variable("cache", name):
                variables.append(self.variable("cache", name, lambda x=x: x))
        return tuple(jnp.asarray(variable.value) for variable in variables) if is_made else None

    def _kernel(self) -> Float[Array, "C N F"]:
        shape = self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        return _Kernel(self._split(_flat(self.kernel_init), "key"), shape, self.param_dtype, name="kv_b_proj")()


class _IndexerLayers(nn.Module):
    """The projections and the norm of an `Indexer`, which chooses the keys that each query attends to."""

    config: Indexer
    linear: Callable[..., Any]
    dtype: Any
    param_dtype: Any

    def setup(self) -> None:
        linear = functools.partial(self.linear, use_bias=False)
        self.wq_b = linear((self.config.num_heads, self.config.head_dim))
        self.wk = linear(self.config.head_dim)
        self.weights_proj = linear(self.config.num_heads)
        options: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "use_fast_variance": False}
        self.k_norm = nn.LayerNorm(epsilon=self.config.norm_epsilon, **options)

    def query(self, x: Float[Array, "*B T R"]) -> Float[Array, "*B T N H"]:
        return self.wq_b(x)

    def key(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T H"]:
        return self.k_norm(self.wk(x))

    def weights(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T N"]:
        return self.weights_proj(x)


class _Kernel(nn.Module):
    """Creates only the kernel of `kv_b_proj`, no layer: `Latent` multiplies by its key and value parts separately."""

    init_kernel: Init
    shape: tuple[int, ...]
    param_dtype: Any

    @nn.compact
    def __call__(self) -> Array:
        return self.param("kernel", self.init_kernel, self.shape, self.param_dtype)


def _flat(init: Init) -> Init:
    """Wraps `init` to draw [in, heads * size] for [in, heads, size], so that the variance is `nn.DenseGeneral`'s."""
    return lambda key, shape, dtype: init(key, (shape[0], math.prod(shape[1:])), dtype).reshape(shape)
