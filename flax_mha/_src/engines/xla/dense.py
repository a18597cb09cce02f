"""Dense attention: all scores of a head, or of one tile, at once. It is the fastest for short sequences.

softmax(Q K^T + bias) V with scaled queries, Vaswani et al., Attention is all you need, arXiv:1706.03762, equation 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src import guard as nonfinite
from flax_mha._src import plan as schedule
from flax_mha._src.call.operands import Call, Operands, Options, OutputAndLse
from flax_mha._src.core.tile import Tile
from flax_mha._src.engines.engine import name_residuals
from flax_mha._src.engines.xla import dense_gpu
from flax_mha._src.math.head import Head, heads_of, map_heads, numbers_as_arrays, to_caller
from flax_mha._src.math.scores import ScoreInputs, ScoreRule
from flax_mha._src.plan import Plan

# Output, log-sum-exp and, if `return_max_score` asks for them, the largest scores of rows.
ResultsOfHead = tuple[Float[Array, "t Hv"], Float[Array, " t"], Float[Array, " t"] | None]


def attention(call: Call) -> OutputAndLse:
    """Computes output and log-sum-exp of all heads, on GPUs by `dense_gpu.py`."""
    call = numbers_as_arrays(call)
    if schedule.on_gpu(call):
        return dense_gpu.attention(call)
    return _all_heads(call.operands, call.options, schedule.plan_dense(call))


@functools.partial(jax.jit, static_argnames=("options", "plan"))
def _all_heads(operands: Operands, options: Options, plan: Plan) -> OutputAndLse:
    head = heads_of(operands, options, "flags and scales" if plan.fuses_rows else "nan", plan.dtype)
    return map_dense_heads(head, operands.query.dtype, plan.looped_axes, plan.max_heads_on_tpu, plan.fuses_rows)


def map_dense_heads(
    head: Head, dtype: DTypeLike, looped_axes: int | None, max_heads_on_tpu: int | None = None, fuse_rows: bool = False
) -> OutputAndLse:
    """Maps `dense_head` over all heads by a `Plan`; returns output [B..., T, N, Hv] in `dtype`, and log-sum-exp."""
    one_head = functools.partial(dense_head, fuse_rows=fuse_rows)
    return to_caller(map_heads(one_head, head, head.query.ndim - 2, looped_axes or 0, max_heads_on_tpu), dtype)


def dense_head(head: Head, fuse_rows: bool = False) -> ResultsOfHead:
    """Computes output, log-sum-exp and largest scores of one head; 0, -inf and -inf for rows that see no key.

    It has derivatives of every order, in forward and reverse mode. `fuse_rows` computes `fused_rows` instead of
    `plain_rows` unless differentiated; the head's flags must then have row scales (`nonfinite.NonfiniteFlags`).
    """
    # The custom JVP rule below cannot be vmapped over an axis of size 0, nor differentiate functions with a custom_vjp.
    reverse_only = head.rule.score_mod is not None and head.rule.score_mod.has_custom_vjp
    if not head.rule.masks_scores(head.inputs) or reverse_only or not head.query.size or not head.key.size:
        return _differentiable(head, fuse_rows)
    return _head(fuse_rows, head)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _head(fuse_rows: bool, head: Head) -> ResultsOfHead:
    return (fused_rows if fuse_rows else plain_rows)(head, head.whole)


@_head.defjvp
def _head_jvp(fuse_rows: bool, primals: tuple[Head], tangents: tuple[Head]) -> tuple[ResultsOfHead, ResultsOfHead]:
    [head], [tangent] = primals, tangents  # arrays in `rule` and `nonfinite` have no gradient

    def differentiable(query: Array, key: Array, value: Array, inputs: ScoreInputs) -> ResultsOfHead:
        return _differentiable(dataclasses.replace(head, query=query, key=key, value=value, inputs=inputs))

    primal, of_tangents = ((x.query, x.key, x.value, x.inputs) for x in (head, tangent))
    return jax.jvp(differentiable, primal, of_tangents)


def plain_rows(head: Head, tile: Tile) -> ResultsOfHead:
    """Computes `ResultsOfHead` for rows that see no keys outside one tile; its callers define derivatives.

    `head` holds the tile's part of all arrays. Queries and keys that are not finite are NaN, and so are their scores:
    a masked score is replaced, a visible one makes its row NaN. So no poison is added, except with a `score_mod`,
    which may lose NaN.
    """
    rule, poison = head.rule, None
    if rule.score_mod is not None:
        head = _with_flags(head)
        poison = None if head.nonfinite is None else head.nonfinite.score_poison()
    query, key, flags = head.query, head.key, head.nonfinite
    if rule.score_mod is None and flags is not None:
        query, key = nonfinite.restore_rows(query, flags.query), nonfinite.restore_rows(key, flags.key)
    s = rule.tile(rule.products(query, key), head.inputs, tile, poison)
    return _softmax(s, head.value, head.inputs, rule, tile)


def _with_flags(head: Head) -> Head:
    """Replaces NaN in queries and keys by zeros and adds their flags, if anything may be masked."""
    if head.nonfinite is not None or not head.rule.masks_scores(head.inputs):
        return head
    query, key, flags = nonfinite.zero_nan(head.query, head.key, head.rule.dtype)
    return dataclasses.replace(head, query=query, key=key, nonfinite=flags)


def fused_rows(head: Head, tile: Tile) -> ResultsOfHead:
    """Computes the same as `plain_rows`; flags in `head.nonfinite`, if any, hold row scales (`NonfiniteFlags`).

    XLA's CPU can compile it to one kernel that writes no score to memory, if the log-sum-exp is not used.
    """
    rule, inputs, flags = head.rule, head.inputs, head.nonfinite
    if flags is None:
        s = rule.tile(rule.products(head.query, head.key), inputs, tile)
        return _softmax(s, head.value, inputs, rule, tile, fused=True)
    # Rows of large numbers are scaled down before the product and up after it. A masked product may then overflow to
    # infinity, but it is never NaN (infinity minus infinity).
    (query, query_factor), (key, key_factor) = _shrunk(head.query, flags.query), _shrunk(head.key, flags.key)
    products = rule.products(query, key) * key_factor.T * query_factor
    s = rule.tile(products, inputs, tile, flags.score_poison(), fused=True)
    return _softmax(s, head.value, inputs, rule, tile, fused=True)


def _shrunk(x: Float[Array, "n H"], row_scale: Float[Array, " n"]) -> tuple[Float[Array, "n H"], Float[Array, "n 1"]]:
    """Scales rows down if their products could overflow; also returns the powers of two that undo it."""
    # In float32 from 2^60 on, by 2^-68. Smaller factors would lose the products of a row's other entries.
    half = jnp.finfo(row_scale.dtype).maxexp // 2
    exponent, is_large = half + 4, (row_scale * (2 * x.shape[1]) > 2.0 ** (half - 4))[:, None]
    one = jnp.ones((), row_scale.dtype)
    factor = jnp.where(is_large, one * 2.0**-exponent, one)
    return x * factor.astype(x.dtype), jnp.where(is_large, one * 2.0**exponent, one)


def _differentiable(head: Head, fuse_rows: bool = False) -> ResultsOfHead:
    """Computes `dense_head` by operations that JAX can differentiate; rows that are NaN add nothing to gradients."""
    head = _with_flags(head)
    rule, whole = head.rule, head.whole
    products = checkpoint_name(rule.products(head.query, head.key), "attention_scores")
    s = rule.differentiable_tile(products, head.inputs, whole)
    if head.nonfinite is None:
        return _softmax(s, head.value, head.inputs, rule, whole, fuse_rows)
    # Rows that see NaN or infinity return NaN, and have no gradient.
    sees_nonfinite = (s != -jnp.inf) & (head.nonfinite.score_poison() == jnp.inf)
    poisoned = jnp.any(sees_nonfinite | jnp.isnan(s) | (s == jnp.inf), axis=1)
    s = jnp.where(poisoned[:, None], jnp.zeros_like(s), s)
    output, lse, largest = _softmax(s, head.value, head.inputs, rule, whole)
    return (
        jnp.where(poisoned[:, None], jnp.full_like(output, jnp.nan), output),
        jnp.where(poisoned, jnp.full_like(lse, jnp.nan), lse),
        largest,
    )


@jax.custom_jvp
def _raise_masked(s: Float[Array, "t s"]) -> Float[Array, "t s"]:
    """Replaces scores of -inf by the lowest finite number. Its derivative is the identity.

    Nothing is lost by that: masked scores have weight 0, and no derivative.
    """
    return jnp.where(s == -jnp.inf, jnp.finfo(s.dtype).min, s)


_raise_masked.defjvp(lambda primals, tangents: (_raise_masked(*primals), *tangents))


def _softmax(
    s: Float[Array, "t s"],
    value: Float[Array, "s Hv"],
    inputs: ScoreInputs,
    rule: ScoreRule,
    tile: Tile,
    fused: bool = False,
) -> ResultsOfHead:
    """Computes `ResultsOfHead` of rows from their scores and values in a tile; `fused` is that of `ScoreRule.tile`."""
    lowest = jnp.finfo(s.dtype).min
    # Masked scores may be replaced by the lowest number, unless a bias or `score_mod` may give it to visible scores.
    replaced = s.size > 0 and not (fused or inputs.bias is not None or rule.score_mod is not None)
    s = _raise_masked(s) if replaced else s
    # Subtracting the largest score changes no result and no gradient; it keeps exp in range.
    largest = lax.stop_gradient(jnp.max(s, axis=1, keepdims=True, initial=None if replaced else -jnp.inf))
    of_rows = None
    if rule.returns_max:
        of_rows = (jnp.where(largest <= lowest, -jnp.inf, largest) if replaced else largest)[:, 0]
    if inputs.sink is not None:
        largest = jnp.maximum(largest, lax.stop_gradient(inputs.sink))
    # XLA's CPU computes difference and exp faster if no other operation is between them and the maximum.
    shift = largest if replaced else jnp.maximum(largest, lowest)
    e = jnp.exp(s - shift)
    total = jnp.sum(e, axis=1, keepdims=True)
    if inputs.sink is not None:
        total = total + jnp.exp(inputs.sink - shift)
    products, total = name_residuals(rule.weigh(e, value, tile), total)
    if not replaced:
        divisor = jnp.maximum(total, 0.5)  # the total is 0 if no key is visible, else at least 1
        return products / divisor, (jnp.log(divisor) + largest)[:, 0], of_rows
    # A row that sees no key has equal weights for all. XLA's maximum of a row of NaN may be -inf, but its sum is NaN.
    is_masked = (largest <= lowest) & ~jnp.isnan(total)
    output = jnp.where(is_masked, 0, products) / jnp.where(is_masked, 1, total)
    return output, jnp.where(is_masked, -jnp.inf, jnp.log(total) + largest)[:, 0], of_rows
