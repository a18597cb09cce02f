"""Meshes, and how their axes split the axes of arrays."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import Array

from flax_mha.core.tracing import T


def axes_of_type(mesh: Any, *kinds: jax.sharding.AxisType) -> list[str]:
    """The names of a mesh's axes of these types."""
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds]


def names_of(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one axis of an array, given by one name, by several, or by none."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def number_of_parts(mesh: Any, axes: str | tuple[str, ...] | None) -> int:
    """In how many parts these mesh axes split an axis of an array."""
    return math.prod(mesh.shape[name] for name in names_of(axes))


def axes_of_key_heads(axes: Any, parts: int, num_kv_heads: int) -> Any:
    """Which mesh axes split the key heads where `axes` split the query heads into so many parts.

    Returns:
      The same; None where there are fewer key heads than parts, which then hold all of them.

    Raises:
      ValueError: If a part's query heads belong to some of the key heads, but not to an equal share.
    """
    if num_kv_heads % parts and parts % num_kv_heads:
        raise ValueError(
            f"the key heads must divide the {parts} parts into which mesh axis {axes!r} splits heads, or be a "
            f"multiple of them, but got {num_kv_heads}; use another mesh axis, or None."
        )
    return None if num_kv_heads % parts else axes


def of_every_axis(spec: Iterable[Any], rank: int) -> tuple[Any, ...]:
    """What splits each axis of an array of this rank; a PartitionSpec may leave out the last ones."""
    given = tuple(spec)
    return given + (None,) * (rank - len(given))


def by_mapped_axis(function: Callable[..., T], operands: tuple, is_batched: tuple) -> T:
    """`function(*operands)` of what `jax.vmap` maps over, each device its part where types say how this axis is split.

    Args:
      function: Returns arrays with this axis first.
      operands: Pytrees of arrays.
      is_batched: For each array whether its first axis is the mapped one.
    """
    leaves = [x for x, batched in zip(*map(jax.tree.leaves, (operands, is_batched)), strict=True) if batched]
    shardings = [jax.typeof(x).sharding for x in leaves]
    first = next((x.spec[0] for x in shardings if not x.mesh.empty and len(x.spec) and x.spec[0] is not None), None)
    if first is None:
        return function(*operands)
    mesh = shardings[0].mesh

    def placed(x: Array, batched: bool) -> Array:
        _, *others = of_every_axis(jax.typeof(x).sharding.spec, x.ndim)
        return jax.reshard(x, jax.NamedSharding(mesh, jax.P(first, *others))) if batched else x

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(lambda batched: jax.P(first) if batched else jax.P(), is_batched),
        out_specs=jax.P(first),
        axis_names=frozenset(names_of(first)),
        check_vma=False,
    )(*jax.tree.map(placed, operands, is_batched))
