"""The progress bar: steps, loss, speed, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from train_demo import STARTED
from train_demo.settings import Settings


class TokensPerSecond(ProgressColumn):
    """How many characters the training reads a second."""

    def __init__(self, tokens_per_step: int):
        super().__init__()
        self.tokens_per_step = tokens_per_step

    def render(self, task: Task) -> Text:
        """Shows the speed over the last half minute."""
        return Text(f"{(task.speed or 0) * self.tokens_per_step:,.0f} tokens/s")


@contextmanager
def bar(console: Console, start: int, settings: Settings) -> Iterator[Callable[[int, float], None]]:
    """Shows a bar on the console while the context lasts; yields `show(step, loss)`.

    Until the first step is shown, the bar says that the step is being compiled; then a line says how long that took.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TokensPerSecond(settings.batch_size * settings.context_length),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=settings.steps, completed=start, loss="?")

        def show(step: int, loss: float) -> None:
            if step == start + 1:
                progress.reset(task, completed=start, description="step")
                console.print(f"the first step is done {time.perf_counter() - STARTED:.1f} s after the start")
            progress.update(task, completed=step, loss=f"{loss:.3f}")

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
