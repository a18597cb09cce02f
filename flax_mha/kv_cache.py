"""`KVCache`, the cache of keys and values for decoding; `flax_mha.cache` holds the code."""

from flax_mha.cache.kv_cache import KVCache

__all__ = ["KVCache"]
