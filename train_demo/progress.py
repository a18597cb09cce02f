"""The progress bar: steps, loss, speed, time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

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
    """Shows a bar on the console while the context lasts; yields `show(step, loss)`."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TokensPerSecond(settings.batch_size * settings.context_length),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=settings.steps, completed=start, loss="?")
        yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}")
