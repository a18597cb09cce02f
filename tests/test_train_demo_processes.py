"""`python -m train_demo` in several processes, and layouts that do not fit."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from demo_runs import ROOT, assert_refused, here, sabotaged, steps_saved, untimed

from train_demo import metrics
from train_demo.settings import Layout, Settings

pytest_plugins = ["demo_fixtures"]

STEPS = 6
SIZES = ("--steps", STEPS, "--save-every", 2, "--eval-every", 3)
SIZES += ("--batch-size", 8, "--context-length", 8, "--layers", 1, "--heads", 2)
SIZES += ("--features", 16, "--learning-rate", 0.01)
MESH = ("--data-parallel", 2, "--fsdp", 2)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(index, address, moment, number, *arguments):
    """Starts one of two processes of two devices, which sends itself a signal at a
    moment.
    """
    here = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
    }
    return subprocess.Popen(
        sabotaged(moment, int(number), *arguments),
        cwd=ROOT,
        env=os.environ | here | {"JAX_COORDINATOR_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two(*arguments, struck=1, moment="", number=signal.SIGKILL):
    """Runs two processes, one of which is struck; returns exit codes and outputs."""
    address = f"localhost:{free_port()}"
    processes = []
    for index in range(2):
        own_moment = moment if index == struck else ""
        process = start(index, address, own_moment, number, *arguments, *MESH)
        processes.append(process)
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


@pytest.mark.usefixtures("no_pictures")
def test_two_processes_train_as_one_also_after_a_kill_and_sigterm(
    text, tmp_path, capfd
):
    alone = tmp_path / "alone"
    finished = tmp_path / "finished"
    out = tmp_path / "run"
    command = [sys.executable, "-m", "train_demo", "--data", text, "--out", alone]
    command += [*SIZES, *MESH]
    # On four devices of its own, while the two processes have two each.
    one = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"},
        stdout=subprocess.DEVNULL,
    )
    codes, said = two("--data", text, "--out", finished, *SIZES)
    assert one.wait(120) == 0
    assert codes == [0, 0], said
    assert f"step {STEPS:>6}  validation loss" in said[0][0]
    assert "4 x cpu" in said[0][0]
    assert "validation loss" not in said[1][0]  # only process 0 prints
    assert [sample["step"] for sample in metrics.read_samples(finished)] == [3, STEPS]
    for line, other in zip(untimed(finished), untimed(alone), strict=True):
        assert line == pytest.approx(other, rel=0, abs=4.8e-7)

    # Killed in the middle of a save; JAX then ends the other process.
    began = time.monotonic()
    new_run = ("--data", text, "--out", out, *SIZES, "--no-samples")
    codes, said = two(*new_run, struck=0, moment="checkpoints/4")
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, -signal.SIGKILL)
    assert time.monotonic() - began < 60
    assert steps_saved(out) == [2]

    # One process is told to end, so all save at the same step. What cannot be restored
    # is moved once.
    (out / "checkpoints" / "99").mkdir()
    codes, said = two(
        "--resume", "--out", out, "--no-samples", moment=3, number=signal.SIGTERM
    )
    assert codes == [128 + signal.SIGTERM] * 2, said
    assert "Resuming from the checkpoint at step 2" in said[0][0]
    assert [path.name for path in out.glob("checkpoints/damaged-*")] == ["damaged-99"]
    stopped = steps_saved(out)[-1]
    assert 2 < stopped < STEPS
    assert f"Stopped and saved at step {stopped}" in said[0][0]
    so_far = untimed(out)
    assert so_far == untimed(finished)[: len(so_far)]

    # Another mesh computes the rest.
    printed = here(capfd, "--resume", "--out", out)
    assert f"Resuming from the checkpoint at step {stopped}" in printed
    for line, other in zip(untimed(out), untimed(finished), strict=True):
        assert line == pytest.approx(other, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "settings", "words"),
    [
        (
            {"data_parallel": 4, "fsdp": 4},
            {},
            ["--data-parallel 4", "--fsdp 4", "devices, 8:"],
        ),
        ({"tensor": 8}, {}, ["--heads 4", "--tensor", "multiple of 8"]),
        (
            {"context": 8, "data_parallel": 1},
            {"context_length": 12},
            ["--context-length 12", "multiple of 8"],
        ),
        (
            {"fsdp": 8},
            {"features": 40, "heads": 1, "batch_size": 12},
            ["--batch-size 12", "multiple of 8"],
        ),
        (
            {"accumulate": 3},
            {"batch_size": 16},
            ["--batch-size 16", "--accumulate", "multiple of 24"],
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, settings, words):
    assert_refused(words, Layout(**layout).sizes, 8, Settings(**settings))


@pytest.mark.parametrize(("batch_size", "devices"), [(12, 6), (16, 8)])
def test_default_layout_has_as_many_devices_as_divide_the_batch(batch_size, devices):
    assert Layout().sizes(8, Settings(batch_size=batch_size)).data == devices


def test_fsdp_fits_features_that_it_divides():
    settings = Settings(features=120, batch_size=8)
    assert np.prod(Layout(fsdp=8).sizes(8, settings)) == 8
