"""How soon the demo starts: the model is built once, and a second run loads its programs instead of tracing them."""

import shutil
import sys
import warnings

import jax
import numpy as np
import pytest

from train_demo import api, command_line, metrics, model, programs, run, training
from train_demo.layout import Layout
from train_demo.programs import Programs
from train_demo.settings import Settings

SMALL = {"steps": 6, "eval_every": 3, "save_every": 3, "batch_size": 2, "context_length": 8, "layers": 1}
SMALL |= {"heads": 1, "features": 4}


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_model_is_built_once(monkeypatch):
    built, build = [], model.Transformer.__init__

    def noting(transformer, *args, **options):
        built.append(args)
        build(transformer, *args, **options)

    monkeypatch.setattr(model.Transformer, "__init__", noting)
    settings = Settings(**SMALL, seed=123)
    structure, shapes = model.blueprint(11, settings, Layout())
    params = model.initial_params(11, settings)
    assert model.blueprint(11, settings)[0] is structure
    assert len(built) == 1
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains without pictures; returns the losses."""
    (tmp_path / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    monkeypatch.setattr(training, "_finish", lambda *_: None)
    options = {"quiet": True, "samples": False, "programs": tmp_path / "programs", "layout": Layout()}

    def train(name, resume=False, **other):
        out = tmp_path / name
        assert api.start(out, str(tmp_path / "fox.txt"), None, SMALL, resume=resume, **{**options, **other}) == 0
        return [{name: value for name, value in metric.items() if name != "seconds"} for metric in metrics.read(out)]

    return train


def refuse(*_, **__):
    raise AssertionError("this was traced")


def test_a_second_run_and_a_resumed_one_trace_nothing(train, tmp_path, monkeypatch):
    expected = train("first")
    assert len(list((tmp_path / "programs").glob("*.program"))) == 3
    assert not (tmp_path / "first" / "samples.jsonl").exists()  # it was told to write none
    for module, name in ((run, "initial_params"), (training, "make_updates"), (training, "make_validate")):
        monkeypatch.setattr(module, name, refuse)
    assert train("second") == expected
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "6")
    assert train("second", resume=True) == expected


def test_programs_that_jax_had_kept_are_whole(train, tmp_path, monkeypatch):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    programs.compilation_cache.reset_cache()
    try:
        expected = train("jax", programs=None)
        assert list((tmp_path / "jax").glob("jit_updates*"))
        assert train("first") == expected
        monkeypatch.setattr(training, "make_updates", refuse)
        assert train("second") == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        programs.compilation_cache.reset_cache()


def test_programs_lie_where_jax_keeps_its_own_if_that_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # it would be set, and stay
    with warnings.catch_warnings():  # what it ignores
        for kept, folder in ((str(tmp_path), tmp_path), ("gs://bucket/programs", None)):
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", kept)
            assert command_line._keep_compiled() == folder
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert command_line._keep_compiled() is None


def test_programs_are_made_anew_when_anything_differs(tmp_path, monkeypatch):
    made = []

    def double(*decisive, folder=tmp_path / "programs"):
        def make():
            made.append(decisive)
            return jax.jit(lambda x: x * 2)

        found = Programs(folder, *decisive).get("double", make)(np.arange(3.0, dtype=np.float32))
        np.testing.assert_array_equal(found, [0, 2, 4])
        return len(made)

    assert [double(1), double(1), double(2), double(2)] == [1, 1, 2, 2]
    for file in (tmp_path / "programs").iterdir():
        file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    assert [double(1), double(1)] == [3, 3]
    assert [double(1, folder=None), double(1, folder=None)] == [4, 5]
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_processor", lambda: "another one")
        assert [double(1), double(1)] == [6, 6]
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
        assert [double(1), double(1)] == [7, 7]
    (tmp_path / "file").write_text("no folder")
    assert [double(1, folder=tmp_path / "file"), double(1)] == [8, 8]
