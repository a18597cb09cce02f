"""A checkpoint of the demo in a PyTorch port of its model: the same logits, and the same text."""

import jax
import numpy as np
import pytest
import torch
import torch_demo
from flax import nnx

from train_demo import checkpoint, run_folder
from train_demo import train as training
from train_demo.__main__ import main
from train_demo.data import encode
from train_demo.generate import generate
from train_demo.model import blueprint
from train_demo.sample import load_model
from train_demo.sampler import Sampling
from train_demo.settings import Settings

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs! How vexing, zebras jump. "
SIZES = (
    *("--steps", 60, "--save-every", 60, "--eval-every", 60, "--batch-size", 4, "--context-length", 16),
    *("--layers", 2, "--heads", 2, "--features", 32, "--learning-rate", 0.01),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More of them only wait for each other on matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was trained a little, without its pictures and its sample."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT * 30)
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.setattr(training, "_finish", lambda *_: None)
        assert (
            main([str(argument) for argument in ("--data", folder / "text.txt", "--out", folder / "out", *SIZES)]) == 0
        )
    return folder / "out"


def state_dict(params, prefix=""):
    """The parameters by PyTorch's names: matrices [out, in], heads beside each other."""
    found = {}
    for name, value in params.items():
        if isinstance(value, dict):
            found |= state_dict(value, f"{prefix}{name}.")
            continue
        array = np.asarray(value)
        if name == "kernel":
            outputs = prefix.endswith(".out.")
            array = array.reshape(-1, array.shape[-1]) if outputs else array.reshape(array.shape[0], -1)
        own = name if prefix == "shift." else "weight"
        found[prefix + own] = torch.tensor(array.T if name == "kernel" else array)
    return found


@pytest.fixture(scope="module")
def port(run):
    config = run_folder.read_config(run)
    settings, size = config.settings, len(config.vocabulary)
    params = checkpoint.restore_newest(run, {"params": blueprint(size, settings)[1]}, pytest.fail).trees["params"]
    return ported(size, settings, params)


def ported(size, settings, params):
    names = ("layers", "features", "heads", "context_length", "mlp", "head", "token_shift")
    port = torch_demo.Transformer(size, *(getattr(settings, name) for name in names))
    port.load_state_dict(state_dict(params))
    return port


@pytest.mark.parametrize("choices", [{"mlp": "swiglu", "head": "tied"}, {"mlp": "gelu", "token_shift": 0}])
def test_a_port_of_every_choice_computes_the_same_logits(choices):
    settings = Settings(context_length=16, layers=1, heads=2, features=32, **choices)
    structure, shapes = blueprint(11, settings)
    draws = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: draws.normal(size=leaf.shape, scale=0.3).astype(np.float32), shapes)
    numbers = draws.integers(0, 11, (2, 20)).astype(np.int32)
    ours = np.asarray(jax.jit(lambda params: nnx.merge(structure, params)(numbers))(params))
    with torch.no_grad():
        theirs = ported(11, settings, params)(torch.tensor(numbers)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("prompt", ["T", "Pack my box with five", TEXT])
def test_a_port_continues_a_checkpoint_with_the_same_200_characters(run, port, prompt):
    config = run_folder.read_config(run)
    (ours,) = zip(*generate(load_model(run, config), config.vocabulary, [prompt], 200, Sampling(0.0)), strict=True)
    numbers = torch_demo.continued(port, encode(prompt, config.vocabulary).tolist(), 200)
    assert "".join(ours) == "".join(config.vocabulary[number] for number in numbers)
    assert len(set(numbers)) > 5


def test_a_port_computes_the_same_logits(run, port):
    config = run_folder.read_config(run)
    numbers = encode(TEXT, config.vocabulary)[None]
    structure, params = nnx.split(load_model(run, config))
    ours = np.asarray(jax.jit(lambda params: nnx.merge(structure, params)(numbers))(params))
    with torch.no_grad():
        theirs = port(torch.tensor(numbers)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
