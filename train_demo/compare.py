"""The command `compare`: one model, trained with several kinds of attention."""

import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from train_demo import metrics, plots, report
from train_demo.api import run_prepared, sizes_here
from train_demo.data import Text
from train_demo.errors import UserError, printable
from train_demo.model import Params, Structure, blueprint
from train_demo.run_folder import (
    CONFIG,
    Config,
    prepare,
    read_config,
    sole_writer,
    write_atomically,
    write_config,
)
from train_demo.settings import ATTENTIONS, Layout, Settings, processes_in

PICTURE = "comparison.png"
HEADINGS = ("attention", "parameters", "loss", "ms per step", "cache")
LEGEND = """\
loss: validation loss, in nats per character
cache: bytes that a text of {:,} characters takes, in all layers"""
# The text whose cache is counted: longer than a ring of a window and its spare slots.
CONTEXTS = 16


def compare(
    out: Path,
    kinds: Sequence[str] | None,
    data: str | None,
    given: dict[str, Any],
    resume: bool,
    layout: Layout,
    size: str | None,
) -> int:
    """Trains a run for each kind in `out/KIND`, and writes a report that compares them.

    The runs have the same seed, so they train on the same batches. All are checked and
    prepared before the first begins, so that a comparison that was stopped can be
    resumed.

    Args:
      out: The folder of the comparison.
      kinds: Kinds of attention; None means those of the resumed comparison, or all.
      data: As in `prepare`, like `given`, `resume` and `size`.
      given: The settings that the user gave, without the kind of attention.
      resume: Continue the comparison that is in the folder.
      layout: How the runs are computed.
      size: The preset that the user gave.

    Returns:
      0, or 128 + the number of the signal that stopped a run, which is then saved.
    """
    if processes_in(os.environ) is not None:
        raise UserError(
            "compare runs in one process: unset JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        )
    prepared = {}
    for kind in _kinds(out, kinds, resume):
        settings = {**given, "attention": kind}
        prepared[kind] = prepare(out / kind, data, settings, resume, size)
        sizes_here(layout, prepared[kind][0].settings)
    with sole_writer(out):
        # No other process may be training one of the runs.
        with ExitStack() as stack:
            for kind in prepared:
                stack.enter_context(sole_writer(out / kind))
            for kind, (config, _) in prepared.items():
                write_config(out / kind, config)
        return _train_all(out, prepared, resume, layout)


def _train_all(
    out: Path, prepared: dict[str, tuple[Config, Text]], resume: bool, layout: Layout
) -> int:
    """Trains the runs of a comparison, and compares them; returns the exit code."""
    console = Console(highlight=False, markup=False, emoji=False)
    for kind, (config, text) in prepared.items():
        began = time.perf_counter()
        try:
            code = run_prepared(
                config,
                text,
                out / kind,
                resume=resume,
                layout=layout,
                quiet=False,
                samples=False,
                began=began,
                only_bar=f"{kind}: ",
            )
        except UserError as error:
            raise UserError(f"--attention {kind}: {error}") from error
        if code:
            place = shlex.quote(str(out))
            command = f"python -m train_demo compare --resume --out {place}"
            console.print("Stopped and saved. To continue the comparison:")
            console.print(printable(command), soft_wrap=True)
            return code
        seconds = time.perf_counter() - began
        loss = _last_loss(metrics.read(out / kind))
        steps = config.settings.steps
        console.print(f"{kind}: validation loss {loss}, {steps} steps, {seconds:.0f} s")
    _report(out, list(prepared), console)
    return 0


def _kinds(out: Path, kinds: Sequence[str] | None, resume: bool) -> Iterable[str]:
    """Returns the kinds of a new comparison, or those of the one in the folder."""
    if not resume:
        return kinds or ATTENTIONS
    saved = [kind for kind in ATTENTIONS if (out / kind / CONFIG).exists()]
    if not saved:
        raise UserError(f"{out} contains no comparison: start it without --resume")
    if kinds is not None and set(kinds) != set(saved):
        raise UserError(
            f"{out} contains a comparison of {', '.join(saved)}: drop --attention, or "
            "choose a different --out"
        )
    return saved


def _report(out: Path, kinds: Sequence[str], console: Console) -> None:
    """Prints a table of finished runs, and writes it with a plot of their losses."""
    rows = [tuple(_row(out / kind)) for kind in kinds]
    shown = Table.grid(padding=(0, 2))
    for row in [HEADINGS, *rows]:
        shown.add_row(*row)
    console.rule("comparison", style="dim")
    console.print(shown)
    legend = LEGEND.format(text_length(read_config(out / kinds[0]).settings))
    console.print(legend, style="dim")

    measured = {kind: metrics.read(out / kind) for kind in kinds}
    plots.save(plots.comparison_figure(measured), out / PICTURE, dpi=190)
    title = "Kinds of attention"
    page = [
        report.HEAD,
        f"<title>{title}</title>\n<h1>{title}</h1>",
        "<p>One model, trained on the same batches with each kind of attention. Each "
        "folder has the report of its own run.</p>",
        report.columns(HEADINGS, rows),
        "<p>" + legend.replace("\n", "<br>") + "</p>",
        report.picture(out / PICTURE, "Validation loss of each kind over steps"),
        report.table((kind, ATTENTIONS[kind]) for kind in kinds),
        "</html>\n",
    ]
    write_atomically(out / report.FILE, "\n".join(page).encode())
    console.print(printable(f"{out / report.FILE} is ready: open it in a browser"))


def _row(out: Path) -> Iterator[str]:
    """Yields what `HEADINGS` name of a finished run."""
    config = read_config(out)
    measured = metrics.read(out)
    structure, params = blueprint(len(config.vocabulary), config.settings)
    seconds = metrics.step_seconds(measured)
    yield config.settings.attention
    yield f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}"
    yield _last_loss(measured)
    if seconds is None:
        yield "-"
    else:
        yield f"{1000 * seconds:.1f}"
    yield f"{cache_bytes(structure, params, text_length(config.settings)):,}"


def text_length(settings: Settings) -> int:
    """Returns the characters of the text whose cache is counted."""
    return CONTEXTS * settings.context_length


def _last_loss(measured: list[dict[str, Any]]) -> str:
    """Returns the last validation loss, or - if the metrics were deleted."""
    losses = metrics.values(measured, "val_loss")
    if not losses:
        return "-"
    return f"{losses[-1]:.4f}"


def cache_bytes(structure: Structure, params: Params, max_length: int) -> int:
    """Returns the size of the cache for a text of this length."""

    def make() -> nnx.State:
        model = nnx.merge(structure, params)
        model = nnx.view(model, decode=True, batch_size=1, max_length=max_length)
        return nnx.state(model, nnx.Cache)

    cache = jax.tree.leaves(jax.eval_shape(make))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in cache)
