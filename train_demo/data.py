"""The data of a run: the tokens of a file, of a folder of files, or of Python's documentation.

Where the data has several documents, windows are cut from all of them, one after the other. A token attends only to
tokens of its own document, and the first token of a document, which nothing announces, is not predicted: it has a mark,
from which everything else follows. Positions are not counted anew, because only their differences matter.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from train_demo.errors import UserError, reason
from train_demo.files import read_bytes
from train_demo.vocabulary import UNFINISHED, Characters, Vocabulary

# Large texts are validated on evenly spread windows that hold this many tokens; smaller ones on all of them.
VALIDATION_TOKENS = 2**16
WINDOWS = 32  # validated at a time
FIRST = 2**30  # set in the number of the first token of a document
LARGE = 2**26  # characters; a longer text is turned into tokens piece by piece
PIECE = 2**20  # characters; a piece ends where a line ends


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
      vocabulary: Its tokens.
      training: Nine tenths of it, or what is not held out, int32; `FIRST` is set where one of several documents starts.
      validation: Its last tenth, likewise; of several documents about a tenth, but whole documents.
      sha256: Its fingerprint, by which a resumed run knows its own data.
      documents: How many there are.
      skipped: Files of the folder that are no text.
    """

    vocabulary: Vocabulary
    training: Int[np.ndarray, " S"]
    validation: Int[np.ndarray, " V"]
    sha256: str
    documents: int = 1
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.training) + len(self.validation)

    @property
    def packed(self) -> bool:
        return self.documents > 1

    def sentence(self, limit: int) -> str:
        """Finds the validation part's first sentence that stands on one line, or its start."""
        start = self.vocabulary.decode((self.validation[:VALIDATION_TOKENS] % FIRST).tolist())
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", start)
        sentence = found[0] if found else start.strip(UNFINISHED)[:40] or start[:1]
        while len(sentence) > 1 and len(self.vocabulary.encode(sentence)) > limit:
            sentence = sentence[:-1]
        return sentence


class Document(NamedTuple):
    """A text and its fingerprint."""

    text: str
    sha256: str


def load(path: str | None, context_length: int, vocabulary: Vocabulary | None = None) -> Text:
    """Reads the data of a run.

    Args:
      path: A UTF-8 file, or a folder whose UTF-8 files all count; None means the topics of Python's `help()`, about
        460,000 characters of English.
      context_length: Tokens of the windows that both parts have to hold.
      vocabulary: The tokens; None means the distinct characters of the data.
    """
    documents, skipped = _found(path)
    if not any(each.text for each in documents):
        raise UserError(f"--data {path} is empty: give a UTF-8 text file")
    fingerprints = [each.sha256 for each in documents]
    sha256 = fingerprints[0] if len(documents) == 1 else hashlib.sha256("".join(fingerprints).encode()).hexdigest()
    vocabulary = vocabulary or Characters.of(each.text for each in documents)
    held = _held_out(documents) if len(documents) > 1 else set()
    training, validation = (
        _tokens([each for each in documents if (each.sha256 in held) == side], vocabulary) for side in (False, True)
    )
    if not held:
        training, validation = np.split(training % FIRST, [len(training) - len(training) // 10])
    text = Text(vocabulary, training, validation, sha256, len(documents), skipped)
    _refuse_short(text, path, context_length)
    return text


def _found(path: str | None) -> tuple[list[Document], int]:
    """Reads the documents of a path; returns them, and how many other files there are."""
    if path is None:
        from pydoc_data.topics import topics

        return [_document("\n".join(topics[name] for name in sorted(topics)))], 0
    try:
        return _found_in(Path(path)) if Path(path).is_dir() else ([_document(_read(Path(path)))], 0)
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path} is not UTF-8 (byte {error.start}): convert it, or give another file") from error
    except (OSError, ValueError) as error:  # a ValueError: a path that no file can have
        where = getattr(error, "filename", None) or path
        fix = "give a UTF-8 text file, or a folder of them"
        raise UserError(f"cannot read --data {where} ({reason(error)}): {fix}") from error


def _found_in(folder: Path) -> tuple[list[Document], int]:
    """Reads the files below a folder in the order of their paths, but no hidden ones, and skips those that are no text.

    Files are skipped that are binary, not UTF-8, or shorter than two characters.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    documents = []
    for file in files:
        try:
            text = _read(file)
        except UnicodeDecodeError:
            continue
        if len(text) > 1 and "\0" not in text:
            documents.append(_document(text))
    if not documents:
        raise UserError(f"--data {folder} holds no UTF-8 text in its {len(files)} files: give another folder")
    return documents, len(files) - len(documents)


def _read(path: Path) -> str:
    """Reads a text without a byte order mark; its lines end with a newline only."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()


def _document(text: str) -> Document:
    return Document(text, hashlib.sha256(text.encode()).hexdigest())


def _held_out(documents: Sequence[Document]) -> set[str]:
    """Chooses the documents that validate, by their fingerprints: about a tenth of all characters.

    They are taken in the order of their fingerprints, which has nothing to do with what is in them, as long as they
    make up no more than a tenth; where already every document is larger than that, the smallest one. Equal documents
    go to the same side.
    """
    sizes: dict[str, int] = {}
    for each in documents:
        sizes[each.sha256] = sizes.get(each.sha256, 0) + len(each.text)
    taken, room = set(), sum(sizes.values()) // 10
    for sha256 in sorted(sizes):
        if sizes[sha256] <= room:
            taken.add(sha256)
            room -= sizes[sha256]
    return taken or {min(sorted(sizes), key=lambda sha256: sizes[sha256])}


def _tokens(documents: Sequence[Document], vocabulary: Vocabulary) -> Int[np.ndarray, " S"]:
    """Turns documents into numbers, one after the other, with `FIRST` set in the first of each."""
    found = [np.zeros(0, np.int32)]
    for each in documents:
        file = io.StringIO(each.text, newline="")
        size = PIECE if len(each.text) > LARGE else len(each.text)
        start = len(found)
        while piece := file.read(size):
            found.append(vocabulary.encode(piece + file.readline(PIECE)))
        found[start] = np.concatenate([found[start][:1] | FIRST, found[start][1:]])
    return np.concatenate(found)


def _refuse_short(text: Text, path: str | None, context_length: int) -> None:
    # The validation part holds one window and the token that follows it; the training part two windows.
    unit, needed = text.vocabulary.unit, context_length + 1
    fix = f"--context-length {context_length}"
    if not text.packed and len(text) < 10 * needed:
        raise UserError(
            f"{path or 'the text'} holds {len(text)} {unit}s, but {fix} needs at least {10 * needed}: give a longer "
            "text or a shorter context"
        )
    if len(text.validation) < needed or len(text.training) <= needed:
        raise UserError(
            f"{path} holds {len(text.training)} {unit}s to train on and, in other documents, {len(text.validation)} to "
            f"validate, but {fix} needs at least {needed} of each: give more text or a shorter context"
        )


def validation_windows(
    part: Int[np.ndarray, " V"], context_length: int, windows: int = WINDOWS
) -> Int[np.ndarray, "C W T+1"]:
    """Cuts the validation part into the same windows every time.

    Returns:
      C chunks of windows that are evenly spread: together they predict every token after the first, as long as the part
      holds no more than `VALIDATION_TOKENS`.
    """
    predicted = min(len(part) - 1, VALIDATION_TOKENS)
    chunks = -(-predicted // (context_length * windows))  # the division rounded up: the windows may overlap a little
    starts = np.linspace(0, len(part) - 1 - context_length, chunks * windows).astype(int)
    return part[starts[:, None] + np.arange(context_length + 1)].reshape(chunks, windows, context_length + 1)
