"""Attention of one head, written as the equation: all scores of a rectangle, in most calls the whole of them, at once.

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need, arXiv:1706.03762, equation 1.
Short sequences run fastest this way.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha.core.tile import Tile
from flax_mha.impl.shared.nonfinite import Magnitudes
from flax_mha.impl.shared.scores import ScoreParams, Scores
from flax_mha.masks import Mask

OutputAndLse = tuple[Float[Array, "t Hv"], Float[Array, " t"]]


def dense_head(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
) -> OutputAndLse:
    """Output and log-sum-exp of one head: 0 and -inf for a row whose keys are all masked.

    Differentiable any number of times, forward and reverse.
    """
    # The custom JVP rule below cannot be vmapped over an axis of size 0, nor differentiate functions with a custom_vjp.
    reverse_only = scores.score_mod is not None and scores.score_mod.has_custom_vjp
    if magnitudes is None or reverse_only or not query.size:
        return _differentiable(query, key, value, params, scores, magnitudes)
    return _head(query, key, value, params, scores, magnitudes)


@jax.custom_jvp
def _head(
    query: Array, key: Array, value: Array, params: ScoreParams, scores: Scores, magnitudes: Magnitudes
) -> OutputAndLse:
    return fused_rows(query, key, value, params, scores, magnitudes, _whole(query, key, scores), scores.mask)


@_head.defjvp
def _head_jvp(primals: tuple, tangents: tuple) -> tuple[OutputAndLse, OutputAndLse]:
    *_, scores, magnitudes = primals  # what they hold has no gradient

    def head(query: Array, key: Array, value: Array, params: ScoreParams) -> OutputAndLse:
        return _differentiable(query, key, value, params, scores, magnitudes)

    return jax.jvp(head, primals[:4], tangents[:4])


def fused_rows(
    query: Float[Array, "t H"],
    key: Float[Array, "s H"],
    value: Float[Array, "s Hv"],
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
    tile: Tile,
    mask: Mask | None,
) -> OutputAndLse:
    """Output and log-sum-exp of the rows of a tile that see this tile alone; without gradients.

    Written so that XLA's CPU can compile it into one kernel: if nobody asks for the log-sum-exp, no score is written to
    memory.
    """
    if magnitudes is None:
        s = scores.tile(scores.products(query, key), params, tile, mask)
        return _softmax(s, value, params, scores, tile)
    # Rows of large numbers are scaled down before the product and up after it. A masked product may then overflow to
    # infinity, but it is never NaN (infinity minus infinity).
    (query, query_factor), (key, key_factor) = _shrunk(query, magnitudes.query), _shrunk(key, magnitudes.key)
    products = scores.products(query, key) * key_factor.T * query_factor
    s = scores.tile(products, params, tile, mask, magnitudes.marks_of_scores(), fused=True)
    return _softmax(s, value, params, scores, tile)


def _shrunk(x: Float[Array, "n H"], magnitude: Float[Array, " n"]) -> tuple[Float[Array, "n H"], Float[Array, "n 1"]]:
    """The rows, scaled down where their products could overflow, and the powers of two that undo the scaling."""
    # In float32 from 2^60 on, by 2^-68. Smaller factors would lose the products of a row's other entries.
    half = jnp.finfo(magnitude.dtype).maxexp // 2
    exponent, is_large = half + 4, (magnitude * (2 * x.shape[1]) > 2.0 ** (half - 4))[:, None]
    one = jnp.ones((), magnitude.dtype)
    factor = jnp.where(is_large, one * 2.0**-exponent, one)
    return x * factor.astype(x.dtype), jnp.where(is_large, one * 2.0**exponent, one)


def _differentiable(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
) -> OutputAndLse:
    whole = _whole(query, key, scores)
    products = scores.products(query, key)
    s = scores.differentiable_tile(products, params, whole, scores.mask)
    if magnitudes is None:
        return _softmax(s, value, params, scores, whole)
    # Rows that see something not finite return NaN, and have no gradient.
    sees_nonfinite = (s != -jnp.inf) & (magnitudes.marks_of_scores() == jnp.inf)
    poisoned = jnp.any(sees_nonfinite | jnp.isnan(s) | (s == jnp.inf), axis=1)
    s = jnp.where(poisoned[:, None], jnp.zeros_like(s), s)
    output, lse = _softmax(s, value, params, scores, whole)
    return (
        jnp.where(poisoned[:, None], jnp.full_like(output, jnp.nan), output),
        jnp.where(poisoned, jnp.full_like(lse, jnp.nan), lse),
    )


def _softmax(
    s: Float[Array, "t s"], value: Float[Array, "s Hv"], params: ScoreParams, scores: Scores, tile: Tile
) -> OutputAndLse:
    # Subtracting the largest score changes no result and no gradient; it keeps exp in range.
    largest = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=-jnp.inf))
    if params.sink is not None:
        largest = jnp.maximum(largest, lax.stop_gradient(params.sink))
    shift = jnp.maximum(largest, jnp.finfo(s.dtype).min)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    if params.sink is not None:
        total = total + jnp.exp(params.sink - shift)
    divisor = jnp.maximum(total, 0.5)  # it is 0, if nothing is visible, or at least 1
    kept = scores.dropout_multiplier(tile, e.dtype)
    output = scores.dot(e if kept is None else e * kept, value) / divisor
    return output, (jnp.log(divisor) + largest)[:, 0]


def _whole(query: Float[Array, "T H"], key: Float[Array, "S H"], scores: Scores) -> Tile:
    return Tile(0, 0, (query.shape[0], key.shape[0]), scores.offsets, ring=scores.ring)
