"""Runs the parts of a call on the devices of a mesh; places arrays on a mesh, and gathers entries of split arrays.

The parts run inside `jax.shard_map`, each as a call of its own. They need no communication unless the sequence is
split, and any engine can compute them, fused kernels too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.operands import Call, Operands, Options, Result, Sharding
from flax_mha._src.distributed.split import Split, is_explicit, number_of_parts, pad_spec
from flax_mha._src.math.head import head_ids


def place(x: Array, sharding: Sharding | None, rank: int | None = None) -> Array:
    """Places `x` by a sharding, or by the first `rank` entries of its spec, if there is a sharding."""
    if sharding is None:
        return x
    mesh: Any = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh())
    if mesh.empty:
        raise ValueError(f"sharding must be a NamedSharding if no mesh is set, but got {sharding}.")
    spec: Any = getattr(sharding, "spec", sharding)
    target = NamedSharding(mesh, PartitionSpec(*spec[:rank]))
    if AxisType.Explicit in mesh.axis_types:
        return jax.reshard(x, target)
    return lax.with_sharding_constraint(x, target)


def take_entries(x: ArrayLike, numbers: Array, missing: float) -> Array:
    """Gathers the entries of `x` at the indices `numbers` of its first axis; `missing` for indices out of range.

    On a mesh with Explicit axes, the result is split like `x`, but along the first axis only if its length allows it.
    """
    x, target = jnp.asarray(x), None
    if is_explicit(x):
        sharding = jax.typeof(x).sharding
        first, *others = pad_spec(sharding.spec, x.ndim)
        parts = number_of_parts(sharding.mesh, first)
        target = NamedSharding(sharding.mesh, PartitionSpec(None if numbers.size % parts else first, *others))
    return x.at[numbers].get(mode="fill", fill_value=missing, out_sharding=target)


def run_on_mesh(operands: Operands, options: Options, parts: Split, run: Callable[[Call], Any]) -> Any:
    """Computes `run(call)`, which returns output and log-sum-exp, on each device for its part of the call."""
    operands = operands._replace(head_ids=head_ids(operands, options))
    leaves, structure = jax.tree.flatten(operands)

    def part(*leaves: Array) -> Any:
        held = _shared_key_head(jax.tree.unflatten(structure, leaves), operands, parts)
        return run(unsplit(Call(held, options)))

    mapped, leaves = parts.shard_map(part, leaves, operands.axis_names(), parts.output_spec)
    return mapped(*leaves)


def unsplit(call: Call) -> Call:
    """Returns the call, marked as one whose arrays are on one device."""
    options = call.options
    return call._replace(options=options._replace(sharding=None, target=options.target._replace(may_be_split=False)))


def _shared_key_head(part: Operands, whole: Operands, parts: Split) -> Operands:
    """Returns `part`, a device's part of `whole`; if key heads are not split, with the one that its queries use."""
    if parts.heads == parts.key_heads:
        return part
    group_size = whole.query.shape[-2] // whole.key.shape[-2]
    first = lax.axis_index(parts.heads) * part.query.shape[-2] // group_size
    arrays = part.key, part.value, part.cache_scale
    key, value, scale = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, 1, axis=-2), arrays)
    return part._replace(key=key, value=value, cache_scale=scale)


def empty_result(call: Call, parts: Split) -> Result:
    """Returns the result of a call without queries: XLA cannot always compile gradients of empty parts."""
    query, value = call.operands.query, call.operands.value
    lse = query.sum(-1)  # no constant, so that the results are on the devices of the query
    output = jnp.broadcast_to(lse[..., None], (*lse.shape, value.shape[-1]))
    output, lse = (parts.reshard(x, parts.output_spec) for x in (output, lse))
    lse = lse.astype(call.options.dtype)
    return Result(output, lse, lse if call.options.return_max_score else None)
