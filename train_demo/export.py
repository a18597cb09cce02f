"""Exports a model: `model.safetensors` with PyTorch's names, a config, PyTorch code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save

from train_demo.errors import UserError
from train_demo.model import Transformer
from train_demo.run_folder import MODEL_VERSION, Config, check_folder, write_atomically

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CODE = Path(__file__).with_name("torch_model.py")
# The settings that the PyTorch model is made of.
ARGUMENTS = ("layers", "features", "heads", "context_length", "token_shift")
FILES = {WEIGHTS, CONFIG, CODE.name}


def write(to: Path, model: Transformer, config: Config) -> None:
    """Writes a model into a new or empty folder, or over an earlier export."""
    check(to, config)
    arguments = {name: getattr(config.settings, name) for name in ARGUMENTS}
    described = {
        "model": {"vocabulary_size": len(config.vocabulary), **arguments},
        "vocabulary": config.vocabulary.characters,
        "model_version": MODEL_VERSION,
    }
    arrays = torch_arrays(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    to.mkdir(parents=True, exist_ok=True)
    write_atomically(to / WEIGHTS, save(arrays, metadata={"format": "pt"}))
    write_atomically(to / CONFIG, json.dumps(described, indent=2).encode())
    write_atomically(to / CODE.name, CODE.read_bytes())


def check(to: Path, config: Config) -> None:
    """Raises a `UserError` unless a model of this kind may be written into a folder."""
    kind = config.settings.attention
    if kind != "full":
        raise UserError(
            f"a model with --attention {kind} cannot be exported: {CODE.name} has only "
            "full attention"
        )
    check_folder("--to", to, writable=True)
    if not to.exists():
        return
    names = {path.name for path in to.iterdir()}
    if names and not {CODE.name} <= names <= FILES:
        message = f"{to} is not an export: choose a different folder with --to"
        raise UserError(message)


def torch_arrays(params: dict[Any, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns the parameters by their names in PyTorch.

    Matrices are `[out, in]`, without an axis of heads.

    Example:
      >>> torch_arrays({"head": {"kernel": np.ones((3, 5))}})["head.weight"].shape
      (5, 3)
    """
    found: dict[str, np.ndarray] = {}
    for name, value in params.items():
        if isinstance(value, dict):
            found |= torch_arrays(value, f"{prefix}{name}.")
            continue
        array = np.asarray(value)
        if name == "kernel":
            if prefix.endswith(".out."):  # [heads, head size, features]
                matrix = array.reshape(-1, array.shape[-1])
            else:  # [features, ...]
                matrix = array.reshape(array.shape[0], -1)
            array = np.ascontiguousarray(matrix.T)
        if prefix != "shift.":
            name = "weight"
        found[prefix + name] = array
    return found
