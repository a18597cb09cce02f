"""What a training shows on the terminal: lines that cannot command it, and a bar."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from train_demo.errors import printable
from train_demo.settings import Settings


class SafeConsole(Console):
    """A console whose texts cannot command the terminal, which gets lines that end between words."""

    def __init__(self, quiet: bool = False):
        soft_wrap = not sys.stdout.isatty()  # a file or a pipe gets lines as they are
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, quiet=quiet)

    def print(self, *texts: Any, **options: Any) -> None:
        super().print(*(printable(text) if isinstance(text, str) else text for text in texts), **options)


@contextmanager
def bar(console: Console, start: int, settings: Settings) -> Iterator[Callable[[int, float, float], None]]:
    """Shows a bar on the console while the context lasts; yields `show(step, loss, tokens_per_second)`.

    Until the first step is shown, the bar says that the step is being compiled.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]} {task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("compiling", total=settings.steps, completed=start, loss="?", speed="?")

        def show(step: int, loss: float, tokens_per_second: float) -> None:
            speed = f"{tokens_per_second:,.0f}" if tokens_per_second else "?"
            progress.update(task, description="step", completed=step, loss=f"{loss:.3f}", speed=speed)

        yield show
