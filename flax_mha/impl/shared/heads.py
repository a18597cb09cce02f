"""The one place where the math of one head is lifted over batch, key/value heads and their groups."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array


def map_heads(
    one_head: Callable[[Any], Any], operands: Any, axes: int, sequential: int = 0, together: int | None = None
) -> Any:
    """`one_head(operands)` for every batch entry and head: the first `axes` axes of every array.

    Each of these axes has its full size or 1; one of size 1 is shared, never repeated, and its gradient is the sum
    over those that shared it. The first `sequential` axes run one after another (`lax.map`), the others together
    (`vmap`).

    Args:
      one_head: A function of a pytree of arrays.
      operands: Pytree of arrays [axes..., what one head takes...].
      axes: How many leading axes to map over.
      sequential: How many of these to loop over.
      together: Of the others, how many heads at most run together, in a loop over groups of them; None: all.
    """
    leaves, tree = jax.tree.flatten(operands)
    own = [[leaf.shape[axis] != 1 for leaf in leaves] for axis in range(axes)]  # which arrays have entries of their own
    sizes = [next((leaf.shape[axis] for leaf in leaves if leaf.shape[axis] != 1), 1) for axis in range(axes)]
    mapped = [_squeezed(x, tuple(axis for axis in range(axes) if x.shape[axis] == 1)) for x in leaves]

    def run(leaves: list) -> Any:
        return one_head(jax.tree.unflatten(tree, leaves))

    for axis in reversed(range(axes)):
        if not any(own[axis]):
            continue
        inner = math.prod(sizes[axis + 1 :])
        group = 1 if axis < sequential else sizes[axis] if together is None else together // max(inner, 1)
        group = _largest_divisor(sizes[axis], group) if group < sizes[axis] else group
        if axis >= sequential and group >= sizes[axis]:
            run = jax.vmap(run, ([0 if mine else None for mine in own[axis]],))
        else:
            run = functools.partial(_looped, run, own[axis], group)
    unit = tuple(axis for axis in range(axes) if not any(own[axis]))
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), run(mapped))


def _looped(run: Callable[[list], Any], own: list[bool], group: int, leaves: list) -> Any:
    """`run(leaves)` for every entry of the first axis of the arrays that have one, `group` of them at a time."""

    def entry(mapped: list) -> Any:
        following = iter(mapped)
        return run([next(following) if mine else leaf for leaf, mine in zip(leaves, own, strict=True)])

    mapped = [leaf for leaf, mine in zip(leaves, own, strict=True) if mine]
    return lax.map(entry, mapped, batch_size=None if group == 1 else group)


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, max(most, 1)), 0, -1) if number % n == 0)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """What the head at `place` takes."""
    return jax.tree.map(lambda x: x[tuple(0 if n == 1 else i for i, n in zip(place, x.shape, strict=False))], operands)


def _squeezed(x: Array | np.ndarray, axes: tuple[int, ...]) -> Array | np.ndarray:
    """`x` without these axes, of length 1."""
    return np.squeeze(x, axes) if isinstance(x, np.ndarray) else lax.squeeze(x, axes)
