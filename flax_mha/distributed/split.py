"""How a mesh splits a call: over batch axes and heads, and over the sequence if `context_parallel` says so.

It is known in three cases: the caller says so (`qkv_sharding`), the types of the arrays do (a mesh with Explicit axes),
or the arrays are not traced. In all other cases XLA's partitioner splits the call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mha.call.context import Axes, Context, belongs_to_keys
from flax_mha.call.operands import Call
from flax_mha.core.sharding import axes_of_key_heads, axes_of_type, names_of, number_of_parts, of_every_axis


class Split(NamedTuple):
    """Which mesh axes split the batch axes, the heads and the sequence of a call.

    Attributes:
      mesh: The mesh.
      manual: The mesh axes over which each device computes on its own.
      batch: For each batch axis the mesh axes that split it.
      heads: The mesh axes that split the query heads.
      key_heads: Those that split the key and value heads; None if there are fewer of them than devices, which then hold
        all of them.
      context: How sequences are split, too; None if they are not.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]
    batch: tuple[Axes, ...]
    heads: Axes
    key_heads: Axes
    context: Context | None = None

    def size(self, axes: Axes) -> int:
        """In how many parts these mesh axes split an array."""
        return number_of_parts(self.mesh, axes)

    def spec(self, x: Any, axes: str) -> PartitionSpec:
        """How an array is split whose axes have these names, as in the field metadata of masks (`masks/base.py`)."""
        by_name = {"B": self.batch, "N": (self.heads,), "K": (self.key_heads,), **self._sequences(axes)}
        each = [part for name in axes.split() for part in by_name.get(name, (None,))]
        return PartitionSpec(*(None if n == 1 else part for n, part in zip(x.shape, each, strict=False)))

    def _sequences(self, axes: str) -> dict[str, tuple[Axes]]:
        """What splits the axes of queries and of keys, in an array whose axes have these names."""
        if self.context is None:
            return {}
        axis, strategy = self.context.axis, self.context.strategy
        if "H" in axes.split():  # query, key and value
            return {"T": (axis,), "S": (axis,)}
        if strategy == "ulysses":  # there, what belongs to heads goes where these are computed
            return {"N": ((*names_of(self.heads), axis),)}
        queries: dict[str, tuple[Axes]] = {"T": (axis,), "T|1": (axis,)}
        return queries | ({"S": (axis,)} if strategy == "ring" and belongs_to_keys(axes) else {})

    @property
    def output_spec(self) -> PartitionSpec:
        """How output and log-sum-exp are split."""
        return PartitionSpec(*self.batch, None if self.context is None else self.context.axis, self.heads)


def split_of(call: Call) -> Split | None:
    """How the call is split, if that is known and a mesh is there.

    Raises:
      ValueError: If what the caller or the types say cannot be computed.
    """
    if isinstance(call.options.sharding, Context):
        return _of_context(call, call.options.sharding)
    if call.options.sharding is not None:
        return _given(call, call.options.sharding)
    types = [jax.typeof(x).sharding for x in call.operands[:3]]
    explicit = {name for x in types for name in axes_of_type(x.mesh, AxisType.Explicit)}
    if explicit:
        mesh = next(x.mesh for x in types if axes_of_type(x.mesh, AxisType.Explicit))
        return _split(mesh, explicit, [x.spec for x in types], call, "their types")
    return _placed(call) if call.options.target.may_be_split else None


def _given(call: Call, sharding: Any) -> Split | None:
    """What the caller says: a PartitionSpec, for the mesh of the context, or a NamedSharding."""
    mesh, spec = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh()), getattr(sharding, "spec", sharding)
    named = {name for axes in spec for name in names_of(axes)}
    known = axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
    if unknown := named - set(known):
        have = f"the mesh has {tuple(known)}" if known else "there is no mesh; use jax.set_mesh, or a NamedSharding"
        raise ValueError(f"qkv_sharding must name axes of the mesh, but got {', '.join(sorted(unknown))}, and {have}.")
    return _split(mesh, set(known), [spec], call, "qkv_sharding") if known else None


def _of_context(call: Call, context: Context) -> Split:
    """What `context_parallel` says; where it does not name what splits batch and heads, arrays may say it."""
    mesh, spec = _mesh_and_spec(call, context)
    known = axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
    batch = [context.batch_axes or spec[0], *spec[1:-3]] if len(spec) > 3 else []
    heads = context.head_axis or spec[-2]
    named = [context.axis, *(name for axes in (*batch, heads) for name in names_of(axes))]
    if unknown := set(named) - set(known):
        have = f"the mesh has {tuple(known)}" if known else "there is no mesh; use jax.set_mesh, or mesh="
        if unknown & set(axes_of_type(mesh, AxisType.Manual)):
            have = "that is manual already: call it outside jax.shard_map"
        got = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"context_parallel must name axes of the mesh, but got {got}, and {have}.")
    if len(set(named)) < len(named):
        raise ValueError(f"axis, batch_axes and head_axis must be different mesh axes, but got {tuple(named)}.")
    if context.batch_axes and not batch:
        raise ValueError(f"batch_axes must be None without a batch axis, but got {context.batch_axes!r}.")
    split = _split(mesh, set(known), [PartitionSpec(*batch, None, heads)], call, "context_parallel")
    _check_sequences(call, context, split)
    return split._replace(context=context)


def _mesh_and_spec(call: Call, context: Context) -> tuple[Any, tuple[Axes, ...]]:
    """The mesh, and what is known of how it splits the axes of the query: by its type, or if it is not traced."""
    query: Any = call.operands.query
    known: Any = jax.typeof(query).sharding
    if not axes_of_type(known.mesh, AxisType.Explicit):
        known = None if isinstance(query, jax.core.Tracer) else query.sharding
    around, is_named = jax.sharding.get_abstract_mesh(), isinstance(known, NamedSharding)
    mesh: Any = context.mesh or (known.mesh if is_named and around.empty else around)
    spec = known.spec if is_named and known.mesh.abstract_mesh == mesh.abstract_mesh else ()
    return mesh, of_every_axis(spec, query.ndim)


def _check_sequences(call: Call, context: Context, split: Split) -> None:
    """Lengths that can be split, and for "ulysses" heads."""
    if call.options.cached:
        raise ValueError("context_parallel must not be used for decoding, but got a cache; decode without it.")
    devices, name = split.size(context.axis), context.axis
    for what, length in zip(("queries", "keys"), call.operands.lengths, strict=True):
        if not isinstance(length, int) or length % (devices * context.chunks):
            twice = ' twice each with layout="zigzag",' if context.chunks > 1 else ""
            raise ValueError(
                f"the number of {what} must be a multiple of {devices * context.chunks},{twice} for the {devices} "
                f"devices of mesh axis {name!r}, but got {length}; pad them, and mask the padding by lengths."
            )
    num_kv_heads = call.operands.groups[0] // split.size(split.key_heads)
    if context.strategy == "ulysses" and (num_kv_heads % devices or split.key_heads != split.heads):
        raise ValueError(
            f'strategy="ulysses" must have a multiple of {devices} key heads on each of the {devices} devices of mesh '
            f'axis {name!r}, which exchange heads for positions, but got {num_kv_heads}; use "ring" or "allgather".'
        )


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
    dimensions = zip(*(of_every_axis(spec, rank) for spec in specs), strict=True)
    said = [{axes for axes in dimension if axes not in (None, ())} for dimension in dimensions]
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
    return split._replace(key_heads=axes_of_key_heads(heads, split.size(heads), operands.key.shape[-2]))
