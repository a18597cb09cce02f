"""Lets `jax.vmap` and XLA's partitioner split a kernel that runs on one device, by
batch and heads.

XLA gathers the operands of a custom operation.
`jax.experimental.custom_partitioning` declares that its batch entries and heads are
independent. `jax.vmap` adds leading axes, which each device folds into its batch: XLA
would gather an axis that is folded before.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array

from flax_mha._src.core.tracing import manual_axes, names_of, number_of_parts


def partitioned(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    may_be_split: bool = False,
) -> Callable[..., list[Array]]:
    """Returns `function` as an operation that `jax.vmap` calls once for all mapped
    calls, and that XLA's partitioner splits if `may_be_split`.

    `inputs` and `outputs` name the axes of each array, as in "B T N H". The batch "B"
    is the first axis of all arrays, "N" and "K" are heads of queries and of keys, and
    devices get all of the other axes. Arrays are split like the first that is, but no
    axis is split that devices do not divide, in any array in which it is longer than 1.
    If an output has size 1 along a split axis, it is the sum over its parts.

    "#B" marks arrays that may have one entry for the whole batch. Under `jax.vmap`,
    all others are broadcast.

    `function` reads sizes from its arguments, holds no arrays, and is not
    differentiated.
    """

    def folded(*arrays: Array) -> list[Array]:
        """Folds leading axes into the batch, calls the function, and unfolds them. A
        leading axis has size 1 if an array is not mapped.
        """
        leading = arrays[0].ndim - len(inputs[0].split())
        if leading == 0:
            return list(function(*arrays))
        end = leading + 1
        batch = jnp.broadcast_shapes(*(x.shape[:end] for x in arrays))
        # An output with "#B" belongs to an input with "#B". If the batch shares it, it
        # is a sum over the batch, but not over the leading axes.
        has_sums = any("#B" in axes for axes in outputs)
        is_summed = False
        flat = []
        for x, axes in zip(arrays, inputs, strict=True):
            may_share = "#B" in axes
            is_summed = is_summed or (may_share and x.shape[leading] == 1)
            shares = may_share and not has_sums and math.prod(x.shape[:end]) == 1
            if not shares:
                x = jnp.broadcast_to(x, (*batch, *x.shape[end:]))
            flat.append(x.reshape(-1, *x.shape[end:]))
        results = []
        for x, axes in zip(function(*flat), outputs, strict=True):
            x = x.reshape(*batch, *x.shape[1:])
            if "#B" in axes and is_summed:
                x = x.sum(leading, keepdims=True)
            results.append(x)
        return results

    def mesh_axes_of(mesh: Any, arguments: Any, results: Any) -> dict[str, tuple]:
        """Maps axes to the mesh axes that split them: those that split it in the first
        input in which any do, if they divide it in all arrays.
        """
        split: dict[str, tuple] = {}
        for x, axes in zip(arguments, inputs, strict=True):
            for (axis, _), by in zip(_sizes(x, axes), x.sharding.spec, strict=True):
                names = names_of(by)
                is_free = set(names).isdisjoint(itertools.chain(*split.values()))
                if names and is_free and axis != "whole":
                    split.setdefault(axis, names)
        arrays = (*arguments, *results)
        for x, axes in zip(arrays, (*inputs, *outputs), strict=True):
            for axis, size in _sizes(x, axes):
                if size > 1 and size % number_of_parts(mesh, split.get(axis)):
                    del split[axis]
        return split

    def shardings_of_results(mesh: Any, arguments: Any, results: Any) -> list:
        split = mesh_axes_of(mesh, arguments, results)
        return _shardings(mesh, split, results, outputs)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        """Returns what one device computes, and the shardings of results and arguments,
        in the form that JAX expects.
        """
        split = mesh_axes_of(mesh, arguments, results)

        def of_device(*arrays: Array) -> list[Array]:
            found = []
            own = folded(*arrays)
            for x, like, axes in zip(own, results, outputs, strict=True):
                sums: list[str] = []
                for axis, size in _sizes(like, axes):
                    if size == 1:
                        sums.extend(split.get(axis, ()))
                found.append(lax.psum(x, tuple(sums)) if sums else x)
            return found

        of_results = _shardings(mesh, split, results, outputs)
        of_arguments = tuple(_shardings(mesh, split, arguments, inputs))
        return mesh, of_device, of_results, of_arguments

    def rule(_: Any, arguments: Any, results: Any) -> Any:
        """Makes Shardy's rule: axes with the same name and size are split alike."""
        numbers = itertools.count()
        whole = []

        def factors(x: Any, axes: str) -> str:
            found = []
            for axis, size in _sizes(x, axes):
                factor = f"{axis}of{size}"
                if axis == "whole" or size == 1:
                    factor += f"and{next(numbers)}"
                if axis == "whole":
                    whole.append(factor)
                found.append(factor)
            return " ".join(found)

        left = ", ".join(map(factors, arguments, inputs))
        right = ", ".join(map(factors, results, outputs))
        return f"{left} -> {right}", {"need_replication_factors": tuple(whole)}

    def operation(*arrays: Array) -> list[Array]:
        # Inside `jax.shard_map` of some mesh axes, JAX does not tell how the others
        # split an array. Then XLA gathers.
        run: Any = folded
        if may_be_split and not manual_axes():
            run = custom_partitioning(folded)
            run.def_partition(
                partition,
                # Only for XLA's partitioner before Shardy.
                infer_sharding_from_operands=shardings_of_results,
                sharding_rule=rule,
            )
        run = custom_vmap(run)

        @run.def_vmap
        def mapped(_: int, is_mapped: list[bool], *arrays: Array) -> Any:
            pairs = zip(arrays, is_mapped, strict=True)
            results = operation(*(x if flag else x[None] for x, flag in pairs))
            return results, [True] * len(results)

        return run(*arrays)

    return operation


def _shardings(
    mesh: Any, split: dict[str, tuple], arrays: Any, names: Sequence[str]
) -> list[jax.NamedSharding]:
    found = []
    for x, axes in zip(arrays, names, strict=True):
        by = [split.get(axis) if size > 1 else None for axis, size in _sizes(x, axes)]
        found.append(jax.NamedSharding(mesh, jax.P(*by)))
    return found


def _sizes(x: Any, axes: str) -> list[tuple[str, int]]:
    """Lists names and sizes of an array's axes: numbered leading axes, "B", "N" for all
    heads, and "whole" for axes that are not split.
    """
    known = {"B": "B", "#B": "B", "N": "N", "#N": "N", "K": "N"}
    last = [known.get(axis, "whole") for axis in axes.split()]
    leading = [f"leading{i}" for i in range(len(x.shape) - len(last))]
    return list(zip(leading + last, x.shape, strict=True))
