"""The demo's steps: memory, Muon's updates, and sizes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from train_demo.model import blueprint, initial_params
from train_demo.run_folder import prepare
from train_demo.settings import LEARNING_RATES, SIZES, Layout, Settings, completed
from train_demo.update import (
    NEWTON_SCHULZ,
    WARM_UP,
    first_state,
    make_optimizer,
    make_update,
)

VOCABULARY = 11
SMALL = Settings(
    steps=20,
    batch_size=2,
    context_length=8,
    layers=1,
    heads=2,
    features=8,
    dropout_rate=0.1,
)
pytest_plugins = ["demo_fixtures"]
pytestmark = pytest.mark.usefixtures("rules_of_users")
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 300).astype(np.int32)


def test_rematerialized_blocks_need_less_memory():
    settings = replace(SMALL, layers=4, features=16, context_length=32, batch_size=8)
    quickly = {
        "xla_llvm_disable_expensive_passes": True,
        "xla_backend_optimization_level": "0",
    }

    def memory(layout):
        structure, _ = blueprint(VOCABULARY, settings, layout)
        shapes = jax.eval_shape(lambda: first_state(VOCABULARY, settings))
        update = jax.jit(make_update(structure, settings, layout))
        program = update.lower(shapes, 1, TEXT).compile(quickly)
        return program.memory_analysis().temp_size_in_bytes

    assert memory(Layout(remat=True)) < memory(Layout()) / 2


def test_muon_makes_the_gradients_of_matrices_orthogonal():
    settings = Settings(heads=2, features=16, layers=1)
    draws = np.random.default_rng(0)
    params = initial_params(VOCABULARY, settings)
    gradients = jax.tree.map(
        lambda leaf: draws.normal(size=leaf.shape).astype(np.float32), params
    )
    optimizer = make_optimizer(settings)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    rate = settings.learning_rate / WARM_UP  # of the first step

    # Newton-Schulz changes singular values alone: x -> a x + b x^3 + c x^5.
    def singular(tree, layer, name, shape):
        matrix = np.asarray(tree["blocks"][0][layer][name]["kernel"]).reshape(shape)
        return np.linalg.svd(matrix, compute_uv=False)

    for layer, name, shape, scale in [
        *(
            ("attention", name, (16, 16), 1)
            for name in ("query", "key", "value", "out")
        ),
        # The square root of outputs by inputs, if above 1.
        ("mlp", "widen", (16, 64), 2),
        ("mlp", "narrow", (64, 16), 1),
    ]:
        expected = singular(gradients, layer, name, shape)
        expected /= np.linalg.norm(expected)
        for a, b, c in NEWTON_SCHULZ:
            expected = a * expected + b * expected**3 + c * expected**5
        found = singular(updates, layer, name, shape) / (rate * scale)
        np.testing.assert_allclose(found, np.sort(expected)[::-1], rtol=1e-3)
    # Adam's first updates equal the learning rate times Nesterov's correction: b1 times
    # the momentum after two steps, and the gradient. The update of the head is divided
    # by its width.
    first = rate * (0.9 * 0.1 / (1 - 0.9**2) + 1)
    np.testing.assert_allclose(
        np.abs(updates["embedding"]["embedding"]), first, rtol=1e-3
    )
    np.testing.assert_allclose(
        np.abs(updates["head"]["kernel"]), first * 128 / 16, rtol=1e-3
    )


@pytest.mark.core
def test_sizes_and_optimizers_set_their_numbers(tmp_path):
    assert Settings(**completed("tiny", {})) == Settings()
    large = Settings(**completed("gpt2", {"layers": 3}))
    assert (large.layers, large.features, large.context_length) == (3, 768, 1024)
    for size in SIZES:
        Settings(**completed(size, {}))
    (tmp_path / "text").write_text("to be or not to be " * 100)
    config, _ = prepare(
        tmp_path / "run", str(tmp_path / "text"), {"optimizer": "adamw"}, resume=False
    )
    assert config.settings.learning_rate == LEARNING_RATES["adamw"]
