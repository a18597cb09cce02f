"""Checkpoints that are damaged, foreign or do not fit, and what becomes of them."""

import gc
import json
import shutil

import jax
import numpy as np
import pytest
from demo_runs import (
    SETTINGS,
    STEPS,
    as_users_have_it,
    assert_same_run,
    here,
    newest_state,
    refusal,
    steps_saved,
)
from jax.experimental import multihost_utils
from marks import with_core_tuples

from train_demo import checkpoint, generate, mesh, run_folder
from train_demo.__main__ import main
from train_demo.errors import UserError
from train_demo.settings import Sizes

pytest_plugins = ["demo_fixtures"]
pytestmark = [
    # Orbax leaves the reading of other arrays unfinished.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("no_pictures"),
]

BEFORE = STEPS - SETTINGS["save_every"]


@pytest.fixture(autouse=True)
def collected():
    """What Orbax left unfinished ends in the test that may ignore it."""
    yield
    gc.collect()


def content(folder):
    """All files and folders below a folder, and what the files hold."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in paths
    }


# What may be harmed in the folder of a checkpoint.
PLACES = {
    "step": "",
    "item": "default",
    "metadata": "default/_METADATA",
    "manifest": "default/manifest.ocdbt",
    "time": "_CHECKPOINT_METADATA",
    "arrays": "default/**/d/*",
}


def harmed(step, place, harm):
    paths = [step]
    if PLACES[place]:
        paths = list(step.glob(PLACES[place]))
    assert paths
    for path in paths:
        harm(path)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def emptied(path):
    is_folder = path.is_dir()
    remove(path)
    if is_folder:
        path.mkdir()
    else:
        path.touch()


def replaced(path):
    """A folder becomes a file; a file gets the content of another."""
    remove(path)
    path.write_text("[1, 2]")


def truncated(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def zeroed(path):
    whole = path.read_bytes()
    kept = whole[: len(whole) // 2]
    path.write_bytes(kept + bytes(len(whole) - len(kept)))


HARMS = [(place, emptied) for place in PLACES if place != "time"]
HARMS += [(place, replaced) for place in PLACES]
HARMS += [(place, remove) for place in ("item", "metadata", "manifest", "arrays")]
HARMS += [
    (place, harm)
    for place in ("metadata", "manifest", "arrays")
    for harm in (truncated, zeroed)
]


@pytest.mark.parametrize(("place", "harm"), HARMS)
def test_a_damaged_checkpoint_is_skipped_by_what_only_reads(run, copy, place, harm):
    harmed(copy / "checkpoints" / str(STEPS), place, harm)
    found = content(copy)
    _, state = newest_state(run.out)
    over = mesh.make(Sizes(1, 1, 1, 1))
    said = []

    step, _ = checkpoint.restore_newest(copy, state, over=over, say=said.append)

    assert step == BEFORE
    assert f"Skipped checkpoint {STEPS}: it is damaged" in "".join(said)
    assert content(copy) == found


@pytest.mark.core
def test_resuming_keeps_good_checkpoints_and_moves_others_aside(run, copy, capfd):
    saved = copy / "checkpoints"
    harms = {
        STEPS: lambda path: remove(path / "default"),
        4: lambda path: harmed(path, "arrays", truncated),
        99: lambda path: path.mkdir(),
        98: lambda path: path.touch(),
        97: lambda path: path.symlink_to("nowhere"),
        # Of another run.
        1: lambda path: shutil.copytree(saved / "8" / "default" / "d", path),
    }
    (saved / "16.orbax-checkpoint-tmp-7").mkdir()

    # The second time, the names are taken, and old checkpoints are deleted.
    longer = STEPS + 3 * SETTINGS["save_every"]
    kept = {STEPS: [BEFORE, STEPS], longer: [STEPS + 4, STEPS + 8, longer]}
    for suffix, steps in (("", STEPS), ("-2", longer)):
        expected = {}
        for step, harm in harms.items():
            path = saved / str(step)
            if step == 4 and suffix:
                shutil.copytree(saved / "8", path)
            harm(path)
            expected[f"damaged-{step}{suffix}"] = (
                path.is_symlink(),
                path.is_dir(),
                content(path),
            )
        earlier = content(saved)

        said = here(capfd, "--resume", "--steps", steps, "--out", copy)

        assert f"Resuming from the checkpoint at step {BEFORE}" in said
        assert f"Skipped checkpoint {STEPS}: it is damaged" in said
        for name, kind in expected.items():
            path = saved / name
            assert (path.is_symlink(), path.is_dir(), content(path)) == kind
            # The terminal may wrap within the path.
            assert f"to{path}" in "".join(said.split())
        later = content(saved)
        for name in earlier:
            if name.startswith("damaged-"):
                assert later[name] == earlier[name]
        assert steps_saved(copy) == kept[steps]
        assert not list(saved.glob("*tmp*"))
        if steps == STEPS:
            assert_same_run(run.out, copy)


EDITS = [("layers", 2), ("features", 16), ("optimizer", "adamw")]


@pytest.mark.parametrize(("name", "value"), with_core_tuples(EDITS, EDITS[0]))
def test_checkpoints_that_do_not_fit_the_configuration_stay(copy, capfd, name, value):
    config = json.loads((copy / "config.json").read_bytes())
    config["settings"][name] = value
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "checkpoints" / "16.orbax-checkpoint-tmp-7").mkdir()
    found = content(copy)

    commands = [
        ("--resume", "--steps", 900),
        ("--resume",),
        ("sample", "--prompt", "fox"),
        ("report",),
        ("export",),
    ]
    for command in commands:
        said = refusal(capfd, *command, "--out", copy)
        assert f"no checkpoint in {copy / 'checkpoints'} can be restored" in said
        assert "(12: " in said
        assert "; 8: " in said
        assert "; 4: " in said
        assert "undo changes of config.json" in said
        assert content(copy) == found


def test_damaged_checkpoints_without_a_good_one_stay(copy, capfd):
    for step in steps_saved(copy):
        emptied(copy / "checkpoints" / str(step))
    (copy / "checkpoints" / "99").mkdir()
    found = content(copy)

    said = refusal(capfd, "--resume", "--out", copy)

    assert "can be restored, because each is damaged" in said
    assert "(99: " in said
    assert content(copy) == found
    with pytest.raises(UserError, match=r"no checkpoint in .* can be restored"):
        generate.load_model(copy, run_folder.read_config(copy))


def test_commands_that_only_read_move_nothing(copy, capfd):
    emptied(copy / "checkpoints" / str(STEPS) / "default")
    (copy / "checkpoints" / "99").mkdir()
    found = content(copy / "checkpoints")

    for command in (("sample", "--prompt", "fox"), ("report",), ("export",)):
        with as_users_have_it():
            assert main([*command, "--out", str(copy)]) == 0
        complaint = capfd.readouterr().err
        assert f"Skipped checkpoint {STEPS}: " in complaint
        assert "Skipped checkpoint 99: " in complaint

    assert content(copy / "checkpoints") == found


def test_a_checkpoint_that_one_process_cannot_read_is_skipped_by_all(run, monkeypatch):
    _, state = newest_state(run.out)
    # A process with a damaged disk of its own is not to be had.
    answers = iter([np.array([True, False]), np.array([True, True])])
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: next(answers))
    said = []

    step, restored = checkpoint.restore_newest(
        run.out, state, over=mesh.make(Sizes(1, 1, 1, 1)), say=said.append
    )

    assert step == BEFORE
    assert "another process cannot read it" in "".join(said)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_too_little_memory_is_no_damage(run, monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    _, state = newest_state(run.out)
    # Filling the memory would end the tests.
    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", fails)
    with pytest.raises(MemoryError):
        checkpoint.restore_newest(
            run.out, state, over=mesh.make(Sizes(1, 1, 1, 1)), say=pytest.fail
        )
