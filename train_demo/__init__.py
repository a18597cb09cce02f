"""A small transformer that learns to write character by character, trained with `flax_mha.MultiHeadAttention`."""

import time

STARTED = time.perf_counter()  # of the process, as far as anything here can know
