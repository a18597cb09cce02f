"""Where text comes from: a file, a folder of files, or the Python documentation that every interpreter carries."""

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from train_demo.errors import UserError
from train_demo.files import read_bytes
from train_demo.vocabulary import codes_of

LARGE = 2**26  # bytes; more text than this is not kept in memory, but read again whenever it is needed
PIECE = 2**20  # characters that are read at a time


@dataclass(frozen=True)
class Document:
    """A text, which may be larger than memory.

    Attributes:
        path: its file; None where it has none.
        text: its characters; None where they have to be read from the file.
    """

    path: Path | None
    text: str | None

    def pieces(self) -> Iterator[str]:
        """Reads the text piece by piece. Pieces end where lines end, if lines are no longer than a piece.

        A byte order mark at the start is left out, and every line ends with a newline only.
        """
        with self._open() as file:
            while piece := file.read(PIECE):
                yield piece + file.readline(PIECE)

    def _open(self) -> TextIO:
        if self.text is not None:
            return io.StringIO(self.text, newline="")
        assert self.path is not None
        return self.path.open(encoding="utf-8-sig")


class Survey(NamedTuple):
    """What is known of a document after one look at it.

    Attributes:
        document: the document.
        size: its characters.
        sha256: their fingerprint.
        codes: the distinct code points in it, in order.
    """

    document: Document
    size: int
    sha256: str
    codes: np.ndarray


class Found(NamedTuple):
    """The documents behind a `--data`, and the number of files that are no text."""

    surveys: list[Survey]
    skipped: int


def find(path: str | None, count: Callable[[int], None] = lambda characters: None) -> Found:
    """Finds and looks through the documents of a file, of a folder and all that is in it, or of Python.

    Of a folder, hidden files are left out, and those that are binary, not UTF-8, or shorter than two characters are
    skipped; the others come in the order of their paths.

    Args:
        path: the file or the folder; None means the Python documentation.
        count: told of the characters that are looked through.

    Raises:
        UserError: something cannot be read, is not UTF-8, or holds no text.
    """
    if path is None:
        return Found([survey(Document(None, _python_documentation()), count)], 0)
    try:
        if Path(path).is_dir():
            return _find_in(Path(path), count)
        keep = Path(path).stat().st_size <= LARGE
        return Found([survey(_document(Path(path), keep), count)], 0)
    except UnicodeDecodeError as error:
        where = f" (byte {error.start})" if keep else ""  # otherwise it counts from the start of some piece
        raise UserError(f"--data {path} is not UTF-8{where}: convert it, or give another file") from error
    except (OSError, ValueError) as error:  # a ValueError: a path that no file can have
        why, where = (error.strerror, error.filename or path) if isinstance(error, OSError) else (error, path)
        raise UserError(f"cannot read --data {where} ({why}): give a UTF-8 text file, or a folder of them") from error


def _find_in(folder: Path, count: Callable[[int], None]) -> Found:
    surveys, skipped = [], 0
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _hidden(file.relative_to(folder)))
    keep = sum(file.stat().st_size for file in files) <= LARGE
    for file in files:
        try:
            found = survey(_document(file, keep), count)
        except UnicodeDecodeError:
            skipped += 1
            continue
        if found.size < 2 or found.codes[0] == 0:  # text holds no NUL
            skipped += 1
        else:
            surveys.append(found)
    if not surveys:
        raise UserError(f"--data {folder} holds no UTF-8 text in its {len(files)} files: give another folder")
    return Found(surveys, skipped)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _document(path: Path, keep: bool) -> Document:
    if not keep:
        return Document(path, None)
    return Document(path, io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read())


def survey(document: Document, count: Callable[[int], None]) -> Survey:
    """Looks through a document once, and tells `count` of its characters.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    digest, size, codes = hashlib.sha256(), 0, np.zeros(0, np.int64)
    for piece in document.pieces():
        digest.update(piece.encode())
        size += len(piece)
        count(len(piece))
        codes = np.union1d(codes, np.flatnonzero(np.bincount(codes_of(piece))))
    return Survey(document, size, digest.hexdigest(), codes)


def characters_of(surveys: Sequence[Survey]) -> str:
    """The distinct characters of all documents, in order."""
    codes = np.unique(np.concatenate([each.codes for each in surveys]))
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def fingerprint(surveys: Sequence[Survey]) -> str:
    """The sha256 of one text, or of the fingerprints of several: it is the text that counts, not where it lies."""
    if len(surveys) == 1:
        return surveys[0].sha256
    return hashlib.sha256("".join(each.sha256 for each in surveys).encode()).hexdigest()


def held_out(surveys: Sequence[Survey]) -> set[str]:
    """Chooses the documents that validate, by their fingerprints: about a tenth of all characters.

    They are taken in the order of their fingerprints, which has nothing to do with what is in them, as long as they
    make up no more than a tenth; where already every document is larger than that, the smallest one. Equal documents
    go to the same side.
    """
    sizes: dict[str, int] = {}
    for each in surveys:
        sizes[each.sha256] = sizes.get(each.sha256, 0) + each.size
    taken, room = set(), sum(sizes.values()) // 10
    for sha256 in sorted(sizes):
        if sizes[sha256] <= room:
            taken.add(sha256)
            room -= sizes[sha256]
    return taken or {min(sorted(sizes), key=lambda sha256: sizes[sha256])}


def _python_documentation() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
