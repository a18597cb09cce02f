"""What decides a run besides its text: every setting, its default, and which values are sane."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from train_demo.errors import UserError

DTYPES = ("float32", "bfloat16")
# Runs of before there was a setting have its default.
ADDED_LATER = {"dtype"}


def count(text: str) -> int:
    """Reads a whole number from 1 to 2**31 - 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: 0 < number < 2**31, "a whole number from 1 to 2147483647")


def seed(text: str) -> int:
    """Reads a whole number from 0 to 2**32 - 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: 0 <= number < 2**32, "a whole number from 0 to 4294967295")


def positive(text: str) -> float:
    """Reads a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, float, lambda number: number > 0, "a finite number above 0")


def temperature(text: str) -> float:
    """Reads a finite number from 0.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, float, lambda number: number >= 0, "a finite number, 0 or above")


def rate(text: str) -> float:
    """Reads a number from 0 up to, but not including, 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, float, lambda number: 0 <= number < 1, "a number from 0 up to, but not including, 1")


def above_zero_to_one(text: str) -> float:
    """Reads a number above 0, up to and including 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, float, lambda number: 0 < number <= 1, "a number above 0, up to and including 1")


def zero_to_one(text: str) -> float:
    """Reads a number from 0 to 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, float, lambda number: 0 <= number <= 1, "a number from 0 to 1")


def number(text: str) -> int:
    """Reads a whole number, which may be written as 7e9.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else, or below 1, or above 1e15.
    """
    return int(checked(text, float, lambda number: 1 <= number <= 1e15, "a number of parameters, such as 7e9"))


def several(text: str) -> int:
    """Reads a whole number from 1 to 1024, of what is computed at the same time and has to fit in memory.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: 1 <= number <= 1024, "a whole number from 1 to 1024")


def dtype(text: str) -> str:
    """Reads the name of a dtype to compute in.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, str, lambda name: name in DTYPES, f"one of {', '.join(DTYPES)}")


def checked(text: str, kind: Callable[[str], Any], is_sane: Callable[[Any], bool], expected: str) -> Any:
    """Reads a value with `kind`, of which `is_sane` has to be true.

    Raises:
        argparse.ArgumentTypeError: the text is anything else; the message says what was `expected`.
    """
    try:
        number = kind(text)
        if (kind is str or math.isfinite(number)) and is_sane(number):
            return number
    except (ValueError, OverflowError):  # not a number, or a whole one too large for math.isfinite
        pass
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def option(default: Any, parse: Callable[[str], Any] | None, explanation: str) -> Any:
    """A field of a dataclass that is also an option of the command line; without `parse` it is a flag."""
    return field(default=default, metadata={"parse": parse, "help": explanation})


@dataclass(frozen=True)
class Settings:
    """The numbers of one run; each field is also an option of the command line."""

    seed: int = option(0, seed, "where the weights, the batches and the dropout start")
    steps: int = option(2000, count, "parameter updates")
    batch_size: int = option(12, count, "windows of text an update")
    context_length: int = option(64, count, "characters a window")
    learning_rate: float = option(4e-3, positive, "AdamW's highest, after the warm-up")
    layers: int = option(2, count, "transformer blocks")
    heads: int = option(4, count, "attention heads a block")
    features: int = option(128, count, "width of the model")
    dtype: str = option("float32", dtype, "what the model computes in; parameters stay float32")
    dropout_rate: float = option(0.0, rate, "share of the activations dropped while training")
    eval_every: int = option(200, count, "steps between two validation losses")
    save_every: int = option(200, count, "steps between two checkpoints")

    def __post_init__(self) -> None:
        if self.features % (2 * self.heads):
            raise UserError(
                f"--features {self.features} cannot be shared by --heads {self.heads}: choose a number of features "
                "that twice the number of heads divides, because rotary positions pair the features of a head"
            )


def restored(saved: Any) -> Settings:
    """Rebuilds settings from what a JSON file holds of them.

    Raises:
        ValueError: `saved` is not an object that holds every setting, and nothing else, with a sane value.
    """
    options = {field.name: field for field in fields(Settings)}
    if not isinstance(saved, dict) or saved.keys() | ADDED_LATER != options.keys():
        raise ValueError("its settings are not the ones of this program")
    for name, value in saved.items():
        if not isinstance(value, str if name == "dtype" else int | float) or isinstance(value, bool):
            raise ValueError(f"its {name} is not a {'name' if name == 'dtype' else 'number'}")
    try:
        return Settings(**{name: options[name].metadata["parse"](str(value)) for name, value in saved.items()})
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"one of its settings is wrong: {error}") from None
