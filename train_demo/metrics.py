"""`metrics.jsonl`: one JSON object per line, `step` with `loss` or `val_loss`, in nats per token, and `seconds`.

Seconds count from the start of the training, with the time that compiling takes. A resumed run counts on from what it
goes on from.
"""

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from train_demo.errors import UserError
from train_demo.files import read_lines, write_atomically

FILE = "metrics.jsonl"
Metric = dict[str, float]
DIVERGED = 100  # times the loss of guessing: no training comes back from there to anything of use


def read(out: Path) -> list[Metric]:
    """Reads a run's metrics and skips lines that are none, such as the half-written one of a killed run."""
    return [metric for metric in read_lines(out / FILE) if _is_metric(metric)]


def _is_metric(metric: Any) -> bool:
    # Runs of before there were seconds have none.
    if not isinstance(metric, dict) or metric.keys() - {"seconds"} not in ({"step", "loss"}, {"step", "val_loss"}):
        return False
    numbers = [value for name, value in metric.items() if name != "step"]
    right = all(type(number) is float and math.isfinite(number) for number in numbers)
    return right and metric.get("seconds", 0.0) >= 0 and type(metric["step"]) is int and 0 < metric["step"] < 2**31


def mean_of_last(measured: list[Metric]) -> tuple[float, int]:
    """Averages the training losses of the last steps; one batch says little.

    Returns:
        The mean, and of how many steps it is: at most 100, 0 where there are none.
    """
    losses = [metric["loss"] for metric in measured if "loss" in metric][-100:]
    return (sum(losses) / len(losses) if losses else 0.0), len(losses)


class Log:
    """Appends to a run's metrics; a context manager.

    Args:
        out: the run's folder; None checks what is measured, and writes nothing.
        start: the step that the run goes on from; what a killed run noted beyond it is dropped.
        guess: the loss of a model that guesses: the logarithm of the number of tokens.
    """

    def __init__(self, out: Path | None, start: int, guess: float):
        kept = [metric for metric in read(out) if metric["step"] <= start] if out else []
        self._began = time.monotonic() - max((metric.get("seconds", 0.0) for metric in kept), default=0.0)
        self._highest = DIVERGED * max(guess, 1.0)
        self._path = out / FILE if out else None
        self._file = None
        if self._path:
            write_atomically(self._path, "".join(json.dumps(metric) + "\n" for metric in kept).encode())
            # Line by line, so that whoever looks at a running run sees all of it.
            self._file = self._path.open("a", buffering=1)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return round(time.monotonic() - self._began, 3)

    def write(self, name: str, step: int, value: SupportsFloat) -> float:
        """Waits for a loss, notes it, and returns it.

        Raises:
            UserError: the loss is not finite, or that of a training that diverged; or the disk is full.
        """
        number = float(value)
        if not number <= self._highest:  # also where it is not a number
            raise UserError(
                f"training diverged: the {name} is {number:.4g} at step {step}: take a lower --learning-rate and "
                "another --out"
            )
        try:
            if self._file:
                self._file.write(json.dumps({"step": step, name: number, "seconds": self.seconds}) + "\n")
        except OSError as error:
            fix = "free some space, then go on with --resume"
            raise UserError(f"cannot write {self._path} ({error.strerror}): {fix}") from error
        return number

    def sync(self) -> None:
        """Brings all lines to the disk, which a checkpoint must find done: a resumed run never writes them again."""
        if self._file:
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._file:
                self._file.close()
        except OSError:  # it may still hold the line that could not be written
            if error is None:
                raise
