"""The one place where the math of one head is lifted over batch, key/value heads and their groups."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array


def over_heads(one_head: Callable[[Any], Any], operands: Any, axes: int, sequential: int = 0) -> Any:
    """`one_head(operands)` for every batch entry and head: the first `axes` axes of every array.

    Each of these axes has its full size or 1; one of size 1 is shared, never repeated, and its gradient is the sum
    over those that shared it. The first `sequential` axes run one after another (`lax.map`), the others together
    (`vmap`).

    Args:
      one_head: A function of a pytree of arrays.
      operands: Pytree of arrays [axes..., what one head takes...].
      axes: How many leading axes to map over.
      sequential: How many of these to loop over.
    """
    leaves, tree = jax.tree.flatten(operands)
    unit = tuple(axis for axis in range(axes) if all(leaf.shape[axis] == 1 for leaf in leaves))
    mapped = jax.tree.unflatten(tree, [_squeezed(leaf, unit) for leaf in leaves])
    ahead = sum(axis < sequential for axis in unit)
    answer = _mapped(one_head, mapped, axes - len(unit), sequential - ahead)
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), answer)


def _mapped(one_head: Callable[[Any], Any], operands: Any, axes: int, sequential: int) -> Any:
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
        return _mapped(one_head, entry, axes - 1, sequential - 1)

    return lax.map(one_entry, mapped) if sequential > 0 else jax.vmap(one_entry)(mapped)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """What the head at `place` takes."""
    return jax.tree.map(lambda x: x[tuple(0 if n == 1 else i for i, n in zip(place, x.shape, strict=False))], operands)


def _squeezed(x: Array | np.ndarray, axes: tuple[int, ...]) -> Array | np.ndarray:
    """`x` without these axes, of length 1."""
    return np.squeeze(x, axes) if isinstance(x, np.ndarray) else lax.squeeze(x, axes)
