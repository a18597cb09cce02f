"""`python -m train_demo` in several processes, one of which is killed, and layouts that do not fit."""

import os
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from demo_runs import ROOT, assert_refused, here, sabotaged, untimed

from train_demo import metrics
from train_demo.crash_log import summary
from train_demo.settings import Layout, Settings

pytest_plugins = ["demo_fixtures"]

STEPS = 6
SIZES = (
    *("--steps", STEPS, "--save-every", 2, "--eval-every", 3, "--batch-size", 8),
    *("--context-length", 8, "--layers", 1, "--heads", 2, "--features", 16, "--learning-rate", 0.01),
)
MESH = ("--data-parallel", 2, "--fsdp", 2)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(devices, *arguments, moment=""):
    """Starts a process that is killed at this moment."""
    return subprocess.Popen(
        sabotaged(moment, int(signal.SIGKILL), *arguments),
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two(*arguments, killed=None, moment=""):
    """Runs two processes of two devices; returns their exit codes, their output, and the survivor's seconds."""
    shared = (*arguments, *MESH, "--coordinator", f"localhost:{free_port()}", "--num-processes", 2)
    moments = [moment if number == killed else "" for number in range(2)]
    processes = [start(2, *shared, "--process-id", number, moment=moments[number]) for number in range(2)]
    seconds = 0
    if killed is not None:
        assert processes[killed].wait(120) == -signal.SIGKILL
        death = time.monotonic()
        processes[1 - killed].wait(60)
        seconds = time.monotonic() - death
    said = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], said, seconds


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_killed_twice_while_saving_ends_the_same_also_on_one_device(text, tmp_path, capfd):
    finished, out = tmp_path / "finished", tmp_path / "run"
    codes, said, _ = two("--data", text, "--out", finished, *SIZES)
    assert codes == [0, 0], said
    assert f"step {STEPS:>6}  validation loss" in said[0][0]
    assert "4 x cpu" in said[0][0]
    assert [said[0][1], *said[1]] == [""] * 3  # only process 0 prints
    assert [sample["step"] for sample in metrics.read_samples(finished)] == [3, STEPS]

    arguments = ("--data", text, *SIZES)
    for killed, moment, lost in (
        (1, 5, "process 1 was lost"),
        (0, f"checkpoints/{STEPS}", "process 0, the coordinator, was lost"),
    ):
        codes, said, seconds = two("--out", out, *arguments, "--no-samples", killed=killed, moment=moment)
        assert codes[1 - killed] not in (0, -signal.SIGKILL)
        assert seconds < 15
        survivor = said[1 - killed][1]
        assert survivor.count("\n") == 1, survivor
        assert f"{lost}: start all processes again with --resume" in survivor
        arguments = ("--resume",)
    assert "Resuming from the checkpoint at step 4" in said[0][0]
    assert untimed(out) == untimed(finished)
    assert "Resuming from the checkpoint at step 4" in here(capfd, "--resume", "--out", out)
    for line, other in zip(untimed(out), untimed(finished), strict=True):
        assert line == pytest.approx(other, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "settings", "words"),
    [
        ({"data_parallel": 3}, {}, ["--data-parallel 3", "8 devices"]),
        ({"fsdp": 3}, {}, ["--fsdp 3", "8 devices"]),
        ({"data_parallel": 4, "fsdp": 4}, {}, ["--data-parallel 4", "--fsdp 4", "8 devices"]),
        ({"tensor": 8}, {}, ["--heads 4", "--tensor", "multiple of 8"]),
        ({"context": 8, "data_parallel": 1}, {"context_length": 12}, ["--context-length 12", "multiple of 8"]),
        ({"fsdp": 8}, {"features": 40, "heads": 1, "batch_size": 12}, ["--batch-size 12", "multiple of 8"]),
        ({"accumulate": 3}, {"batch_size": 16}, ["--batch-size 16", "--accumulate", "multiple of 24"]),
    ],
)
def test_layouts_that_do_not_fit(layout, settings, words):
    assert_refused(words, Layout(**layout).sizes, 8, Settings(**settings))


def test_layouts_that_fit():
    """Without options, as many devices as divide the batch."""
    assert Layout().sizes(8, Settings(batch_size=12)).data == 6
    assert Layout().sizes(8, Settings(batch_size=16)).data == 8
    for features in (24, 120):
        assert np.prod(Layout(fsdp=8).sizes(8, Settings(features=features, batch_size=8))) == 8


def test_processes_that_do_not_find_each_other(text, tmp_path):
    """The first of two, and the second of two others, report it in one line."""
    places = [f"localhost:{free_port()}" for _ in range(2)]
    together = ("--num-processes", 2, "--start-timeout", 2, "--data", text, "--out", tmp_path / "run", *SIZES)
    processes = [
        start(1, *together, "--coordinator", place, "--process-id", number) for number, place in enumerate(places)
    ]
    for number, (process, place) in enumerate(zip(processes, places, strict=True)):
        out, error = process.communicate(timeout=60)
        assert (process.returncode, error.count("\n")) == (2, 1), error
        assert f"--coordinator {place} within 2 s" in error
        assert ("1,804 characters of " in out) == (number == 0)
    assert not (tmp_path / "run").exists()


def test_the_plan_on_the_command_line(text):
    sizes = ("--data", text, "--batch-size", 8, "--context-length", 8, "--layers", 1, "--features", 16, "--heads", 2)
    process = start(1, "plan", "--devices", 4, "--fsdp", 4, *sizes)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert "state and text" in out
    assert out.count("together") == 1


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", None),
        ("W1122 11:01:34.942885 5795 preemption_sync_manager.cc:147] Failed to retrieve preemption notice\n", None),
        (
            "F1122 11:01:27.769301 5726 client.h:80] Terminating process because\n"
            "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n2\nThe tasks\n",
            "processes 1, 2 were lost: start all",
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n", "(after throwing an instance of 'std::"),
        ("F1122 11:01 client.h:80] Terminating. absl::Status: INTERNAL: odd\n", "JAX ended this process (INTERNAL: "),
    ],
)
def test_the_summary_of_a_crash_log(log, line):
    assert summary(log) is None if line is None else line in summary(log)
