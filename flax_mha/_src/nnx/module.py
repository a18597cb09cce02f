"""`AttentionModule`: the base class of the attention modules for `flax.nnx`."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.module import first_from
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from flax_mha._src.attention import Explanation
from flax_mha._src.cache.kv_cache import KVCache, reset_index
from flax_mha._src.call.call import Sharding
from flax_mha._src.core.signature import ConstructorSignature
from flax_mha._src.core.tracing import Platform
from flax_mha._src.distributed import tensor_parallel
from flax_mha._src.modules.attention_fn import AttentionFn, explained
from flax_mha._src.modules.call import Arrays, reach
from flax_mha._src.modules.options import check_rngs

# Attributes with norms, and the key in `parameter_names` for the heads of their scales.
NORMS = (
    ("query_ln", "query"),
    ("key_ln", "key"),
    ("value_ln", "key"),
    ("out_norm", "query"),
)
# Attributes with the variables of a cache, the last two of an indexer's.
CACHE = (
    "cached_key",
    "cached_value",
    "cache_index",
    "cached_lengths",
    "cached_scale",
    "cached_index_key",
    "cached_index_scale",
)


class AttentionModule(nnx.Module):
    """The base class of both attention modules: manages the cache, dropout, tensor
    parallelism and `explain`.
    """

    __signature__ = ConstructorSignature()
    # Whether calls take their keys and values from an earlier layer.
    reuse_kv: bool = False
    # `IndexerLayers`, which only latent attention has.
    indexer: Any = None

    num_heads: int
    in_features: int
    in_kv_features: int
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    precision: PrecisionLike
    attention_fn: Callable[..., Array]
    broadcast_dropout: bool
    rngs: nnx.RngStream | None
    local_window_size: int | tuple[int | None, int | None] | None
    head_axis: str | None
    sinks: nnx.Param | None
    # Arguments of `KVCache.create`: the sizes of a token in the module's cache.
    _sizes_of_token: Callable[[], dict[str, Any]]
    deterministic: bool | None
    decode: bool | None
    cached_key: nnx.Cache | None
    cached_value: nnx.Cache | None
    cache_index: nnx.Cache | None
    cached_scale: nnx.Cache | None
    cached_lengths: nnx.Cache | None
    cached_index_key: nnx.Cache | None
    cached_index_scale: nnx.Cache | None

    def _explained(
        self, platform: Platform | None, *inputs: Any, **arguments: Any
    ) -> Explanation:
        """Explains which implementation a call uses; traces a copy, so that this
        module's state does not change.
        """
        graph, state = nnx.split(self)

        def call(attention_fn: AttentionFn) -> Array:
            # New variables with the same arrays, which are not traced: the choice may
            # depend on the cache's index.
            module = nnx.merge(graph, jax.tree.map(lambda array: array, state))
            module.attention_fn = attention_fn
            return module(*inputs, **arguments)

        return explained(self.attention_fn, platform, call)

    def _split_heads(
        self, num_kv_heads: int, layers: Iterable[tuple[str, str]]
    ) -> None:
        """Splits parameters over `head_axis`, if it is set; `layers` has pairs
        (attribute, its key in `parameter_names`).
        """
        if self.head_axis is None:
            return
        names = tensor_parallel.parameter_names(
            self.head_axis, self.num_heads, num_kv_heads
        )
        for attribute, name in layers:
            layer = getattr(self, attribute)
            if layer is None:
                continue
            layer.kernel = _split(layer.kernel, names[name])
            if layer.bias is None:
                continue
            # A bias has the kernel's axes without the first, the input's; `out` adds
            # up its heads, so its bias has no axis of heads.
            of_bias = names[name][1:]
            if name == "out":
                of_bias = names["out_bias"]
            layer.bias = _split(layer.bias, of_bias)
        if self.sinks is not None:
            self.sinks = _split(self.sinks, names["sinks"])
        for attribute, heads in NORMS:
            norm = getattr(self, attribute, None)
            if norm is None or norm.scale is None:
                continue
            has_scale_of_heads = norm.scale.ndim > 1
            if has_scale_of_heads:
                norm.scale = _split(norm.scale, names[heads][1:])

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: DTypeLike | None = None,
        *,
        per_row: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """Creates an empty cache for decoding; does nothing in a module with
        `reuse_kv`, which needs none.

        With a `local_window_size` and a large enough S, the cache is a ring buffer,
        which never overflows; see `flax_mha.cache.KVCache.create`.

        Args:
          input_shape: [B..., S, D]: the inputs of all calls concatenated; the cache has
            room for S tokens.
          dtype: Dtype of the cached keys and values; None means the module's `dtype`,
            or else its `param_dtype`. `int8` and `float8_e4m3fn` use half the memory of
            bfloat16; see `flax_mha.cache.KVCache.create`.
          per_row: True gives each sequence its own index, which `lengths` require;
            `cache_index` is then [B...].
          sharding: How a mesh splits the batch axes and heads of cached keys and values
            [B..., S, K, H]; None splits the heads along `head_axis`.

        Raises:
          ValueError: If a size is missing, negative or does not fit the module, or if a
            cache cannot hold the dtype.
        """
        if self.reuse_kv:
            return
        if dtype is None:
            dtype = self.dtype
        if dtype is None:
            dtype = self.param_dtype
        if len(input_shape) < 2:
            raise ValueError(
                "input_shape must be (batch..., length, features), but got "
                f"{tuple(input_shape)}."
            )
        *batch, length, features = input_shape
        if features not in (self.in_features, self.in_kv_features):
            raise ValueError(
                f"input_shape must be (batch..., length, {self.in_features}), the "
                f"shape of the inputs, but got {tuple(input_shape)}; the module sets "
                "the number of heads and the head size."
            )
        sizes = self._sizes_of_token()
        create = functools.partial(
            KVCache.create,
            batch,
            length,
            dtype=dtype,
            window=reach(self.local_window_size),
            per_row=per_row,
            sharding=sharding,
        )
        cache = create(**sizes)
        has_latents = cache.value_size is not None

        # The mesh axes of cached arrays. All devices hold all latents.
        names: tuple[str | None, ...] | None = None
        if self.head_axis is not None and sharding is None:
            of_parameters = tensor_parallel.parameter_names(
                self.head_axis, self.num_heads, sizes["num_kv_heads"]
            )
            of_token = of_parameters["key"]
            if has_latents:
                of_token = (None,) * len(of_token)
            names = (None,) * len(batch) + of_token

        def variable(x: Array | None) -> Any:
            if x is None:
                return nnx.data(None)
            if names is None:
                return nnx.Cache(x)
            return _split(nnx.Cache(x), names)

        self.cached_key = variable(cache.key)
        self.cached_scale = variable(cache.scale)
        # Latents are keys and values in one.
        self.cached_value = variable(None if has_latents else cache.value)
        self.cache_index = nnx.Cache(cache.index)
        # Only a call with `store_keys` sets it.
        self.cached_lengths = nnx.data(None)
        if self.indexer is not None:
            index_size = self.indexer.config.head_dim
            index_cache = create(1, index_size, value_size=index_size)
            self.cached_index_key = variable(index_cache.key)
            self.cached_index_scale = variable(index_cache.scale)

    def reset_cache(self, rows: ArrayLike) -> None:
        """Empties the caches of some sequences, so that new ones can take their places.

        The other sequences go on. Does nothing in a module with `reuse_kv`.

        Args:
          rows: bool [B...]: True empties the sequence.

        Raises:
          ValueError: Without a cache, if it was not created with `per_row=True`, if it
            holds the keys of a call with `store_keys=True`, or if `rows` has another
            shape or dtype.
        """
        if self.reuse_kv:
            return
        if self.cached_lengths is not None:
            raise ValueError(
                "reset_cache requires a cache of tokens with an index for each "
                "sequence, but got keys that store_keys=True has stored; pass "
                "store_keys=True again to replace them."
            )
        self._cache()  # an error without a cache
        assert self.cache_index is not None
        _own(self.cache_index)[...] = reset_index(self.cache_index[...], rows)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
        per_row: bool = False,
    ) -> None:
        """Sets `deterministic` and `decode`, and creates a cache if its size is given;
        `nnx.view` calls this. Without a size, `init_cache` must create it.

        Args:
          deterministic: True disables dropout; None leaves the setting unchanged.
          decode: True makes calls decode; None leaves the setting unchanged.
          batch_size: Size of the batch axis of a new cache, or sizes of several;
            requires `max_length`.
          max_length: Number of tokens that the new cache has room for; requires
            `batch_size`.
          per_row: True gives each sequence its own index; see `init_cache`.

        Raises:
          TypeError: If only one of `batch_size` and `max_length` is given.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is None and max_length is None:
            return
        if batch_size is None or max_length is None:
            name = "batch_size" if batch_size is None else "max_length"
            raise TypeError(f"'{name}' must be provided when initializing cache.")
        batch = batch_size if isinstance(batch_size, Sequence) else (batch_size,)
        self.init_cache((*batch, max_length, self.in_features), per_row=per_row)

    def _cache(self, *_: Array) -> Arrays:
        """Returns the arrays of the cache, ordered as in `KVCache.arrays`; raises a
        ValueError without a cache.
        """
        if self.cached_key is None or self.cache_index is None:
            raise ValueError(
                "Autoregressive cache not initialized, call ``init_cache`` first: "
                f"layer.init_cache((*batch, max_length, {self.in_features}))."
            )
        return read(self._variables())

    def _stored(self) -> Arrays:
        return read((self.cached_key, self.cached_value, self.cached_lengths))

    def _write(self, arrays: Arrays, stored: bool) -> None:
        if stored:
            key, value, lengths = arrays
            self.cached_key = nnx.Cache(key)
            self.cached_value = nnx.Cache(value)
            self.cached_lengths = nnx.Cache(lengths)
            # Stored keys have no index: no call adds keys to them.
            self.cache_index = None
            self.cached_scale = None
            return
        assign(self._variables(), arrays)

    def _variables(self) -> tuple[Any, ...]:
        return (self.cached_key, self.cached_value, self.cache_index, self.cached_scale)

    def _first_given(self, name: str, argument: bool | None) -> bool:
        """Returns the argument of the call or, if that is None, the module's attribute
        `name`; one must not be None.
        """
        return first_from(
            argument,
            getattr(self, name),
            error_msg=f"No `{name}` argument was provided to {type(self).__name__} as "
            "either a __call__ argument, class attribute, or nnx.flag.",
        )

    def _flax_arguments(
        self,
        dropout_rate: float,
        deterministic: bool | None,
        rngs: nnx.Rngs | nnx.RngStream | None,
        sow_weights: bool,
    ) -> dict[str, Any]:
        """Returns the arguments that Flax's module passes to its attention function;
        with dropout, draws a key.
        """
        check_rngs(rngs, nnx.Rngs, nnx.RngStream)
        dropout_rng = None
        has_dropout = dropout_rate != 0.0 and not self._first_given(
            "deterministic", deterministic
        )
        if has_dropout:
            if rngs is None:
                rngs = self.rngs
            if rngs is None:
                raise ValueError(
                    "'rngs' must be provided to __call__ method if "
                    f"{type(self).__name__} instance is defined with keep_rngs=False."
                )
            stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
            # Drawing a key counts up, in the variable.
            _own(stream.count)
            dropout_rng = stream()
        return {
            "mask": None,
            "is_causal": False,
            "broadcast_dropout": self.broadcast_dropout,
            "dropout_rate": dropout_rate,
            "dtype": self.dtype,
            "precision": self.precision,
            "module": self if sow_weights else None,
            "deterministic": dropout_rng is None,
            "dropout_rng": dropout_rng,
        }


def with_sharding(layer: Callable[..., Array] | None, sharding: object) -> Any:
    """Returns a layer whose output gets the sharding; the layer if there is none."""
    if layer is None or sharding is None:
        return layer
    return functools.partial(layer, out_sharding=sharding)


def assign(variables: Sequence[Any], arrays: Arrays) -> None:
    """Sets a cache's variables, of which it may lack some (None), to these arrays."""
    present = [variable for variable in variables if variable is not None]
    for variable, array in zip(present, arrays, strict=True):
        _own(variable)[...] = array


def read(variables: Sequence[Any]) -> Arrays:
    """Returns the arrays in a cache's variables, without those that it lacks."""
    return tuple(jnp.asarray(x[...]) for x in variables if x is not None)


def _own(variable: nnx.Variable) -> nnx.Variable:
    """Returns the variable; if it holds a NumPy array, as a restored one may, replaces
    it by a JAX array.

    Flax would write into the NumPy array, which belongs to the caller.
    """
    if isinstance(variable.get_value(), np.ndarray | np.generic):
        variable.set_value(jnp.array(variable.get_value()))
    return variable


def _split(variable: nnx.Variable, names: tuple[str | None, ...]) -> Any:
    """Returns a copy of the variable with the metadata `out_sharding=names`, which
    splits it over these mesh axes.
    """
    metadata = dict(variable.get_metadata())
    metadata.pop("eager_sharding", None)
    if "out_sharding" in metadata:
        raise ValueError(
            "head_axis must be None if metadata sets out_sharding, but got "
            f"out_sharding={metadata['out_sharding']}."
        )
    # Without a mesh, the names have nothing to split the array over yet.
    has_no_mesh = jax.sharding.get_abstract_mesh().empty
    return type(variable)(
        variable[...],
        eager_sharding=False if has_no_mesh else None,
        out_sharding=names,
        **metadata,
    )
