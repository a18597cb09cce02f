"""`report.html`: a run in one file that asks for no other: pictures, samples, time, memory and settings."""

import base64
import html
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from train_demo import metrics
from train_demo.errors import printable
from train_demo.files import write_atomically
from train_demo.plots import PICTURES
from train_demo.run_folder import Config
from train_demo.settings import option_of

FILE = "report.html"
STYLE = """
  :root { color-scheme: light dark; }
  body { max-width: 1100px; margin: 2em auto; padding: 0 1em; font: 15px/1.5 system-ui, sans-serif; }
  img { max-width: 100%; background: white; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  td { padding: 0.2em 1.5em 0.2em 0; vertical-align: top; overflow-wrap: anywhere; }
"""


def write(out: Path, config: Config) -> None:
    """Writes a run's report into its folder, with the pictures that lie there."""
    name = "Python's documentation" if config.data is None else Path(config.data).name
    title, measured = _text(f"Training on {name}"), metrics.read(out)
    last = max((metric["step"] for metric in measured), default=0)
    kinds = f"{len(config.vocabulary):,} different characters"
    pictures = {name: base64.b64encode((out / name).read_bytes()).decode() for name in PICTURES}
    settings = (
        (option_of(field.name), getattr(config.settings, field.name), field.metadata["help"])
        for field in fields(config.settings)
    )
    page = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>",
        f"<p>{last:,} of {config.settings.steps:,} steps; {kinds}</p>",
        _table(_facts(measured, metrics.read_resources(out), config)),
        *(f'<p><img alt="{name}" src="data:image/png;base64,{content}">' for name, content in pictures.items()),
        "<h2>What it wrote</h2>\n<p>At each validation the model went on writing after the same words.</p>",
    ]
    for sample in reversed(metrics.read_samples(out)):
        page.append(f"<h3>Step {sample['step']:,}</h3>")
        page.append(f"<pre><b>{_text(sample['prompt'])}</b>{_text(sample['text'])}</pre>")
    page += ["<h2>Settings</h2>", _table(settings), "</html>\n"]
    write_atomically(out / FILE, "\n".join(page).encode())


def _text(text: object) -> str:
    """Escapes what would be HTML, or command a terminal."""
    return html.escape(printable(str(text)))


def _table(rows: Iterable[tuple[object, ...]]) -> str:
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _facts(measured: list[dict[str, Any]], used: dict[str, Any], config: Config) -> Iterator[tuple[str, object, str]]:
    if checks := [metric["val_loss"] for metric in measured if "val_loss" in metric]:
        yield "validation loss", f"{checks[-1]:.4f}", "nats per character"
    if scores := [metric["max_score"] for metric in measured if "max_score" in metric]:
        yield "largest attention score", f"{scores[-1]:.1f}", f"at the last validation; at most {max(scores):.1f}"
    loss, number = metrics.mean_of_last(measured)
    if number:
        yield "training loss", f"{loss:.4f}", f"nats per character, the mean of the last {number} steps"
        yield "training", f"{measured[-1]['seconds']:,.1f} s", "with compiling, validation, samples and checkpoints"
        yield "first step", f"{measured[0]['seconds']:,.1f} s", "after the start; most of it is compiling"
    if speed := used.pop("tokens_per_second", 0):
        note = "without compiling, validation and saving; since the run was started or resumed"
        yield "characters per second", f"{speed:,}", note
    for name, value in used.items():
        size = name.startswith("memory")
        yield name.replace("_", " "), f"{value / 2**20:,.0f} MiB" if size else value, "the largest" if size else ""
    yield "data", "Python's documentation" if config.data is None else config.data, f"sha256 {config.sha256[:12]}"
