"""Errors that are printed as one line, and text that is safe to print."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Control characters except newline and tab, lone surrogates, and marks that change the direction of writing.
UNSAFE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]")


class UserError(Exception):
    """An error that the user can fix: one line that names the options of the command, and says how."""


def reason(error: Exception) -> str:
    """Returns the message of an error of the system or of a library, on one line and not too long."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split())[:200]


def printable(text: str) -> str:
    r"""Escapes characters that control a terminal, or that cannot be written to it.

    Example:
      >>> print(printable("red: \x1b[31m"))
      red: \x1b[31m
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextmanager
def any_encoding() -> Iterator[None]:
    """In the context, stdout and stderr write "?" for characters that their encoding, such as ASCII, does not have."""
    strict = [x for x in (sys.stdout, sys.stderr) if isinstance(x, io.TextIOWrapper) and x.errors == "strict"]
    for stream in strict:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream in strict:
            with suppress(OSError, ValueError):  # it flushes, and the stream may be closed or its disk full
                stream.reconfigure(errors="strict")


@contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Turns JAX's error in the context that a device lacks memory into a `UserError` that names options to lower."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"there is not enough memory on the device: reduce {options}") from error
