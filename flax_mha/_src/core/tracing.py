"""Properties of a JAX trace: its target devices, which arrays are concrete, and which
mesh axes they vary over.
"""

import concurrent.futures
import functools
import math
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

# The end of reasons against kernels, and what warnings add to the remedy.
NEEDS_SHARDING = "it needs to know how its arrays are sharded: pass qkv_sharding"
EXAMPLES_OF_SHARDING = ', such as jax.P("data"), or jax.P() if nothing is split'


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


def multiplies_bfloat16(on: str) -> bool:
    """Returns whether the platform `on` is a CPU that multiplies bfloat16 (AVX-512
    BF16, AMX).
    """
    extensions = {"amx_bf16", "avx512_bf16"}
    return on == "cpu" and not cpu_features().isdisjoint(extensions)


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
        target = Target(platform(), may_be_split=_partitioner_may_split(arrays[0]))
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
    is_here = name in (target.platform, platform())
    return target._replace(platform=name, assumed=not is_here)


def _partitioner_may_split(x: Array) -> bool:
    """Returns whether XLA's partitioner may split the arrays of the current trace, of
    which `x` is one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_types:
        mesh = jax.typeof(x).sharding.mesh
    # Without a mesh, the arguments of the user's `jit` may still be on several devices.
    if not mesh.axis_types:
        return jax.device_count() > 1
    # Inside `jax.shard_map`, or on one device, XLA splits nothing.
    is_manual = all(kind is jax.sharding.AxisType.Manual for kind in mesh.axis_types)
    return not is_manual and mesh.size > 1


@functools.lru_cache(maxsize=256)
def _target_of_sharding(sharding: jax.sharding.Sharding) -> Target:
    device: Any = next(iter(sharding.device_set))
    return Target(device.platform, may_be_split=len(sharding.device_set) > 1)


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes whose devices `jax.shard_map` runs; empty outside of it."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def names_of(axes: Any) -> tuple[str, ...]:
    """Converts one entry of a PartitionSpec to a tuple of mesh axes: None to (), "x" to
    ("x",).
    """
    if isinstance(axes, str):
        return (axes,)
    return tuple(axes or ())


def number_of_parts(mesh: Any, axes: Any) -> int:
    """Returns into how many parts the mesh axes `axes`, an entry of a PartitionSpec,
    split an axis of an array: the product of their sizes.
    """
    return math.prod(mesh.shape[name] for name in names_of(axes))


def without_mesh() -> AbstractContextManager:
    """Returns a context that hides the current mesh, to trace a user's function without
    shardings.

    It hides nothing if all axes of the mesh are Manual, as in `jax.shard_map`.
    """
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    if all(kind is jax.sharding.AxisType.Manual for kind in axis_types):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def by_itself(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a thread of its own and without a mesh, so that nothing of
    the caller's transformations and meshes changes what it compiles.
    """

    def run() -> T:
        with without_mesh():
            return function(*arguments)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def readable(x: Array | np.ndarray) -> bool:
    """Returns whether the values of `x` can be read now: `x` is not traced, and this
    process holds all of it.
    """
    if isinstance(x, jax.core.Tracer):
        return False
    # NumPy's arrays lack the attribute.
    return getattr(x, "is_fully_addressable", True)


def being_traced() -> bool:
    """Returns whether JAX is tracing, as inside `jit`, rather than executing operations
    one by one.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def with_shapes(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Calls `function` with traced arrays in place of arguments that only have a shape
    and a dtype, such as `jax.ShapeDtypeStruct`.
    """
    given: dict[Any, Any] = dict(enumerate(arguments))
    given |= keywords
    names = [name for name, x in given.items() if _is_shape(x)]
    if not names:
        return function(*arguments, **keywords)
    results = []

    def run(*arrays: Array) -> None:
        found = given | dict(zip(names, arrays, strict=True))
        positional = [found.pop(i) for i in range(len(arguments))]
        results.append(function(*positional, **found))

    jax.eval_shape(run, *(given[name] for name in names))
    return results[0]


def _is_shape(x: object) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return hasattr(x, "shape") and hasattr(x, "dtype") and not is_array


def varying_alike(tree: T) -> T:
    """Casts arrays to vary over the same mesh axes, which loops and custom derivatives
    require in `jax.shard_map`.

    Inside `jax.shard_map`, the type of an array lists the mesh axes along which devices
    may hold different values.
    """
    return varying_as(tree, tree)


def varying_as(like: object, tree: T) -> T:
    """Casts arrays, such as a loop's initial values, to vary over the mesh axes that
    any array of `like` varies over.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
    if axes:
        return jax.tree.map(lambda x: _vary(x, axes), tree)
    return tree


def varying_axes(x: object) -> frozenset:
    """Returns the mesh axes along which devices may hold different values of `x`, by
    its type inside `jax.shard_map`.
    """
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: Array, axes: frozenset) -> Any:
    new = axes - varying_axes(x)
    if new and not is_key(x):
        return lax.pcast(x, tuple(sorted(new)), to="varying")
    return x


def is_key(x: Array) -> bool:
    """Returns whether an array holds typed keys of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def by_mapped_axis(function: Callable[..., T], operands: tuple, is_batched: tuple) -> T:
    """Calls `function(*operands)`; if a mesh splits the mapped axis, each device calls
    it on its own part.

    For rules of `custom_vmap`. The mapped axis is the first axis of every result, and
    of every array in `operands` whose `is_batched` is True.
    """
    # Which mesh axes split the mapped axis, by the types of the arrays that have it.
    leaves = zip(jax.tree.leaves(operands), jax.tree.leaves(is_batched), strict=True)
    shardings = [jax.typeof(x).sharding for x, batched in leaves if batched]
    splits = [sharding.spec[0] for sharding in shardings if len(sharding.spec)]
    split_by = next((split for split in splits if split is not None), None)
    if split_by is None:
        return function(*operands)
    mesh = shardings[0].mesh

    # All arrays with the mapped axis get this split, which `shard_map` requires.
    def reshard(x: Array, batched: bool) -> Array:
        if not batched:
            return x
        spec = jax.P(split_by, *jax.typeof(x).sharding.spec[1:])
        return jax.reshard(x, jax.NamedSharding(mesh, spec))

    def spec_of(batched: bool) -> jax.P:
        return jax.P(split_by) if batched else jax.P()

    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(spec_of, is_batched),
        out_specs=jax.P(split_by),
        axis_names=frozenset(names_of(split_by)),
        check_vma=False,
    )
    return mapped(*jax.tree.map(reshard, operands, is_batched))
