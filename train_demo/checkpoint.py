"""Checkpoints: one file of safetensors each, which is there whole or not at all.

The name holds the step and the start of the file's sha256: a file that does not fit its name is damaged, and is passed
over. Arrays are gathered from the mesh and written by one process, and may be read onto any other mesh.
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
    """Saves named trees of arrays that lie on one device, and deletes all checkpoints but the newest ones.

    Raises:
      UserError: The disk is full, or cannot be written for another reason; earlier checkpoints stay as they are.
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
        fix = "free some space, or fix the disk, then go on with --resume"
        raise UserError(f"checkpoint {step} cannot be saved in {folder} ({reason(error)}): {fix}") from error


def restore_newest(out: Path, like: Trees, say: Callable[[str], Any]) -> tuple[int, Trees] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      out: The run's folder.
      like: For each wanted name a tree of `jax.ShapeDtypeStruct`, shaped like the saved one. Where these have a
        sharding, each device gets its part; otherwise the arrays are numpy's.
      say: Told of each checkpoint that is passed over.

    Returns:
      Its step and the trees, or None where no checkpoint is whole.
    """
    for step, path in reversed(_entries(out)):
        try:
            content = path.read_bytes()
            if path.name == f"{step}-{_fingerprint(content)}.safetensors":
                return step, _placed(like, load(content))
            flaw = "it is damaged"
        except OSError as error:
            flaw = f"it cannot be read: {reason(error)}"
        except (SafetensorError, KeyError, ValueError):  # every byte is as it was saved, so
            flaw = f"it does not fit {CONFIG}"
        say(f"Checkpoint {step} is not used ({flaw})")
    return None


def _placed(like: Trees, arrays: dict[str, np.ndarray]) -> Trees:
    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        array = arrays[jax.tree_util.keystr(path)]
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError("an array of another shape was saved")
        sharding = getattr(leaf, "sharding", None)
        return array if sharding is None else jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree_util.tree_map_with_path(place, like)


def delete_after(out: Path, step: int) -> None:
    """Deletes what stands in the place of checkpoints after the newest whole one; none of it is whole."""
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
