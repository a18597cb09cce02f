"""`jax.vmap` on a mesh with Explicit axes."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from flax_mha.core.tracing import T


def by_mapped_axis(function: Callable[..., T], operands: tuple, is_batched: tuple) -> T:
    """Calls `function(*operands)`, on each device with its part of a `jax.vmap` axis that types say is split.

    Args:
      function: Returns arrays with this axis first.
      operands: Pytrees of arrays.
      is_batched: For each array True if its first axis is the mapped one.
    """
    leaves = [x for x, batched in zip(*map(jax.tree.leaves, (operands, is_batched)), strict=True) if batched]
    shardings = [jax.typeof(x).sharding for x in leaves]
    first = next((x.spec[0] for x in shardings if not x.mesh.empty and len(x.spec) and x.spec[0] is not None), None)
    if first is None:
        return function(*operands)
    mesh = shardings[0].mesh

    def reshard(x: Array, batched: bool) -> Array:
        return jax.reshard(x, jax.NamedSharding(mesh, jax.P(first, *jax.typeof(x).sharding.spec[1:]))) if batched else x

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(lambda batched: jax.P(first) if batched else jax.P(), is_batched),
        out_specs=jax.P(first),
        axis_names=frozenset((first,) if isinstance(first, str) else first),
        check_vma=False,
    )(*jax.tree.map(reshard, operands, is_batched))
