"""The measurements of a run: `metrics.jsonl` and `samples.jsonl`."""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from train_demo.errors import UserError, reason
from train_demo.run_folder import read_lines, write_atomically

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
# A loss above this many times that of guessing ends the run: no training recovers.
DIVERGED = 100


def read(out: Path) -> list[dict[str, Any]]:
    """Reads a run's metrics: `step`, `loss` or `val_loss`, and `seconds`."""
    return _read(out / METRICS, "step", "seconds")


def read_samples(out: Path) -> list[dict[str, Any]]:
    """Reads the texts that the model wrote during its training."""
    return _read(out / SAMPLES, "step", "prompt", "text")


def _read(path: Path, *names: str) -> list[dict[str, Any]]:
    """Reads the lines with these names; leaves out others, such as half of one.

    Raises:
      UserError: A line has these names, but not their values.
    """
    found = [line for line in read_lines(path) if set(names) <= line.keys()]
    for line in found:
        for name, (fits, expected) in VALUES.items():
            if name in line and not fits(line[name]):
                value = repr(line[name])[:60]
                raise UserError(
                    f"{path} has a line with {name} {value} instead of {expected}: "
                    "remove this line"
                )
    return found


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) is float and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# What the values in both files are.
VALUES = {
    "step": (_is_step, "a number of steps"),
    "seconds": (_is_number, "a number"),
    "loss": (_is_number, "a number"),
    "val_loss": (_is_number, "a number"),
    "prompt": (_is_text, "a text"),
    "text": (_is_text, "a text"),
}


def values(measured: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the numbers with this name, such as `loss`, in the order of steps."""
    return [metric[name] for metric in measured if name in metric]


def step_seconds(measured: list[dict[str, Any]]) -> float | None:
    """Returns the seconds of a step; None for fewer than two steps.

    They are the median, because validations and checkpoints are between some steps.
    """
    times = [metric["seconds"] for metric in measured if "loss" in metric]
    if len(times) < 2:
        return None
    return max(float(np.median(np.diff(times))), 1e-6)


class Log:
    """Writes a run's losses and samples; raises an error for a loss that diverges.

    Args:
      out: The run's folder.
      start: The step that the run continues from; lines of later steps, from a killed
        run, are dropped.
      guess: The loss of a model that guesses: the logarithm of the number of
        characters.
      began: The `time.perf_counter` at the start; the seconds of a resumed run continue
        those before.
      writes: Only one of several processes writes.
    """

    def __init__(
        self, out: Path, start: int, guess: float, began: float, writes: bool = True
    ):
        self._highest = DIVERGED * max(guess, 1.0)
        self._began = began
        self._files: dict[str, FileIO] = {}
        if not writes:
            return
        measured = read(out)
        for name, lines in ((METRICS, measured), (SAMPLES, read_samples(out))):
            kept = [_line(line) for line in lines if line["step"] <= start]
            write_atomically(out / name, b"".join(kept))
            # Without a buffer: each line can be read as soon as it is written.
            self._files[name] = FileIO(out / name, "a")
        seconds = [line["seconds"] for line in measured if line["step"] <= start]
        self._began -= max(seconds, default=0.0)

    @property
    def seconds(self) -> float:
        """The seconds of training so far, with compiling."""
        return round(time.perf_counter() - self._began, 3)

    def loss(self, name: str, step: int, value: SupportsFloat) -> float:
        """Waits for a loss, writes it as one line, and returns it."""
        number = float(value)
        if not number <= self._highest:  # also if it is NaN
            what = name.replace("val_loss", "validation loss")
            raise UserError(
                f"training diverged: the {what} is {number:.4g} at step {step}: lower "
                "--learning-rate, and choose a different --out"
            )
        self._add(METRICS, {"step": step, name: number, "seconds": self.seconds})
        return number

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._add(SAMPLES, {"step": step, "prompt": prompt, "text": text})

    def sync(self) -> None:
        """Flushes all lines to the disk.

        This comes before a checkpoint: a run resumed from it does not write them again.
        """
        for file in self._files.values():
            with _writing(file):
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _add(self, name: str, value: dict[str, Any]) -> None:
        if not self._files:
            return
        line = _line(value)
        file = self._files[name]
        with _writing(file):
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


@contextmanager
def _writing(file: FileIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free some space, then continue with --resume"
        message = f"cannot write {file.name} ({reason(error)}): {fix}"
        raise UserError(message) from error
