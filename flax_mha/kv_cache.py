"""`KVCache`, the cache of keys and values for decoding, and `SharedKV`; `flax_mha.cache` holds the code."""

from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.shared import SharedKV

__all__ = ["KVCache", "SharedKV"]
