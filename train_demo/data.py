"""The data of a run: a text file, a folder of them, or Python's documentation.

Several documents are concatenated, and windows are cut from the whole. A character
attends only to characters of its own document. The first character of a document, which
cannot be predicted, is marked with `FIRST`. Positions do not restart at a document,
because only their differences matter.
"""

import collections
import errno
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from train_demo.errors import UserError, reason

# Validation uses evenly spread windows with this many characters in all, or the whole
# of a smaller validation part.
VALIDATED = 2**16
WINDOWS = 32  # windows that are validated at a time
NUL = "\0"  # which binary files contain, and text does not
FIRST = 2**30  # a bit that is set in the first character of each of several documents


@dataclass(frozen=True)
class Vocabulary:
    """The tokens: the distinct characters of the data, in the order of code points.

    Example:
      >>> Vocabulary("ab").encode("abba")
      array([0, 1, 1, 0], dtype=int32)
    """

    characters: str

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        known = _code_points(self.characters)
        codes = _code_points(text)
        numbers = np.searchsorted(known, codes).astype(np.int32)
        unknown = known[np.minimum(numbers, len(known) - 1)] != codes
        if unknown.any():
            names = [repr(chr(code)) for code in np.unique(codes[unknown]).tolist()]
            raise UserError(
                f"the training text does not contain {' '.join(names)}: remove these "
                "characters"
            )
        return numbers

    def decode(self, numbers: Iterable[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


def _code_points(text: str) -> Int[np.ndarray, " S"]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
      vocabulary: The distinct characters.
      training: Numbers of the characters to train on, int32: the first nine tenths of
        one document, or about nine tenths of several documents, each starting with
        `FIRST` set.
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

    @property
    def packed(self) -> bool:
        return self.documents > 1

    def sentence(self, limit: int) -> str:
        """Returns a short sentence of the validation part, of `limit` characters."""
        start = self.vocabulary.decode((self.validation[:VALIDATED] % FIRST).tolist())
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", start)
        if found:
            return found[0][:limit]
        return start[:40][:limit]


def load(path: str | None, context_length: int) -> Text:
    """Reads the data of a run.

    Args:
      path: A UTF-8 file, or a folder of UTF-8 files; None means the topics of Python's
        `help()`, about 460,000 characters of English.
      context_length: Number of characters of a window, for which both parts need room.
    """
    documents, skipped = _found(path)
    if not any(documents):
        raise UserError(
            f"--data {path} is empty: choose a UTF-8 text file with some text"
        )
    vocabulary = Vocabulary("".join(sorted(set().union(*documents))))
    sha256 = fingerprint("".join(map(fingerprint, documents)))
    if len(documents) == 1:
        numbers = vocabulary.encode(documents[0])
        split = len(numbers) - len(numbers) // 10
        training = numbers[:split]
        validation = numbers[split:]
    else:
        held_out = _held_out(documents)
        kept = [each for each in documents if each not in held_out]
        others = [each for each in documents if each in held_out]
        training = _packed(kept, vocabulary)
        validation = _packed(others, vocabulary)
    # Validation needs a window and the character after it, training two windows.
    if len(validation) <= context_length or len(training) <= context_length + 1:
        raise UserError(
            f"{path or 'the text'} has {len(training)} characters for training and "
            f"{len(validation)} for validation, but --context-length {context_length} "
            f"needs at least {context_length + 2} and {context_length + 1}: use more "
            "text or a shorter context"
        )
    return Text(vocabulary, training, validation, sha256, len(documents), skipped)


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
            f"--data {path} is not UTF-8 (byte {error.start}): convert it, or choose a "
            "different file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path that is not valid
        where = getattr(error, "filename", None) or path
        raise UserError(
            f"cannot read --data {where} ({reason(error)}): choose a UTF-8 text file, "
            "or a folder of them"
        ) from error
    if NUL in text:
        raise UserError(
            f"--data must be text, but {path} is binary (it has a NUL character at "
            f"index {text.index(NUL)}): choose a UTF-8 text file"
        )
    return [text], 0


def _found_in(folder: Path) -> tuple[list[str], int]:
    """Returns the texts of the files below a folder, by path, without hidden files.

    Skips, and counts, files that are binary, not UTF-8, or shorter than two characters.
    """
    documents = []
    number = 0
    for file in sorted(folder.rglob("*")):
        is_hidden = any(x.startswith(".") for x in file.relative_to(folder).parts)
        if is_hidden or not file.is_file():
            continue
        number += 1
        try:
            text = _read(file)
        except UnicodeDecodeError:
            continue
        if len(text) > 1 and NUL not in text:
            documents.append(text)
    if not documents:
        raise UserError(
            f"--data {folder} contains no UTF-8 text ({number} files): choose a "
            "different folder"
        )
    return documents, number - len(documents)


def _read(path: Path) -> str:
    """Reads a text, without a byte order mark, with newlines as the ends of lines."""
    if path.exists() and not path.is_file():  # a pipe or a device might never end
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_text("utf-8-sig")


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out(documents: Sequence[str]) -> set[str]:
    """Chooses documents for validation: a tenth of all characters, or one document.

    They are taken in the order of their fingerprints, which is arbitrary but fixed; if
    the first one is larger than a tenth, the smallest document is taken. Equal
    documents are on the same side.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for document in documents:
        sizes[document] += len(document)
    room = sizes.total() // 10
    taken = set()
    for document in sorted(sizes, key=fingerprint):
        room -= sizes[document]
        if room < 0:
            break
        taken.add(document)
    return taken or {min(sorted(sizes, key=fingerprint), key=sizes.__getitem__)}


def _packed(documents: Sequence[str], vocabulary: Vocabulary) -> Int[np.ndarray, " S"]:
    """Concatenates the documents' numbers, with `FIRST` set where each begins."""
    numbers = [np.zeros(0, np.int32)]
    for document in documents:
        encoded = vocabulary.encode(document)
        encoded[0] |= FIRST
        numbers.append(encoded)
    return np.concatenate(numbers)


def validation_windows(
    part: Int[np.ndarray, " V"], context_length: int, windows: int = WINDOWS
) -> Int[np.ndarray, "C W T+1"]:
    """Cuts C chunks of W windows, evenly spread, out of the validation part.

    They predict every character after the first, if the part has no more than
    `VALIDATED` characters. T is `context_length`.
    """
    predicted = min(len(part) - 1, VALIDATED)
    # Rounded up: windows may overlap a little.
    chunks = -(-predicted // (context_length * windows))
    last = len(part) - 1 - context_length
    starts = np.linspace(0, last, chunks * windows).astype(int)
    places = starts[:, None] + np.arange(context_length + 1)
    return part[places].reshape(chunks, windows, context_length + 1)
