"""What a run has reached: facts for the terminal, and all in `report.html`."""

import base64
import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from train_demo import metrics
from train_demo.errors import printable
from train_demo.run_folder import Config, write_atomically
from train_demo.settings import option_of

FILE = "report.html"
# The pictures of a run, and what each shows.
PICTURES = {
    "loss.png": "Training and validation loss over steps",
    "attention.png": "What each head attends to in a sentence",
}
HEAD = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
  :root { color-scheme: light dark; }
  body { max-width: 1100px; margin: 2em auto; padding: 0 1em; }
  body { font: 15px/1.5 system-ui, sans-serif; }
  p { overflow-x: auto; }
  img { width: 100%; min-width: 700px; background: white; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  th, td { padding: 0.2em 1.5em 0.2em 0; text-align: left; vertical-align: top; }
  td { white-space: nowrap; }
  td:last-child { white-space: normal; overflow-wrap: anywhere; }
  .columns { display: block; overflow-x: auto; }
  .columns th { vertical-align: bottom; }
  .columns :is(th, td):not(:first-child) { text-align: right; }
  @media (max-width: 600px) {
    .facts td { display: block; padding: 0; }
    .facts td:first-child { font-weight: 600; margin-top: 1em; }
    .columns { font-size: 13px; }
    .columns :is(th, td) { padding-right: 0.6em; }
  }
</style>"""


def facts(out: Path, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields the measurements of a run: name, value and meaning."""
    measured = metrics.read(out)
    checks = metrics.values(measured, "val_loss")
    if checks:
        bits = checks[-1] / math.log(2)
        meaning = (
            f"nats per character of held-out text ({bits:.3f} bits); geometric mean "
            f"probability of the true next character: {math.exp(-checks[-1]):.1%}"
        )
        yield "validation loss", f"{checks[-1]:.4f}", meaning
    losses = _last_losses(measured)
    if losses:
        meaning = (
            f"mean of the last {len(losses)} steps, on the text that they train on"
        )
        yield "training loss", f"{sum(losses) / len(losses):.4f}", meaning
    if measured:
        seconds = measured[-1]["seconds"]
        meaning = "including compilation, validation, samples and checkpoints"
        yield "training", f"{seconds:,.1f} s", meaning
    seconds = metrics.step_seconds(measured)
    if seconds is not None:
        tokens = config.settings.batch_size * config.settings.context_length
        meaning = f"{1000 * seconds:,.1f} ms per step"
        yield "characters per second", f"{tokens / seconds:,.0f}", meaning


def _last_losses(measured: list[dict[str, Any]]) -> list[float]:
    """Returns the training losses of the last steps."""
    return metrics.values(measured, "loss")[-100:]


def verdict(out: Path, config: Config) -> str:
    """Says in one line how well a run predicts, and what its validation loss does.

    The run overfits if this loss has risen by more than 1 %. If it has not, the
    model may still memorize its text, so a training loss that is more than 10 % lower
    is named.
    """
    measured = metrics.read(out)
    checks = metrics.values(measured, "val_loss")
    if not checks:
        return "No validation loss yet."
    guess = math.log(len(config.vocabulary))
    last = checks[-1]
    best = min(checks)
    better = "better"
    if last >= guess:
        better = "no better"
    quality = f"Trained to {last:.3f} nats per character, {better} than random guessing"
    quality = f"{quality} ({guess:.3f})"
    if last > 1.01 * best:
        low = f"the validation loss was as low as {best:.3f}"
        return f"{quality}, but overfitting: {low}."
    if len(checks) == 1:
        return f"{quality}."
    trend = "was still falling"
    if last >= min(checks[:-1]):
        trend = "has leveled off"
    said = f"{quality}. The validation loss {trend}"
    losses = _last_losses(measured)
    if losses:
        mean = sum(losses) / len(losses)
        if mean < 0.9 * last:
            said += f", but the training loss is {1 - mean / last:.0%} lower"
    return f"{said}."


def write(out: Path, config: Config, sample: str = "") -> None:
    """Writes the report of a run, with the pictures that are in its folder.

    Args:
      out: The run's folder.
      config: The run's configuration.
      sample: A text that the model wrote after `config.prompt`.
    """
    source = config.data or "Python's documentation"
    title = _text(f"Training on {Path(source).name}")
    last = max((metric["step"] for metric in metrics.read(out)), default=0)
    kinds = len(config.vocabulary)
    data = ("data", config.sha256[:12], f"the sha256 of {source}")
    page = [
        HEAD,
        f"<title>{title}</title>\n<h1>{title}</h1>",
        f"<p><strong>{_text(verdict(out, config))}</strong></p>",
        f"<p>{last:,} of {config.settings.steps:,} steps. Random guessing among "
        f"{kinds:,} characters has a loss of {math.log(kinds):.3f}.</p>",
        table([*facts(out, config), data]),
    ]
    page += [picture(out / name, shows) for name, shows in PICTURES.items()]
    if sample:
        page += ["<h2>What it writes</h2>", _sample(config.prompt, sample)]
    samples = metrics.read_samples(out)
    if samples:
        page.append("<h2>How its writing changed</h2>")
        page.append("<p>At each validation the model continued the same prompt.</p>")
    for each in reversed(samples):
        page.append(f"<h3>Step {each['step']:,}</h3>")
        page.append(_sample(each["prompt"], each["text"]))
    settings = []
    for field in fields(config.settings):
        value = getattr(config.settings, field.name)
        settings.append((option_of(field.name), value, field.metadata["help"]))
    page += ["<h2>Settings</h2>", table(settings), "</html>\n"]
    write_atomically(out / FILE, "\n".join(page).encode())


def picture(path: Path, shows: str) -> str:
    """Returns an element that holds a PNG file, and says what it shows."""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{_text(shows)}" src="data:image/png;base64,{content}">'


def _sample(prompt: str, text: str) -> str:
    return f"<pre><b>{_text(prompt)}</b>{_text(text)}</pre>"


def _text(text: object) -> str:
    """Escapes HTML and control characters."""
    return html.escape(printable(str(text)))


def table(rows: Iterable[tuple[object, ...]]) -> str:
    """Returns an element that holds a table of escaped cells.

    Each row begins with its name. On a phone, the rest of the row is shown below it.
    """
    return "\n".join(['<table class="facts">', *_rows("td", rows), "</table>"])


def columns(headings: Sequence[str], rows: Iterable[tuple[object, ...]]) -> str:
    """Returns an element that holds a table of numbers below headings."""
    head = _rows("th", [headings])
    return "\n".join(['<table class="columns">', *head, *_rows("td", rows), "</table>"])


def _rows(tag: str, rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for row in rows:
        cells = "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row)
        yield f"<tr>{cells}</tr>"
