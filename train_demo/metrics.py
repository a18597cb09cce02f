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


def measured(name: str, step: int, value: SupportsFloat) -> tuple[int, float]:
    """Waits for what was measured at a step, and returns the step and the number.

    Raises:
        UserError: the number is not finite.
    """
    number = float(value)
    if not math.isfinite(number):
        raise UserError(f"the {name} is {number} at step {step}: take a lower --learning-rate and another --out")
    return step, number


class Log:
    """Appends to a run's metrics; a context manager.

    Args:
        out: the run's folder.
        start: the step that the run goes on from; what a killed run noted beyond it is dropped.
    """

    def __init__(self, out: Path, start: int):
        kept = [metric for metric in read(out) if metric["step"] <= start]
        write_atomically(out / FILE, "".join(json.dumps(metric) + "\n" for metric in kept).encode())
        self._began = time.monotonic() - max((metric.get("seconds", 0.0) for metric in kept), default=0.0)
        # Line by line, so that whoever looks at a running run sees all of it.
        self._file = (out / FILE).open("a", buffering=1)

    def write(self, name: str, step: int, value: SupportsFloat) -> tuple[int, float]:
        """Notes what was measured at a step, and returns the step and the number.

        Raises:
            UserError: the number is not finite, or the disk is full.
        """
        step, number = measured(name, step, value)
        try:
            seconds = round(time.monotonic() - self._began, 3)
            self._file.write(json.dumps({"step": step, name: number, "seconds": seconds}) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self._file.name} ({error.strerror}): free some space, then go on with --resume"
            ) from error
        return step, number

    def sync(self) -> None:
        """Brings all lines to the disk, which a checkpoint must find done: a resumed run never writes them again."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # it may still hold the line that could not be written
            if error is None:
                raise


class NoLog:
    """Checks what a `Log` would note, and writes nothing."""

    def write(self, name: str, step: int, value: SupportsFloat) -> tuple[int, float]:
        """Returns the step and the number.

        Raises:
            UserError: the number is not finite.
        """
        return measured(name, step, value)

    def sync(self) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
