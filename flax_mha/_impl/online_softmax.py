"""The running softmax: what was seen so far of a row's keys, in three numbers and an output.

Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867; the output as in FlashAttention,
arXiv:2205.14135, section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class State(NamedTuple):
    """Per row: the largest score, the sum of exp(score - largest), and the values weighted by the same."""

    largest: Float[Array, " t"]
    total: Float[Array, " t"]
    output: Float[Array, "t Hv"]


def start(rows: int, features: int, sink: Float[Array, ""] | None, dtype: DTypeLike) -> State:
    """Nothing seen yet but the sink, a score that counts in the sum and has no value."""
    output = jnp.zeros((rows, features), dtype)
    if sink is None:
        return State(jnp.full((rows,), -jnp.inf, dtype), jnp.zeros((rows,), dtype), output)
    largest = jnp.full((rows,), sink, dtype)
    return State(largest, jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), jnp.ones_like(largest)), output)


def update(state: State, scores: Float[Array, "t s"], weigh: Callable[[Array], Array]) -> State:
    """Takes in the scores of more keys; `weigh` multiplies their weights [t, s] by their values -> [t, Hv]."""
    largest = lax.max(state.largest, jnp.max(scores, axis=1))
    # What is subtracted is finite: a row that saw nothing has -inf, and -inf - -inf is NaN.
    shift = lax.max(largest, lax.full_like(largest, jnp.finfo(largest.dtype).min))
    weights = lax.exp(scores - lax.expand_dims(shift, (1,)))
    decay = lax.exp(lax.sub(state.largest, shift))
    total = state.total * decay + jnp.sum(weights, axis=1)
    return State(largest, total, state.output * lax.expand_dims(decay, (1,)) + weigh(weights))


def finish(state: State) -> tuple[Float[Array, "t Hv"], Float[Array, " t"]]:
    """Output and log-sum-exp: 0 and -inf for a row that saw nothing."""
    total = lax.select(lax.eq(state.total, lax.full_like(state.total, 0)), lax.full_like(state.total, 1), state.total)
    return state.output / lax.expand_dims(total, (1,)), lax.log(total) + state.largest
