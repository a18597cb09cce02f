"""Guards a fused kernel against NaN, infinity and overflow in masked entries.

A kernel multiplies masked entries by weights of 0, so that NaN and infinity reach its output, also infinity from a
product that overflows. Replacing such entries beforehand would read and write all keys and values. Instead, one pass
checks that all entries are finite and of moderate size; then the kernel's output is right. Otherwise, which is rare,
`lax.cond` computes the call by "blockwise" attention: one head after another, because XLA allocates the memory of a
branch whether or not it is taken.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha._src.call.operands import Call, Operands, Options
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.engines import blockwise
from flax_mha._src.engines.kernels.mask import KernelMask
from flax_mha.masks import LengthMask, LocalMask

# Products of two numbers up to this size, summed over any head size, do not overflow in float32.
LARGEST = 2.0**56


class Arrays(NamedTuple):
    """The arrays that a kernel takes. Heads come before or after the length, see `Fused.head_axis`."""

    query: Float[Array, "B L N H"]
    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K Hv"]
    bias: Float[Array, "B T N S"] | None = None
    sinks: Float[Array, "B N"] | None = None


class Fused(NamedTuple):
    """A fused kernel and the static options of its call."""

    # `kernel(arrays, mask, differentiated)` returns the output, and the arrays [B, L, ...] that decide: if they are all
    # finite and of moderate size, output and gradient are right.
    kernel: Callable[[Arrays, KernelMask, bool], tuple[Array, tuple[Array, ...]]]
    options: Options  # options of the same call, for "blockwise" attention
    head_axis: int  # axis of the heads in query, key, value and output: 1 or 2


def attention(fused: Fused, arrays: Arrays, mask: KernelMask) -> Array:
    """Computes the output by the kernel if that is right, else by "blockwise"; differentiable once, in reverse mode."""
    return _attention(fused, *varying_alike((arrays, mask)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(fused: Fused, arrays: Arrays, mask: KernelMask) -> Array:
    output, decisive = fused.kernel(arrays, mask, False)
    return lax.cond(all_moderate(*decisive), lambda: output, lambda: _by_head(fused, _portable, arrays, mask))


def _forward(fused: Fused, arrays: Arrays, mask: KernelMask) -> tuple[Array, tuple]:
    output, pull, decisive = jax.vjp(lambda arrays: fused.kernel(arrays, mask, True), arrays, has_aux=True)
    moderate = all_moderate(*decisive)
    chosen = lax.cond(moderate, lambda: output, lambda: _by_head(fused, _portable, arrays, mask))
    # The kernel's gradient needs its output. Replaced by the chosen output, which is then the same, it is stored once.
    pull = jax.tree.map(lambda x: chosen if x is output else x, pull)
    return chosen, (pull, moderate, arrays, mask)


def _backward(fused: Fused, saved: tuple, cotangent: Array) -> tuple[Arrays, None]:
    pull, moderate, arrays, mask = saved
    [gradients] = pull(cotangent)
    gradients = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, arrays)
    return lax.cond(moderate, lambda: gradients, lambda: _by_head(fused, _gradients, arrays, mask, cotangent)), None


_attention.defvjp(_forward, _backward)


def _by_head(fused: Fused, function: Callable, arrays: Arrays, mask: KernelMask, *more: Array) -> Any:
    """Calls `function(fused, mask, arrays, *more)` for one batch entry and key head after another."""
    num_kv_heads = arrays.key.shape[fused.head_axis]

    def split(x: Float[Array, "..."]) -> Float[Array, "K ..."]:
        """Splits [T, N, H] or [N, T, H] to [K, 1, T, G, H] (for a bias, H is S), and sinks [N] to [K, 1, G]."""
        x = jnp.swapaxes(x, 0, 1) if fused.head_axis == 1 and x.ndim == 3 else x
        axis = x.ndim // 2
        x = x.reshape(*x.shape[:axis], num_kv_heads, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)[:, None]

    def join(x: Float[Array, "K ..."]) -> Float[Array, "..."]:
        """Inverts `split`."""
        x = x[:, 0]
        axis = (x.ndim - 1) // 2
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jnp.swapaxes(x, 0, 1) if fused.head_axis == 1 and x.ndim == 3 else x

    def one_entry(operands: tuple) -> Any:
        entry_arrays, entry_mask = operands
        one_head = functools.partial(function, fused, jax.tree.map(lambda x: x[None], entry_mask))
        return jax.tree.map(join, lax.map(lambda x: one_head(*x), jax.tree.map(split, entry_arrays)))

    return lax.map(one_entry, ((arrays, *more), mask))


def _portable(fused: Fused, mask: KernelMask, arrays: Arrays) -> Float[Array, "1 T G Hv"]:
    bias = None if arrays.bias is None else jnp.swapaxes(arrays.bias, 1, 2)
    masks = [LocalMask(mask.left, None), LocalMask(None, mask.right), LengthMask(mask.key_lengths, mask.query_lengths)]
    masks += [] if mask.segments is None else [mask.segments]
    whole = functools.reduce(operator.and_, masks)
    operands = Operands(*arrays[:3], bias, arrays.sinks, whole, [], [], Offsets(), None, None)
    return blockwise.attention(Call(operands, fused.options))[0]


def _gradients(fused: Fused, mask: KernelMask, arrays: Arrays, cotangent: Float[Array, "1 T G Hv"]) -> Arrays:
    _, pull = jax.vjp(functools.partial(_portable, fused, mask), arrays)
    return pull(cotangent)[0]


@jax.custom_batching.custom_vmap
def all_moderate(*arrays: Float[Array, "B L *rest"]) -> Bool[Array, ""]:
    """Returns whether all entries are finite and at most `LARGEST` in size.

    Under `vmap`, it returns one bool for all calls together, so that a `lax.cond` on it stays a branch.
    """
    # XLA reads arrays of one shape in one kernel, and reduces them to rows, which are combined in the same way.
    entries = _combine_alike([lax.abs(x) <= min(LARGEST, float(jnp.finfo(x.dtype).max)) for x in arrays])
    rows = _combine_alike([x.all(range(2, x.ndim)) for x in entries])
    return functools.reduce(jnp.logical_and, [x.all() for x in rows])


@all_moderate.def_vmap
def _all_moderate_of_all(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
    return all_moderate(*arrays), False


def _combine_alike(flags: list[Array]) -> list[Array]:
    """Combines boolean arrays of the same shape by `and`, to one for each shape."""
    shapes = dict.fromkeys(x.shape for x in flags)
    return [functools.reduce(jnp.logical_and, [x for x in flags if x.shape == shape]) for shape in shapes]
