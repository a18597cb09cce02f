"""The table of implementations, from which `distributed/dispatch.py` chooses, and their reasons to refuse a call."""

import textwrap
from typing import Literal, NamedTuple, get_args

from flax_mha._src import plan as schedule
from flax_mha._src.call.operands import Call
from flax_mha._src.engines.blockwise import BLOCKWISE
from flax_mha._src.engines.engine import Implementation as Registered
from flax_mha._src.engines.kernels.cudnn import CUDNN
from flax_mha._src.engines.xla import in_place as decode

# The values of the argument `implementation`. (The class of implementation objects is imported as `Registered` here.)
Implementation = Literal["xla", "blockwise", "cudnn", "splash", "pallas"]
NAMES: tuple[str, ...] = get_args(Implementation)

XLA = Registered("xla", decode.attention, variant=schedule.variant_of_xla)


class _Table(dict[str, Registered]):
    """Implementations by name; imports Pallas, which takes a second, only when "splash" or "pallas" is looked up."""

    def __missing__(self, name: str) -> Registered:
        if name == "splash":
            from flax_mha._src.engines.kernels.splash import SPLASH

            return SPLASH
        if name == "pallas":
            from flax_mha._src.engines.pallas.call import PALLAS

            return PALLAS
        raise KeyError(name)


IMPLEMENTATIONS = _Table({x.name: x for x in (XLA, BLOCKWISE, CUDNN)})


# What an explanation assumes of devices that are not here.
ASSUMPTIONS = {
    "cpu": None,
    "gpu": "This assumes H100s (compute capability 9.0). cuDNN did not run, and may still reject the shapes.",
    "tpu": "This assumes TPUs such as v5e. Nothing was compiled for them.",
}
WIDTH = 100  # columns of an explanation's print-out


class Explanation(NamedTuple):
    """The result of `explain_implementation`; `print` shows it as a table.

    Attributes:
      chosen: The implementation that computes the call.
      refusals: For each implementation, the reasons why it cannot run, as "reason: remedy"; an empty list if it can
        run.
      on_cpu: The implementation that computes the call if the traced program is compiled for a CPU; None if this is the
        chosen one.
      variant: The algorithm of the chosen implementation, in words; None if it has only one algorithm.
      note: What the explanation assumes about a requested `platform` that is not available, else None.
    """

    chosen: str
    refusals: dict[str, list[str]]
    on_cpu: str | None = None
    variant: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        """Formats one row for each implementation, with all reasons against it, and the note."""
        lines: list[str] = []
        for name, reasons in self.refusals.items():
            verdict = f"chosen{f', {self.variant}' if self.variant else ''}" if name == self.chosen else "would run"
            verdict = "chosen if compiled for a CPU" if name == self.on_cpu else verdict
            rows = reasons or [verdict]
            for i, row in enumerate(rows):
                start = f"{'' if i else name:<9}  {('' if i else 'no: ').ljust(4) if reasons else ''}"
                indent = " " * (len(start) + 2)
                lines += textwrap.wrap(start + row, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        return "\n".join(lines + ([] if self.note is None else textwrap.wrap(self.note, WIDTH)))


def refusals(name: str, call: Call) -> list[str]:
    """Lists why an implementation cannot compute a call."""
    if name != XLA.name and not call.options.has_known_sizes:
        return ["it needs static shapes, but some dimensions are symbolic: export with static shapes"]
    ask = IMPLEMENTATIONS[name].refusals
    return [] if ask is None else ask(call)


def check_name(implementation: str | None) -> None:
    if implementation is not None and implementation not in NAMES:
        known = ", ".join(f'"{name}"' for name in NAMES)
        raise ValueError(f"implementation must be {known} or None, but got {implementation!r}.")


def check_computes(implementation: str, reasons: list[str]) -> None:
    if reasons:
        raise NotImplementedError(
            f'implementation="{implementation}" does not support this call: {"; ".join(reasons)}. Pass None to let the '
            "library choose."
        )
