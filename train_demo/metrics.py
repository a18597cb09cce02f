"""What a run leaves to read: `metrics.jsonl`, `samples.jsonl` and `resources.json`."""

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, SupportsFloat

import jax

from train_demo.errors import UserError, reason
from train_demo.files import read_lines, write_atomically

METRICS, SAMPLES, RESOURCES = "metrics.jsonl", "samples.jsonl", "resources.json"
DIVERGED = 100  # times the loss of guessing: no training comes back from there to anything of use


def read(out: Path) -> list[dict[str, Any]]:
    """Reads a run's metrics: `step` with `loss` or `val_loss`, in nats per character, and `seconds` since the start."""
    return [line for line in read_lines(out / METRICS) if {"step", "seconds"} <= line.keys()]


def read_samples(out: Path) -> list[dict[str, Any]]:
    """Reads what the model wrote while it was trained: `step`, `prompt` and `text`."""
    return [line for line in read_lines(out / SAMPLES) if {"step", "prompt", "text"} <= line.keys()]


def read_resources(out: Path) -> dict[str, Any]:
    """Reads what a run noted of its device, speed and memory; nothing where there is no such file."""
    return (read_lines(out / RESOURCES) or [{}])[0]


def mean_of_last(measured: list[dict[str, Any]]) -> tuple[float, int]:
    """Averages the training losses of the last steps; one batch says little."""
    losses = [metric["loss"] for metric in measured if "loss" in metric][-100:]
    return (sum(losses) / len(losses) if losses else 0.0), len(losses)


class Log:
    """Notes a run's losses and samples.

    Args:
      out: The run's folder; None checks the losses, and writes nothing.
      start: The step that the run goes on from; what a killed run noted beyond it is dropped.
      guess: The loss of a model that guesses: the logarithm of the number of characters.
      began: When the training began, of `time.perf_counter`; a resumed run counts on from what it goes on from.
    """

    def __init__(self, out: Path | None, start: int, guess: float, began: float):
        self._highest, self._began = DIVERGED * max(guess, 1.0), began
        self._files: dict[str, FileIO] = {}
        if out is not None:
            kept = [metric for metric in read(out) if metric["step"] <= start]
            self._began -= max((metric["seconds"] for metric in kept), default=0.0)
            samples = [sample for sample in read_samples(out) if sample["step"] <= start]
            for name, lines in ((METRICS, kept), (SAMPLES, samples)):
                write_atomically(out / name, b"".join(map(_line, lines)))
                self._files[name] = FileIO(out / name, "a")  # each line can be read as soon as it is written

    @property
    def seconds(self) -> float:
        """Seconds of training so far, with the time that compiling takes."""
        return round(time.perf_counter() - self._began, 3)

    def loss(self, name: str, step: int, value: SupportsFloat, **others: SupportsFloat) -> float:
        """Waits for a loss, notes it and other numbers, and returns it."""
        number = float(value)
        if not number <= self._highest:  # also where it is not a number
            what = name.replace("val_loss", "validation loss")
            fix = "take a lower --learning-rate and another --out"
            raise UserError(f"training diverged: the {what} is {number:.4g} at step {step}: {fix}")
        numbers = {name: number} | {name: float(other) for name, other in others.items()}
        self._add(METRICS, {"step": step, **numbers, "seconds": self.seconds})
        return number

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._add(SAMPLES, {"step": step, "prompt": prompt, "text": text})

    def sync(self) -> None:
        """Brings all lines to the disk, which a checkpoint must find done: a resumed run never writes them again."""
        for file in self._files.values():
            with _writing(file):
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _add(self, name: str, value: dict[str, Any]) -> None:
        line = _line(value)
        for file in [self._files[name]] if self._files else []:
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
        fix = "free some space, then go on with --resume"
        raise UserError(f"cannot write {file.name} ({reason(error)}): {fix}") from error


def write_resources(out: Path, mesh: jax.sharding.Mesh | None, tokens_per_second: float) -> None:
    """Notes what computed a run, how fast, and the largest size in memory so far, in bytes."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    memory = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
    found = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "tokens_per_second": round(tokens_per_second),
    }
    if any(memory):  # CPUs do not say
        found["memory_of_device"] = max(stats.get("peak_bytes_in_use", 0) for stats in memory)
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["memory_of_process"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_atomically(out / RESOURCES, _line(found))
