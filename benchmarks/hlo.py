"""Reads kernels, memory traffic and collectives from the text (HLO) of a compiled
program.

Nothing has to run for that. Traffic is what instructions read and write in the device's
main memory, from the shapes of their operands and results: of an operand that is only
sliced, the slices; of an array that is updated in place, the update; nothing of what
stays on chip. A loop counts as often as it runs, or once where that is not known.

Of a conditional the branch counts that moves least, of those without a loop of unknown
length if there are any. Ours take the other one only where something is NaN, infinite
or very large.
"""

import math
import re
from typing import NamedTuple

SIZES = {"pred": 1, "bf16": 2, "f16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "sufc" for bits in (8, 16, 32, 64)
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
)
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "iota", "add-dependency",
}  # fmt: skip
ALSO_FREE = ("-done", "-update")  # the second half of what is counted where it starts
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
NO_KERNEL = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|Sharding)"')
ATTENTION = re.compile(r"cudnn\$fmha|splash|flash_attention|tpu_custom_call")


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
      name: With its percent sign.
      result: Its shape, as text.
      opcode: What it does.
      operands: Names of the instructions that it reads.
      attributes: The rest of the line.
    """

    name: str
    result: str
    opcode: str
    operands: list[str]
    attributes: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs, without those that are applied
        element by element.
        """
        names = r"(?:calls|body|true_computation|false_computation|branch_computations|called_computations)"
        groups = re.findall(names + r"=(?:\{([^}]*)\}|(%[\w.\-]+))", self.attributes)
        if self.opcode in ("call", "async-start"):
            groups += re.findall(
                r"(?:to_apply|calls)=(?:\{([^}]*)\}|(%[\w.\-]+))", self.attributes
            )
        return list(
            dict.fromkeys(
                name
                for pair in groups
                for name in re.findall(r"%[\w.\-]+", "".join(pair))
            )
        )

    @property
    def is_attention(self) -> bool:
        """Whether this is a fused attention kernel."""
        return self.opcode == "custom-call" and bool(ATTENTION.search(self.attributes))


class Costs(NamedTuple):
    """What a program does.

    Attributes:
      attention: Launches of fused attention kernels.
      others: Launches of all other kernels.
      traffic: Bytes that the others read and write.
      step: Of these, bytes that one step of an innermost loop moves, the largest; 0 if
        there is no loop.
      is_exact: Whether the trips of all loops are known.
      collectives: How often each collective runs.
    """

    attention: float = 0
    others: float = 0
    traffic: float = 0
    step: float = 0
    is_exact: bool = True
    collectives: dict[str, float] = {}  # noqa: RUF012  # never changed

    def plus(self, other: "Costs", times: float = 1) -> "Costs":
        """The sum, with the other taken so many times."""
        names = [*self.collectives, *other.collectives]
        added = {
            name: self.collectives.get(name, 0) + times * other.collectives.get(name, 0)
            for name in names
        }
        numbers = (a + times * b for a, b in zip(self[:3], other[:3], strict=True))
        return Costs(
            *numbers,
            max(self.step, other.step),
            self.is_exact and other.is_exact,
            added,
        )


class Program:
    """A program, by computation.

    Args:
      text: What `compiled.as_text()` says.
      trips: How often loops run of which the compiler does not tell it, together those
        that follow one another in one computation; None counts them once, and says so.
    """

    def __init__(self, text: str, trips: float | None = None):
        self.trips = trips
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?(%[\w.\-]+) .*\{$", line):
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif body := re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)", line):
                current.append(_instruction(body[1], body[2]))

    def costs(self, computation: str | None = None) -> Costs:
        """Of one computation and all that it runs; None means the whole program."""
        instructions = self.computations[computation or self.entry]
        results = {instruction.name: instruction.result for instruction in instructions}
        unknown = sum(i.opcode == "while" and _trips(i) is None for i in instructions)
        share = self.trips / unknown if self.trips is not None and unknown else None
        total = Costs()
        for instruction in instructions:
            total = total.plus(self._costs_of(instruction, results, share))
        return total

    def _costs_of(
        self, instruction: Instruction, results: dict[str, str], share: float | None
    ) -> Costs:
        opcode = instruction.opcode
        if (
            opcode in FREE
            or opcode.endswith(ALSO_FREE)
            or NO_KERNEL.search(instruction.attributes)
        ):
            return Costs()
        name = next((name for name in COLLECTIVES if opcode.startswith(name)), None)
        if name is not None:
            return Costs(collectives={name: 1})
        if instruction.is_attention:
            return Costs(attention=1)
        if opcode == "while":
            trips = _trips(instruction) or share
            body = self.costs(instruction.called[0])
            body = body._replace(
                step=body.step or body.traffic,
                is_exact=body.is_exact and trips is not None,
            )
            return Costs().plus(body, trips or 1)
        if opcode == "conditional":
            return min(
                map(self.costs, instruction.called),
                key=lambda costs: (not costs.is_exact, costs.traffic),
            )
        if opcode in ("call", "async-start") and instruction.called:
            return self.costs(instruction.called[0])
        return Costs(others=1, traffic=self._traffic(instruction, results))

    def _traffic(self, instruction: Instruction, results: dict[str, str]) -> float:
        if instruction.opcode == "fusion":
            inside = self.computations[instruction.called[0]]
        else:
            inside = []
        if not inside:
            return _bytes_of(instruction, results)
        parameters = [i for i in inside if i.opcode == "parameter"]
        parameters.sort(key=lambda i: int(i.attributes))
        read = sum(
            min(size_of(results[name]), _bytes_read(own, inside))
            for name, own in zip(instruction.operands, parameters, strict=True)
            if _in_main_memory(results[name])
        )
        return read + _bytes_written(instruction, inside)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text[0] == "(" else text.index(" ")
    result = text[:end].strip()
    rest = text[end:].strip()
    opening = rest.index("(")
    end = _closing(rest, opening)
    inner = rest[opening + 1 : end - 1]
    attributes = inner if rest[:opening] == "parameter" else rest[end:]
    return Instruction(
        name, result, rest[:opening], re.findall(r"%[\w.\-]+", inner), attributes
    )


def _closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"text must close its parenthesis, but got {text[:100]!r}.")


def size_of(shape: str) -> int:
    """Bytes of all its arrays in main memory."""
    return sum(
        _size(array) for array in ARRAY.finditer(shape) if _in_main_memory(array[0])
    )


def _size(array: re.Match) -> int:
    return SIZES.get(array[1], 0) * math.prod(int(n) for n in array[2].split(",") if n)


def _in_main_memory(shape: str) -> bool:
    return not re.search(r"S\([1-9]\)", shape)


def _bytes_of(instruction: Instruction, results: dict[str, str]) -> float:
    """Of an instruction that stands alone."""
    # Its result: two arrays, of which one is the operand, and a context.
    if instruction.opcode == "copy-start":
        return size_of(instruction.result)
    # Its result: the operand, the slice and a context.
    if instruction.opcode == "slice-start":
        _, part, *_ = ARRAY.finditer(instruction.result)
        return _size(part) + size_of(part[0])
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * min(
            size_of(instruction.result),
            *(size_of(results[name]) for name in instruction.operands[:1]),
        )
    if instruction.opcode == "dynamic-update-slice":
        return 2 * size_of(results[instruction.operands[1]])
    return sum(size_of(results[name]) for name in instruction.operands) + size_of(
        instruction.result
    )


def _bytes_read(parameter: Instruction, inside: list[Instruction]) -> float:
    """What a fusion reads of one parameter."""
    total = 0.0
    for user in (i for i in inside if parameter.name in i.operands):
        if user.opcode == "bitcast":
            total += _bytes_read(user, inside)
        elif user.opcode in ("dynamic-slice", "slice", "gather"):
            total += size_of(user.result)
        elif (
            user.opcode != "dynamic-update-slice" or parameter.name in user.operands[1:]
        ):
            return math.inf
    return total


def _bytes_written(fusion: Instruction, inside: list[Instruction]) -> float:
    """What a fusion writes: of what is updated in place, the update."""
    results = {i.name: i for i in inside}
    root = inside[-1]
    if root.opcode == "tuple":
        parts = [results[name] for name in root.operands]
    else:
        parts = [root]
    written = size_of(fusion.result)
    for part in parts:
        while part.opcode == "bitcast":
            part = results[part.operands[0]]
        if part.opcode == "dynamic-update-slice" and _in_main_memory(fusion.result):
            written -= size_of(part.result) - size_of(results[part.operands[1]].result)
    return max(written, 0)


def _trips(loop: Instruction) -> int | None:
    known = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    return None
