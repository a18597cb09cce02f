"""Ctrl-C and SIGTERM while a run is trained: answered at once, heeded after the dispatch that runs.

A handler in Python runs only when the main thread executes Python, which it does not while XLA compiles or computes.
So a thread reads the signals' numbers from a socket, says that they came, and ends a process that does not stop in
time.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax.experimental import multihost_utils

GRACE = 9  # seconds that SIGTERM leaves for the step that runs, and for the checkpoint
STOPPING = {
    signal.SIGINT: "Stopping after this step, then saving (Ctrl-C again: stop at once)",
    signal.SIGTERM: "Terminated: stopping after this step, then saving",
}
TOO_LATE = b"Terminated before a step ended: python -m train_demo --resume goes on from the last checkpoint\n"


class Stop:
    """Whether a run was asked to stop, and by which signal.

    Attributes:
      number: The signal's; None as long as there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._dispatches = 0

    def asked(self) -> bool:
        """Returns whether to stop after this dispatch; several processes agree on the dispatch, after SIGTERM alone."""
        self._dispatches += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._dispatches):
            self.number = signal.SIGTERM
        return self.number is not None


@contextmanager
def heeded(say: Callable[[str], Any], several_processes: bool) -> Iterator[Stop]:
    """Turns the first Ctrl-C or SIGTERM into a request; the second one does what it did before."""
    stop = Stop()
    if several_processes or threading.current_thread() is not threading.main_thread():
        yield stop  # only a main thread may say what a signal does
        return
    before = {number: signal.getsignal(number) for number in STOPPING}

    def request(number: int, frame: object) -> None:
        stop.number = number
        _set_handlers(before)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, say), daemon=True)
    watcher.start()
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _set_handlers(dict.fromkeys(STOPPING, request))
    try:
        yield stop
    finally:
        _set_handlers(before)
        signal.set_wakeup_fd(wakeup)
        writer.close()
        watcher.join()
        reader.close()


def _set_handlers(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _watch(reader: socket.socket, say: Callable[[str], Any]) -> None:
    """Reads the numbers of signals until the socket is closed; ends the process where that takes too long."""
    try:
        while numbers := reader.recv(1):
            if numbers[0] == signal.SIGTERM:
                reader.settimeout(GRACE)
            if numbers[0] in STOPPING:
                with suppress(OSError):
                    say(STOPPING[signal.Signals(numbers[0])])
    except TimeoutError:
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), TOO_LATE)
        os._exit(128 + signal.SIGTERM)
