"""The rule for NaN and infinity in queries, keys and values, the same in every implementation.

Masked entries must not affect the output, but a weight of 0 times NaN is NaN. Keys and values that are not finite are
therefore replaced by zeros before they are multiplied, and so are queries where their NaN could reach another row
(`zero_keys`, `zero_rows`). Flags keep which ones these were. To the visible scores of such a key, and of such a query,
infinity is added, the *poison*, which makes the softmax of the row NaN. What concerns a whole row can instead be added,
as NaN, to its largest score, if the row sees anything (`poison_rows`). Such rows get zero gradients, so the gradients
of the other rows stay finite (`derivative_rows`).

If nothing can be masked, none of this is needed, because NaN propagates by itself. Fused kernels, whose arrays are not
touched, are guarded by `when_finite.py`; `decode.py` looks for what is not finite only if its output is not.

This is written in `lax`, whose operations are traced faster than those of `jax.numpy`.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

# What becomes of queries, keys and values that are not finite, before they are multiplied where scores may be masked.
# "flags": they are zeroed, and flagged. "flags and scales": the flags of the others hold row scales. "nan": queries and
# keys become NaN, for masks that replace scores instead of adding to them (`dense.plain_rows`). "unchanged": nothing
# (`dense_gpu.py`, which finds NaN in the products).
Guard = Literal["flags", "flags and scales", "nan", "unchanged"]


class NonfiniteFlags(NamedTuple):
    """Per scaled query and per key of one head: infinity where it held NaN or infinity.

    Else 0, or half the mean absolute entry where that was asked for. A key is also flagged if its value held NaN or
    infinity.
    """

    query: Float[Array, "... T"]
    key: Float[Array, "... S"]

    def score_poison(self) -> Float[Array, "T S"]:
        """The poison of the visible scores: 0, or infinity."""
        shape = (*self.query.shape, *self.key.shape)
        query, key = poison(self.query), poison(self.key)
        return lax.add(lax.broadcast_in_dim(query, shape, (0,)), lax.broadcast_in_dim(key, shape, (1,)))

    def key_poison(self) -> Float[Array, "1 S"]:
        """The part of it that concerns keys."""
        return lax.expand_dims(poison(self.key), (0,))

    def row_poison(self, unmasked: bool) -> Float[Array, " T"]:
        """The poison of rows that see anything, for their largest score: 0, or NaN where the query is not finite.

        Args:
          unmasked: Whether all rows see all keys. Then rows are also poisoned if a key is not finite.
        """
        flags = self.query
        if unmasked:
            largest = lax.reduce_max(self.key, (0,))
            flags = lax.max(flags, lax.broadcast(largest, flags.shape))
        return lax.mul(poison(flags), lax.full_like(flags, 0))


def zero_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"], row_scales: bool = False
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"], Float[Array, "*B S K"]]:
    """Keys and values, zero where one of the two is not finite, and the flags of the keys."""
    of_values = flag_rows(value)
    flags = lax.select(_is_infinite(of_values), of_values, flag_rows(key, row_scales))
    return zero_rows(key, flags), zero_rows(value, flags), flags


def flag_rows(x: Float[Array, "*L F"], row_scales: bool = False) -> Float[Array, "*L"]:
    """The flags of these vectors, with half the mean absolute entry of others if `row_scales`; without a gradient."""
    if not row_scales:
        is_finite = lax.reduce_and(lax.is_finite(lax.stop_gradient(x)), (x.ndim - 1,))
        zeros = lax.full(is_finite.shape, 0, x.dtype)
        return lax.select(is_finite, zeros, lax.full_like(zeros, jnp.inf))
    # XLA's CPU computes a sum faster than other reductions that pass NaN on (unless its terms are multiplied after
    # `abs`: then it uses one core). That of these terms cannot overflow.
    terms = lax.abs(lax.mul(lax.stop_gradient(x), lax.full_like(x, 0.5 / max(x.shape[-1], 1))))
    half_mean = lax.reduce_sum(terms, (x.ndim - 1,))
    return lax.select(lax.ne(half_mean, half_mean), lax.full_like(half_mean, jnp.inf), half_mean)


@functools.partial(jax.checkpoint, prevent_cse=False)  # saves the flags for the backward pass, not all conditions
def zero_rows(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """Zeros where the flags are infinite."""
    infinite = lax.broadcast_in_dim(_is_infinite(flags), x.shape, tuple(range(flags.ndim)))
    return lax.select(infinite, lax.full_like(x, 0), x)


def mark_by_nan(
    query: Float[Array, "*B T N H"], scale: float, key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"], Float[Array, "*B S K Hv"]]:
    """NaN in scaled queries and in keys for infinity, NaN in keys and zeros in values where a value is not finite.

    Only values are looked through. For queries and keys, too, it would take as long as a pass over few scores.
    """
    of_values = flag_rows(value, row_scales=True)
    key = restore_rows(key + lax.stop_gradient(key * 0), of_values)
    return query + lax.stop_gradient(query * scale * 0), key, zero_rows(value, of_values)


def zero_nan(
    query: Float[Array, "T H"], key: Float[Array, "S H"], dtype: DTypeLike
) -> tuple[Float[Array, "T H"], Float[Array, "S H"], NonfiniteFlags]:
    """Queries and keys of one head, zero where they held NaN, and their flags in the dtype of scores."""
    flags = NonfiniteFlags(flag_rows(query).astype(dtype), flag_rows(key).astype(dtype))
    return zero_rows(query, flags.query), zero_rows(key, flags.key), flags


def restore_rows(x: Float[Array, "*L F"], flags: Float[Array, "*L"]) -> Float[Array, "*L F"]:
    """NaN where the flags are infinite: the inverse of `zero_rows`, but for the kind of number that was replaced."""
    infinite = lax.broadcast_in_dim(_is_infinite(flags), x.shape, tuple(range(flags.ndim)))
    return lax.select(infinite, lax.full_like(x, jnp.nan), x)


def poison(flags: Float[Array, "*L"]) -> Float[Array, "*L"]:
    """Infinity where the flags are infinite, else 0."""
    return lax.select(_is_infinite(flags), flags, lax.full_like(flags, 0))


def _is_infinite(flags: Float[Array, "*L"]) -> Bool[Array, "*L"]:
    return lax.eq(flags, lax.full_like(flags, jnp.inf))


def poison_rows(largest: Float[Array, " t"], poison: Float[Array, " t"]) -> Float[Array, " t"]:
    """The largest score of each row, with the poison of the row added if it sees anything."""
    return lax.select(lax.gt(largest, lax.full_like(largest, -jnp.inf)), largest + poison, largest)


def derivative_rows(
    query: Float[Array, "*L T H"], result: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]], keys_are_finite: bool
) -> tuple[Float[Array, "*L T H"], Float[Array, "*L T Hv"], Float[Array, "*L T"], Bool[Array, "*L T"]]:
    """Query, output and log-sum-exp for derivatives, and which rows have any.

    Rows whose log-sum-exp is not finite, for they saw nothing or something that is not finite, have none: their
    log-sum-exp becomes infinity, which makes their weights 0. Their products may be infinite, though all of queries
    and keys is finite; so their queries count as 0.
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
    """Query, output cotangent, log-sum-exp and delta for the backward pass; FlashAttention-2, algorithm 2, line 4.

    The log-sum-exp's own cotangent d enters through `weights * d`, so it is subtracted from delta. Rows without
    derivatives are those of `derivative_rows`. For the kernels of "pallas" alone: "blockwise" gets the same number,
    negative, by transposing its tangent (`blockwise._tangent`).
    """
    d_output, d_lse = cotangents
    query, output, lse, finite = derivative_rows(query, result, keys_are_finite)
    d_output = jnp.where(finite[..., None], d_output, jnp.zeros_like(d_output)).astype(lse.dtype)
    delta = jnp.where(finite, jnp.sum(d_output * output, axis=-1) - d_lse, jnp.zeros_like(lse))
    return query, d_output.astype(query.dtype), lse, delta


def backward_weights(s: Float[Array, "..."], lse: Float[Array, "..."], may_be_nan: bool) -> Float[Array, "..."]:
    """The softmax, from scores and the log-sum-exp of their rows; 0 in rows where that is infinite.

    Args:
      s: Scores.
      lse: Of `derivative_rows`, in a shape that broadcasts to the scores.
      may_be_nan: Whether scores of rows without a gradient may be NaN, as with a bias or a `score_mod`.
    """
    s = jnp.where(lse == jnp.inf, jnp.full_like(s, -jnp.inf), s) if may_be_nan else s
    return jnp.exp(s - lse)
