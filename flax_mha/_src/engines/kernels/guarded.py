"""The guard of `guard.py` around fused kernels: they run unguarded first, and again
only if something is not finite.
"""

import functools
from typing import Any, Protocol

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha._src.engines.kernels.mask import Arrays, clean
from flax_mha._src.masks.visible import Visible


class Fused(Protocol):
    """What `around_kernel` needs of a fused kernel. Hashable."""

    @property
    def scale(self) -> float:
        """The factor by which the kernel multiplies queries."""

    def run(
        self, arrays: Arrays, mask: Visible, differentiated: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        """Returns output and arrays. Output and, if `differentiated`, gradient are
        correct if the arrays are finite.
        """


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def around_kernel(fused: Fused, arrays: Arrays, mask: Visible) -> Array:
    """Returns the output of `fused.run` if it is correct, otherwise of `on_guarded`;
    `arrays` get first-order gradients.
    """
    output, decisive = fused.run(arrays, mask, differentiated=False)
    is_correct = all_finite(*decisive)
    return lax.cond(is_correct, lambda: output, lambda: on_guarded(fused, arrays, mask))


def _forward(fused: Fused, arrays: Arrays, mask: Visible) -> tuple[Array, tuple]:
    def run(arrays: Arrays) -> tuple[Array, tuple[Array, ...]]:
        return fused.run(arrays, mask, differentiated=True)

    output, pull, decisive = jax.vjp(run, arrays, has_aux=True)
    is_correct = all_finite(*decisive)
    chosen = lax.cond(
        is_correct, lambda: output, lambda: on_guarded(fused, arrays, mask)
    )

    # The kernel's gradient stores the output. Store `chosen` instead, which then is
    # equal, so that there is one copy.
    def stored(x: Array) -> Array:
        if x is output:
            return chosen
        return x

    pull = jax.tree.map(stored, pull)
    return chosen, (pull, is_correct, arrays, mask)


def _backward(fused: Fused, saved: tuple, cotangent: Array) -> tuple[Any, None]:
    pull, is_correct, arrays, mask = saved
    [gradients] = pull(cotangent)

    # Both branches of a `lax.cond` must return the same dtypes.
    def cast(gradients: object) -> Any:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, arrays)

    def guarded_gradients() -> Any:
        _, pull = jax.vjp(lambda arrays: on_guarded(fused, arrays, mask), arrays)
        [gradients] = pull(cotangent)
        return cast(gradients)

    return lax.cond(is_correct, lambda: cast(gradients), guarded_gradients), None


around_kernel.defvjp(_forward, _backward)


def on_guarded(fused: Fused, arrays: Arrays, mask: Visible) -> Array:
    """Runs a fused kernel on arrays from `clean`. Rows that attend to NaN or
    infinity become NaN (gradient 0).
    """
    finite, is_nan = clean(arrays, mask, fused.scale)
    output, _ = fused.run(finite, mask, differentiated=False)
    return jnp.where(is_nan, jnp.full_like(output, jnp.nan), output)


@jax.custom_batching.custom_vmap
def all_finite(*arrays: Float[Array, "B L *rest"]) -> Bool[Array, ""]:
    """Returns whether all entries are finite.

    Under `vmap`, it returns one bool for all mapped calls, because a `lax.cond` on a
    mapped bool runs both branches.
    """
    # Arrays of one shape are combined before they are reduced, first to rows: then XLA
    # reads them in one kernel.
    entries = _combine_alike([lax.is_finite(x) for x in arrays])
    rows = _combine_alike([x.all(range(2, x.ndim)) for x in entries])
    return functools.reduce(jnp.logical_and, [x.all() for x in rows])


@all_finite.def_vmap
def _all_finite_of_all(
    axis_size: int, in_batched: list[bool], *arrays: Array
) -> tuple[Array, bool]:
    return all_finite(*arrays), False


def _combine_alike(flags: list[Array]) -> list[Array]:
    """Combines the boolean arrays of each shape by `and`; returns one array for each
    shape.
    """
    combined: dict[tuple[int, ...], Array] = {}
    for x in flags:
        if x.shape in combined:
            combined[x.shape] = jnp.logical_and(combined[x.shape], x)
        else:
            combined[x.shape] = x
    return list(combined.values())
