"""`Explanation`: which engine computes a call, and why the others do not."""

import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# What an explanation assumes about a platform that this machine lacks.
ASSUMPTIONS = {
    "cpu": None,
    "gpu": (
        "This assumes H100s (compute capability 9.0). cuDNN did not run, and may still "
        "reject the shapes."
    ),
    "tpu": "This assumes TPUs such as v5e. Nothing was compiled for them.",
}
WIDTH = 100  # columns of an explanation's print-out


class Explanation(NamedTuple):
    """The result of `explain_implementation`; `print` shows it as a table.

    Attributes:
      chosen: The implementation that computes the call.
      refusals: For each implementation, the reasons why it cannot run, as "reason:
        remedy"; an empty list if it can run.
      on_cpu: If a kernel for GPUs or TPUs was chosen while JAX traces a program, the
        implementation that runs instead if the program is compiled for a CPU; else
        None.
      variant: The algorithm of the chosen implementation, or a condition on which it is
        chosen, in words; otherwise None.
      note: If the explanation is for a platform that this machine lacks, its
        assumptions about it, otherwise None.
      doubts: For each implementation that can run but was not chosen, reasons not to
        choose it by default, as "reason: remedy".
    """

    chosen: str
    refusals: dict[str, list[str]]
    on_cpu: str | None = None
    variant: str | None = None
    note: str | None = None
    doubts: Mapping[str, list[str]] = MappingProxyType({})

    def __str__(self) -> str:
        """Formats the table: for each implementation "chosen", "would run" or all
        reasons against it; then the note.
        """
        lines: list[str] = []
        for name, reasons in self.refusals.items():
            label = name
            mark = "no: " if reasons else ""
            for row in reasons or [self._verdict(name)]:
                start = f"{label:<9}  {mark}"
                lines += textwrap.wrap(
                    start + row,
                    WIDTH,
                    subsequent_indent=" " * (len(start) + 2),
                    break_on_hyphens=False,
                )
                # Other reasons follow below the first.
                label = ""
                mark = " " * len(mark)
        if self.note is not None:
            lines += textwrap.wrap(self.note, WIDTH)
        return "\n".join(lines)

    def _verdict(self, name: str) -> str:
        """Says in words what becomes of an implementation that could run."""
        if name == self.on_cpu:
            return "chosen if compiled for a CPU"
        if name != self.chosen:
            return "; ".join(["would run", *self.doubts.get(name, [])])
        if self.variant is not None:
            return f"chosen, {self.variant}"
        return "chosen"
