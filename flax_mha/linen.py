"""Attention modules for `flax.linen`: drop-in replacements for Flax's."""

from flax_mha._src.linen.multi_head import MultiHeadAttention as MultiHeadAttention
from flax_mha._src.linen.multi_head import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from flax_mha._src.linen.multi_head import SelfAttention as SelfAttention

__all__ = ["MultiHeadAttention", "MultiHeadDotProductAttention", "SelfAttention"]
