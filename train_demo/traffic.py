"""What a compiled program sends between devices: its collectives, counted with the trips of the loops around them."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

BITS = {"pred": 8, "token": 0}  # of the types whose names do not end with their number of bits
# What a device sends of the n devices' `size` bytes, in the usual algorithms.
SENT = {
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all-gather": lambda size, n: size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "ragged-all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
    "collective-broadcast": lambda size, n: size,
}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=")


class Sent(NamedTuple):
    """Of one kind of collective, in one run of the program.

    Attributes:
        calls: how often it is called.
        size: bytes of its arrays, all calls together: of the whole array for all-gather and reduce-scatter, of what a
            device holds for the others.
        sent: bytes that a device sends, where all-reduce sends each number twice.
    """

    calls: int = 0
    size: float = 0.0
    sent: float = 0.0


class Traffic(NamedTuple):
    """What a program sends, by the kind of collective, and how many of its loops have an unknown number of trips."""

    kinds: dict[str, Sent]
    unknown_loops: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of the program."""
        return sum(kind.sent for kind in self.kinds.values())


def traffic(hlo: str, devices: int) -> Traffic:
    """Counts the collectives of a compiled program.

    Args:
        hlo: its optimized HLO (`compiled.as_text()`).
        devices: how many devices it runs on.

    Returns:
        The traffic. Of branches, the one that sends most counts. A loop whose trips the compiler does not know counts
        as one trip.
    """
    computations, entry = _computations(hlo)
    reader = _Reader(computations, devices)
    calls, size, sent = reader.count(entry)
    kinds = {kind: Sent(calls[kind], size[kind], sent[kind]) for kind in sorted(calls)}
    return Traffic(kinds, reader.unknown_loops)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        start = COMPUTATION.match(line)
        if start:
            lines = found[start[2]] = []
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    return found, entry


Counts = tuple[Counter, Counter, Counter]


class _Reader:
    def __init__(self, computations: dict[str, list[str]], devices: int):
        self.computations, self.devices, self.unknown_loops = computations, devices, 0
        self._counted: dict[str, Counts] = {}

    def count(self, name: str) -> Counts:
        """The calls, bytes and bytes sent of a computation and all that it calls, by the kind of collective."""
        if name not in self._counted:
            total: Counts = (Counter(), Counter(), Counter())
            for line in self.computations[name]:
                found = INSTRUCTION.match(line)
                for counts, times in self._of_instruction(name, *found.groups()) if found else ():
                    for sums, numbers in zip(total, counts, strict=True):
                        sums.update({kind: times * number for kind, number in numbers.items()})
            self._counted[name] = total
        return self._counted[name]

    def _of_instruction(self, name: str, result: str, operation: str, rest: str) -> Iterator[tuple[Counts, int]]:
        kind = operation.removesuffix("-start")
        if kind in SENT:
            size, n = _size(kind, result, operation, rest, self.devices)
            yield (Counter({kind: 1}), Counter({kind: size}), Counter({kind: SENT[kind](size, n)})), 1
            return
        if operation == "conditional":
            yield max((self.count(name) for name in _called(rest)), key=lambda counts: counts[2].total()), 1
            return
        for called in _called(rest):
            yield self.count(called), self._trips(name, rest) if operation == "while" and self.count(called)[0] else 1

    def _trips(self, name: str, rest: str) -> int:
        known = re.search(r"known_trip_count[^\d]*(\d+)", rest)
        trips = int(known[1]) if known else self._trips_of_counter(name, rest)
        self.unknown_loops += trips is None
        return trips or 1

    def _trips_of_counter(self, name: str, rest: str) -> int | None:
        """The trips of a loop as `jax.lax.scan` makes it, that counts from 0 while it is less than a constant."""
        carry, condition = re.match(r"(%?[\w.-]+)\)", rest), re.search(r"condition=%?([\w.-]+)", rest)
        if carry is None or condition is None:
            return None
        test = self.computations[condition[1]]
        compared = next(
            (re.search(r"compare\((\S+), (\S+)\), direction=LT", line) for line in test if "ROOT" in line), None
        )
        if compared is None:
            return None
        place = re.search(r"get-tuple-element\(\S+\), index=(\d+)", _definition(test, compared[1]))
        limit = re.search(r"constant\((\d+)\)", _definition(test, compared[2]))
        starts = re.search(r" tuple\((.*?)\)", re.sub(r"/\*.*?\*/", "", _definition(self.computations[name], carry[1])))
        if place is None or limit is None or starts is None:
            return None
        first = _definition(self.computations[name], starts[1].split(", ")[int(place[1])])
        return int(limit[1]) if "constant(0)" in first else None


def _definition(lines: list[str], name: str) -> str:
    """The line that defines a name, or what it is a copy of; the empty string where none does."""
    line = next((line for line in lines if line.lstrip().removeprefix("ROOT ").startswith(f"{name} = ")), "")
    copied = re.search(r" copy\((\S+)\)", line)
    return _definition(lines, copied[1]) if copied else line


def _called(rest: str) -> list[str]:
    names = []
    for found in CALLED.finditer(rest):
        listed = re.match(r"\{([^}]*)\}|%?([\w.-]+)", rest[found.end() :])
        if listed:
            names += [name.strip().lstrip("%") for name in (listed[1] or listed[2]).split(",")]
    return names


def _size(kind: str, result: str, operation: str, rest: str, devices: int) -> tuple[float, int]:
    """The bytes of a collective's arrays, and how many devices take part in each of its groups."""
    n = _group(rest, devices)
    arrays = _split(result)
    if operation.endswith("-start") and kind == "all-gather":
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    if operation.endswith("-start") and kind == "collective-permute":
        arrays = arrays[:1]  # (operand, result, contexts)
    size = sum(map(_bytes, arrays))
    return size * n if kind == "reduce-scatter" else size, n


def _group(rest: str, devices: int) -> int:
    """How many devices there are in each group: `{{0,1},{2,3}}`, `[2,2]<=[4]` and `mesh['a'=2,'b'=2] {'a'}` have 2."""
    given = rest.partition("replica_groups=")[2]
    if not given or given.startswith("{}"):
        return devices
    listed, iota = re.match(r"\{\{([\d,]+)\}", given), re.match(r"\[(?:\d+,)*(\d+)\]<=", given)
    if listed or iota:
        return len(listed[1].split(",")) if listed else int(iota[1])  # type: ignore[index]
    axes = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", given)
    if axes is None:
        raise ValueError(f"replica_groups of an unknown form: {given[:100]}")
    sizes = dict(axis.split("=") for axis in axes[1].split(","))
    # Of a part of an axis, `'a':(1)2`, the last number is the size.
    return math.prod(int(axis.split(")")[1] if ":" in axis else sizes[axis]) for axis in axes[2].split(",") if axis)


def _split(shape: str) -> list[str]:
    return re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\]", shape)


def _bytes(shape: str) -> float:
    name, sizes = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()  # type: ignore[union-attr]
    bits = BITS[name] if name in BITS else int(re.search(r"\d+", name)[0])  # type: ignore[index]
    return math.prod(int(size) for size in sizes.split(",") if size) * bits / 8
