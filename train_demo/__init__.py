"""A small transformer that learns to write character by character, trained with `flax_mha.MultiHeadAttention`."""
