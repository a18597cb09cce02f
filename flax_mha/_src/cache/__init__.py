"""Caches of keys and values, and attention over them."""
