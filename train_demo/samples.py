"""`samples.jsonl`: what the model wrote while it was trained; one object per line, with `step`, `prompt` and `text`."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import set_cell_size

from train_demo import generate
from train_demo.errors import UserError, printable
from train_demo.files import read_lines, write_atomically
from train_demo.model import Transformer
from train_demo.run_folder import Config
from train_demo.vocabulary import visible

FILE = "samples.jsonl"
TOKENS = 64  # of each sample
COLUMNS = 66  # of each sample on the terminal


class Sample(NamedTuple):
    """What the model wrote after a prompt, when it had been trained for so many steps."""

    step: int
    prompt: str
    text: str

    @property
    def line(self) -> str:
        """Its beginning, on one line of a terminal."""
        return set_cell_size(printable(visible(self.prompt + self.text)), COLUMNS).rstrip()


def read(out: Path) -> list[Sample]:
    """Reads a run's samples, and skips lines that are none."""
    return [Sample(**line) for line in read_lines(out / FILE) if _is_sample(line)]


def _is_sample(line: Any) -> bool:
    if not isinstance(line, dict) or line.keys() != set(Sample._fields):
        return False
    texts = isinstance(line["prompt"], str) and isinstance(line["text"], str)
    return texts and type(line["step"]) is int and 0 < line["step"] < 2**31


def drop_after(out: Path, step: int) -> None:
    """Drops what a killed run wrote beyond the step that it goes on from."""
    if (out / FILE).exists():
        kept = [json.dumps(sample._asdict()) + "\n" for sample in read(out) if sample.step <= step]
        write_atomically(out / FILE, "".join(kept).encode())


def prompt_of(config: Config) -> str:
    """What a run's samples continue: the first word of its sentence."""
    word = config.sentence.split(" ")[0]
    return word if len(config.vocabulary.encode(word)) else config.sentence


def add(out: Path, step: int, model: Transformer, config: Config) -> Sample:
    """Lets the model write, and adds that to a run's samples.

    Raises:
        UserError: the disk is full.
    """
    prompt = prompt_of(config)
    pieces = generate.generate(model, config.vocabulary, [prompt], max_new_tokens=TOKENS)
    sample = Sample(step, prompt, "".join(piece for (piece,) in pieces))
    _append(out, sample)
    return sample


def _append(out: Path, sample: Sample) -> None:
    """Waits until the sample is on the disk: a resumed run does not write it again."""
    try:
        with (out / FILE).open("a") as file:
            file.write(json.dumps(sample._asdict()) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"cannot write {out / FILE} ({error.strerror}): free some space, then go on with --resume"
        ) from error
