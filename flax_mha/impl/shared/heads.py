"""The one place where the math of one head is lifted over batch, key/value heads and their groups."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array


def over_heads(
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
    unit = tuple(axis for axis in range(axes) if all(leaf.shape[axis] == 1 for leaf in leaves))
    mapped = jax.tree.unflatten(tree, [_squeezed(leaf, unit) for leaf in leaves])
    ahead = sum(axis < sequential for axis in unit)
    answer = _mapped(one_head, mapped, axes - len(unit), sequential - ahead, together)
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), answer)


def _mapped(one_head: Callable[[Any], Any], operands: Any, axes: int, sequential: int, together: int | None) -> Any:
    if axes == 0:
        return one_head(operands)
    leaves, tree = jax.tree.flatten(operands)
    size = next(leaf.shape[0] for leaf in leaves if leaf.shape[0] != 1)
    own = [leaf.shape[0] == size for leaf in leaves]
    shared = [_squeezed(leaf, (0,)) for leaf, mine in zip(leaves, own, strict=True) if not mine]
    mapped = [leaf for leaf, mine in zip(leaves, own, strict=True) if mine]

    def one_entry(mapped: list) -> Any:
        queues = {True: iter(mapped), False: iter(shared)}
        entry = jax.tree.unflatten(tree, [next(queues[mine]) for mine in own])
        return _mapped(one_head, entry, axes - 1, sequential - 1, together)

    inner = math.prod(max(leaf.shape[axis] for leaf in leaves) for axis in range(1, axes))
    group = 1 if sequential > 0 else size if together is None else _largest_divisor(size, together // inner)
    if group == size and sequential <= 0:
        return jax.vmap(one_entry)(mapped)
    return lax.map(one_entry, mapped, batch_size=None if group == 1 else group)


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, max(most, 1)), 0, -1) if number % n == 0)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """What the head at `place` takes."""
    return jax.tree.map(lambda x: x[tuple(0 if n == 1 else i for i, n in zip(place, x.shape, strict=False))], operands)


def _squeezed(x: Array | np.ndarray, axes: tuple[int, ...]) -> Array | np.ndarray:
    """`x` without these axes, of length 1."""
    return np.squeeze(x, axes) if isinstance(x, np.ndarray) else lax.squeeze(x, axes)
