"""The softmax of one head: of all scores together, and online, of scores that arrive
in blocks (`OnlineSoftmax`).

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need,
arXiv:1706.03762, equation 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src import guard
from flax_mha._src.call.call import LogSumExp, ScoreFields
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import T
from flax_mha._src.math.derivatives import Function, Tangents
from flax_mha._src.math.head import Head, ResultsOfHead
from flax_mha._src.math.scores import ScoreInputs

# Names for policies of `jax.checkpoint`: gradients need the inputs, the output and the
# log-sum-exp. Gradients of `_differentiable` also need the products of queries and
# keys, "attention_scores".
RESIDUALS = ("attention_output", "attention_lse")


def name_residuals(output: Float[Array, "..."], lse: T) -> tuple[Array, T]:
    """Returns output and log-sum-exp, a pytree, with the names `RESIDUALS`, by which
    policies of `jax.checkpoint` find them.
    """
    return checkpoint_name(output, RESIDUALS[0]), checkpoint_name(lse, RESIDUALS[1])


def attention_operation(
    shape: tuple[int, ...],
    fields: ScoreFields,
    compute: Callable[..., Any],
    with_tangents: Callable[[Any, Any], tuple[Any, Array, Array]],
    *arguments: Any,
) -> ResultsOfHead:
    """Returns `compute(*arguments)`, output, log-sum-exp and largest scores, as one JAX
    operation with derivatives of every order.

    Args:
      shape: The output's shape.
      fields: Says which dtype the results have, and whether there are largest scores.
      compute: Need not be differentiable.
      with_tangents: A function of `arguments` and their tangents that returns the
        results, and the tangents of output and log-sum-exp.
      *arguments: Pytrees of arrays.
    """
    leaves, structure = jax.tree.flatten(arguments)
    output = jax.ShapeDtypeStruct(shape, fields.dtype)
    rows: Any = jax.ShapeDtypeStruct(shape[:-1], fields.dtype)
    largest = rows if fields.return_max_score else None
    like = (output, LogSumExp(rows, rows), largest)
    outputs, structure_of_results = jax.tree.flatten(like)

    def evaluate(*leaves: Any) -> list[Array]:
        return jax.tree.leaves(compute(*jax.tree.unflatten(structure, leaves)))

    def jvp(leaves: Sequence[Any], tangents: Tangents) -> Any:
        d_leaves = [tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(leaves)]
        results, d_output, d_log_sum = with_tangents(
            jax.tree.unflatten(structure, leaves),
            jax.tree.unflatten(structure, d_leaves),
        )
        # Maxima have no derivative.
        d_results = [d_output, None, d_log_sum, None]
        return jax.tree.leaves(results), d_results[: len(outputs)]

    results = Function(outputs, evaluate, jvp)(*leaves)
    return jax.tree.unflatten(structure_of_results, results)


def dense_head(fuse_rows: bool, head: Head) -> ResultsOfHead:
    """Computes output, log-sum-exp and largest scores (None if not requested) of one
    head.

    A query without visible keys has output 0, log-sum-exp -inf (its sink, if there is
    one) and largest score -inf. Forward and reverse mode work to every order. With
    `fuse_rows`, XLA's CPU compiles the forward pass to one kernel.
    """
    rule = head.rule
    masks_nothing = not rule.masks_scores(head.inputs.bias)
    # The custom JVP rule below cannot be vmapped over an axis of size 0, nor
    # differentiate functions with a custom_vjp, such as the quantized products of qwix.
    is_empty = not head.query.size or not head.key.size
    if masks_nothing or is_empty or rule.has_custom_vjp or products_are_replaced():
        return _differentiable(head, fuse_rows)
    return _head(fuse_rows, head)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _head(fuse_rows: bool, head: Head) -> ResultsOfHead:
    return rows_of(head, head.whole, fuse_rows)


@_head.defjvp
def _head_jvp(
    fuse_rows: bool, primals: tuple[Head], tangents: tuple[Head]
) -> tuple[ResultsOfHead, ResultsOfHead]:
    # Arrays in `rule` and `nonfinite` have no gradient.
    [head] = primals
    [tangent] = tangents

    def differentiable(
        query: Array, key: Array, value: Array, inputs: ScoreInputs
    ) -> ResultsOfHead:
        part = dataclasses.replace(
            head, query=query, key=key, value=value, inputs=inputs
        )
        return _differentiable(part)

    return jax.jvp(
        differentiable,
        (head.query, head.key, head.value, head.inputs),
        (tangent.query, tangent.key, tangent.value, tangent.inputs),
    )


def rows_of(head: Head, tile: Tile, fuse: bool) -> ResultsOfHead:
    """Computes the results of queries whose visible keys are all in one tile; callers
    must define the derivatives.

    `head` holds the tile's part of all arrays. With `fuse`, XLA's CPU backend compiles
    this to one kernel, which writes no score to memory. Then a masked product of finite
    numbers may make its row NaN if it overflows.
    """
    query = head.query
    key = head.key
    rule = head.rule
    nonfinite = head.nonfinite
    poison = None
    if nonfinite is not None and (fuse or rule.score_mod is not None):
        query = head.finite_query
        poison = guard.poison_of_scores(nonfinite)
    # Cheaper: put NaN back, because masked scores are replaced anyway.
    elif nonfinite is not None:
        query = guard.restore_nan(query, nonfinite.query)
        key = guard.restore_nan(key, nonfinite.key)
    # S = Q K^T, masked
    products = rule.products(query, key)
    s = rule.tile(products, head.inputs, tile, poison=poison, fused=fuse)
    return _softmax(s, head, tile, fused=fuse)


def _differentiable(head: Head, fuse: bool = False) -> ResultsOfHead:
    """Computes `dense_head` by operations that JAX can differentiate; the gradient of
    rows that are NaN is 0.
    """
    rule = head.rule
    whole = head.whole
    products = rule.products(head.finite_query, head.key)
    products = checkpoint_name(products, "attention_scores")
    s = rule.differentiable_tile(products, head.inputs, whole)
    if head.nonfinite is None:
        return _softmax(s, head, whole, fused=fuse)

    # A row becomes NaN if it attends to any flag: then a visible score plus the flag is
    # infinity. Its scores are replaced before the softmax, so that its gradient is 0.
    fixed = lax.stop_gradient(s)
    is_masked = fixed == -jnp.inf
    has_no_flag = fixed + guard.poison_of_scores(head.nonfinite) < jnp.inf
    is_nan = ~jnp.all(is_masked | has_no_flag, axis=1)
    s = jnp.where(is_nan[:, None], jnp.zeros_like(s), s)
    output, lse, largest = _softmax(s, head, whole)
    output = jnp.where(is_nan[:, None], jnp.full_like(output, jnp.nan), output)
    nan = jnp.full_like(lse.log_sum, jnp.nan)
    lse = lse._replace(log_sum=jnp.where(is_nan, nan, lse.log_sum))
    return output, lse, largest


@jax.custom_jvp
def _raise_masked(s: Float[Array, "t s"]) -> Float[Array, "t s"]:
    """Replaces scores of -inf by the lowest finite number, so that differences of
    scores are never NaN.

    The weights of masked scores are still 0, and so are their gradients. So tangents
    pass through unchanged.
    """
    return jnp.where(s == -jnp.inf, jnp.finfo(s.dtype).min, s)


_raise_masked.defjvp(lambda primals, tangents: (_raise_masked(*primals), *tangents))


def _softmax(
    s: Float[Array, "t s"], head: Head, tile: Tile, fused: bool = False
) -> ResultsOfHead:
    """Computes output, log-sum-exp and largest scores from scores and `head.value`; for
    `fused` see `ScoreRule.tile`.

    With scores S, values V and a sink z, each row of the output is::

        m = max(rowmax(S), z)      P = exp(S - m)      l = rowsum(P) + exp(z - m)
        O = P V / l                LSE = m + log(l)
    """
    value = head.value
    rule = head.rule
    lowest = jnp.finfo(s.dtype).min
    sink = head.inputs.sink
    # Masked scores may be replaced by the lowest number, unless a bias or `score_mod`
    # may give it to visible scores.
    may_be_lowest = head.inputs.bias is not None or rule.score_mod is not None
    replaced = s.size > 0 and not (fused or rule.on_gpu or may_be_lowest)
    if replaced:
        s = _raise_masked(s)

    # Subtracting the largest score changes no result and no gradient; it keeps exp in
    # range.
    initial = None if replaced else -jnp.inf
    m = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=initial))
    largest = None
    if rule.return_max_score:
        largest = m
        if replaced:
            largest = jnp.where(m <= lowest, -jnp.inf, m)
        largest = largest[:, 0]
    if sink is not None:
        m = jnp.maximum(m, lax.stop_gradient(sink))
    shift = m
    # XLA's CPU computes difference and exp faster if no other operation is between them
    # and the maximum.
    if not replaced:
        shift = jnp.maximum(m, lowest)
    p = jnp.exp(s - shift)
    total = jnp.sum(p, axis=1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - shift)
    if rule.on_gpu:
        # XLA makes one kernel of a softmax that is divided by its sum before the
        # product with the values. Where a weight is 0, its gradient may be infinite
        # (large values), and must not reach the gradient of the sum.
        p = jnp.where(p == 0, 0, p / jnp.maximum(total, 0.5))
    output, total = name_residuals(rule.weigh(p, value, tile), total)

    if not replaced:
        # The total is 0 if no key is visible, otherwise at least 1.
        divisor = jnp.maximum(total, 0.5)
        if not rule.on_gpu:
            output = output / divisor
        elif value.ndim == 3:
            # If each query has values of its own, `jax.vmap` puts the mapped axis of
            # this product elsewhere than that of its tangent, and JAX then confuses
            # them in a custom_jvp. An operation with `total` moves both to the front.
            output = jnp.where(total == 0, 0, output)
        return output, LogSumExp(m[:, 0], jnp.log(divisor)[:, 0]), largest
    # A row without visible keys has equal weights. XLA's maximum of a row of NaN may be
    # -inf, but the row's sum is NaN.
    is_masked = (m <= lowest) & ~jnp.isnan(total)
    total = jnp.where(is_masked, 1, total)
    output = jnp.where(is_masked, 0, output) / total
    m = jnp.where(is_masked, -jnp.inf, m)
    return output, LogSumExp(m[:, 0], jnp.log(total)[:, 0]), largest


class OnlineSoftmax(NamedTuple):
    """The softmax of each row over the keys so far, which arrive in blocks; `finish`
    returns the results.

    A *row* is the scores of one query. Milakov and Gimelshein, Online normalizer
    calculation for softmax, arXiv:1805.02867; the output as in FlashAttention,
    arXiv:2205.14135, section 3.1.
    """

    running_max: Float[Array, " t"]  # the largest score, the sink included
    running_sum: Float[Array, " t"]  # the sum of exp(score - running_max)
    # The sum of exp(score - running_max) * value; `finish` divides it by the sum.
    output: Float[Array, "t Hv"]
    # The largest score without the sink, if `return_max_score` needs it.
    largest: Float[Array, " t"] | None = None

    @classmethod
    def start(
        cls,
        rows: int | tuple[int, ...],
        features: int,
        sink: Float[Array, "*#L"] | None,
        fields: ScoreFields,
    ) -> "OnlineSoftmax":
        """Returns the state before the first key. A sink is a score that counts in the
        sum but has no value.

        `rows` is the number of rows, or the shape [*L, t] of the rows of many heads;
        `features` is Hv. The state has the dtype of `fields` and, with its
        `return_max_score`, also the largest score without the sink.
        """
        dtype = fields.dtype
        shape = (rows,) if isinstance(rows, int) else rows
        output = jnp.zeros((*shape, features), dtype)
        largest = None
        if fields.return_max_score:
            largest = jnp.full(shape, -jnp.inf, dtype)
        if sink is None:
            running_max = jnp.full(shape, -jnp.inf, dtype)
            running_sum = jnp.zeros(shape, dtype)
            return cls(running_max, running_sum, output, largest)
        # m = z and l = exp(z - m) = 1, or 0 for a sink of -inf.
        running_max = jnp.full(shape, lax.expand_dims(sink, (sink.ndim,)), dtype)
        has_sink = running_max != -jnp.inf
        ones = jnp.ones_like(running_max)
        running_sum = jnp.where(has_sink, ones, jnp.zeros_like(running_max))
        return cls(running_max, running_sum, output, largest)

    def rescale(
        self,
        scores: Float[Array, "t s"],
        row_poison: Float[Array, " t"] | None = None,
        dtype: DTypeLike | None = None,
    ) -> tuple["OnlineSoftmax", Float[Array, "t s"]]:
        """Adds a block of keys to maximum and sum; returns the state, and the weights P
        by which to add values.

        With scores S, and the running maximum m', sum l' and output O' of the keys
        before these::

            m = max(m', rowmax(S))    P = exp(S - m)    l = exp(m' - m) l' + rowsum(P)
            O = exp(m' - m) O' + P V

        The state holds O without the term P V, which the caller adds.

        Args:
          scores: Scores S of a block of keys, -inf where masked.
          row_poison: NaN for rows whose result must be NaN if any of these keys is
            visible, otherwise 0; None means 0.
          dtype: Dtype to which weights are rounded, also in the sum; None keeps the
            dtype of the scores.
        """
        largest_now = jnp.max(scores, axis=1)
        if row_poison is not None:
            largest_now = guard.poison_rows(largest_now, row_poison)
        running_max, shift = self._maximum(largest_now)
        weights = lax.exp(scores - lax.expand_dims(shift, (1,)))
        if dtype is not None:
            weights = weights.astype(dtype)
        decay = lax.exp(lax.sub(self.running_max, shift))
        sum_before = self.running_sum * decay
        sum_now = jnp.sum(weights, axis=1, dtype=running_max.dtype)
        running_sum = sum_before + sum_now
        largest = self.largest
        if largest is not None:
            largest = lax.max(largest, largest_now)
        output = self.output * lax.expand_dims(decay, (1,))
        return OnlineSoftmax(running_max, running_sum, output, largest), weights

    def _maximum(self, largest: Float[Array, "*L t"]) -> tuple[Array, Array]:
        """Returns the running maximum with these scores, and the same number, but
        finite, to subtract from scores.
        """
        running_max = lax.max(self.running_max, largest)
        # A row without a visible key so far has the maximum -inf. Replace it: -inf -
        # -inf would be NaN.
        lowest = lax.full_like(running_max, jnp.finfo(running_max.dtype).min)
        return running_max, lax.max(running_max, lowest)

    def merge(
        self,
        output: Float[Array, "*L t Hv"],
        lse: LogSumExp,
        largest: Float[Array, "*L t"] | None,
    ) -> "OnlineSoftmax":
        """Adds the results of other keys, which `finish` returned.

        With their maximum m", sum l" and output O" / l", and m', l' and O' as in
        `rescale`::

            m = max(m', m")    l = exp(m' - m) l' + exp(m" - m) l"
            O = exp(m' - m) O' + exp(m" - m) O"
        """
        running_max, shift = self._maximum(lse.maximum)
        decay = lax.exp(self.running_max - shift)
        total = lax.exp((lse.maximum - shift) + lse.log_sum)
        if self.largest is not None and largest is not None:
            largest = lax.max(self.largest, largest)
        return OnlineSoftmax(
            running_max,
            running_sum=self.running_sum * decay + total,
            output=self.output * decay[..., None] + output * total[..., None],
            largest=largest,
        )

    def finish(self) -> ResultsOfHead:
        """Converts the last state to output O / l, log-sum-exp m + log(l), and largest
        score (None if the state has none).

        A row without visible keys has output 0, log-sum-exp -inf (its sink, if there is
        one) and largest score -inf.
        """
        total = self.running_sum
        # Without visible keys, l is 0, and m is -inf.
        is_zero = lax.eq(total, lax.full_like(total, 0))
        total = lax.select(is_zero, lax.full_like(total, 1), total)
        output = self.output / lax.expand_dims(total, (total.ndim,))
        lse = LogSumExp(self.running_max, lax.log(total))
        return output, lse, self.largest
