"""`python -m train_demo` on a full disk: one line, exit code 2, and the good checkpoints stay usable."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train_demo import files, metrics

resource = pytest.importorskip("resource")
ROOT = Path(__file__).parent.parent
# A file that grows beyond the limit fails as on a full disk. The limit falls when a step's loss is noted.
LIMITED = """
import resource, runpy, signal, sys
from train_demo import metrics

step_of_limit, limit, *sys.argv[1:] = sys.argv[1:]

def write(self, name, step, value, write=metrics.Log.write):
    if step == int(step_of_limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    return write(self, name, step, value)

metrics.Log.write = write
runpy.run_module('train_demo', run_name='__main__')
"""
TINY = (
    *("--steps", "4", "--save-every", "2", "--eval-every", "4", "--batch-size", "2", "--context-length", "8"),
    *("--layers", "1", "--heads", "1", "--features", "4"),
)


@pytest.mark.parametrize(("limit", "named"), [(1000, "checkpoint 4 cannot be saved"), (10, "metrics.jsonl")])
def test_a_full_disk(monkeypatch, tmp_path, limit, named):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # The cache of compiled programs is full, too, and nothing has to be said about it.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, out = tmp_path / "fox.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    command = [sys.executable, "-c", LIMITED, "3", str(limit), "--data", str(text), "--out", str(out), *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert "--resume" in done.stderr
    resumed = [sys.executable, "-m", "train_demo", "--resume", "--out", str(out)]
    done = subprocess.run(resumed, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Going on from the checkpoint of step 2" in done.stdout
    assert [metric["step"] for metric in metrics.read(out) if "loss" in metric] == [1, 2, 3, 4]


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_cannot_be_written_stays_as_it_was(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_atomically(path, b"new")
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("file", b"old")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_is_full_is_named(tmp_path):
    command = [sys.executable, "-m", "train_demo", "--out", str(tmp_path / "run"), *TINY]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write to standard output, /dev/full (No space left on device)" in done.stderr
