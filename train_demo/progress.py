"""The progress bar of a training, which says how much time is left."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

WIDE = 80  # columns from which the bar also shows the speed


class TimeLeft(ProgressColumn):
    """The time left, such as "about 1:20 left"."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.time_remaining is None or task.finished:
            return Text()
        minutes, seconds = divmod(round(task.time_remaining), 60)
        hours, minutes = divmod(minutes, 60)
        time = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return Text(f"about {time} left", style="progress.remaining", no_wrap=True)


def progress_bar(console: Console) -> Progress:
    """Makes a progress bar as wide as the terminal; tasks have a description, and a `speed` for wide terminals."""
    speed = [TextColumn("{task.fields[speed]}")] if console.width >= WIDE else []
    ending = (MofNCompleteColumn(), *speed, TimeLeft())
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(None), *ending, console=console, expand=True
    )
