"""`MultiHeadAttention` and `MultiHeadLatentAttention` for `flax.nnx`."""

from flax_mha.nnx.latent import MultiHeadLatentAttention as MultiHeadLatentAttention
from flax_mha.nnx.multi_head import MultiHeadAttention as MultiHeadAttention
