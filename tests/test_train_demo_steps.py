"""The demo's steps: the same bits however they are dispatched, what Muon does, sizes, and what programs send."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from train_demo import collectives, model, training
from train_demo.errors import UserError
from train_demo.model import blueprint, initial_params
from train_demo.run_folder import prepare
from train_demo.settings import LEARNING_RATES, SIZES, Layout, Settings, completed
from train_demo.update import NEWTON_SCHULZ, WARM_UP, State, make_optimizer, make_update, make_updates

VOCABULARY = 11
SMALL = Settings(steps=20, batch_size=2, context_length=8, layers=1, heads=2, features=8, dropout_rate=0.1)
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 300).astype(np.int32)


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(settings, *dispatches):
    """The losses, and the last state, of steps that are dispatched so."""
    structure, _ = blueprint(VOCABULARY, settings)
    params = initial_params(VOCABULARY, settings)
    state, losses = State(params, make_optimizer(settings).init(params)), []
    updates = make_updates(make_update(structure, settings))
    for last, steps in zip(itertools.accumulate(dispatches), dispatches, strict=True):
        state, some = updates(state, last - steps + 1, steps, TEXT)
        losses += np.asarray(some)[:steps].tolist()
    return losses, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
def test_the_bits_do_not_depend_on_the_dispatches(optimizer):
    settings = Settings(**{**vars(SMALL), "optimizer": optimizer, "learning_rate": LEARNING_RATES[optimizer]})
    losses, state = run(settings, 7, 5)
    other_losses, other_state = run(settings, 1, 2, 4, 4, 1)
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
    # Adam's first updates are as large as the learning rate, but for Nesterov's look ahead: b1 times the momentum after
    # two steps, and the gradient. That of the head is divided by its width.
    first = rate * (0.9 * 0.1 / (1 - 0.9**2) + 1)
    np.testing.assert_allclose(np.abs(updates["embedding"]["embedding"]), first, rtol=1e-3)
    np.testing.assert_allclose(np.abs(updates["head"]["kernel"]), first * 128 / 16, rtol=1e-3)


@pytest.mark.core
def test_sizes_and_optimizers_bring_their_numbers(tmp_path):
    assert Settings(**completed("tiny", {})) == Settings()
    large = Settings(**completed("gpt2", {"layers": 3}))
    assert (large.layers, large.features, large.context_length) == (3, 768, 1024)
    for size in SIZES:
        Settings(**completed(size, {}))
    (tmp_path / "text").write_text("to be or not to be " * 100)
    config, _ = prepare(tmp_path / "run", str(tmp_path / "text"), {"optimizer": "adamw"}, resume=False)
    assert config.settings.learning_rate == LEARNING_RATES["adamw"]


def test_a_shift_beyond_the_window_is_refused():
    with pytest.raises(UserError, match="token_shift 8 reaches out of windows of context_length 8: choose at most 7"):
        Settings(context_length=8, token_shift=8)


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


@pytest.mark.core
def test_dispatches_end_where_something_has_to_be_done():
    stops = [training.next_stop(step, {12, 30}, 5, 8) for step in (0, 5, 8, 10, 12, 29)]
    assert stops == [5, 8, 10, 12, 15, 30]


def test_the_model_is_built_once(monkeypatch):
    built, build = [], model.Transformer.__init__

    def noting(transformer, *args, **options):
        built.append(args)
        build(transformer, *args, **options)

    monkeypatch.setattr(model.Transformer, "__init__", noting)
    settings = replace(SMALL, seed=123)
    structure, shapes = model.blueprint(11, settings, Layout())
    params = model.initial_params(11, settings)
    assert model.blueprint(11, settings)[0] is structure
    assert len(built) == 1
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )


# Collectives

HLO = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

%inner (carry: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %hop = bf16[4,8]{1,0} collective-permute(%part), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%outer (carry: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %gathered = f32[16,8]{1,0} all-gather(%part), replica_groups=[2,4]<=[8], dimensions={0}
  %loop = (s32[], bf16[4,8]) while(%tuple), condition=%more, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%more (carry: (s32[], bf16[4,8])) -> pred[] {
  ROOT %compare = pred[] compare(%i, %n), direction=LT
}

%little (x: f32[]) -> f32[] {
  ROOT %r = f32[] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%much (x: f32[]) -> f32[] {
  ROOT %r = (f32[], /*index=1*/f32[100]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[]) -> f32[] {
  %loop = (s32[], bf16[4,8]) while(%tuple), condition=%more, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %either = f32[] conditional(%p, %a, %a), branch_computations={%little, %much}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=mesh['x'=4,'y'=2], device_ids=([8]) {'y'}
  %done = f32[8]{0} all-gather-done(%start)
  ROOT %scattered = f32[2]{0} reduce-scatter(%b), replica_groups=mesh['x'=4,'y'=2] {'x':(1)2,'y'}, dimensions={0}
}
"""


@pytest.mark.core
def test_collectives_are_counted_with_the_trips_of_their_loops():
    calls, size, sent = collectives.count(HLO, 8)
    assert calls == {"all-gather": 5 + 1, "all-reduce": 1, "collective-permute": 5 * 3, "reduce-scatter": 1}
    assert size["all-gather"], size["all-reduce"] == (5 * 16 * 8 * 4 + 8 * 4, 101 * 4)  # the branch that sends most
    assert sent == {
        "all-gather": 5 * 16 * 8 * 4 * 3 / 4 + 8 * 4 / 2,
        "all-reduce": 2 * 101 * 4 * 7 / 8,
        "collective-permute": 15 * 4 * 8 * 2,
        "reduce-scatter": 2 * 4 * 3,
    }


def test_groups_in_a_form_that_nobody_knows_are_no_guess():
    with pytest.raises(ValueError, match="unknown form"):
        collectives.count(HLO.replace("[2,4]<=[8]", "<all>"), 8)
