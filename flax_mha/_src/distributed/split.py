"""How a mesh splits a call: along batch axes and heads, and along the sequence with
`context_parallel`.

A split is known if the caller gives it (`qkv_sharding`, `context_parallel`), if the
types of the arrays contain it (on a mesh with Explicit axes), or if the arrays are
concrete. Otherwise, XLA's partitioner splits the call. `run_on_mesh` computes each
device's part inside `jax.shard_map`, as a separate call, by any engine, also by fused
kernels. The parts need no communication unless the sequence is split; `ring.py` and
`exchange.py` are the strategies for that case. They cut the sequence into equal
*chunks*: each device holds one or, with the layout "zigzag", two.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.call import (
    Axes,
    Call,
    Context,
    Layout,
    Result,
    Sharding,
)
from flax_mha._src.call.slices import axis_of, travels_with_keys
from flax_mha._src.core.tracing import T, names_of, number_of_parts
from flax_mha._src.core.validation import int_at_least
from flax_mha._src.math.head import with_indices


def mesh_axes(mesh: Any, *kinds: AxisType) -> list[str]:
    """Lists the names of the mesh axes whose type is one of `kinds`."""
    return [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind in kinds
    ]


def is_explicit(x: Any) -> bool:
    """Returns whether an array is on a mesh with Explicit axes, so that its type shows
    how it is split.
    """
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def pad_spec(spec: Iterable[Any], rank: int) -> tuple[Any, ...]:
    """Pads a PartitionSpec with None to the rank of an array."""
    given = tuple(spec)
    return given + (None,) * (rank - len(given))


def axes_of_key_heads(axes: Any, parts: int, num_kv_heads: int) -> Any:
    """Returns the mesh axes that split the key heads, if `axes` split the query heads
    into `parts`.

    Returns None if there are fewer key heads than parts: then every device holds all
    key heads. Raises a ValueError if neither number divides the other.
    """
    if num_kv_heads % parts and parts % num_kv_heads:
        raise ValueError(
            f"the number of key heads must divide {parts}, the number of devices on "
            f"mesh axis {axes!r}, or be a multiple of it, but got {num_kv_heads}; use "
            "a different mesh axis, or None."
        )
    if num_kv_heads % parts:
        return None
    return axes


class Split(NamedTuple):
    """How a mesh splits a call: the mesh axes that split its batch axes, its heads and
    its sequence.
    """

    mesh: Mesh | AbstractMesh
    # The mesh axes of the `jax.shard_map` in which the parts are computed.
    manual: frozenset[str]
    batch: tuple[Axes, ...]  # the mesh axes that split each batch axis
    heads: Axes  # the mesh axes that split the query heads
    # The mesh axes that split the key heads; None if every device holds all of them.
    key_heads: Axes
    # The arguments of `context_parallel`; None if the sequence is not split.
    context: Context | None = None

    def spec(self, x: Any, axes: str) -> PartitionSpec:
        """Returns the PartitionSpec of an array from the names of its axes, such as "B
        T N H" (`masks/base.py`).
        """
        by_name = {
            "B": self.batch,
            "N": (self.heads,),
            "K": (self.key_heads,),
            **self._sequences(axes),
        }
        parts: list[Axes] = []
        for name in axes.split():
            parts.extend(by_name.get(name, (None,)))
        # An axis of length 1 is broadcast, so every device needs it.
        by_axis = zip(x.shape, parts, strict=False)
        return PartitionSpec(*(None if n == 1 else part for n, part in by_axis))

    def _sequences(self, axes: str) -> dict[str, tuple[Axes]]:
        """Returns how `context_parallel` splits an array with these axes, such as {"T":
        ("x",)} for mesh axis "x".
        """
        if self.context is None:
            return {}
        axis = self.context.axis
        strategy = self.context.strategy
        if "H" in axes.split():  # query, key and value
            return {"T": (axis,), "S": (axis,)}
        # Each device computes some of the heads, over all positions.
        if strategy == "ulysses":
            return {"N": ((*names_of(self.heads), axis),)}
        parts: dict[str, tuple[Axes]] = {"T": (axis,), "T|1": (axis,)}
        # "allgather" collects only keys and values: other arrays must have all keys.
        if strategy == "ring" and travels_with_keys(axes):
            parts["S"] = (axis,)
        return parts

    @property
    def output_spec(self) -> PartitionSpec:
        """The PartitionSpec of output [B..., T, N, Hv] and log-sum-exp [B..., T, N]."""
        queries = None if self.context is None else self.context.axis
        return PartitionSpec(*self.batch, queries, self.heads)

    def reshard(self, x: Any, spec: PartitionSpec) -> Any:
        """Reshards an array if the mesh has Explicit axes; on other meshes XLA's
        partitioner does it.
        """
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.reshard(x, NamedSharding(self.mesh, spec))
        return x

    def shard_map(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        specs: tuple[Any, ...],
        out_spec: PartitionSpec,
    ) -> Any:
        """Calls `function` on each device, in `jax.shard_map`, with the device's parts
        of `arguments`; joins the results.

        `specs` holds the PartitionSpec of each array in `arguments`, which are pytrees;
        `out_spec` is that of the result.
        """
        manual = self.manual
        # No name: all axes but those of `jax.vmap`.
        if manual == frozenset(self.mesh.axis_names):
            manual = frozenset()
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=out_spec,
            axis_names=manual,
            # Outputs of kernels do not declare the axes over which they vary.
            check_vma=False,
        )
        return mapped(*jax.tree.map(self.reshard, arguments, specs))


def split_of(call: Call) -> Split | None:
    """Returns how a mesh splits a call; None if it does not.

    `qkv_sharding` or `context_parallel` decides; without them, the types of the arrays
    or the devices that hold them.
    """
    sharding = call.sharding
    if isinstance(sharding, Context):
        return _by_context(call, sharding)
    if sharding is not None:
        return _by_caller(call, sharding)
    if any(map(is_explicit, call.inputs)):
        return by_types(call)
    # XLA's partitioner may split traced arrays.
    is_traced = any(isinstance(x, jax.core.Tracer) for x in call.inputs)
    if is_traced or not call.target.may_be_split:
        return None
    return _by_placement(call)


def by_types(call: Call) -> Split:
    """Returns the split in the types of query, key and value. At least one must be on a
    mesh with Explicit axes.
    """
    arrays = call.inputs
    mesh = next(jax.typeof(x).sharding.mesh for x in arrays if is_explicit(x))
    explicit = mesh_axes(mesh, AxisType.Explicit)
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    return _split(mesh, explicit, specs, call, source="their types")


def _by_caller(call: Call, sharding: Any) -> Split | None:
    """Returns the split by `sharding`, the argument `qkv_sharding`; None if it names no
    axes and there is no mesh.
    """
    mesh = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh())
    spec = getattr(sharding, "spec", sharding)
    named = [name for axes in spec for name in names_of(axes)]
    known = _known_axes("qkv_sharding", mesh, named, fix="a NamedSharding")
    if not known:
        return None
    return _split(mesh, known, [spec], call, source="qkv_sharding")


def _by_placement(call: Call) -> Split | None:
    """Returns the split of concrete query, key and value, by the devices that hold
    them.

    None if they share no mesh, the mesh has one device, or they are split in a way that
    attention does not support.
    """
    shardings: list[Any] = [x.sharding for x in call.inputs]
    if not all(isinstance(x, NamedSharding) for x in shardings):
        return None
    mesh = shardings[0].mesh
    if any(x.mesh != mesh for x in shardings) or mesh.size <= 1:
        return None
    specs = [x.spec for x in shardings]
    # The caller asked for no split, so one that does not fit is no error.
    try:
        return _split(mesh, mesh.axis_names, specs, call, source="they")
    except ValueError:
        return None


def _by_context(call: Call, context: Context) -> Split:
    """Returns the split by `context_parallel`. Batch or heads are split as in the query
    if `context` names no axes.
    """
    query: Any = call.query
    known: Any = None
    if is_explicit(query):
        known = jax.typeof(query).sharding
    elif not isinstance(query, jax.core.Tracer):
        known = query.sharding
    is_named = isinstance(known, NamedSharding)
    # The caller's mesh, or the one that is set, or the query's.
    mesh: Any = context.mesh
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty and is_named:
            mesh = known.mesh
    # The mesh axes that split each axis of the query; None: none, or unknown.
    spec: Iterable[Any] = ()
    if is_named and known.mesh.abstract_mesh == mesh.abstract_mesh:
        spec = known.spec
    *batch, _, heads, _ = pad_spec(spec, query.ndim)
    if batch and context.batch_axes:
        batch[0] = context.batch_axes
    heads = context.head_axis or heads
    named = [context.axis]
    for axes in (*batch, heads):
        named.extend(names_of(axes))
    usable = _known_axes("context_parallel", mesh, named, fix="mesh=")
    if len(set(named)) < len(named):
        raise ValueError(
            "axis, batch_axes and head_axis must be different mesh axes, but got "
            f"{tuple(named)}."
        )
    if context.batch_axes and not batch:
        raise ValueError(
            "batch_axes must be None if there is no batch axis, but got "
            f"{context.batch_axes!r}."
        )
    wanted = PartitionSpec(*batch, None, heads)
    split = _split(mesh, usable, [wanted], call, source="context_parallel")
    _check_sequences(call, context, split)
    return split._replace(context=context)


def _known_axes(argument: str, mesh: Any, named: Sequence[str], fix: str) -> list[str]:
    """Returns the mesh axes that may split arrays; raises a ValueError if `named`, the
    user's axes, contains others.

    The error names the user's `argument`; if no mesh is set, it advises to pass `fix`.
    """
    known = mesh_axes(mesh, AxisType.Auto, AxisType.Explicit)
    unknown = set(named) - set(known)
    if not unknown:
        return known
    if unknown & set(mesh_axes(mesh, AxisType.Manual)):
        have = "this axis is already Manual: call it outside jax.shard_map"
    elif known:
        have = f"the mesh has {tuple(known)}"
    else:
        have = f"no mesh is set; use jax.set_mesh, or {fix}"
    got = ", ".join(map(repr, sorted(unknown)))
    raise ValueError(f"{argument} must use mesh axis names, but got {got}; {have}.")


def _check_sequences(call: Call, context: Context, split: Split) -> None:
    """Raises a ValueError if `context_parallel` does not support a call, or its devices
    cannot split it evenly.
    """
    if call.cached:
        raise ValueError(
            "context_parallel does not support decoding, but got a cache; decode "
            "without it."
        )
    if call.key_indices is not None:
        raise ValueError(
            "context_parallel does not support key_indices, whose keys may be on any "
            "device; split batch axes and heads with qkv_sharding instead."
        )
    axis = context.axis
    devices = number_of_parts(split.mesh, axis)
    parts = devices
    twice = ""
    if context.layout == "zigzag":
        parts = 2 * devices
        twice = ' (two chunks per device with layout="zigzag")'
    for name, length in zip(("queries", "keys"), call.lengths, strict=True):
        if not isinstance(length, int) or length % parts:
            raise ValueError(
                f"the number of {name} must be a multiple of {parts}{twice} for the "
                f"{devices} devices on mesh axis {axis!r}, but got {length}; pad them, "
                "and mask the padding with lengths."
            )
    # "ulysses" also splits the heads on a device over the devices of `axis`.
    num_kv_heads = call.groups[0] // number_of_parts(split.mesh, split.key_heads)
    is_even = split.key_heads == split.heads and num_kv_heads % devices == 0
    if context.strategy == "ulysses" and not is_even:
        raise ValueError(
            'with strategy="ulysses", the number of key heads per device must be a '
            f"multiple of {devices} (the number of devices on mesh axis {axis!r}), but "
            f'got {num_kv_heads}; use "ring" or "allgather".'
        )


def _split(
    mesh: Any, manual: Iterable[str], specs: Sequence[Any], call: Call, source: str
) -> Split:
    """Makes a `Split` from three `specs` (of query, key, value) or one for all; raises
    a ValueError if they do not fit.

    `manual` becomes `Split.manual`. Errors say that `source` gave the specs.
    """
    # The different entries for each axis, of which a valid split has at most one.
    by_axis = zip(*(pad_spec(spec, call.query.ndim) for spec in specs), strict=True)
    given = [set(entries) - {None, ()} for entries in by_axis]
    got = ", ".join(map(str, specs))
    if given[-1]:
        raise ValueError(
            "the head size (the last axis of query, key and value) cannot be split, "
            f"but got {got} from {source}; split batch axes and heads, or use "
            "jax.reshard."
        )
    if any(len(x) > 1 for x in given) or given[-3]:
        raise ValueError(
            "query, key and value must be split the same way, over batch axes and "
            f"heads, but got {got} from {source}; use jax.reshard, or context_parallel "
            "to split sequences."
        )
    *batch, _, heads, _ = (next(iter(entries), None) for entries in given)
    for axis, axes in enumerate(batch):
        name = f"the size of batch axis {axis}"
        _check_multiple(name, call.batch[axis], mesh, axes)
    _check_multiple("the number of query heads", call.num_heads, mesh, heads)
    key_heads = axes_of_key_heads(heads, number_of_parts(mesh, heads), call.groups[0])
    return Split(
        mesh=mesh,
        manual=frozenset(manual),
        batch=tuple(batch),
        heads=heads,
        key_heads=key_heads,
    )


def _check_multiple(name: str, size: Any, mesh: Any, axes: Axes) -> None:
    """Raises a ValueError if the mesh axes `axes` cannot split an axis of `size`
    entries evenly.
    """
    parts = number_of_parts(mesh, axes)
    # The size may be a symbol of `jax.export`.
    if isinstance(size, int) and size % parts:
        raise ValueError(
            f"{name} must be a multiple of {parts}, the number of devices on mesh "
            f"axis {axes!r}, but got {size}; use a different mesh axis, or None."
        )


def place(x: Array, sharding: Sharding | None, num_axes: int | None = None) -> Array:
    """Places an array on a mesh by `sharding`; returns the array unchanged if
    `sharding` is None.

    `num_axes`: how many entries of the PartitionSpec to use, if the array has fewer
    axes than entries; None uses all.
    """
    if sharding is None:
        return x
    # A PartitionSpec has no mesh: the one that is set counts.
    mesh: Any = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh())
    if mesh.empty:
        raise ValueError(
            f"sharding must be a NamedSharding if no mesh is set, but got {sharding}."
        )
    spec: Any = getattr(sharding, "spec", sharding)
    target = NamedSharding(mesh, PartitionSpec(*spec[:num_axes]))
    if AxisType.Explicit in mesh.axis_types:
        return jax.reshard(x, target)
    return lax.with_sharding_constraint(x, target)


def take_entries(x: ArrayLike, indices: Array, missing: float) -> Array:
    """Returns `x[indices]` along the first axis, with `missing` in the entries whose
    index is out of range.

    On a mesh with Explicit axes, the result is split like `x`, but the first axis only
    if it still splits evenly.
    """
    x = jnp.asarray(x)
    target = None
    if is_explicit(x):
        sharding = jax.typeof(x).sharding
        first, *others = pad_spec(sharding.spec, x.ndim)
        if indices.size % number_of_parts(sharding.mesh, first):
            first = None
        target = NamedSharding(sharding.mesh, PartitionSpec(first, *others))
    return x.at[indices].get(mode="fill", fill_value=missing, out_sharding=target)


def run_on_mesh(call: Call, parts: Split, run: Callable[[Call], T]) -> T:
    """Calls `run(call)` on each device with its part of a call, split by `parts`;
    returns the whole call's result.
    """
    # Drawn for the whole call, so that every mesh drops the same weights.
    call = with_indices(call)

    def part(held: Call) -> T:
        return run(unsplit(_shared_key_head(held, call, parts)))

    specs = call.map_arrays(parts.spec)
    return parts.shard_map(part, (call,), (specs,), parts.output_spec)


def unsplit(call: Call) -> Call:
    """Returns the call with no array counted as split."""
    target = call.target._replace(may_be_split=False)
    return call.replace(sharding=None, target=target)


def _shared_key_head(part: Call, whole: Call, parts: Split) -> Call:
    """If key heads are not split, reduces `part` to the one key head that the query
    heads on this device use.

    `part` is this device's part of the call `whole`.
    """
    if parts.heads == parts.key_heads:
        return part
    _, group_size = whole.groups
    first_query_head = lax.axis_index(parts.heads) * part.num_heads
    key_head = first_query_head // group_size

    def one_head(x: Array, axes: str) -> Array:
        axis = axis_of("K", x, axes)
        if axis is None:
            return x
        return lax.dynamic_slice_in_dim(x, key_head, 1, axis)

    return part.map_arrays(one_head)


def empty_result(call: Call, parts: Split) -> Result:
    """Returns the empty result of a call without using `shard_map`, because XLA may
    fail to compile gradients of empty parts.
    """
    # No constant, so that the results are on the devices of the query.
    lse = call.query.sum(-1)
    output = jnp.broadcast_to(lse[..., None], (*lse.shape, call.value.shape[-1]))
    output = parts.reshard(output, parts.output_spec)
    lse = parts.reshard(lse, parts.output_spec).astype(call.dtype)
    largest = lse if call.return_max_score else None
    return Result(output, lse, largest)


def reorder_keys(call: Call, order: np.ndarray, and_queries: bool = False) -> Call:
    """Applies `reorder_chunks` to the key axis of every array of a call and, with
    `and_queries`, also to the query axis.
    """
    names = "ST" if and_queries else "S"

    def change(x: Array, axes: str) -> Array:
        for name in names:
            axis = axis_of(name, x, axes)
            if axis is not None:
                x = reorder_chunks(x, order, axis)
        return x

    return call.map_arrays(change)


def reorder_chunks(x: Any, order: np.ndarray, axis: int) -> Any:
    """Cuts an array into `len(order)` equal chunks, and joins them again so that chunk
    `order[i]` is the i-th.
    """
    library = np if isinstance(x, np.ndarray) else jnp
    chunks = library.split(x, len(order), axis)
    return library.concatenate([chunks[i] for i in order], axis)


def chunk_order(layout: Layout, devices: int) -> np.ndarray:
    """Lists the sequence's chunks in the order in which devices hold them: [0, 3, 1, 2]
    for "zigzag" on 2 devices.
    """
    ranks = np.arange(int_at_least("devices", devices, 1), dtype=np.int32)
    if layout == "contiguous":
        return ranks
    first = chunk_of(ranks, 0, devices)
    second = chunk_of(ranks, 1, devices)
    return np.stack([first, second], axis=1).ravel()


def chunk_of(rank: Any, number: Any, devices: int) -> Any:
    """Returns which chunk of the sequence device `rank` holds as its first (`number` 0)
    or second (`number` 1) chunk.

    Only layout "zigzag" has second chunks. There, device 0 holds the first and the last
    chunk of the sequence.
    """
    # The second chunk of device r is 2 * devices - 1 - r: causal masks leave all
    # devices about the same work.
    return rank + number * (2 * devices - 1 - 2 * rank)
