"""The multi-head attention that Flax users import."""

from flax_mha.adapter import attention_fn as attention_fn
from flax_mha.attention import dot_product_attention as dot_product_attention
from flax_mha.attention import explain_implementation as explain_implementation
from flax_mha.nnx import MultiHeadAttention as MultiHeadAttention
