"""`cached_attention`, attention over a cache; `flax_mha.cache` holds the code."""

from flax_mha.cache.cached_attention import cached_attention

__all__ = ["cached_attention"]
