"""Attention modules for `flax.nnx`: a drop-in replacement for Flax's, and multi-head
latent attention.
"""

from flax_mha._src.nnx.latent import (
    MultiHeadLatentAttention as MultiHeadLatentAttention,
)
from flax_mha._src.nnx.multi_head import MultiHeadAttention as MultiHeadAttention

__all__ = ["MultiHeadAttention", "MultiHeadLatentAttention"]
