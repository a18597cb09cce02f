"""How many steps of the training are dispatched at once; it changes nothing of what they compute."""

import time
from collections.abc import Iterable

from train_demo.layout import Layout

SECONDS = 0.25  # of a dispatch: so soon Ctrl-C is heeded, and the bar moves
IN_STEP = 8  # steps in each dispatch of several processes, which must not disagree


class Pace:
    """Chooses the length of each dispatch from how long the ones before it took.

    Args:
        most: steps that fit in a dispatch.
        layout: of several processes each has a clock of its own, so there the length is always the same.

    Attributes:
        steps: how many steps to dispatch next.
    """

    def __init__(self, most: int, layout: Layout):
        self._most, self._fixed = most, layout.num_processes is not None
        self.steps = min(IN_STEP, most) if self._fixed else 1
        self._since: float | None = None  # the first dispatch compiles, and says nothing about the ones after it
        self._taken, self._seconds = 0, 0.0

    def took(self, steps: int) -> None:
        """Notes that so many steps have ended since the last call of this or of `pause`."""
        now = time.perf_counter()
        if self._since is not None:
            seconds = max(now - self._since, 1e-6)
            self._taken, self._seconds = self._taken + steps, self._seconds + seconds
            if not self._fixed:
                self.steps = max(1, min(round(steps * SECONDS / seconds), 2 * self.steps, self._most))
        self._since = now

    @property
    def speed(self) -> float:
        """Steps per second so far, without what came between them; 0 before that is known."""
        return self._taken / self._seconds if self._taken else 0.0

    def pause(self) -> None:
        """Notes that something else took time."""
        self._since = time.perf_counter()


def next_stop(step: int, last: Iterable[int], *every: int) -> int:
    """The first step after `step` that a dispatch must not go beyond.

    Args:
        step: the last step that was taken.
        last: steps to stop at.
        every: numbers to whose multiples it has to stop at.

    Example:
        >>> next_stop(10, [14, 100], 4, 200)
        12
    """
    return min([end for end in last if end > step] + [step + number - step % number for number in every])
