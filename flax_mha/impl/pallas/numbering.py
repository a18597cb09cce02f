"""Which entry of an array belongs to a head: arrays have leading axes for batch and heads, some of them shared.

The heads of a call are counted through its leading axes [B..., K, G], the last one fastest. An array with *own* sizes
has along each of these axes either as many entries or one, which is shared. In kernels such numbers are computed by the
scalar core, so axes that behave alike are taken together.
"""

from collections.abc import Iterator

from jax import lax
from jaxtyping import Array, Int

Number = int | Int[Array, ""]
Sizes = tuple[int, ...]


def _runs(sizes: Sizes, own: Sizes) -> list[tuple[bool, int]]:
    """Adjacent axes that behave alike as one: whether the array has entries along them, and how many these are."""
    runs: list[tuple[bool, int]] = []
    for size, mine in zip(sizes, own, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][0] == (mine != 1):
            runs[-1] = (runs[-1][0], runs[-1][1] * size)
        else:
            runs.append((mine != 1, size))
    return runs


def own_number(number: Number, sizes: Sizes, own: Sizes) -> Number:
    """The number among an array's own entries of head `number`, counted through all `sizes`."""
    return sum(_digit(number, stride, size) * own_stride for size, stride, own_stride in _strides(sizes, own))


def full_number(number: Number, sizes: Sizes, own: Sizes) -> Number:
    """The number among all heads of the first head that shares entry `number`; the inverse of `own_number`."""
    return sum(_digit(number, own_stride, size) * stride for size, stride, own_stride in _strides(sizes, own))


def _strides(sizes: Sizes, own: Sizes) -> Iterator[tuple[int, int, int]]:
    """Of each run of axes with own entries: its size, its stride among all heads, and that among the own entries."""
    stride = own_stride = 1
    for kept, size in reversed(_runs(sizes, own)):
        if kept:
            yield size, stride, own_stride
            own_stride *= size
        stride *= size


def _digit(number: Number, stride: int, size: int) -> Number:
    if isinstance(number, int):
        return number // stride % size
    return lax.rem(lax.div(number, stride), size) if stride > 1 else lax.rem(number, size)


def shared(sizes: Sizes, own: Sizes) -> Sizes:
    """The sizes of the axes along which the array has one entry for all."""
    return tuple(size if mine == 1 else 1 for size, mine in zip(sizes, own, strict=True))
