"""The table of implementations: what each refuses, and which is fastest."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from jaxtyping import Array

from flax_mha.call.operands import Call, Operands, Output
from flax_mha.core.tracing import being_traced
from flax_mha.impl.blockwise import BLOCKWISE
from flax_mha.impl.cudnn import CUDNN
from flax_mha.impl.implementation import Implementation as Registered
from flax_mha.impl.lower_for_platform import lower_for_platform
from flax_mha.impl.shared import schedule
from flax_mha.impl.xla import XLA

Implementation = Literal["xla", "blockwise", "cudnn", "splash", "pallas"]


# Pallas takes a second to import, so it is imported when it is asked for.
def _splash() -> Registered:
    from flax_mha.impl.splash import SPLASH

    return SPLASH


def _pallas() -> Registered:
    from flax_mha.impl.pallas.call import PALLAS

    return PALLAS


IMPLEMENTATIONS: dict[str, Callable[[], Registered]] = {
    "xla": lambda: XLA,
    "blockwise": lambda: BLOCKWISE,
    "cudnn": lambda: CUDNN,
    "splash": _splash,
    "pallas": _pallas,
}
assert tuple(IMPLEMENTATIONS) == get_args(Implementation)


class Explanation(NamedTuple):
    """The result of `explain_implementation`; `print` shows it as a table.

    Attributes:
      chosen: The implementation that computes the call.
      refusals: For each implementation the reasons why it cannot run; none where it can.
      on_cpu: What computes the call instead if the program that is being traced is compiled for a CPU; None if the
        same.
      variant: Which of its several ways the chosen one takes, in words; None if it has one.
    """

    chosen: str
    refusals: dict[str, list[str]]
    on_cpu: str | None = None
    variant: str | None = None

    def __str__(self) -> str:
        """A line for each implementation, and one for each further reason."""
        lines = []
        for name, reasons in self.refusals.items():
            verdict = f"chosen{f', {self.variant}' if self.variant else ''}" if name == self.chosen else "would run"
            verdict = "chosen if compiled for a CPU" if name == self.on_cpu else verdict
            lines.append(f"{name:<9}  {'no: ' + reasons[0] if reasons else verdict}")
            lines += [f"{'':<9}      {reason}" for reason in reasons[1:]]
        return "\n".join(lines)


def refusals(name: str, call: Call) -> list[str]:
    """Why this implementation cannot compute the call; no reason if it can."""
    if name != XLA.name and not call.options.has_known_sizes:
        return ["its sizes must be numbers known while tracing, and some are symbols"]
    ask = IMPLEMENTATIONS[name]().refusals
    return [] if ask is None else ask(call)


# Where fused kernels are chosen first by published speeds; nothing of ours has been timed on a GPU or a TPU.
PREFERRED_ON = {"gpu": [CUDNN.name], "tpu": ["splash"]}


def chosen(call: Call) -> str:
    """The name of the implementation that `implementation=None` runs: the fastest that does not refuse the call."""
    if schedule.blocks_in_place(call) is not None or (call.options.has_known_sizes and call.operands.lengths[0] == 1):
        return XLA.name  # a few vectors times a matrix: nothing to fuse
    portable = XLA.name if schedule.prefers_dense(call) else BLOCKWISE.name
    candidates = [*PREFERRED_ON.get(call.options.target.platform, []), portable]
    return next(name for name in candidates if not refusals(name, call))


def check_name(implementation: str | None) -> None:
    """Raises ValueError if there is no such implementation."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
        raise ValueError(f"implementation must be {known} or None, but got {implementation!r}.")


def check_computes(implementation: str, reasons: list[str]) -> None:
    """Raises NotImplementedError if there are reasons why this implementation cannot compute a call."""
    if reasons:
        raise NotImplementedError(
            f'implementation="{implementation}" cannot compute this: {"; ".join(reasons)}. Use None to choose.'
        )


def run(call: Call, implementation: str | None) -> Output:
    """Computes a call on one device by the implementation that is named or chosen.

    Raises:
      NotImplementedError: If the named one cannot compute this call.
    """
    if implementation is not None:
        check_computes(implementation, refusals(implementation, call))
        return IMPLEMENTATIONS[implementation]().attention(call)
    name = chosen(call)
    elsewhere = _on_cpu(call, name)
    if elsewhere is None:
        return IMPLEMENTATIONS[name]().attention(call)

    def attend(name: str, call: Call) -> Callable[[Operands], Array]:
        attention = IMPLEMENTATIONS[name]().attention
        return lambda operands: attention(call._replace(operands=operands))[0]

    branches = attend(name, call), attend(chosen(elsewhere), elsewhere)
    return lower_for_platform(call.options.target.platform, *branches, call.operands), None


def explain(call: Call, implementation: str | None) -> Explanation:
    """Explains what `run` would do, and why."""
    table = {name: refusals(name, call) for name in IMPLEMENTATIONS}
    if implementation is not None:
        check_computes(implementation, table[implementation])
    name = chosen(call) if implementation is None else implementation
    elsewhere = None if implementation is not None else _on_cpu(call, name)
    variant = IMPLEMENTATIONS[name]().variant
    return Explanation(
        name, table, None if elsewhere is None else chosen(elsewhere), None if variant is None else variant(call)
    )


def _on_cpu(call: Call, name: str) -> Call | None:
    """Returns the call on a CPU, if the traced program may be compiled for one and holds a kernel of another platform.

    See `lower_for_platform.py`.
    """
    if not any(name in names for names in PREFERRED_ON.values()) or not being_traced():
        return None
    target = call.options.target._replace(platform="cpu")
    return call._replace(options=call.options._replace(target=target))
