"""A call on a mesh of devices: each computes its part of the batch and of the heads, as a call of its own.

Where it is known how the call is split (`split.py`), it runs inside `jax.shard_map`. It needs no communication, unless
the sequence is split, and every implementation can compute it, fused kernels too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha.call.operands import Call, Operands, Options, Sharding, accumulation_dtype, head_ids
from flax_mha.core.sharding import axes_of_type, number_of_parts, of_every_axis
from flax_mha.core.tracing import being_traced
from flax_mha.distributed.split import Split


def by_device(function: Callable[..., Array], like: Array, axes: str, *others: tuple[Array, str]) -> Array:
    """`function(like, *others)`, each device computing its part, where the type of `like` says how it is split.

    Args:
      function: Returns an array that is split as `like` is.
      like: [B..., length, K, size].
      axes: Names of its axes, as in the field metadata of masks.
      *others: Other arrays, with the names of their axes.
    """
    mesh = jax.typeof(like).sharding.mesh
    explicit = axes_of_type(mesh, AxisType.Explicit)
    if not explicit:
        return function(like, *(x for x, _ in others))
    *batch, _, heads, _ = of_every_axis(jax.typeof(like).sharding.spec, like.ndim)
    split = Split(mesh, frozenset(explicit), tuple(batch), heads, heads)
    arrays, names = zip((like, axes), *others, strict=True)
    specs = tuple(map(split.spec, arrays, names))
    placed = [_resharded(x, split, spec) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=_manual(split), check_vma=False
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
    if axes_of_type(mesh, AxisType.Explicit):
        return jax.reshard(x, target)
    return lax.with_sharding_constraint(x, target)


def entries(x: ArrayLike, numbers: Array, missing: float) -> Array:
    """The entries of the first axis with these numbers, `missing` where there is none.

    They are split as `x` is where its type says how, but for the first axis if their number does not fit.
    """
    x, target = jnp.asarray(x), None
    sharding = jax.typeof(x).sharding
    if axes_of_type(sharding.mesh, AxisType.Explicit):
        first, *others = of_every_axis(sharding.spec, x.ndim)
        parts = number_of_parts(sharding.mesh, first)
        target = NamedSharding(sharding.mesh, PartitionSpec(None if numbers.size % parts else first, *others))
    return x.at[numbers].get(mode="fill", fill_value=missing, out_sharding=target)


def _manual(split: Split) -> frozenset[str]:
    """The mesh axes to name; without a name they are all but those that `jax.vmap` has mapped away."""
    return frozenset() if split.manual == frozenset(split.mesh.axis_names) else split.manual


def unsplit(call: Call) -> Call:
    """The same call where nothing is split, or where a device computes its own part."""
    target = call.options.target._replace(may_be_split=False)
    return call._replace(options=call.options._replace(sharding=None, target=target))


def on_mesh(call: Call, split: Split, run: Callable[[Call], Any]) -> Any:
    """`run(call)`, which returns output and log-sum-exp or None, of the part of the call that each device holds."""
    if being_traced():
        return _on_mesh(call.operands, call.options, split, run)
    return _compiled_on_mesh(call.operands, call.options, split, run)


def nothing(call: Call, split: Split) -> tuple[Array, Array]:
    """Output and log-sum-exp of no queries, of whose gradients XLA cannot always compile the parts."""
    query, features = call.operands.query, call.operands.value.shape[-1]
    lse = query.sum(-1)  # not a constant: devices that only the types of arguments name must see these
    output = jnp.broadcast_to(lse[..., None], (*lse.shape, features))
    output, lse = (_resharded(x, split, split.output_spec) for x in (output, lse))
    return output, lse.astype(accumulation_dtype(query.dtype))


def _on_mesh(operands: Operands, options: Options, split: Split, run: Callable[[Call], Any]) -> Any:
    operands = operands._replace(head_ids=head_ids(operands, options))
    leaves, structure = jax.tree.flatten(operands)
    specs = jax.tree.leaves(operands.map_arrays(split.spec), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves = [_resharded(x, split, spec) for x, spec in zip(leaves, specs, strict=True)]

    def part(*leaves: Array) -> Any:
        own = _own_keys(jax.tree.unflatten(structure, leaves), operands, split)
        return run(unsplit(Call(own, options)))

    return jax.shard_map(
        part,
        mesh=split.mesh,
        in_specs=tuple(specs),
        out_specs=(split.output_spec, split.output_spec),
        axis_names=_manual(split),
        check_vma=False,  # kernels do not say over which axes their output varies
    )(*leaves)


_compiled_on_mesh = jax.jit(_on_mesh, static_argnames=("options", "split", "run"))


def _resharded(x: Any, split: Split, spec: PartitionSpec) -> Any:
    """An array split as it is needed, where types say how arrays are split."""
    explicit = axes_of_type(split.mesh, AxisType.Explicit)
    return jax.reshard(x, NamedSharding(split.mesh, spec)) if explicit else x


def _own_keys(part: Operands, whole: Operands, split: Split) -> Operands:
    """The part with the one key head that its queries share, where devices hold all of them."""
    if split.heads == split.key_heads:
        return part
    _, size = whole.groups
    first = lax.axis_index(split.heads) * part.query.shape[-2] // size
    key, value = (lax.dynamic_slice_in_dim(x, first, 1, axis=-2) for x in (part.key, part.value))
    return part._replace(key=key, value=value)
