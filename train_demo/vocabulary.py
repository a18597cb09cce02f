"""What a token is: a character, a byte, or a piece of a word. Texts become numbers, and numbers texts again."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from train_demo.errors import UserError, reason
from train_demo.files import read_bytes

FILE = "tokenizer.json"  # a run's own copy
UNFINISHED = "\ufffd"  # what bytes that are no character become
LONGEST = 64  # numbers that may wait for the rest of a character


@dataclass(frozen=True)
class Characters:
    """Every one of these characters, which are in the order of their code points, is a token.

    Example:
      >>> Characters("ab").encode("abba")
      array([0, 1, 1, 0], dtype=int32)
    """

    characters: str
    unit: ClassVar[str] = "character"
    name: ClassVar[str] = "characters"

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """The distinct characters of texts, in the order of their code points."""
        return cls("".join(sorted(set[str]().union(*texts))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        known, codes = (np.frombuffer(encoded(each, "utf-32-le"), np.uint32) for each in (self.characters, text))
        numbers = np.searchsorted(known, codes).astype(np.int32)
        unknown = known[np.minimum(numbers, len(known) - 1)] != codes
        if unknown.any():
            named = " ".join(repr(chr(code)) for code in np.unique(codes[unknown]).tolist())
            raise UserError(f"the model never saw {named}: leave these characters out")
        return numbers

    def decode(self, numbers: Iterable[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


@dataclass(frozen=True)
class Bytes:
    """Every byte of the text's UTF-8 is a token, so that any text can be written.

    Example:
      >>> Bytes().encode("a√")
      array([ 97, 226, 136, 154], dtype=int32)
    """

    unit: ClassVar[str] = "byte"
    name: ClassVar[str] = "bytes"

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Turns a text into its bytes, int32."""
        return np.frombuffer(encoded(text), np.uint8).astype(np.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        """Turns bytes into text; those that are no character become U+FFFD."""
        return bytes(numbers).decode(errors="replace")


@dataclass(frozen=True)
class Subwords:
    """The tokens of a JSON file of Hugging Face's `tokenizers`, whose bytes are `content`."""

    content: bytes
    unit: ClassVar[str] = "token"

    @property
    def name(self) -> str:
        return f"a file with the sha256 {hashlib.sha256(self.content).hexdigest()[:12]}"

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise UserError("a tokenizer file needs the package tokenizers: run pip install tokenizers") from None
        tokenizer = Tokenizer.from_buffer(self.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Turns a text into the numbers of its tokens, int32; no special tokens are added."""
        encoded(text)  # or says which character is none
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        return self._tokenizer.decode(list(numbers), skip_special_tokens=False)


# Each has a `unit`, which is what one token is called, and a `name`, which tells it from others.
Vocabulary = Characters | Bytes | Subwords


class Writer:
    """Turns the numbers of one text into characters as they come, and holds back what may be a part of a character.

    Example:
      >>> writer = Writer(Bytes())
      >>> writer([97, 226, 136]), writer([154]), writer([226], last=True)
      ('', 'a√', '�')
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Some tokenizers write a token differently at a text's start: what was shown last goes before what is new.
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def __call__(self, numbers: Sequence[int], last: bool = False) -> str:
        """Returns what can be shown now; with `last` all of it."""
        self._waiting += numbers
        before = self._vocabulary.decode(self._shown)
        text = self._vocabulary.decode([*self._shown, *self._waiting])[len(before) :]
        unfinished = text.endswith(UNFINISHED) and self._vocabulary.unit != Characters.unit
        if unfinished and not last and len(self._waiting) <= LONGEST:
            return ""
        self._shown, self._waiting = self._waiting, []
        return text


def chosen(tokenizer: str) -> Vocabulary | None:
    """Returns the vocabulary that a `--tokenizer` names; None for "characters", which the text decides."""
    if tokenizer in (Characters.name, Bytes.name):
        return Bytes() if tokenizer == Bytes.name else None
    fix = "give characters, bytes, or a JSON file of the package tokenizers"
    try:
        found = Subwords(read_bytes(Path(tokenizer)))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --tokenizer {tokenizer} ({reason(error)}): {fix}") from error
    try:
        size = len(found)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"--tokenizer {tokenizer} is not a tokenizer ({reason(error)}): {fix}") from error
    if size < 2:
        raise UserError(f"--tokenizer {tokenizer} has {size} tokens, at least 2 are needed: {fix}")
    return found


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise UserError(f"{text[error.start]!r} is no character: leave it out") from None


def visible(text: str) -> str:
    """Shows white space: one character each, so that a text stands on one line."""
    return text.translate({32: "␣", 10: "↵", 9: "⇥"})
