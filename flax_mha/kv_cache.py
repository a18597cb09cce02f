"""The public import path of `KVCache`, the cache for decoding, and `SharedKV`; the code is in `flax_mha.cache`."""

from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.shared import SharedKV

__all__ = ["KVCache", "SharedKV"]
