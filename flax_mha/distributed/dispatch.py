"""Computes or explains a call: as a whole, or on each device of a mesh its part, if the split is known (`split.py`).

The parts run inside `jax.shard_map`, each as a call of its own. They need no communication, unless the sequence is
split, and every implementation can compute them, fused kernels too.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_mha.call.operands import Call, Context, Operands, Options, Output, accumulation_dtype, head_ids
from flax_mha.core.tracing import being_traced
from flax_mha.distributed import ring
from flax_mha.distributed.exchange import allgather, ulysses
from flax_mha.distributed.split import Split, split_of
from flax_mha.impl import registry
from flax_mha.impl.registry import Explanation


def run(call: Call, implementation: str | None) -> Output:
    """Computes output and log-sum-exp of a call by the implementation that is named or chosen.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    registry.check_name(implementation)
    split = split_of(call)
    if split is None:
        return registry.run(call if call.options.sharding is None else _unsplit(call), implementation)
    if call.options.has_known_sizes and 0 in call.operands.query.shape[:-1]:
        explain(call, implementation)  # raises what computing it would raise
        return _empty_output(call.operands, split)
    on_mesh = run_on_mesh if being_traced() else _compiled_on_mesh
    return on_mesh(call.operands, call.options, split, _run_part(implementation, split.context))


@functools.lru_cache(maxsize=64)  # equal functions are the same, so that nothing is compiled again
def _run_part(implementation: str | None, context: Context | None) -> Callable[[Call], Output]:
    if context is not None and context.strategy == "ring":
        return functools.partial(ring.ring_attention, context=context, implementation=implementation)
    return _exchanging(context, functools.partial(registry.run, implementation=implementation))


def _exchanging(context: Context | None, attend: Callable[[Call], Output]) -> Callable[[Call], Output]:
    """Puts the exchanges of "ulysses" or "allgather" around `attend`."""
    if context is None:
        return attend
    strategy = ulysses if context.strategy == "ulysses" else allgather
    return functools.partial(strategy, context=context, attend=attend)


def explain(call: Call, implementation: str | None) -> Explanation:
    """Explains which implementation `run` would use for the part of the call on each device, and why.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    registry.check_name(implementation)
    split, explanations = split_of(call), []
    if split is None:
        return registry.explain(call if call.options.sharding is None else _unsplit(call), implementation)
    context = split.context

    def explain_part(call: Call) -> Output:
        explanations.append(registry.explain(call, implementation))
        return jnp.zeros((*call.operands.query.shape[:-1], call.operands.value.shape[-1])), None

    def explain_ring(call: Call) -> Output:
        assert context is not None
        explanations.append(ring.explain(call, context, implementation))
        return call.operands.query, None

    part = explain_ring if context and context.strategy == "ring" else _exchanging(context, explain_part)
    jax.eval_shape(lambda operands: run_on_mesh(operands, call.options, split, part), call.operands)
    return explanations[0]


def run_on_mesh(operands: Operands, options: Options, split: Split, run: Callable[[Call], Any]) -> Any:
    """Computes `run(call)`, output and log-sum-exp or None, of the part of the call that each device holds."""
    operands = operands._replace(head_ids=head_ids(operands, options))
    leaves, structure = jax.tree.flatten(operands)

    def part(*leaves: Array) -> Any:
        own = _shared_key_head(jax.tree.unflatten(structure, leaves), operands, split)
        return run(_unsplit(Call(own, options)))

    mapped, leaves = split.shard_map(part, leaves, operands.axis_names(), split.output_spec)
    return mapped(*leaves)


_compiled_on_mesh = jax.jit(run_on_mesh, static_argnames=("options", "split", "run"))


def _unsplit(call: Call) -> Call:
    """Marks a call whose arrays are on one device."""
    options = call.options
    return call._replace(options=options._replace(sharding=None, target=options.target._replace(may_be_split=False)))


def _shared_key_head(part: Operands, whole: Operands, split: Split) -> Operands:
    """Selects the one key head that a part's queries share, if every device holds all key heads."""
    if split.heads == split.key_heads:
        return part
    _, group_size = whole.groups
    first = lax.axis_index(split.heads) * part.query.shape[-2] // group_size
    key, value = (lax.dynamic_slice_in_dim(x, first, 1, axis=-2) for x in (part.key, part.value))
    return part._replace(key=key, value=value)


def _empty_output(operands: Operands, split: Split) -> tuple[Array, Array]:
    """Returns output and log-sum-exp of no queries; XLA cannot always compile the gradients of empty parts."""
    query = operands.query
    lse = query.sum(-1)  # not a constant: devices that only the types of arguments name must see these
    output = jnp.broadcast_to(lse[..., None], (*lse.shape, operands.value.shape[-1]))
    output, lse = (split.reshard(x, split.output_spec) for x in (output, lse))
    return output, lse.astype(accumulation_dtype(query.dtype))
