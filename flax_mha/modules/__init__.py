"""What the modules of flax.nnx and flax.linen share."""
