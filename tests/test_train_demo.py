"""`python -m train_demo`: the files it leaves, also if it is killed, interrupted or out
of disk space.
"""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from demo_runs import (
    ROOT,
    STEPS,
    TEXT,
    TINY,
    UNSAFE,
    as_users_have_it,
    assert_same_run,
    here,
    newest_state,
    sabotaged,
    steps_saved,
)
from marks import with_core

from train_demo import checkpoint, mesh, metrics, report, run_folder, training
from train_demo.__main__ import main
from train_demo.errors import UserError
from train_demo.settings import Sizes

pytest_plugins = ["demo_fixtures"]
COMMAND = (sys.executable, "-m", "train_demo")


def struck(moment, number, *arguments):
    """Runs the command until a signal ends it, and returns its output."""
    command = sabotaged(moment, int(number), *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert done.returncode == expected, done.stderr
    assert not done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.core
def test_finished_run_leaves_all_files(run):
    config = json.loads((run.out / run_folder.CONFIG).read_bytes())
    assert config["settings"]["steps"] == STEPS
    assert steps_saved(run.out) == [4, 8, 12]
    assert all((run.out / picture).exists() for picture in report.PICTURES)
    assert (run.out / "report.html").read_text().startswith("<!doctype html>")
    written = metrics.read_samples(run.out)
    assert [sample["step"] for sample in written] == [3, 6, 9, 12]
    assert all(len(sample["text"]) == training.SAMPLE for sample in written)


@pytest.mark.core
def test_metrics_hold_each_loss_and_the_seconds_since_the_start(run):
    text = (run.out / metrics.METRICS).read_text()
    lines = [json.loads(line) for line in text.splitlines()]

    steps = {"loss": [], "val_loss": []}
    for line in lines:
        kind = "loss" if "loss" in line else "val_loss"
        assert set(line) == {"step", kind, "seconds"}
        assert all(math.isfinite(value) for value in line.values())
        steps[kind].append(line["step"])
    assert steps["loss"] == list(range(1, STEPS + 1))
    assert steps["val_loss"] == [3, 6, 9, 12]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.usefixtures("no_pictures")
def test_run_that_was_killed_stopped_and_out_of_room_ends_the_same(
    run, text, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "run"
    resume = ("--resume", "--out", out)

    # Killed before the first checkpoint gets its name.
    struck("checkpoints/4", signal.SIGKILL, "--data", text, "--out", out, *TINY)
    assert steps_saved(out) == []

    # The disk is full at the second checkpoint.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = sabotaged(5, "full", *resume)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "cannot save checkpoint 8" in done.stderr
    assert "--resume" in done.stderr
    assert steps_saved(out) == [4]
    start = f"{out} contains no complete checkpoint: starting from step 0"
    assert start in " ".join(done.stdout.split())

    # Terminated between two checkpoints, so it saves.
    said = struck(5, signal.SIGTERM, *resume)
    assert "Resuming from the checkpoint at step 4" in said
    stopped = steps_saved(out)[-1]
    assert 4 < stopped <= 8  # depends on when the signal arrives
    to_continue = f"python -m train_demo --resume --out {out}"
    assert f"Stopped and saved at step {stopped}. To continue: {to_continue}" in said

    # Killed between two checkpoints, and in the middle of a line.
    said = struck(11, signal.SIGKILL, *resume)
    assert f"Resuming from the checkpoint at step {stopped}" in said
    with (out / metrics.METRICS).open("a") as file:
        file.write('{"step": 11, "lo')

    assert "Resuming from the checkpoint at step 8" in here(capfd, *resume)
    assert_same_run(out, run.out)


@pytest.mark.core
def test_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(copy, tmp_path):
    # A process that is killed leaves the folder as it is when Python asks for a change
    # of it.
    _, state = newest_state(copy)
    moments = []
    snapshots = []

    def snapshot(event, details):
        changes = event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "open")
        if moments and changes and str(copy) in str(details[0]):
            moments.clear()  # copying is no event
            snapshots.append(tmp_path / "moments" / str(len(snapshots)))
            # TensorStore's threads rename these to the files that they hold.
            half_written = shutil.ignore_patterns("*.__lock")
            shutil.copytree(copy, snapshots[-1], ignore=half_written)
            moments.append("saving")

    sys.addaudithook(snapshot)  # for ever, so that it has to be switched off
    with checkpoint.manager(copy) as checkpoints:
        moments.append("saving")
        checkpoint.save(checkpoints, STEPS + 1, state)
        moments.clear()
    assert steps_saved(copy) == [8, STEPS, STEPS + 1]

    found = []
    over = mesh.make(Sizes(1, 1, 1, 1))
    for left in snapshots:
        step, same = checkpoint.restore_newest(left, state, over=over, say=pytest.fail)
        jax.tree.map(np.testing.assert_array_equal, state, same)
        found.append(step)
    assert len(found) > 10
    assert found == sorted(found)
    assert set(found) == {STEPS, STEPS + 1}


@pytest.mark.usefixtures("no_pictures")
def test_extended_run_stays_exact_and_prints_the_numbers_of_the_report(
    run, copy, tmp_path, capfd
):
    longer = 2 * STEPS
    other = Path(shutil.copytree(run.out, tmp_path / "other"))
    said = here(capfd, "--resume", "--steps", longer, "--out", copy)
    assert f"step {longer:>6}  validation loss" in said
    assert f"python -m train_demo sample --out={copy}" in said
    page = (copy / "report.html").read_text()
    facts = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page))
    printed = re.search(r"training loss +(\S+) +mean of the last (\d+) steps", said)
    assert printed.groups() == (facts["training loss"], str(longer))
    printed = re.search(r"characters per second +([\d,]+) ", said)
    assert printed[1] == facts["characters per second"]

    struck(STEPS + 2, signal.SIGINT, "--resume", "--steps", longer, "--out", other)
    stopped = steps_saved(other)[-1]
    assert STEPS < stopped < longer
    said = here(capfd, "--resume", "--out", other)
    assert f"Resuming from the checkpoint at step {stopped}" in said
    assert_same_run(copy, other, longer)


@pytest.mark.core
def test_report_command_makes_the_report_again(copy, capfd):
    for name in (*report.PICTURES, "report.html"):
        (copy / name).unlink()

    said = here(capfd, "report", "--out", copy)

    assert f"{copy / 'report.html'} is ready" in said
    assert (copy / "report.html").exists()
    for name in report.PICTURES:
        assert (copy / name).read_bytes().startswith(b"\x89PNG")


def test_sample_command_continues_prompts_as_the_seed_says(run, capfd):
    prompt = "The quick brown fox jumps"  # longer than the context
    command = ("sample", "--out", run.out, "--prompt", prompt, "--max-new-tokens", 30)

    first, again, other = (here(capfd, *command, "--seed", x) for x in (1, 1, 2))

    assert first == again != other
    for text in (first, other):
        assert text.startswith(prompt)
        assert len(text) == len(prompt) + 30 + 1

    said = here(capfd, *command, "--prompt", "fox", "--seed", 1)
    parts = re.split(r"^--- prompt (\d) of 2 ---\n", said, flags=re.M)
    assert parts[1::2] == ["1", "2"]
    assert parts[2] == first
    assert parts[4].startswith("fox")


def on_terminal(*arguments):
    """Runs the command on a terminal of 80 columns; returns lines without escapes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 2**16):
            written += piece
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return re.split(r"[\r\n]+", text)


def test_text_of_a_model_sends_no_control_characters_and_fits_the_terminal(
    capfd, processes, tmp_path
):
    # A text of the other run's size and vocabulary size, whose programs are compiled
    # already.
    (tmp_path / "text").write_text(TEXT.translate(str.maketrans("abcdme\nfg", UNSAFE)))
    out = tmp_path / "run"
    lines = on_terminal("--data", tmp_path / "text", "--out", out, *TINY)
    assert (out / "attention.png").read_bytes().startswith(b"\x89PNG")
    # Only long words and lines to copy may be longer.
    for line in lines:
        assert len(line) <= 80 or "\\x" in line or str(tmp_path) in line
    sample = ("sample", "--out", out, "--prompt", "\x1b[", "--max-new-tokens", 20)
    said = "".join(lines) + here(capfd, *sample)
    assert not set(UNSAFE) - set("[31m") & set(said)
    assert "\\x1b[" in said


ENDLESS = tuple(re.sub(r"(steps|every)=\d+", r"\1=1000000", option) for option in TINY)


@pytest.mark.parametrize(
    ("delay", "number"),
    [(0.05, signal.SIGINT), (0.3, signal.SIGTERM), (2, signal.SIGINT)],
)
def test_signal_at_any_moment_ends_a_run_without_a_traceback(
    text, tmp_path, delay, number
):
    command = (*COMMAND, "--data", text, "--out", tmp_path / "run", *ENDLESS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            time.sleep(delay)
            process.send_signal(number)
            # Python may ignore what is raised in a callback of its imports, before any
            # line of the program has run.
            if delay == 0.05:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                process.send_signal(number)
            said, complaint = process.communicate(timeout=30)
        finally:
            # The run has no end, and the context would wait for it.
            process.kill()
    if process.returncode == 128 + number:
        assert (complaint + said).count("--resume") == 1
        assert "Traceback" not in complaint + said
        assert complaint.count("\n") <= 1
    else:  # Python itself was still starting
        assert delay < 1
        assert process.returncode in (1, -number)
        assert "train_demo" not in complaint
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_errors_name_a_full_output(tmp_path):
    command = (*COMMAND, "--out", tmp_path / "run", *TINY)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write to standard output (No space left on device)" in done.stderr


def test_errors_name_metrics_without_room(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(metrics.Log(tmp_path, 0, 1.0, time.perf_counter())) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            message = r"cannot write .*metrics.jsonl \(.*continue with --resume"
            with pytest.raises(UserError, match=message):
                log.loss("loss", 1, 1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.core
@pytest.mark.parametrize(
    ("loss", "said"),
    [(math.nan, "nan"), (461, "461")],
)
def test_training_that_diverged_ends_with_a_remedy(tmp_path, loss, said):
    log = metrics.Log(tmp_path, 0, math.log(100), time.perf_counter())
    message = f"training diverged: the loss is {said} at step 7"
    with contextlib.closing(log):
        # 100 times the loss of guessing one of 100 tokens.
        assert log.loss("loss", 6, 460) == 460
        with pytest.raises(UserError, match=message) as error:
            log.loss("loss", 7, loss)
    remedy = "lower --learning-rate, and choose a different --out"
    assert str(error.value).endswith(remedy)
    assert [metric["step"] for metric in metrics.read(tmp_path)] == [6]


@pytest.mark.core
def test_resumed_log_continues_the_clock_and_drops_later_lines(tmp_path):
    (tmp_path / metrics.METRICS).write_text(
        '{"step": 1, "loss": 3.0, "seconds": 100.0}\n'
        '{"step": 2, "loss": 3.0, "seconds": 200.0}\n'
    )
    # Damaged lines are dropped, too.
    (tmp_path / metrics.SAMPLES).write_text(
        '{"step": 1, "prompt": "a", "text": "b1"}\n'
        '{"step": 3}\n'
        "[\n"
        '{"step": 4, "prompt": "a", "text": "b4"}\n'
        '{"step": 8, "pro'
    )

    with contextlib.closing(metrics.Log(tmp_path, 1, 1.0, time.perf_counter())) as log:
        log.loss("loss", 2, np.float32(2.0))

    first, second = metrics.read(tmp_path)
    assert (first["loss"], second["loss"]) == (3.0, 2.0)
    assert 100 <= second["seconds"] < 110
    assert [sample["step"] for sample in metrics.read_samples(tmp_path)] == [1]


@pytest.mark.skipif(run_folder.fcntl is None, reason="no flock here")
def test_two_runs_never_share_a_folder(tmp_path):
    one = run_folder.sole_writer(tmp_path)
    other = run_folder.sole_writer(tmp_path)
    with one, pytest.raises(UserError, match="another run is writing"), other:
        pass


def output_in(encoding, *arguments):
    """Runs the command with strict output in this encoding, as PYTHONIOENCODING sets
    it; returns stdout and stderr.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding, "strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding, "strict")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
        as_users_have_it(),
    ):
        main([str(argument) for argument in arguments])
    out.flush()
    err.flush()
    return [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]


@pytest.mark.parametrize("encoding", with_core(["ascii", "cp1252"], "ascii"))
@pytest.mark.usefixtures("no_pictures")
def test_characters_outside_the_encoding_of_the_output_are_question_marks(
    tmp_path, encoding
):
    data = tmp_path / "Ł → ☃.txt"
    out = tmp_path / "Ω"
    data.write_text("Zażółć gęślą jaźń → ☃ 語\n" * 60, "utf-8")
    train = ("train", "--data", data, *TINY)
    for command, words in (
        (train, ["characters of", "? ? ?.txt", "a sample", "report.html"]),
        (("report",), [" "]),
        (("export",), [" "]),
        (("sample", "--prompt", "Za→☃"), ["Za??"]),
    ):
        said, complaint = output_in(encoding, *command, "--out", out)
        assert all(word in " ".join(said.split()) for word in words)
        assert not complaint
    _, complaint = output_in(encoding, "sample", "--prompt", "Ж", "--out", out)
    assert re.match(r"python -m train_demo: error: .*\?", complaint)

    # All files are in UTF-8.
    files = [out / "report.html", out / run_folder.CONFIG]
    files += [out / "export" / "config.json", *out.glob("*.jsonl")]
    for path in files:
        path.read_text("utf-8")
