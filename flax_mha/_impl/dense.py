"""Attention of one head, written as the equation: all scores of a rectangle, in most calls the whole of them, at once.

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need, arXiv:1706.03762, equation 1.
Short sequences run fastest this way.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._impl.scores import Learned, Scores, poison, usable
from flax_mha._tiles import Tile
from flax_mha.masks import Mask

Answer = tuple[Float[Array, "t Hv"], Float[Array, " t"]]


def attend(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    learned: Learned,
    scores: Scores,
) -> Answer:
    """Output and log-sum-exp of one head: 0 and -inf for a row that sees nothing.

    Differentiable any number of times, forward and reverse.
    """
    simple = not scores.hides(learned, scores.mask) or not query.size  # of nothing, jax cannot map the rule below
    return (_differentiable if simple else _attend)(query, key, value, learned, scores)


@jax.custom_jvp
def _attend(query: Array, key: Array, value: Array, learned: Learned, scores: Scores) -> Answer:
    return answer(query, key, value, learned, scores, _whole(query, key), scores.mask)


@_attend.defjvp
def _attend_jvp(primals: tuple, tangents: tuple) -> tuple[Answer, Answer]:
    return jax.jvp(_differentiable, primals, tangents)


def answer(
    query: Float[Array, "t H"],
    key: Float[Array, "s H"],
    value: Float[Array, "s Hv"],
    learned: Learned,
    scores: Scores,
    tile: Tile,
    mask: Mask | None,
) -> Answer:
    """What the rows of a tile answer, if they see this tile alone; without gradients.

    It is written so that XLA's CPU can make one kernel of it: if nobody asks for the log-sum-exp, no score is written
    to memory.
    """
    if not scores.hides(learned, mask):
        s = scores.tile(scores.dot(query, key, transpose_b=True), learned, tile, mask)
        return _softmax(s, value, learned, scores, tile)
    # A hidden product may be infinite, but never NaN: those of large keys are made of smaller ones.
    largest = jnp.max(jnp.abs(key), axis=1, keepdims=True, initial=0.0)
    least = 2.0 ** -(jnp.finfo(key.dtype).maxexp - 32)
    factor = jnp.where(largest > 2.0**32, jnp.full_like(largest, least), jnp.ones_like(largest))
    products = scores.dot(query, usable(key) * factor, transpose_b=True) / factor.T
    s = scores.tile(products, learned, tile, mask, poison(key))
    return _softmax(s, value, learned, scores, tile)


def _differentiable(
    query: Float[Array, "T H"], key: Float[Array, "S H"], value: Float[Array, "S Hv"], learned: Learned, scores: Scores
) -> Answer:
    whole = _whole(query, key)
    if not scores.hides(learned, scores.mask):
        return answer(query, key, value, learned, scores, whole, scores.mask)
    products = scores.dot(query, usable(key), transpose_b=True)
    s = scores.tile(products, learned, whole, scores.mask)
    # Rows that see a key or value that is not finite answer NaN, and send nothing back.
    poisoned = jnp.any((s != -jnp.inf) & (poison(key) == jnp.inf), axis=1)
    s = jnp.where(poisoned[:, None], jnp.zeros_like(s), s)
    output, lse = _softmax(s, value, learned, scores, whole)
    return (
        jnp.where(poisoned[:, None], jnp.full_like(output, jnp.nan), output),
        jnp.where(poisoned, jnp.full_like(lse, jnp.nan), lse),
    )


def _softmax(
    s: Float[Array, "t s"], value: Float[Array, "s Hv"], learned: Learned, scores: Scores, tile: Tile
) -> Answer:
    # Subtracting the largest score changes no result and no gradient; it keeps exp in range.
    largest = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=-jnp.inf))
    if learned.sink is not None:
        largest = jnp.maximum(largest, lax.stop_gradient(learned.sink))
    shift = jnp.maximum(largest, jnp.finfo(s.dtype).min)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    if learned.sink is not None:
        total = total + jnp.exp(learned.sink - shift)
    divisor = jnp.maximum(total, 0.5)  # it is 0, if nothing is visible, or at least 1
    keep = scores.keep(tile)
    output = scores.dot(e if keep is None else e * keep.astype(e.dtype), value) / divisor
    return output, (jnp.log(divisor) + largest)[:, 0]


def _whole(query: Float[Array, "T H"], key: Float[Array, "S H"]) -> Tile:
    return Tile(0, 0, (query.shape[0], key.shape[0]))
