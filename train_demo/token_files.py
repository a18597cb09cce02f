"""Tokens of texts that are larger than memory: files in the user's cache folder, read through a memory map.

A file counts once a second one, with its sha256, stands beside it. It is named after its text and its tokenizer, so
that all runs on them share it. It may be deleted whenever no run reads it.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from json import dumps
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train_demo.errors import UserError
from train_demo.files import read_json, write_atomically

try:
    import fcntl
except ImportError:  # Windows: two processes at once would both write the same
    fcntl = None  # type: ignore[assignment]


class Tokens(NamedTuple):
    """The tokens of documents.

    Attributes:
        numbers: of all documents, one after the other, `[S]`.
        sizes: how many each document has, int64 `[D]`.
    """

    numbers: np.ndarray
    sizes: np.ndarray


Pieces = Iterable[tuple[int, np.ndarray]]  # the number of a document, and its next tokens


def in_memory(pieces: Pieces, documents: int) -> Tokens:
    """Collects tokens."""
    arrays, sizes = [np.zeros(0, np.uint8)], np.zeros(documents, np.int64)
    for document, numbers in pieces:
        arrays.append(numbers)
        sizes[document] += len(numbers)
    return Tokens(np.concatenate(arrays), sizes)


def on_disk(name: str, pieces: Pieces, documents: int, dtype: np.dtype) -> Tokens:
    """Collects tokens in a file, or finds the one that was made before.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder() / f"{name}.{dtype}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            sizes = _sizes(path, documents)
            if sizes is None:
                sizes = _write(path, pieces, documents)
    except OSError as error:
        raise UserError(
            f"cannot keep the tokens in {path} ({error.strerror}): free some space, or set XDG_CACHE_HOME to another "
            "folder"
        ) from error
    return Tokens(np.memmap(path, dtype, "r"), sizes)


def folder() -> Path:
    """Where the files are: `$XDG_CACHE_HOME/flax_mha/tokens`, where `XDG_CACHE_HOME` is `~/.cache` unless it is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flax_mha", "tokens")


def _sizes(path: Path, documents: int) -> np.ndarray | None:
    """The sizes of the documents, if the file is whole."""
    try:
        seal = read_json(_seal(path))
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == seal["sha256"]:
                sizes = np.array(seal["sizes"], np.int64)
                return sizes if sizes.shape == (documents,) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass
    return None


def _write(path: Path, pieces: Pieces, documents: int) -> np.ndarray:
    temporary, digest, sizes = path.with_name(path.name + ".tmp"), hashlib.sha256(), np.zeros(documents, np.int64)
    try:
        with temporary.open("wb") as file:
            for document, numbers in pieces:
                content = numbers.tobytes()
                file.write(content)
                digest.update(content)
                sizes[document] += len(numbers)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    write_atomically(_seal(path), dumps({"sha256": digest.hexdigest(), "sizes": sizes.tolist()}).encode())
    return sizes


def _seal(path: Path) -> Path:
    return path.with_name(path.name + ".json")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time make a file; the others wait, and then find it."""
    with path.with_name(path.name + ".lock").open("w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
