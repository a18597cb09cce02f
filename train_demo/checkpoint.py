"""Checkpoints, written by Orbax: each is there as a whole or not at all.

All processes of a run call these functions; each writes the parts of arrays that its
devices hold. A checkpoint can be restored onto any other mesh.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from train_demo import mesh
from train_demo.errors import UserError, reason
from train_demo.run_folder import CHECKPOINTS, CONFIG, check_folder
from train_demo.update import State

KEPT = 3
# Orbax logs the traceback of an error before it raises the error.
logging.getLogger("absl").setLevel(logging.CRITICAL)


def manager(out: Path, writes: bool = False) -> ocp.CheckpointManager:
    """Makes what saves and restores the checkpoints of a run."""
    check_folder("--out", out / CHECKPOINTS)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT,
        create=writes,
        # Of a run that was killed while it saved.
        cleanup_tmp_directories=writes,
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
    checkpoints: ocp.CheckpointManager,
    shapes: State,
    over: Mesh,
    say: Callable[[str], Any],
) -> tuple[int, State] | None:
    """Restores the newest checkpoint that is not damaged.

    Args:
      checkpoints: Those of the run.
      shapes: A state of arrays or of their `jax.ShapeDtypeStruct`.
      over: The mesh.
      say: Called with a line about each checkpoint that is skipped.

    Returns:
      The step and the state; None if there is no checkpoint.
    """

    def struct(array: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    structs = jax.tree.map(struct, shapes, mesh.shardings(over, shapes))
    like = ocp.args.StandardRestore(structs)
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            return step, checkpoints.restore(step, args=like)
        except jax.errors.JaxRuntimeError:
            raise  # not the checkpoint's fault, but for example too little memory
        except Exception as error:  # Orbax raises many kinds
            flaw = f"it is damaged, or does not fit {CONFIG} ({reason(error)})"
            say(f"Skipped checkpoint {step}: {flaw}")
    return None
