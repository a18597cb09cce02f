"""Text from a trained model, one character at a time."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from train_demo import checkpoint
from train_demo.data import encode
from train_demo.errors import UserError, printable
from train_demo.model import Transformer, blueprint
from train_demo.run_folder import Config


def load_model(out: Path, config: Config) -> Transformer:
    """Loads the newest whole checkpoint of a run, finished or still running.

    Raises:
        UserError: there is none.
    """
    structure, params = blueprint(len(config.vocabulary), config.settings)
    passed_over: list[str] = []
    restored = checkpoint.restore_newest(out, {"params": params}, passed_over.append)
    if restored is None:
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise UserError(f"{out} holds no finished checkpoint{why}: run python -m train_demo --resume --out {out}")
    for message in passed_over:
        print(printable(message), file=sys.stderr)
    return nnx.merge(structure, jax.device_put(restored.trees["params"]))


def generate(
    model: Transformer, config: Config, prompt: str, length: int, temperature: float = 0.7, seed: int = 0
) -> Iterator[str]:
    """Continues a prompt.

    Args:
        model: the trained model.
        config: its run's configuration.
        prompt: at least one character, all of which the model knows; the model sees the last `context_length`.
        length: characters to write.
        temperature: divides the logits; 0 always takes the likeliest character.
        seed: the same seed writes the same text.

    Yields:
        One character after the other.
    """
    numbers = encode(prompt, config.vocabulary)[-config.settings.context_length :]
    window, filled = jnp.zeros(config.settings.context_length, jnp.int32).at[: len(numbers)].set(numbers), len(numbers)
    structure, params = nnx.split(model)
    for place in range(length):
        window, number = _next(structure, params, window, filled, temperature, seed, place)
        filled = min(filled + 1, len(window))
        yield config.vocabulary[int(number)]


@jax.jit(static_argnums=0)
def _next(
    structure: nnx.GraphDef[Transformer],
    params: nnx.State,
    window: Int[Array, " T"],
    filled: int,
    temperature: float,
    seed: int,
    place: int,
) -> tuple[Int[Array, " T"], Int[Array, ""]]:
    """Draws one character and appends it to the window: always the same shapes, so that this compiles once."""
    # Whatever stands behind the `filled` characters is hidden from them by causality.
    logits = nnx.merge(structure, params)(window[None])[0, filled - 1]
    key = jax.random.fold_in(jax.random.key(seed), place)
    # Only differences count: without the largest logit, a small temperature makes no infinity of the likeliest one.
    sharpened = (logits - logits.max()) / jnp.where(temperature > 0, temperature, 1.0)
    number = jnp.where(temperature > 0, jax.random.categorical(key, sharpened), logits.argmax())
    full = filled == len(window)
    window = jnp.where(full, jnp.roll(window, -1), window)
    return window.at[jnp.where(full, len(window) - 1, filled)].set(number), number
