"""Kinds of attention as functions that return arguments: see `flax_mha.recipes`."""
