"""Places arrays on a mesh, and gathers entries of arrays that are split over one."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.operands import Sharding
from flax_mha._src.distributed.split import is_explicit, number_of_parts, pad_spec


def place(x: Array, sharding: Sharding | None, rank: int | None = None) -> Array:
    """Places `x` by a sharding, or by the first `rank` entries of its spec; without a sharding, returns `x`."""
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
