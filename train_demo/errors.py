"""The error that is shown as one line, and text that is safe to show."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Control characters except newline and tab, lone surrogates, and what reverses the direction of writing.
UNSAFE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]")


class UserError(Exception):
    """Something that the user can mend; its text is one line, names the options of the command, and says how."""


def reason(error: Exception) -> str:
    """Puts an error of the system, or of a library, in a few words on one line."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split())[:200]


def printable(text: str) -> str:
    r"""Escapes what could command a terminal, or cannot be written to it.

    Example:
      >>> print(printable("red: \x1b[31m"))
      red: \x1b[31m
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Names the options to lower where the device has too little memory."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device has too little memory: lower {options}") from error
