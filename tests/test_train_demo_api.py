"""`train_demo` from Python: runs, errors as exceptions, and the notebook."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from demo_runs import (
    ROOT,
    SETTINGS,
    TEXT,
    as_users_have_it,
    assert_refused,
    assert_same_run,
)
from flax import nnx

import train_demo
from train_demo import api, mesh, metrics, update
from train_demo.settings import Layout

pytest_plugins = ["demo_fixtures"]
pytestmark = pytest.mark.usefixtures("rules_of_users")


def losses(run, name="loss"):
    return {line["step"]: line[name] for line in run.metrics if name in line}


@pytest.mark.core
def test_a_run_from_python_is_loaded_again_and_samples(run):
    again = train_demo.load(str(run.out))
    assert again.metrics == run.metrics
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(again.model), nnx.state(run.model)
    )
    assert list(losses(run)) == list(range(1, 13))
    assert losses(run, "val_loss")[12] == run.val_loss

    first = run.sample("fox", 20)
    assert len(first) == 20
    assert first == again.sample("fox", 20) != run.sample("fox", 20, seed=1)
    # Without temperature, nothing is left to chance.
    greedy = run.sample("fox", 5, temperature=0)
    assert run.sample("fox", 5, temperature=0, top_k=3, top_p=0.9, min_p=0.1) == greedy


class Rejected(NamedTuple):
    """A function, options for it, and the error's message."""

    function: str
    options: dict[str, Any]
    message: str


REJECTED = []


def reject(function, message, **options):
    """Adds a case: the function raises an error with this message."""
    REJECTED.append(Rejected(function, options, message))


# Options of train; without `out`, the folder is new.
reject("train", "steps: expected a whole number from 1 to 2147483647, got '0'", steps=0)
reject("train", "steps: expected a number, got '3'", steps="3")
reject("train", "dtype: expected one of auto, float32, bfloat16", dtype="float16")
reject("train", "--data-parallel -1 x --fsdp 3 x --tensor 1", layout=Layout(fsdp=3))
reject("train", "setting: expected one of seed, steps, batch_size, ", step=3)
reject("train", "fsdp belongs to a layout: pass layout=Layout(fsdp=4)", fsdp=4)
reject(
    "train", "layout: expected a train_demo.Layout, got {'fsdp': 3}", layout={"fsdp": 3}
)
reject("train", "resume: expected True or False, got 'yes'", resume="yes")
reject("train", "size: expected a string, got ['tiny']", size=["tiny"])
reject("train", "--out is empty", out="")
reject("train", "--out must be a path, but got 5", out=5)
reject("train", "--out must be a folder, but", out="a\0b")
reject("train", "is a file: choose a different --out", out=__file__)
reject("train", "--data must be a path, but got 5", data=5)
reject("train", "--data is empty", data="")
reject("train", "cannot read --data", data=__file__ + "\0")

# Folders of load.
reject("load", "contains no runs: start one with python -m train_demo", out=".")

# Parts of a layout.
reject("Layout", "remat: expected True or False, got 'no'", remat="no")

# Options of sample.
reject("sample", "prompt '' is empty", prompt="")
reject("sample", "does not contain 'Ü'", prompt="Ünknown")
reject("sample", "prompt: expected a string, got 5", prompt=5)
reject("sample", "max_new_tokens: expected a whole number from 1", max_new_tokens=0)
reject("sample", "option: expected one of max_new_tokens, temperature", top_q=1)


@pytest.mark.core
@pytest.mark.parametrize("case", REJECTED)
def test_wrong_options_are_rejected_before_a_run_is_made(
    run, text, tmp_path, monkeypatch, case
):
    monkeypatch.chdir(tmp_path)
    functions = {
        "train": functools.partial(
            train_demo.train, **{"data": text, "out": "new", "quiet": True} | SETTINGS
        ),
        "load": train_demo.load,
        "Layout": train_demo.Layout,
        "sample": functools.partial(run.sample, prompt="fox"),
    }

    assert_refused([case.message], functions[case.function], **case.options)

    assert not list(tmp_path.rglob("config.json"))


def test_unknown_names_are_listed_with_those_that_exist():
    message = "'train_demo' has no attribute 'trian': it has Layout, Run"
    with pytest.raises(AttributeError, match=message):
        _ = train_demo.trian


@pytest.mark.usefixtures("no_pictures")
def test_ctrl_c_saves_and_a_resumed_run_ends_the_same(run, text, tmp_path, monkeypatch):
    def interrupt(self, name, step, value, loss=metrics.Log.loss):
        if (name, step) == ("loss", 1):
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, name, step, value)

    out = tmp_path / "run"
    # Whoever calls train has its own handler back afterwards.
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(metrics.Log, "loss", interrupt)
        with pytest.raises(KeyboardInterrupt, match="resume=True"):
            train_demo.train(text, out=out, quiet=True, **SETTINGS)

    assert signal.getsignal(signal.SIGINT) is before
    stopped = train_demo.load(out)
    assert max(losses(stopped)) < SETTINGS["steps"]
    with pytest.raises(train_demo.UserError, match="no validation loss yet"):
        _ = dataclasses.replace(stopped, metrics=[]).val_loss

    def resume():
        with as_users_have_it():  # each thread has its own
            # The default dtype may be spelled out.
            settings = SETTINGS | {"dtype": "auto"}
            train_demo.train(text, out=out, resume=True, quiet=True, **settings)

    # Only the main thread may handle signals; train must not need them.
    thread = threading.Thread(target=resume)
    thread.start()
    thread.join(120)
    assert_same_run(run.out, out)


@pytest.mark.core
@pytest.mark.usefixtures("no_pictures")
def test_training_leaves_the_callers_process_as_it_was(text, copy, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    before = (dict(os.environ), sys.unraisablehook)

    train_demo.train(text, out=copy, resume=True, quiet=True, **SETTINGS)

    assert (dict(os.environ), sys.unraisablehook) == before


def test_programs_for_gpus_add_in_a_fixed_order():
    assert update.repeatable("cpu") == {}
    options = update.repeatable("gpu")
    assert options == {"xla_gpu_deterministic_ops": True}
    # The compiler would reject a name that it does not have.
    jax.jit(lambda x: x + 1, compiler_options=options)(1.0)


@pytest.mark.usefixtures("no_pictures")
def test_parameters_are_fetched_only_for_texts(text, copy, monkeypatch):
    fetched = []

    def fetch(tree, fetch=mesh.fetch):
        fetched.append(tree)
        return fetch(tree)

    monkeypatch.setattr(mesh, "fetch", fetch)
    longer = SETTINGS | {"steps": SETTINGS["steps"] + 6}

    train_demo.train(text, out=copy, resume=True, quiet=True, samples=False, **longer)

    # Two validations, and the sample at the end.
    assert len(fetched) == 1


@pytest.mark.parametrize(
    ("data", "folder"),
    [
        (None, "python-docs"),
        ("a/fox.txt", "fox"),
        ("a/my.texts/", "my.texts"),
        (".", "here"),
        ("a/..", "here"),
    ],
)
def test_default_folder_is_named_after_the_data(tmp_path, monkeypatch, data, folder):
    (tmp_path / "here" / "a" / "my.texts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert api.default_folder(data) == Path("runs", folder)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("train_demo", {"jax", "numpy", "rich", "argparse"}),
        # It first decides where to cache programs.
        ("train_demo.command_line", {"jax"}),
    ],
)
def test_importing_is_light(module, heavy):
    code = f"import {module}, sys; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "\n"


@pytest.mark.usefixtures("no_pictures")
def test_the_block_of_the_documentation_runs(tmp_path, monkeypatch, capfd):
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(12):
        page = f"# Page {number}\n" + TEXT * (1 + number % 3)
        (docs / f"{number}.md").write_text(page)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = (block for block in blocks if "train_demo.train" in block)

    exec(compile(block, "training.md", "exec"), {})

    said = capfd.readouterr().out.splitlines()
    assert len(said[0].split()) == 2


@pytest.mark.usefixtures("no_pictures")
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((ROOT / "docs" / "train_demo.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # The first one installs the demo where it is missing.
    sources = ["".join(cell["source"]) for cell in cells[1:]]
    sizes = "steps=200, eval_every=50, features=64"
    smaller = "steps=40, eval_every=20, layers=1, features=32, batch_size=8"
    assert sizes in sources[0]
    sources[0] = sources[0].replace(sizes, smaller)
    monkeypatch.chdir(tmp_path)
    names = {}

    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)

    said = capfd.readouterr().out
    assert re.search(r"validation loss \d\.\d{3} nats per character", said)
    assert names["run"].val_loss < 3.5
    assert names["weights"].shape[:2] == (1, 4)
