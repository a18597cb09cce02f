"""Attention of one head, written as the equation: all scores of a rectangle, in most calls the whole of them, at once.

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need, arXiv:1706.03762, equation 1.
Short sequences run fastest this way.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._impl.nonfinite import Magnitudes, restored
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._tiles import Tile
from flax_mha.masks import Mask

OutputAndLse = tuple[Float[Array, "t Hv"], Float[Array, " t"]]


def dense_head(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
    fuse_rows: bool = False,
) -> OutputAndLse:
    """Output and log-sum-exp of one head: 0 and -inf for a row whose keys are all masked.

    Differentiable any number of times, forward and reverse.

    Args:
      query: Scaled; finite if anything may be masked.
      key: Likewise.
      value: Likewise.
      params: The other differentiable inputs.
      scores: How products of queries and keys become scores.
      magnitudes: Of queries and keys; None if nothing can be masked.
      fuse_rows: Whether to compute `fused_rows` if there is no gradient; needs magnitudes that tell sizes.
    """
    # The custom JVP rule below cannot be vmapped over an axis of size 0, nor differentiate functions with a custom_vjp.
    reverse_only = scores.score_mod is not None and scores.score_mod.has_custom_vjp
    if magnitudes is None or reverse_only or not query.size or not key.size:
        return _differentiable(query, key, value, params, scores, magnitudes, fuse_rows)
    return _head(fuse_rows, query, key, value, params, scores, magnitudes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _head(
    fuse_rows: bool,
    query: Array,
    key: Array,
    value: Array,
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes,
) -> OutputAndLse:
    attend = fused_rows if fuse_rows else plain_rows
    return attend(query, key, value, params, scores, magnitudes, _whole(query, key, scores), scores.mask)


@_head.defjvp
def _head_jvp(fuse_rows: bool, primals: tuple, tangents: tuple) -> tuple[OutputAndLse, OutputAndLse]:
    *_, scores, magnitudes = primals  # what they hold has no gradient

    def head(query: Array, key: Array, value: Array, params: ScoreParams) -> OutputAndLse:
        return _differentiable(query, key, value, params, scores, magnitudes)

    return jax.jvp(head, primals[:4], tangents[:4])


def plain_rows(
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

    Keys and queries that are not finite become NaN again, and so do their scores. A masked score is replaced, a visible
    one makes the sum of its row NaN: nothing has to be added to the scores.
    """
    marks = None
    if magnitudes is not None and scores.score_mod is None:
        query, key = restored(query, magnitudes.query), restored(key, magnitudes.key)
    elif magnitudes is not None:
        marks = magnitudes.marks_of_scores()
    s = scores.tile(scores.products(query, key), params, tile, mask, marks)
    return _softmax(s, value, params, scores, tile)


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
    """What `plain_rows` returns, from magnitudes that tell sizes.

    Written so that XLA's CPU can compile it into one kernel: if nobody asks for the log-sum-exp, no score is written to
    memory.
    """
    if magnitudes is None:
        s = scores.tile(scores.products(query, key), params, tile, mask)
        return _softmax(s, value, params, scores, tile, fused=True)
    # Rows of large numbers are scaled down before the product and up after it. A masked product may then overflow to
    # infinity, but it is never NaN (infinity minus infinity).
    (query, query_factor), (key, key_factor) = _shrunk(query, magnitudes.query), _shrunk(key, magnitudes.key)
    products = scores.products(query, key) * key_factor.T * query_factor
    s = scores.tile(products, params, tile, mask, magnitudes.marks_of_scores(), fused=True)
    return _softmax(s, value, params, scores, tile, fused=True)


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
    fuse_rows: bool = False,
) -> OutputAndLse:
    whole = _whole(query, key, scores)
    products = scores.products(query, key)
    s = scores.differentiable_tile(products, params, whole, scores.mask)
    if magnitudes is None:
        return _softmax(s, value, params, scores, whole, fuse_rows)
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
    s: Float[Array, "t s"],
    value: Float[Array, "s Hv"],
    params: ScoreParams,
    scores: Scores,
    tile: Tile,
    fused: bool = False,
) -> OutputAndLse:
    lowest = jnp.finfo(s.dtype).min
    # Masked scores may be replaced by the lowest number, unless a bias or `score_mod` gives it to visible ones.
    replaced = s.size > 0 and not (fused or params.bias is not None or scores.score_mod is not None)
    s = jnp.where(s == -jnp.inf, lowest, s) if replaced else s
    # Subtracting the largest score changes no result and no gradient; it keeps exp in range.
    largest = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=None if replaced else -jnp.inf))
    if params.sink is not None:
        largest = jnp.maximum(largest, lax.stop_gradient(params.sink))
    # XLA's CPU computes difference and exp faster if no other operation stands between them and the maximum.
    shift = largest if replaced else jnp.maximum(largest, lowest)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    if params.sink is not None:
        total = total + jnp.exp(params.sink - shift)
    kept = scores.dropout_multiplier(tile, e.dtype)
    products = scores.dot(e if kept is None else e * kept, value)
    if not replaced:
        divisor = jnp.maximum(total, 0.5)  # it is 0, if nothing is visible, or at least 1
        return products / divisor, (jnp.log(divisor) + largest)[:, 0]
    # A row that sees nothing weighs all masked values alike. XLA's maximum of a row of NaN may be -inf, its sum is NaN.
    sees_nothing = (largest <= lowest) & ~jnp.isnan(total)
    output = jnp.where(sees_nothing, 0, products) / jnp.where(sees_nothing, 1, total)
    return output, jnp.where(sees_nothing, -jnp.inf, jnp.log(total) + largest)[:, 0]


def _whole(query: Float[Array, "T H"], key: Float[Array, "S H"], scores: Scores) -> Tile:
    return Tile(0, 0, (query.shape[0], key.shape[0]), scores.offsets, ring=scores.ring)
