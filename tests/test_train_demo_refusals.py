"""One-line errors of the command: arguments, texts, folders, and damaged runs."""

import errno
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_runs import (
    ROOT,
    STEPS,
    TEXT,
    TINY,
    UNSAFE,
    as_users_have_it,
    assert_refused,
    refusal,
)

from train_demo import generate, metrics, plots, report, run_folder, training
from train_demo.__main__ import main
from train_demo.errors import UserError
from train_demo.settings import SIZES, Layout, Settings, processes_in

pytest_plugins = ["demo_fixtures"]

# Each option has one wrong number.
BAD_NUMBERS = {
    "steps": "0",
    "batch-size": "-3",
    "context-length": "1.5",
    "eval-every": "x",
    "save-every": "",
    "layers": "2147483648",
    "heads": "nan",
    "features": "1e3",
    "learning-rate": "inf",
    "seed": "-1",
    "dropout-rate": "1",
}
BAD_SAMPLING = {
    "temperature": "-inf",
    "max-new-tokens": "0",
    "top-k": "1.5",
    "top-p": "0",
    "min-p": "1.01",
    "seed": "4294967296",
}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.exists, ["cannot read", "No such file"]),
        (Path.touch, ["is empty"]),
        (
            lambda path: path.write_bytes(b"x" * 89),
            ["has 81 characters for training and 8 for", "at least 10 and 9"],
        ),
        (lambda path: path.write_bytes(b"abc\xff" * 50), ["not UTF-8", "byte 3"]),
        (
            lambda path: path.write_bytes(b"abc\0" * 50),
            ["must be text", "NUL character at index 3"],
        ),
        (os.mkfifo, ["cannot read --data", "not a regular file"]),
    ],
)
def test_bad_texts_are_refused_before_anything_is_written(
    capsys, tmp_path, make, words
):
    path = tmp_path / "text.txt"
    out = tmp_path / "run"
    make(path)
    said = refusal(capsys, "--data", path, "--out", out, *TINY)
    assert all(word in said for word in [str(path), *words])
    assert not out.exists()


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3"], ["--features 128", "--heads 3"]),
        (["--heads", "128"], ["--features 128", "--heads 128", "rotary"]),
        (["--data", "."], ["--data .", "contains no UTF-8 text (0 files)"]),
        (["--attention", "sparse"], ["--attention", "full, gqa", "'sparse'"]),
        (
            ["--attention", "gqa", "--heads", "1"],
            ["--attention gqa", "--heads 1", "an even number"],
        ),
        (
            ["--attention", "latent", "--features", "40"],
            ["--attention latent", "--features 40", "a multiple of 16"],
        ),
        (
            ["--attention", "blocks", "--context", "2"],
            ["--context 2", "--attention blocks", "use --context 1"],
        ),
        (
            ["train", "--attention", "full,gqa"],
            ["'full,gqa'", "python -m train_demo compare --attention full,gqa"],
        ),
        (["compare", "--attention", "full, "], ["compare: error", "got ''"]),
        (["compare", "--resume"], ["runs/compare contains no comparison"]),
        (["train", "--steps", "x"], ["python -m train_demo train: error: argument"]),
        (["--token-shift", "64"], ["--token-shift 64", "at most 63"]),
        (["--size", "huge"], ["--size", "tiny, small, medium, gpt2", "'huge'"]),
        (["--optimizer", "sgd"], ["--optimizer", "muon, adamw", "'sgd'"]),
        (["--out", ""], ["--out: expected a folder, got ''"]),
        (["--data", ""], ["--data is empty"]),
        (["export", "--to", ""], ["--to: expected a folder"]),
        (["--step", "5"], ["--step 5 (did you mean --steps?)", "train --help lists"]),
        (["sample", "--prompt", "x", "--topk=5"], ["--topk=5 (did you mean --top-k?)"]),
        (
            ["sample", "--prompt", "The", "quick", "fox"],
            ["quick fox (put quotes around a value with spaces)", "sample --help"],
        ),
        (["report", "--format", "pdf"], ["--format pdf: ", "report --help lists"]),
        (["sing"], ["sing"]),
        (["--data-parallel", "-2"], ["--data-parallel", "-1 or", "got '-2'"]),
        (["--fsdp", "3"], ["--fsdp 3", "number of devices"]),
        (["sample", "--out", "x"], ["--prompt"]),
        (
            ["sample", "--out", "x", "--prompt", "x", "--prompt", ""],
            ["--prompt is empty"],
        ),
    ],
)
def test_bad_arguments(capsys, monkeypatch, tmp_path, arguments, words):
    assert_nothing_written(capsys, monkeypatch, tmp_path, arguments, words)


def assert_nothing_written(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *arguments)
    assert all(word in said for word in words), said
    assert not list(tmp_path.iterdir())


@pytest.mark.core
@pytest.mark.parametrize(
    ("command", "numbers"),
    [(["train"], BAD_NUMBERS), (["sample", "--prompt", "x"], BAD_SAMPLING)],
)
def test_bad_numbers(capsys, monkeypatch, tmp_path, command, numbers):
    for option, bad in numbers.items():
        arguments = [*command, "--out", "x", f"--{option}={bad}"]
        words = [f"--{option}", f"got '{bad}'"]
        assert_nothing_written(capsys, monkeypatch, tmp_path, arguments, words)


OF_A_RUN = [["sample", "--prompt", "x"], ["report"], ["export"]]


@pytest.mark.core
@pytest.mark.parametrize("command", OF_A_RUN)
def test_a_folder_without_a_run(capsys, monkeypatch, tmp_path, command):
    arguments = [*command, "--out", "no-such-folder"]
    words = ["no-such-folder contains no run", "start one"]
    assert_nothing_written(capsys, monkeypatch, tmp_path, arguments, words)


@pytest.mark.parametrize("command", OF_A_RUN)
def test_a_folder_of_several_runs(capsys, run, tmp_path, command):
    for kind in ("gqa", "full"):
        (tmp_path / kind).mkdir()
        shutil.copy(run.out / run_folder.CONFIG, tmp_path / kind)
    said = refusal(capsys, *command, "--out", tmp_path)
    first = tmp_path / "full"
    assert (
        f"{tmp_path} contains several runs: choose one, such as --out {first}" in said
    )


@pytest.mark.core
@pytest.mark.parametrize("command", OF_A_RUN)
def test_no_run_and_no_folder(capsys, monkeypatch, tmp_path, command):
    words = ["train a model with python -m train_demo"]
    assert_nothing_written(capsys, monkeypatch, tmp_path, command, words)


def processes_refused(message, address=None, number=None, index=None):
    given = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": number,
        "JAX_PROCESS_ID": index,
    }
    environment = {name: value for name, value in given.items() if value is not None}
    assert_refused([message], processes_in, environment)


@pytest.mark.core
def test_variables_of_processes_are_given_together():
    message = "missing JAX_NUM_PROCESSES and JAX_PROCESS_ID: set all of"
    processes_refused(message, "localhost:1")
    processes_refused("missing JAX_COORDINATOR_ADDRESS", None, "2", "0")
    # An empty one counts as none.
    assert processes_in({"JAX_PROCESS_ID": ""}) is None


@pytest.mark.core
@pytest.mark.parametrize("address", ["localhost", "a:99999", "a b:9", ":9"])
def test_the_address_of_processes_has_a_host_and_a_port(address):
    message = "JAX_COORDINATOR_ADDRESS: expected HOST:PORT"
    processes_refused(message, address, "2", "0")


@pytest.mark.core
def test_numbers_of_processes_are_in_range():
    message = "JAX_NUM_PROCESSES: expected a whole number from 1"
    processes_refused(message, "a:9", "0", "0")
    message = "JAX_PROCESS_ID: expected a whole number from 0"
    processes_refused(message, "a:9", "2", "-1")
    message = (
        "JAX_PROCESS_ID 2 is out of range: with JAX_NUM_PROCESSES 2, it must be "
        "between 0 and 1"
    )
    processes_refused(message, "a:9", "2", "2")


# Every command that takes --out.
WITH_FOLDERS = [
    ["train"],
    ["train", "--resume"],
    ["sample", "--prompt", "x"],
    ["report"],
    ["export"],
]
LONG = "x" * 300  # above the limit of file systems
NOT_FOLDERS = {
    "text.txt": "text.txt is a file",
    "text.txt/run": "text.txt is a file",
    "broken": "broken is a broken link",
    "broken/run": "broken is a broken link",
    "loop": "loop is a broken link",
    LONG: f"{LONG} cannot be used ({os.strerror(errno.ENAMETOOLONG)})",
}


@pytest.mark.core
@pytest.mark.parametrize("command", WITH_FOLDERS)
@pytest.mark.parametrize("place", NOT_FOLDERS)
def test_out_must_be_a_folder(capsys, monkeypatch, tmp_path, command, place):
    monkeypatch.chdir(tmp_path)
    make_obstacles(tmp_path)
    said = refusal(capsys, *command, "--out", place)
    assert f"--out must be a folder, but {NOT_FOLDERS[place]}" in said
    assert "choose a different --out" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken",
        "loop",
        "text.txt",
    ]


@pytest.mark.core
@pytest.mark.parametrize("place", NOT_FOLDERS)
def test_to_must_be_a_folder(capsys, monkeypatch, run, tmp_path, place):
    """The path is checked before the model is loaded."""

    def never(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "load_model", never)
    make_obstacles(tmp_path)
    said = refusal(capsys, "export", "--out", run.out, "--to", place)
    assert f"--to must be a folder, but {NOT_FOLDERS[place]}" in said
    assert "choose a different --to" in said
    said = refusal(capsys, "export", "--out", run.out, "--to", ".")
    assert ". is not an export: choose a different folder with --to" in said


@pytest.mark.parametrize("command", [["train"], ["export"]])
def test_a_folder_that_cannot_be_made_or_written(
    capsys, monkeypatch, run, text, tmp_path, command
):
    monkeypatch.chdir(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir()
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != closed)
    if command == ["train"]:
        option = "--out"
        rest = ["--data", text]
    else:
        option = "--to"
        rest = ["--out", run.out]
    for place in ("closed", "closed/new/run"):
        said = refusal(capsys, *command, *rest, option, place)
        assert (
            f"{option} must be a folder that you can write to, but closed is not "
            "writable" in said
        )
        assert f"choose a different {option}" in said
    assert not list(closed.iterdir())


def test_a_folder_that_the_system_does_not_make(capsys, text):
    """Such as one in /proc, whose permissions promise more."""
    said = refusal(capsys, "--data", text, "--out", "/proc/run", *TINY)
    assert "cannot write to --out /proc/run" in said
    assert "choose a different --out" in said
    assert "Errno" not in said


def make_obstacles(folder):
    (folder / "text.txt").touch()
    (folder / "broken").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")


@pytest.mark.parametrize(
    "arguments",
    [["--data", UNSAFE], [f"--steps={UNSAFE}"], [UNSAFE], ["report", "--out", UNSAFE]],
)
def test_errors_send_no_control_characters(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *arguments)
    # Printable characters stay, and the others are escaped.
    assert not set(UNSAFE) - set("[31m") & set(said)
    assert "x1b[31m" in said


@pytest.mark.core
@pytest.mark.parametrize("width", [60, 120])
def test_the_help_lists_the_options_of_training_within_the_width(
    capsys, monkeypatch, width
):
    monkeypatch.setenv("COLUMNS", str(width))
    words = {}
    for arguments in (
        [],
        ["train"],
        ["compare"],
        ["sample"],
        ["report"],
        ["export"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= width
        words["".join(arguments)] = said.split()
    assert {word for word in words["train"] if word.startswith("--")} <= set(words[""])
    assert {"--data", "--steps", "--learning-rate", "--fsdp", "--context"} <= set(
        words[""]
    )


@pytest.mark.core
def test_the_help_names_the_defaults_of_each_size_and_optimizer(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in SIZES["tiny"]:
        values = [f"{preset[name]} for {size}" for size, preset in SIZES.items()]
        values = ", ".join(values)
        assert f"(default: {values})" in said
    assert "(default: 0.03 for muon, 0.004 for adamw)" in said
    # Defaults of one size would be wrong for the others.
    assert "(default: 1500)" not in said
    assert "(default: 0.03)" not in said
    assert "options that are not given keep the values of the run" in said


OTHERS = ["--resume", "--data", "other", "--batch-size", 3, "--learning-rate", 0.5]


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--data", "same", *TINY],
            ["already contains a run: pass --resume", "different --out"],
        ),
        (
            [*OTHERS, "--seed", 0],
            ["--batch-size was 2, now 3", "--learning-rate was 0.03, now 0.5"],
        ),
        (
            ["--resume", "--data", "other"],
            ["other is not the text that", "was trained on: drop --data, or choose"],
        ),
        (["--resume", "--optimizer", "adamw"], ["--optimizer was muon, now adamw"]),
        (
            ["--resume", "--size", "small", "--context-length", 8],
            ["--layers was 1, now 4 from --size small"],
        ),
        (["sample", "--prompt", "Ünknown é"], ["'Ü' 'é'"]),
    ],
)
def test_options_that_do_not_match_a_run(capsys, run, text, tmp_path, arguments, words):
    """The error names only what differs."""
    (tmp_path / "other").write_text(TEXT + "!")
    places = {"same": text, "other": tmp_path / "other"}
    said = refusal(capsys, *(places.get(x, x) for x in arguments), "--out", run.out)
    assert all(word in said for word in words)
    assert "--seed" not in said
    assert "--context-length" not in said


@pytest.mark.core
def test_presets_do_not_replace_numbers_of_a_saved_run(capsys, text, tmp_path):
    """Steps and the learning rate are defaults, which nobody passed: a resumed run
    keeps its own.
    """
    given = {"optimizer": "adamw", "steps": 2000, "batch_size": 6}
    config, _ = run_folder.prepare(
        tmp_path, str(text), given, resume=False, size="tiny"
    )
    run_folder.write_config(tmp_path, config)
    again = functools.partial(run_folder.prepare, tmp_path, None, resume=True)
    for size, given in [
        ("tiny", {"batch_size": 6}),
        (None, {}),
        ("tiny", {"batch_size": 6, "optimizer": "adamw"}),
    ]:
        resumed, _ = again(given=given, size=size)
        assert resumed.settings == config.settings
    # What is passed counts.
    resumed, _ = again(given={"steps": 3000, "batch_size": 6}, size="tiny")
    assert resumed.settings.steps == 3000

    resume = functools.partial(refusal, capsys, "--resume", "--out", tmp_path)
    said = resume("--size", "tiny")
    assert "(--batch-size was 6, now 12 from --size tiny)" in said
    said = resume("--size", "tiny", "--batch-size", 6, "--optimizer", "muon")
    assert "(--optimizer was adamw, now muon)" in said
    said = resume("--steps", 100, "--learning-rate", 0.03)
    assert "(--steps was 2000, now 100; --learning-rate was 0.004, now 0.03)" in said


@pytest.mark.parametrize("passed", [True, False])
def test_a_changed_text_is_named_without_its_fingerprint(
    capsys, text, tmp_path, passed
):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    out = tmp_path / "run"
    config, _ = run_folder.prepare(out, str(path), {"context_length": 8}, resume=False)
    out.mkdir()
    run_folder.write_config(out, config)
    path.write_text(TEXT + "!")
    data = []
    if passed:
        data = ["--data", path]
    said = refusal(capsys, "--resume", "--out", out, *data)
    message = (
        "error: the text in --data has changed since the run began; restore it, or "
        "choose another --out\n"
    )
    assert said.endswith(message)


def test_a_changed_documentation_of_python_is_named(capsys, monkeypatch, tmp_path):
    topics = {"word": TEXT}
    monkeypatch.setattr("pydoc_data.topics.topics", topics)
    config, _ = run_folder.prepare(tmp_path, None, {"context_length": 8}, resume=False)
    run_folder.write_config(tmp_path, config)
    topics["other"] = TEXT
    said = refusal(capsys, "--resume", "--out", tmp_path)
    assert "Python's documentation has changed since the run began" in said
    assert "use the version of Python that began it, or choose another --out" in said


def test_a_moved_text_is_the_same_configuration(run, tmp_path):
    moved = tmp_path / "moved.txt"
    moved.write_text(TEXT)
    config, _ = run_folder.prepare(run.out, str(moved), {"steps": STEPS}, resume=True)
    assert config.settings == run_folder.read_config(run.out).settings


@pytest.mark.parametrize(
    "command", [["sample", "--prompt", "fox", "--max-new-tokens", "2"], ["--resume"]]
)
def test_the_newest_run_is_the_default(
    capsys, monkeypatch, run, fast, tmp_path, command
):
    monkeypatch.chdir(tmp_path)
    for name, time in (("old", 1), ("new", 3), ("middle", 2)):
        shutil.copytree(run.out, tmp_path / "runs" / name)
        # Copies have the time of the original.
        os.utime(tmp_path / "runs" / name / run_folder.CONFIG, (time, time))
    with as_users_have_it():
        assert main(command) == 0
    said = capsys.readouterr()
    which = "newest run" if command == ["--resume"] else "newest run with a checkpoint"
    assert said.err == f"Using the {which}: {Path('runs', 'new')}\n"


@pytest.mark.parametrize(
    "command",
    [["sample", "--prompt", "fox", "--max-new-tokens", "2"], ["report"], ["export"]],
)
def test_a_newer_run_without_a_checkpoint_is_passed_over(
    capsys, monkeypatch, run, fast, tmp_path, command
):
    """Such as one that diverged, or was killed before its first checkpoint or in it."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for name, time in (("good", 1), ("diverged", 2), ("killed", 3)):
        shutil.copytree(run.out, runs / name)
        os.utime(runs / name / run_folder.CONFIG, (time, time))
    shutil.rmtree(runs / "diverged" / "checkpoints")
    shutil.rmtree(runs / "killed" / "checkpoints")
    (runs / "killed" / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)

    with as_users_have_it():
        assert main(command) == 0
    said = capsys.readouterr().err
    assert said == f"Using the newest run with a checkpoint: {Path('runs', 'good')}\n"

    shutil.rmtree(runs / "good")
    said = refusal(capsys, *command)
    assert "runs contains no run with a checkpoint: train a model" in said


COMMANDS = (
    ("--resume",),
    ("sample", "--prompt", "fox", "--max-new-tokens", 2),
    ("report",),
    ("export",),
)


@pytest.fixture
def fast(monkeypatch):
    """Compiles nothing: it does not train, does not draw, and writes no sample."""

    def read_and_write_metrics(run, checkpoints, start, state):
        metrics.Log(run.out, start, run.guess, run.began).close()
        list(report.facts(run.out, run.config))
        return start, state.params, None

    monkeypatch.setattr(training, "_loop", read_and_write_metrics)
    monkeypatch.setattr(training, "_finish", lambda *_: None)
    monkeypatch.setattr(generate, "generate", lambda *_, **__: iter([["x"]] * 2))
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    monkeypatch.setattr(report, "PICTURES", {})


WRITTEN = {
    "empty": "",
    "json list": '["a", [1]]\n',
    "json without keys": "{}\n",
    "json nested deeply": "[" * 100_000,
}
FILES = ("config.json", "metrics.jsonl", "samples.jsonl")
# What happens to which file of a run.
DAMAGES = [*itertools.product(FILES, (*WRITTEN, "truncated", "a folder", "deleted"))]
DAMAGES += [(place, "deleted") for place in ("checkpoints", "lock", "loss.png")]
DAMAGES += [
    ("checkpoints", "a file"),
    ("lock", "a folder"),
    ("report.html", "a folder"),
]


@pytest.mark.parametrize(("place", "harm"), DAMAGES)
def test_a_damaged_file_gives_one_line_or_is_not_needed(
    fast, capfd, copy, tmp_path, place, harm
):
    path = copy / place
    content = b"xx"
    if path.is_dir():
        shutil.rmtree(path)
    else:
        content = path.read_bytes()
        path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm in ("truncated", "a file"):
        path.write_bytes(content[: len(content) // 2])
    elif harm != "deleted":
        path.write_text(WRITTEN[harm])
    # Lines that are damaged are left out.
    lines = place in ("metrics.jsonl", "samples.jsonl")
    for command in reversed(COMMANDS):
        try:
            with as_users_have_it():
                code = main([*map(str, command), "--out", str(copy)])
        except SystemExit as ended:
            code = ended.code
        complaint = capfd.readouterr().err
        assert code == 0 or (code, complaint.count("\n")) == (2, 1), complaint
        assert code == 0 or not lines or harm == "a folder"
        if (place, harm) == ("checkpoints", "deleted") and command != ("--resume",):
            assert "contains no complete checkpoint" in complaint


# Values that no run writes.
CONFIG_HARMS = {
    "settings": [None, {}],
    "vocabulary": [None, {}, {"characters": ""}],
    "model_version": ["2", 4, 5],
    "sentence": [None, "?"],
}
SETTING_HARMS = {
    "steps": ["4", 0, 10**400],
    "features": [8],
    "layers": [2],
    "heads": [3],
    "context_length": [16, 2],
    "dropout_rate": [float("nan")],
}


# These are valid, but do not match the checkpoint or the text.
FITTING = [("model_version", 5), ("layers", 2), ("context_length", 16), ("features", 8)]


@pytest.mark.core
@pytest.mark.parametrize("where", ["config", "settings"])
def test_a_damaged_configuration_is_refused(copy, where):
    path = copy / "config.json"
    config = json.loads(path.read_bytes())
    place = config if where == "config" else config["settings"]
    table = CONFIG_HARMS if where == "config" else SETTING_HARMS

    def assert_refused(name):
        message = r"config\.json is damaged"
        if name == "model_version":
            version = config.get(name, 1)
            message = f"contains a run with model version {version}, .*train again"
        path.write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            run_folder.read_config(copy)

    for name, values in table.items():
        intact = place.pop(name)
        assert_refused(name)
        for value in values:
            place[name] = value
            if (name, value) in FITTING:
                path.write_text(json.dumps(config))
                run_folder.read_config(copy)
            else:
                assert_refused(name)
        place[name] = intact


@pytest.mark.core
def test_heads_of_keys_that_devices_cannot_split_are_refused():
    layout = Layout(tensor=4)
    words = ["--tensor 4", "2 heads of keys and values", "a divisor of 2"]
    assert_refused(words, layout.sizes, 4, Settings(attention="gqa"))
    assert layout.sizes(4, Settings(attention="sinks")).model == 4


@pytest.mark.core
def test_a_run_from_before_kinds_of_attention_has_full_attention(copy):
    config = json.loads((copy / "config.json").read_bytes())
    del config["settings"]["attention"]
    (copy / "config.json").write_text(json.dumps(config))
    assert run_folder.read_config(copy).settings.attention == "full"


@pytest.mark.core
def test_only_full_attention_is_exported(capsys, copy):
    config = json.loads((copy / "config.json").read_bytes())
    config["settings"]["attention"] = "gated"
    (copy / "config.json").write_text(json.dumps(config))
    said = refusal(capsys, "export", "--out", copy)
    assert "--attention gated cannot be exported" in said
    assert not (copy / "export").exists()


@pytest.mark.core
def test_a_missing_package_is_named_in_one_line():
    # Without the folder of installed packages.
    command = [sys.executable, "-S", "-m", "train_demo"]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "python -m train_demo: error: numpy is not installed: run pip install -e "
        "'.[demo]' in the repository\n"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": -1},
        {"seconds": "1"},
        {"loss": 10**400},
        {"val_loss": float("nan")},
    ],
)
def test_a_foreign_line_of_metrics_is_named(tmp_path, change):
    intact = {"step": 1, "loss": 1.5, "seconds": 1.0}
    lines = [intact, intact | change]
    path = tmp_path / metrics.METRICS
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (name,) = change
    words = [f"{path} has a line with {name} ", ": remove this line"]
    assert_refused(words, metrics.read, tmp_path)


@pytest.mark.parametrize("change", [{"prompt": 3}, {"text": None}])
def test_a_foreign_line_of_samples_is_named(tmp_path, change):
    line = {"step": 1, "prompt": "a", "text": "b"} | change
    (tmp_path / metrics.SAMPLES).write_text(json.dumps(line))
    assert_refused(
        ["samples.jsonl", ": remove this line"], metrics.read_samples, tmp_path
    )


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"step": 1}',
        '{"loss": 1.5}',
        "\\ud800",
        '{"step": 3, "lo',
    ],
)
def test_damaged_lines_of_metrics_are_left_out(tmp_path, line):
    intact = {"step": 1, "loss": 1.5, "seconds": 1.0}
    lines = f"{line}\n{json.dumps(intact)}\n"
    (tmp_path / metrics.METRICS).write_text(lines)
    assert metrics.read(tmp_path) == [intact]
