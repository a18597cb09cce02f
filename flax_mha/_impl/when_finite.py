"""A fused kernel on the arrays as they are, while everything in them is finite; only otherwise on prepared ones.

Kernels let NaN and infinity through where a weight is 0. To prevent that, keys and values are replaced by zeros where
they are not finite, which reads and writes all of them. That nothing needs it is found out by one reading, so the
prepared computation stands in the branch of a conditional that a program hardly ever takes. It runs one batch entry
after another there, because its memory is set aside whether or not the branch is taken.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

Arrays = tuple[Array, ...]


class Ways(NamedTuple):
    """The same attention in two ways, each a function of (arrays that get gradients, pytree of arrays that get none).

    Attributes:
      plain: Right if everything is finite. Returns the output and an array that is not finite if a query is not.
      careful: Right whatever the arrays hold. Returns the output.
    """

    plain: Callable[[Arrays, Any], tuple[Array, Array]]
    careful: Callable[[Arrays, Any], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(ways: Ways, arrays: Arrays, data: Any) -> Array:
    """The output of `plain` or of `careful`, with first-order derivatives in reverse mode.

    Args:
      ways: The two.
      arrays: Query, key, value and what else gets gradients, each with a leading axis for the batch.
      data: A pytree of arrays that get none, likewise.
    """
    _, key, value, *_ = arrays
    output, of_queries = ways.plain(arrays, data)
    finite = all_finite(key, value, of_queries)
    return lax.cond(finite, lambda: output, lambda: _by_entry(ways.careful, arrays, data))


def _forward(ways: Ways, arrays: Arrays, data: Any) -> tuple[Array, tuple]:
    output, pull = jax.vjp(lambda arrays: ways.plain(arrays, data)[0], arrays)
    finite = all_finite(*arrays[:3])
    chosen = lax.cond(finite, lambda: output, lambda: _by_entry(ways.careful, arrays, data))
    # The kernel's gradient needs its output. If that is the one chosen, it is kept only once.
    pull = jax.tree.map(lambda x: chosen if x is output else x, pull)
    return chosen, (pull, finite, arrays, data)


def _backward(ways: Ways, saved: tuple, cotangent: Array) -> tuple[Arrays, None]:
    pull, finite, arrays, data = saved

    def careful(arrays: Arrays, data: Any, cotangent: Array) -> Arrays:
        _, pull = jax.vjp(lambda arrays: ways.careful(arrays, data), arrays)
        return pull(cotangent)[0]

    [gradients] = pull(cotangent)
    return lax.cond(finite, lambda: gradients, lambda: _by_entry(careful, arrays, data, cotangent)), None


attention.defvjp(_forward, _backward)


def _by_entry(function: Callable, *operands: Any) -> Any:
    """`function(*operands)`, one batch entry after another."""

    def one_entry(operands: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[None], operands))
        return jax.tree.map(lambda x: x[0], results)

    return lax.map(one_entry, operands)


@jax.custom_batching.custom_vmap
def all_finite(*arrays: Float[Array, "B L *rest"]) -> Bool[Array, ""]:
    """Whether all entries are finite; under `vmap`, those of all calls together, so that a conditional remains one."""
    # Arrays of one shape are read by one kernel, and what is left of each by another.
    entries = _joined([lax.is_finite(x) for x in arrays])
    rows = _joined([x.all(range(2, x.ndim)) for x in entries])
    return functools.reduce(jnp.logical_and, [x.all() for x in rows])


@all_finite.def_vmap
def _all_finite_of_all(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
    return all_finite(*arrays), False


def _joined(flags: list[Array]) -> list[Array]:
    """Those of the same shape as one."""
    shapes = dict.fromkeys(x.shape for x in flags)
    return [functools.reduce(jnp.logical_and, [x for x in flags if x.shape == shape]) for shape in shapes]
