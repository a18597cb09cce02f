"""Checkpoints: saved whole or not at all, and read back only if every byte is as it was."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from train_demo.errors import UserError
from train_demo.files import read_json, write_atomically
from train_demo.run_folder import CHECKPOINTS, CONFIG

if TYPE_CHECKING:  # Orbax is imported where it is used: no step of the training has to wait for that
    import orbax.checkpoint as ocp

KEPT = 3
SEAL = "sha256.json"
Trees = dict[str, Any]


class Restored(NamedTuple):
    """A checkpoint that was read: its step and its trees of arrays."""

    step: int
    trees: Trees


class Writer:
    """A run's checkpoints, opened for writing by the first save."""

    def __init__(self, out: Path, stack: ExitStack):
        self.directory = (out / CHECKPOINTS).absolute()
        self._stack = stack

    @cached_property
    def orbax(self) -> "ocp.CheckpointManager":
        """Orbax's manager; what a killed run left half-written is cleared away."""
        import orbax.checkpoint as ocp

        log = logging.getLogger("absl")
        self._stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL + 1)
        # A save takes a fraction of a second, and the next update overwrites the arrays: it cannot go on in the
        # background.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        return self._stack.enter_context(ocp.CheckpointManager(self.directory, options=options))


@contextmanager
def manager(out: Path) -> Iterator[Writer]:
    """What `save` needs; closes it."""
    with ExitStack() as stack:
        yield Writer(out, stack)


def save(checkpoints: Writer, step: int, trees: Trees) -> None:
    """Saves named trees of arrays, then seals them: a checkpoint counts once its seal is there.

    Raises:
        UserError: the disk is full, or cannot be written for another reason; earlier checkpoints stay as they are.
    """
    import orbax.checkpoint as ocp

    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    path = checkpoints.directory / str(step)
    try:
        checkpoints.orbax.save(step, args=ocp.args.Composite(**items))
        if jax.process_index() == 0:
            write_atomically(path / SEAL, json.dumps(_hashes(path), indent=1).encode())
    except (OSError, ValueError, JaxRuntimeError) as error:  # TensorStore, which writes the arrays, raises ValueError
        if isinstance(error, JaxRuntimeError) and jax.process_count() > 1:  # from another process, not from the disk
            raise
        raise UserError(
            f"checkpoint {step} cannot be saved in {path.parent} ({_reason(error)}): "
            "free some space, or fix the disk, then go on with --resume"
        ) from error


def _reason(error: Exception) -> str:
    """The system's own words, which TensorStore puts in the middle of a long message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO))
    return next((words for words in known if words in str(error)), str(error)[:200])


def restore_newest(out: Path, like: Trees, say: Callable[[str], None]) -> Restored | None:
    """Reads the newest checkpoint that is whole.

    Args:
        out: the run's folder.
        like: for each wanted name a tree of `jax.ShapeDtypeStruct`, shaped like the saved one. Where these have a
            sharding, the arrays are read onto a mesh, each device its part; otherwise they are numpy arrays. It does
            not matter where they lay when they were saved.
        say: told of each checkpoint that is passed over.

    Returns:
        The trees, or None where no checkpoint is whole.
    """
    for step, path in reversed(_entries(out)):
        flaw = _flaw(path)
        if flaw is None:
            try:
                return Restored(step, _read(path, like))
            except (ValueError, KeyError, TypeError, OSError):  # every byte is as it was saved, so
                flaw = f"it does not fit {CONFIG}"
        say(f"Checkpoint {step} is not used ({flaw})")
    return None


def set_aside(out: Path, step: int) -> None:
    """Renames what is not whole, so that the run can save these steps again.

    Args:
        out: the run's folder.
        step: the newest whole checkpoint; those after it are not whole, and neither is a file in a folder's place.
    """
    for later, path in _entries(out):
        # Whatever has no number as its name is Orbax's and unfinished: it clears that away.
        if path.name.isdigit() and (later > step or not path.is_dir()):
            aside = path.with_name(f"damaged-{path.name}")
            if aside.is_dir():
                shutil.rmtree(aside)
            else:
                aside.unlink(missing_ok=True)
            path.rename(aside)


def _entries(out: Path) -> list[tuple[int, Path]]:
    folder = out / CHECKPOINTS
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(digits[0]), path) for path in paths if (digits := re.match(r"\d+", path.name)))


def _read(path: Path, like: Trees) -> Trees:
    import orbax.checkpoint as ocp

    blank = jax.tree.map(lambda leaf: leaf if _placed(leaf) else np.zeros(leaf.shape, leaf.dtype), like)
    items = {name: ocp.args.StandardRestore(tree) for name, tree in blank.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(path.absolute(), args=ocp.args.Composite(**items))
    trees = {name: found[name] for name in like}
    if [leaf.shape for leaf in jax.tree.leaves(trees)] != [leaf.shape for leaf in jax.tree.leaves(blank)]:
        raise ValueError("arrays of other shapes were saved")  # Orbax lets some of them pass
    return trees


def _placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None


def _flaw(path: Path) -> str | None:
    """Says what is wrong with a checkpoint, before anything tries to make sense of its bytes."""
    try:
        expected = read_json(path / SEAL)
        found = _hashes(path)
    except FileNotFoundError:
        return "it was never finished"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ValueError:
        return f"its {SEAL} is damaged"
    if not isinstance(expected, dict) or not expected:
        return f"its {SEAL} is damaged"
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"its {wrong[0]} is {'damaged' if wrong[0] in found else 'missing'}" if wrong else None


def _hashes(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != SEAL)
    return {file.relative_to(path).as_posix(): _sha256(file) for file in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
