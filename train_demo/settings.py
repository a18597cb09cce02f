"""Every option of a run, with its default and the values that it may have: `Settings`, `Layout` and `SAMPLING`."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from train_demo.errors import UserError

# The settings of `--size`. Larger models read more tokens in a step. With Muon and Adam the best learning rate of a
# matrix or an embedding does not depend on its width; that of the head is divided by the width (update.py).
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"layers": 2, "heads": 4, "features": 128, "context_length": 64, "batch_size": 12, "steps": 1500},
    "small": {"layers": 4, "heads": 4, "features": 256, "context_length": 128, "batch_size": 24, "steps": 4000},
    "medium": {"layers": 8, "heads": 8, "features": 512, "context_length": 256, "batch_size": 32, "steps": 8000},
    "gpt2": {"layers": 12, "heads": 12, "features": 768, "context_length": 1024, "batch_size": 64, "steps": 16000},
}
LEARNING_RATES = {"muon": 0.03, "adamw": 4e-3}
Parse = Callable[[str], Any]


def parser(kind: Callable[[str], Any], expected: str, is_sane: Callable[[Any], bool]) -> Parse:
    """Returns a function that reads a text as a `kind` that `is_sane`, or raises argparse's error with `expected`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if (isinstance(value, str) or math.isfinite(value)) and is_sane(value):
                return value
        except (ValueError, OverflowError):  # no number, or too large for math.isfinite
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def one_of(*names: str) -> Parse:
    return parser(str, f"one of {', '.join(names)}", lambda name: name in names)


count = parser(int, "a whole number from 1 to 2147483647", lambda number: 0 < number < 2**31)
several = parser(int, "a whole number from 1 to 1024", lambda number: 0 < number <= 1024)
seed = parser(int, "a whole number from 0 to 4294967295", lambda number: 0 <= number < 2**32)
positive = parser(float, "a finite number greater than 0", lambda number: number > 0)
rate = parser(float, "a number in [0, 1)", lambda number: 0 <= number < 1)
shift = parser(int, "a whole number from 0 to 1024", lambda number: 0 <= number <= 1024)
warmth = parser(float, "a number from 0 to 1000000", lambda number: 0 <= number <= 1e6)
probability = parser(float, "a number in (0, 1]", lambda number: 0 < number <= 1)
ratio = parser(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)
SAMPLING = {
    "max_new_tokens": (count, 500, "number of characters to write"),
    "temperature": (warmth, 0.7, "lower is more predictable; 0 always picks the most likely character"),
    "top_k": (count, None, "sample only from the N most likely characters"),
    "top_p": (probability, None, "sample only from the most likely characters whose probabilities sum to X"),
    "min_p": (ratio, None, "sample only from characters that are at least X times as likely as the most likely one"),
    "num_samples": (several, 1, "number of samples per prompt"),
    "seed": (seed, 0, "random seed"),
}


def option(default: Any, parse: Parse | None, explanation: str) -> Any:
    """Returns a dataclass field that is also an option of the command line, a flag if `parse` is None."""
    return field(default=default, metadata={"parse": parse, "help": explanation})


def checked(name: str, value: Any, kind: type, parse: Parse | None) -> Any:
    """Returns an argument of a Python call after the command line's checks; raises a `UserError` with its `name`."""
    expected = {str: "a string", bool: "True or False"}.get(kind, "a number")
    fits = isinstance(value, kind) if kind in (str, bool) else not isinstance(value, str | bool)
    try:
        if not fits:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r}")
        return value if parse is None else parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name}: {error}") from None


def _check_fields(options: Any) -> None:
    """Checks the values of a frozen dataclass of options, and replaces them by the checked ones."""
    for each in fields(options):
        value = getattr(options, each.name)
        if value is not each.default:
            kind = str if each.name == "coordinator" else type(each.default)
            object.__setattr__(options, each.name, checked(each.name, value, kind, each.metadata["parse"]))


@dataclass(frozen=True)
class Settings:
    """The settings that decide the result of a run; each field is also an option of the command line."""

    seed: int = option(0, seed, "random seed for weights, batches and dropout")
    steps: int = option(SIZES["tiny"]["steps"], count, "number of training steps")
    batch_size: int = option(SIZES["tiny"]["batch_size"], count, "text windows per step")
    context_length: int = option(SIZES["tiny"]["context_length"], count, "characters per window")
    optimizer: str = option(
        "muon", one_of("muon", "adamw"), "optimizer for weight matrices: muon or adamw; other parameters use AdamW"
    )
    learning_rate: float = option(LEARNING_RATES["muon"], positive, "peak learning rate, reached after the warm-up")
    layers: int = option(SIZES["tiny"]["layers"], count, "transformer blocks")
    heads: int = option(SIZES["tiny"]["heads"], count, "attention heads per block")
    features: int = option(SIZES["tiny"]["features"], count, "width of the model")
    token_shift: int = option(2, shift, "number of previous characters mixed into each embedding")
    dtype: str = option(
        "auto",
        one_of("auto", "float32", "bfloat16"),
        "compute dtype: auto, float32 or bfloat16; auto is bfloat16 on GPUs and TPUs",
    )
    dropout_rate: float = option(0.0, rate, "fraction of activations dropped during training")
    eval_every: int = option(250, count, "steps between validations")
    max_score: bool = option(False, None, "log the largest attention score at each validation, as used by QK-Clip")
    save_every: int = option(250, count, "steps between checkpoints")

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.features % (2 * self.heads):
            raise UserError(
                f"--features {self.features} is incompatible with --heads {self.heads}: choose a multiple of twice the "
                "number of heads, because rotary positions pair up the features of each head"
            )
        if self.token_shift >= self.context_length:
            raise UserError(
                f"--token-shift {self.token_shift} reaches beyond a window of --context-length {self.context_length}: "
                f"choose at most {self.context_length - 1}"
            )


def checked_size(size: str | None) -> None:
    if size is not None:
        checked("size", size, str, one_of(*SIZES))


def default_of(name: str, default: Any) -> str:
    """Returns the default of an option for the help: one for each size or optimizer that sets its own.

    Example:
      >>> default_of("learning_rate", 0.03)
      '0.03 for muon, 0.004 for adamw'
    """
    if name in SIZES["tiny"]:
        return ", ".join(f"{preset[name]} for {size}" for size, preset in SIZES.items())
    if name == "learning_rate":
        return ", ".join(f"{rate} for {optimizer}" for optimizer, rate in LEARNING_RATES.items())
    return str(default)


def completed(size: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given settings, completed by those of the size and by the optimizer's learning rate.

    Example:
      >>> completed("small", {"layers": 6, "optimizer": "adamw"})["learning_rate"]
      0.004
    """
    checked_size(size)
    return {**SIZES[size], "learning_rate": LEARNING_RATES[given.get("optimizer", "muon")], **given}


class Sizes(NamedTuple):
    """The number of devices along each axis of the mesh; mesh.py says what each axis splits."""

    data: int
    fsdp: int
    context: int
    model: int


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or any(c.isspace() for c in host) or not port.isascii() or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    parser(int, "a port from 1 to 65535", lambda number: 0 < number < 2**16)(port)
    return text


PARTS = parser(int, "-1 or a positive whole number", lambda number: number == -1 or 0 < number < 2**31)
INDEX = parser(int, "a nonnegative whole number", lambda number: 0 <= number < 2**31)


@dataclass(frozen=True)
class Layout:
    """How a run is computed; each field is also an option of the command line, and may change when a run is resumed."""

    data_parallel: int = option(-1, PARTS, "devices that split the batch; -1 uses all remaining devices")
    fsdp: int = option(1, count, "devices that split the batch, parameters and optimizer state")
    tensor: int = option(1, count, "devices that split the attention heads and the MLP width")
    context: int = option(1, count, "devices that split the characters of each window")
    accumulate: int = option(1, count, "number of sequential passes per batch (gradient accumulation)")
    remat: bool = option(False, None, "recompute each block in the backward pass: slower, less memory")
    coordinator: str | None = option(None, address, "address of process 0, for multi-process runs")
    num_processes: int | None = option(None, count, "number of processes, all started with the same options")
    process_id: int | None = option(None, INDEX, "index of this process, starting at 0; process 0 prints and saves")
    start_timeout: int = option(60, count, "seconds to wait for all processes to start")

    def __post_init__(self) -> None:
        _check_fields(self)
        together = ("coordinator", "num_processes", "process_id")
        missing = [option_of(name) for name in together if getattr(self, name) is None]
        if 0 < len(missing) < len(together):
            raise UserError(f"missing {' and '.join(missing)}: pass {', '.join(map(option_of, together))} together")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise UserError(
                f"--process-id {self.process_id} is out of range: with --num-processes {self.num_processes}, it must "
                f"be between 0 and {self.num_processes - 1}"
            )

    @property
    def first(self) -> bool:
        return self.process_id in (None, 0)

    def sizes(self, devices: int, settings: Settings) -> Sizes:
        """Returns the number of devices along each axis of the mesh.

        Without any number given, as many devices are used as divide the batch; otherwise all devices must be used.
        """
        shared = self.fsdp * self.context * self.tensor
        data = self.data_parallel
        if data == -1:
            data = devices // shared
            if shared == 1 and self.accumulate == 1 and self.num_processes in (None, 1):
                data = max(n for n in range(1, data + 1) if settings.batch_size % n == 0)
                devices = data
        if data * shared != devices:
            raise UserError(
                f"--data-parallel {self.data_parallel} x --fsdp {self.fsdp} x --tensor {self.tensor} x --context "
                f"{self.context} does not equal {devices} device{'s' * (devices != 1)}: their product must be the "
                "number of devices (--data-parallel -1 uses the remaining devices)"
            )
        for name, by, divisor in (
            ("batch_size", "--data-parallel x --fsdp x --accumulate", data * self.fsdp * self.accumulate),
            ("features", "--fsdp", self.fsdp),
            ("heads", "--tensor", self.tensor),
            ("context_length", "--context", self.context),
        ):
            size = getattr(settings, name)
            if size % divisor:
                raise UserError(
                    f"{option_of(name)} {size} cannot be split into {divisor} equal parts ({by}): choose a multiple of "
                    f"{divisor}"
                )
        return Sizes(data, self.fsdp, self.context, self.tensor)

    def alone(self) -> "Layout":
        return replace(self, coordinator=None, num_processes=None, process_id=None, start_timeout=60)


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
