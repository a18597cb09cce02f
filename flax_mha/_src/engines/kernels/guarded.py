"""The guard of `guard.py` around fused kernels: they run unguarded first, and again
only if something is not finite.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float

from flax_mha._src.core.fields import static
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.engines.kernels.mask import Arrays, clean
from flax_mha._src.masks.visible import Visible

Results = tuple[Array, ...]  # the output [B, T, N, H]; perhaps log-sum-exp [B, T, N]
# The names of the `Arrays` that get gradients.
Names = frozenset[str]
NONE: Names = frozenset()


class Fused(Protocol):
    """What `around_kernel` needs of a fused kernel. Hashable."""

    @property
    def scale(self) -> float:
        """The factor by which the kernel multiplies queries."""

    def run(
        self, arrays: Arrays, mask: Visible, differentiated: Names
    ) -> tuple[Results, tuple[Array, ...]]:
        """Returns results, and arrays to check: if these are finite, the results are
        correct, and their gradients with respect to the `differentiated` arrays.
        """


def compute(fused: Fused, arrays: Arrays, mask: Visible) -> Results:
    """Returns the results of a fused kernel, guarded if anything may be masked."""
    if arrays.bias is None and not mask.hides_keys:
        results, _ = fused.run(arrays, mask, NONE)
        return results
    arrays, mask = varying_alike((arrays, mask))
    return around_kernel(fused, arrays, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def around_kernel(fused: Fused, arrays: Arrays, mask: Visible) -> Results:
    """Returns the results of `fused.run` if they are correct, otherwise of
    `on_guarded`; `arrays` get first-order gradients.
    """
    results, decisive = fused.run(arrays, mask, NONE)
    return lax.cond(
        all_finite(*decisive),
        lambda: results,
        lambda: on_guarded(fused, arrays, mask),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward pass of `around_kernel` needs."""

    pull: Any  # the kernel's gradient, a pytree
    is_correct: Bool[Array, ""]
    arrays: Arrays
    mask: Visible
    differentiated: Names = static()


def _forward(fused: Fused, arrays: Any, mask: Any) -> tuple[Results, Saved]:
    # JAX says which arrays get gradients, because of `symbolic_zeros` below.
    given = arrays._asdict().items()
    differentiated = frozenset(k for k, x in given if x is not None and x.perturbed)
    arrays, mask = jax.tree.map(lambda x: x.value, (arrays, mask))

    def run(arrays: Arrays) -> tuple[Results, tuple[Array, ...]]:
        return fused.run(arrays, mask, differentiated)

    results, pull, decisive = jax.vjp(run, arrays, has_aux=True)
    is_correct = all_finite(*decisive)
    chosen = lax.cond(
        is_correct,
        lambda: results,
        lambda: on_guarded(fused, arrays, mask, differentiated),
    )

    # The kernel's gradient stores the results. Store `chosen` instead, which are then
    # equal, so that there is one copy.
    def stored(x: Array) -> Array:
        for result, same in zip(results, chosen, strict=True):
            if x is result:
                return same
        return x

    pull = jax.tree.map(stored, pull)
    return chosen, Saved(pull, is_correct, arrays, mask, differentiated)


def _backward(fused: Fused, saved: Saved, cotangents: Any) -> tuple[Any, None]:
    arrays = saved.arrays
    cotangents = jax.tree.map(_instantiated, cotangents)
    [gradients] = saved.pull(cotangents)

    # Both branches of a `lax.cond` must return the same dtypes.
    def cast(gradients: object) -> Any:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, arrays)

    def run(arrays: Arrays) -> Results:
        return on_guarded(fused, arrays, saved.mask, saved.differentiated)

    def guarded_gradients() -> Any:
        _, pull = jax.vjp(run, arrays)
        [gradients] = pull(cotangents)
        return cast(gradients)

    return lax.cond(saved.is_correct, lambda: cast(gradients), guarded_gradients), None


def _instantiated(x: Any) -> Array:
    """Makes an array of a cotangent, which may be a symbol of zeros."""
    if isinstance(x, SymbolicZero):
        return jnp.zeros(x.shape, x.dtype)
    return x


around_kernel.defvjp(_forward, _backward, symbolic_zeros=True)


def on_guarded(
    fused: Fused, arrays: Arrays, mask: Visible, differentiated: Names = NONE
) -> Results:
    """Runs a fused kernel on arrays from `clean`. Rows that attend to NaN or
    infinity become NaN (gradient 0).
    """
    finite, is_nan = clean(arrays, mask, fused.scale)
    results, _ = fused.run(finite, mask, differentiated)

    def with_nan(x: Array) -> Array:
        rows = is_nan.reshape(is_nan.shape + (1,) * (x.ndim - is_nan.ndim))
        return jnp.where(rows, jnp.full_like(x, jnp.nan), x)

    return jax.tree.map(with_nan, results)


@jax.custom_batching.custom_vmap
def all_finite(*arrays: Float[Array, "B P *rest"]) -> Bool[Array, ""]:
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
