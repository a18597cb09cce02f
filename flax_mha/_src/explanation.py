"""`Explanation`: which engine computes a call, and why the others do not."""

import textwrap
from typing import NamedTuple

# What an explanation assumes about a platform that this machine lacks.
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
      refusals: For each implementation, the reasons why it cannot run, as "reason:
        remedy"; an empty list if it can run.
      on_cpu: If a kernel for GPUs or TPUs was chosen while JAX traces a program, the
        implementation that runs instead if the program is compiled for a CPU; else
        None.
      variant: The algorithm of the chosen implementation, in words; None if it has only
        one algorithm.
      note: If the explanation is for a platform that this machine lacks, its
        assumptions about it, else None.
    """

    chosen: str
    refusals: dict[str, list[str]]
    on_cpu: str | None = None
    variant: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        """Formats the table: for each implementation "chosen", "would run" or all
        reasons against it; then the note.
        """
        lines: list[str] = []
        for name, reasons in self.refusals.items():
            if name == self.chosen:
                verdict = f"chosen{f', {self.variant}' if self.variant else ''}"
            else:
                verdict = "would run"
            verdict = "chosen if compiled for a CPU" if name == self.on_cpu else verdict
            rows = reasons or [verdict]
            for i, row in enumerate(rows):
                start = f"{'' if i else name:<9}  {('' if i else 'no: ').ljust(4) if reasons else ''}"
                indent = " " * (len(start) + 2)
                lines += textwrap.wrap(
                    start + row, WIDTH, subsequent_indent=indent, break_on_hyphens=False
                )
        return "\n".join(
            lines + ([] if self.note is None else textwrap.wrap(self.note, WIDTH))
        )
