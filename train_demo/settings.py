"""Every option of a run, with its default and the values that it may have."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from train_demo.errors import UserError

# The settings of `--size`. Larger models read more tokens in a step. With Muon and Adam
# the best learning rate of a matrix or an embedding does not depend on its width; that
# of the head is divided by the width (update.py).
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {
        "layers": 2,
        "heads": 4,
        "features": 128,
        "context_length": 64,
        "batch_size": 12,
        "steps": 1500,
    },
    "small": {
        "layers": 4,
        "heads": 4,
        "features": 256,
        "context_length": 128,
        "batch_size": 24,
        "steps": 4000,
    },
    "medium": {
        "layers": 8,
        "heads": 8,
        "features": 512,
        "context_length": 256,
        "batch_size": 32,
        "steps": 8000,
    },
    "gpt2": {
        "layers": 12,
        "heads": 12,
        "features": 768,
        "context_length": 1024,
        "batch_size": 64,
        "steps": 16000,
    },
}
TINY = SIZES["tiny"]
LEARNING_RATES = {"muon": 0.03, "adamw": 4e-3}
# The values of `--attention`; attention.py makes each of them.
ATTENTIONS: Mapping[str, str] = {
    "full": "each head has its own keys and values",
    "gqa": "two query heads share one head of keys and values",
    "window": "a layer sees only the last quarter of the context",
    "gated": "each head's output is multiplied by a learned gate",
    "sinks": "each head can attend to nothing, by a learned score",
    "latent": "keys and values are computed from one short vector per character",
    "blocks": "each character attends to its block and the two that match it best",
}

# A function that turns the text of an option into its value, or raises argparse's
# error.
Parse = Callable[[str], Any]


def parser(
    kind: Callable[[str], Any], expected: str, is_sane: Callable[[Any], bool]
) -> Parse:
    """Returns a function that reads a text as a `kind` that `is_sane`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if (kind is str or math.isfinite(value)) and is_sane(value):
                return value
        except (ValueError, OverflowError):  # no number, or too large for math.isfinite
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def whole(first: int, last: int) -> Parse:
    expected = f"a whole number from {first} to {last}"
    return parser(int, expected, lambda number: first <= number <= last)


def one_of(*names: str) -> Parse:
    return parser(str, f"one of {', '.join(names)}", lambda name: name in names)


count = whole(1, 2**31 - 1)
seed = whole(0, 2**32 - 1)
positive = parser(float, "a finite number greater than 0", lambda number: number > 0)
rate = parser(float, "a number in [0, 1)", lambda number: 0 <= number < 1)
warmth = parser(float, "a number from 0 to 1000000", lambda number: 0 <= number <= 1e6)
probability = parser(float, "a number in (0, 1]", lambda number: 0 < number <= 1)
ratio = parser(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)
parts = parser(
    int,
    "-1 or a positive whole number",
    lambda number: number == -1 or 0 < number < 2**31,
)


def attention(text: str) -> str:
    """Reads one kind of attention."""
    if "," in text:
        raise argparse.ArgumentTypeError(
            f"expected one kind of attention, got {text!r}: train several kinds with "
            f"python -m train_demo compare --attention {text}"
        )
    return one_of(*ATTENTIONS)(text)


# The options of `sample`: how they are parsed, their defaults, and what they mean.
SAMPLING: Mapping[str, tuple[Parse, float | None, str]] = {
    "max_new_tokens": (count, 500, "number of characters to write"),
    "temperature": (
        warmth,
        0.7,
        "lower is more predictable; 0 always picks the most likely character",
    ),
    "top_k": (count, None, "sample only from the N most likely characters"),
    "top_p": (
        probability,
        None,
        "sample only from the most likely characters whose probabilities sum to X",
    ),
    "min_p": (
        ratio,
        None,
        "sample only from characters at least X times as likely as the most likely one",
    ),
    "seed": (seed, 0, "random seed"),
}


def option(default: Any, parse: Parse | None, explanation: str) -> Any:
    """Returns a dataclass field that is also an option; a flag if `parse` is None."""
    return field(default=default, metadata={"parse": parse, "help": explanation})


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def checked(name: str, value: Any, kind: type, parse: Parse | None) -> Any:
    """Returns an argument of a Python call after the command line's checks.

    Raises:
      UserError: The value is not allowed; the message starts with `name`.
    """
    if kind is str:
        expected = "a string"
        fits = isinstance(value, str)
    elif kind is bool:
        expected = "True or False"
        fits = isinstance(value, bool)
    else:
        expected = "a number"
        fits = not isinstance(value, str | bool)
    if not fits:
        raise UserError(f"{name}: expected {expected}, got {value!r}")
    if parse is None:
        return value
    try:
        return parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name}: {error}") from None


def _check_fields(options: Any) -> None:
    """Checks the values of a frozen dataclass, and stores the checked ones."""
    for each in fields(options):
        value = getattr(options, each.name)
        value = checked(each.name, value, type(each.default), each.metadata["parse"])
        object.__setattr__(options, each.name, value)


@dataclass(frozen=True)
class Settings:
    """The settings that decide the result of a run."""

    seed: int = option(0, seed, "random seed for weights, batches and dropout")
    steps: int = option(TINY["steps"], count, "number of training steps")
    batch_size: int = option(TINY["batch_size"], count, "text windows per step")
    context_length: int = option(TINY["context_length"], count, "characters per window")
    optimizer: str = option(
        "muon",
        one_of(*LEARNING_RATES),
        "optimizer for weight matrices: muon or adamw; other parameters use AdamW",
    )
    learning_rate: float = option(
        LEARNING_RATES["muon"],
        positive,
        "peak learning rate, reached after the warm-up",
    )
    layers: int = option(TINY["layers"], count, "transformer blocks")
    heads: int = option(TINY["heads"], count, "attention heads per block")
    features: int = option(TINY["features"], count, "width of the model")
    attention: str = option(
        "full", attention, f"kind of attention: {', '.join(ATTENTIONS)}"
    )
    token_shift: int = option(
        2, whole(0, 1024), "number of previous characters mixed into each embedding"
    )
    dtype: str = option(
        "auto",
        one_of("auto", "float32", "bfloat16"),
        "compute dtype: auto, float32 or bfloat16; auto is bfloat16 on GPUs and TPUs",
    )
    dropout_rate: float = option(
        0.0, rate, "fraction of activations dropped during training"
    )
    eval_every: int = option(250, count, "steps between validations")
    save_every: int = option(250, count, "steps between checkpoints")

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.features % (2 * self.heads):
            raise UserError(
                f"--features {self.features} is incompatible with --heads "
                f"{self.heads}: choose a multiple of twice the number of heads, "
                "because rotary positions pair up the features of each head"
            )
        if self.attention == "gqa" and self.heads % 2:
            raise UserError(
                f"--attention gqa is incompatible with --heads {self.heads}: choose an "
                "even number, because pairs of heads share keys and values"
            )
        if self.attention == "latent" and self.features % (4 * self.heads):
            raise UserError(
                f"--attention latent is incompatible with --features {self.features}: "
                f"choose a multiple of {4 * self.heads}, four times the number of "
                "heads, because half of the features of each head are rotated in pairs"
            )
        if self.token_shift >= self.context_length:
            raise UserError(
                f"--token-shift {self.token_shift} reaches beyond a window of "
                f"--context-length {self.context_length}: "
                f"choose at most {self.context_length - 1}"
            )

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values."""
        if self.attention == "gqa":
            return self.heads // 2
        return self.heads


def default_of(name: str, default: Any) -> str:
    """Returns the default of an option for the help.

    Example:
      >>> default_of("learning_rate", 0.03)
      '0.03 for muon, 0.004 for adamw'
    """
    values: Mapping[str, float]
    if name in TINY:
        values = {size: preset[name] for size, preset in SIZES.items()}
    elif name == "learning_rate":
        values = LEARNING_RATES
    else:
        return str(default)
    return ", ".join(f"{value} for {case}" for case, value in values.items())


def completed(size: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Completes given settings by those of the size and the optimizer's learning rate.

    Example:
      >>> completed("small", {"layers": 6, "optimizer": "adamw"})["learning_rate"]
      0.004
    """
    optimizer = given.get("optimizer", "muon")
    return {**SIZES[size], "learning_rate": LEARNING_RATES.get(optimizer), **given}


class Sizes(NamedTuple):
    """The number of devices along each axis of the mesh, which mesh.py explains."""

    data: int
    fsdp: int
    context: int
    model: int


@dataclass(frozen=True)
class Layout:
    """How a run is computed, which may change when the run is resumed."""

    data_parallel: int = option(
        -1, parts, "devices that split the batch; -1 uses all remaining devices"
    )
    fsdp: int = option(
        1, count, "devices that split the batch, parameters and optimizer state"
    )
    tensor: int = option(
        1, count, "devices that split the attention heads and the MLP width"
    )
    context: int = option(1, count, "devices that split the characters of each window")
    accumulate: int = option(
        1, count, "number of sequential passes per batch (gradient accumulation)"
    )
    remat: bool = option(
        False, None, "recompute each block in the backward pass: slower, less memory"
    )

    def __post_init__(self) -> None:
        _check_fields(self)

    def sizes(self, devices: int, settings: Settings, use_all: bool = False) -> Sizes:
        """Returns the number of devices along each axis of the mesh.

        A layout of defaults uses as many devices as divide the batch, unless `use_all`;
        any other must use all devices.
        """
        if self.context > 1 and settings.attention == "blocks":
            raise UserError(
                f"--context {self.context} is incompatible with --attention blocks, "
                "whose blocks lie on other devices: use --context 1"
            )
        shared = self.fsdp * self.context * self.tensor
        data = self.data_parallel
        if data == -1:
            data = devices // shared
            if shared == 1 and self.accumulate == 1 and not use_all:
                while settings.batch_size % data:
                    data -= 1
                devices = data
        if data * shared != devices:
            raise UserError(
                f"--data-parallel {self.data_parallel} x --fsdp {self.fsdp} x --tensor "
                f"{self.tensor} x --context {self.context} does not equal the number "
                f"of devices, {devices}: change one (--data-parallel -1 uses the "
                "remaining devices)"
            )
        batch_parts = data * self.fsdp * self.accumulate
        for name, by, divisor in (
            ("batch_size", "--data-parallel x --fsdp x --accumulate", batch_parts),
            ("features", "--fsdp", self.fsdp),
            ("heads", "--tensor", self.tensor),
            ("context_length", "--context", self.context),
        ):
            size = getattr(settings, name)
            if size % divisor:
                raise UserError(
                    f"{option_of(name)} {size} cannot be split into {divisor} equal "
                    f"parts ({by}): choose a multiple of {divisor}"
                )
        if settings.kv_heads % self.tensor:
            raise UserError(
                f"--tensor {self.tensor} cannot split the {settings.kv_heads} heads of "
                f"keys and values of --attention {settings.attention}: choose a "
                f"divisor of {settings.kv_heads}"
            )
        return Sizes(data, self.fsdp, self.context, self.tensor)


def processes_in(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Reads which of several processes this is from JAX's environment variables.

    Returns:
      Arguments of `jax.distributed.initialize`; None without these variables.

    Example:
      >>> processes_in({"JAX_COORDINATOR_ADDRESS": "localhost:9876",
      ...               "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
      {'coordinator_address': 'localhost:9876', 'num_processes': 2, 'process_id': 1}
    """
    found = {}
    missing = []
    for name, parse in PROCESSES.items():
        variable = f"JAX_{name.upper()}"
        if environment.get(variable):
            found[name] = checked(variable, environment[variable], str, parse)
        else:
            missing.append(variable)
    if not found:
        return None
    if missing:
        names = " and ".join(missing)
        raise UserError(
            f"missing {names}: set all of JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or none"
        )
    number = found["num_processes"]
    if found["process_id"] >= number:
        raise UserError(
            f"JAX_PROCESS_ID {found['process_id']} is out of range: with "
            f"JAX_NUM_PROCESSES {number}, it must be between 0 and {number - 1}"
        )
    return found


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    return is_port and host != "" and not any(x.isspace() for x in host)


PROCESSES = {
    "coordinator_address": parser(
        str, "HOST:PORT, with a port up to 65535", _is_address
    ),
    "num_processes": count,
    "process_id": whole(0, 2**31 - 1),
}
