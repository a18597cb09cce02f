"""Where a call is computed: as it is, or on each device of a mesh its part, where it is known how that splits it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flax_mha.call.context import Context
from flax_mha.call.operands import Call, Output
from flax_mha.distributed import exchange, ring
from flax_mha.distributed.mesh import nothing, on_mesh, unsplit
from flax_mha.distributed.split import split_of
from flax_mha.impl import registry
from flax_mha.impl.registry import IMPLEMENTATIONS, Explanation


def run(call: Call, implementation: str | None) -> Output:
    """Output and log-sum-exp of a call, by the implementation that is named or chosen.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    registry.check_name(implementation)
    split = split_of(call)
    if split is None:
        return registry.run(_whole(call), implementation)
    if call.options.has_known_sizes and 0 in call.operands.query.shape[:-1]:
        explain(call, implementation)  # raises what computing it would raise
        return nothing(call, split)
    return on_mesh(call, split, _run_part(implementation, split.context))


@functools.lru_cache(maxsize=64)  # equal ones are the same, so that nothing is compiled again
def _run_part(implementation: str | None, context: Context | None) -> Callable[[Call], Output]:
    attend = functools.partial(registry.run, implementation=implementation)
    if context is None:
        return attend
    if context.strategy == "ring":
        return functools.partial(_run_ring, context=context, implementation=implementation)
    return _exchanging(context, attend)


def _exchanging(context: Context, attend: Callable[[Call], Output]) -> Callable[[Call], Output]:
    strategy = exchange.ulysses if context.strategy == "ulysses" else exchange.all_gathered
    return functools.partial(strategy, context=context, attend=attend)


def _run_ring(call: Call, context: Context, implementation: str | None) -> Output:
    name = implementation or DEFAULT_HOP
    if implementation is not None:
        registry.check_computes(name, _hop_refusals(name, ring.first_part(call, context.axis, context.chunks)))
    hop = IMPLEMENTATIONS[name]().hop
    assert hop is not None
    return ring.ring_attention(
        call, context.axis, context.chunks, functools.partial(hop, dtype=call.operands.query.dtype)
    )


DEFAULT_HOP = "blockwise"


def _hop_refusals(name: str, call: Call) -> list[str]:
    """Why this implementation cannot compute the parts of a ring, of which this is one."""
    if IMPLEMENTATIONS[name]().hop is None:
        known = " and ".join(f'"{name}"' for name, get in IMPLEMENTATIONS.items() if get().hop is not None)
        return [f'with strategy="ring", only {known} compute the gradient of a hop from the merged result']
    return registry.refusals(name, call)


def _whole(call: Call) -> Call:
    """A call without a known split; the caller may have said that there is none."""
    return call if call.options.sharding is None else unsplit(call)


def explain(call: Call, implementation: str | None) -> Explanation:
    """What `run` would do, of the part of the call that each device computes, and why.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    registry.check_name(implementation)
    split, explanations = split_of(call), []
    if split is None:
        return registry.explain(_whole(call), implementation)

    def explain_part(call: Call) -> Output:
        explanations.append(registry.explain(call, implementation))
        return jnp.zeros((*call.operands.query.shape[:-1], call.operands.value.shape[-1])), None

    def explain_ring(call: Call, context: Context) -> Output:
        first = ring.first_part(call, context.axis, context.chunks)
        explanations.append(_explain_hop(first, implementation))
        return first.operands.query, None

    part: Callable[[Call], Output] = explain_part
    if split.context is not None and split.context.strategy == "ring":
        part = functools.partial(explain_ring, context=split.context)
    elif split.context is not None:
        part = _exchanging(split.context, explain_part)
    jax.eval_shape(lambda operands: on_mesh(call._replace(operands=operands), split, part), call.operands)
    return explanations[0]


def _explain_hop(call: Call, implementation: str | None) -> Explanation:
    table = {name: _hop_refusals(name, call) for name in IMPLEMENTATIONS}
    if implementation is not None:
        registry.check_computes(implementation, table[implementation])
    return Explanation(implementation or DEFAULT_HOP, table)
