"""What becomes of NaN and infinity in queries, keys and values: the same in every implementation.

Masked entries must not affect the output, but a weight of 0 times NaN is NaN. Keys and values that are not finite are
therefore replaced by zeros before they are multiplied, and so are queries where their NaN could reach another row. What
was replaced is known by its magnitude, which is infinite. To the visible scores of such a key, and of such a query,
infinity is added, which makes the softmax of the row NaN. What concerns a whole row can instead be added, as NaN, to
its largest score, if the row sees anything. Such rows get zero gradients, so the gradients of the other rows stay
finite.

If nothing can be masked, none of this is needed, because NaN propagates by itself.

This is written in `lax`, whose operations are traced faster than those of `jax.numpy`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class Magnitudes(NamedTuple):
    """Per scaled query and per key of one head a number that is infinity where it held NaN or infinity.

    Else it is half the mean absolute entry, or 0 where nobody asked for that. The magnitude of a key is also infinity
    if its value held NaN or infinity.
    """

    query: Float[Array, "... T"]
    key: Float[Array, "... S"]

    def marks_of_scores(self) -> Float[Array, "T S"]:
        """What is added to the visible scores: 0, or infinity."""
        shape = (*self.query.shape, *self.key.shape)
        query, key = marks(self.query), marks(self.key)
        return lax.add(lax.broadcast_in_dim(query, shape, (0,)), lax.broadcast_in_dim(key, shape, (1,)))

    def marks_of_keys(self) -> Float[Array, "1 S"]:
        """The part of it that concerns keys."""
        return lax.expand_dims(marks(self.key), (0,))

    def marks_of_rows(self, unmasked: bool) -> Float[Array, " T"]:
        """What is added to the largest score of a row that sees anything: 0, or NaN where the query is not finite.

        Args:
          unmasked: Whether all rows see all keys. Then rows are also marked if a key is not finite.
        """
        magnitude = self.query
        if unmasked:
            largest = lax.reduce_max(self.key, (0,))
            magnitude = lax.max(magnitude, lax.broadcast(largest, magnitude.shape))
        return lax.mul(marks(magnitude), lax.full_like(magnitude, 0))


def finite_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"], sizes: bool = False
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Float[Array, "*B S K"]]:
    """Keys and values, zero where one of the two is not finite, and the magnitudes of the keys."""
    of_values = magnitude_of(value)
    magnitude = lax.select(_is_infinite(of_values), of_values, magnitude_of(key, sizes))
    return finite(key, magnitude), finite(value, magnitude), magnitude


def magnitude_of(x: Float[Array, "*L F"], sizes: bool = False) -> Float[Array, "*L"]:
    """What `Magnitudes` says of these vectors, half the mean absolute entry if `sizes`; without a gradient."""
    if not sizes:
        is_finite = lax.reduce_and(lax.is_finite(lax.stop_gradient(x)), (x.ndim - 1,))
        zeros = lax.full(is_finite.shape, 0, x.dtype)
        return lax.select(is_finite, zeros, lax.full_like(zeros, jnp.inf))
    # XLA's CPU computes a sum faster than other reductions that pass NaN on (unless its terms are multiplied after
    # `abs`: then it uses one core). That of these terms cannot overflow.
    terms = lax.abs(lax.mul(lax.stop_gradient(x), lax.full_like(x, 0.5 / max(x.shape[-1], 1))))
    half_mean = lax.reduce_sum(terms, (x.ndim - 1,))
    return lax.select(lax.ne(half_mean, half_mean), lax.full_like(half_mean, jnp.inf), half_mean)


def finite(x: Float[Array, "*L F"], magnitude: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Zeros where the magnitude is infinite."""
    infinite = lax.broadcast_in_dim(_is_infinite(magnitude), x.shape, tuple(range(magnitude.ndim)))
    return lax.select(infinite, lax.full_like(x, 0), x)


def restored(x: Float[Array, "n F"], magnitude: Float[Array, " n"]) -> Float[Array, "n F"]:
    """NaN where the magnitude is infinite: the inverse of `finite`, but for what kind of number was replaced."""
    infinite = lax.broadcast_in_dim(_is_infinite(magnitude), x.shape, (0,))
    return lax.select(infinite, lax.full_like(x, jnp.nan), x)


def marks(magnitude: Float[Array, "*L"]) -> Float[Array, "*L"]:
    """Infinity where the magnitude is infinite, else 0."""
    return lax.select(_is_infinite(magnitude), magnitude, lax.full_like(magnitude, 0))


def _is_infinite(magnitude: Float[Array, "*L"]) -> Bool[Array, "*L"]:
    return lax.eq(magnitude, lax.full_like(magnitude, jnp.inf))


def mark_rows(largest: Float[Array, " t"], marks: Float[Array, " t"]) -> Float[Array, " t"]:
    """The largest score of each row, with the mark of the row added if it sees anything."""
    return lax.select(lax.gt(largest, lax.full_like(largest, -jnp.inf)), largest + marks, largest)
