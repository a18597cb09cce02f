"""`python -m train_demo compare`: one model with several kinds of attention."""

import re

import jax
import pytest
from demo_runs import (
    STEPS,
    TINY,
    as_users_have_it,
    here,
    newest_state,
    refusal,
    steps_saved,
)

from train_demo import compare, metrics, run_folder
from train_demo.__main__ import main
from train_demo.errors import UserError
from train_demo.settings import ATTENTIONS

pytest_plugins = ["demo_fixtures"]
pytestmark = pytest.mark.usefixtures("no_pictures")


def cells(said):
    """The rows of the printed table, by their kind of attention."""
    _, _, table = said.partition("comparison")
    rows = [line.split() for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] in ATTENTIONS}


def test_a_comparison_prints_a_table_and_writes_a_report(text, tmp_path, capfd):
    kinds = ["full", "latent", "window", "blocks"]
    out = tmp_path / "compared"
    said = here(
        capfd,
        "compare",
        *("--out", out, "--data", text, "--attention", ",".join(kinds)),
        *TINY,
    )

    lines = said.splitlines()
    for kind, line in zip(kinds, lines, strict=False):
        assert re.fullmatch(
            rf"{kind}: validation loss \d\.\d{{4}}, 12 steps, \d+ s", line
        )
    assert "comparison" in lines[len(kinds)]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said)

    rows = cells(said)
    assert list(rows) == kinds
    for kind in kinds:
        parameters, loss, *_ = rows[kind]
        _, state = newest_state(out / kind)
        leaves = jax.tree.leaves(state.params)
        assert int(parameters.replace(",", "")) == sum(leaf.size for leaf in leaves)
        measured = metrics.read(out / kind)
        assert loss == f"{measured[-1]['val_loss']:.4f}"
        assert run_folder.read_config(out / kind).settings.attention == kind
    # Two heads of 4: keys and values, or a latent of 8 and a rotary key of 2, float32.
    # Slots of the ring of a window, 64 of them spare, or of the text.
    slots = {"full": 8 + 64, "latent": 8 + 64, "window": 2 + 64, "blocks": 16 * 8}
    assert "a text of 128 characters takes" in said
    for kind in kinds:
        size = 64
        if kind == "latent":
            size = 40
        # Besides, a number of written slots, and two embeddings of 8 features.
        assert rows[kind][3:] == [f"{slots[kind] * size + 4 + 64:,}"]
    page = (out / "report.html").read_text()
    assert all(ATTENTIONS[kind] in page for kind in kinds)
    assert "<tr><th>attention</th><th>parameters</th><th>loss</th>" in page
    assert f"<tr><td>full</td><td>{rows['full'][0]}</td>" in page
    picture = 'alt="Validation loss of each kind over steps"'
    assert f'<img {picture} src="data:image/png;base64,iVBOR' in page


def test_an_error_of_a_run_names_its_kind(text, tmp_path, capfd, monkeypatch):
    def diverges(config, *rest, **options):
        raise UserError("training diverged")

    monkeypatch.setattr(compare, "run_prepared", diverges)
    options = ["--data", text, "--out", tmp_path, "--attention", "sinks", *TINY]
    said = refusal(capfd, "compare", *options)
    assert "error: --attention sinks: training diverged" in said


def test_several_processes_are_refused(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:9876")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    out = tmp_path / "compared"
    said = refusal(capsys, "compare", "--out", out, "--data", text, *TINY)
    assert "compare runs in one process" in said
    assert not out.exists()


def test_a_comparison_that_was_stopped_ends_the_same(
    text, tmp_path, capfd, monkeypatch
):
    options = ["--data", text, "--attention", "sinks,gqa", *TINY]
    whole = cells(here(capfd, "compare", "--out", tmp_path / "whole", *options))

    run_prepared = compare.run_prepared

    def stops(config, *rest, **options):
        if config.settings.attention == "gqa":
            return 130
        return run_prepared(config, *rest, **options)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch, as_users_have_it():
        patch.setattr(compare, "run_prepared", stops)
        assert main(list(map(str, ["compare", "--out", out, *options]))) == 130
    said = " ".join(capfd.readouterr().out.split())
    assert f"python -m train_demo compare --resume --out {out}" in said

    # The options are those of the comparison.
    resumed = cells(here(capfd, "compare", "--resume", "--out", out))
    assert resumed.keys() == {"sinks", "gqa"}
    for kind, (parameters, loss, _, *cache) in whole.items():
        same_parameters, same_loss, _, *same_cache = resumed[kind]
        assert (same_parameters, same_loss) == (parameters, loss)
        assert same_cache == cache

    said = refusal(capfd, "compare", "--resume", "--out", out, "--attention", "full")
    assert "contains a comparison of gqa, sinks: drop --attention" in said
    said = refusal(capfd, "compare", "--out", out, *options)
    assert "already contains a run" in said


@pytest.mark.skipif(run_folder.fcntl is None, reason="no flock here")
def test_two_comparisons_never_share_a_folder(text, tmp_path, capfd, monkeypatch):
    out = tmp_path / "compared"
    longer = ["compare", "--resume", "--steps", 900, "--out", out]
    run_prepared = compare.run_prepared
    refused = []

    def configurations():
        return [path.read_bytes() for path in sorted(out.glob("*/config.json"))]

    def meets_another(*arguments, **options):
        found = configurations()
        refused.append(refusal(capfd, *longer))
        assert configurations() == found
        return run_prepared(*arguments, **options)

    with monkeypatch.context() as patch, as_users_have_it():
        patch.setattr(compare, "run_prepared", meets_another)
        command = ["compare", "--out", out, "--data", text, "--attention", "sinks,gqa"]
        assert main([*map(str, command), *TINY]) == 0

    assert len(refused) == 2
    for said in refused:
        assert f"another run is writing to {out}: wait for it to finish" in said
    assert len(configurations()) == 2

    # One of its runs may be trained alone, too.
    found = configurations()
    with run_folder.sole_writer(out / "sinks"):
        said = refusal(capfd, *longer)
    assert f"another run is writing to {out / 'sinks'}: wait" in said
    assert configurations() == found
    for kind in ("sinks", "gqa"):
        assert run_folder.read_config(out / kind).settings.steps == STEPS
        assert steps_saved(out / kind)[-1] == STEPS
