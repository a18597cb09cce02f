"""`python -m train_demo` and Ctrl-C: one line and exit code 130 at whatever moment it comes."""

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
