"""Kinds of attention as functions that return arguments; `flax_mha.recipes` lists them."""
