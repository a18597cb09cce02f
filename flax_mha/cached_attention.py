"""The public import path of `cached_attention`, attention over a key-value cache; the code is in `flax_mha.cache`."""

from flax_mha.cache.cached_attention import cached_attention

__all__ = ["cached_attention"]
