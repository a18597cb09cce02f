"""Runs one training for benchmarks/training.py in a separate process, and prints a JSON
object for each validation.

    python benchmarks/contender.py NAME --data FILE --started T [--steps N] [--every N]
    [--until N]

`seconds` count from T, a time.time() from before the process, so that the interpreter,
all imports and all compiling count. The clock stands still while a validation loss is
computed, for which nobody is charged.
"""

import argparse
import json
import time

from train_demo import data
from train_demo.settings import Settings

OURS = "ours"
BY_FLAX = "ours, Flax's attention"
TWIN = "nanoGPT's recipe, PyTorch"


class Clock:
    """Seconds since the start, without those of evaluations."""

    def __init__(self, started: float):
        self._offset = time.perf_counter() - (time.time() - started)

    def read(self) -> float:
        return time.perf_counter() - self._offset

    def stopped(self, evaluate) -> float:
        """What `evaluate()` returns; it takes no time."""
        before = time.perf_counter()
        value = float(evaluate())
        self._offset += time.perf_counter() - before
        return value


def tell(clock: Clock, step: int, evaluate) -> None:
    """Prints one validation."""
    seconds = clock.read()
    loss = clock.stopped(evaluate)
    row = {"step": step, "seconds": seconds, "val_loss": loss}
    print(json.dumps(row), flush=True)


def by_torch(
    clock: Clock, text: data.Text, windows, options: argparse.Namespace
) -> None:
    import nanogpt

    model, step = nanogpt.trainer(text.training, len(text.vocabulary), options.steps)
    for number in range(options.steps):
        step(number)
        if (number + 1) % options.every == 0 or number + 1 == options.steps:
            tell(clock, number + 1, lambda: nanogpt.loss_on(model, windows))


def by_jax(
    clock: Clock,
    text: data.Text,
    windows,
    settings: Settings,
    options: argparse.Namespace,
) -> None:
    """What `python -m train_demo` does, without what it writes; also its imports."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import train_demo.training  # noqa: F401
    from train_demo import model, update

    structure, shapes = model.blueprint(len(text.vocabulary), settings)
    if options.name == BY_FLAX:
        # Only the structure changes, so shapes suffice.
        transformer = nnx.merge(structure, shapes)
        for block in transformer.blocks:
            block.attention.attention_fn = nnx.dot_product_attention
            # Which no window of the training is longer than.
            block.attention.local_window_size = None
        structure, _ = nnx.split(transformer, nnx.Param)
    params = model.initial_params(len(text.vocabulary), settings)
    state = update.State(params, jax.jit(update.make_optimizer(settings).init)(params))
    train = jax.jit(update.make_update(structure, settings), donate_argnums=0)
    validate = update.make_validate(structure)
    characters = jnp.asarray(text.training)
    for step in range(1, min(settings.steps, options.until) + 1):
        state, loss = train(state, step, characters)
        if step % options.every == 0 or step in (settings.steps, options.until):
            # So that this training's seconds do not end up in the validation.
            loss.block_until_ready()
            params = state.params
            tell(clock, step, lambda params=params: validate(params, windows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[OURS, BY_FLAX, TWIN])
    parser.add_argument("--data", required=True)
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument(
        "--until", type=int, default=2**31, help="end there, before the last step"
    )
    options = parser.parse_args()
    clock = Clock(options.started)
    settings = Settings(steps=options.steps)
    text = data.load(options.data, settings.context_length)
    windows = data.validation_windows(text.validation, settings.context_length)
    if options.name == TWIN:
        by_torch(clock, text, windows, options)
    else:
        by_jax(clock, text, windows, settings, options)


if __name__ == "__main__":
    main()
