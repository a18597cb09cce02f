"""The modules for `flax.linen`."""
