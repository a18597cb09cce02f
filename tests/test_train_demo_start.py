"""How soon the demo starts: the model is built once."""

import jax
import pytest

from train_demo import model
from train_demo.layout import Layout
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
