"""Caches of keys and values, and attention over them.

Modules make and fill a cache by themselves. `KVCache` and `cached_attention` do without
a module; layers that share keys pass a `SharedKV` on.

Example:
  >>> import jax.numpy as jnp
  >>> from flax_mha.cache import KVCache, cached_attention
  >>> cache = KVCache.create(2, 100, num_kv_heads=4, head_size=16)
  >>> x = jnp.ones((2, 7, 4, 16))
  >>> output, cache = cached_attention(x, x, x, cache)
  >>> output.shape, int(cache.index)
  ((2, 7, 4, 16), 7)
"""

from flax_mha._src.cache.cached_attention import cached_attention as cached_attention
from flax_mha._src.cache.kv_cache import KVCache as KVCache
from flax_mha._src.cache.shared import SharedKV as SharedKV

__all__ = ["KVCache", "SharedKV", "cached_attention"]
