"""`python -m train_demo [train | sample | ...]`: starts a command."""

# Only light modules of the standard library are imported here: Ctrl-C before the
# handler is set prints a traceback, and may even be ignored during the import of JAX.
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it
WORDS = b"Interrupted. To continue a training run: python -m train_demo --resume\n"
# New objects between two garbage collections: imports and traces make millions of
# objects, and little garbage.
COLLECT_EVERY = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM during the training.

    Raises:
      SystemExit: With code 2 and one line on stderr, for errors that the user can fix.
    """
    try:
        from train_demo.command_line import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        print(
            f"python -m train_demo: error: {error.name} is not installed: run pip "
            "install -e '.[demo]' in the repository",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def end_at_once(number: int = 2, *_: object) -> None:
    """Handles SIGINT and SIGTERM: ends the process with one line and 128 + `number`.

    No exception is raised, because code that catches exceptions could keep the process
    alive. Files are written atomically, so that the run can be resumed.
    """
    with suppress(OSError):  # a stream may be closed
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)
        os.write(2, WORDS)
    os._exit(128 + number)


def start() -> None:
    """Handles signals, runs the command of `sys.argv`, and ends the process."""
    try:
        import signal

        signal.signal(signal.SIGINT, end_at_once)
        signal.signal(signal.SIGTERM, end_at_once)
    except KeyboardInterrupt:
        end_at_once()
    gc.set_threshold(COLLECT_EVERY)
    # Where a disk is full or a file is damaged, Orbax raises an error, and then others
    # in threads that nobody waits for. This process is the command's own: `main` and
    # `train_demo.train` leave the hook of their caller as it is.
    sys.unraisablehook = lambda _: None
    try:
        code = main()
    except SystemExit as ended:
        if ended.code != 2:
            raise
        # Output that cannot be written is dropped, and threads are not waited for.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(2)
    sys.exit(code)


if __name__ == "__main__":
    start()
