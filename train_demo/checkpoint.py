"""Checkpoints: saved whole or not at all, and read back only if every byte is as it was."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from train_demo.run_folder import CHECKPOINTS, write_atomically

KEPT = 3
SEAL = "sha256.json"
Trees = dict[str, Any]


class Restored(NamedTuple):
    """A checkpoint that was read: its step and its trees of numpy arrays."""

    step: int
    trees: Trees


def manager(out: Path) -> ocp.CheckpointManager:
    """Opens a run's checkpoints for writing; what a killed run left half-written is cleared away."""
    # A save takes a fraction of a second, and the next update overwrites the arrays: it cannot go on in the background.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager((out / CHECKPOINTS).absolute(), options=options)


def save(checkpoints: ocp.CheckpointManager, step: int, trees: Trees) -> None:
    """Saves named trees of arrays, then seals them: a checkpoint counts once its seal is there."""
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    checkpoints.save(step, args=ocp.args.Composite(**items))
    path = Path(checkpoints.directory) / str(step)
    write_atomically(path / SEAL, json.dumps(_hashes(path), indent=1).encode())


def restore_newest(out: Path, like: Trees, say: Callable[[str], None]) -> Restored | None:
    """Reads the newest checkpoint that is whole.

    Args:
        out: the run's folder.
        like: for each wanted name a tree of arrays, or of `jax.ShapeDtypeStruct`, shaped like the saved one.
        say: told of each checkpoint that is passed over.

    Returns:
        The trees, or None where no checkpoint is whole.
    """
    for step, path in reversed(_entries(out)):
        flaw = _flaw(path)
        if flaw is None:
            return Restored(step, _read(path, like))
        say(f"Checkpoint {step} is not used ({flaw})")
    return None


def set_aside(out: Path, step: int) -> None:
    """Renames the checkpoints after `step`, which are not whole, so that the run can save these steps again."""
    for later, path in _entries(out):
        if later > step and path.name.isdigit():  # the others are Orbax's unfinished ones: it clears them away
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _entries(out: Path) -> list[tuple[int, Path]]:
    folder = out / CHECKPOINTS
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(digits[0]), path) for path in paths if (digits := re.match(r"\d+", path.name)))


def _read(path: Path, like: Trees) -> Trees:
    # Numpy arrays as targets: a run may go on, or be sampled, on another device than it was saved on.
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    items = {name: ocp.args.StandardRestore(tree) for name, tree in blank.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(path.absolute(), args=ocp.args.Composite(**items))
    return {name: found[name] for name in like}


def _flaw(path: Path) -> str | None:
    """Says what is wrong with a checkpoint, before anything tries to make sense of its bytes."""
    try:
        expected = json.loads((path / SEAL).read_bytes())
    except FileNotFoundError:
        return "it was never finished"
    except ValueError:
        return f"its {SEAL} is damaged"
    found = _hashes(path)
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"its {wrong[0]} is {'damaged' if wrong[0] in found else 'missing'}" if wrong else None


def _hashes(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != SEAL)
    return {file.relative_to(path).as_posix(): _sha256(file) for file in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
