"""The error that the command line shows as one line, and text that is safe to show."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters except newline and tab, lone surrogates, and what reverses the direction of writing.
UNSAFE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]")


class UserError(Exception):
    """Something that the person at the command line can mend; its text is one line and says how."""


def printable(text: str) -> str:
    r"""Escapes what could command a terminal, or cannot be written to it.

    Example:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Names the options to lower where the device has too little memory.

    Raises:
        UserError: it has.
    """
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device has too little memory: lower {options}") from error


class MainThreadOnly:
    """A stream that drops what other threads write to it.

    Threads of TensorStore, which writes the checkpoints, print long tracebacks of an error that the main thread says
    in one line, and some come after that line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text if the main thread asks for it."""
        ours = threading.get_ident() == threading.main_thread().ident
        return self._stream.write(text) if ours else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
