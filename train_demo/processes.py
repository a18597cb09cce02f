"""Connects several processes that train one model, and ends each with one line if another one is lost."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from train_demo import crash_log
from train_demo.errors import UserError, printable, reason
from train_demo.settings import Layout

HEARTBEAT_SECONDS = 10  # a process that is silent for longer is lost


@contextmanager
def joined(layout: Layout) -> Iterator[None]:
    """Connects to the other processes of the run inside the context; does nothing for a single process.

    Raises:
      UserError: Another process was lost, or the coordinator's port is taken.
    """
    if layout.num_processes is None:
        yield
        return
    reader = _hide_logs(layout)  # noqa: F841 - Python warns of a process that is deleted while it runs
    _connect(layout)
    try:
        yield
        wait("the end")
    except UserError:
        raise
    except Exception as error:
        # The runtime may be about to abort this process, with a better message.
        time.sleep(HEARTBEAT_SECONDS + 2)
        raise UserError(f"another process was lost ({reason(error)}): {crash_log.AGAIN}") from error


def _connect(layout: Layout) -> None:
    # After its own time-out JAX would abort the process with a long log.
    timer = threading.Timer(layout.start_timeout, _not_found, [layout])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            layout.coordinator,
            layout.num_processes,
            layout.process_id,
            initialization_timeout=layout.start_timeout + 30,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (JaxRuntimeError, ValueError) as error:
        raise UserError(
            f"process {layout.process_id} cannot start at --coordinator {layout.coordinator} "
            f"({reason(error)}): choose a different port"
        ) from error
    wait("the start")
    timer.cancel()


def _not_found(layout: Layout) -> None:
    others = "not all other processes connected to" if layout.first else "no process responded at"
    line = (
        f"python -m train_demo: error: {others} --coordinator {layout.coordinator} within {layout.start_timeout} s: "
        f"start {layout.num_processes} processes, with --process-id 0 to {(layout.num_processes or 1) - 1}\n"
    )
    os.write(sys.stderr.fileno(), printable(line).encode())
    os._exit(2)


def _hide_logs(layout: Layout) -> subprocess.Popen:
    """Starts and returns `crash_log`, which reads what C++ libraries print; only process 0 keeps Python's stdout."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader = subprocess.Popen(
        [sys.executable, str(Path(crash_log.__file__))], stdin=subprocess.PIPE, start_new_session=True
    )
    assert reader.stdin is not None
    out, error = os.dup(1), os.dup(2)
    os.dup2(reader.stdin.fileno(), 1)
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    target, encoding, errors = out if layout.first else os.devnull, sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(target, "w", encoding=encoding, errors=errors)  # noqa: SIM115
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = open(error, "w", buffering=1, encoding=encoding, errors=errors)  # noqa: SIM115
    return reader


def wait(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def refuse_differences(what: str, text: str) -> None:
    """Raises a `UserError` about `what` if `text` differs from that of process 0; all processes have to call this."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    if (multihost_utils.broadcast_one_to_all(digest) != digest).any():
        raise UserError(f"{what} differ from process 0's: start all processes with the same ones")
