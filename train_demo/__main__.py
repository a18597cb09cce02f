"""`python -m train_demo [train | sample | plot | ...]`: starts a command; Ctrl-C and SIGTERM end it at once."""

# Only light modules of the standard library are imported here: Ctrl-C before the handler is set prints a traceback, and
# may even be ignored during the import of JAX.
import gc
import os
import sys
from collections.abc import Sequence

SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it
# New objects between two garbage collections: imports and traces make millions of objects, and little garbage.
COLLECT_EVERY = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM during the training.

    Raises:
      SystemExit: With code 2 and one line on stderr, for errors that the user can fix.
    """
    from train_demo.command_line import run

    return run(sys.argv[1:] if arguments is None else arguments)


def end_at_once(number: int = 2, *_: object) -> None:
    """Handles SIGINT and SIGTERM: ends the process with one line and exit code 128 + `number`.

    No exception is raised, because code that catches exceptions could keep the process alive. Files are written
    atomically, so that the run can be resumed.
    """
    try:
        sys.stdout.flush()
        if sys.stdout.isatty():
            os.write(1, SHOW_CURSOR)
        what = b"Interrupted" if number == 2 else b"Terminated"
        fix = b". To continue a training run: python -m train_demo --resume\n"
        os.write(sys.stderr.fileno(), what + fix)
    except (OSError, RuntimeError, ValueError, AttributeError):
        pass  # a closed stream, or one that was being written to when the signal came
    finally:
        os._exit(128 + number)


def _start() -> None:
    try:
        import signal
        from contextlib import suppress

        signal.signal(signal.SIGINT, end_at_once)
        signal.signal(signal.SIGTERM, end_at_once)
    except KeyboardInterrupt:
        end_at_once()
    gc.set_threshold(COLLECT_EVERY)
    try:
        code = main()
    except SystemExit as ended:
        if ended.code != 2:
            raise
        # Output that cannot be written is dropped, and threads are not waited for.
        with suppress(OSError):
            print(end="", flush=True)
            print(end="", flush=True, file=sys.stderr)
        os._exit(2)
    sys.exit(code)


if __name__ == "__main__":
    _start()
