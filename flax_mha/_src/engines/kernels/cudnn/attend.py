"""cuDNN's attention with sinks and a log-sum-exp, both with gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha._src.engines.kernels.cudnn.call import (
    Operands,
    Rows,
    Settings,
    backward,
    forward,
)

# The log-sum-exp that rows without visible keys get in the backward pass: then
# exp(score - FAR) is 0. Not infinity, which cuDNN may subtract from infinity.
FAR = 1e30

Sinks = Float[Array, "B N #t"] | None
Masked = Bool[Array, "B #N t"] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    settings: Settings, operands: Operands, sinks: Sinks, masked: Masked
) -> tuple[Float[Array, "B t N H"], Rows]:
    """Computes output and log-sum-exp, over visible keys and sinks.

    `masked` marks rows without visible keys; None if there are none. Their output is 0,
    and only sinks count in their log-sum-exp. With sinks, it also marks padded rows.
    """
    output, lse = forward(settings, operands)
    if masked is not None:
        output = jnp.where(_like_output(masked), jnp.zeros_like(output), output)
        lse = jnp.where(masked, -jnp.inf, lse)
    if sinks is not None:
        # The weight of all keys together: exp(lse) / (exp(lse) + exp(sink)). Without a
        # sink, not -inf + inf.
        exponent = jnp.where(sinks == -jnp.inf, jnp.inf, lse - sinks)
        weight = _like_output(jax.nn.sigmoid(exponent))
        output = (output.astype(jnp.float32) * weight).astype(output.dtype)
        lse = jnp.logaddexp(lse, sinks)
    return output, lse


def _forward(
    settings: Settings, operands: Operands, sinks: Sinks, masked: Masked
) -> Any:
    output, lse = attend(settings, operands, sinks, masked)
    return (output, lse), (operands, sinks, masked, output, lse)


def _backward(settings: Settings, saved: Any, cotangents: Any) -> Any:
    operands, sinks, masked, output, lse = saved
    d_output, d_lse = cotangents
    if masked is not None:
        d_output = jnp.where(_like_output(masked), jnp.zeros_like(d_output), d_output)

    d_sinks = None
    if sinks is not None:
        exponent = jnp.where(sinks == -jnp.inf, -jnp.inf, sinks - lse)
        product = d_output.astype(jnp.float32) * output.astype(jnp.float32)
        d_score = d_lse - jnp.swapaxes(product.sum(-1), 1, 2)
        d_sinks = jnp.exp(exponent) * d_score
        if sinks.shape[2] == 1:
            d_sinks = d_sinks.sum(2, keepdims=True)

    if masked is not None:
        lse = jnp.where(masked, FAR, lse)
        d_lse = jnp.where(masked, jnp.zeros_like(d_lse), d_lse)
    gradients = backward(settings, operands, output, lse, d_output)
    if settings.lse_gradient:
        gradients = lax.cond(
            jnp.any(d_lse != 0),
            lambda: _with_lse(gradients, settings, operands, lse, d_lse),
            lambda: gradients,
        )
    if masked is not None:
        gradients = _zero_unused(gradients, operands, masked)
    return gradients, d_sinks, None


attend.defvjp(_forward, _backward)


def _zero_unused(gradients: Operands, operands: Operands, masked: Any) -> Operands:
    """Replaces what cuDNN leaves undefined, gradients past the lengths, by zeros."""
    query, key, value, bias, *_ = gradients
    query = jnp.where(_like_output(masked), jnp.zeros_like(query), query)
    if operands.key_lengths is not None:
        places = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        is_used = (places < operands.key_lengths[:, None])[..., None, None]
        key = jnp.where(is_used, key, jnp.zeros_like(key))
        value = jnp.where(is_used, value, jnp.zeros_like(value))
        if bias is not None:
            # If all entries share a bias, they have the same lengths.
            is_used = jnp.swapaxes(is_used, 1, 3)[: bias.shape[0]]
            is_used = is_used & ~masked[: bias.shape[0], ..., None]
            bias = jnp.where(is_used, bias, jnp.zeros_like(bias))
    return gradients._replace(query=query, key=key, value=value, bias=bias)


def _with_lse(
    gradients: Operands, settings: Settings, operands: Operands, lse: Rows, d_lse: Rows
) -> Operands:
    """Adds the gradients of a log-sum-exp: dS = P d_lse.

    With values of 1, dO V^T is the sum of a row of dO, and d_lse is the sum of two
    numbers in the operands' dtype, up to rounding.
    """
    value = operands.value
    ones = jnp.zeros_like(value).at[..., :2].set(1)
    d_rows = _like_output(d_lse)
    high = d_rows.astype(value.dtype)
    low = (d_rows - high.astype(d_rows.dtype)).astype(value.dtype)
    zeros = jnp.zeros_like(operands.query)
    d_output = zeros.at[..., :1].set(high).at[..., 1:2].set(low)
    more = backward(settings, operands._replace(value=ones), zeros, lse, d_output)
    more = more._replace(value=jnp.zeros_like(value))

    def add(x: Array, y: Array) -> Array:
        return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)

    return jax.tree.map(add, gradients, more)


def _like_output(x: Array) -> Array:
    """Converts [B, N, t] to [B, t, N, 1], to multiply outputs by it."""
    return jnp.swapaxes(x, 1, 2)[..., None]
