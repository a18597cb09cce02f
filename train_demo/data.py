"""The text: where it comes from, its characters as numbers, its training and its validation part."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from train_demo.errors import UserError

# Large texts are validated on evenly spread windows that hold this many characters; smaller ones on all of them.
VALIDATION_CHARACTERS = 2**16
WINDOWS = 32  # validated at a time


@dataclass(frozen=True)
class Text:
    """A text whose first 90 % train and whose last 10 % validate."""

    characters: str

    @cached_property
    def vocabulary(self) -> str:
        """The distinct characters in order; a character's number is its place here."""
        return "".join(sorted(set(self.characters)))

    @cached_property
    def sha256(self) -> str:
        """The text's fingerprint, by which a resumed run knows its own text."""
        return hashlib.sha256(self.characters.encode()).hexdigest()

    @property
    def training(self) -> str:
        """The first 90 % of the characters."""
        return self.characters[: self._split]

    @property
    def validation(self) -> str:
        """The last 10 % of the characters."""
        return self.characters[self._split :]

    def sentence(self, limit: int) -> str:
        """The validation part's first sentence that stands on one line, or its start: at most `limit` characters."""
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", self.validation)
        return (found[0] if found else self.validation[:40])[:limit]

    @property
    def _split(self) -> int:
        return len(self.characters) - len(self.characters) // 10


def load(path: str | None, context_length: int) -> Text:
    """Reads a UTF-8 file, or the Python documentation that every interpreter carries.

    Args:
        path: the file; None means the topics of Python's `help()`, about 460,000 characters of English.
        context_length: characters of the windows that both parts have to hold.

    Raises:
        UserError: the file is missing, unreadable, empty, not UTF-8, or too short for `context_length`.
    """
    text = Text(_python_documentation() if path is None else _read(path))
    # The validation part, a tenth of the text, holds one window and the character that follows it.
    needed = 10 * (context_length + 1)
    if len(text.characters) < needed:
        raise UserError(
            f"{path or 'the text'} holds {len(text.characters)} characters, but --context-length {context_length} "
            f"needs at least {needed}: give a longer text or a shorter context"
        )
    return text


def _python_documentation() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: str) -> str:
    try:
        characters = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read --data {path} ({error.strerror}): give a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path} is not UTF-8 (byte {error.start}): convert it, or give another file") from error
    except ValueError as error:  # a path that no file can have
        raise UserError(f"cannot read --data {path} ({error}): give a UTF-8 text file") from error
    if not characters:
        raise UserError(f"--data {path} is empty: give a UTF-8 text file")
    return characters


def encode(characters: str, vocabulary: str) -> np.ndarray:
    """Turns characters into their numbers, int32 `[len(characters)]`.

    Raises:
        UserError: `characters` holds some that are not in `vocabulary`.

    Example:
        >>> encode("abba", "ab")
        array([0, 1, 1, 0], dtype=int32)
    """
    unknown = sorted(set(characters) - set(vocabulary))
    if unknown:
        named = " ".join(repr(character) for character in unknown)
        raise UserError(f"the model never saw {named}: leave these characters out")
    return np.searchsorted(_codes(vocabulary), _codes(characters)).astype(np.int32)


def _codes(characters: str) -> np.ndarray:
    return np.frombuffer(characters.encode("utf-32-le"), np.uint32)


def validation_windows(numbers: np.ndarray, context_length: int, windows: int = WINDOWS) -> np.ndarray:
    """Cuts the validation part into the same windows every time.

    Args:
        numbers: the part's characters, `[S]`, at least `context_length + 1`.
        context_length: T, the characters that a window predicts.
        windows: W, validated at a time.

    Returns:
        int32 `[C, W, T + 1]`, C chunks of windows that are evenly spread: together they predict every character
        after the first, as long as the part holds no more than `VALIDATION_CHARACTERS`.
    """
    predicted = min(len(numbers) - 1, VALIDATION_CHARACTERS)
    chunks = -(-predicted // (context_length * windows))  # the division rounded up: the windows may overlap a little
    starts = np.linspace(0, len(numbers) - 1 - context_length, chunks * windows).astype(int)
    return numbers[starts.reshape(chunks, windows, 1) + np.arange(context_length + 1)]
