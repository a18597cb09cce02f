"""`SharedKV`: the keys and values of a module's call, for later layers that have no
projections of their own.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from flax_mha._src.cache.kv_cache import Appended, KVCache
from flax_mha._src.core.fields import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKV:
    """The keys and values of one call of a module, which later layers attend to (Gemma
    3n, Gemma 4).

    A module's call with `return_kv=True` returns it, and a module with `reuse_kv=True`
    accepts it in a call with the same tokens. It is a pytree, so it may pass through
    `jit`, `remat` and `scan`, and gradients flow through it.

    Attributes:
      key: Keys of the call's tokens after norm and rotation, [B..., T, K, H].
      value: Values after their norm, [B..., T, K, Hv].
      cache: The cache before the call, with the keys of earlier tokens; None if the
        call did not use a cache.
      appended: `appended.cache` has the call's tokens added, and is the cache to keep.
        None without a cache.
      decode: Whether the call decoded.
      has_lengths: Whether the call had `lengths`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> options = {"decode": False, "rngs": nnx.Rngs(0)}
      >>> first = flax_mha.MultiHeadAttention(8, 64, **options)
      >>> later = flax_mha.MultiHeadAttention(8, 64, reuse_kv=True, **options)
      >>> x, kv = first(jnp.ones((2, 10, 64)), is_causal=True, return_kv=True)
      >>> later(x, kv=kv, is_causal=True).shape
      (2, 10, 64)
    """

    key: Float[Array, "*B T K H"]
    value: Float[Array, "*B T K Hv"]
    cache: KVCache | None = None
    appended: Appended | None = None
    decode: bool = static(default=False)
    has_lengths: bool = static(default=False)
