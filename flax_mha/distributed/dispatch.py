"""Which implementation computes a call: what each refuses, and which is fastest."""

import functools
import importlib
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha.call.context import Context
from flax_mha.call.operands import Call, Operands
from flax_mha.core.tracing import being_traced
from flax_mha.distributed import exchange, ring
from flax_mha.distributed.mesh import nothing, on_mesh, unsplit
from flax_mha.distributed.split import split_of
from flax_mha.impl import xla
from flax_mha.impl.lower_for_platform import on_platform
from flax_mha.impl.shared import schedule

Implementation = Literal["xla", "blockwise", "cudnn", "splash", "pallas"]
NAMES: tuple[str, ...] = get_args(Implementation)
FUSED = ("cudnn", "splash")
OF_HOPS = ("blockwise", "pallas")  # given the result of a whole ring, they compute the gradients of a hop
Output = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"] | None]


class Explanation(NamedTuple):
    """What `explain_implementation` returns; `print` shows it as a table.

    Attributes:
      chosen: The implementation that computes the call.
      refusals: For each implementation the reasons why it cannot run; none where it can.
      on_cpu: What computes the call instead if the program that is being traced is compiled for a CPU; None if the
        same.
    """

    chosen: str
    refusals: dict[str, list[str]]
    on_cpu: str | None = None

    def __str__(self) -> str:
        """A line for each implementation, and one for each further reason."""
        lines = []
        for name, reasons in self.refusals.items():
            verdict = "chosen" if name == self.chosen else "would run"
            verdict = "chosen if compiled for a CPU" if name == self.on_cpu else verdict
            lines.append(f"{name:<9}  {'no: ' + reasons[0] if reasons else verdict}")
            lines += [f"{'':<9}      {reason}" for reason in reasons[1:]]
        return "\n".join(lines)


class _Implementation(NamedTuple):
    refusals: Callable[[Call], list[str]]
    attention: Callable[[Call], Output]


def _implementation(name: str) -> _Implementation:
    """Accelerators' files are imported when they are asked for, not before: Pallas takes its time."""
    if name == "cudnn":
        cudnn = importlib.import_module("flax_mha.impl.cudnn")
        return _Implementation(cudnn.refusals, cudnn.cudnn_attention)
    if name == "splash":
        splash = importlib.import_module("flax_mha.impl.splash")
        return _Implementation(splash.refusals, splash.splash_attention)
    if name == "pallas":
        pallas = importlib.import_module("flax_mha.impl.pallas.call")
        return _Implementation(pallas.refusals, pallas.pallas_attention)
    return _Implementation(_computes_all, xla.dense_attention if name == "xla" else xla.blockwise_attention)


def _computes_all(call: Call) -> list[str]:
    return []


def refusals(name: str, call: Call) -> list[str]:
    """Why this implementation cannot compute the call; no reason if it can."""
    if name != "xla" and not call.has_known_sizes:
        return ["its sizes must be numbers known while tracing, and some are symbols"]
    return _implementation(name).refusals(call)


def _fastest_first(call: Call) -> list[str]:
    """What to try, by static shapes and platform alone; the last one always runs."""
    if schedule.blocks_in_place(call) is not None or (call.has_known_sizes and call.operands.lengths[0] == 1):
        return ["xla"]  # a few vectors times a matrix: nothing to fuse
    fused = {"gpu": ["cudnn"], "tpu": ["splash"]}.get(call.options.target.platform, [])
    return [*fused, "xla" if schedule.prefers_dense(call) else "blockwise"]


def chosen(call: Call) -> str:
    """The name of the implementation that `implementation=None` runs: the first candidate without a refusal."""
    return next(name for name in _fastest_first(call) if not refusals(name, call))


def check_name(implementation: str | None) -> None:
    """Raises ValueError if there is no such implementation."""
    if implementation is not None and implementation not in NAMES:
        known = ", ".join(f'"{name}"' for name in NAMES)
        raise ValueError(f"implementation must be {known} or None, but got {implementation!r}.")


def check_computes(implementation: str, reasons: list[str]) -> None:
    """Raises NotImplementedError if there are reasons why this implementation cannot compute a call."""
    if reasons:
        raise NotImplementedError(
            f'implementation="{implementation}" cannot compute this: {"; ".join(reasons)}. Use None to choose.'
        )


def run(call: Call, implementation: str | None) -> Output:
    """Runs what is named, or what is chosen, on each device for its part of the call where that is known.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    check_name(implementation)
    split = split_of(call)
    if split is None:
        return _run(_whole(call), implementation)
    if call.has_known_sizes and 0 in call.operands.query.shape[:-1]:
        explain(call, implementation)  # raises what computing it would raise
        return nothing(call, split)
    return on_mesh(call, split, _run_part(implementation, split.context))


@functools.lru_cache(maxsize=64)  # equal ones are the same, so that nothing is compiled again
def _run_part(implementation: str | None, context: Context | None) -> Callable[[Call], Output]:
    attend = functools.partial(_run, implementation=implementation)
    return attend if context is None else _in_context(context, attend, implementation)


def _in_context(context: Context, attend: Callable[[Call], Output], implementation: str | None) -> Callable:
    """What a device computes of a call whose sequence is split."""
    if context.strategy == "ring":
        return functools.partial(_in_ring, context=context, implementation=implementation)
    strategy = exchange.ulysses if context.strategy == "ulysses" else exchange.all_gathered
    return functools.partial(strategy, context=context, attend=attend)


def _in_ring(call: Call, context: Context, implementation: str | None) -> Output:
    if implementation is not None:
        first = ring.first_part(call, context.axis, context.chunks)
        check_computes(implementation, _refusals_of_hop(implementation, first))
    attention: ring.Attention = xla.blockwise_attention
    if implementation == "pallas":
        pallas = importlib.import_module("flax_mha.impl.pallas.call")
        attention = functools.partial(pallas.pallas_attention, dtype=call.operands.query.dtype)
    return ring.ring_attention(call, context.axis, context.chunks, attention)


def _refusals_of_hop(name: str, call: Call) -> list[str]:
    """Why this implementation cannot compute the parts of a ring, of which this is one."""
    if name not in OF_HOPS:
        known = " and ".join(f'"{name}"' for name in OF_HOPS)
        return [f'with strategy="ring", only {known} compute the gradient of a hop from the merged result']
    return refusals(name, call)


def _whole(call: Call) -> Call:
    """A call without a known split; the caller may have said that there is none."""
    return call if call.options.sharding is None else unsplit(call)


def _run(call: Call, implementation: str | None) -> Output:
    if implementation is not None:
        check_computes(implementation, refusals(implementation, call))
        return _implementation(implementation).attention(call)
    name = chosen(call)
    elsewhere = _elsewhere(call, name)
    if elsewhere is None:
        return _implementation(name).attention(call)

    def attend(name: str, call: Call) -> Callable[[Operands], Array]:
        attention = _implementation(name).attention
        return lambda operands: attention(call._replace(operands=operands))[0]

    branches = attend(name, call), attend(chosen(elsewhere), elsewhere)
    return on_platform(call.options.target.platform, *branches, call.operands), None


def _elsewhere(call: Call, name: str) -> Call | None:
    """The same call on a CPU, if the traced program may be compiled for one and holds a kernel that does not run there.

    See `impl/lower_for_platform.py`.
    """
    if name not in FUSED or not being_traced():
        return None
    target = call.options.target._replace(platform="cpu")
    return call._replace(options=call.options._replace(target=target))


def explain(call: Call, implementation: str | None) -> Explanation:
    """The whole table, of the part of the call that each device computes.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    check_name(implementation)
    split, explanations = split_of(call), []
    if split is None:
        return _explain(_whole(call), implementation)

    context = split.context

    def explain_part(call: Call) -> Output:
        explanations.append(_explain(call, implementation))
        return jnp.zeros((*call.operands.query.shape[:-1], call.operands.value.shape[-1])), None

    def explain_ring(call: Call, context: Context) -> Output:
        first = ring.first_part(call, context.axis, context.chunks)
        explanations.append(_explain_hop(first, implementation))
        return first.operands.query, None

    part = explain_part
    if context is not None and context.strategy == "ring":
        part = functools.partial(explain_ring, context=context)
    elif context is not None:
        part = _in_context(context, explain_part, implementation)
    jax.eval_shape(lambda operands: on_mesh(call._replace(operands=operands), split, part), call.operands)
    return explanations[0]


def _explain_hop(call: Call, implementation: str | None) -> Explanation:
    table = {name: _refusals_of_hop(name, call) for name in NAMES}
    if implementation is not None:
        check_computes(implementation, table[implementation])
    return Explanation(implementation or "blockwise", table)


def _explain(call: Call, implementation: str | None) -> Explanation:
    table = {name: refusals(name, call) for name in NAMES}
    if implementation is None:
        name = chosen(call)
        elsewhere = _elsewhere(call, name)
        return Explanation(name, table, None if elsewhere is None else chosen(elsewhere))
    check_computes(implementation, table[implementation])
    return Explanation(implementation, table)
