"""The progress bar: steps, loss, speed, time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from train_demo.settings import Settings


@contextmanager
def bar(console: Console, start: int, settings: Settings) -> Iterator[Callable[[int, float, float], None]]:
    """Shows a bar on the console while the context lasts; yields `show(step, loss, steps_per_second)`.

    Until the first step is shown, the bar says that the step is being compiled.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    tokens = settings.batch_size * settings.context_length
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("compiling", total=settings.steps, completed=start, loss="?", speed="?")

        def show(step: int, loss: float, steps_per_second: float) -> None:
            speed = f"{tokens * steps_per_second:,.0f}" if steps_per_second else "?"
            progress.update(task, description="step", completed=step, loss=f"{loss:.3f}", speed=speed)

        yield show


@contextmanager
def busy(console: Console, what: str) -> Iterator[None]:
    """Says what takes a while, with a spinner on a terminal, for as long as the context lasts."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what)
        yield
