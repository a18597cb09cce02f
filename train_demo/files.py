"""Files that appear whole or not at all, lines of JSON that may be damaged, pipes to which nobody writes."""

import errno
import json
import os
import select
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 10  # seconds in which something has to be written to a pipe


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
    """Reads a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_bytes(path: Path) -> bytes:
    """Reads a file, or what is written to a pipe; from a device nothing, because that might never end.

    Raises:
      OSError: It cannot be read, is neither a file nor a pipe, or nothing was written to the pipe.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path.read_bytes()
    if not stat.S_ISFIFO(mode):
        raise OSError(errno.EINVAL, "it is a device or a socket", str(path))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        if not select.select([pipe], [], [], PATIENCE)[0]:
            raise OSError(errno.EAGAIN, f"it is a pipe, and nothing was written to it within {PATIENCE:g} s", str(path))
        os.set_blocking(pipe.fileno(), True)
        return pipe.read()
