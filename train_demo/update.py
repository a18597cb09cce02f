"""The pure functions of a training: the optimizer, one or several updates of the state, and the validation loss."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import P
from jaxtyping import Array, Bool, Float, Int, Key
from optax.contrib import MuonDimensionNumbers

from train_demo import mesh
from train_demo.data import FIRST
from train_demo.model import Params, Transformer
from train_demo.settings import Layout, Settings

# For each layer with a matrix: the axes that Muon treats as rows and as columns.
_heads_out, _heads_in = MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers((0, 1), 2)
ORTHOGONALIZED = dict.fromkeys(("query", "key", "value"), _heads_out) | {"out": _heads_in}
ORTHOGONALIZED |= {name: MuonDimensionNumbers(0, 1) for name in ("widen", "narrow")}
# Coefficients of the steps `a X + b (X X^T) X + c (X X^T)^2 X`, which make a matrix roughly orthogonal: the first three
# of the five of Dion (arXiv 2504.05295). The other two took time, and gave the same loss.
NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
WARM_UP = 20  # steps
MOST_STEPS = 128  # the largest number of steps in one dispatch
REFERENCE_FEATURES = 128  # the width at which the head has the learning rate of other layers


class State(NamedTuple):
    """The arrays that a training step changes: the parameters, and the state of the optimizer."""

    params: Params
    optimizer: optax.OptState


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Makes the optimizer; its learning rate warms up, then falls linearly to 0 at the last step.

    Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) makes the momentum of each matrix orthogonal, so that
    all directions learn at one speed; AdamW updates the other parameters: embedding, head and scales.
    """
    schedule = _schedule(settings.learning_rate, settings.steps)
    if settings.optimizer == "adamw":
        adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=_matrices)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)
    muon = optax.contrib.muon(schedule, NEWTON_SCHULZ, adam_b2=0.99, muon_weight_dimension_numbers=_orthogonalized)
    # A logit is a sum over `features`, all of which change by the learning rate (muP, arXiv 2203.03466).
    head = optax.masked(optax.scale(REFERENCE_FEATURES / settings.features), _of_head)
    return optax.chain(muon, head)


Step = Callable[[State, Int[Array, ""], Int[Array, " S"]], tuple[State, Float[Array, ""]]]


def make_update(
    structure: nnx.GraphDef[Transformer], settings: Settings, layout: Layout | None = None, packed: bool = False
) -> Step:
    """Makes `update(state, step, characters) -> (state, loss)`, one step of the training, not compiled.

    Batch and dropout depend on the seed and the step only, so that a resumed run repeats them. (The dropout of an
    accumulated batch also depends on its number of parts.)
    """
    optimizer, layout = make_optimizer(settings), layout or Layout()

    def loss_of(params: Params, windows: Int[Array, "B T+1"], key: Key[Array, ""]) -> Float[Array, ""]:
        return _loss(nnx.merge(structure, params), windows, nnx.Rngs(dropout=key), layout.remat, packed)

    def update(state: State, step: Int[Array, ""], characters: Int[Array, " S"]) -> tuple[State, Float[Array, ""]]:
        batch_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), step))
        last = len(characters) - settings.context_length
        starts = jax.random.randint(batch_key, (settings.batch_size, 1), 0, last)
        windows = characters[starts + jnp.arange(settings.context_length + 1)[None]]
        if layout.accumulate == 1:
            loss, gradients = jax.value_and_grad(loss_of)(state.params, mesh.split_batch(windows), dropout_key)
        else:
            loss, gradients = _accumulated(loss_of, state.params, windows, dropout_key, layout.accumulate)
        if packed:  # by the share in the whole batch, because it differs between parts
            share = predicted_share(windows)
            loss, gradients = jax.tree.map(lambda x: x / share, (loss, gradients))
        updates, optimizer_state = optimizer.update(mesh.as_stored(gradients), state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    return update


def compiled(function: Callable[..., tuple[State, Array]], shardings: State | None = None) -> jax.stages.Wrapped:
    """Jits a function of a state that returns the next state and losses; the arrays of the state are donated."""
    return jax.jit(function, donate_argnums=0, out_shardings=None if shardings is None else (shardings, P()))


def make_updates(update: Step, shardings: State | None = None) -> jax.stages.Wrapped:
    """Makes `updates(state, first, steps, characters) -> (state, losses)`, compiled: several steps of `update`.

    The number of steps, at most `MOST_STEPS`, is an argument of one compiled loop, so that the results do not depend on
    how a run is cut into dispatches. Only the first `steps` of the `[MOST_STEPS]` losses are meant.
    """

    def updates(
        state: State, first: Int[Array, ""], steps: Int[Array, ""], characters: Int[Array, " S"]
    ) -> tuple[State, Float[Array, " MOST_STEPS"]]:
        def body(i: Int[Array, ""], carry: tuple[State, Array]) -> tuple[State, Array]:
            state, loss = update(carry[0], first + i, characters)
            return state, carry[1].at[i].set(loss)

        return jax.lax.fori_loop(0, steps, body, (state, jnp.zeros(MOST_STEPS)))

    return compiled(updates, shardings)


def _accumulated(
    loss_of: Callable[[Params, Array, Array], Array],
    params: Params,
    windows: Int[Array, "B T+1"],
    key: Key[Array, ""],
    rounds: int,
) -> tuple[Float[Array, ""], Params]:
    """Computes the mean loss and its gradients in `rounds` parts of the batch, one after the other, to save memory."""
    windows = mesh.split_batch(windows.reshape(rounds, -1, windows.shape[-1]), axis=1)

    def add(total: tuple[Array, Params], some: tuple[Array, Array]) -> tuple[tuple[Array, Params], None]:
        loss, gradients = jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, *some))
        return (loss, mesh.as_stored(gradients)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, (jnp.zeros(()), zeros), (windows, jax.random.split(key, rounds)))
    return jax.tree.map(lambda array: array / rounds, total)


def make_validate(structure: nnx.GraphDef[Transformer], packed: bool = False) -> jax.stages.Wrapped:
    """Makes `validate(params, windows) -> loss`, compiled; `windows` `[C, W, T + 1]` are run W at a time."""

    def validate(params: Params, windows: Int[Array, "C W T+1"]) -> Float[Array, ""]:
        model = functools.partial(nnx.merge, structure, params)
        loss = jax.lax.map(lambda some: _loss(model(), some, None, packed=packed), windows).mean()
        return loss / predicted_share(windows) if packed else loss

    return jax.jit(validate)


@functools.partial(jax.jit, static_argnums=(0, 3))
def largest_score(
    structure: nnx.GraphDef[Transformer], params: Params, windows: Int[Array, "W T"], packed: bool
) -> Float[Array, ""]:
    """Computes the largest attention score of all layers and heads in these windows."""
    characters, segment_ids, _ = unpack(windows)
    sowing = nnx.capture(nnx.merge(structure, params), nnx.Intermediate)
    _, sown = sowing(characters, segment_ids=segment_ids if packed else None, sow_max_score=True)
    return jnp.stack(jax.tree.leaves(nnx.to_pure_dict(sown))).max()


def unpack(windows: Int[Array, "*B T"]) -> tuple[Int[Array, "*B T"], Int[Array, "*B T"], Bool[Array, "*B T"]]:
    """Removes the bit `FIRST`: returns tokens, the number of each token's document, and where a document begins.

    Example:
      >>> numbers, segment_ids, first = unpack(jnp.array([7, 8, 5 | FIRST, 6]))
      >>> numbers.tolist(), segment_ids.tolist(), first.tolist()
      ([7, 8, 5, 6], [0, 0, 1, 1], [False, False, True, False])
    """
    first = windows >= FIRST
    return windows % FIRST, jnp.cumsum(first, axis=-1, dtype=jnp.int32), first


def predicted_share(windows: Int[Array, "*B T+1"]) -> Float[Array, ""]:
    """Computes the share of tokens that are predicted: they follow another in their window, and begin no document."""
    return 1 - (windows[..., 1:] >= FIRST).mean()


def _schedule(learning_rate: float, steps: int) -> optax.Schedule:
    warm_up = min(WARM_UP, steps // 10)
    rising = optax.linear_schedule(learning_rate / max(warm_up, 1), learning_rate, warm_up)
    falling = optax.linear_schedule(learning_rate, 0.0, steps - warm_up)
    return optax.join_schedules([rising, falling], [warm_up]) if warm_up else falling


def _matrices(params: Params) -> Params:
    """Returns a tree of bools: True for the parameters with weight decay, all but scales."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key != "scale", params)


def _orthogonalized(params: Params) -> Params:
    """Returns a tree of the parameters that Muon updates: their axes as rows and columns; None means AdamW."""
    return jax.tree.map_with_path(lambda path, _: ORTHOGONALIZED.get(path[-2].key), params)


def _of_head(params: Params) -> Params:
    return jax.tree.map_with_path(lambda path, _: path[0].key == "head", params)


def _loss(
    model: Transformer, windows: Int[Array, "B T+1"], rngs: nnx.Rngs | None, remat: bool = False, packed: bool = False
) -> Float[Array, ""]:
    """Computes the mean loss over all tokens; the first one of a document, which is not predicted, counts as 0."""
    segment_ids = None
    if packed:
        windows, segments, first = unpack(windows)
        segment_ids = mesh.split_characters(segments[:, :-1])
    logits = model(mesh.split_characters(windows[:, :-1]), segment_ids=segment_ids, rngs=rngs, remat=remat)
    targets = mesh.split_characters(windows[:, 1:])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (jnp.where(mesh.split_characters(first[:, 1:]), 0.0, losses) if packed else losses).mean()
