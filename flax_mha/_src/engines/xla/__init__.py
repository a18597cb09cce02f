"""Attention in plain XLA: all scores at once, or keys read in place."""
