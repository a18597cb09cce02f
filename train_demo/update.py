"""The two pure functions of training: one update of the state, and the loss over the validation windows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from train_demo.model import Params, Transformer
from train_demo.settings import Settings


class State(NamedTuple):
    """All that an update changes."""

    params: Params
    optimizer: optax.OptState


Update = Callable[[State, int, Int[Array, " S"]], tuple[State, Float[Array, ""]]]
Validate = Callable[[Params, Int[Array, "C W T+1"]], Float[Array, ""]]


def make_optimizer(settings: Settings, earlier_ends: Sequence[int] = ()) -> optax.GradientTransformation:
    """AdamW with clipped gradients; the learning rate warms up, then falls along a cosine to 0 at the last step.

    Args:
        settings: the run's numbers.
        earlier_ends: the last steps that the run had before it was extended. Up to each of them the learning rate is
            what it was then, so that a step which has to be repeated gives the same bits.
    """
    schedules = [_schedule(settings.learning_rate, steps) for steps in (*earlier_ends, settings.steps)]
    schedule = schedules[0]
    if earlier_ends:
        starts = (0, *earlier_ends)
        schedule = optax.join_schedules([_shifted(*pair) for pair in zip(schedules, starts, strict=True)], earlier_ends)
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_update(structure: nnx.GraphDef[Transformer], settings: Settings, earlier_ends: tuple[int, ...] = ()) -> Update:
    """Makes `update(state, step, characters) -> (state, loss)`, compiled.

    The batch and the dropout are drawn from the seed and the step alone, so that a resumed run draws the same ones.
    The state that is given is used up.
    """
    optimizer = make_optimizer(settings, earlier_ends)

    def update(state: State, step: Int[Array, ""], characters: Int[Array, " S"]) -> tuple[State, Float[Array, ""]]:
        batch_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), step))
        last = len(characters) - settings.context_length
        starts = jax.random.randint(batch_key, (settings.batch_size, 1), 0, last)
        windows = characters[starts + jnp.arange(settings.context_length + 1)[None]]

        def loss_of(params: Params) -> Float[Array, ""]:
            return _loss(nnx.merge(structure, params), windows, nnx.Rngs(dropout=dropout_key))

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    return jax.jit(update, donate_argnames="state")


def make_validate(structure: nnx.GraphDef[Transformer]) -> Validate:
    """Makes `validate(params, windows) -> loss`, compiled; `windows` `[C, W, T + 1]` are run W at a time."""

    def validate(params: Params, windows: Int[Array, "C W T+1"]) -> Float[Array, ""]:
        return jax.lax.map(lambda some: _loss(nnx.merge(structure, params), some, None), windows).mean()

    return jax.jit(validate)


def _schedule(learning_rate: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(100, steps // 10), steps)


def _shifted(schedule: optax.Schedule, start: int) -> optax.Schedule:
    """Undoes that `optax.join_schedules` counts the steps of each schedule from its own start."""
    return lambda count: schedule(count + start)


def _matrices(params: Params) -> Params:
    """Only matrices decay: a norm's scale has no reason to be small."""
    return jax.tree.map(lambda array: array.ndim > 1, params)


def _loss(model: Transformer, windows: Int[Array, "B T+1"], rngs: nnx.Rngs | None) -> Float[Array, ""]:
    logits = model(windows[:, :-1], rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
