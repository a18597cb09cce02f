"""The data of a run: the characters of a file, of a folder of files, or of Python's documentation.

Several documents are concatenated, and windows are cut from the whole. A character attends only to characters of its
own document. The first character of a document, which cannot be predicted, is marked with `FIRST`. Positions do not
start anew at a document, because only their differences matter.
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

# Validation uses evenly spread windows with this many characters in all, or the whole of a smaller validation part.
VALIDATED = 2**16
WINDOWS = 32  # windows that are validated at a time
NUL = "\0"  # which binary files contain, and text does not
FIRST = 2**30  # a bit that is set in the first character of each of several documents


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
      vocabulary: The distinct characters.
      training: Numbers of the characters to train on, int32: the first nine tenths of one document, or about nine
        tenths of several documents, each starting with `FIRST` set.
      validation: Numbers of the other characters, in the same form.
      sha256: The fingerprint of the data, which a resumed run compares.
      documents: Number of documents.
      skipped: Number of files in the folder that are no text.
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
        """Returns the validation part's first short sentence, or else its start; cut to `limit` characters."""
        start = self.vocabulary.decode((self.validation[:VALIDATED] % FIRST).tolist())
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", start)
        return (found[0] if found else start[:40])[:limit]


def load(path: str | None, context_length: int) -> Text:
    """Reads the data of a run.

    Args:
      path: A UTF-8 file, or a folder of UTF-8 files; None means the topics of Python's `help()`, about 460,000
        characters of English.
      context_length: Number of characters of a window; both parts must have room for windows.
    """
    documents, skipped = _found(path)
    if not any(documents):
        raise UserError(f"--data {path} is empty: choose a UTF-8 text file with some text")
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
    """Returns the documents at a path, and the number of files that were skipped."""
    if path is None:
        from pydoc_data.topics import topics

        return ["\n".join(topics[name] for name in sorted(topics))], 0
    try:
        if Path(path).is_dir():
            return _found_in(Path(path))
        text = _read(Path(path))
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data {path} is not UTF-8 (byte {error.start}): convert it, or choose a different file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path that is not valid
        where = getattr(error, "filename", None) or path
        fix = "choose a UTF-8 text file, or a folder of them"
        raise UserError(f"cannot read --data {where} ({reason(error)}): {fix}") from error
    if NUL in text:
        raise UserError(
            f"--data must be text, but {path} is binary (it has a NUL character at index {text.index(NUL)}): choose a "
            "UTF-8 text file"
        )
    return [text], 0


def _found_in(folder: Path) -> tuple[list[str], int]:
    """Returns the texts of the files below a folder by path, without hidden files, and how many files it skipped.

    Skips, and counts, files that are binary, not UTF-8, or shorter than two characters.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    documents = []
    for file in files:
        try:
            text = _read(file)
        except UnicodeDecodeError:
            continue
        if len(text) > 1 and NUL not in text:
            documents.append(text)
    if not documents:
        raise UserError(f"--data {folder} contains no UTF-8 text ({len(files)} files): choose a different folder")
    return documents, len(files) - len(documents)


def _read(path: Path) -> str:
    """Reads a text, without a byte order mark, with newlines as the ends of lines."""
    if path.exists() and not path.is_file():  # a pipe or a device might never end
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_text("utf-8-sig")


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out(documents: Sequence[str]) -> set[str]:
    """Chooses the documents for validation: at most a tenth of all characters, but at least one document.

    They are taken in the order of their fingerprints, which is arbitrary but fixed; if the first one is larger than a
    tenth, the smallest document is taken. Equal documents are on the same side.
    """
    numbers = collections.Counter(documents)
    ordered = sorted(numbers, key=fingerprint)
    sums = itertools.accumulate(numbers[each] * len(each) for each in ordered)
    room = sum(map(len, documents)) // 10
    taken = {each for each, size in zip(ordered, sums, strict=True) if size <= room}
    return taken or {min(ordered, key=lambda each: numbers[each] * len(each))}


def _numbers(documents: Sequence[str], vocabulary: Vocabulary) -> Int[np.ndarray, " S"]:
    """Concatenates the numbers of the documents' characters, with `FIRST` set in the first of each document."""
    parts = [np.zeros(0, np.int32), *(vocabulary.encode(each) for each in documents)]
    for part in parts:
        part[:1] |= FIRST
    return np.concatenate(parts)


def _refuse_short(text: Text, path: str | None, context_length: int) -> None:
    # Validation needs a window and the character after it, training two windows.
    if len(text.validation) <= context_length or len(text.training) <= context_length + 1:
        raise UserError(
            f"{path or 'the text'} has {len(text.training)} characters for training and {len(text.validation)} for "
            f"validation, but --context-length {context_length} needs at least {context_length + 2} and "
            f"{context_length + 1}: use more text or a shorter context"
        )


def validation_windows(
    part: Int[np.ndarray, " V"], context_length: int, windows: int = WINDOWS
) -> Int[np.ndarray, "C W T+1"]:
    """Cuts C chunks of W = `windows` windows, evenly spread, out of the validation part; T is `context_length`.

    They predict every character after the first, if the part has no more than `VALIDATED` characters.
    """
    predicted = min(len(part) - 1, VALIDATED)
    chunks = -(-predicted // (context_length * windows))  # rounded up: windows may overlap a little
    starts = np.linspace(0, len(part) - 1 - context_length, chunks * windows).astype(int)
    return part[starts[:, None] + np.arange(context_length + 1)].reshape(chunks, windows, context_length + 1)
