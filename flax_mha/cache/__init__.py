"""Key-value caches for decoding, and attention over them."""
