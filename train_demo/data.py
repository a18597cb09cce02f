"""The data of a run: the tokens of its documents, in a part that trains and a part that validates."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from train_demo import documents, token_files
from train_demo.documents import Survey
from train_demo.errors import UserError
from train_demo.vocabulary import UNFINISHED, Characters, Vocabulary

# Large texts are validated on evenly spread windows that hold this many tokens; smaller ones on all of them.
VALIDATION_TOKENS = 2**16
WINDOWS = 32  # validated at a time
SHARD = 2**26  # tokens that are on the devices at a time, 256 MiB
SILENT_SECONDS = 2
FIRST = 2**30  # set in the number of the first token of a document, see `packing.py`

Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """The tokens that train, or those that validate.

    Attributes:
        numbers: `[S]`, of all documents one after the other; they may lie in a file.
        starts: where documents start among them, in order; of a single document nothing is noted.
    """

    numbers: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def stretch(self, start: int, size: int) -> Int[np.ndarray, " size"]:
        """Reads tokens, int32, of which the first one of each document has the mark `packing.FIRST`."""
        numbers = np.asarray(self.numbers[start : start + size]).astype(np.int32)
        near = self.starts[slice(*np.searchsorted(self.starts, [start, start + size]))]
        numbers[near - start] |= FIRST
        return numbers


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
        vocabulary: its tokens.
        training: nine tenths of it, or what is not held out.
        validation: its last tenth; of several documents about a tenth, but whole documents.
        sha256: its fingerprint, by which a resumed run knows its own data.
        documents: how many there are.
        skipped: files of the folder that are no text.
    """

    vocabulary: Vocabulary
    training: Part
    validation: Part
    sha256: str
    documents: int = 1
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.training) + len(self.validation)

    @property
    def packed(self) -> bool:
        """Whether windows may hold parts of several documents."""
        return self.documents > 1

    def sentence(self, limit: int) -> str:
        """The validation part's first sentence that stands on one line, or its start.

        Args:
            limit: the most tokens of it; a single character may have more.
        """
        start = self.vocabulary.decode(self.validation.numbers[:VALIDATION_TOKENS].tolist())
        found = re.search(r"(?<=\s)[A-Z][a-z]+ [a-z][^.\n]{20,38}\.(?=\s)", start)
        sentence = found[0] if found else start.strip(UNFINISHED)[:40] or start[:1]
        while len(sentence) > 1 and len(self.vocabulary.encode(sentence)) > limit:
            sentence = sentence[:-1]
        return sentence


def load(
    path: str | None, context_length: int, vocabulary: Vocabulary | None = None, say: Say = lambda line: None
) -> Text:
    """Reads the data of a run.

    Args:
        path: a UTF-8 file, or a folder whose UTF-8 files all count; None means the topics of Python's `help()`, about
            460,000 characters of English.
        context_length: tokens of the windows that both parts have to hold.
        vocabulary: the tokens; None means the distinct characters of the data.
        say: told how far it is with large data.

    Raises:
        UserError: the data is missing, unreadable, empty, not UTF-8, or too short for `context_length`.
    """
    surveys, skipped = documents.find(path, _counter(say, "looked through"))
    if not sum(each.size for each in surveys):
        raise UserError(f"--data {path} is empty: give a UTF-8 text file")
    sha256 = documents.fingerprint(surveys)
    if vocabulary is None:
        vocabulary = Characters(documents.characters_of(surveys))
    held = documents.held_out(surveys) if len(surveys) > 1 else set()
    surveys.sort(key=lambda each: each.sha256 in held)  # stable: otherwise in the order of their paths
    tokens = _tokens(surveys, vocabulary, sha256, _counter(say, "made tokens of"))
    number = len(tokens.numbers)
    split = (
        int(tokens.sizes[: sum(each.sha256 not in held for each in surveys)].sum()) if held else number - number // 10
    )
    starts = np.cumsum(tokens.sizes) - tokens.sizes if held else np.zeros(0, np.int64)
    training = Part(tokens.numbers[:split], starts[starts < split])
    validation = Part(tokens.numbers[split:], starts[starts >= split] - split)
    text = Text(vocabulary, training, validation, sha256, len(surveys), skipped)
    _refuse_short(text, path, context_length)
    return text


def _tokens(
    surveys: Sequence[Survey], vocabulary: Vocabulary, sha256: str, count: Callable[[int], None]
) -> token_files.Tokens:
    dtype = np.min_scalar_type(len(vocabulary) - 1)
    pieces = _pieces(surveys, vocabulary, dtype, count)
    if all(each.document.text is not None for each in surveys):
        return token_files.in_memory(pieces, len(surveys))
    order = " ".join([sha256, vocabulary.name, *(each.sha256 for each in surveys)])
    return token_files.on_disk(hashlib.sha256(order.encode()).hexdigest(), pieces, len(surveys), dtype)


def _pieces(
    surveys: Sequence[Survey], vocabulary: Vocabulary, dtype: np.dtype, count: Callable[[int], None]
) -> Iterator[tuple[int, np.ndarray]]:
    for index, each in enumerate(surveys):
        digest = hashlib.sha256()
        for piece in each.document.pieces():
            digest.update(piece.encode())
            count(len(piece))
            yield index, vocabulary.encode(piece).astype(dtype)
        if digest.hexdigest() != each.sha256:
            raise UserError(f"--data {each.document.path} changed while it was read: start again")


def _counter(say: Say, what: str) -> Callable[[int], None]:
    """Counts characters, and says how many there were: at first every two seconds, then less and less often."""
    characters, said, silent = 0, time.monotonic(), SILENT_SECONDS

    def count(more: int) -> None:
        nonlocal characters, said, silent
        characters += more
        if time.monotonic() - said > silent:
            said, silent = time.monotonic(), min(silent + 1, 10)
            say(f"{what} {characters:,} characters")

    return count


def _refuse_short(text: Text, path: str | None, context_length: int) -> None:
    # The validation part holds one window and the token that follows it; the training part two windows.
    unit, needed = text.vocabulary.unit, context_length + 1
    fix = f"--context-length {context_length}"
    if not text.packed and len(text) < 10 * needed:
        raise UserError(
            f"{path or 'the text'} holds {len(text)} {unit}s, but {fix} needs at least {10 * needed}: give a longer "
            "text or a shorter context"
        )
    if len(text.validation) < needed or len(text.training) <= needed:
        raise UserError(
            f"{path} holds {len(text.training)} {unit}s to train on and, in other documents, {len(text.validation)} to "
            f"validate, but {fix} needs at least {needed} of each: give more text or a shorter context"
        )


def shard_of_step(step: int, size: int, seed: int, eval_every: int) -> tuple[int, int]:
    """Says which tokens of a large training part are on the devices at a step.

    Between two validation losses these are the same. All shards have their turn before one comes again; their order
    depends on the seed alone, so that a resumed run reads the same ones.

    Args:
        step: from 1.
        size: tokens of the whole part.
        seed: of the run.
        eval_every: steps between two validation losses.

    Returns:
        The first of the tokens, and how many they are.
    """
    number = -(-size // SHARD)
    if number <= 1:
        return 0, size
    turn, place = divmod((step - 1) // eval_every, number)
    shard = np.random.default_rng([seed, turn]).permutation(number)[place]
    return int(np.linspace(0, size - SHARD, number)[shard]), SHARD


def validation_windows(part: Part, context_length: int, windows: int = WINDOWS) -> Int[np.ndarray, "C W T+1"]:
    """Cuts the validation part into the same windows every time.

    Args:
        part: at least `context_length + 1` tokens.
        context_length: T, the tokens that a window predicts.
        windows: W, validated at a time.

    Returns:
        int32, C chunks of windows that are evenly spread: together they predict every token after the first, as long
        as the part holds no more than `VALIDATION_TOKENS`.
    """
    predicted = min(len(part) - 1, VALIDATION_TOKENS)
    chunks = -(-predicted // (context_length * windows))  # the division rounded up: the windows may overlap a little
    starts = np.linspace(0, len(part) - 1 - context_length, chunks * windows).astype(int)
    found = np.stack([part.stretch(start, context_length + 1) for start in starts.tolist()])
    return found.reshape(chunks, windows, context_length + 1)
