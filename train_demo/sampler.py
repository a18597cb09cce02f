"""The choice of the next character from its logits: temperature, top-k, top-p and min-p, then a draw.

The order, and what happens to ties, are those of Hugging Face's `generate`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

Number = float | Float[Array, ""]


class Sampling(NamedTuple):
    """How to choose; None switches a filter off. Numbers may be traced, so that other ones compile nothing.

    Attributes:
        temperature: divides the logits, 0 or above; 0 takes the likeliest character, the first one of equals.
        top_k: keeps the k likeliest characters, and all that are as likely as the last of them.
        top_p: keeps the likeliest characters whose probabilities add up to p, above 0 and at most 1.
        min_p: keeps the characters that are at least p times as likely as the likeliest one, from 0 to 1.
    """

    temperature: Number = 0.7
    top_k: int | Int[Array, ""] | None = None
    top_p: Number | None = None
    min_p: Number | None = None

    def in_32_bits(self) -> "Sampling":
        """The same choice by numbers that JAX can hold: a larger one becomes the largest of these.

        No number may be traced.
        """
        temperature = min(self.temperature, float(np.finfo(np.float32).max))
        top_k = self.top_k if self.top_k is None else min(self.top_k, np.iinfo(np.int32).max)
        return self._replace(temperature=temperature, top_k=top_k)


def filtered(logits: Float[Array, " V"], sampling: Sampling) -> Float[Array, " V"]:
    """The logits divided by the temperature, with -inf for what the filters remove; the largest is 0.

    Example:
        >>> logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
        >>> jnp.exp(filtered(logits, Sampling(temperature=1.0, top_k=2))).round(3).tolist()
        [0.0, 1.0, 0.5]
    """
    # Without the largest logit, which changes no probability, a small temperature makes no infinity of it.
    scores = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None:
        scores = jnp.where(scores < jnp.sort(scores)[jnp.maximum(len(scores) - sampling.top_k, 0)], -jnp.inf, scores)
    if sampling.top_p is not None:
        ascending = jnp.argsort(scores)  # of equals, the last ones are kept
        removed = jnp.cumsum(jax.nn.softmax(scores)[ascending]) <= 1 - sampling.top_p
        scores = scores.at[ascending].set(jnp.where(removed.at[-1].set(False), -jnp.inf, scores[ascending]))
    if sampling.min_p is not None:
        scores = jnp.where(jnp.exp(scores) < sampling.min_p, -jnp.inf, scores)
    return scores


def draw(key: Key[Array, ""], logits: Float[Array, " V"], sampling: Sampling) -> Int[Array, ""]:
    """Draws the number of a character, int32; the same key draws the same one. Use `jax.vmap` for several rows."""
    greedy = jnp.asarray(sampling.temperature) <= 0
    scores = filtered(logits, sampling._replace(temperature=jnp.where(greedy, 1.0, sampling.temperature)))
    return jnp.where(greedy, logits.argmax(), jax.random.categorical(key, scores)).astype(jnp.int32)
