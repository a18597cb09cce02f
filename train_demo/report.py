"""Writes `report.html`: a run in one file, with its pictures, samples, time, memory and settings."""

import base64
import html
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

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
  p { overflow-x: auto; }
  img { width: 100%; min-width: 700px; background: white; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  td { padding: 0.2em 1.5em 0.2em 0; vertical-align: top; white-space: nowrap; }
  td:last-child { white-space: normal; overflow-wrap: anywhere; }
  @media (max-width: 600px) { td { display: block; padding: 0; } td:first-child { font-weight: 600; margin-top: 1em; } }
"""


def write(out: Path, config: Config, sample: str = "") -> None:
    """Writes the report of a run into its folder, with the pictures in that folder and a text after `config.prompt`."""
    name = "Python's documentation" if config.data is None else Path(config.data).name
    title, last = _text(f"Training on {name}"), max((metric["step"] for metric in metrics.read(out)), default=0)
    kinds = len(config.vocabulary)
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
        f"<p><strong>{_text(metrics.verdict(out, config))}</strong></p>",
        f"<p>{last:,} of {config.settings.steps:,} steps. Random guessing among {kinds:,} characters has a loss of "
        f"{math.log(kinds):.3f}.</p>",
        _table([*metrics.facts(out, config), ("data", config.sha256[:12], f"the sha256 of {config.data or name}")]),
        *(f'<p><img alt="{name}" src="data:image/png;base64,{content}">' for name, content in pictures.items()),
    ]
    if sample:
        page += ["<h2>What it writes</h2>", _sample(config.prompt, sample)]
    if samples := metrics.read_samples(out):
        page.append("<h2>How its writing changed</h2>\n<p>At each validation the model continued the same prompt.</p>")
    for each in reversed(samples):
        page += [f"<h3>Step {each['step']:,}</h3>", _sample(each["prompt"], each["text"])]
    page += ["<h2>Settings</h2>", _table(settings), "</html>\n"]
    write_atomically(out / FILE, "\n".join(page).encode())


def _sample(prompt: str, text: str) -> str:
    return f"<pre><b>{_text(prompt)}</b>{_text(text)}</pre>"


def _text(text: object) -> str:
    """Escapes HTML and control characters."""
    return html.escape(printable(str(text)))


def _table(rows: Iterable[tuple[object, ...]]) -> str:
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"
