"""The modules for `flax.nnx`."""
