"""`python -m train_demo` on damaged run folders: it goes on from a good checkpoint or refuses in one line."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from train_demo import files, generate, plots, training
from train_demo.__main__ import main
from train_demo.model import initial_params
from train_demo.update import State, make_optimizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
TINY = (
    *("--steps", 4, "--save-every", 2, "--eval-every", 4, "--batch-size", 2, "--context-length", 8),
    *("--layers", 1, "--heads", 1, "--features", 4),
)
COMMANDS = (("--resume",), ("sample", "--prompt", "fox", "--max-new-tokens", 2), ("plot",), ("report",), ("export",))


@pytest.fixture(scope="module", autouse=True)
def _fast():
    """Compiles the training once for all runs, does not draw, and ends no run with a sample."""

    def nothing(model, vocabulary, prompts, *rest, write=generate.generate, **options):
        return write(model, vocabulary, prompts, *rest, **options) if rest else iter(())

    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # as users have it
        for name in ("make_updates", "make_validate"):
            patch.setattr(training, name, functools.cache(getattr(training, name)))
        params = functools.cache(lambda *sizes: jax.device_get(initial_params(*sizes)))

        def first_state(run):
            first = params(len(run.text.vocabulary), run.config.settings)
            return State(*jax.device_put((first, make_optimizer(run.config.settings).init(first))))

        patch.setattr(training.Run, "first_state", first_state)
        patch.setattr(generate, "generate", nothing)
        patch.setattr(plots, "attention_weights", lambda _, config: np.ones((1, 1, *[len(plots.pieces(config))] * 2)))
        patch.setattr(plots, "attention_figure", lambda *_: None)
        patch.setattr(plots, "_write", lambda path, _: files.write_atomically(path, b"\x89PNG"))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "fox.txt").write_text(TEXT)
    assert run("--data", folder / "fox.txt", "--out", folder / "run", *TINY) == 0
    return folder / "run"


def run(*arguments):
    return main([str(argument) for argument in arguments])


def survives(capfd, out, *command):
    """Runs a command: True where it succeeds, False where it refuses in one line; nothing else may happen."""
    capfd.readouterr()
    try:
        code = run(*command, "--out", out)
    except SystemExit as ended:
        code = ended.code
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    assert code in (0, 2), said.err
    if code == 2:
        assert said.err.endswith("\n")
        assert said.err.count("\n") == 1
    return code == 0


def empty(path):
    path.write_bytes(b"")


def random_bytes(path):
    path.write_bytes(bytes((97 * number + number // 7) % 256 for number in range(999)))


def truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def json_list(path):
    path.write_text('["a", [1]]\n')


def json_number(path):
    path.write_text("7\n")


def json_without_keys(path):
    path.write_text("{}\n")


def json_nested_deeply(path):
    path.write_text("[" * 100_000)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def file_instead(path):
    shutil.rmtree(path)
    path.write_bytes(b"x")


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


def deleted(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


FILE_HARMS = (
    *(empty, random_bytes, truncated, json_list, json_number, json_without_keys, json_nested_deeply),
    *(folder_instead, deleted),
)
FOLDER_HARMS = (file_instead, emptied, deleted)
# Each checkpoint that has to be saved again takes its time: its files are harmed in fewer ways.
FEW = (truncated, folder_instead, deleted)
DAMAGES = [
    *(
        (place, harm)
        for place in ("config.json", "metrics.jsonl", "samples.jsonl", "usage.json")
        for harm in FILE_HARMS
    ),
    *(("report.html", harm) for harm in (empty, folder_instead, deleted)),
    *(("checkpoints/4/sha256.json", harm) for harm in FILE_HARMS),
    *((place, folder_instead) for place in ("lock", "loss.png", "checkpoints/2/sha256.json")),
    *((place, deleted) for place in ("lock", "loss.png", "checkpoints/2/sha256.json")),
    *(("checkpoints/4/params/_METADATA", harm) for harm in FEW),
    *((place, harm) for place in ("checkpoints", "checkpoints/4") for harm in FOLDER_HARMS),
    *((place, file_instead) for place in ("checkpoints/2", "checkpoints/4/params", "checkpoints/4/params/d")),
]


@pytest.mark.parametrize(("place", "harm"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_file(capfd, finished, tmp_path, place, harm):
    lines = ("metrics.jsonl", "samples.jsonl")
    good_before = place.startswith(("checkpoints/", *lines)) and not (place in lines and harm is folder_instead)
    for command in reversed(COMMANDS):  # the resumed run repairs
        copy = Path(shutil.copytree(finished, tmp_path / command[0]))
        harm(copy / place)
        succeeded = survives(capfd, copy, *command)
        assert succeeded or not good_before
        if succeeded and command == ("--resume",):
            assert survives(capfd, copy, "sample", "--prompt", "fox", "--max-new-tokens", 1)


CONFIG_HARMS = {
    "settings": [None, 3, {}, {"steps": 4}],
    "data": [3, [], "\0"],
    "sha256": [None, 3],
    "vocabulary": [
        None,
        3,
        ["a"],
        "",
        "ba",
        "ab",
        "\ud800",
        {},
        {"bytes": 255},
        {"bytes": 256},
        {"tokenizer.json": "0"},
    ],
    "earlier_ends": [None, 3, [0], [4], [2, 1], ["1"], [True]],
    "model_version": [None, "2", True, 2.0, 1, 3],
    "sentence": [None, 3, "", "?", "The quick brown fox"],
}
SETTING_HARMS = {
    "steps": [None, "4", True, 0, 4.5, [], 10**400],
    "features": [8, -1],
    "layers": [2],
    "heads": [3],
    "context_length": [16, 2],
    "dropout_rate": [1.0, float("nan")],
}


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        *(("", name, value) for name, values in CONFIG_HARMS.items() for value in values),
        *(("settings", name, value) for name, values in SETTING_HARMS.items() for value in values),
    ],
)
def test_a_damaged_configuration(capfd, finished, tmp_path, where, name, value):
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_bytes())
    (config[where] if where else config)[name] = value
    (copy / "config.json").write_text(json.dumps(config))
    for command in reversed(COMMANDS):
        survives(capfd, copy, *command)


@pytest.mark.parametrize("name", CONFIG_HARMS)
def test_a_configuration_without_a_key(capfd, finished, tmp_path, name):
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_bytes())
    del config[name]
    (copy / "config.json").write_text(json.dumps(config))
    assert not any(survives(capfd, copy, *command) for command in COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "7", '"step"', "{}", '{"step": 1}', '{"loss": 1.5}', '{"step": "1", "loss": 1.5}'),
        *('{"step": 1, "loss": "x"}', '{"step": 1, "loss": NaN}', '{"step": 1e400, "loss": 1.5}', "\\ud800"),
        *('{"step": 1, "loss": [1.5]}', '{"step": true, "loss": 1.5}', '{"step": 1, "val_loss": null}'),
    ],
)
def test_a_damaged_line_of_metrics(capfd, finished, tmp_path, line):
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert survives(capfd, copy, "plot")
    assert survives(capfd, copy, "--resume")
    assert (copy / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
