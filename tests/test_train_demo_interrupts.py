"""`python -m train_demo`, Ctrl-C and SIGTERM: one line and exit code 130 or 143 at whatever moment it comes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
ENDLESS = (
    *("--steps", "1000000", "--save-every", "1000000", "--eval-every", "1000000", "--batch-size", "2"),
    *("--context-length", "8", "--layers", "1", "--heads", "2", "--features", "8"),
)


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        yield


def interrupted(delay, *arguments):
    """Sends SIGINT after a delay; returns the exit code, what was written, and how long the process went on."""
    command = [sys.executable, "-m", "train_demo", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        try:
            out, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            if delay > 0.05:
                raise
            # Python may ignore what is raised in a callback of its imports, before any line of the program has run.
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            out, err = process.communicate(timeout=30)
    return process.returncode, out, err, time.monotonic() - sent


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.5, 1, 2, 4])
def test_ctrl_c_at_any_moment(tmp_path, delay):
    text, out = tmp_path / "fox.txt", tmp_path / "run"
    text.write_text(TEXT)
    code, said, complaint, took = interrupted(delay, "--data", text, "--out", out, *ENDLESS)
    if code == 130:
        assert (complaint + said).count("--resume") == 1
        assert "Traceback" not in complaint + said
        assert complaint.count("\n") <= 1
    else:  # Python itself was still starting
        assert delay == 0.05
        assert code in (1, -signal.SIGINT)
        assert "train_demo" not in complaint
    assert took < 20  # a second or two; more where the machine is busy
    assert not list(out.glob("*.tmp"))


# The main thread computes, and executes no Python, for minutes: as while XLA compiles.
BUSY = """
import hashlib, os, signal, threading, time
from train_demo import stopping

stopping.GRACE = 0.5
with stopping.heeded(lambda line: print(line, flush=True), False):
    threading.Timer(0.2, os.kill, (os.getpid(), int(signal.{}))).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", {})
print("done")
"""


@pytest.mark.parametrize(
    ("name", "rounds", "code", "words"),
    [
        ("SIGTERM", 2**31 - 1, 143, ("Terminated: stopping after this step", "Terminated before a step ended")),
        ("SIGINT", 3 * 10**6, 0, ("Stopping after this step, then saving (Ctrl-C again: stop at once)", "")),
    ],
)
def test_a_signal_is_answered_at_once_and_sigterm_ends_in_time(name, rounds, code, words):
    done = subprocess.run(
        [sys.executable, "-c", BUSY.format(name, rounds)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(words[0])
    assert done.stderr.startswith(words[1])
    assert done.stderr.count("\n") == (code != 0)


def test_sigterm_before_the_training(tmp_path):
    (tmp_path / "fox.txt").write_text(TEXT)
    code = "import os, signal, train_demo.__main__ as m, train_demo.command_line as c\n"
    code += "c.run = lambda _: os.kill(os.getpid(), signal.SIGTERM)\nm._start()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 143
    assert (
        done.stderr == "Terminated: python -m train_demo --resume continues a training run from its last checkpoint\n"
    )
