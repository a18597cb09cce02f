"""Ring attention, the strategy "ring" for a sequence that is split over devices; `hops.py` has its loops.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889. Each of N devices
keeps its queries, and sends keys and values around the ring in N hops. The tangent is one more pass around the ring,
and so is its transpose, the backward pass. Derivatives of higher order are those of these passes, by JAX.

No hop is skipped: keys and values travel N times, whatever the mask. All devices run one program, so the positions of a
hop's keys are data, and its block mask is made at run time; tiles that are masked throughout are not computed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src.call.operands import Call, Context, Operands, OutputAndLse
from flax_mha._src.distributed import hops, slices
from flax_mha._src.distributed.hops import Ring
from flax_mha._src.engines import registry
from flax_mha._src.engines.engine import name_residuals
from flax_mha._src.engines.registry import IMPLEMENTATIONS, Explanation
from flax_mha._src.math.derivatives import Function, linear_function


def ring_attention(call: Call, context: Context, implementation: str | None) -> OutputAndLse:
    """Computes output and log-sum-exp of a device's part of a call, inside `jax.shard_map`.

    Raises:
      NotImplementedError: If the named implementation cannot compute the hops.
    """
    if implementation is not None:
        registry.check_computes(implementation, _refusals(implementation, _first_slice(call, context)))
    operands, (ring, inner) = call.operands, _ring_of(call, context, implementation or hops.DEFAULT)
    output, lse, *largest = _results(ring, inner)
    if operands.sinks is not None:
        output, lse = _with_sinks(output, lse, operands.sinks[..., None, :].astype(lse.dtype))
    return output.astype(operands.query.dtype), lse, *largest


def explain(call: Call, context: Context, implementation: str | None) -> Explanation:
    """Explains which implementation computes the hops, and why the others cannot compute the first of them."""
    first = _first_slice(call, context)
    table = {name: _refusals(name, first) for name in registry.NAMES}
    if implementation is not None:
        registry.check_computes(implementation, table[implementation])
    return Explanation(implementation or hops.DEFAULT, table)


def _first_slice(call: Call, context: Context) -> Call:
    ring, operands = _ring_of(call, context, hops.DEFAULT)
    return ring.slice(operands, lax.axis_index(ring.axis), 0, 0)._replace(options=call.options)


def _refusals(name: str, call: Call) -> list[str]:
    """Lists why the implementation with this name cannot compute the hops of a ring; `call` is the first hop."""
    if IMPLEMENTATIONS[name].hop is None:
        known = " and ".join(f'"{name}"' for name in registry.NAMES if IMPLEMENTATIONS[name].hop is not None)
        return [
            f'only {known} can differentiate a single step of strategy="ring": pass strategy="ulysses" or "allgather"'
        ]
    return registry.refusals(name, call)


def _ring_of(call: Call, context: Context, implementation: str) -> tuple[Ring, Operands]:
    """Makes the ring, and the operands of its hops: those of the call without sinks and `dropout_rng`.

    Sinks are added after the last hop, and `head_ids` holds the random words already.
    """
    operands = call.operands._replace(sinks=None, dropout_rng=None)
    ring = Ring(
        axis=context.axis,
        size=lax.axis_size(context.axis),
        chunks=2 if context.layout == "zigzag" else 1,
        axes=slices.sequence_axes(operands),
        options=call.options._replace(return_residual=True),
        dtype=operands.query.dtype,
        implementation=implementation,
    )
    return ring, operands


def _with_sinks(output: Array, lse: Array, sinks: Float[Array, "*B 1 N"]) -> tuple[Array, Array]:
    """Adds sinks, one score per head without a value, to the softmax behind output and log-sum-exp; returns both."""
    # Rows that are NaN, or have neither a visible score nor a sink, stay as they are and have no gradient.
    proper = (lse < jnp.inf) & ((lse > -jnp.inf) | (sinks > -jnp.inf))
    a, b = (jnp.where(proper, x, jnp.zeros_like(x)) for x in (lse, jnp.broadcast_to(sinks, lse.shape)))
    share = jnp.where(proper, jax.nn.sigmoid(a - b), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, jnp.logaddexp(a, b), lse)


def _results(ring: Ring, operands: Operands) -> Any:
    """Computes `hops.merge_hops` as one operation, whose derivatives are `hops.tangents` and `hops.gradients`."""
    leaves, structure = jax.tree.flatten(operands)
    rows, dtype = operands.query.shape[:-1], ring.options.dtype
    shapes = (*rows, operands.value.shape[-1]), *(rows for _ in range(1 + ring.options.return_max_score))

    def evaluate(*arguments: Any) -> OutputAndLse:
        return hops.merge_hops(ring, jax.tree.unflatten(structure, arguments))

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        output, lse, *largest = attend(*arguments)
        result = name_residuals(output, lse)
        d_arguments = [tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(arguments)]
        operands, d_operands = (jax.tree.unflatten(structure, x) for x in (arguments, d_arguments))
        without_max = ring._replace(options=ring.options._replace(return_max_score=False))  # it has no tangent
        tangent = _linear(hops.tangents, without_max, operands, result, hops.trainable_of(d_operands))
        return [*result, *largest], [*tangent, *(None for _ in largest)]

    attend = Function([jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], evaluate, jvp)
    return attend(*leaves)


def _linear(compute: Callable, ring: Ring, operands: Operands, known: OutputAndLse, linear: Any) -> list[Array]:
    """Returns the leaves of `compute(ring, operands, known, linear)`, as one operation that JAX can transpose.

    `compute` is `hops.tangents`, or its transpose `hops.gradients`; `linear` are the tangents or cotangents.
    """
    leaves, residuals = jax.tree.flatten((operands, known))
    linear_leaves, structure = jax.tree.flatten(linear)
    like, results = jax.tree.flatten(known if compute is hops.tangents else hops.trainable_of(operands))
    first = len(leaves)

    def evaluate(ring: Ring, *arguments: Any) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, arguments[:first])
        return jax.tree.leaves(compute(ring, operands, known, jax.tree.unflatten(structure, arguments[first:])))

    def transpose(residual_leaves: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, residual_leaves)
        other = hops.gradients if compute is hops.tangents else hops.tangents
        return _linear(other, ring, operands, known, jax.tree.unflatten(results, cotangents))

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    here, portable = (functools.partial(evaluate, x) for x in (ring, ring.portable))
    return linear_function(outputs, here, transpose, first, portable)(*leaves, *linear_leaves)
