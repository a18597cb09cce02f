"""The data of a run: the characters of a file, of a folder of files, or of Python's documentation.

Where the data has several documents, windows are cut from all of them, one after the other. A character attends
only to characters of its own document, and the first one of a document, which nothing announces, is not predicted: it
has a mark, from which everything else follows. Positions are not counted anew, because only their differences matter.
"""

import collections
import errno
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from train_demo.errors import UserError, reason
from train_demo.vocabulary import Vocabulary

# Large texts are validated on evenly spread windows that hold this many characters; smaller ones on all of them.
VALIDATED = 2**16
WINDOWS = 32  # validated at a time
FIRST = 2**30  # set in the number of the first character of a document


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
      vocabulary: Its distinct characters.
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
        start = self.vocabulary.decode((self.validation[:VALIDATED] % FIRST).tolist())
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", start)
        return (found[0] if found else start[:40])[:limit]


def load(path: str | None, context_length: int) -> Text:
    """Reads the data of a run.

    Args:
      path: A UTF-8 file, or a folder whose UTF-8 files all count; None means the topics of Python's `help()`, about
        460,000 characters of English.
      context_length: Characters of the windows that both parts have to hold.
    """
    documents, skipped = _found(path)
    if not any(documents):
        raise UserError(f"--data {path} is empty: give a UTF-8 text file")
    fingerprints = [fingerprint(each) for each in documents]
    sha256 = fingerprints[0] if len(documents) == 1 else fingerprint("".join(fingerprints))
    vocabulary = Vocabulary.of(documents)
    held = _held_out(documents) if len(documents) > 1 else set()
    training, validation = (
        _numbers([each for each in documents if (each in held) == side], vocabulary) for side in (False, True)
    )
    if not held:
        training, validation = np.split(training % FIRST, [len(training) - len(training) // 10])
    text = Text(vocabulary, training, validation, sha256, len(documents), skipped)
    _refuse_short(text, path, context_length)
    return text


def _found(path: str | None) -> tuple[list[str], int]:
    """Reads the documents of a path; returns them, and how many other files there are."""
    if path is None:
        from pydoc_data.topics import topics

        return ["\n".join(topics[name] for name in sorted(topics))], 0
    try:
        return _found_in(Path(path)) if Path(path).is_dir() else ([_read(Path(path))], 0)
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path} is not UTF-8 (byte {error.start}): convert it, or give another file") from error
    except (OSError, ValueError) as error:  # a ValueError: a path that no file can have
        where = getattr(error, "filename", None) or path
        fix = "give a UTF-8 text file, or a folder of them"
        raise UserError(f"cannot read --data {where} ({reason(error)}): {fix}") from error


def _found_in(folder: Path) -> tuple[list[str], int]:
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
            documents.append(text)
    if not documents:
        raise UserError(f"--data {folder} holds no UTF-8 text in its {len(files)} files: give another folder")
    return documents, len(files) - len(documents)


def _read(path: Path) -> str:
    """Reads a text without a byte order mark; its lines end with a newline only."""
    if path.exists() and not path.is_file():  # a pipe or a device might never end
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path.read_text("utf-8-sig")


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out(documents: Sequence[str]) -> set[str]:
    """Chooses the documents that validate: about a tenth of all characters, but at least one document.

    They are taken in the order of their fingerprints, which has nothing to do with what is in them, as long as they
    make up no more than a tenth; where already the first is larger, the smallest one. Equal documents go to the same
    side.
    """
    numbers = collections.Counter(documents)
    ordered = sorted(numbers, key=fingerprint)
    sums = itertools.accumulate(numbers[each] * len(each) for each in ordered)
    room = sum(map(len, documents)) // 10
    taken = {each for each, size in zip(ordered, sums, strict=True) if size <= room}
    return taken or {min(ordered, key=lambda each: numbers[each] * len(each))}


def _numbers(documents: Sequence[str], vocabulary: Vocabulary) -> Int[np.ndarray, " S"]:
    """Turns documents into numbers, one after the other, with `FIRST` set in the first of each."""
    parts = [np.zeros(0, np.int32), *(vocabulary.encode(each) for each in documents)]
    for part in parts:
        part[:1] |= FIRST
    return np.concatenate(parts)


def _refuse_short(text: Text, path: str | None, context_length: int) -> None:
    # The validation part holds one window and the character that follows it; the training part two windows.
    if len(text.validation) <= context_length or len(text.training) <= context_length + 1:
        raise UserError(
            f"{path or 'the text'} holds {len(text.training)} characters to train on and {len(text.validation)} to "
            f"validate, but --context-length {context_length} needs at least {context_length + 2} and "
            f"{context_length + 1}: give more text or a shorter context"
        )


def validation_windows(
    part: Int[np.ndarray, " V"], context_length: int, windows: int = WINDOWS
) -> Int[np.ndarray, "C W T+1"]:
    """Cuts the validation part into the same windows every time.

    Returns:
      C chunks of windows that are evenly spread: together they predict every character after the first, as long as the
      part holds no more than `VALIDATED`.
    """
    predicted = min(len(part) - 1, VALIDATED)
    chunks = -(-predicted // (context_length * windows))  # the division rounded up: the windows may overlap a little
    starts = np.linspace(0, len(part) - 1 - context_length, chunks * windows).astype(int)
    return part[starts[:, None] + np.arange(context_length + 1)].reshape(chunks, windows, context_length + 1)
