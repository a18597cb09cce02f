"""A call on a mesh of devices: each computes its part of the batch and of the heads, as a call of its own.

How arrays are split is known in three cases: the caller says so (`qkv_sharding`), the types of the arrays do (a mesh
with Explicit axes), or the arrays are not traced. The call then runs inside `jax.shard_map`, needs no communication,
and every implementation can compute it, fused kernels too. In all other cases XLA's partitioner splits the call.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from flax_mha._call import Call, Operands, Options, Sharding, numbered
from flax_mha._platform import being_traced

Axes = str | tuple[str, ...] | None


class Split(NamedTuple):
    """Which mesh axes split the batch axes and the heads of a call.

    Attributes:
      mesh: The mesh.
      manual: The mesh axes over which each device computes on its own.
      batch: For each batch axis the mesh axes that split it.
      heads: The mesh axes that split the query heads.
      key_heads: Those that split the key and value heads; None if there are fewer of them than devices, which then hold
        all of them.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]
    batch: tuple[Axes, ...]
    heads: Axes
    key_heads: Axes

    def size(self, axes: Axes) -> int:
        """In how many parts these mesh axes split an array."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)

    def spec(self, x: Any, axes: str) -> PartitionSpec:
        """How an array is split whose axes have these names, as in the field metadata of masks (`masks/base.py`)."""
        by_name = {"B": self.batch, "N": (self.heads,), "K": (self.key_heads,)}
        each = [part for name in axes.split() for part in by_name.get(name, (None,))]
        return PartitionSpec(*(None if n == 1 else part for n, part in zip(x.shape, each, strict=False)))


def split_of(call: Call) -> Split | None:
    """How the call is split, if that is known and a mesh is there.

    Raises:
      ValueError: If what the caller or the types say cannot be computed.
    """
    if call.options.sharding is not None:
        return _given(call, call.options.sharding)
    types = [jax.typeof(x).sharding for x in call.operands[:3]]
    explicit = {name for x in types for name in _axes_of_type(x.mesh, AxisType.Explicit)}
    if explicit:
        mesh = next(x.mesh for x in types if _axes_of_type(x.mesh, AxisType.Explicit))
        return _split(mesh, explicit, [x.spec for x in types], call, "their types")
    return _placed(call)


def _axes_of_type(mesh: Any, *kinds: AxisType) -> list[str]:
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds]


def _given(call: Call, sharding: Any) -> Split | None:
    """What the caller says: a PartitionSpec, for the mesh of the context, or a NamedSharding."""
    mesh, spec = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh()), getattr(sharding, "spec", sharding)
    named = {name for axes in spec for name in ((axes,) if isinstance(axes, str) else axes or ())}
    known = _axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
    if unknown := named - set(known):
        have = f"the mesh has {tuple(known)}" if known else "there is no mesh; use jax.set_mesh, or a NamedSharding"
        raise ValueError(f"qkv_sharding must name axes of the mesh, but got {', '.join(sorted(unknown))}, and {have}.")
    return _split(mesh, set(known), [spec], call, "qkv_sharding") if known else None


def _placed(call: Call) -> Split | None:
    """What arrays say that are not traced, where it can be computed without moving any."""
    held: list[Any] = [x.sharding for x in call.operands[:3] if not isinstance(x, jax.core.Tracer)]
    if len(held) < 3 or not all(isinstance(x, NamedSharding) and x.mesh == held[0].mesh for x in held):
        return None
    mesh = held[0].mesh
    try:
        return _split(mesh, set(mesh.axis_names), [x.spec for x in held], call, "they") if mesh.size > 1 else None
    except ValueError:
        return None


def _split(mesh: Any, manual: set[str], specs: Sequence[Any], call: Call, source: str) -> Split:
    """The split of a call, given what is known of query, key and value, or of all of them."""
    rank, operands = call.operands.query.ndim, call.operands
    full = [(*spec, *(None,) * (rank - len(spec))) for spec in specs]
    said = [{axes for axes in dimension if axes not in (None, ())} for dimension in zip(*full, strict=True)]
    if any(len(x) > 1 for x in said) or said[-1] or said[-3]:
        got = ", ".join(map(str, specs))
        raise ValueError(
            f"query, key and value must be split alike, over batch axes and heads, but {source} say {got}; use "
            "jax.reshard, or context_parallel for sequences that are split."
        )
    *batch, _, heads, _ = (next(iter(x), None) for x in said)
    split = Split(mesh, frozenset(manual), tuple(batch), heads, None)
    sizes = (*operands.query.shape[:-3], operands.query.shape[-2])
    names = [f"batch axis {axis}" for axis in range(rank - 3)] + ["the query heads"]
    for name, size, axes in zip(names, sizes, (*batch, heads), strict=True):
        if isinstance(size, int) and size % split.size(axes):
            raise ValueError(
                f"{name} must be a multiple of the {split.size(axes)} parts into which mesh axis {axes!r} splits it, "
                f"but got {size}; use another mesh axis, or None."
            )
    num_kv_heads, parts = operands.key.shape[-2], split.size(heads)
    if num_kv_heads % parts and parts % num_kv_heads:
        raise ValueError(
            f"the key heads must divide the {parts} parts into which mesh axis {heads!r} splits heads, or be a "
            f"multiple of them, but got {num_kv_heads}; use another mesh axis, or None."
        )
    return split._replace(key_heads=None if num_kv_heads % parts else heads)


def by_device(function: Callable[..., Array], like: Array, axes: str, *others: tuple[Array, str]) -> Array:
    """`function(like, *others)`, each device computing its part, where the type of `like` says how it is split.

    Args:
      function: Returns an array that is split as `like` is.
      like: [B..., length, K, size].
      axes: Names of its axes, as in the field metadata of masks.
      *others: Other arrays, with the names of their axes.
    """
    mesh = jax.typeof(like).sharding.mesh
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    if not explicit:
        return function(like, *(x for x, _ in others))
    spec = tuple(jax.typeof(like).sharding.spec)
    *batch, _, heads, _ = spec + (None,) * (like.ndim - len(spec))
    split = Split(mesh, frozenset(explicit), tuple(batch), heads, heads)
    arrays, names = zip((like, axes), *others, strict=True)
    specs = tuple(map(split.spec, arrays, names))
    placed = [_resharded(x, split, spec) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=split.manual, check_vma=False
    )(*placed)


def placed(x: Array, sharding: Sharding | None, rank: int | None = None) -> Array:
    """An array on its devices, given how a mesh splits it, or an array of which it has only the first `rank` axes."""
    if sharding is None:
        return x
    mesh: Any = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh())
    if mesh.empty:
        raise ValueError(f"sharding must be a NamedSharding where there is no mesh, but got {sharding}.")
    spec: Any = getattr(sharding, "spec", sharding)
    target = NamedSharding(mesh, PartitionSpec(*spec[:rank]))
    if _axes_of_type(mesh, AxisType.Explicit):
        return jax.reshard(x, target)
    return lax.with_sharding_constraint(x, target)


def unsplit(call: Call) -> Call:
    """The same call where nothing is split, or where a device computes its own part."""
    target = call.options.target._replace(may_be_split=False)
    return call._replace(options=call.options._replace(sharding=None, target=target))


def on_mesh(call: Call, split: Split, run: Callable[[Call], Any]) -> Any:
    """`run(call)`, which returns output and log-sum-exp or None, of the part of the call that each device holds."""
    if being_traced():
        return _on_mesh(call.operands, call.options, split, run)
    return _compiled_on_mesh(call.operands, call.options, split, run)


def _on_mesh(operands: Operands, options: Options, split: Split, run: Callable[[Call], Any]) -> Any:
    operands = operands._replace(numbers=numbered(operands, options))
    leaves, structure = jax.tree.flatten(operands)
    specs = jax.tree.leaves(operands.map_arrays(split.spec), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves = [_resharded(x, split, spec) for x, spec in zip(leaves, specs, strict=True)]

    def part(*leaves: Array) -> Any:
        own = _own_keys(jax.tree.unflatten(structure, leaves), operands, split)
        return run(unsplit(Call(own, options)))

    output = PartitionSpec(*split.batch, None, split.heads)
    return jax.shard_map(
        part,
        mesh=split.mesh,
        in_specs=tuple(specs),
        out_specs=(output, output),
        axis_names=split.manual,
        check_vma=False,  # kernels do not say over which axes their output varies
    )(*leaves)


_compiled_on_mesh = jax.jit(_on_mesh, static_argnames=("options", "split", "run"))


def _resharded(x: Any, split: Split, spec: PartitionSpec) -> Any:
    """An array split as it is needed, where types say how arrays are split."""
    explicit = _axes_of_type(split.mesh, AxisType.Explicit)
    return jax.reshard(x, NamedSharding(split.mesh, spec)) if explicit else x


def _own_keys(part: Operands, whole: Operands, split: Split) -> Operands:
    """The part with the one key head that its queries share, where devices hold all of them."""
    if split.heads == split.key_heads:
        return part
    _, size = whole.groups
    first = lax.axis_index(split.heads) * part.query.shape[-2] // size
    key, value = (lax.dynamic_slice_in_dim(x, first, 1, axis=-2) for x in (part.key, part.value))
    return part._replace(key=key, value=value)
