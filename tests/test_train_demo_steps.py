"""The demo's steps: the same bits with any dispatches, Muon's updates, and sizes."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from train_demo import training
from train_demo.model import blueprint, initial_params
from train_demo.run_folder import prepare
from train_demo.settings import LEARNING_RATES, SIZES, Settings, completed
from train_demo.update import NEWTON_SCHULZ, WARM_UP, State, make_optimizer, make_update, make_updates

VOCABULARY = 11
SMALL = Settings(steps=20, batch_size=2, context_length=8, layers=1, heads=2, features=8, dropout_rate=0.1)
pytest_plugins = ["demo_fixtures"]
pytestmark = pytest.mark.usefixtures("rules_of_users")
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 300).astype(np.int32)


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
def test_the_bits_do_not_depend_on_the_dispatches(optimizer):
    settings = replace(SMALL, optimizer=optimizer, learning_rate=LEARNING_RATES[optimizer])
    structure, _ = blueprint(VOCABULARY, settings)
    params = jax.device_get(initial_params(VOCABULARY, settings))
    start = jax.device_get(jax.jit(make_optimizer(settings).init)(params))
    updates = make_updates(make_update(structure, settings))

    def run(*dispatches):
        """The losses and the last state."""
        state, losses = State(params, start), []
        for last, steps in zip(itertools.accumulate(dispatches), dispatches, strict=True):
            state, some = updates(state, last - steps + 1, steps, TEXT)
            losses += np.asarray(some)[:steps].tolist()
        return losses, jax.tree.map(np.asarray, state)

    losses, state = run(7, 5)
    other_losses, other_state = run(1, 2, 4, 4, 1)
    assert losses == other_losses
    assert len(set(losses)) == 12
    jax.tree.map(np.testing.assert_array_equal, state, other_state)


def test_muon_makes_the_gradients_of_matrices_orthogonal():
    settings = Settings(heads=2, features=16, layers=1)
    draws = np.random.default_rng(0)
    params = initial_params(VOCABULARY, settings)
    gradients = jax.tree.map(lambda leaf: draws.normal(size=leaf.shape).astype(np.float32), params)
    optimizer = make_optimizer(settings)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    rate = settings.learning_rate / WARM_UP  # of the first step

    def singular(tree, layer, name, shape):
        matrix = np.asarray(tree["blocks"][0][layer][name]["kernel"]).reshape(shape)
        return np.linalg.svd(matrix, compute_uv=False)

    for layer, name, shape, scale in [
        *(("attention", name, (16, 16), 1) for name in ("query", "key", "value", "out")),
        ("mlp", "widen", (16, 64), 2),  # the square root of outputs by inputs, if above 1
        ("mlp", "narrow", (64, 16), 1),
    ]:
        expected = singular(gradients, layer, name, shape)
        expected /= np.linalg.norm(expected)
        for a, b, c in NEWTON_SCHULZ:
            expected = a * expected + b * expected**3 + c * expected**5
        found = singular(updates, layer, name, shape) / (rate * scale)
        np.testing.assert_allclose(found, np.sort(expected)[::-1], rtol=1e-3)
    # Adam's first updates equal the learning rate times Nesterov's correction: b1 times the momentum after two steps,
    # and the gradient. The update of the head is divided by its width.
    first = rate * (0.9 * 0.1 / (1 - 0.9**2) + 1)
    np.testing.assert_allclose(np.abs(updates["embedding"]["embedding"]), first, rtol=1e-3)
    np.testing.assert_allclose(np.abs(updates["head"]["kernel"]), first * 128 / 16, rtol=1e-3)


@pytest.mark.core
def test_sizes_and_optimizers_set_their_numbers(tmp_path):
    assert Settings(**completed("tiny", {})) == Settings()
    large = Settings(**completed("gpt2", {"layers": 3}))
    assert (large.layers, large.features, large.context_length) == (3, 768, 1024)
    for size in SIZES:
        Settings(**completed(size, {}))
    (tmp_path / "text").write_text("to be or not to be " * 100)
    config, _ = prepare(tmp_path / "run", str(tmp_path / "text"), {"optimizer": "adamw"}, resume=False)
    assert config.settings.learning_rate == LEARNING_RATES["adamw"]


def test_dispatches_follow_the_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    chosen = training.Dispatch(fixed=False)
    taken = []
    for _ in range(12):
        taken.append(chosen.steps)
        now[0] += 0.01 * taken[-1] + (5 if len(taken) == 1 else 0)  # the first dispatch compiles
        chosen.took(taken[-1])
    assert taken[:7] == [1, 1, 2, 4, 8, 16, 25]
    assert set(taken[7:]) == {25}
    assert chosen.speed == pytest.approx(100)
    now[0] += 60
    chosen.pause()
    assert chosen.speed == pytest.approx(100)
    several = training.Dispatch(fixed=True)
    for seconds in (1, 2, 9):
        now[0] += seconds
        several.took(several.steps)
        assert several.steps == training.IN_STEP
