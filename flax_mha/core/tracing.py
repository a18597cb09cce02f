"""What is known while tracing: whether values are known, and over which axes of a mesh they vary."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha.core.target import T


def without_mesh() -> AbstractContextManager:
    """Hides the mesh while scalar functions are traced that will run inside `jax.shard_map`, where its axes differ."""
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    if all(kind is jax.sharding.AxisType.Manual for kind in axis_types):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def readable(x: Array | np.ndarray) -> bool:
    """Whether values are known while tracing, and to this process."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def being_traced() -> bool:
    """Whether operations are being staged out, as inside `jit`, instead of being executed one by one."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def varying_alike(tree: T) -> T:
    """The arrays, all varying over the same axes of a mesh, as loops and custom derivatives need it.

    Inside `jax.shard_map` the type of an array says over which axes of the mesh it varies. The gradient of an array
    that varied over fewer axes than the others is summed over those that are added here.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset().union(*map(_varying_axes, leaves))
    return jax.tree.unflatten(structure, [_vary(x, axes) for x in leaves]) if axes else tree


def any_varies(arrays: Sequence[Array]) -> bool:
    """Whether one of them varies over an axis of a mesh, inside `jax.shard_map`."""
    return any(map(_varying_axes, arrays))


def varying_as(like: Array, tree: T) -> T:
    """The arrays, varying over the axes of a mesh that `like` varies over: what a loop starts from."""
    axes = _varying_axes(like)
    return jax.tree.map(lambda x: _vary(x, axes), tree) if axes else tree


def _varying_axes(x: Any) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: Any, axes: frozenset) -> Any:
    new = axes - _varying_axes(x)
    return lax.pcast(x, tuple(sorted(new)), to="varying") if new and not is_key(x) else x


def is_key(x: Any) -> bool:
    """Whether this is a typed key of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
