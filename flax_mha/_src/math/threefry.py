"""Threefry-2x32, the generator of `jax.random`, written with elementwise operations,
which XLA fuses.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011,
doi:10.1145/2063384.2063405. The words are the same as those of
`jax.extend.random.threefry_2x32`.
"""

import numpy as np
from jax import lax
from jaxtyping import Array, Int

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.int32(0x1BD11BDA)


def random_words(
    seed: tuple[Int[Array, ""], Int[Array, ""]],
    counter: tuple[Int[Array, "..."], Int[Array, "..."]],
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Hashes each counter, a pair of 32-bit words, with the seed, another pair, to two
    random words.
    """
    keys = (*seed, seed[0] ^ seed[1] ^ PARITY)
    a = counter[0] + keys[0]
    b = counter[1] + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = a + b
            b = a ^ (
                (b << rotation) | lax.shift_right_logical(b, np.int32(32 - rotation))
            )
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.int32(group + 1)
    return a, b
