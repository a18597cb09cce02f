"""Exports a model: `model.safetensors` with PyTorch's names and shapes, `config.json`, and PyTorch code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save

from train_demo.errors import UserError
from train_demo.files import check_folder, write_atomically
from train_demo.model import Transformer
from train_demo.run_folder import MODEL_VERSION, Config

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CODE = Path(__file__).with_name("torch_model.py")
NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def write(to: Path, model: Transformer, config: Config) -> None:
    """Writes a model into a new or empty folder, or over an earlier export."""
    check_target(to)
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    files = {
        WEIGHTS: save(torch_arrays(state), metadata={"format": "pt"}),
        CONFIG: json.dumps(described(config), indent=2).encode(),
        CODE.name: CODE.read_bytes(),
    }
    to.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(to / name, content)


def default_target(out: Path) -> Path:
    """Returns the folder for the export of a run for which no `to` was given."""
    return out / "export"


def check_target(to: Path) -> None:
    """Raises a `UserError` unless an export may be written into a folder, which need not exist."""
    check_folder("--to", to, writable=True)
    if to.exists() and not _is_export(to):
        raise UserError(f"{to} is not an export: choose a different folder with --to")


def _is_export(folder: Path) -> bool:
    """Returns True for a folder that is empty or has only files of an export in it, the code among them."""
    names = {path.name for path in folder.iterdir()}
    return not names or (names <= {WEIGHTS, CONFIG, CODE.name} and CODE.name in names)


def described(config: Config) -> dict[str, Any]:
    """Returns the content of `config.json`: the arguments of the PyTorch model, and the vocabulary's characters."""
    settings = config.settings
    names = ("layers", "features", "heads", "context_length", "token_shift")
    sizes = {name: getattr(settings, name) for name in names}
    return {
        "model": {"vocabulary_size": len(config.vocabulary), **sizes},
        "vocabulary": config.vocabulary.characters,
        "model_version": MODEL_VERSION,
    }


def torch_arrays(params: dict[Any, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns the parameters by their names in PyTorch; matrices are `[out, in]`, without an axis of heads.

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
            is_out = prefix.endswith(".out.")  # [heads, head size, features]; others are [features, ...]
            array = array.reshape(-1, array.shape[-1]) if is_out else array.reshape(array.shape[0], -1)
            array = np.ascontiguousarray(array.T)
        found[prefix + ("scale" if prefix == "shift." else NAMES[name])] = array
    return found
