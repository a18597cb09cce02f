"""What becomes of NaN and infinity in queries, keys and values: the same in every implementation.

Masked entries must not affect the output, but a weight of 0 times NaN is NaN. Queries, keys and values that are not
finite are therefore replaced by zeros, and marked in two vectors: infinity for such a query, and for a key if the key
or its value is not finite; 0 for all others. The vectors are added to the visible scores, which makes the softmax of a
row that sees an infinity NaN. Such rows get zero gradients, so the gradients of the other rows stay finite.

If nothing can be masked, none of this is needed, because NaN propagates by itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float


class NonFinite(NamedTuple):
    """Per query and per key of one head: 0, or infinity where it is not finite."""

    query: Float[Array, "... T"]
    key: Float[Array, "... S"]


def finite_queries(
    query: Float[Array, "*B T N H"], scale: Float[Array, ""] | float
) -> tuple[Float[Array, "*B T N H"], Bool[Array, "*B T N"]]:
    """The queries, zero where one times the scale is not finite, and where that is."""
    bad = ~jnp.isfinite(query * scale).all(-1)
    return _without(query, bad), bad


def finite_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Bool[Array, "*B S K"]]:
    """Keys and values, zero where one of the two is not finite, and where that is."""
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    return _without(key, bad), _without(value, bad), bad


def _without(x: Array, bad: Bool[Array, "..."]) -> Array:
    return jnp.where(bad[..., None], jnp.zeros_like(x), x)


def as_scores(bad: Bool[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """What is added to visible scores: infinity where `bad`."""
    return jnp.where(bad, jnp.asarray(jnp.inf, dtype), jnp.asarray(0, dtype))
