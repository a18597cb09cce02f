"""`report.html`: a run in one file that asks for no other: curves, samples, attention, settings, time and memory."""

import base64
import html
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from train_demo import metrics, samples, usage
from train_demo.errors import printable
from train_demo.files import write_atomically
from train_demo.plots import pieces, running_mean
from train_demo.run_folder import Config

FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html")
SPEED = "tokens_per_second"
POINTS = 400  # of a curve, at most: neighbouring steps share one


def write(out: Path, weights: np.ndarray, config: Config) -> None:
    """Writes a run's report into its folder, also while it is trained.

    Args:
        out: the folder.
        weights: what each head looks at, `[layers, heads, T, T]`, from `plots.attention_weights`.
        config: the run's.
    """
    write_atomically(out / FILE, page(gathered(out, weights, config)).encode())


def page(data: dict[str, Any]) -> str:
    """Puts what a report shows into the page that shows it.

    Texts may hold anything: without `<` nothing in them ends the script that they stand in.
    """
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    before, after = TEMPLATE.read_text(encoding="utf-8").split("DATA", 1)
    return before.replace("Training report", html.escape(data["title"])) + text + after


def gathered(out: Path, weights: np.ndarray, config: Config) -> dict[str, Any]:
    """Collects what a run's report shows."""
    measured, used, unit = metrics.read(out), usage.read(out), config.vocabulary.unit
    name = "Python's documentation" if config.data is None else Path(config.data).name
    last = max((int(metric["step"]) for metric in measured), default=0)
    return {
        "title": printable(f"Training on {name}"),
        "subtitle": f"{last:,} of {config.settings.steps:,} steps; {len(config.vocabulary):,} different {unit}s",
        "unit": unit,
        "tiles": _tiles(measured, used, config),
        "training": _curve(measured),
        "validation": _validation(measured),
        "samples": [
            {"step": each.step, "prompt": printable(each.prompt), "text": printable(each.text)}
            for each in reversed(samples.read(out))
        ],
        "attention": _attention(weights, pieces(config)),
        "facts": _facts(measured, used, config),
        "settings": [
            (f"--{field.name.replace('_', '-')}", str(getattr(config.settings, field.name)), field.metadata["help"])
            for field in fields(config.settings)
        ],
    }


def _tiles(measured: list[metrics.Metric], used: usage.Usage, config: Config) -> list[tuple[str, str]]:
    tiles, unit = [], config.vocabulary.unit
    if checks := [metric["val_loss"] for metric in measured if "val_loss" in metric]:
        tiles.append((f"{checks[-1]:.4f}", f"validation loss, nats per {unit}"))
    loss, number = metrics.mean_of_last(measured)
    if number:
        tiles.append((f"{loss:.4f}", f"training loss, nats per {unit}, mean of the last {number} steps"))
    if seconds := _seconds(measured):
        tiles.append((_time(seconds), "of training"))
    if used.get(SPEED):
        tiles.append((f"{used[SPEED]:,}", f"{unit}s per second"))
    return tiles


def _facts(measured: list[metrics.Metric], used: usage.Usage, config: Config) -> list[tuple[str, ...]]:
    facts: list[tuple[str, ...]] = []
    if seconds := _seconds(measured):
        facts.append(("training", _time(seconds), "with compiling, validation, samples and checkpoints"))
        first = next(metric["seconds"] for metric in measured if "seconds" in metric)
        facts.append(("first step", _time(first), "after the start of the training; most of it is compiling"))
    if used.get(SPEED):
        note = "without compiling, validation, samples and checkpoints; since the run was started or resumed"
        facts.append((f"{config.vocabulary.unit}s per second", f"{used[SPEED]:,}", note))
    names = {
        "memory_of_process": ("memory", "largest resident size of the process"),
        "memory_of_device": ("memory of a device", "largest size in use"),
        "device": ("device", ""),
        "devices": ("devices", ""),
        "processes": ("processes", ""),
        "jax": ("JAX", ""),
        "python": ("Python", ""),
    }
    for name, (label, note) in names.items():
        if name in used:
            value = used[name]
            facts.append((label, f"{int(value) / 2**20:,.0f} MiB" if name.startswith("memory") else str(value), note))
    data = "Python's documentation" if config.data is None else config.data
    facts += [("data", printable(data), f"sha256 {config.sha256[:12]}"), ("tokenizer", config.vocabulary.name, "")]
    return facts


def _seconds(measured: list[metrics.Metric]) -> float:
    return max((metric.get("seconds", 0.0) for metric in measured), default=0.0)


def _time(seconds: float) -> str:
    """A duration in words.

    Example:
        >>> _time(12.34), _time(75), _time(7400)
        ('12.3 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _curve(measured: list[metrics.Metric]) -> dict[str, list[float]]:
    """The training losses in at most `POINTS` points: their running mean, and the least and the most around each."""
    training = [metric for metric in measured if "loss" in metric]
    losses = np.array([metric["loss"] for metric in training])
    smooth = running_mean(losses)
    # A few steps in each, where there are enough, show how much the losses of batches differ.
    points = min(POINTS, max(len(losses) // 4, min(len(losses), 50)))
    parts = np.array_split(np.arange(len(losses)), points) if points else []
    timed = all("seconds" in metric for metric in training)
    ends = [training[part[-1]] for part in parts]
    return {
        "step": [metric["step"] for metric in ends],
        "seconds": [metric["seconds"] for metric in ends] if timed else [],
        "mean": [round(float(smooth[part[-1]]), 4) for part in parts],
        "low": [round(float(losses[part].min()), 4) for part in parts],
        "high": [round(float(losses[part].max()), 4) for part in parts],
    }


def _validation(measured: list[metrics.Metric]) -> dict[str, list[float]]:
    checks = [metric for metric in measured if "val_loss" in metric]
    timed = all("seconds" in metric for metric in checks)
    return {
        "step": [metric["step"] for metric in checks],
        "seconds": [metric["seconds"] for metric in checks] if timed else [],
        "loss": [round(metric["val_loss"], 4) for metric in checks],
    }


def _attention(weights: np.ndarray, tokens: list[str]) -> dict[str, Any]:
    layers, heads, *_ = weights.shape
    rounded = np.round(255 * np.clip(weights, 0, 1)).astype(np.uint8)
    return {
        "tokens": tokens,
        "layers": layers,
        "heads": heads,
        "weights": base64.b64encode(rounded.tobytes()).decode(),
    }
