"""Files that appear whole or not at all, and lines of JSON that may be damaged."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is, at every moment and after a power cut, either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # half a file is of no use, and the disk may be full
        error.filename = error.filename or str(path)
        raise


def read_lines(path: Path) -> list[Any]:
    """Reads a file of one JSON value per line; skips lines that are none, such as the half-written one of a killed run.

    Returns:
      The values; none where there is no file.
    """
    values = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_bytes(path: Path) -> bytes:
    """Reads a file, and nothing else: a pipe or a device might never end, and holds no data to resume a run with."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path.read_bytes()
