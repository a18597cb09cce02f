"""What becomes of NaN and infinity in queries, keys and values: the same in every implementation.

Masked entries must not affect the output, but a weight of 0 times NaN is NaN. Keys and values that are not finite are
therefore replaced by zeros before they are multiplied, and so are queries where their NaN could reach another row. What
was replaced is known by its magnitude, which is infinite. To the visible scores of such a key, and of such a query,
infinity is added, which makes the softmax of the row NaN. What concerns a whole row can instead be added, as NaN, to
its largest score, if the row sees anything. Such rows get zero gradients, so the gradients of the other rows stay
finite.

If nothing can be masked, none of this is needed, because NaN propagates by itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Magnitudes(NamedTuple):
    """Per scaled query and per key of one head half its mean absolute entry: infinity where it held NaN or infinity.

    The magnitude of a key is also infinity if its value held NaN or infinity.
    """

    query: Float[Array, "... T"]
    key: Float[Array, "... S"]

    def marks_of_scores(self) -> Float[Array, "T S"]:
        """What is added to the visible scores: 0, or infinity."""
        return _marks(self.query)[:, None] + _marks(self.key)[None, :]

    def marks_of_keys(self) -> Float[Array, "1 S"]:
        """The part of it that concerns keys."""
        return _marks(self.key)[None, :]

    def marks_of_rows(self, unmasked: bool) -> Float[Array, " T"]:
        """What is added to the largest score of a row that sees anything: 0, or NaN where the query is not finite.

        Args:
          unmasked: Whether all rows see all keys. Then rows are also marked if a key is not finite.
        """
        return _marks(lax.max(self.query, jnp.max(self.key)) if unmasked else self.query) * 0


def finite_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Float[Array, "*B S K"]]:
    """Keys and values, zero where one of the two is not finite, and the magnitudes of the keys."""
    magnitude = jnp.where(jnp.isfinite(magnitude_of(value)), magnitude_of(key), jnp.inf)
    return finite(key, magnitude), finite(value, magnitude), magnitude


def magnitude_of(x: Float[Array, "*L F"]) -> Float[Array, "*L"]:
    """Half the mean absolute entry, infinity where there is NaN or infinity; without a gradient."""
    # XLA's CPU computes a sum faster than other reductions that pass NaN on (unless its terms are multiplied after
    # `abs`: then it uses one core). That of these terms cannot overflow.
    half_mean = jnp.sum(jnp.abs(lax.stop_gradient(x) * (0.5 / max(x.shape[-1], 1))), axis=-1)
    return jnp.where(jnp.isnan(half_mean), jnp.inf, half_mean)


def finite(x: Float[Array, "*L F"], magnitude: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Zeros where the magnitude is infinite."""
    return jnp.where(jnp.isfinite(magnitude)[..., None], x, jnp.zeros_like(x))


def _marks(magnitude: Float[Array, "*L"]) -> Float[Array, "*L"]:
    return jnp.where(magnitude == jnp.inf, magnitude, jnp.zeros_like(magnitude))


def mark_rows(largest: Float[Array, " t"], marks: Float[Array, " t"]) -> Float[Array, " t"]:
    """The largest score of each row, with the mark of the row added if it sees anything."""
    return lax.select(lax.gt(largest, lax.full_like(largest, -jnp.inf)), largest + marks, largest)
