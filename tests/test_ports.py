"""The scripts that run a public program with our classes, on a program made here."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

PORTS = Path(__file__).parent.parent / "examples" / "ports"

LINEN = """
from flax import linen as nn

class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        return nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)
"""
NNX = """
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)
"""


@pytest.fixture(autouse=True)
def rules_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(PORTS))
    spec = importlib.util.spec_from_file_location("compare", PORTS / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "program"]:
        del sys.modules[name]


def differences(compare, monkeypatch, capsys, clone, source, build):
    """Compares a model in a clone whose package itself cannot be imported."""
    package = clone / "src" / "program"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a GPU')")
    (package / "model.py").write_text(source)
    monkeypatch.setattr(sys, "argv", ["port.py", str(clone)])

    compare.run(compare.Port("src", "program.model", build))

    said = capsys.readouterr().out
    assert "src/program/model.py" in said
    return [float(x) for x in re.findall(r"differs by (\S+)", said)]


def test_a_linen_program_differs_by_rounding(compare, monkeypatch, capsys, tmp_path):
    def build(module):
        x = jax.random.normal(jax.random.key(1), (2, 5, 8))
        return compare.of_linen(module.Block(), x)

    found = differences(compare, monkeypatch, capsys, tmp_path, LINEN, build)

    assert len(found) == 4
    assert found[0] == 0
    assert max(found) < 1e-5


def test_an_nnx_program_differs_by_rounding(compare, monkeypatch, capsys, tmp_path):
    def build(module):
        x = jax.random.normal(jax.random.key(1), (2, 5, 8))
        return compare.of_nnx(module.Block(compare.nnx.Rngs(0)), x)

    found = differences(compare, monkeypatch, capsys, tmp_path, NNX, build)

    assert len(found) == 4
    assert found[0] == 0
    assert max(found) < 1e-5


def test_a_program_that_reads_masked_rows_differs(
    compare, monkeypatch, capsys, tmp_path
):
    """So the classes are really replaced: Flax's rows are the mean of the values."""

    def build(module):
        x = jax.random.normal(jax.random.key(1), (2, 5, 8))
        nothing = jax.numpy.zeros((2, 1, 5, 5), bool)
        return compare.of_linen(module.Block(), x, mask=nothing)

    found = differences(compare, monkeypatch, capsys, tmp_path, LINEN, build)

    assert found[0] == 0
    assert found[1] > 0.1


def test_nan_is_a_difference_wherever_it_stands(compare):
    assert np.isnan(compare.difference([1.0, np.nan], [1.0, 2.0]))
    assert np.isnan(compare.difference([np.nan, 1.0], [2.0, 1.0]))


def test_a_program_without_the_class_is_an_error(
    compare, monkeypatch, capsys, tmp_path
):
    source = LINEN.replace("nn.MultiHeadDotProductAttention(num_heads=2)", "Other()")

    with pytest.raises(SystemExit, match=r"program\.model uses none of"):
        differences(compare, monkeypatch, capsys, tmp_path, source, lambda module: None)


def test_a_folder_without_the_program_is_an_error(
    compare, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["lm1b.py", str(tmp_path)])

    with pytest.raises(SystemExit):
        compare.run(compare.Port("examples/lm1b", "models", lambda module: None))

    assert "clone must hold examples/lm1b/models.py" in capsys.readouterr().err


def test_the_page_lists_every_script():
    page = (PORTS.parent.parent / "docs" / "programs.md").read_text()

    scripts = {path.name for path in PORTS.glob("*.py")} - {"compare.py"}

    assert set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) == scripts
    assert len(scripts) >= 6
