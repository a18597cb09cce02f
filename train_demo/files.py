"""Writes files atomically, and reads lines of JSON, some of which may be damaged."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that at every moment, even after a power cut, it is either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # the disk may be full
        error.filename = error.filename or str(path)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of one JSON object per line; skips other lines, such as the half-written line of a killed run."""
    values = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
