"""The error that is shown as one line, and text that is safe to show."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Control characters except newline and tab, lone surrogates, and what reverses the direction of writing.
UNSAFE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]")
# A command that a text ends with, and options: `--resume` takes no value.
COMMAND = re.compile(r"python -m train_demo( --resume)? --out (.+)$")
OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])")


class UserError(Exception):
    """Something that the user can mend; its text is one line and says how.

    Args:
      for_command: The text as the command line shows it, with its options. `str(error)` names the arguments of the
        functions of `train_demo` instead.

    Example:
      >>> str(UserError("--batch-size 3 is odd: pass --resume, or run python -m train_demo --out here"))
      "batch_size 3 is odd: pass resume=True, or run train_demo.train(out='here')"
    """

    def __init__(self, for_command: str):
        super().__init__(for_command)
        self.for_command = for_command

    def __str__(self) -> str:
        text = COMMAND.sub(
            lambda found: f"train_demo.train({'resume=True, ' if found[1] else ''}out={found[2]!r})", self.for_command
        )
        return OPTION.sub(lambda found: found[1].replace("-", "_") + "=True" * (found[1] == "resume"), text)


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
