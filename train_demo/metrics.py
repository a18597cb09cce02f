"""`metrics.jsonl`: one JSON object per line, `step` with `loss` or `step` with `val_loss`, in nats per character."""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from train_demo.errors import UserError
from train_demo.run_folder import write_atomically

FILE = "metrics.jsonl"
Metric = dict[str, float]


def read(out: Path) -> list[Metric]:
    """Reads a run's metrics and skips lines that are none, such as the half-written one of a killed run."""
    path = out / FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    metrics = []
    for line in lines:
        try:
            metric = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_metric(metric):
            metrics.append(metric)
    return metrics


def _is_metric(metric: Any) -> bool:
    if not isinstance(metric, dict) or metric.keys() not in ({"step", "loss"}, {"step", "val_loss"}):
        return False
    step, value = metric.values() if next(iter(metric)) == "step" else reversed(metric.values())
    return type(step) is int and 0 < step < 2**31 and type(value) is float and math.isfinite(value)


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
        kept = [json.dumps(metric) + "\n" for metric in read(out) if metric["step"] <= start]
        write_atomically(out / FILE, "".join(kept).encode())
        # Line by line, so that whoever looks at a running run sees all of it.
        self._file = (out / FILE).open("a", buffering=1)

    def write(self, name: str, step: int, value: SupportsFloat) -> tuple[int, float]:
        """Notes what was measured at a step, and returns the step and the number.

        Raises:
            UserError: the number is not finite, or the disk is full.
        """
        step, number = measured(name, step, value)
        try:
            self._file.write(json.dumps({"step": step, name: number}) + "\n")
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
