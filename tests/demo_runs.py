"""Helpers of the tests of the demo: settings of a tiny run, and ways to run the
command.
"""

import contextlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from train_demo import checkpoint, mesh, metrics, run_folder
from train_demo.__main__ import main
from train_demo.errors import UserError
from train_demo.settings import Sizes
from train_demo.update import first_state

ROOT = Path(__file__).parent.parent
TEXT = "The quick brown fox jumps over the lazy dog. " * 40 + "\n$_%"
STEPS = 12
SETTINGS = {
    "steps": STEPS,
    "save_every": 4,
    "eval_every": 3,
    "batch_size": 2,
    "context_length": 8,
    "layers": 1,
}
SETTINGS |= {"heads": 2, "features": 8, "dropout_rate": 0.1}
TINY = tuple(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items())


UNSAFE = "\x1b[31m\a\r\x9b\u202e"
# Runs the command line in a process that sends itself a signal, or in which a file that
# grows fails as on a full disk. The moment is when a file whose path ends with some
# words gets its name, or when the loss of a step is noted.
SABOTAGED = """
import os, resource, signal, sys

moment, action, *sys.argv[1:] = sys.argv[1:]

def strike():
    if action == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    else:
        os.kill(os.getpid(), int(action))

def at_rename(event, details):
    if event == "os.rename" and str(details[1]).endswith(moment):
        strike()

def at_loss(self, name, step, value):
    if (name, step) == ("loss", int(moment)):
        strike()
    return loss(self, name, step, value)

if moment.isdigit():
    from train_demo import metrics

    loss, metrics.Log.loss = metrics.Log.loss, at_loss
elif moment:
    sys.addaudithook(at_rename)
from train_demo.__main__ import start

start()
"""


@contextlib.contextmanager
def as_users_have_it():
    """JAX's default promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def sabotaged(moment, action, *arguments):
    """The command that runs `SABOTAGED`."""
    return [
        sys.executable,
        "-c",
        SABOTAGED,
        str(moment),
        str(action),
        *map(str, arguments),
    ]


def here(capfd, *arguments):
    """Runs the command in this process, which saves the imports; returns its output,
    which is only on stdout.
    """
    capfd.readouterr()
    with as_users_have_it():
        assert main([str(argument) for argument in arguments]) == 0
    said, complaint = capfd.readouterr()
    assert not complaint
    return said


def refusal(capsys, *arguments):
    """Runs the command in this process, which must refuse in one line; returns this
    line.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, as_users_have_it():
        main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("python -m train_demo")
    assert said.count("\n") == 1
    assert said.endswith("\n")
    return said


def assert_refused(words, function, *arguments, **options):
    with pytest.raises(UserError) as refused:
        function(*arguments, **options)
    assert all(word in str(refused.value) for word in words), refused.value


def newest_state(out):
    """The newest checkpoint's step and its state, on one device."""
    config = run_folder.read_config(out)
    shapes = jax.eval_shape(
        lambda: first_state(len(config.vocabulary), config.settings)
    )
    over = mesh.make(Sizes(1, 1, 1, 1))
    return checkpoint.restore_newest(out, shapes, over=over, say=pytest.fail)


def steps_saved(out):
    return sorted(
        int(path.name) for path in out.glob("checkpoints/*") if path.name.isdigit()
    )


def untimed(out):
    """The metrics without their seconds, which no two runs share."""
    return [
        {name: value for name, value in metric.items() if name != "seconds"}
        for metric in metrics.read(out)
    ]


def assert_same_run(one, other, steps=STEPS):
    step, state = newest_state(one)
    other_step, other_state = newest_state(other)
    assert step == other_step == steps
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    assert untimed(one) == untimed(other)
    assert metrics.read_samples(one) == metrics.read_samples(other)
