"""Text that fits a terminal: lines break between words."""

import itertools
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator

from train_demo.errors import printable


def columns() -> int:
    """The width of the terminal, or `COLUMNS` if that is set; 80 without a terminal."""
    return shutil.get_terminal_size().columns


def cells(text: str) -> int:
    """The columns that a text takes; East Asian characters take two.

    Example:
      >>> cells("漢字!")
      5
    """
    return sum(not unicodedata.combining(x) and 1 + (unicodedata.east_asian_width(x) in "WF") for x in text)


def wrapped(pieces: Iterable[str], width: int) -> Iterator[str]:
    r"""Breaks lines between words, unless a word is longer than a line; yields each word as soon as it is complete.

    Example:
      >>> "".join(wrapped(["two wo", "rds\n  more"], 8))
      'two\nwords\n  more\n'
    """
    column, space, word = 0, "", ""
    for character in itertools.chain.from_iterable(itertools.chain(pieces, "\n")):
        if not character.isspace():
            word += character
            continue
        if word:
            length = len(space.expandtabs()) + cells(word)
            fits = not column or column + length <= width
            yield space + word if fits else "\n" + word
            column = column + length if fits else cells(word)
            space = word = ""
        if character == "\n":
            yield "\n"
            column, space = 0, ""
        else:
            space += character


def excerpt(text: str, width: int) -> str:
    r"""Returns the first words of a text, as one printable line of at most this many columns.

    Example:
      >>> excerpt("The first\nline of several", 18)
      'The first↵line…'
    """
    line = printable(text.replace("\n", "↵").replace("\t", " "))
    while line and cells(line) >= width:
        line = line[:-1]
    words = re.match(r"(.*\S)[ ↵]", line)  # the last word may be cut
    return (words[1] if words else line.rstrip()) + "…"
