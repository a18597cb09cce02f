"""Tensor parallelism: each device holds the parameters of some heads; the output
projection sums over the devices.

Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import struct
from flax.core import spmd
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from flax_mha._src.core.tracing import names_of, number_of_parts
from flax_mha._src.distributed.split import axes_of_key_heads, is_explicit, pad_spec

Names = tuple[str | None, ...]


def parameter_names(
    head_axis: str, num_heads: int, num_kv_heads: int
) -> dict[str, Names]:
    """Returns names for the axes of each parameter, for Flax's metadata: `head_axis`
    for heads, None for all others.

    The entries "query" and "key" (for keys and values) name the axes of kernels
    [features, heads, H]; a bias lacks the first axis. "key" also names the last axes of
    a cache [B..., S, K, H]. With fewer key heads than devices, all names in "key" are
    None.
    """
    axes = mesh_axis(head_axis)
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1
    if not mesh.empty:
        if not set(names_of(axes)) <= set(mesh.shape):
            raise ValueError(
                f"head_axis must be an axis of the mesh {tuple(mesh.axis_names)}, or a "
                f"logical axis with a rule, but got {head_axis!r}; set rules with "
                "flax.linen.logical_axis_rules."
            )
        parts = number_of_parts(mesh, axes)
    if num_heads % parts:
        raise ValueError(
            f"the size of head_axis must divide num_heads ({num_heads}), but "
            f"{head_axis!r} has {parts} devices; use a different mesh axis."
        )
    kv_axis = axes_of_key_heads(head_axis, parts, num_kv_heads)
    return {
        "query": (None, head_axis, None),
        "key": (None, kv_axis, None),
        "out": (head_axis, None, None),
        "out_bias": (None,),
        "sinks": (head_axis,),
        "head_gate": (None, head_axis),
    }


def mesh_axis(head_axis: str) -> Any:
    """Translates a logical axis to mesh axes by Flax's current rules; returns
    `head_axis` itself if it has no rule.
    """
    for logical, mesh_axes in spmd.get_logical_axis_rules():
        if logical == head_axis:
            return mesh_axes
    return head_axis


def boxed(init: Callable[..., Any], head_axis: str, names: Names) -> Callable[..., Any]:
    """Wraps an initializer of Flax linen so that it returns the parameter in a box with
    the names of its axes.

    The names are mesh axes or, if Flax has a rule for `head_axis`, logical axes.
    """
    has_rule = mesh_axis(head_axis) != head_axis
    box = LogicalBox if has_rule else Box
    return lambda *arguments: box(init(*arguments), names)


class _Unboxing:
    """A mixin whose `unbox` shards the parameter, unless it is a flat kernel that
    `DenseGeneral` will reshape.
    """

    value: Any
    names: Names

    def unbox(self, apply_constraint: bool = True) -> Any:
        is_flat = np.ndim(self.value) != len(self.names)
        is_placed = apply_constraint and not is_flat
        mesh = jax.sharding.get_abstract_mesh()
        # On Explicit axes, Flax's sharding constraint would only assert the sharding.
        if is_placed and AxisType.Explicit in mesh.axis_types:
            axes = [name and mesh_axis(name) for name in self.names]
            return jax.reshard(self.value, PartitionSpec(*axes))
        return super().unbox(is_placed)  # type: ignore[misc]


@struct.dataclass
class Box(_Unboxing, nn.Partitioned):
    """A parameter boxed with the mesh axes that split its axes."""


@struct.dataclass
class LogicalBox(_Unboxing, nn.LogicallyPartitioned):
    """A parameter boxed with logical axes, which Flax's rules map to mesh axes."""


def sharding_of_product(
    lhs: Array, rhs: Array, dimension_numbers: jax.lax.DotDimensionNumbers
) -> NamedSharding:
    """Returns the `out_sharding` that a `lax.dot_general` over split axes needs; other
    axes stay split as they are.
    """
    (lhs_sums, rhs_sums), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_sharding = jax.typeof(lhs).sharding
    rhs_sharding = jax.typeof(rhs).sharding
    left = pad_spec(lhs_sharding.spec, lhs.ndim)
    right = pad_spec(rhs_sharding.spec, rhs.ndim)
    # A product has the batch axes, then the other axes of lhs, then those of rhs.
    batch = [left[axis] for axis in lhs_batch]
    rows = _without(left, (*lhs_sums, *lhs_batch))
    columns = _without(right, (*rhs_sums, *rhs_batch))
    mesh = lhs_sharding.mesh if is_explicit(lhs) else rhs_sharding.mesh
    return NamedSharding(mesh, PartitionSpec(*batch, *rows, *columns))


def _without(parts: tuple[Any, ...], axes: tuple[int, ...]) -> list[Any]:
    """Returns the entries of a PartitionSpec for all axes but `axes`."""
    return [part for axis, part in enumerate(parts) if axis not in axes]
