"""Generates text: prompts fill the model's cache, then a compiled loop draws chunks."""

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from train_demo import checkpoint, mesh
from train_demo.data import Vocabulary
from train_demo.errors import UserError, printable
from train_demo.model import Params, Structure, Transformer, blueprint
from train_demo.run_folder import Config
from train_demo.settings import Sizes
from train_demo.update import first_state

CHUNK = 32  # characters that are written to each text before they are shown
# Prompts are padded to this length, or to a power of two above it, so that few lengths
# are compiled.
SHORTEST = 16
# The length of the cache of a model with a window: it is a small ring, which never
# overflows.
ENDLESS = 2**31 - 1
Number = float | Float[Array, ""]


class Sampling(NamedTuple):
    """How to choose a character; None switches a filter off.

    Numbers may be traced, so that changing them does not compile again.

    Attributes:
      temperature: Divides the logits; 0 takes the likeliest character (the first,
        if several tie).
      top_k: Keeps the k likeliest characters, and all that are as likely as the k-th.
      top_p: Keeps the likeliest characters whose probabilities add up to p, above 0 and
        at most 1.
      min_p: Keeps the characters that are at least p times as likely as the likeliest
        one, from 0 to 1.
    """

    temperature: Number = 0.7
    top_k: int | Int[Array, ""] | None = None
    top_p: Number | None = None
    min_p: Number | None = None


def filtered(logits: Float[Array, " V"], sampling: Sampling) -> Float[Array, " V"]:
    """Returns the logits divided by the temperature, and -inf for removed characters.

    The largest is 0.

    Example:
      >>> logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
      >>> sampling = Sampling(temperature=1.0, top_k=2)
      >>> jnp.exp(filtered(logits, sampling)).round(3).tolist()
      [0.0, 1.0, 0.5]
    """
    # Subtracting the largest logit changes no probability, and avoids infinity for a
    # small temperature.
    scores = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None:
        smallest = jnp.sort(scores)[jnp.maximum(len(scores) - sampling.top_k, 0)]
        scores = jnp.where(scores < smallest, -jnp.inf, scores)
    if sampling.top_p is not None:
        order = jnp.argsort(scores)  # of equally likely ones, the last are kept
        ascending = scores[order]
        removed = jnp.cumsum(jax.nn.softmax(ascending)) <= 1 - sampling.top_p
        removed = removed.at[-1].set(False)
        scores = scores.at[order].set(jnp.where(removed, -jnp.inf, ascending))
    if sampling.min_p is not None:
        scores = jnp.where(jnp.exp(scores) < sampling.min_p, -jnp.inf, scores)
    return scores


def draw(
    key: Key[Array, ""], logits: Float[Array, " V"], sampling: Sampling
) -> Int[Array, ""]:
    """Draws a character by its logits; returns its number in the vocabulary, int32."""
    greedy = jnp.asarray(sampling.temperature) <= 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)
    scores = filtered(logits, sampling._replace(temperature=temperature))
    drawn = jax.random.categorical(key, scores)
    return jnp.where(greedy, logits.argmax(), drawn).astype(jnp.int32)


def load_model(out: Path, config: Config) -> Transformer:
    """Loads the model of a run, finished or not, from its newest whole checkpoint."""
    kinds = len(config.vocabulary)
    shapes = jax.eval_shape(lambda: first_state(kinds, config.settings))
    one_device = mesh.make(Sizes(1, 1, 1, 1))
    restored = checkpoint.restore_newest(out, shapes, over=one_device, say=_warn)
    if restored is None:
        raise UserError(
            f"{out} contains no complete checkpoint: run python -m train_demo --resume "
            f"--out {out}, or choose a different --out if the training diverged"
        )
    _, state = restored
    return merged(config, state.params)


def _warn(text: str) -> None:
    print(printable(text), file=sys.stderr)


def merged(config: Config, params: Params) -> Transformer:
    """Returns the model of a run on one device."""
    structure, _ = blueprint(len(config.vocabulary), config.settings)
    return nnx.merge(structure, jax.device_put(params, jax.local_devices()[0]))


def generate(
    model: Transformer,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    max_new_tokens: int = 500,
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    seed: int = 0,
) -> Iterator[list[str]]:
    """Continues several prompts at the same time.

    A text depends on its prompt and the seed. Other prompts do not change it, except
    that sums may be rounded differently in a larger batch.

    Yields:
      The next piece of each text.
    """
    if isinstance(prompts, str):
        raise UserError(
            f"prompts: expected a list of texts, got {prompts!r}: pass [{prompts!r}]"
        )
    if not prompts:
        raise UserError("prompts is empty: pass at least one text")
    structure, params = nnx.split(model, nnx.Param)
    rows = [vocabulary.encode(prompt) for prompt in prompts]
    if not all(prompts):
        raise UserError("the prompt '' is empty: pass at least one character")
    if model.reach is not None:
        # No prediction depends on earlier characters than these.
        rows = [row[-model.reach :] for row in rows]
    numbers, lengths = padded(rows)
    max_length = ENDLESS
    if model.reach is None:
        # Whole chunks are written, and few lengths are compiled.
        max_length = power_of_two(numbers.shape[1] + max_new_tokens + CHUNK)
    cache, logits = prefill(structure, params, numbers, lengths, max_length)
    key = jax.random.key(seed)
    for start in range(0, max_new_tokens, CHUNK):
        cache, logits, written = write(
            structure=structure,
            params=params,
            cache=cache,
            logits=logits,
            key=key,
            start=start,
            sampling=sampling,
            max_length=max_length,
        )
        texts = np.asarray(written)[:, : max_new_tokens - start].tolist()
        yield [vocabulary.decode(text) for text in texts]


def padded(
    rows: Sequence[np.ndarray],
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Pads rows with zeros to a power of two; returns them and their lengths, int32.

    Example:
      >>> numbers, lengths = padded([np.array([1, 2, 3]), np.array([4])])
      >>> numbers.shape, lengths.tolist()
      ((2, 16), [3, 1])
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    length = max(SHORTEST, power_of_two(int(lengths.max())))
    numbers = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        numbers[number, : len(row)] = row
    return numbers, lengths


def power_of_two(least: int) -> int:
    """Returns the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


@functools.partial(jax.jit, static_argnames=("structure", "max_length"))
def prefill(
    structure: Structure,
    params: nnx.State,
    numbers: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    max_length: int,
) -> tuple[nnx.State, Float[Array, "B V"]]:
    """Reads prompts, padded at their ends; returns the cache and the next logits."""
    model = _decoding(structure, params, len(numbers), max_length)
    logits = model(numbers, lengths=lengths)
    last = (lengths - 1)[:, None, None]
    logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
    return nnx.state(model, nnx.Cache), logits


@functools.partial(
    jax.jit, static_argnames=("structure", "max_length"), donate_argnames="cache"
)
def write(
    structure: Structure,
    params: nnx.State,
    cache: nnx.State,
    logits: Float[Array, "B V"],
    key: Key[Array, ""],
    start: int | Int[Array, ""],
    sampling: Sampling,
    max_length: int,
) -> tuple[nnx.State, Float[Array, "B V"], Int[Array, "B CHUNK"]]:
    """Draws the next `CHUNK` characters of each text.

    Returns:
      The cache and the logits after these characters, and the characters' numbers.
    """

    def step(
        carry: tuple[nnx.State, Array], place: Int[Array, ""]
    ) -> tuple[tuple[nnx.State, Array], Array]:
        cache, logits = carry
        place_key = jax.random.fold_in(key, place)
        numbers = jax.vmap(draw, (None, 0, None))(place_key, logits, sampling)
        model = _decoding(structure, params, len(logits), max_length)
        nnx.update(model, cache)
        logits = model(numbers[:, None])[:, 0]
        return (nnx.state(model, nnx.Cache), logits), numbers

    places = start + jnp.arange(CHUNK)
    (cache, logits), numbers = jax.lax.scan(step, (cache, logits), places)
    return cache, logits, numbers.T


def _decoding(
    structure: Structure, params: nnx.State, batch: int, max_length: int
) -> Transformer:
    """Returns the model in its decoding mode, with an empty cache."""
    return nnx.view(
        nnx.merge(structure, params),
        decode=True,
        batch_size=batch,
        max_length=max_length,
        per_row=True,
    )
