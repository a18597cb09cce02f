"""Properties of a JAX trace: its target devices, which arrays are concrete, and which
mesh axes they vary over.
"""

import functools
import pathlib
import typing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

T = TypeVar("T")

# The names that a caller may use.
Platform = typing.Literal["cpu", "cuda", "gpu", "tpu"]
# JAX's name of each.
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}


class Target(NamedTuple):
    """The kind of devices for which a call is compiled, and whether there may be
    several.
    """

    platform: str  # "cpu", "gpu" or "tpu"
    # Whether XLA's partitioner may split arrays over devices although their types show
    # no split.
    may_be_split: bool
    # Whether a call is only explained for this platform, which this machine may lack.
    assumed: bool = False


def platform() -> str:
    """Returns the platform of JAX's default device: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return getattr(device, "platform", device)


def multiplies_bfloat16(on: str | None = None) -> bool:
    """Returns whether the platform `on` (default: JAX's) is a CPU that multiplies
    bfloat16 (AVX-512 BF16, AMX).
    """
    return (platform() if on is None else on) == "cpu" and bool(
        {"amx_bf16", "avx512_bf16"} & cpu_features()
    )


@functools.cache
def cpu_features() -> frozenset[str]:
    """Returns the words in Linux's description of the CPU, such as "amx_bf16"; empty on
    other systems.
    """
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        return frozenset(info.read_text().split())
    return frozenset()


def target_of(arrays: Sequence[Array], asked: str | None = None) -> Target:
    """Returns the devices that a call is compiled for: those of its arrays or, while
    tracing, the default ones.

    To explain a call for devices that this machine may lack, pass their platform as
    `asked`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        mesh = jax.sharding.get_abstract_mesh()
        mesh = mesh if mesh.axis_types else jax.typeof(arrays[0]).sharding.mesh
        # Inside `jax.shard_map`, or on one device, XLA splits nothing.
        free = any(kind is not jax.sharding.AxisType.Manual for kind in mesh.axis_types)
        target = Target(
            platform(),
            free and mesh.size > 1 if mesh.axis_types else jax.device_count() > 1,
        )
    else:
        targets = {_target_of_sharding(x.sharding) for x in arrays}
        target = max(targets, key=lambda target: target.may_be_split)
    if asked is None:
        return target
    if not isinstance(asked, str) or asked not in PLATFORMS:
        raise ValueError(
            f'platform must be "cpu", "cuda", "tpu" or None, but got {asked!r}.'
        )
    name = PLATFORMS[asked]
    return target._replace(
        platform=name, assumed=name not in (target.platform, platform())
    )


@functools.lru_cache(maxsize=256)
def _target_of_sharding(sharding: jax.sharding.Sharding) -> Target:
    device: Any = next(iter(sharding.device_set))
    return Target(device.platform, len(sharding.device_set) > 1)


def reasons_against_kernel(target: Target) -> list[str]:
    """Lists why the arrays' devices or mesh rule out a Pallas kernel, which runs on one
    device; each with a remedy.
    """
    reasons = []
    if target.may_be_split:
        reasons.append(
            "on multiple devices, it needs to know how its arrays are sharded: pass "
            "qkv_sharding"
        )
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying:
        reasons.append(
            "inside jax.shard_map, it does not support check_vma=True: pass "
            "check_vma=False"
        )
    return reasons


def without_mesh() -> AbstractContextManager:
    """Returns a context that hides the current mesh, to trace a user's function without
    shardings.

    It hides nothing if all axes of the mesh are Manual, as in `jax.shard_map`.
    """
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    if all(kind is jax.sharding.AxisType.Manual for kind in axis_types):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def readable(x: Array | np.ndarray) -> bool:
    """Returns whether the values of `x` can be read now: `x` is not traced, and this
    process holds all of it.
    """
    return not isinstance(x, jax.core.Tracer) and getattr(
        x, "is_fully_addressable", True
    )


def being_traced() -> bool:
    """Returns whether JAX is tracing, as inside `jit`, rather than executing operations
    one by one.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def varying_alike(tree: T) -> T:
    """Casts arrays to vary over the same mesh axes, which loops and custom derivatives
    require in `jax.shard_map`.

    Inside `jax.shard_map`, the type of an array lists the mesh axes along which devices
    may hold different values.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset().union(*map(_varying_axes, leaves))
    if axes:
        return jax.tree.unflatten(structure, [_vary(x, axes) for x in leaves])
    return tree


def varying_as(like: Array, tree: T) -> T:
    """Casts arrays, such as a loop's initial values, to vary over the mesh axes that
    `like` varies over.
    """
    axes = _varying_axes(like)
    if axes:
        return jax.tree.map(lambda x: _vary(x, axes), tree)
    return tree


def varies_over_devices(x: Any) -> bool:
    """Returns whether devices may hold different values of `x`, by its type inside
    `jax.shard_map`.
    """
    return bool(_varying_axes(x))


def _varying_axes(x: Any) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: Any, axes: frozenset) -> Any:
    new = axes - _varying_axes(x)
    if new and not is_key(x):
        return lax.pcast(x, tuple(sorted(new)), to="varying")
    return x


def is_key(x: Any) -> bool:
    """Returns whether an array holds typed keys of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def by_mapped_axis(function: Callable[..., T], operands: tuple, is_batched: tuple) -> T:
    """Calls `function(*operands)`; if a mesh splits the mapped axis, each device calls
    it on its own part.

    For rules of `custom_vmap`. The mapped axis is the first axis of every result, and
    of every array in `operands` whose `is_batched` is True.
    """
    leaves = [
        x
        for x, batched in zip(
            *map(jax.tree.leaves, (operands, is_batched)), strict=True
        )
        if batched
    ]
    shardings = [jax.typeof(x).sharding for x in leaves]
    first = next(
        (
            x.spec[0]
            for x in shardings
            if not x.mesh.empty and len(x.spec) and x.spec[0] is not None
        ),
        None,
    )
    if first is None:
        return function(*operands)
    mesh = shardings[0].mesh

    def reshard(x: Array, batched: bool) -> Array:
        if batched:
            return jax.reshard(
                x,
                jax.NamedSharding(mesh, jax.P(first, *jax.typeof(x).sharding.spec[1:])),
            )
        return x

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(
            lambda batched: jax.P(first) if batched else jax.P(), is_batched
        ),
        out_specs=jax.P(first),
        axis_names=frozenset((first,) if isinstance(first, str) else first),
        check_vma=False,
    )(*jax.tree.map(reshard, operands, is_batched))
