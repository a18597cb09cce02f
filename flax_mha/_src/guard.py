"""The rule for NaN and infinity in queries, keys and values, the same in every engine.

Masked keys must not affect the output, but a weight of 0 times NaN is NaN. So, if
anything may be masked:

1. `guard` replaces keys and values that hold NaN or infinity by zeros before any
   product. Engines replace queries (`Head.finite_query`), because changing them here
   would copy queries that a CPU can read in place. `NonFinite` holds a *flag*,
   infinity, for each query and key that is replaced, and 0 for all others.
2. A row, the scores of one query, becomes NaN if a flag is visible in it, in one of
   three ways:

   - `poison_of_scores` adds flags to visible scores;
   - `poison_of_rows` adds NaN to the row's largest score;
   - `restore_nan` puts NaN back into an operand, if masked scores are overwritten
     (`rows_of`).
3. Rows that are NaN, and rows without visible keys, add zero to all gradients, so that
   these stay finite. If gradients are computed tile by tile, `derivative_rows` does
   that, otherwise `math/softmax.py`.

If nothing can be masked, NaN propagates by itself, and none of this is done.

If reading all keys and values first would take as long as the rest, the call runs
unguarded first. Fused kernels (`engines/kernels/guarded.py`) and keys read in place
(`engines/in_place.py`) are computed again, guarded, if the output is not finite.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha._src.call.call import Call, LogSumExp, NonFinite


def guard(call: Call, plan: Any) -> Call:
    """Replaces keys and values with NaN or infinity by zeros. `Call.nonfinite`
    flags all such keys and queries.

    Returns the call unchanged if nothing can be masked, or if `plan.guard_first` is
    False: then the engine does it.
    """
    if not plan.guard_first or not call.masks_scores(call.bias):
        return call
    dtype = call.dtype
    # Products use scaled queries, and scaling may overflow.
    query = call.query
    if call.scale_array is not None:
        query = query.astype(dtype) * call.scale_array.astype(dtype)
    elif abs(call.scale) > 1:
        query = query.astype(dtype) * call.scale
    query_flags = flag(query)
    key, value, key_flags = zero_keys(call.key, call.value)
    nonfinite = NonFinite(query=query_flags.astype(dtype), key=key_flags.astype(dtype))
    return call.replace(key=key, value=value, nonfinite=nonfinite)


def flag(x: Float[Array, "*L F"]) -> Float[Array, "*L"]:
    """Returns infinity for each vector [F] that holds NaN or infinity, and 0 for all
    others, without a gradient.
    """
    features = x.ndim - 1
    is_finite = lax.is_finite(lax.stop_gradient(x))
    is_finite = lax.reduce_and(is_finite, (features,))
    zeros = lax.full(is_finite.shape, 0, x.dtype)
    infinity = lax.full_like(zeros, jnp.inf)
    return lax.select(is_finite, zeros, infinity)


def zero(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Replaces each vector [F] by zeros if its entry in `flags` is infinity, as in the
    result of `flag`.
    """
    # With the option `jax_remat3` of JAX 0.12, the tangent of a function under
    # `jax.checkpoint` has no transpose.
    if getattr(jax.config, "jax_remat3", False):
        return _zero(x, flags)
    return _zero_from_flags(x, flags)


def _zero(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    is_infinite = lax.eq(flags, lax.full_like(flags, jnp.inf))
    is_infinite = lax.broadcast_in_dim(is_infinite, x.shape, tuple(range(flags.ndim)))
    return lax.select(is_infinite, lax.full_like(x, 0), x)


# The backward pass saves only the flags [*L], and recomputes the mask over features.
_zero_from_flags = jax.checkpoint(_zero, prevent_cse=False)


def zero_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Float[Array, "*B S K"]]:
    """Replaces a key and its value by zeros if either is not finite; also returns the
    flags of the keys (`flag`).
    """
    flags = lax.max(flag(key), flag(value).astype(key.dtype))
    return zero(key, flags), zero(value, flags), flags


def restore_nan(
    x: Float[Array, "n F"], flags: Float[Array, " n"]
) -> Float[Array, "n F"]:
    """Sets vectors whose flag is infinity to NaN. All their scores become NaN; callers
    must set masked ones to -inf.
    """
    nan_or_zero = flags * 0  # infinity times 0 is NaN
    return x + jnp.expand_dims(nan_or_zero, -1).astype(x.dtype)


def poison_of_scores(nonfinite: NonFinite) -> Float[Array, "T S"]:
    """Returns a term to add to visible scores: infinity if the query or the key held
    NaN or infinity, otherwise 0.
    """
    if nonfinite.key.ndim == 2:  # each query has keys of its own
        return nonfinite.query[:, None] + nonfinite.key
    shape = (*nonfinite.query.shape, *nonfinite.key.shape)
    query_flags = lax.broadcast_in_dim(nonfinite.query, shape, (0,))
    key_flags = lax.broadcast_in_dim(nonfinite.key, shape, (1,))
    return lax.add(query_flags, key_flags)


def poison_of_rows(nonfinite: NonFinite, unmasked: bool) -> Float[Array, " T"]:
    """Returns a term to add to the largest score of each row: NaN if its query held NaN
    or infinity, otherwise 0.

    If `unmasked`, every query attends to every key, so a single key with NaN or
    infinity makes all rows NaN.
    """
    flags = nonfinite.query
    if unmasked:
        any_key_flag = lax.reduce_max(nonfinite.key, (0,))
        flags = lax.max(flags, lax.broadcast(any_key_flag, flags.shape))
    # Infinity times 0 is NaN.
    return lax.mul(flags, lax.full_like(flags, 0))


def poison_rows(
    largest: Float[Array, " t"], nan_or_zero: Float[Array, " t"]
) -> Float[Array, " t"]:
    """Adds `nan_or_zero` to the largest score of each row with a visible key."""
    has_visible_key = lax.gt(largest, lax.full_like(largest, -jnp.inf))
    return lax.select(has_visible_key, largest + nan_or_zero, largest)


def derivative_rows(
    query: Float[Array, "*L T H"],
    result: tuple[Float[Array, "*L T Hv"], LogSumExp],
    keys_are_finite: bool,
) -> tuple[
    Float[Array, "*L T H"], Float[Array, "*L T Hv"], LogSumExp, Bool[Array, "*L T"]
]:
    """Prepares a backward pass in which rows without derivatives add 0 to all
    gradients. Returns query, output, log-sum-exp, and which rows have derivatives.

    A row has none if its log-sum-exp, `result[1]`, is not finite: the row is NaN, or
    has no visible key and no sink. Its maximum becomes 0 and its `log_sum` infinity, so
    that all weights are 0. Output and, if `keys_are_finite`, query become 0.
    """
    output, (maximum, log_sum) = result
    is_finite = jnp.isfinite(maximum + log_sum)
    # P = exp((S - m) - log(l)) is 0; zeros keep products with it from being NaN.
    output = jnp.where(is_finite[..., None], output, jnp.zeros_like(output))
    output = output.astype(log_sum.dtype)
    if keys_are_finite:
        query = jnp.where(is_finite[..., None], query, jnp.zeros_like(query))
    maximum = jnp.where(is_finite, maximum, jnp.zeros_like(maximum))
    log_sum = jnp.where(is_finite, log_sum, jnp.full_like(log_sum, jnp.inf))
    return query, output, LogSumExp(maximum, log_sum), is_finite


def backward_weights(
    s: Float[Array, "..."], lse: LogSumExp, may_be_nan: bool
) -> Float[Array, "..."]:
    """Computes the weights of scores S for derivatives; 0 in rows whose `lse.log_sum`
    `derivative_rows` set to infinity.

    `may_be_nan`: whether scores in those rows may be NaN, which a bias or a `score_mod`
    can cause.
    """
    if may_be_nan:
        # exp(NaN - inf) would be NaN, not 0.
        has_no_derivative = lse.log_sum == jnp.inf
        s = jnp.where(has_no_derivative, jnp.full_like(s, -jnp.inf), s)
    return lse.weights(s)
