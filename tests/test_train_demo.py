"""`python -m train_demo`: killed, interrupted and fed with nonsense, as a new user or a bad day would."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import jax
import numpy as np
import pytest

from train_demo import checkpoint, data, files, metrics, run_folder, samples, settings, usage
from train_demo.__main__ import main
from train_demo.errors import UserError

ROOT = Path(__file__).parent.parent
STEPS, SAVE_EVERY, EVAL_EVERY = 12, 4, 3
TEXT = "The quick brown fox jumps over the lazy dog. " * 40 + "\n$_%"
TINY = (
    *("--steps", STEPS, "--save-every", SAVE_EVERY, "--eval-every", EVAL_EVERY, "--batch-size", 2),
    *("--context-length", 8, "--layers", 1, "--heads", 2, "--features", 8, "--dropout-rate", 0.1),
)
# Runs the command line in a process that sends itself a signal at a moment that the test chooses.
SABOTAGED = """
import os, signal, sys
from train_demo import metrics
from train_demo.__main__ import main

where, number, *arguments = sys.argv[1:]

def strike(event, details):
    if event == "os.rename" and str(details[1]).endswith(where):
        os.kill(os.getpid(), signal.SIGKILL)

def strike_at(self, name, step, value, write=metrics.Log.write):
    if (name, step) == ("loss", int(where)):
        os.kill(os.getpid(), int(number))
    return write(self, name, step, value)

if where.isdigit():
    metrics.Log.write = strike_at
else:
    sys.addaudithook(strike)
sys.exit(main(arguments))
"""


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory):
    """What the processes have in common: what they compile, and a GPU where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        yield


SPEED = re.compile(r"[\d,]+ characters in [\d.]+ s: [\d,]+ characters/s \(before that, compiling took [\d.]+ s\)\n")


def assert_complaint(said, arguments, code=0):
    """Only what fails, and the speed of sampling, stands on stderr."""
    assert SPEED.fullmatch(said) if arguments[0] == "sample" else not said or code == 2


def demo(*arguments, code=0, start=("-m", "train_demo")):
    done = subprocess.run([sys.executable, *start, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert_complaint(done.stderr, arguments, code)
    return done.stdout


def here(capfd, *arguments):
    """The same in this process, which spares the imports."""
    capfd.readouterr()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert main([str(argument) for argument in arguments]) == 0
    said = capfd.readouterr()
    assert_complaint(said.err, arguments)
    return said.out


def struck(where, number, *arguments):
    code = -number if number == signal.SIGKILL else 128 + number
    return demo(*arguments, code=code, start=("-c", SABOTAGED, str(where), str(int(number))))


def refusal(capsys, *arguments):
    """Runs the command line in this process, where it has to refuse in one line that says what is wrong."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("python -m train_demo")
    assert said.count("\n") == 1
    assert said.endswith("\n")
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    said = demo("--data", text, "--out", out, *TINY)
    assert f"step {STEPS:>6}  validation loss" in said
    assert f"python -m train_demo sample --out={out}" in said
    assert "␣ is a space, ↵ the end of a line" in said
    (out / "said.txt").write_text(said)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def params(out):
    """The newest checkpoint's step and its arrays by name, all of them: the optimizer's too."""
    config = run_folder.read_config(out)
    from train_demo.model import initial_params
    from train_demo.update import State, make_optimizer

    first = initial_params(len(config.vocabulary), config.settings)
    like = State(first, make_optimizer(config.settings).init(first))._asdict()
    step, trees = checkpoint.restore_newest(out, like, pytest.fail)
    return step, {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}


def assert_same_run(one, other, steps=STEPS):
    (step, trees), (other_step, other_trees) = params(one), params(other)
    assert step == other_step == steps
    for name, leaf in trees.items():
        np.testing.assert_array_equal(leaf, other_trees[name], err_msg=name, strict=True)
    assert untimed(one) == untimed(other)
    assert samples.read(one) == samples.read(other)


def untimed(out):
    """The metrics without their seconds, which no two runs share."""
    return [{name: value for name, value in metric.items() if name != "seconds"} for metric in metrics.read(out)]


# A run's life


def test_a_finished_run_leaves_what_was_promised(finished):
    lines = [json.loads(line) for line in (finished / metrics.FILE).read_text().splitlines()]
    assert [line["step"] for line in lines if set(line) == {"step", "loss", "seconds"}] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if set(line) == {"step", "val_loss", "seconds"}] == [3, 6, 9, 12]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert json.loads((finished / run_folder.CONFIG).read_bytes())["settings"]["steps"] == STEPS
    assert sorted(path.name for path in (finished / run_folder.CHECKPOINTS).iterdir()) == ["12", "4", "8"]
    for picture in ("loss.png", "attention.png"):
        assert (finished / picture).read_bytes().startswith(b"\x89PNG")
    assert (finished / "report.html").read_text().startswith("<!doctype html>")
    written = samples.read(finished)
    assert [sample.step for sample in written] == [3, 6, 9, 12]
    assert all(len(sample.text) == samples.TOKENS for sample in written)
    assert usage.read(finished)["devices"] == 1


def test_the_terminal_and_the_report_say_the_same_numbers(finished):
    said, measured = (finished / "said.txt").read_text(), metrics.read(finished)
    page = (finished / "report.html").read_text()
    shown = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    facts, tiles = (
        {label: value for label, value, _ in shown["facts"]},
        {label: value for value, label in shown["tiles"]},
    )
    first, speed, loss = (
        re.search(pattern, said)[1]
        for pattern in (
            r"first step is done (.*?) s after the start of the training",
            r"([\d,]+) tokens/s",
            r"training loss ([\d.]+)",
        )
    )
    assert facts["first step"] == f"{first} s" == f"{measured[0]['seconds']:.1f} s"
    assert facts["characters per second"] == speed
    assert tiles["training loss, nats per character, mean of the last 12 steps"] == loss
    mean = np.mean([metric["loss"] for metric in measured if "loss" in metric])
    assert float(loss) == pytest.approx(mean, abs=1e-4)
    assert f"mean of the last {STEPS} steps" in said


def test_a_run_killed_three_times_and_interrupted_ends_as_if_it_never_stopped(finished, text, tmp_path):
    out = tmp_path / "run"
    resume = ("--resume", "--out", out)
    kill = signal.SIGKILL

    struck(3, kill, "--data", text, "--out", out, *TINY)  # before there is a checkpoint
    assert not list(out.glob("checkpoints/*/"))

    struck("checkpoints/8", kill, *resume)  # while a checkpoint is written: Orbax never gets to name it
    assert (out / "checkpoints/4").is_dir()
    assert not (out / "checkpoints/8").exists()
    assert list(out.glob("checkpoints/8.*"))

    said = struck("checkpoints/8/sha256.json", kill, *resume)  # while a checkpoint is sealed
    assert "Checkpoint 8 is not used (it was never finished)" in said
    assert "Going on from the checkpoint of step 4" in said
    assert (out / "checkpoints/8").exists()

    said = struck(11, kill, *resume)  # between two checkpoints, and in the middle of a line
    assert "Going on from the checkpoint of step 4" in said
    with (out / metrics.FILE).open("a") as file:
        file.write('{"step": 11, "lo')

    said = struck(9, signal.SIGINT, *resume)
    assert "Going on from the checkpoint of step 8" in said
    assert "Stopping after this step, then saving (Ctrl-C again: stop at once)" in said
    assert f"Go on with:\npython -m train_demo --resume --out {out}\n" in said

    said = demo(*resume)
    assert "Going on from the checkpoint of step 1" in said  # 10 or 11: where Ctrl-C came
    assert_same_run(out, finished)


def test_a_run_killed_before_its_first_checkpoint_starts_over(text, tmp_path):
    out = tmp_path / "run"
    said = struck(2, signal.SIGINT, "--resume", "--data", text, "--out", out, *TINY)
    assert f"{out} holds no finished checkpoint: starting from the beginning" in said


def test_an_extended_run_stays_exact(finished, text, tmp_path):
    one, other = (Path(shutil.copytree(finished, tmp_path / name)) for name in ("one", "other"))
    longer = 2 * STEPS
    demo("--resume", "--steps", longer, "--out", one)
    said = struck(STEPS + 2, signal.SIGTERM, "--resume", "--steps", longer, "--out", other)
    assert "Terminated: stopping after this step, then saving" in said
    assert f"--resume --out {other}" in said
    assert f"plot --out {other}" in said
    for step in range(STEPS, longer):  # back to before the old end, where the learning rate was another
        shutil.rmtree(other / "checkpoints" / str(step), ignore_errors=True)
    assert "Going on from the checkpoint of step 8" in demo("--resume", "--out", other)
    assert_same_run(one, other, longer)


def test_a_run_is_not_shortened(capsys, finished):
    assert "--steps 12 there, 6 here" in refusal(capsys, "--resume", "--steps", 6, "--out", finished)


@pytest.mark.parametrize("harm", ["missing", "truncated", "changed", "empty folder"])
def test_a_damaged_checkpoint_is_passed_over(monkeypatch, copy, finished, harm):
    newest = copy / run_folder.CHECKPOINTS / str(STEPS)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    if harm == "missing":
        largest.unlink()
    elif harm == "empty folder":
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        half = len(content) // 2
        largest.write_bytes(content[:half] + (bytes(len(content) - half) if harm == "changed" else b""))
    said = []
    restored = checkpoint.restore_newest(copy, {}, said.append)
    assert restored.step == STEPS - SAVE_EVERY
    assert len(said) == 1
    assert f"Checkpoint {STEPS} is not used" in said[0]
    if harm == "truncated":  # once in full: the run goes on, compiled anew, and saves that step again
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        assert said[0] in demo("--resume", "--out", copy)
        assert_same_run(copy, finished)


def test_sample_and_plot(copy, capfd):
    (copy / "loss.png").unlink()
    (copy / "attention.png").write_bytes(b"")
    assert demo("plot", "--out", copy).count(".png") == 2
    assert (copy / "loss.png").stat().st_size > 1000
    assert (copy / "attention.png").stat().st_size > 1000

    prompt = "The quick brown fox jumps"  # longer than the context
    command = ("sample", "--out", copy, "--prompt", prompt, "--max-new-tokens", 30)
    texts = [demo(*command, "--seed", 1), *(here(capfd, *command, "--seed", seed) for seed in (1, 2))]
    assert texts[0] == texts[1] != texts[2]
    greedy = [here(capfd, *command, "--seed", seed, "--temperature", 0) for seed in (1, 2)]
    assert greedy[0] == greedy[1] != texts[0]
    assert all(text.startswith(prompt) and len(text) == len(prompt) + 30 + 1 for text in texts)
    stop = texts[0][-4:-2]
    assert (
        here(capfd, *command, "--seed", 1, "--stop", stop)
        == prompt + texts[0].removeprefix(prompt).split(stop)[0] + "\n"
    )

    together = ("--prompt", "fox", "--num-samples", 2, "--seed", 1)
    said = here(capfd, *command, *together)
    parts = re.split(r"^--- prompt (\d) of 2, sample (\d) of 2 ---\n", said, flags=re.MULTILINE)
    assert [parts[1::3], parts[2::3]] == [list("1122"), list("1212")]
    assert parts[3] == texts[0]
    assert parts[9].startswith("fox")
    assert parts[3] != parts[6]  # samples of one prompt
    assert parts[9] != parts[12]


# What the command line refuses

NO_COUNTS = ("0", "-3", "1.5", "x", "")
NO_POSITIVES = ("0", "-0.1", "nan", "inf", "x")
COUNTS = ("steps", "batch-size", "context-length", "eval-every", "save-every", "layers", "heads", "features")
BAD_NUMBERS = [
    *itertools.product(COUNTS, NO_COUNTS),
    *itertools.product(["learning-rate"], NO_POSITIVES),
    *itertools.product(["seed"], ("-1", "4294967296", "x")),
    *itertools.product(["dropout-rate"], ("-0.1", "1", "nan")),
]


@pytest.mark.parametrize(("option", "value"), BAD_NUMBERS)
def test_bad_numbers(capsys, tmp_path, option, value):
    said = refusal(capsys, "train", "--out", tmp_path / "run", f"--{option}={value}")
    assert f"--{option}" in said
    assert f"got {value!r}" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read", "No such file"]),
        (b"", ["is empty"]),
        (b"short", ["holds 5 characters", "at least 90"]),
        (b"x" * 89, ["holds 89 characters", "at least 90"]),
        (b"abc\xff" * 50, ["not UTF-8", "byte 3"]),
        ("pipe", ["cannot read --data", "a pipe, and nothing was written to it within 0.1 s"]),
        ("device", ["cannot read --data", "it is a device or a socket"]),
    ],
)
def test_bad_text(capsys, monkeypatch, tmp_path, content, words):
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    path = tmp_path / "text.txt"
    if content == "pipe":
        os.mkfifo(path)
    elif content == "device":
        path.symlink_to("/dev/zero")
    elif content is not None:
        path.write_bytes(content)
    said = refusal(capsys, "--data", path, "--out", tmp_path / "run", *TINY)
    assert all(word in said for word in [str(path), *words])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3"], ["--features 128", "--heads 3"]),
        (["--heads", "128"], ["--features 128", "--heads 128", "rotary"]),
        (["--data", "."], ["--data .", "holds no UTF-8 text in its 0 files"]),
        (["--tokenizer", "no-such-file"], ["cannot read --tokenizer no-such-file", "characters, bytes, or a JSON"]),
        (["--tokenizer", __file__], ["is not a tokenizer", "characters, bytes, or a JSON"]),
        (["--token-shift", "64"], ["--token-shift 64", "at most 63"]),
        (["--size", "huge"], ["--size", "tiny, small, medium, gpt2", "'huge'"]),
        (["--optimizer", "sgd"], ["--optimizer", "muon, adamw", "'sgd'"]),
        (["--out", __file__], ["File exists"]),
        (["--out", ""], ["--out: expected a folder, got ''"]),
        (["--data", ""], ["--data is empty"]),
        (["export", "--to", ""], ["--to: expected a folder"]),
        (["--out", f"{__file__}/run"], ["Not a directory"]),
        (["--step", "5"], ["--step"]),
        (["sing"], ["sing"]),
        (["sample", "--out", "x"], ["--prompt"]),
        *(
            (["sample", "--out", "x", "--prompt", "x", f"--temperature={bad}"], ["--temperature", f"got '{bad}'"])
            for bad in ("-0.1", "nan", "inf", "-inf", "x")
        ),
        *(
            (["sample", "--out", "x", "--prompt", "x", f"--{option}={bad}"], [f"--{option}", f"got '{bad}'"])
            for option, bads in {
                "max-new-tokens": NO_COUNTS,
                "top-k": NO_COUNTS,
                "top-p": ("0", "-0.1", "1.01", "nan", "inf", "x"),
                "min-p": ("-0.1", "1.01", "nan", "x"),
                "num-samples": (*NO_COUNTS, "1025"),
                "seed": ("-1", "4294967296"),
            }.items()
            for bad in bads
        ),
        (["sample", "--out", "x", "--prompt", "x", "--stop", ""], ["--stop is empty"]),
        (["sample", "--out", "x", "--prompt", "x", "--prompt", ""], ["--prompt is empty"]),
        (["sample", "--out", "x", "--prompt", "x", "--length", "5"], ["--length"]),
        (["sample", "--out", "no-such-folder", "--prompt", "x"], ["no-such-folder holds no run", "start one"]),
        *(
            ([command, "--out", "no-such-folder"], ["no-such-folder holds no run", "start one"])
            for command in ("plot", "report", "export")
        ),
    ],
)
def test_bad_arguments(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *arguments)
    assert all(word in said for word in words)


@pytest.mark.parametrize("command", [["sample", "--prompt", "x"], ["plot"], ["report"], ["export"]])
def test_no_run_at_all(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    assert "train one with python -m train_demo" in refusal(capsys, *command)


def test_the_newest_run_is_the_default(capsys, monkeypatch, finished, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, time in (("old", 1), ("new", 3), ("middle", 2)):
        shutil.copytree(finished, tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / run_folder.CONFIG, (time, time))
    with jax.numpy_dtype_promotion("standard"):
        assert main(["sample", "--prompt", "fox", "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("fox")
    named, newline, speed = said.err.partition("\n")
    assert named + newline == f"The newest run: {Path('runs', 'new')}\n"
    assert SPEED.fullmatch(speed)


UNSAFE = "\x1b[31m\a\r\x9b\u202e"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", UNSAFE],
        [f"--steps={UNSAFE}"],
        [UNSAFE],
        ["plot", "--out", UNSAFE],
        ["sample", "--out", UNSAFE, "--prompt", "x"],
    ],
)
def test_errors_do_not_command_the_terminal(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *arguments)
    assert not set(UNSAFE) - set("[31m") & set(said)
    assert "x1b[31m" in said


def on_terminal(*arguments):
    """Runs the command on a terminal of 80 columns; returns the lines that it wrote, without escapes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "train_demo", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 2**16):
            written += piece
    assert process.wait() == 0
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()))


def test_written_text_does_not_command_the_terminal_and_fits_it(capfd, tmp_path):
    (tmp_path / "text").write_text(UNSAFE * 100)
    lines = on_terminal("--data", tmp_path / "text", "--out", tmp_path / "run", *TINY, "--steps", 1)
    # Only what was written in one word, or is to be copied, may be longer.
    long = [line for line in lines if len(line) > 80 and "\\x" not in line and str(tmp_path) not in line]
    assert not long
    said = "".join(lines) + here(
        capfd, "sample", "--out", tmp_path / "run", "--prompt", "\x1b[", "--max-new-tokens", 20
    )
    assert not set(UNSAFE) - set("[31m") & set(said)
    assert "\\x1b[" in said


def test_a_folder_with_a_run(capsys, finished, text):
    said = refusal(capsys, "--data", text, "--out", finished, *TINY)
    assert "holds a run already: pass --resume" in said
    assert "another --out" in said


def test_a_run_of_another_configuration(capsys, finished, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "!")
    said = refusal(
        capsys, "--resume", "--out", finished, "--data", other, "--batch-size", 3, "--learning-rate", 0.5, "--seed", 0
    )
    assert "--batch-size 2 there, 3 here" in said
    assert "--learning-rate 0.03 there, 0.5 here" in said
    assert "--data" in said
    assert "--seed" not in said


def test_a_run_of_another_optimizer_or_size(capsys, finished):
    said = refusal(capsys, "--resume", "--out", finished, "--optimizer", "adamw")
    assert "--optimizer muon there, adamw here" in said
    said = refusal(capsys, "--resume", "--out", finished, "--size", "small", "--context-length", 8)
    assert "--layers 1 there, 4 here" in said
    assert "--context-length" not in said


def test_the_same_text_elsewhere_is_the_same_configuration(finished, tmp_path):
    moved = tmp_path / "moved.txt"
    moved.write_text(TEXT)
    config, _ = run_folder.prepare(finished, str(moved), {"steps": STEPS}, resume=True)
    assert config.settings == run_folder.read_config(finished).settings


@pytest.mark.parametrize("arguments", [["--prompt", "Ünknown é"], ["--prompt", "fox", "--stop", "Üé"]])
def test_characters_that_the_model_never_saw(capsys, finished, arguments):
    assert "'Ü' 'é'" in refusal(capsys, "sample", "--out", finished, *arguments)


@pytest.mark.parametrize("command", [["sample", "--prompt", "fox"], ["plot"], ["report"], ["export"]])
def test_a_run_without_a_checkpoint(capsys, copy, command):
    shutil.rmtree(copy / run_folder.CHECKPOINTS)
    assert "holds no finished checkpoint" in refusal(capsys, *command, "--out", copy)


def test_a_damaged_configuration(capsys, copy):
    (copy / run_folder.CONFIG).write_text('{"settings": ')
    for arguments in (["--resume"], ["sample", "--prompt", "fox"], ["plot"]):
        assert "config.json is damaged" in refusal(capsys, *arguments, "--out", copy)


@pytest.mark.parametrize("version", [None, 2])
def test_a_run_of_another_model(capsys, copy, version):
    config = json.loads((copy / run_folder.CONFIG).read_bytes())
    del config["model_version"]
    (copy / run_folder.CONFIG).write_text(
        json.dumps(config if version is None else {**config, "model_version": version})
    )
    for arguments in (["--resume"], ["sample", "--prompt", "fox"], ["plot"]):
        said = refusal(capsys, *arguments, "--out", copy)
        assert f"holds a run of version {version or 1} of the demo's model" in said
        assert "train anew" in said


@pytest.mark.parametrize(("loss", "said"), [(math.nan, "nan"), (math.inf, "inf"), (7e31, "7e\\+31"), (461, "461")])
def test_a_training_that_diverged(tmp_path, loss, said):
    with metrics.Log(tmp_path, 0, math.log(100)) as log:
        assert log.write("loss", 6, 460) == 460  # 100 times the loss of guessing one of 100 tokens
        with pytest.raises(UserError, match=f"training diverged: the loss is {said} at step 7") as error:
            log.write("loss", 7, loss)
    assert error.value.for_command.endswith("take a lower --learning-rate and another --out")
    assert [metric["step"] for metric in metrics.read(tmp_path)] == [6]


@pytest.mark.skipif(run_folder.fcntl is None, reason="no flock here")
def test_two_runs_never_share_a_folder(tmp_path):
    with (
        run_folder.sole_writer(tmp_path),
        pytest.raises(UserError, match="another run writes"),
        run_folder.sole_writer(tmp_path),
    ):
        pass


def test_a_clock_that_goes_on(tmp_path):
    with metrics.Log(tmp_path, 0, 1.0) as log:
        log.write("loss", 1, 3.0)
    first = json.loads((tmp_path / metrics.FILE).read_text())
    (tmp_path / metrics.FILE).write_text(json.dumps({**first, "seconds": 100.0}) + "\n")
    with metrics.Log(tmp_path, 1, 1.0) as log:
        log.write("loss", 2, 2.0)
    assert 100 <= metrics.read(tmp_path)[1]["seconds"] < 110


# The text


def test_the_validation_windows_predict_every_character():
    windows = data.validation_windows(data.Part(np.arange(1003), np.zeros(0, int)), 8)
    assert windows.shape == (4, data.WINDOWS, 9)
    assert set(windows[..., 1:].ravel()) == set(range(1, 1003))
    assert (np.diff(windows) == 1).all()


def test_the_parts_of_a_text(text):
    loaded = data.load(str(text), 8)
    parts = [loaded.vocabulary.decode(part.numbers) for part in (loaded.training, loaded.validation)]
    assert "".join(parts) == TEXT
    assert len(parts[1]) == len(TEXT) // 10
    assert loaded.vocabulary.decode(loaded.vocabulary.encode(TEXT)) == TEXT


def test_the_python_documentation_is_the_default():
    config = settings.Settings()
    loaded = data.load(None, config.context_length)
    assert len(loaded) > 400_000
    assert len(loaded.sentence(config.context_length)) > 20
