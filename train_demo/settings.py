"""What decides a run besides its text: every setting, its default, and which values are sane."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from train_demo.errors import UserError

# The values of the settings that are names.
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "optimizer": ("muon", "adamw"),
    "mlp": ("relu2", "gelu", "swiglu"),
    "head": ("untied", "tied"),
}
# Runs of before there was a setting have its default.
ADDED_LATER = {"dtype"}
# What `--size` stands for. Larger models read more tokens in a step; the learning rate that suits a matrix or an
# embedding does not depend on their width under Muon and Adam, and that of the head is divided by it (update.py).
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"layers": 2, "heads": 4, "features": 128, "context_length": 64, "batch_size": 12, "steps": 1500},
    "small": {"layers": 4, "heads": 4, "features": 256, "context_length": 128, "batch_size": 24, "steps": 4000},
    "medium": {"layers": 8, "heads": 8, "features": 512, "context_length": 256, "batch_size": 32, "steps": 8000},
    "gpt2": {"layers": 12, "heads": 12, "features": 768, "context_length": 1024, "batch_size": 64, "steps": 16000},
}
LEARNING_RATES = {"muon": 0.03, "adamw": 4e-3}


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


def whole(text: str) -> int:
    """Reads a whole number from 0 to 1024.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: 0 <= number <= 1024, "a whole number from 0 to 1024")


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Makes a function that reads one of these names, and raises `argparse.ArgumentTypeError` for any other text."""
    names = tuple(names)
    return lambda text: checked(text, str, lambda name: name in names, f"one of {', '.join(names)}")


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
    steps: int = option(SIZES["tiny"]["steps"], count, "parameter updates")
    batch_size: int = option(SIZES["tiny"]["batch_size"], count, "windows of text an update")
    context_length: int = option(SIZES["tiny"]["context_length"], count, "characters a window")
    optimizer: str = option("muon", one_of(CHOICES["optimizer"]), "of the matrices, muon or adamw; AdamW has the rest")
    learning_rate: float = option(LEARNING_RATES["muon"], positive, "the highest, after the warm-up")
    layers: int = option(SIZES["tiny"]["layers"], count, "transformer blocks")
    heads: int = option(SIZES["tiny"]["heads"], count, "attention heads a block")
    features: int = option(SIZES["tiny"]["features"], count, "width of the model")
    mlp: str = option("relu2", one_of(CHOICES["mlp"]), "the small networks: squared ReLU, GELU or SwiGLU")
    head: str = option("untied", one_of(CHOICES["head"]), "whether the head shares the embedding's parameters: tied")
    token_shift: int = option(2, whole, "earlier characters that are mixed into each character's embedding")
    dtype: str = option("auto", one_of(CHOICES["dtype"]), "to compute in; auto: bfloat16 on GPUs and TPUs")
    dropout_rate: float = option(0.0, rate, "share of the activations dropped while training")
    eval_every: int = option(250, count, "steps between two validation losses")
    save_every: int = option(250, count, "steps between two checkpoints")

    def __post_init__(self) -> None:
        if self.features % (2 * self.heads):
            raise UserError(
                f"--features {self.features} cannot be shared by --heads {self.heads}: choose a number of features "
                "that twice the number of heads divides, because rotary positions pair the features of a head"
            )
        if self.token_shift >= self.context_length:
            raise UserError(
                f"--token-shift {self.token_shift} reaches out of windows of --context-length {self.context_length}: "
                f"choose at most {self.context_length - 1}"
            )


def completed(size: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to the settings that were named those that `--size` and `--optimizer` stand for.

    Args:
        size: one of `SIZES`.
        given: the settings that were named, which count more.

    Example:
        >>> completed("small", {"layers": 6, "optimizer": "adamw"})["learning_rate"]
        0.004
    """
    rate = LEARNING_RATES[given.get("optimizer", "muon")]
    return {**SIZES[size], "learning_rate": rate, **given}


def restored(saved: Any) -> Settings:
    """Rebuilds settings from what a JSON file holds of them.

    Raises:
        ValueError: `saved` is not an object that holds every setting, and nothing else, with a sane value.
    """
    options = {field.name: field for field in fields(Settings)}
    if not isinstance(saved, dict) or saved.keys() | ADDED_LATER != options.keys():
        raise ValueError("its settings are not the ones of this program")
    for name, value in saved.items():
        if not isinstance(value, str if name in CHOICES else int | float) or isinstance(value, bool):
            raise ValueError(f"its {name} is not a {'name' if name in CHOICES else 'number'}")
    try:
        return Settings(**{name: options[name].metadata["parse"](str(value)) for name, value in saved.items()})
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"one of its settings is wrong: {error}") from None
