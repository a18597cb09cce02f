"""Text from a model: prompts fill its cache, then a compiled loop writes a chunk of characters at a time."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from train_demo.errors import UserError
from train_demo.model import Transformer
from train_demo.sampler import Sampling, draw
from train_demo.vocabulary import Vocabulary, Writer

CHUNK = 32  # characters that are written to each text between two looks at them
SHORTEST = 16  # places for a prompt; a longer one gets the next power of two, so that few lengths are compiled
ENDLESS = 2**31 - 1  # characters that the cache is asked to hold; because of the model's window it is a small ring


def generate(
    model: Transformer,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    max_new_tokens: int = 500,
    sampling: Sampling | None = None,
    *,
    num_samples: int = 1,
    stop: str | None = None,
    seed: int = 0,
) -> Iterator[list[str]]:
    """Continues prompts, all of them at the same time.

    A text depends on its prompt, the seed and its number among the samples of its prompt. Other prompts do not change
    it, except that sums may be rounded differently in a larger batch.

    Args:
        model: the trained model.
        vocabulary: its tokens.
        prompts: texts of one token or more, all in the vocabulary.
        max_new_tokens: tokens to write in each text.
        sampling: how to choose a character; None means `Sampling()`.
        num_samples: texts for each prompt.
        stop: ends a text before its first occurrence in what is written; None writes all characters.
        seed: from 0 to 2**32 - 1.

    Yields:
        For each text what was written since the last time, which may be nothing: all samples of the first prompt, then
        those of the second, and so on.
    """
    pieces = _chunks(model, vocabulary, prompts, max_new_tokens, sampling or Sampling(), num_samples, seed)
    return pieces if stop is None else until(stop, pieces)


def _chunks(
    model: Transformer,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling,
    num_samples: int,
    seed: int,
) -> Iterator[list[str]]:
    structure, params = nnx.split(model, nnx.Param)
    # No prediction depends on what comes before the model's reach.
    numbers, lengths = padded([encoded(prompt, vocabulary)[-model.reach :] for prompt in prompts])
    cache, logits = prefill(structure, params, numbers, lengths, num_samples)
    sampling = sampling.in_32_bits()
    key, samples = jax.random.key(seed), np.tile(np.arange(num_samples, dtype=np.int32), len(prompts))
    writers = [Writer(vocabulary) for _ in samples]
    for start in range(0, max_new_tokens, CHUNK):
        cache, logits, written = write(structure, params, cache, logits, key, samples, start, sampling)
        rows = np.asarray(written)[:, : max_new_tokens - start]
        last = start + CHUNK >= max_new_tokens
        yield [writer(row, last) for writer, row in zip(writers, rows.tolist(), strict=True)]


def encoded(prompt: str, vocabulary: Vocabulary) -> Int[np.ndarray, " T"]:
    """The tokens of a prompt.

    Raises:
        UserError: it holds none, or something that is no token.
    """
    numbers = vocabulary.encode(prompt)
    if not len(numbers):
        raise UserError(f"the prompt {prompt!r} holds no {vocabulary.unit}: give a longer one")
    return numbers


def padded(rows: Sequence[np.ndarray]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Makes one array of rows of different lengths, with zeros at their ends; returns it and the lengths, int32.

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
    """Reads the prompts, padded at their ends; returns cache and next logits for B = P * num_samples texts."""
    model = _cached(structure, params, len(numbers))
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
    """Writes `CHUNK` characters to each text.

    Args:
        structure: the model's, from `nnx.split`.
        params: likewise.
        cache: what the model remembers of each text; it is used up.
        logits: of each text's next character.
        key: with `samples`, the texts' numbers, and the place of a character in its text it decides every draw.
        samples: equal numbers draw alike.
        start: how many characters were written before.
        sampling: how to choose a character.

    Returns:
        The next cache and logits, and the numbers of the characters.
    """

    def step(carry: tuple[nnx.State, Array], place: Int[Array, ""]) -> tuple[tuple[nnx.State, Array], Array]:
        cache, logits = carry
        place_keys = jax.vmap(lambda sample: jax.random.fold_in(jax.random.fold_in(key, sample), place))(samples)
        numbers = jax.vmap(draw, (0, 0, None))(place_keys, logits, sampling)
        model = _cached(structure, params, len(logits), cache)
        logits = model(numbers[:, None])[:, 0]
        return (nnx.state(model, nnx.Cache), logits), numbers

    (cache, logits), numbers = jax.lax.scan(step, (cache, logits), start + jnp.arange(CHUNK))
    return cache, logits, numbers.T


def _cached(
    structure: nnx.GraphDef[Transformer], params: nnx.State, batch: int, cache: nnx.State | None = None
) -> Transformer:
    """The model as it decodes, with an empty cache or a given one."""
    model = nnx.view(nnx.merge(structure, params), decode=True, batch_size=batch, max_length=ENDLESS, per_row=True)
    if cache is not None:
        nnx.update(model, cache)
    return model


def until(stop: str, pieces: Iterable[list[str]]) -> Iterator[list[str]]:
    """Ends each text before the first `stop` in it, and holds back what may be the beginning of one.

    Args:
        stop: one character or more.
        pieces: what is added to each text.

    Yields:
        What is added to each text now; the last time, what was held back and began no `stop`.

    Example:
        >>> list(until("stop", [["to s"], ["to"], ["rm, to stop"], ["ping"]]))
        [['to '], [''], ['storm, to ']]
    """
    held: list[str | None] | None = None  # None in the place of a text: it has ended
    for new in pieces:
        before = [""] * len(new) if held is None else held
        released = [_released(stop, *pair) for pair in zip(before, new, strict=True)]
        yield [shown for shown, _ in released]
        held = [rest for _, rest in released]
        if all(rest is None for rest in held):
            return
    if held is not None:
        yield [rest or "" for rest in held]


def _released(stop: str, held: str | None, piece: str) -> tuple[str, str | None]:
    """What can be shown of a text, and what has to wait, or None where the text has ended."""
    if held is None:
        return "", None
    text = held + piece
    before, found, _ = text.partition(stop)
    if found:
        return before, None
    waiting = next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))
    return text[: len(text) - waiting], text[len(text) - waiting :]
