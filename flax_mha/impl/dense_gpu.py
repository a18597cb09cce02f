"""Attention of one head on GPUs: the equation of `dense.py` in as few passes over the scores as XLA needs.

There a call takes as long as it takes to write and read arrays of T x S. So weights are divided before they meet the
values, which makes one kernel of the whole softmax, and its gradient needs the sums of a row's products with their
cotangents, which are those of the output with its own (Dao et al., FlashAttention, arXiv:2205.14135, appendix B).
And nothing looks for NaN in a pass of its own, as `nonfinite.py` would:

- An entry of a query, a key or a value that is not finite makes the products of its row or column NaN, while they are
  made. A visible NaN makes the softmax of its row NaN; a masked one is replaced.
- Gradients multiply by arrays in which zeros stand in the place of what is not finite. Rows that are NaN have none.

If nothing can be masked, none of this is needed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha.call.operands import Call, Operands, Options, OutputAndLse
from flax_mha.core.tile import Tile
from flax_mha.core.tracing import varying_alike
from flax_mha.impl.shared import schedule
from flax_mha.impl.shared.head import Head, heads_of, map_heads, to_caller
from flax_mha.impl.shared.scores import ScoreInputs, ScoreRule

NAN_ROW = -1e-30  # all weights of a row that is NaN, in gradients: no large values make them infinite


class Products(NamedTuple):
    """A matrix product with its precision and dtypes.

    Attributes:
      precision: As in `jax.lax.dot_general`.
      dtype: Of the products; their sums are float32 at least.
      guards: Whether something may be masked, and what is not finite is kept out of gradients.
    """

    precision: lax.PrecisionLike
    dtype: jnp.dtype
    guards: bool

    def __call__(self, a: Float[Array, "m k"], b: Array, b_axis: int = 0) -> Float[Array, "m n"]:
        """The product a @ b, or a @ b.T if `b_axis` is 1."""
        contract = ((1,), (b_axis,))
        return lax.dot_general(a, b, (contract, ((), ())), precision=self.precision, preferred_element_type=self.dtype)

    def finite(self, x: Float[Array, "n F"]) -> Float[Array, "n F"]:
        """`x`, with zeros in the place of what is not finite."""
        return jnp.where(lax.is_finite(x), x, jnp.zeros_like(x)) if self.guards else x


def attention(call: Call) -> OutputAndLse:
    return _all_heads(call.operands, call.options, schedule.product_dtype(call, tiles=False))


@functools.partial(jax.jit, static_argnames=("options", "dtype"))
def _all_heads(operands: Operands, options: Options, dtype: jnp.dtype) -> OutputAndLse:
    head = varying_alike(heads_of(operands, options, "unchanged", dtype))
    return to_caller(map_heads(dense_head_on_gpu, head, head.query.ndim - 2), operands.query.dtype)


def dense_head_on_gpu(head: Head) -> tuple[Float[Array, "T Hv"], Float[Array, " T"], Float[Array, " T"] | None]:
    """Output, log-sum-exp and largest scores of one head: 0, -inf and -inf for a row whose keys are all masked.

    Differentiable any number of times, forward and reverse. The head's arrays hold what they held in the call, finite
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
    """The scores: -inf where masked, NaN where a visible product or bias is."""
    bias, poison = inputs.bias, None
    if rule.soft_cap is not None or rule.score_mod is not None:  # whose derivatives would be NaN, too
        is_nan = lax.stop_gradient(products != products)
        poison = jnp.where(is_nan, jnp.nan, jnp.zeros((), products.dtype))
        products = _replaced(0.0, products, ~is_nan)
        products = products if bias is None else rule.guarded(products, bias != -jnp.inf)
    if not rule.is_harmless:
        s = rule.differentiable_tile(products, inputs, whole)
        return s if poison is None else jnp.where(s == -jnp.inf, s, s + poison)
    s, visible = rule.unmasked(products, inputs._replace(bias=None), whole, poison)
    if bias is not None:  # added so that its gradient is that of the scores, not another array
        shows = bias != -jnp.inf
        s = s + _replaced(0.0, bias, shows).astype(s.dtype)
        visible = shows if visible is None else visible & shows
    return s if visible is None else _replaced(-jnp.inf, s, visible)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(
    dot: Products, query: Float[Array, "T H"], key: Float[Array, "S H"], value: Float[Array, "S Hv"]
) -> Float[Array, "T S"]:
    """Of queries and keys; with guards NaN for a query that is not finite, and for a key if it or its value is not."""
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
    narrow = dot._replace(dtype=query.dtype)  # so that the gradients of scores enter their products in it
    tangent = narrow(d_query, dot.finite(key), 1) + narrow(dot.finite(query), d_key, 1)
    return _products(dot, *primals), tangent.astype(dot.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _replaced(number: float, x: Float[Array, "#T #S"], keep: Bool[Array, "#T #S"]) -> Float[Array, "#T #S"]:
    """`x`, or the number where it is not kept. Gradients pass there, too: they are zero already."""
    return jnp.where(keep, x, jnp.asarray(number, x.dtype))


@_replaced.defjvp
def _replaced_jvp(number: float, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _replaced(number, *primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(
    dot: Products,
    s: Float[Array, "T S"],
    sink: Float[Array, ""] | None,
    kept: Float[Array, "T S"] | None,
    value: Float[Array, "S Hv"],
) -> tuple[Float[Array, "T Hv"], Float[Array, "T 1"]]:
    """Output and log-sum-exp. Values that are not finite count as 0: where they are seen, the weights are NaN."""
    e, divisor, lse = _exponentials(s, sink)
    return dot(_dropped(e / divisor, kept).astype(value.dtype), dot.finite(value)), lse


@_attention.defjvp
def _attention_jvp(dot: Products, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    s, sink, kept, value = primals
    d_s, d_sink, _, d_value = tangents
    weights, lse = _softmax(dot.guards, s, sink)
    dropped, finite = _dropped(weights, kept).astype(value.dtype), dot.finite(value)
    output = dot(dropped, finite)
    moved, mean = _moved(weights, lse, sink, d_s, d_sink)
    tangent = dot(_dropped(moved, kept).astype(value.dtype), finite) + dot(dropped, d_value)
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
    """Weights and log-sum-exp, for gradients; with guards, weights of `NAN_ROW` in rows that are NaN.

    Cotangents of these rows are 0, so that weights may be whatever has finite products with values. One entry of a row
    tells then that it is NaN, where to look for NaN in a row, or to replace it later, would take another pass.
    """
    e, divisor, lse = _exponentials(s, sink)
    weights = e / divisor  # NaN in all of a row or nowhere
    return jnp.where(weights == weights, weights, jnp.full_like(weights, NAN_ROW)) if guards else weights, lse


@_softmax.defjvp
def _softmax_jvp(guards: bool, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    weights, lse = _softmax(guards, *primals)
    moved, d_lse = _moved(weights, lse, primals[1], *tangents)
    d_weights = moved - weights * d_lse
    if guards:
        d_weights, d_lse = (jnp.where(weights[:, :1] == NAN_ROW, jnp.zeros_like(x), x) for x in (d_weights, d_lse))
    return (weights, lse), (d_weights, d_lse)


def _moved(
    weights: Float[Array, "T S"], lse: Float[Array, "T 1"], sink: Array | None, d_s: Float[Array, "T S"], d_sink: Any
) -> tuple[Float[Array, "T S"], Float[Array, "T 1"]]:
    """Weights times the tangents of their scores, and the sums of the rows, that of the sink included.

    The products are 0 where a weight is: what is masked gets no gradient that is NaN.
    """
    moved = jnp.where(weights == 0, jnp.zeros_like(d_s), weights * d_s)
    mean = jnp.sum(moved, axis=1, keepdims=True)
    if sink is None:
        return moved, mean
    return moved, mean + jnp.where(lse == lse, jnp.exp(sink - lse), jnp.zeros_like(lse)) * d_sink


def _exponentials(
    s: Float[Array, "T S"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "T S"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """Weights before they are divided, their divisors, and the log-sum-exp.

    Weights of 0 and -inf for a row of -inf; divisor and log-sum-exp NaN for a row that holds infinity or NaN.
    """
    largest = jnp.max(s, axis=1, keepdims=True, initial=-jnp.inf)
    largest = largest if sink is None else jnp.maximum(largest, sink)
    shift = jnp.maximum(largest, jnp.finfo(s.dtype).min)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - shift)
    # The sum is at least 1, or 0 if nothing is visible, and may be NaN, which a maximum on a CPU would lose.
    divisor = total + jnp.finfo(s.dtype).tiny
    return e, divisor, jnp.log(divisor) + largest


def _dropped(weights: Float[Array, "T S"], kept: Float[Array, "T S"] | None) -> Float[Array, "T S"]:
    return weights if kept is None else weights * kept
