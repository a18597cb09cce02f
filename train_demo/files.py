"""Checks folders, writes files atomically, and reads lines of JSON, some of which may be damaged."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from train_demo.errors import UserError, reason


def check_folder(option: str, folder: Path, writable: bool = False) -> None:
    """Raises a `UserError`, which names `option`, unless a path is a folder or may become one.

    If `writable`, the user must also be allowed to write into the folder, or into its nearest parent that exists.
    """
    fix = f"choose a different {option}"
    for path in (folder, *folder.parents):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # a parent may exist
        except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL character
            raise UserError(f"{option} must be a folder, but {path} cannot be used ({reason(error)}): {fix}") from None
        if not path.is_dir():
            what = "a file" if path.exists() else "a broken link"
            raise UserError(f"{option} must be a folder, but {path} is {what}: {fix}")
        if writable and not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{option} must be a folder that you can write to, but {path} is not writable: {fix}")
        return


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
