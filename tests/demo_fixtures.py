"""Fixtures of the demo's tests, for `pytest_plugins`: a tiny run, which is trained once
by each worker.
"""

import os
import shutil
from pathlib import Path

import pytest
from demo_runs import SETTINGS, TEXT, as_users_have_it

import train_demo


@pytest.fixture(scope="session")
def text(processes, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def run(text, tmp_path_factory):
    """An undisturbed run from Python with all its files, but empty pictures."""
    with pytest.MonkeyPatch.context() as patch, as_users_have_it():
        patch.setattr("train_demo.plots.draw", leave_empty)
        return train_demo.train(
            text, out=tmp_path_factory.mktemp("runs") / "run", quiet=True, **SETTINGS
        )


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run.out, tmp_path / "copy"))


@pytest.fixture
def rules_of_users():
    with as_users_have_it():
        yield


@pytest.fixture
def no_pictures(monkeypatch):
    """Training in this process leaves empty pictures, because drawing takes longer than
    training.
    """
    monkeypatch.setattr("train_demo.plots.draw", leave_empty)


def leave_empty(out, *_):
    for name in ("loss.png", "attention.png"):
        (out / name).touch()


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """The processes share compiled programs, also with this one if it keeps them, and a
    GPU if there is one.
    """
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
        tmp_path_factory.mktemp("compiled")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", compiled)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        # As `filterwarnings` in pyproject.toml: another worker may still write an
        # entry.
        patch.setenv(
            "PYTHONWARNINGS",
            "ignore:Error reading persistent compilation cache entry:UserWarning",
        )
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        yield
