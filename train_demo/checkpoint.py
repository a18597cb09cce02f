"""Checkpoints: each is one safetensors file, written atomically.

The file's name contains the step and the start of the content's sha256, by which a damaged file is found and skipped.
One process gathers the arrays from the mesh and writes them; they can be read onto any other mesh.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load
from safetensors.numpy import save as serialized

from train_demo.errors import UserError, reason
from train_demo.files import write_atomically
from train_demo.run_folder import CHECKPOINTS, CONFIG

KEPT = 3
Trees = dict[str, Any]


def save(out: Path, step: int, trees: Trees) -> None:
    """Saves named trees of arrays, each on one device, and deletes all checkpoints but the newest `KEPT`.

    Raises:
      UserError: The file cannot be written, for example on a full disk; earlier checkpoints stay as they are.
    """
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    content = serialized({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
    folder = out / CHECKPOINTS
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{step}-{_fingerprint(content)}.safetensors", content)
        for _, path in _entries(out)[:-KEPT]:
            _delete(path)
    except OSError as error:
        fix = "free some space, or fix the disk, then continue with --resume"
        raise UserError(f"cannot save checkpoint {step} in {folder} ({reason(error)}): {fix}") from error


def restore_newest(out: Path, like: Trees, say: Callable[[str], Any]) -> tuple[int, Trees] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      out: The run's folder.
      like: For each name to read, a tree of `jax.ShapeDtypeStruct` like the saved tree. Arrays whose struct has a
        sharding are placed by it; others are numpy arrays.
      say: Called with a line about each checkpoint that is skipped.

    Returns:
      The step and the trees, or None if no checkpoint is whole.
    """
    for step, path in reversed(_entries(out)):
        try:
            content = path.read_bytes()
            if path.name == f"{step}-{_fingerprint(content)}.safetensors":
                return step, _place(like, load(content))
            flaw = "it is damaged"
        except OSError as error:
            flaw = f"it cannot be read: {reason(error)}"
        except (SafetensorError, KeyError, ValueError):  # the bytes are those that were saved
            flaw = f"it does not fit {CONFIG}"
        say(f"Skipped checkpoint {step}: {flaw}")
    return None


def _place(like: Trees, arrays: dict[str, np.ndarray]) -> Trees:
    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        array = arrays[jax.tree_util.keystr(path)]
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError("the saved array has a different shape")
        sharding = getattr(leaf, "sharding", None)
        return array if sharding is None else jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree_util.tree_map_with_path(place, like)


def delete_after(out: Path, step: int) -> None:
    """Deletes the checkpoints of steps after `step`, which `restore_newest` has skipped as unusable."""
    for later, path in _entries(out):
        if later > step:
            _delete(path)


def _entries(out: Path) -> list[tuple[int, Path]]:
    folder = out / CHECKPOINTS
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(digits[0]), path) for path in paths if (digits := re.match(r"\d+", path.name)))


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
