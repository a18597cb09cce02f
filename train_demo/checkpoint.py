"""Checkpoints, written by Orbax: each is there as a whole or not at all.

All processes of a run call these functions; each writes the parts of arrays that its
devices hold. A checkpoint can be restored onto any other mesh.

Orbax's manager saves and deletes checkpoints. It does not restore them: one that is
damaged makes it fail for all others as well.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train_demo import mesh
from train_demo.errors import UserError, reason
from train_demo.run_folder import CHECKPOINTS, CONFIG, check_folder, saved_steps
from train_demo.update import State

KEPT = 3
# The item that Orbax's manager saves in the folder of a step.
ITEM = "default"
FLAW = f"it is damaged, or does not fit {CONFIG}"
# Orbax logs the traceback of an error before it raises the error.
logging.getLogger("absl").setLevel(logging.CRITICAL)


def manager(out: Path) -> ocp.CheckpointManager:
    """Makes what saves the checkpoints of a run, and deletes old ones."""
    check_folder("--out", out / CHECKPOINTS)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT,
        create=True,
        # Of a run that was killed while it saved.
        cleanup_tmp_directories=True,
        # The next step overwrites the arrays, so it has to wait.
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager((out / CHECKPOINTS).absolute(), options=options)


def save(checkpoints: ocp.CheckpointManager, step: int, state: State) -> None:
    """Saves a state, and deletes old checkpoints."""
    try:
        checkpoints.save(step, args=ocp.args.StandardSave(state), force=True)
    except Exception as error:  # Orbax raises many kinds
        raise UserError(
            f"cannot save checkpoint {step} in {checkpoints.directory} "
            f"({reason(error)}): free some space or fix the disk, then continue with "
            "--resume"
        ) from error


def restore_newest(
    out: Path, shapes: State, over: Mesh, say: Callable[[str], Any]
) -> tuple[int, State] | None:
    """Restores the newest checkpoint of a run that is not damaged; writes nothing.

    Args:
      out: The run's folder.
      shapes: A state of arrays or of their `jax.ShapeDtypeStruct`.
      over: The mesh.
      say: Called with a line about each checkpoint that is skipped.

    Returns:
      The step and the state; None if there is no checkpoint.

    Raises:
      UserError: There are checkpoints, but none of them can be restored.
    """

    def struct(array: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    check_folder("--out", out / CHECKPOINTS)
    structs = jax.tree.map(struct, shapes, mesh.shardings(over, shapes))
    flaws: dict[int, str] = {}
    for step in reversed(saved_steps(out)):
        state, flaw = _restore(out, step, structs)
        # All processes must resume from the same step.
        if multihost_utils.process_allgather(np.array(not flaw)).all():
            for skipped, why in flaws.items():
                say(f"Skipped checkpoint {skipped}: {FLAW} ({why})")
            return step, state
        flaws[step] = flaw or "another process cannot read it"
    if not flaws:
        return None
    tried = "; ".join(f"{step}: {why}" for step, why in flaws.items())
    raise UserError(
        f"no checkpoint in {out / CHECKPOINTS} can be restored, because each is "
        f"damaged or does not fit {CONFIG} ({tried}): undo changes of {CONFIG}, put "
        "back a copy of the checkpoints, or choose a different --out"
    )


def move_aside(
    out: Path, newest: int, shapes: State, say: Callable[[str], Any]
) -> None:
    """Renames the checkpoints that cannot be restored, so that they are kept.

    Args:
      out: The run's folder.
      newest: The checkpoint that `restore_newest` has restored.
      shapes: The shapes of its arrays.
      say: Called with a line about each checkpoint that is renamed.
    """
    # The devices may have no room for a second state, so NumPy's arrays are restored.
    arrays = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
    for step in saved_steps(out):
        if step == newest:
            continue
        if step < newest:
            _, flaw = _restore(out, step, arrays)
            if not flaw:
                continue
        path = out / CHECKPOINTS / str(step)
        aside = path.with_name(f"damaged-{step}")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"damaged-{step}-{number}")
        path.rename(aside)
        say(f"Moved checkpoint {step} to {aside}: {FLAW}")


def _restore(out: Path, step: int, like: State) -> tuple[Any, str]:
    """Restores a checkpoint into arrays like these.

    It waits for no other process, because only some may find the checkpoint damaged.

    Returns:
      The state, or None; and what is wrong with the checkpoint, or "".
    """
    own_process = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=own_process)
    folder = (out / CHECKPOINTS).absolute()
    path = folder / str(step) / ITEM
    try:
        # The manager reads the time of every checkpoint.
        _ = (
            ocp.path.step.standard_name_format()
            .find_step(folder, step)
            .commit_timestamp
        )
        with ocp.Checkpointer(
            handler, multiprocessing_options=own_process
        ) as checkpointer:
            restored = checkpointer.restore(path, args=ocp.args.StandardRestore(like))
            return restored, ""
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # not the checkpoint's fault, but for example too little memory
    except Exception as error:  # Orbax raises many kinds
        # The beginning says most.
        return None, " ".join(str(error).split())[:120] or type(error).__name__
