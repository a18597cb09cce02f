"""Runs a checked call: splits it over the devices of a mesh, then chooses an implementation for each device's part.

The parts run inside `jax.shard_map`, each as a call of its own. They need no communication unless the sequence is
split, and any implementation can compute them, fused kernels too. A call that is not split is computed as a whole.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters.partial_eval import JaxprTracer
from jax.sharding import AxisType
from jaxtyping import Array, Float

from flax_mha._src import plan as schedule
from flax_mha._src.call.operands import Call, Context, Operands, Options, Output
from flax_mha._src.core.tracing import being_traced
from flax_mha._src.distributed import ring, split
from flax_mha._src.distributed.exchange import allgather, ulysses
from flax_mha._src.distributed.split import Split
from flax_mha._src.engines import registry
from flax_mha._src.engines.kernels import fused
from flax_mha._src.engines.kernels.lower_for_platform import lower_for_platform
from flax_mha._src.engines.registry import IMPLEMENTATIONS, Explanation
from flax_mha._src.math.derivatives import linear_function
from flax_mha._src.math.head import head_ids

# Kernels that are chosen first on a platform, by published speeds: this package has not been run on a GPU or a TPU.
PREFERRED_ON = {"gpu": ["cudnn"], "tpu": ["splash"]}
# Implementations that run on every platform and have derivatives of every order. The others are kernels, to which
# `_fused_attention` adds the derivatives that they lack and, if they were chosen and not named, a call for CPUs.
PORTABLE = ("xla", "blockwise")


def run(call: Call, implementation: str | None) -> Output:
    """Computes output, log-sum-exp and, if asked for, largest score [B..., N], by the named or a chosen implementation.

    Raises:
      ValueError: If no implementation has this name.
      NotImplementedError: If the named implementation cannot compute this call.
    """
    if implementation is not None:
        registry.check_name(implementation)
    parts = split_of(call)
    if parts is None and _only_values_are_unknown(call.operands):
        return _linear_in_values(call, implementation)
    if parts is None:
        call = call if call.options.sharding is None else _unsplit(call)
        results = _attention_of(call, implementation)(call)
    elif call.options.has_known_sizes and 0 in call.operands.query.shape[:-1]:
        explain(call, implementation)  # raises the errors that computing it would raise
        results = _empty_output(call, parts)
    else:
        on_mesh = run_on_mesh if being_traced() else _compiled_on_mesh
        results = on_mesh(call.operands, call.options, parts, _run_part(implementation, parts.context))
    if not call.options.return_max_score:
        return results
    output, lse = results[:2]
    return output, lse, _max_score(lse, results[-1])


def _only_values_are_unknown(operands: Operands) -> bool:
    """Returns whether `jax.linear_transpose` is tracing a function of the values, in which attention is linear."""
    if not isinstance(operands.value, JaxprTracer):
        return False
    return sum(isinstance(x, JaxprTracer) for x in jax.tree.leaves(operands)) == 1


def _linear_in_values(call: Call, implementation: str | None) -> Output:
    """Computes `run` as one linear function of the values, whose transpose is the gradient.

    The search for NaN in values is not linear, so the operations that compute attention cannot be transposed.
    """
    value = call.operands.value
    leaves, structure = jax.tree.flatten(call.operands)
    place = next(i for i, x in enumerate(leaves) if x is value)
    others = leaves[:place] + leaves[place + 1 :]

    def attend(*leaves: Array) -> Output:
        *others, value = leaves
        operands = jax.tree.unflatten(structure, [*others[:place], value, *others[place:]])
        return run(call._replace(operands=operands), implementation)

    def transpose(others: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        _, pull = jax.vjp(lambda value: attend(*others, value)[0], jnp.zeros(value.shape, value.dtype))
        return pull(cotangents[0])

    # Log-sum-exp and largest scores do not depend on the values.
    needs_others = call.options.return_residual or call.options.return_max_score
    of_scores = attend(*others, jnp.zeros(value.shape, value.dtype))[1:] if needs_others else (None,)
    output = jax.eval_shape(attend, *others, jax.ShapeDtypeStruct(value.shape, value.dtype))[0]
    function = linear_function([output], lambda *leaves: [attend(*leaves)[0]], transpose, len(others))
    return (function(*others, value)[0], *of_scores)


@jax.jit
def _max_score(lse: Float[Array, "*B T N"], largest: Float[Array, "*B T N"]) -> Float[Array, "*B N"]:
    """Computes each head's largest score from that of each row, NaN if a row's log-sum-exp is; without a gradient."""
    lse, largest = lax.stop_gradient((lse, largest))
    largest = jnp.max(largest, axis=-2, initial=-jnp.inf)
    return jnp.where(jnp.isnan(lse).any(-2), jnp.nan, largest)  # `jnp.max` may lose NaN


def explain(call: Call, implementation: str | None) -> Explanation:
    """Explains which implementation `run` would use for the part of the call on each device, or raises its error."""
    registry.check_name(implementation)
    explanation = _explain_parts(call, implementation)
    target = call.options.target
    return explanation._replace(note=registry.ASSUMPTIONS[target.platform]) if target.assumed else explanation


def _explain_parts(call: Call, implementation: str | None) -> Explanation:
    parts, explanations = split_of(call), []
    if parts is None:
        return _explain_on_device(call if call.options.sharding is None else _unsplit(call), implementation)
    context = parts.context

    def explain_part(call: Call) -> Output:
        if context is not None and context.strategy == "ring":
            explanations.append(ring.explain(call, context, implementation))
        else:
            explanations.append(_explain_on_device(call, implementation))
        return jnp.zeros((*call.operands.query.shape[:-1], call.operands.value.shape[-1])), None

    part = _exchanging(context, explain_part)
    jax.eval_shape(lambda operands: run_on_mesh(operands, call.options, parts, part), call.operands)
    return explanations[0]


def _attention_of(call: Call, implementation: str | None) -> Callable[[Call], Output]:
    """Returns the function that computes a call on one device, by the named or a chosen implementation."""
    name, elsewhere = implementation, None
    if name is None:
        name = chosen(call)
        elsewhere = _on_cpu(call, name)
    else:
        registry.check_computes(name, registry.refusals(name, call))
    attention = IMPLEMENTATIONS[name].attention
    if name in PORTABLE:
        return attention
    return functools.partial(_fused_attention, attention, IMPLEMENTATIONS["blockwise"].attention, elsewhere)


def _fused_attention(
    kernel: Callable[[Call], Output], portable: Callable[[Call], Output], elsewhere: Call | None, call: Call
) -> Output:
    """Computes a call by `kernel`, and the derivatives that it lacks by `portable`.

    If `elsewhere` is given, programs compiled for a CPU compute that call instead; then no log-sum-exp is returned.
    """

    def of_operands(attention: Callable[[Call], Output]) -> Callable[[Operands], Output]:
        return lambda operands: attention(call._replace(operands=operands))

    def attend(operands: Operands, platform: str | None) -> Output:
        return fused.attention(of_operands(kernel), of_operands(portable), operands, platform)

    if elsewhere is None:
        return attend(call.operands, None)
    platform = call.options.target.platform

    def on_cpu(operands: Operands) -> Array:
        return run_on_device(elsewhere._replace(operands=operands))[0]

    return lower_for_platform(platform, lambda operands: attend(operands, platform)[0], on_cpu, call.operands), None


def run_on_device(call: Call, implementation: str | None = None) -> Output:
    """Computes a call on one device, by the named or a chosen implementation."""
    return _attention_of(call, implementation)(call)


def _explain_on_device(call: Call, implementation: str | None) -> Explanation:
    table = {name: registry.refusals(name, call) for name in registry.NAMES}
    if implementation is not None:
        registry.check_computes(implementation, table[implementation])
    name = chosen(call) if implementation is None else implementation
    elsewhere, variant = _on_cpu(call, name) if implementation is None else None, IMPLEMENTATIONS[name].variant
    on_cpu = None if elsewhere is None else chosen(elsewhere)
    return Explanation(name, table, on_cpu, None if variant is None else variant(call))


def chosen(call: Call) -> str:
    """Returns the name of the implementation that `implementation=None` selects on one device."""
    is_vector = call.options.has_known_sizes and call.operands.query.shape[-3] == 1
    if is_vector or schedule.blocks_in_place(call) is not None:
        return "xla"  # products of few vectors and a matrix, where nothing can be fused
    for name in PREFERRED_ON.get(call.options.target.platform, ()):
        if not registry.refusals(name, call):
            return name
    return "xla" if schedule.prefers_dense(call) else "blockwise"


def _on_cpu(call: Call, name: str) -> Call | None:
    """Returns the call with a CPU as its target, if a kernel (`name`) was chosen while tracing, else None.

    The program may still be compiled for a CPU; see `lower_for_platform.py`.
    """
    target = call.options.target
    if name in PORTABLE or target.assumed or not being_traced():
        return None
    target = target._replace(platform="cpu")
    return call._replace(options=call.options._replace(target=target))


def split_of(call: Call) -> Split | None:
    """Returns the split of a call over devices, given by the caller, by types or by concrete arrays; else None."""
    sharding, arrays = call.options.sharding, call.operands[:3]
    if isinstance(sharding, Context):
        return split.by_context(call, sharding)
    if sharding is not None:
        return split.by_caller(call, sharding)
    if any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in arrays):
        return split.by_types(call)
    if not call.options.target.may_be_split or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None  # XLA's partitioner may split what is traced
    return split.by_placement(call)


@functools.lru_cache(maxsize=64)  # returns the same function again, so that `jit` does not compile again
def _run_part(implementation: str | None, context: Context | None) -> Callable[[Call], Output]:
    if context is not None and context.strategy == "ring":
        return functools.partial(ring.ring_attention, context=context, implementation=implementation)
    return _exchanging(context, functools.partial(run_on_device, implementation=implementation))


def _exchanging(context: Context | None, attend: Callable[[Call], Output]) -> Callable[[Call], Output]:
    """Wraps `attend`, for one device, in the communication of "ulysses" or "allgather"; else returns `attend`."""
    if context is None or context.strategy == "ring":
        return attend
    strategy = ulysses if context.strategy == "ulysses" else allgather
    return functools.partial(strategy, context=context, attend=attend)


def run_on_mesh(operands: Operands, options: Options, parts: Split, run: Callable[[Call], Any]) -> Any:
    """Computes `run(call)`, which returns output and log-sum-exp, on each device for its part of the call."""
    operands = operands._replace(head_ids=head_ids(operands, options))
    leaves, structure = jax.tree.flatten(operands)

    def part(*leaves: Array) -> Any:
        held = _shared_key_head(jax.tree.unflatten(structure, leaves), operands, parts)
        return run(_unsplit(Call(held, options)))

    mapped, leaves = parts.shard_map(part, leaves, operands.axis_names(), parts.output_spec)
    return mapped(*leaves)


_compiled_on_mesh = jax.jit(run_on_mesh, static_argnames=("options", "parts", "run"))


def _unsplit(call: Call) -> Call:
    """Returns the call, marked as one whose arrays are on one device."""
    options = call.options
    return call._replace(options=options._replace(sharding=None, target=options.target._replace(may_be_split=False)))


def _shared_key_head(part: Operands, whole: Operands, parts: Split) -> Operands:
    """Removes the key heads that a device's query heads do not use from `part`, its part of the operands `whole`.

    If key heads are not split, every device has all of them, but its query heads share one. Else returns `part`.
    """
    if parts.heads == parts.key_heads:
        return part
    group_size = whole.query.shape[-2] // whole.key.shape[-2]
    first = lax.axis_index(parts.heads) * part.query.shape[-2] // group_size
    arrays = part.key, part.value, part.cache_scale
    key, value, scale = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, 1, axis=-2), arrays)
    return part._replace(key=key, value=value, cache_scale=scale)


def _empty_output(call: Call, parts: Split) -> tuple[Array, Array]:
    """Returns output and log-sum-exp of a call without queries: XLA cannot always compile gradients of empty parts."""
    query, value = call.operands.query, call.operands.value
    lse = query.sum(-1)  # no constant, so that the results are on the devices of the query
    output = jnp.broadcast_to(lse[..., None], (*lse.shape, value.shape[-1]))
    output, lse = (parts.reshard(x, parts.output_spec) for x in (output, lse))
    return output, lse.astype(call.options.dtype)
