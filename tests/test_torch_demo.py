"""The demo's export in PyTorch: the same logits and the same text, also with the script
of the documentation.
"""

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from demo_runs import ROOT
from flax import nnx
from safetensors.torch import load_file

import train_demo
from train_demo import checkpoint, export, run_folder, torch_model
from train_demo.__main__ import main
from train_demo.model import blueprint
from train_demo.settings import Settings
from train_demo.update import first_state

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen "
TEXT += "liquor jugs! How vexing, zebras jump. "
SIZES = {
    "context_length": 16,
    "layers": 2,
    "heads": 2,
    "features": 32,
    "dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More threads are slower for matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An exported run with random weights, so that its texts do not repeat one
    character.
    """
    out = tmp_path_factory.mktemp("run")
    (out / "text.txt").write_text(TEXT * 30)
    config, _ = run_folder.prepare(out, str(out / "text.txt"), SIZES, resume=False)
    run_folder.write_config(out, config)
    shapes = jax.eval_shape(
        lambda: first_state(len(config.vocabulary), config.settings)
    )
    with checkpoint.manager(out) as checkpoints:
        checkpoint.save(checkpoints, 1, drawn(shapes))
    assert main(["export", "--out", str(out)]) == 0
    return train_demo.load(out)


def drawn(shapes):
    draws = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: draws.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), shapes
    )


@pytest.fixture(scope="module")
def port(run):
    described = json.loads((run.out / "export" / "config.json").read_bytes())
    port = torch_model.Transformer(**described["model"])
    port.load_state_dict(load_file(run.out / "export" / "model.safetensors"))
    return port


@pytest.mark.parametrize("token_shift", [0, 1])
def test_a_port_computes_the_same_logits(token_shift):
    structure, shapes = blueprint(11, Settings(**SIZES, token_shift=token_shift))
    params = drawn(shapes)
    sizes = (SIZES[name] for name in ("layers", "features", "heads", "context_length"))
    port = torch_model.Transformer(11, *sizes, token_shift)
    port.load_state_dict(
        {
            name: torch.from_numpy(array)
            for name, array in export.torch_arrays(params).items()
        }
    )
    numbers = np.random.default_rng(0).integers(0, 11, (2, 20)).astype(np.int32)
    ours = np.asarray(
        jax.jit(lambda params: nnx.merge(structure, params)(numbers))(params)
    )
    with torch.no_grad():
        theirs = port(torch.tensor(numbers)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("prompt", ["Pack my box with five", TEXT])
def test_a_port_continues_a_checkpoint_with_the_same_characters(run, port, prompt):
    vocabulary = run.config.vocabulary
    numbers = torch_model.continued(port, vocabulary.encode(prompt).tolist(), 50)
    assert run.sample(prompt, 50, temperature=0) == vocabulary.decode(numbers)
    assert len(set(numbers)) > 5


def test_the_script_of_the_documentation(run, tmp_path):
    """In the folder of the export, without this package."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL
    )
    (script,) = (block for block in blocks if "load_file" in block)
    shutil.copytree(run.out / "export", tmp_path / "export")
    options = {
        "env": {"PATH": "", "OMP_NUM_THREADS": "1"},
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "export", **options
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The" + run.sample("The", 200, temperature=0) + "\n"


def test_an_export_replaces_an_earlier_one(run, tmp_path):
    to = tmp_path / "here" / "model"
    beside = ["model", "model.old", "model.tmp"]
    for name in beside[1:]:
        (to.parent / name).mkdir(parents=True)
        (to.parent / name / "mine").write_text("kept")
    for _ in range(2):
        export.write(to, run.model, run.config)
        assert sorted(path.name for path in to.iterdir()) == [
            "config.json",
            "model.safetensors",
            "torch_model.py",
        ]
        assert sorted(path.name for path in to.parent.iterdir()) == beside
        (to / "config.json").write_text("of an older version")
    assert all((to.parent / name / "mine").read_text() == "kept" for name in beside[1:])


@pytest.mark.parametrize("name", ["mine", "sub/mine", "config.json"])
def test_an_export_replaces_nothing_else(run, tmp_path, name):
    """Such as a folder of another model's weights, or an export with an additional
    file.
    """
    to = tmp_path / "model"
    if name != "config.json":
        export.write(to, run.model, run.config)
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    (to / name).write_text('{"model_type": "llama"}')
    for path in (to, to / name):
        with pytest.raises(
            train_demo.UserError, match=r"is not an export|must be a folder"
        ):
            export.write(path, run.model, run.config)
    assert (to / name).read_text() == '{"model_type": "llama"}'
