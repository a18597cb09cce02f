"""Generates text: prompts fill the model's cache, then a compiled loop draws one chunk of characters at a time."""

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

from train_demo import checkpoint
from train_demo.errors import UserError, printable
from train_demo.model import Transformer, blueprint
from train_demo.run_folder import Config
from train_demo.vocabulary import Vocabulary

CHUNK = 32  # characters that are written to each text before they are shown
SHORTEST = 16  # prompts are padded to this length, or to a power of two above it, so that few lengths are compiled
ENDLESS = 2**31 - 1  # length of the cache: because of the model's window it is a small ring, which never overflows
Number = float | Float[Array, ""]


class Sampling(NamedTuple):
    """How to choose a character; None switches a filter off. Numbers may be traced, so that no change compiles anew.

    Attributes:
      temperature: Divides the logits; 0 takes the likeliest character, the first of several.
      top_k: Keeps the k likeliest characters, and all that are as likely as the k-th.
      top_p: Keeps the likeliest characters whose probabilities add up to p, above 0 and at most 1.
      min_p: Keeps the characters that are at least p times as likely as the likeliest one, from 0 to 1.
    """

    temperature: Number = 0.7
    top_k: int | Int[Array, ""] | None = None
    top_p: Number | None = None
    min_p: Number | None = None


def filtered(logits: Float[Array, " V"], sampling: Sampling) -> Float[Array, " V"]:
    """Returns the logits divided by the temperature, the largest being 0, and -inf for removed characters.

    Example:
      >>> logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
      >>> jnp.exp(filtered(logits, Sampling(temperature=1.0, top_k=2))).round(3).tolist()
      [0.0, 1.0, 0.5]
    """
    # Subtracting the largest logit changes no probability, and avoids infinity for a small temperature.
    scores = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None:
        scores = jnp.where(scores < jnp.sort(scores)[jnp.maximum(len(scores) - sampling.top_k, 0)], -jnp.inf, scores)
    if sampling.top_p is not None:
        ascending = jnp.argsort(scores)  # of equally likely ones, the last are kept
        removed = jnp.cumsum(jax.nn.softmax(scores)[ascending]) <= 1 - sampling.top_p
        scores = scores.at[ascending].set(jnp.where(removed.at[-1].set(False), -jnp.inf, scores[ascending]))
    if sampling.min_p is not None:
        scores = jnp.where(jnp.exp(scores) < sampling.min_p, -jnp.inf, scores)
    return scores


def draw(key: Key[Array, ""], logits: Float[Array, " V"], sampling: Sampling) -> Int[Array, ""]:
    """Draws a character by its logits, and returns its number in the vocabulary, int32; `jax.vmap` draws several."""
    greedy = jnp.asarray(sampling.temperature) <= 0
    scores = filtered(logits, sampling._replace(temperature=jnp.where(greedy, 1.0, sampling.temperature)))
    return jnp.where(greedy, logits.argmax(), jax.random.categorical(key, scores)).astype(jnp.int32)


def load_model(out: Path, config: Config) -> Transformer:
    """Loads the model of a run, finished or not, from its newest whole checkpoint."""
    structure, params = blueprint(len(config.vocabulary), config.settings)
    passed_over: list[str] = []
    restored = checkpoint.restore_newest(out, {"params": params}, passed_over.append)
    if restored is None:
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise UserError(f"{out} contains no complete checkpoint{why}: run python -m train_demo --resume --out {out}")
    for message in passed_over:
        print(printable(message), file=sys.stderr)
    return nnx.merge(structure, jax.device_put(restored[1]["params"]))


def generate(
    model: Transformer,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    max_new_tokens: int = 500,
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    num_samples: int = 1,
    seed: int = 0,
) -> Iterator[list[str]]:
    """Continues several prompts at the same time.

    A text depends on its prompt, the seed and its number among the samples of the prompt. Other prompts do not change
    it, except that sums may be rounded differently in a larger batch.

    Yields:
      The next piece of each text, which may be empty: all samples of the first prompt, then those of the second, and so
      on.
    """
    structure, params = nnx.split(model, nnx.Param)
    # No prediction depends on earlier characters than these.
    rows = [vocabulary.encode(prompt)[-model.reach :] for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not len(row):
            raise UserError(f"the prompt {prompt!r} is empty: pass at least one character")
    numbers, lengths = padded(rows)
    cache, logits = prefill(structure, params, numbers, lengths, num_samples)
    key, samples = jax.random.key(seed), np.tile(np.arange(num_samples, dtype=np.int32), len(prompts))
    for start in range(0, max_new_tokens, CHUNK):
        cache, logits, written = write(structure, params, cache, logits, key, samples, start, sampling)
        texts = np.asarray(written)[:, : max_new_tokens - start].tolist()
        yield [vocabulary.decode(text) for text in texts]


def padded(rows: Sequence[np.ndarray]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Pads rows with zeros at their ends to a power of two; returns them as one array, and their lengths, int32.

    Example:
      >>> numbers, lengths = padded([np.array([1, 2, 3]), np.array([4])])
      >>> numbers.shape, lengths.tolist()
      ((2, 16), [3, 1])
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    numbers = np.zeros((len(rows), max(SHORTEST, 1 << int(lengths.max() - 1).bit_length())), np.int32)
    for padded_row, row in zip(numbers, rows, strict=True):
        padded_row[: len(row)] = row
    return numbers, lengths


@functools.partial(jax.jit, static_argnames=("structure", "num_samples"))
def prefill(
    structure: nnx.GraphDef[Transformer],
    params: nnx.State,
    numbers: Int[Array, "P T"],
    lengths: Int[Array, " P"],
    num_samples: int,
) -> tuple[nnx.State, Float[Array, "B V"]]:
    """Reads P prompts, padded at their ends; returns the cache and the next logits of B = P * num_samples texts."""
    model = _decoding(structure, params, len(numbers))
    logits = model(numbers, lengths=lengths)
    logits = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), (nnx.state(model, nnx.Cache), logits))


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="cache")
def write(
    structure: nnx.GraphDef[Transformer],
    params: nnx.State,
    cache: nnx.State,
    logits: Float[Array, "B V"],
    key: Key[Array, ""],
    samples: Int[Array, " B"],
    start: int | Int[Array, ""],
    sampling: Sampling,
) -> tuple[nnx.State, Float[Array, "B V"], Int[Array, "B CHUNK"]]:
    """Draws the next `CHUNK` characters of each text; returns the cache and the logits after them, and the numbers."""

    def step(carry: tuple[nnx.State, Array], place: Int[Array, ""]) -> tuple[tuple[nnx.State, Array], Array]:
        cache, logits = carry
        place_keys = jax.vmap(lambda sample: jax.random.fold_in(jax.random.fold_in(key, sample), place))(samples)
        numbers = jax.vmap(draw, (0, 0, None))(place_keys, logits, sampling)
        model = _decoding(structure, params, len(logits))
        nnx.update(model, cache)
        logits = model(numbers[:, None])[:, 0]
        return (nnx.state(model, nnx.Cache), logits), numbers

    (cache, logits), numbers = jax.lax.scan(step, (cache, logits), start + jnp.arange(CHUNK))
    return cache, logits, numbers.T


def _decoding(structure: nnx.GraphDef[Transformer], params: nnx.State, batch: int) -> Transformer:
    """Returns the model in its decoding mode, with an empty cache."""
    return nnx.view(nnx.merge(structure, params), decode=True, batch_size=batch, max_length=ENDLESS, per_row=True)
