"""Threefry-2x32, the generator of `jax.random`, in int32 operations that a TPU's vector unit has.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, doi:10.1145/2063384.2063405. It returns the same
words as `jax.extend.random.threefry_2x32`.
"""

import numpy as np
from jax import lax
from jaxtyping import Array, Int

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.int32(0x1BD11BDA)


def random_words(
    seed: tuple[Int[Array, ""], Int[Array, ""]], counter: tuple[Int[Array, "..."], Int[Array, "..."]]
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Computes two random words from a seed of two words for each counter, which is a pair of words."""
    keys = (*seed, seed[0] ^ seed[1] ^ PARITY)
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = a + b
            b = a ^ ((b << rotation) | lax.shift_right_logical(b, np.int32(32 - rotation)))
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + np.int32(group + 1)
    return a, b
