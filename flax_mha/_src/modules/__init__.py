"""The code that the modules for `flax.nnx` and `flax.linen` share."""
