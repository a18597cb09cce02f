"""What a call is compiled for, as far as that is known while tracing."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
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


def reasons_against_kernel(target: Target) -> list[str]:
    """Why a Pallas kernel cannot run where this is traced: it computes on one device, and says nothing of meshes."""
    reasons = []
    if target.may_be_split:
        reasons.append("on several devices it must know how its arrays are split; pass qkv_sharding")
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying:
        reasons.append("inside jax.shard_map it needs check_vma=False")
    return reasons
