"""Handles Ctrl-C and SIGTERM in a training: acknowledges them at once, and stops after the current dispatch.

A handler in Python runs only when the main thread executes Python, not while XLA compiles or computes. So a thread
reads the signals' numbers from a socket, prints that they came, and ends a process that does not stop in time.
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

GRACE = 9  # seconds from SIGTERM until the current step and the checkpoint must be done
STOPPING = {
    signal.SIGINT: "Stopping after this step, then saving. Press Ctrl-C again to stop immediately.",
    signal.SIGTERM: "Terminated: stopping after this step, then saving",
}
TOO_LATE = b"Terminated before the step finished. To continue: python -m train_demo --resume\n"


class Stop:
    """Tells if the training was asked to stop.

    Attributes:
      number: The number of the signal; None without a request.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._dispatches = 0

    def asked(self) -> bool:
        """Returns True if the run stops now; called once a dispatch. Several processes agree, and only heed SIGTERM."""
        self._dispatches += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._dispatches):
            self.number = signal.SIGTERM
        return self.number is not None


@contextmanager
def heeded(say: Callable[[str], Any], several_processes: bool) -> Iterator[Stop]:
    """Yields a `Stop` that the first Ctrl-C or SIGTERM in the context sets; then the earlier handlers are back."""
    stop = Stop()
    if several_processes or threading.current_thread() is not threading.main_thread():
        yield stop  # only a main thread may set handlers
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
    """Says which signals came, by their numbers from the socket; ends the process `GRACE` seconds after SIGTERM."""
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
