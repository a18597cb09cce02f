"""A trained model from its checkpoint, and the texts that it writes on the terminal."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from flax import nnx

from train_demo import checkpoint
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


def show(prompts: Sequence[str], num_samples: int, start: Callable[[], Iterator[list[str]]]) -> None:
    """Prints texts after their prompts, and on stderr how fast they were written.

    One text is printed as it is written, several ones at the end, each under a heading.

    Args:
        prompts: what the texts continue.
        num_samples: texts for each prompt.
        start: begins to write the texts, which come in pieces, as `generate` yields them; called twice.
    """
    begin = time.perf_counter()
    next(start())  # compiles; these characters are written again below
    compiled = time.perf_counter()
    size = _stream(prompts[0], start()) if len(prompts) * num_samples == 1 else _all(prompts, num_samples, start())
    seconds = time.perf_counter() - compiled
    print(
        f"{size:,} characters in {seconds:.2f} s: {size / seconds:,.0f} characters/s "
        f"(before that, compiling took {compiled - begin:.1f} s)",
        file=sys.stderr,
    )


def _stream(prompt: str, pieces: Iterator[list[str]]) -> int:
    """Prints one text as it comes; returns its characters."""
    print(printable(prompt), end="", flush=True)
    size = 0
    for (piece,) in pieces:
        print(printable(piece), end="", flush=True)
        size += len(piece)
    print(flush=True)
    return size


def _all(prompts: Sequence[str], num_samples: int, pieces: Iterator[list[str]]) -> int:
    """Prints several texts; returns their characters, all together."""
    texts = ["".join(parts) for parts in zip(*pieces, strict=True)]
    for number, text in enumerate(texts):
        prompt, sample = divmod(number, num_samples)
        print(f"--- prompt {prompt + 1} of {len(prompts)}, sample {sample + 1} of {num_samples} ---")
        print(printable(prompts[prompt] + text), flush=True)
    return sum(map(len, texts))
