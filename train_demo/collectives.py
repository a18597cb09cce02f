"""Counts what a compiled program sends between devices, with the trips of the loops around each collective."""

import math
import re
from collections import Counter
from typing import NamedTuple

# What a device sends of the n devices' bytes, in the usual ring algorithms.
SENT = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.-]+))")


class Counts(NamedTuple):
    """What a program sends, by the kind of collective.

    Attributes:
      calls: How often it is called; a loop counts once where the compiler does not know its number of trips.
      size: Bytes of its arrays, all calls together: of the whole array for all-gather and reduce-scatter, of what a
        device holds for the others.
      sent: Bytes that a device sends.
    """

    calls: Counter[str]
    size: Counter[str]
    sent: Counter[str]


def count(hlo: str, devices: int) -> Counts:
    """Counts the collectives of a compiled program, of branches those of the one that sends most."""
    computations: dict[str, list[tuple[str, ...]]] = {}
    entry = ""
    for line in hlo.splitlines():
        if start := COMPUTATION.match(line):
            current = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif found := INSTRUCTION.match(line):
            current.append(found.groups())
    return _count(computations, entry, devices)


def _count(computations: dict[str, list[tuple[str, ...]]], name: str, devices: int) -> Counts:
    total = Counts(Counter(), Counter(), Counter())
    for result, operation, rest in computations[name]:
        kind = operation.removesuffix("-start")
        if kind in SENT:
            n = _group(rest, devices)
            size = _bytes(result, operation) * (n if kind == "reduce-scatter" else 1)
            total.calls[kind] += 1
            total.size[kind] += size
            total.sent[kind] += size if kind == "collective-permute" else round(size * SENT[kind] * (n - 1) / n)
            continue
        names = [name.strip("% ") for found in CALLED.findall(rest) for name in "".join(found).split(",")]
        inner = [_count(computations, name, devices) for name in names]
        if operation == "conditional":
            inner = [max(inner, key=lambda counts: counts.sent.total())]
        known = re.search(r"known_trip_count[^\d]*(\d+)", rest) if operation == "while" else None
        for counts in inner:
            for sums, numbers in zip(total, counts, strict=True):
                sums.update({kind: number * int(known[1] if known else 1) for kind, number in numbers.items()})
    return total


def _bytes(result: str, operation: str) -> int:
    arrays = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", result)
    if operation == "all-gather-start":
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    if operation == "collective-permute-start":
        arrays = arrays[:1]  # (operand, result, contexts)
    bits = [8 if name == "pred" else int(re.findall(r"\d+", name)[0]) for name, _ in arrays]
    numbers = [math.prod(int(size) for size in sizes.split(",") if size) for _, sizes in arrays]
    return sum(a * b for a, b in zip(bits, numbers, strict=True)) // 8


def _group(rest: str, devices: int) -> int:
    """Reads how many devices a group has: `{{0,1},{2,3}}`, `[2,2]<=[4]` and `mesh['a'=2,'b'=2] {'a'}` have 2."""
    given = rest.partition("replica_groups=")[2]
    if not given or given.startswith("{}"):
        return devices
    if listed := re.match(r"\{\{([\d,]+)\}", given):
        return len(listed[1].split(","))
    if iota := re.match(r"\[(?:\d+,)*(\d+)\]<=", given):
        return int(iota[1])
    axes = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", given)
    if axes is None:
        raise ValueError(f"replica_groups of an unknown form: {given[:100]}")
    sizes = dict(axis.split("=") for axis in axes[1].split(","))
    # Of a part of an axis, `'a':(1)2`, the last number is the size.
    return math.prod(int(axis.split(")")[1] if ":" in axis else sizes[axis]) for axis in axes[2].split(",") if axis)
