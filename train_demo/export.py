"""The exported model: `model.safetensors` with PyTorch's names and shapes, `config.json`, and the code that runs it."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save

from train_demo import vocabulary
from train_demo.errors import UserError
from train_demo.files import write_atomically
from train_demo.model import Transformer
from train_demo.run_folder import MODEL_VERSION, Config, saved_vocabulary
from train_demo.vocabulary import Subwords

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CODE = Path(__file__).with_name("torch_model.py")
NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def write(to: Path, model: Transformer, config: Config) -> None:
    """Writes a model into a folder of its own, which takes the place of an earlier export there.

    Args:
        to: the folder; it must not exist, or be empty, or hold an export and nothing else.
        model: the trained model.
        config: its run's.

    Raises:
        UserError: the folder holds something else, or is the current one, which cannot be replaced.
    """
    if to.resolve() == Path.cwd():
        raise UserError("--to is the current folder, which cannot be replaced: name another one")
    if to.exists() and not _is_export(to):
        raise UserError(f"{to} holds something else than an export: choose another folder with --to")
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    files = {
        WEIGHTS: save(torch_arrays(state), metadata={"format": "pt"}),
        CONFIG: json.dumps(described(config), indent=2).encode(),
        CODE.name: CODE.read_bytes(),
    }
    if isinstance(config.vocabulary, Subwords):
        files[vocabulary.FILE] = config.vocabulary.content
    _write_folder(to, files)


def _is_export(folder: Path) -> bool:
    """Whether all that it holds was written here; so it may be replaced."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names <= {WEIGHTS, CONFIG, CODE.name, vocabulary.FILE}:
        return False
    try:
        return not names or "model_version" in json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def described(config: Config) -> dict[str, Any]:
    """What `config.json` says: `model` is what the PyTorch model is made with, `vocabulary` what its tokens are.

    `vocabulary` is a text whose characters are the tokens, or `{"bytes": 256}`, or an object that names the tokenizer
    file beside it.
    """
    settings = config.settings
    sizes = {
        name: getattr(settings, name)
        for name in ("layers", "features", "heads", "context_length", "mlp", "head", "token_shift")
    }
    return {
        "model": {"vocabulary_size": len(config.vocabulary), **sizes},
        "vocabulary": saved_vocabulary(config.vocabulary),
        "model_version": MODEL_VERSION,
    }


def torch_arrays(params: dict[Any, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The parameters by PyTorch's names: matrices `[out, in]`, heads beside each other.

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
            outputs = prefix.endswith(".out.")  # [heads, head size, features]; the others end with what they make
            array = array.reshape(-1, array.shape[-1]) if outputs else array.reshape(array.shape[0], -1)
            array = np.ascontiguousarray(array.T)
        found[prefix + ("scale" if prefix == "shift." else NAMES[name])] = array
    return found


def _write_folder(to: Path, files: dict[str, bytes]) -> None:
    """Writes the files beside the folder first, so that it holds all of the old ones or all of the new ones."""
    to = to.resolve()
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        (beside / "new").mkdir()
        for name, content in files.items():
            write_atomically(beside / "new" / name, content)
        if to.exists():
            os.replace(to, beside / "old")
        os.replace(beside / "new", to)
    except BaseException:
        if (beside / "old").exists() and not to.exists():
            os.replace(beside / "old", to)
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
