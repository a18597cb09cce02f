"""Writes and reads the measurements of a run: `metrics.jsonl`, `samples.jsonl` and `resources.json`."""

import errno
import json
import math
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
from train_demo.run_folder import Config

METRICS, SAMPLES, RESOURCES = "metrics.jsonl", "samples.jsonl", "resources.json"
DIVERGED = 100  # a loss above this many times that of guessing ends the run: no training recovers from it


def read(out: Path) -> list[dict[str, Any]]:
    """Reads a run's metrics: `step` with `loss` or `val_loss`, in nats per character, and `seconds` since the start."""
    return [line for line in read_lines(out / METRICS) if {"step", "seconds"} <= line.keys()]


def read_samples(out: Path) -> list[dict[str, Any]]:
    """Reads the texts that the model wrote during its training: `step`, `prompt` and `text`."""
    return [line for line in read_lines(out / SAMPLES) if {"step", "prompt", "text"} <= line.keys()]


def read_resources(out: Path) -> dict[str, Any]:
    """Reads a run's device, speed and memory; empty without the file."""
    return (read_lines(out / RESOURCES) or [{}])[0]


def facts(out: Path, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields the measurements of a run for its report and the terminal: name, value and meaning."""
    measured, used, settings = read(out), read_resources(out), config.settings
    yield from _losses(measured)
    if measured:
        yield (
            "training",
            f"{measured[-1]['seconds']:,.1f} s",
            "including compilation, validation, samples and checkpoints",
        )
        compiled = used.pop("compiling", "mostly compilation")
        yield "first step", f"{measured[0]['seconds']:,.1f} s", f"after the start; {compiled}"
    if speed := used.pop("tokens_per_second", 0):
        milliseconds = 1000 * settings.batch_size * settings.context_length / speed
        note = f"{milliseconds:,.1f} ms per step, excluding compilation, validation and saving"
        yield "characters per second", f"{speed:,}", note
    for name, value in used.items():
        size = name.startswith("memory")
        yield name.replace("_", " "), f"{value / 2**20:,.0f} MiB" if size else str(value), "at its peak" if size else ""
    checks = {metric["step"]: metric["val_loss"] for metric in measured if "val_loss" in metric}
    if settings.steps in checks:
        best = min(checks, key=checks.__getitem__)
        more = f"--steps {2 * best}", "with --resume, or a larger --size: the validation loss was still falling"
        enough = "more text", f"or --dropout-rate 0.1, or fewer --steps: validation loss was lowest at step {best:,}"
        yield "try next", *(more if best == settings.steps else enough)


def _losses(measured: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    if checks := [metric["val_loss"] for metric in measured if "val_loss" in metric]:
        note = f"geometric mean probability of the true next character: {math.exp(-checks[-1]):.1%}"
        bits = f"{checks[-1] / math.log(2):.3f} bits"
        yield "validation loss", f"{checks[-1]:.4f}", f"nats per character of held-out text ({bits}); {note}"
    if losses := [metric["loss"] for metric in measured if "loss" in metric][-100:]:
        note = f"mean of the last {len(losses)} steps, on the text that they train on"
        yield "training loss", f"{sum(losses) / len(losses):.4f}", note
    if scores := [metric["max_score"] for metric in measured if "max_score" in metric]:
        yield "largest attention score", f"{scores[-1]:.1f}", f"at the last validation; highest: {max(scores):.1f}"


def verdict(out: Path, config: Config) -> str:
    """Says in one line how well a run predicts, and whether it overfits: the validation loss rises by 1 %."""
    checks = [metric["val_loss"] for metric in read(out) if "val_loss" in metric]
    if not checks:
        return "No validation loss yet."
    guess, last, best = math.log(len(config.vocabulary)), checks[-1], min(checks)
    better = "better" if last < guess else "no better"
    quality = f"Trained to {last:.3f} nats per character, {better} than random guessing ({guess:.3f})"
    if last > 1.01 * best:
        return f"{quality}, but overfitting: the validation loss was as low as {best:.3f}."
    if len(checks) == 1:
        return f"{quality}."
    trend = "was still falling" if last == best else "has leveled off"
    return f"{quality}, and not overfitting: the validation loss {trend}."


class Log:
    """Writes a run's losses and samples, and refuses losses that diverge.

    Args:
      out: The run's folder; None writes nothing.
      start: The step that the run continues from; lines of later steps, from a killed run, are dropped.
      guess: The loss of a model that guesses: the logarithm of the number of characters.
      began: The `time.perf_counter` at the start; the seconds of a resumed run continue those before.
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
        """The seconds of training so far, with compiling."""
        return round(time.perf_counter() - self._began, 3)

    def loss(self, name: str, step: int, value: SupportsFloat, **others: SupportsFloat) -> float:
        """Waits for a loss, writes it and `others` as one line, and returns it; raises a `UserError` if it diverged."""
        number = float(value)
        if not number <= self._highest:  # also where it is not a number
            what = name.replace("val_loss", "validation loss")
            fix = "lower --learning-rate, and choose a different --out"
            raise UserError(f"training diverged: the {what} is {number:.4g} at step {step}: {fix}")
        numbers = {name: number} | {name: float(other) for name, other in others.items()}
        self._add(METRICS, {"step": step, **numbers, "seconds": self.seconds})
        return number

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._add(SAMPLES, {"step": step, "prompt": prompt, "text": text})

    def sync(self) -> None:
        """Flushes all lines to the disk: before a checkpoint, as a run resumed from it does not write them again."""
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
        fix = "free some space, then continue with --resume"
        raise UserError(f"cannot write {file.name} ({reason(error)}): {fix}") from error


def write_resources(out: Path, mesh: jax.sharding.Mesh | None, tokens_per_second: float, compiling: str) -> None:
    """Writes `resources.json`: devices, speed, the largest memory use so far in bytes, and how long it compiled."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    memory = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
    device = f"{len(devices)} x {devices[0].device_kind}"
    found = {"device": device, "tokens_per_second": round(tokens_per_second), "compiling": compiling}
    if any(memory):  # CPUs have no statistics
        found["memory_of_device"] = max(stats.get("peak_bytes_in_use", 0) for stats in memory)
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["memory_of_process"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_atomically(out / RESOURCES, _line(found))
