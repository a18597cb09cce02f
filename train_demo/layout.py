"""How a run is computed, on which devices and by how many processes; none of it is part of what the run learns."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from train_demo.errors import UserError
from train_demo.settings import Settings, checked, count, option


def sharing(text: str) -> int:
    """Reads -1, or a whole number from 1.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: number == -1 or 0 < number < 2**31, "-1, or a whole number from 1")


def index(text: str) -> int:
    """Reads a whole number from 0.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    return checked(text, int, lambda number: 0 <= number < 2**31, "a whole number from 0")


def address(text: str) -> str:
    """Reads HOST:PORT.

    Raises:
        argparse.ArgumentTypeError: `text` is anything else.
    """
    host, _, port = text.rpartition(":")
    if not host or any(c.isspace() for c in host) or not port.isascii() or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    checked(port, int, lambda number: 0 < number < 2**16, "a port from 1 to 65535")
    return text


class Sizes(NamedTuple):
    """The sizes of the mesh's axes."""

    data: int
    fsdp: int
    context: int
    model: int


@dataclass(frozen=True)
class Layout:
    """How a run is computed; each field is also an option of the command line, and may change when a run is resumed."""

    data_parallel: int = option(-1, sharing, "parts of the batch on devices of their own; -1: what is left of them")
    fsdp: int = option(1, count, "devices that share parameters and optimizer state, and have parts of the batch")
    tensor: int = option(1, count, "devices that share the attention heads and the width of the small networks")
    context: int = option(1, count, "devices that share each window's characters")
    accumulate: int = option(1, count, "parts of the batch that each device computes one after the other")
    remat: bool = option(False, None, "compute each block again for its gradient: slower, but needs less memory")
    coordinator: str | None = option(None, address, "HOST:PORT where process 0 is reached; for several processes")
    num_processes: int | None = option(None, count, "processes of this run, all started with the same options")
    process_id: int | None = option(None, index, "this process, from 0; process 0 prints and writes")

    start_timeout: int = option(60, count, "seconds in which all processes have to start")

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, field.default, field.metadata["parse"])
        together = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [name for name, value in together.items() if value is None]
        if 0 < len(missing) < len(together):
            raise UserError(f"{' and '.join(missing)} missing: {', '.join(together)} belong together")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise UserError(
                f"--process-id {self.process_id} is out of range: with --num-processes {self.num_processes} it is "
                f"0 to {self.num_processes - 1}"
            )

    def _check(self, name: str, default: object, parse: Callable[[str], object] | None) -> None:
        value = getattr(self, name)
        if value is default:
            return
        expected = bool if parse is None else str if parse is address else int
        try:
            if type(value) is not expected:
                raise argparse.ArgumentTypeError(f"expected {expected.__name__}, got {value!r}")
            if parse is not None:
                parse(str(value))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{name}: {error}") from None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.process_id in (None, 0)

    def sizes(self, devices: int, settings: Settings) -> Sizes:
        """Settles how many devices each axis of the mesh has.

        Without any size given, as many devices as divide the batch are used; otherwise all of them, or none.

        Raises:
            UserError: the sizes do not multiply to `devices`, or do not divide what they split.
        """
        shared = self.fsdp * self.context * self.tensor
        data = self.data_parallel
        if data == -1:
            data = devices // shared
            if shared == 1 and self.accumulate == 1 and self.num_processes in (None, 1):
                data = max(n for n in range(1, data + 1) if settings.batch_size % n == 0)
                devices = data
        sizes = Sizes(data, self.fsdp, self.context, self.tensor)
        if data * shared != devices:
            raise UserError(
                f"--data-parallel {self.data_parallel} x --fsdp {self.fsdp} x --tensor {self.tensor} x --context "
                f"{self.context} does not make {devices} device{'s' * (devices != 1)}: their product must be the "
                "number of devices (-1 for --data-parallel takes what is left)"
            )
        self._check_divisors(sizes, settings)
        return sizes

    def _check_divisors(self, sizes: Sizes, settings: Settings) -> None:
        parts = sizes.data * sizes.fsdp * self.accumulate
        splits = (
            ("--batch-size", settings.batch_size, "--data-parallel x --fsdp x --accumulate", parts),
            ("--features", settings.features, "--fsdp", sizes.fsdp),
            ("--heads", settings.heads, "--tensor", sizes.model),
            ("--context-length", settings.context_length, "--context", sizes.context),
        )
        for name, size, by, divisor in splits:
            if size % divisor:
                raise UserError(
                    f"{name} {size} cannot be split into {divisor} equal parts ({by}): choose a multiple of {divisor}"
                )

    def alone(self) -> "Layout":
        """The same, without other processes."""
        return replace(self, coordinator=None, num_processes=None, process_id=None, start_timeout=60)
