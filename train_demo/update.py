"""The pure functions of a training: the optimizer, one update, the validation loss."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import P
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key
from optax.contrib import MuonDimensionNumbers

from train_demo import mesh
from train_demo.data import FIRST
from train_demo.model import DEFAULT, Params, Structure, Transformer, initial_params
from train_demo.settings import Layout, Settings

# For each layer with a matrix: the axes that Muon treats as rows and as columns.
ORTHOGONALIZED = {
    "query": MuonDimensionNumbers(0, (1, 2)),
    "key": MuonDimensionNumbers(0, (1, 2)),
    "value": MuonDimensionNumbers(0, (1, 2)),
    "gate": MuonDimensionNumbers(0, (1, 2)),
    "out": MuonDimensionNumbers((0, 1), 2),
    "q_proj": MuonDimensionNumbers(0, (1, 2)),
    "kv_a_proj_with_mqa": MuonDimensionNumbers(0, 1),
    "kv_b_proj": MuonDimensionNumbers(0, (1, 2)),
    "o_proj": MuonDimensionNumbers((0, 1), 2),
    "widen": MuonDimensionNumbers(0, 1),
    "narrow": MuonDimensionNumbers(0, 1),
}
# Coefficients of the steps `a X + b (X X^T) X + c (X X^T)^2 X`, which make a matrix
# roughly orthogonal: the first three of the five of Dion (arXiv 2504.05295). The other
# two took time, and gave the same loss.
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
)
WARM_UP = 20  # steps
REFERENCE_FEATURES = 128  # the width at which the head has the others' learning rate


class State(NamedTuple):
    """The arrays that a training step changes, which a checkpoint holds."""

    params: Params
    optimizer: optax.OptState


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Makes the optimizer; its learning rate warms up, then falls linearly to 0.

    Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) makes the momentum of
    each matrix orthogonal, so that all directions learn at the same speed; AdamW
    updates the other parameters: embedding, head and scales.
    """
    peak = settings.learning_rate
    warm_up = min(WARM_UP, settings.steps // 10)
    schedule = optax.linear_schedule(peak, 0.0, settings.steps - warm_up)
    if warm_up:
        rising = optax.linear_schedule(peak / warm_up, peak, warm_up)
        schedule = optax.join_schedules([rising, schedule], [warm_up])
    if settings.optimizer == "adamw":
        adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=_is_decayed)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)
    muon = optax.contrib.muon(
        schedule,
        NEWTON_SCHULZ,
        adam_b2=0.99,
        muon_weight_dimension_numbers=_orthogonalized,
    )
    # A logit is a sum over `features`, all of which change by the learning rate (muP,
    # arXiv 2203.03466).
    scale = optax.scale(REFERENCE_FEATURES / settings.features)
    return optax.chain(muon, optax.masked(scale, _is_of_head))


def _is_decayed(params: Params) -> Params:
    def is_matrix(path: tuple, _: Array) -> bool:
        return path[-1].key not in ("scale", "sinks")

    return jax.tree.map_with_path(is_matrix, params)


def _is_of_head(params: Params) -> Params:
    return jax.tree.map_with_path(lambda path, _: path[0].key == "head", params)


def _orthogonalized(params: Params) -> Params:
    """Returns a tree of the axes of parameters that Muon updates; None means AdamW."""

    def axes(path: tuple, _: Array) -> MuonDimensionNumbers | None:
        return ORTHOGONALIZED.get(path[-2].key)

    return jax.tree.map_with_path(axes, params)


def first_state(vocabulary_size: int, settings: Settings) -> State:
    """Draws the state before the first step from the settings' seed."""
    params = initial_params(vocabulary_size, settings)
    return State(params, make_optimizer(settings).init(params))


Update = Callable[[State, Int[Array, ""], Int[Array, " S"]], tuple[State, Array]]


def make_update(
    structure: Structure,
    settings: Settings,
    layout: Layout = DEFAULT,
    packed: bool = False,
) -> Update:
    """Makes `update(state, step, characters) -> (state, loss)`, one step, not compiled.

    Batch and dropout depend on the seed and the step only, so that a resumed run
    repeats them. (The dropout of an accumulated batch also depends on its number of
    parts.)
    """
    optimizer = make_optimizer(settings)

    def loss_of(
        params: Params, windows: Int[Array, "B T+1"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        model = nnx.merge(structure, params)
        rngs = nnx.Rngs(dropout=key)
        return _loss(model, windows, packed, rngs=rngs, remat=layout.remat)

    def update(
        state: State, step: Int[Array, ""], characters: Int[Array, " S"]
    ) -> tuple[State, Float[Array, ""]]:
        step_key = jax.random.fold_in(jax.random.key(settings.seed), step)
        batch_key, dropout_key = jax.random.split(step_key)

        # Cut the batch out of the text.
        size = (settings.batch_size, 1)
        last = len(characters) - settings.context_length
        starts = jax.random.randint(batch_key, size, 0, last)
        places = jnp.arange(settings.context_length + 1)[None]
        windows = characters[starts + places]

        # Compute the loss and its gradients, in parts one after the other to save
        # memory.
        loss_and_gradients = jax.value_and_grad(loss_of)
        if layout.accumulate == 1:
            windows = mesh.split_batch(windows)
            loss, gradients = loss_and_gradients(state.params, windows, dropout_key)
        else:
            number = layout.accumulate
            batches = windows.reshape(number, -1, windows.shape[-1])
            batches = mesh.split_batch(batches, axis=1)
            keys = jax.random.split(dropout_key, number)

            def add(total: tuple, batch: tuple[Array, Array]) -> tuple[tuple, None]:
                of_batch = loss_and_gradients(state.params, *batch)
                loss, gradients = jax.tree.map(jnp.add, total, of_batch)
                return (loss, mesh.as_stored(gradients)), None

            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zeros, (batches, keys))
            loss, gradients = jax.tree.map(lambda x: x / number, total)
        if packed:
            # The share of the whole batch, because it differs between parts.
            share = _predicted_share(windows)
            loss, gradients = jax.tree.map(lambda x: x / share, (loss, gradients))

        # Update the parameters.
        gradients = mesh.as_stored(gradients)
        changes, memory = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, changes), memory), loss

    return update


def compiled(update: Update, over: Mesh, shardings: State) -> jax.stages.Wrapped:
    """Compiles an update; the arrays of the state that it is given are donated."""
    return jax.jit(
        update,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(over, P())),
        compiler_options=repeatable(jax.default_backend()),
    )


def repeatable(platform: str) -> dict[str, bool]:
    """Returns the compiler's options for programs that compute the same bits each time.

    A resumed run needs them on GPUs: some fast operations add in any order.
    """
    if platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    return {}


def make_validate(structure: Structure, packed: bool = False) -> jax.stages.Wrapped:
    """Makes `validate(params, windows) -> loss`, compiled.

    The windows, `[C, W, T + 1]`, are run W at a time.
    """

    def validate(params: Params, windows: Int[Array, "C W T+1"]) -> Float[Array, ""]:
        def loss_of(windows: Int[Array, "W T+1"]) -> Float[Array, ""]:
            return _loss(nnx.merge(structure, params), windows, packed)

        loss = jax.lax.map(loss_of, windows).mean()
        if packed:
            loss = loss / _predicted_share(windows)
        return loss

    return jax.jit(validate)


def unpack(
    windows: Int[Array, "*B T"],
) -> tuple[Int[Array, "*B T"], Int[Array, "*B T"], Bool[Array, "*B T"]]:
    """Removes the bit `FIRST`.

    Returns:
      The tokens, the number of each token's document, and where a document begins.

    Example:
      >>> numbers, segment_ids, first = unpack(jnp.array([7, 8, 5 | FIRST, 6]))
      >>> numbers.tolist(), segment_ids.tolist(), first.tolist()
      ([7, 8, 5, 6], [0, 0, 1, 1], [False, False, True, False])
    """
    first = windows >= FIRST
    return windows % FIRST, jnp.cumsum(first, axis=-1, dtype=jnp.int32), first


def _predicted_share(windows: Int[Array, "*B T+1"]) -> Float[Array, ""]:
    """Computes the share of tokens that follow another of their document and window."""
    return 1 - (windows[..., 1:] >= FIRST).mean()


def _loss(
    model: Transformer,
    windows: Int[Array, "B T+1"],
    packed: bool,
    *,
    rngs: nnx.Rngs | None = None,
    remat: bool = False,
) -> Float[Array, ""]:
    """Computes the mean loss over all tokens.

    The first token of a document, which is not predicted, counts as 0.
    """
    segment_ids = None
    if packed:
        windows, segments, first = unpack(windows)
        segment_ids = mesh.split_characters(segments[:, :-1])
    characters = mesh.split_characters(windows[:, :-1])
    targets = mesh.split_characters(windows[:, 1:])
    logits = model(characters, segment_ids=segment_ids, rngs=rngs, remat=remat)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if packed:
        losses = jnp.where(mesh.split_characters(first[:, 1:]), 0.0, losses)
    return losses.mean()
