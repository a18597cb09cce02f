"""Attention of one head, written as the equation: the whole [T, S] score matrix at once.

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need, arXiv:1706.03762, equation 1.
Short sequences run fastest this way; it is differentiable any number of times, forward and reverse.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._impl.scores import Learned, Scores
from flax_mha._tiles import Tile


def attend(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    learned: Learned,
    scores: Scores,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Output and log-sum-exp of one head: 0 and -inf for a row that sees nothing."""
    whole = Tile(0, 0, (query.shape[0], key.shape[0]))
    products = scores.dot(query, key, transpose_b=True)
    s = scores.tile(products, learned, whole, scores.mask)
    # Subtracting the largest score changes no result and no gradient; it keeps exp in range.
    largest = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=-jnp.inf))
    poisoned = largest == jnp.inf
    if scores.poison is not None:
        # Rows that see a key or value that is not finite answer NaN, and send nothing back.
        s = dataclasses.replace(scores, poison=None).tile(products, learned, whole, scores.mask)
        s, largest = (jnp.where(poisoned, jnp.zeros_like(x), x) for x in (s, largest))
    if learned.sink is not None:
        largest = jnp.maximum(largest, lax.stop_gradient(learned.sink))
    shift = jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), largest)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    if learned.sink is not None:
        total = total + jnp.exp(learned.sink - shift)
    divisor = jnp.where(total == 0, jnp.ones_like(total), total)
    keep = scores.keep(whole)
    output = scores.dot(e if keep is None else e * keep.astype(e.dtype), value) / divisor
    lse = jnp.log(divisor) + largest
    if scores.poison is not None:
        output, lse = (jnp.where(poisoned, jnp.full_like(x, jnp.nan), x) for x in (output, lse))
    return output, lse[:, 0]
