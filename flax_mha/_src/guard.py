"""The rule for NaN and infinity in queries, keys and values, the same in every implementation.

Masked entries must not affect the output, but a weight of 0 times NaN is NaN. So, if anything may be masked:

1. Before the matrix products, vectors with an entry that is NaN or infinite are replaced by zeros: keys and values by
   `zero_keys`, queries by `zero_rows`. An array of *flags* has infinity for each replaced vector.
2. Infinity, the *poison*, is added to the visible scores of replaced vectors. That makes the softmax of their rows NaN,
   as it is without masks. Poison that is the same for a whole row can be added to its largest score (`poison_rows`).
3. Rows that are NaN get zero gradients, so that the gradients of all other rows stay finite (`derivative_rows`).

If nothing can be masked, NaN propagates by itself, and none of this is done. Fused kernels get their arrays unchanged
and are guarded by `when_finite.py`; `decode.py` does all this only if its output is not finite.

This file uses `lax`, because its operations are traced faster than those of `jax.numpy`.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

# How queries, keys and values that are not finite are treated before the products, if scores may be masked.
# "flags": replaced by zeros, and flagged. "flags and scales": the same; flags of finite vectors hold row scales.
# "nan": queries and keys become NaN, for masks that replace scores instead of adding to them (`dense.plain_rows`).
# "unchanged": they stay as they are (`dense_gpu.py`, which finds NaN in the products).
Guard = Literal["flags", "flags and scales", "nan", "unchanged"]


class NonfiniteFlags(NamedTuple):
    """Flags of the scaled queries and the keys of one head: infinity if the vector held NaN or infinity, else 0.

    A key is also flagged if its value held NaN or infinity. With the guard "flags and scales", the flag of a finite
    vector is its row scale, half its mean absolute entry, instead of 0.
    """

    query: Float[Array, "... T"]
    key: Float[Array, "... S"]

    def score_poison(self) -> Float[Array, "T S"]:
        """Computes the poison of visible scores: infinity where query or key is flagged, else 0."""
        shape = (*self.query.shape, *self.key.shape)
        query, key = poison(self.query), poison(self.key)
        return lax.add(lax.broadcast_in_dim(query, shape, (0,)), lax.broadcast_in_dim(key, shape, (1,)))

    def key_poison(self) -> Float[Array, "1 S"]:
        """Computes the poison that keys give to visible scores: infinity where the key is flagged, else 0."""
        return lax.expand_dims(poison(self.key), (0,))

    def row_poison(self, unmasked: bool) -> Float[Array, " T"]:
        """Computes the poison for `poison_rows`: NaN where the query is flagged, else 0.

        If `unmasked`, all rows see all keys, and one flagged key poisons all rows, too.
        """
        flags = self.query
        if unmasked:
            largest = lax.reduce_max(self.key, (0,))
            flags = lax.max(flags, lax.broadcast(largest, flags.shape))
        return lax.mul(poison(flags), lax.full_like(flags, 0))


def zero_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"], row_scales: bool = False
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Float[Array, "*B S K"]]:
    """Replaces a key and its value by zeros if either is not finite; also returns the keys' flags, see `flag_rows`."""
    of_values = flag_rows(value)
    flags = lax.select(_is_infinite(of_values), of_values, flag_rows(key, row_scales))
    return zero_rows(key, flags), zero_rows(value, flags), flags


def flag_rows(x: Float[Array, "*L F"], row_scales: bool = False) -> Float[Array, "*L"]:
    """Computes the flags of vectors, without a gradient; with `row_scales`, finite vectors get their row scale."""
    if not row_scales:
        is_finite = lax.reduce_and(lax.is_finite(lax.stop_gradient(x)), (x.ndim - 1,))
        zeros = lax.full(is_finite.shape, 0, x.dtype)
        return lax.select(is_finite, zeros, lax.full_like(zeros, jnp.inf))
    # Of the reductions that pass NaN on, XLA's CPU computes a sum fastest, if the terms are multiplied before `abs`
    # (after it, on one core only). This sum cannot overflow.
    terms = lax.abs(lax.mul(lax.stop_gradient(x), lax.full_like(x, 0.5 / max(x.shape[-1], 1))))
    half_mean = lax.reduce_sum(terms, (x.ndim - 1,))
    return lax.select(lax.ne(half_mean, half_mean), lax.full_like(half_mean, jnp.inf), half_mean)


@functools.partial(jax.checkpoint, prevent_cse=False)  # saves the flags for the backward pass, not all conditions
def zero_rows(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Replaces flagged vectors by zeros."""
    infinite = lax.broadcast_in_dim(_is_infinite(flags), x.shape, tuple(range(flags.ndim)))
    return lax.select(infinite, lax.full_like(x, 0), x)


def mark_by_nan(
    query: Float[Array, "*B T N H"], scale: float, key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"], Float[Array, "*B S K Hv"]]:
    """Makes infinite entries of scaled queries and keys NaN; replaces values that are not finite by zeros.

    The keys of replaced values become NaN, so that visible ones still make the output NaN. Only values are searched
    for NaN: with few scores, searching queries and keys takes as long as a pass over the scores. `scale` only decides
    which entries of queries become NaN; the others are returned unscaled.
    """
    of_values = flag_rows(value, row_scales=True)
    key = restore_rows(key + lax.stop_gradient(key * 0), of_values)
    return query + lax.stop_gradient(query * scale * 0), key, zero_rows(value, of_values)


def zero_nan(
    query: Float[Array, "T H"], key: Float[Array, "S H"], dtype: DTypeLike
) -> tuple[Float[Array, "T H"], Float[Array, "S H"], NonfiniteFlags]:
    """Replaces queries and keys of one head that hold NaN by zeros; also returns their flags as `dtype`."""
    flags = NonfiniteFlags(flag_rows(query).astype(dtype), flag_rows(key).astype(dtype))
    return zero_rows(query, flags.query), zero_rows(key, flags.key), flags


def restore_rows(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Replaces flagged vectors by NaN, after `zero_rows` has replaced them by zeros."""
    infinite = lax.broadcast_in_dim(_is_infinite(flags), x.shape, tuple(range(flags.ndim)))
    return lax.select(infinite, lax.full_like(x, jnp.nan), x)


def poison(flags: Float[Array, "*L"]) -> Float[Array, "*L"]:
    """Computes poison from flags: infinity if flagged, else 0; row scales become 0."""
    return lax.select(_is_infinite(flags), flags, lax.full_like(flags, 0))


def _is_infinite(flags: Float[Array, "*L"]) -> Bool[Array, "*L"]:
    return lax.eq(flags, lax.full_like(flags, jnp.inf))


def poison_rows(largest: Float[Array, " t"], poison: Float[Array, " t"]) -> Float[Array, " t"]:
    """Adds poison to the largest score of each row that sees a key."""
    return lax.select(lax.gt(largest, lax.full_like(largest, -jnp.inf)), largest + poison, largest)


def derivative_rows(
    query: Float[Array, "*L T H"], result: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]], keys_are_finite: bool
) -> tuple[Float[Array, "*L T H"], Float[Array, "*L T Hv"], Float[Array, "*L T"], Bool[Array, "*L T"]]:
    """Prepares query, output and log-sum-exp for derivatives, and tells which rows have derivatives.

    A row has none if its log-sum-exp is not finite: it saw no key, or NaN or infinity. Its log-sum-exp is replaced by
    infinity, which makes its weights 0, and its output by 0. If `keys_are_finite`, its query is replaced by 0, too, so
    that its products are 0 and cannot overflow.
    """
    output, lse = result
    finite = jnp.isfinite(lse)
    output = jnp.where(finite[..., None], output, jnp.zeros_like(output)).astype(lse.dtype)
    query = jnp.where(finite[..., None], query, jnp.zeros_like(query)) if keys_are_finite else query
    return query, output, jnp.where(finite, lse, jnp.full_like(lse, jnp.inf)), finite


def backward_rows(
    query: Float[Array, "*L T H"],
    result: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]],
    cotangents: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]],
    keys_are_finite: bool,
) -> tuple[Float[Array, "*L T H"], Float[Array, "*L T Hv"], Float[Array, "*L T"], Float[Array, "*L T"]]:
    """Prepares query, output cotangent, log-sum-exp and delta for the backward kernels of "pallas".

    delta is the sum of output times its cotangent in FlashAttention-2, algorithm 2, line 4, minus the cotangent of the
    log-sum-exp. For rows without derivatives see `derivative_rows`. ("blockwise" gets the negative of delta by
    transposing `blockwise._tangent`.)
    """
    d_output, d_lse = cotangents
    query, output, lse, finite = derivative_rows(query, result, keys_are_finite)
    d_output = jnp.where(finite[..., None], d_output, jnp.zeros_like(d_output)).astype(lse.dtype)
    delta = jnp.where(finite, jnp.sum(d_output * output, axis=-1) - d_lse, jnp.zeros_like(lse))
    return query, d_output.astype(query.dtype), lse, delta


def backward_weights(s: Float[Array, "..."], lse: Float[Array, "..."], may_be_nan: bool) -> Float[Array, "..."]:
    """Computes weights exp(s - lse) from scores; 0 in rows without derivatives, whose log-sum-exp must be infinity.

    `derivative_rows` makes it so. `may_be_nan` tells whether scores in these rows may be NaN, as with a bias or a
    `score_mod`.
    """
    s = jnp.where(lse == jnp.inf, jnp.full_like(s, -jnp.inf), s) if may_be_nan else s
    return jnp.exp(s - lse)
