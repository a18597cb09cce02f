"""`AttentionModule`: the base class of the attention modules for `flax.linen`."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import merge_param
from jaxtyping import Array

from flax_mha._src.call.arguments import check_dropout_rate
from flax_mha._src.core.tracing import Platform
from flax_mha._src.distributed.tensor_parallel import boxed, parameter_names
from flax_mha._src.modules.call import Arrays, core_of, reach
from flax_mha._src.modules.explain import ExplainedAttention
from flax_mha.attention import Explanation
from flax_mha.cache.kv_cache import KVCache
from flax_mha.masks import Mask


class AttentionModule:
    """The base class of both attention modules: the cache, dropout, tensor parallelism, and `explain`."""

    def _explained(self: Any, platform: Platform | None, *inputs: Any, **arguments: Any) -> Explanation:
        """Explains the attention in a call, which a copy of this module traces."""
        variables = None if self.scope is None else self.variables  # not traced, so that the cache's index is known
        explained = ExplainedAttention(self.attention_fn, platform)
        layer = self.clone(attention_fn=explained, parent=None)

        def call(key: Array) -> Any:
            rngs = {"params": key, "dropout": key}
            if variables is None:
                return layer.init_with_output(rngs, *inputs, **arguments)[0]
            return layer.apply(variables, *inputs, rngs=rngs, mutable=["cache", "intermediates"], **arguments)[0]

        jax.eval_shape(call, jax.random.key(0))
        return explained.explanations[0]

    def _split(self: Any, init: Callable[..., Any], parameter: str, bias: bool = False) -> Callable[..., Any]:
        """Returns `init`; if `head_axis` is set, it boxes a kernel, or `bias`, with the mesh axes of `parameter`."""
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
        """Returns Flax's arguments for the attention function, but no optional ones that its signature lacks."""
        rate = check_dropout_rate(self.dropout_rate)
        keeps_all = rate == 0.0 or merge_param("deterministic", self.deterministic, deterministic)
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
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        # A function that lacks one of these must fail.
        needed = {"module"} | ({"mask"} if mask is not None else set())
        needed |= set() if keeps_all else {"dropout_rng", "dropout_rate"}
        return {name: x for name, x in arguments.items() if takes_all or name in known or name in needed}

    def _cache(
        self: Any, variables: list[nn.Variable], value_size: int | None, query: Array, key: Array
    ) -> Arrays | None:
        """Returns the arrays of the cache, see `KVCache.of_window`; None if this call makes the cache.

        Its variables are added to `variables`. With a `value_size` (see `KVCache`), values have no variable.
        """
        starting, window = not self.has_variable("cache", "cached_key"), reach(self.local_window_size)
        *batch, length, num_heads, size = key.shape
        made: Arrays = ()
        if starting:
            dtype = key.dtype if self.cache_dtype is None else self.cache_dtype
            options = {"per_row": self.per_row, "value_size": value_size}
            made = KVCache.create(batch, length, num_heads, size, dtype, window, **options).arrays
        names = ["cached_key", "cached_value", "cache_index"]
        names += ["cached_scale"] if len(made) > 3 or self.has_variable("cache", "cached_scale") else []
        if value_size is not None:
            names.remove("cached_value")
            made = (*made[:1], *made[2:])
        variables += [self.variable("cache", name, lambda x=None: x, *made[i : i + 1]) for i, name in enumerate(names)]
        if starting:
            return None
        key, *others = (jnp.asarray(variable.value) for variable in variables)  # NumPy's, of a checkpoint
        size = key.shape[-1] if value_size is None else query.shape[-1]
        expected = (*key.shape[:-3], query.shape[-3], self.num_heads, size)
        if query.shape != expected:
            raise ValueError(
                f"Autoregressive cache shape error, expected query shape {expected} instead got {query.shape}."
            )
        return (key, *others) if value_size is None else (key, key[..., :0], *others)
