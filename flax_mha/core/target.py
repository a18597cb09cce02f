"""What is known while tracing of where a call runs: the platform, meshes, and which values are known."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

T = TypeVar("T")


class Target(NamedTuple):
    """What a call is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      may_be_split: Whether the compiler may split arrays over several devices without the types saying so.
    """

    platform: str
    may_be_split: bool


def platform() -> str:
    """What is compiled for if no array says otherwise: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def target_of(arrays: Sequence[Array]) -> Target:
    """Where a call with these arrays runs: on the devices that hold them, or on the default ones while tracing."""
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        targets = {_target_of_sharding(x.sharding) for x in arrays}
        return max(targets, key=lambda target: target.may_be_split)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh if mesh.axis_types else jax.typeof(arrays[0]).sharding.mesh
    if mesh.axis_types:  # inside `jax.shard_map` nothing is split, nor on one device
        free = any(kind is not jax.sharding.AxisType.Manual for kind in mesh.axis_types)
        return Target(platform(), free and mesh.size > 1)
    return Target(platform(), jax.device_count() > 1)


@functools.lru_cache(maxsize=256)
def _target_of_sharding(sharding: jax.sharding.Sharding) -> Target:
    device: Any = next(iter(sharding.device_set))
    return Target(device.platform, len(sharding.device_set) > 1)


def without_mesh() -> AbstractContextManager:
    """Hides the mesh while scalar functions are traced that will run inside `jax.shard_map`, where its axes differ."""
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    if all(kind is jax.sharding.AxisType.Manual for kind in axis_types):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


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


def reasons_against_kernel(target: Target) -> list[str]:
    """Why a Pallas kernel cannot run where this is traced: it computes on one device, and says nothing of meshes."""
    reasons = []
    if target.may_be_split:
        reasons.append("on several devices it must know how its arrays are split; pass qkv_sharding")
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying:
        reasons.append("inside jax.shard_map it needs check_vma=False")
    return reasons
