"""Errors that are printed as one line, and text that is safe to print."""

import re

# Control characters except newline and tab, lone surrogates, and marks that change the
# direction of writing.
UNSAFE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]"
)


class UserError(Exception):
    """An error that the user can fix: one line that names the option, and says how."""


def reason(error: Exception) -> str:
    """Returns the end of an error's message, which says most, on one line."""
    words = str(error)
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
    return " ".join(words.split())[-200:]


def printable(text: str) -> str:
    r"""Escapes characters that control a terminal, or that cannot be written to it.

    Example:
      >>> print(printable("red: \x1b[31m"))
      red: \x1b[31m
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
