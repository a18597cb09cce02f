"""The online softmax: attention over keys that arrive in blocks, from a running maximum, sum and output of each row.

A *row* is the scores of one query. Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867;
the output as in FlashAttention, arXiv:2205.14135, section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src.guard import poison_rows


class State(NamedTuple):
    """The unfinished softmax of each row over the keys so far; `finish` converts it to results after the last keys."""

    running_max: Float[Array, " t"]  # the largest score, the sink included
    running_sum: Float[Array, " t"]  # the sum of exp(score - running_max)
    output: Float[Array, "t Hv"]  # the sum of exp(score - running_max) * value; `finish` divides it by the sum
    largest: Float[Array, " t"] | None = None  # the largest score without the sink, if `return_max_score` needs it


def start(
    rows: int | tuple[int, ...],
    features: int,
    sink: Float[Array, "*#L"] | None,
    dtype: DTypeLike,
    keeps_largest: bool = False,
) -> State:
    """Returns the state before the first key. A sink is a score that counts in the sum but has no value.

    `rows` is the number of rows, or the shape [*L, t] of the rows of many heads; `features` is Hv. With `keeps_largest`
    the state also has the largest score without the sink.
    """
    shape = (rows,) if isinstance(rows, int) else rows
    output = jnp.zeros((*shape, features), dtype)
    largest = jnp.full(shape, -jnp.inf, dtype) if keeps_largest else None
    if sink is None:
        return State(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), output, largest)
    running_max = jnp.full(shape, lax.expand_dims(sink, (sink.ndim,)), dtype)
    running_sum = jnp.where(running_max == -jnp.inf, jnp.zeros_like(running_max), jnp.ones_like(running_max))
    return State(running_max, running_sum, output, largest)


def rescale(
    state: State,
    scores: Float[Array, "t s"],
    row_poison: Float[Array, " t"] | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[State, Float[Array, "t s"]]:
    """Adds a block of keys to maximum and sum; returns the state, and the weights by which to add values to `output`.

    Args:
      state: The state before these keys.
      scores: Scores of a block of keys, -inf where masked.
      row_poison: NaN for rows whose result must be NaN if any of these keys is visible, else 0; None means 0.
      dtype: Dtype to which weights are rounded, also in the sum; None keeps the dtype of the scores.
    """
    largest_now = jnp.max(scores, axis=1)
    largest_now = largest_now if row_poison is None else poison_rows(largest_now, row_poison)
    running_max = lax.max(state.running_max, largest_now)
    # A row without a visible key so far has the maximum -inf. Replace it: -inf - -inf would be NaN.
    shift = lax.max(running_max, lax.full_like(running_max, jnp.finfo(running_max.dtype).min))
    weights = lax.exp(scores - lax.expand_dims(shift, (1,)))
    weights = weights if dtype is None else weights.astype(dtype)
    decay = lax.exp(lax.sub(state.running_max, shift))
    running_sum = state.running_sum * decay + jnp.sum(weights, axis=1, dtype=running_max.dtype)
    largest = None if state.largest is None else lax.max(state.largest, largest_now)
    return State(running_max, running_sum, state.output * lax.expand_dims(decay, (1,)), largest), weights


def update(
    state: State,
    scores: Float[Array, "t s"],
    weigh: Callable[[Array], Array],
    row_poison: Float[Array, " t"] | None = None,
) -> State:
    """Adds a block of keys to the state; `weigh(weights)` returns the weighted sums [t, Hv] of the block's values."""
    state, weights = rescale(state, scores, row_poison)
    return state._replace(output=state.output + weigh(weights))


def finish(state: State) -> tuple[Float[Array, "*L t Hv"], Float[Array, "*L t"], Float[Array, "*L t"] | None]:
    """Converts the last state to output, log-sum-exp and largest score (None if the state has none).

    A row without visible keys has output 0, log-sum-exp -inf (its sink, if there is one) and largest score -inf.
    """
    total = state.running_sum
    total = lax.select(lax.eq(total, lax.full_like(total, 0)), lax.full_like(total, 1), total)
    return state.output / lax.expand_dims(total, (total.ndim,)), lax.log(total) + state.running_max, state.largest
