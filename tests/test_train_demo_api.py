"""`train_demo` from Python: runs, errors as exceptions, and the notebook."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
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
from train_demo import api, metrics
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
    greedy = run.sample("fox", 5, temperature=0)
    assert run.sample("fox", 5, temperature=0, top_k=3, top_p=0.9, min_p=0.1) == greedy


REFUSED = [
    (
        "train",
        {"steps": 0, "out": "new"},
        "steps: expected a whole number from 1 to 2147483647, got '0'",
    ),
    ("train", {"steps": "3", "out": "new"}, "steps: expected a number, got '3'"),
    ("train", {"steps": True, "out": "new"}, "steps: expected a number, got True"),
    (
        "train",
        {"steps": None, "out": "new"},
        "steps: expected a whole number from 1 to 2147483647, got 'None'",
    ),
    (
        "train",
        {"dtype": "float16", "out": "new"},
        "dtype: expected one of auto, float32, bfloat16",
    ),
    ("train", {"dtype": jnp.float32, "out": "new"}, "dtype: expected a string"),
    (
        "train",
        {"optimizer": "sgd", "out": "new"},
        "optimizer: expected one of muon, adamw",
    ),
    (
        "train",
        {"heads": 3, "out": "new"},
        "--features 8 is incompatible with --heads 3",
    ),
    ("train", {"data": "no-such-file", "out": "new"}, "no-such-file"),
    (
        "train",
        {"resume": True, "seed": 3},
        "(--seed was 0, now 3): drop these options, or choose a",
    ),
    (
        "train",
        {},
        "already contains a run: pass --resume to continue it, or choose a different "
        "--out",
    ),
    (
        "train",
        {"layout": Layout(fsdp=3), "out": "new"},
        "--data-parallel -1 x --fsdp 3 x --tensor 1",
    ),
    (
        "train",
        {"size": ["tiny"], "out": "new"},
        "size: expected a string, got ['tiny']",
    ),
    ("train", {"size": "huge", "out": "new"}, "size: expected one of"),
    ("train", {"out": ""}, "--out is empty"),
    ("train", {"out": 5}, "--out must be a path, but got 5"),
    ("train", {"out": b"new"}, "--out must be a path, but got b'new'"),
    ("train", {"out": "a\0b"}, "--out must be a folder, but"),
    ("train", {"out": __file__}, "is a file: choose a different --out"),
    ("train", {"data": 5, "out": "new"}, "--data must be a path, but got 5"),
    ("train", {"data": "", "out": "new"}, "--data is empty"),
    ("train", {"data": __file__ + "\0", "out": "new"}, "cannot read --data"),
    ("load", {"out": ""}, "--out is empty"),
    ("load", {"out": None}, "--out must be a path, but got None"),
    ("load", {"out": "a\0b"}, "--out must be a folder, but"),
    ("load", {"out": __file__}, "is a file: choose a different --out"),
    ("load", {"out": "."}, "contains no runs: start one with python -m train_demo"),
    (
        "Layout",
        {"fsdp": 0},
        "fsdp: expected a whole number from 1 to 2147483647, got '0'",
    ),
    (
        "Layout",
        {"accumulate": 2.0},
        "accumulate: expected a whole number from 1 to 2147483647, got '2.0'",
    ),
    ("Layout", {"tensor": "2"}, "tensor: expected a number, got '2'"),
    ("Layout", {"remat": "no"}, "remat: expected True or False, got 'no'"),
    ("sample", {"prompt": ""}, "prompt '' is empty"),
    ("sample", {"prompt": "Ünknown"}, "does not contain 'Ü'"),
    ("sample", {"prompt": 5}, "prompt: expected a string, got 5"),
    ("sample", {"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1"),
    ("sample", {"top_k": True}, "top_k: "),
    ("sample", {"top_q": 1}, "option: expected one of max_new_tokens, temperature"),
]


@pytest.mark.core
@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refused(run, text, tmp_path, monkeypatch, name, options, message):
    monkeypatch.chdir(tmp_path)
    given = {
        "train": {"data": text, "out": run.out, "quiet": True, **SETTINGS},
        "sample": {"prompt": "fox"},
    }
    function = getattr(run if name == "sample" else train_demo, name)
    assert_refused([message], function, **given.get(name, {}) | options)
    assert not list(tmp_path.rglob("config.json"))


def test_unknown_settings(text, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        train_demo.train(text, out=tmp_path / "run", step=3)
    with pytest.raises(
        AttributeError,
        match="'train_demo' has no attribute 'trian': it has Layout, Run",
    ):
        _ = train_demo.trian


@pytest.mark.usefixtures("no_pictures")
def test_ctrl_c_saves_and_a_resumed_run_ends_the_same(run, text, tmp_path, monkeypatch):
    def note(self, name, step, value, loss=metrics.Log.loss):
        if (name, step) == ("loss", 1):
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, name, step, value)

    out = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(metrics.Log, "loss", note)
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

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join(120)
    assert_same_run(run.out, out)


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
def test_the_default_folder(tmp_path, monkeypatch, data, folder):
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
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        ).stdout
        == "\n"
    )


@pytest.mark.usefixtures("no_pictures")
def test_the_block_of_the_documentation(tmp_path, monkeypatch, capfd):
    (tmp_path / "docs").mkdir()
    for number in range(12):
        (tmp_path / "docs" / f"{number}.md").write_text(
            f"# Page {number}\n" + TEXT * (1 + number % 3)
        )
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL
    )
    (block,) = (block for block in blocks if "train_demo.train" in block)
    exec(compile(block, "training.md", "exec"), {})
    said = capfd.readouterr().out.splitlines()
    assert len(said[0].split()) == 2


@pytest.mark.usefixtures("no_pictures")
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((ROOT / "docs" / "train_demo.ipynb").read_text())
    _, *cells = [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    sizes = "steps=200, eval_every=50, features=64"
    assert sizes in cells[0]
    cells[0] = cells[0].replace(
        sizes, "steps=40, eval_every=20, layers=1, features=32, batch_size=8"
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert re.search(
        r"validation loss \d\.\d{3} nats per character", capfd.readouterr().out
    )
    assert names["run"].val_loss < 3.5
    assert names["weights"].shape[:2] == (1, 4)
