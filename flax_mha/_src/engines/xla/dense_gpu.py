"""Dense attention on GPUs, in as few passes over the T x S scores as XLA allows: these take most of the time.

Weights are divided by their sum before the product with the values, so that XLA makes one kernel of the softmax. Its
gradient needs for each row the sum of weights times their cotangents. This is the sum of the output times its
cotangent, which is cheaper (Dao et al., FlashAttention, arXiv:2205.14135, appendix B). The rule of `nonfinite.py`
holds without a pass that searches for NaN:

- An entry of a query, key or value that is not finite makes all products of its row or column NaN, in the same kernel.
  A visible NaN makes the softmax of its row NaN; a masked one is replaced.
- In gradients, entries that are not finite are replaced by zeros. Rows that are NaN have no gradient.

If nothing can be masked, NaN propagates by itself, and none of this is done.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha._src import plan as schedule
from flax_mha._src.call.operands import Call, Operands, Options, OutputAndLse
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.math.head import Head, heads_of, map_heads, to_caller
from flax_mha._src.math.scores import ScoreInputs, ScoreRule, times

NAN_ROW = -1e-30  # replaces the weights of a NaN row in gradients; products with large values stay finite


class Products(NamedTuple):
    """Multiplies matrices with this precision and dtype."""

    precision: lax.PrecisionLike  # precision, as in `jax.lax.dot_general`
    dtype: jnp.dtype  # dtype of the product
    guards: bool  # whether scores may be masked, so that NaN and infinity must be kept out of gradients

    def __call__(self, a: Float[Array, "m k"], b: Array, b_axis: int = 0) -> Float[Array, "m n"]:
        """Computes a @ b, or a @ b.T if `b_axis` is 1."""
        contract = ((1,), (b_axis,))
        return lax.dot_general(a, b, (contract, ((), ())), precision=self.precision, preferred_element_type=self.dtype)

    def finite(self, x: Float[Array, "n F"]) -> Float[Array, "n F"]:
        """Replaces entries that are not finite by zeros, if `guards`."""
        return jnp.where(lax.is_finite(x), x, jnp.zeros_like(x)) if self.guards else x


def attention(call: Call) -> OutputAndLse:
    return _all_heads(call.operands, call.options, schedule.product_dtype(call, tiles=False))


@functools.partial(jax.jit, static_argnames=("options", "dtype"))
def _all_heads(operands: Operands, options: Options, dtype: jnp.dtype) -> OutputAndLse:
    head = varying_alike(heads_of(operands, options, "unchanged", dtype))
    return to_caller(map_heads(dense_head_on_gpu, head, head.query.ndim - 2), operands.query.dtype)


def dense_head_on_gpu(head: Head) -> tuple[Float[Array, "T Hv"], Float[Array, " T"], Float[Array, " T"] | None]:
    """Computes output, log-sum-exp and largest scores of one head; 0, -inf and -inf for rows that see no key.

    It has derivatives of every order, in forward and reverse mode. The arrays of the head are those of the call, finite
    or not. The output has the dtype of the value.
    """
    query, key, value, inputs, rule = head.query, head.key, head.value, head.inputs, head.rule
    whole = head.whole
    guards = rule.masks_scores(inputs)
    dot = Products(rule.precision, rule.dtype, guards)
    products = _products(dot, query, key, value)
    products = products if rule.scale == 1.0 else products * rule.scale
    s = _scores_of(products, inputs, rule, whole) if guards else rule.tile(products, inputs, whole)
    kept = rule.dropout_by_query(whole, s.dtype)
    output, lse = _attention(dot._replace(dtype=value.dtype), s, inputs.sink, kept, value)
    largest = jnp.max(lax.stop_gradient(s), axis=1, initial=-jnp.inf) if rule.returns_max else None
    return output, lse[:, 0], largest


def _scores_of(products: Float[Array, "T S"], inputs: ScoreInputs, rule: ScoreRule, whole: Tile) -> Float[Array, "T S"]:
    """Computes scores from scaled products: -inf where masked, NaN where a visible product or bias is NaN."""
    bias, poison = inputs.bias, None
    if rule.soft_cap is not None or rule.score_mod is not None:  # their derivatives at NaN would be NaN
        is_nan = lax.stop_gradient(products != products)
        poison = jnp.where(is_nan, jnp.nan, jnp.zeros((), products.dtype))
        products = _replaced(0.0, products, ~is_nan)
        products = products if bias is None else rule.zero_masked(products, bias != -jnp.inf)
    if not rule.has_finite_derivatives:
        s = rule.differentiable_tile(products, inputs, whole)
        return s if poison is None else jnp.where(s == -jnp.inf, s, s + poison)
    s, visible = rule.unmasked_scores(products, inputs._replace(bias=None), whole, poison)
    if bias is not None:  # added such that its gradient is the array of the scores' gradients itself
        shows = bias != -jnp.inf
        s = s + _replaced(0.0, bias, shows).astype(s.dtype)
        visible = shows if visible is None else visible & shows
    return s if visible is None else _replaced(-jnp.inf, s, visible)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(
    dot: Products, query: Float[Array, "T H"], key: Float[Array, "S H"], value: Float[Array, "S Hv"]
) -> Float[Array, "T S"]:
    """Computes products of queries and keys; with `dot.guards` they are NaN if query, key or value is not finite."""
    if not dot.guards:
        return dot(query, key, 1)
    is_finite = lax.is_finite(value)
    is_finite = is_finite if value.shape == key.shape else is_finite.all(axis=1, keepdims=True)
    query = jnp.where(lax.is_finite(query), query, jnp.nan)
    return dot(query, jnp.where(lax.is_finite(key) & is_finite, key, jnp.nan), 1)


@_products.defjvp
def _products_jvp(dot: Products, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    query, key, _ = primals
    d_query, d_key, _ = tangents
    narrow = dot._replace(dtype=query.dtype)  # so that gradients of scores are multiplied in this dtype
    tangent = narrow(d_query, dot.finite(key), 1) + narrow(dot.finite(query), d_key, 1)
    return _products(dot, *primals), tangent.astype(dot.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _replaced(number: float, x: Float[Array, "#T #S"], keep: Bool[Array, "#T #S"]) -> Float[Array, "#T #S"]:
    """Replaces `x` by `number` where `keep` is False. Gradients pass unchanged: they are 0 there already."""
    return jnp.where(keep, x, jnp.asarray(number, x.dtype))


@_replaced.defjvp
def _replaced_jvp(number: float, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _replaced(number, *primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(
    dot: Products,
    s: Float[Array, "T S"],
    sink: Float[Array, ""] | None,
    dropout: Float[Array, "T S"] | None,
    value: Float[Array, "S Hv"],
) -> tuple[Float[Array, "T Hv"], Float[Array, "T 1"]]:
    """Computes output and log-sum-exp from scores `s`; values not finite count as 0, because their scores are NaN."""
    e, divisor, lse = _exponentials(s, sink)
    return dot(times(e / divisor, dropout).astype(value.dtype), dot.finite(value)), lse


@_attention.defjvp
def _attention_jvp(dot: Products, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    s, sink, dropout, value = primals
    d_s, d_sink, _, d_value = tangents
    weights, lse = _softmax(dot.guards, s, sink)
    dropped, finite = times(weights, dropout).astype(value.dtype), dot.finite(value)
    output = dot(dropped, finite)
    weighted, mean = _weigh_tangents(weights, lse, sink, d_s, d_sink)
    tangent = dot(times(weighted, dropout).astype(value.dtype), finite) + dot(dropped, d_value)
    tangent = tangent - (mean * output.astype(mean.dtype)).astype(tangent.dtype)
    if dot.guards:
        is_nan = weights[:, :1] == NAN_ROW
        output = jnp.where(is_nan, jnp.nan, output)
        tangent, mean = (jnp.where(is_nan, jnp.zeros_like(x), x) for x in (tangent, mean))
    return (output, lse), (tangent, mean)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _softmax(
    guards: bool, s: Float[Array, "T S"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "T S"], Float[Array, "T 1"]]:
    """Computes weights and log-sum-exp for gradients; with `guards`, rows that are NaN get weights of `NAN_ROW`.

    The cotangents of these rows are 0, so any weights will do whose products with values are finite. Thus the first
    entry of a row tells whether the row is NaN, without another pass over the weights.
    """
    e, divisor, lse = _exponentials(s, sink)
    weights = e / divisor  # in each row all entries are NaN, or none
    return jnp.where(weights == weights, weights, jnp.full_like(weights, NAN_ROW)) if guards else weights, lse


@_softmax.defjvp
def _softmax_jvp(guards: bool, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    weights, lse = _softmax(guards, *primals)
    weighted, d_lse = _weigh_tangents(weights, lse, primals[1], *tangents)
    d_weights = weighted - weights * d_lse
    if guards:
        d_weights, d_lse = (jnp.where(weights[:, :1] == NAN_ROW, jnp.zeros_like(x), x) for x in (d_weights, d_lse))
    return (weights, lse), (d_weights, d_lse)


def _weigh_tangents(
    weights: Float[Array, "T S"], lse: Float[Array, "T 1"], sink: Array | None, d_s: Float[Array, "T S"], d_sink: Any
) -> tuple[Float[Array, "T S"], Float[Array, "T 1"]]:
    """Multiplies weights by the tangents of their scores; also returns the sum of each row, with the sink's product.

    The product is 0 where the weight is 0, so that no masked score gets a gradient of NaN.
    """
    weighted = jnp.where(weights == 0, jnp.zeros_like(d_s), weights * d_s)
    mean = jnp.sum(weighted, axis=1, keepdims=True)
    if sink is None:
        return weighted, mean
    return weighted, mean + jnp.where(lse == lse, jnp.exp(sink - lse), jnp.zeros_like(lse)) * d_sink


def _exponentials(
    s: Float[Array, "T S"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "T S"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """Computes the softmax's numerators, their divisors, and the log-sum-exp.

    A row of -inf has numerators 0 and log-sum-exp -inf; a row with infinity or NaN has divisor and log-sum-exp NaN.
    """
    largest = jnp.max(s, axis=1, keepdims=True, initial=-jnp.inf)
    largest = largest if sink is None else jnp.maximum(largest, sink)
    shift = jnp.maximum(largest, jnp.finfo(s.dtype).min)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - shift)
    # The sum is at least 1, or 0 if no key is visible, or NaN, which `jnp.maximum` on a CPU would lose.
    divisor = total + jnp.finfo(s.dtype).tiny
    return e, divisor, jnp.log(divisor) + largest
