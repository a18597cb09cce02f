"""The running softmax: what was seen so far of a row's keys, in two numbers and an output.

Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867; the output as in FlashAttention,
arXiv:2205.14135, section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha.impl.shared.nonfinite import poison_rows


class State(NamedTuple):
    """Per row: the largest score, the sum of exp(score - running_max), and the values weighted by the same.

    If it is asked for, also the largest score without the sink.
    """

    running_max: Float[Array, " t"]
    running_sum: Float[Array, " t"]
    output: Float[Array, "t Hv"]
    largest: Float[Array, " t"] | None = None


def start(
    rows: int | tuple[int, ...],
    features: int,
    sink: Float[Array, "*#L"] | None,
    dtype: DTypeLike,
    keeps_largest: bool = False,
) -> State:
    """Makes the state before any key: only the sink, a score that counts in the sum and has no value.

    Args:
      rows: Their number, or [*L, t] of many heads.
      features: Of values.
      sink: Of the head, or of each.
      dtype: Of the state.
      keeps_largest: Whether to keep the largest score without the sink.
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
    """One online-softmax step without the value product: rescales the state, returns it and the new weights.

    Args:
      state: Before them.
      scores: Of the keys.
      row_poison: NaN for rows that become NaN if they see any of these keys, else 0; None poisons none.
      dtype: Of the weights, whose rounded values count in the sum; None: that of the scores.
    """
    of_rows = jnp.max(scores, axis=1)
    of_rows = of_rows if row_poison is None else poison_rows(of_rows, row_poison)
    running_max = lax.max(state.running_max, of_rows)
    # What is subtracted is finite: a row that saw nothing has -inf, and -inf - -inf is NaN.
    shift = lax.max(running_max, lax.full_like(running_max, jnp.finfo(running_max.dtype).min))
    weights = lax.exp(scores - lax.expand_dims(shift, (1,)))
    weights = weights if dtype is None else weights.astype(dtype)
    decay = lax.exp(lax.sub(state.running_max, shift))
    running_sum = state.running_sum * decay + jnp.sum(weights, axis=1, dtype=running_max.dtype)
    largest = None if state.largest is None else lax.max(state.largest, of_rows)
    return State(running_max, running_sum, state.output * lax.expand_dims(decay, (1,)), largest), weights


def update(
    state: State,
    scores: Float[Array, "t s"],
    weigh: Callable[[Array], Array],
    row_poison: Float[Array, " t"] | None = None,
) -> State:
    """One online-softmax step: `rescale`, then `weigh`, the product of weights [t, s] and values -> [t, Hv]."""
    state, of_values = rescale(state, scores, row_poison)
    return state._replace(output=state.output + weigh(of_values))


def finish(state: State) -> tuple[Float[Array, "*L t Hv"], Float[Array, "*L t"], Float[Array, "*L t"] | None]:
    """Output, log-sum-exp and, if it was kept, largest score: 0, -inf and -inf for a row that saw nothing."""
    total = state.running_sum
    total = lax.select(lax.eq(total, lax.full_like(total, 0)), lax.full_like(total, 1), total)
    return state.output / lax.expand_dims(total, (total.ndim,)), lax.log(total) + state.running_max, state.largest
