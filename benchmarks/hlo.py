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

# Bytes of a number of each type: s8, u32, f64, ...
SIZES = {"pred": 1, "bf16": 2, "f16": 2}
for bits in (8, 16, 32, 64):
    SIZES |= {f"{kind}{bits}": bits // 8 for kind in "sufc"}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
)
# Instructions that launch nothing and move nothing.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "iota",
    "add-dependency",
}
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
        keys = [
            "calls",
            "body",
            "true_computation",
            "false_computation",
            "branch_computations",
            "called_computations",
        ]
        # The to_apply of a reduction is applied element by element.
        if self.opcode in ("call", "async-start"):
            keys.append("to_apply")
        # One name, or several in braces.
        values = rf"(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%[\w.\-]+)"
        names: list[str] = []
        for value in re.findall(values, self.attributes):
            names += re.findall(r"%[\w.\-]+", value)
        return list(dict.fromkeys(names))

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
        collectives = dict(self.collectives)
        for name, number in other.collectives.items():
            collectives[name] = collectives.get(name, 0) + times * number
        return Costs(
            attention=self.attention + times * other.attention,
            others=self.others + times * other.others,
            traffic=self.traffic + times * other.traffic,
            step=max(self.step, other.step),
            is_exact=self.is_exact and other.is_exact,
            collectives=collectives,
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
            head = re.match(r"(ENTRY )?(%[\w.\-]+) .*\{$", line)
            if head:
                current = self.computations.setdefault(head[2], [])
                if head[1]:
                    self.entry = head[2]
                continue
            body = re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)", line)
            if body:
                current.append(_instruction(body[1], body[2]))

    def costs(self, computation: str | None = None) -> Costs:
        """Of one computation and all that it runs; None means the whole program."""
        instructions = self.computations[computation or self.entry]
        results = {instruction.name: instruction.result for instruction in instructions}
        # Loops of unknown length share the trips that the caller knows.
        unknown = sum(i.opcode == "while" and _trips(i) is None for i in instructions)
        share = None
        if self.trips is not None and unknown:
            share = self.trips / unknown
        total = Costs()
        for instruction in instructions:
            total = total.plus(self._costs_of(instruction, results, share))
        return total

    def _costs_of(
        self, instruction: Instruction, results: dict[str, str], share: float | None
    ) -> Costs:
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(ALSO_FREE):
            return Costs()
        if NO_KERNEL.search(instruction.attributes):
            return Costs()
        # "all-reduce-start" is an "all-reduce".
        for name in COLLECTIVES:
            if opcode.startswith(name):
                return Costs(collectives={name: 1})
        if instruction.is_attention:
            return Costs(attention=1)
        if opcode == "while":
            trips = _trips(instruction) or share
            body = self.costs(instruction.called[0])
            # Of nested loops, the innermost gives the step.
            body = body._replace(
                step=body.step or body.traffic,
                is_exact=body.is_exact and trips is not None,
            )
            return Costs().plus(body, trips or 1)
        if opcode == "conditional":
            branches = [self.costs(name) for name in instruction.called]
            return min(branches, key=lambda costs: (not costs.is_exact, costs.traffic))
        if opcode in ("call", "async-start") and instruction.called:
            return self.costs(instruction.called[0])
        return Costs(others=1, traffic=self._traffic(instruction, results))

    def _traffic(self, instruction: Instruction, results: dict[str, str]) -> float:
        inside: list[Instruction] = []
        if instruction.opcode == "fusion":
            inside = self.computations[instruction.called[0]]
        if not inside:
            return _bytes_of(instruction, results)
        # Parameters are numbered, but listed in any order.
        parameters = [i for i in inside if i.opcode == "parameter"]
        parameters.sort(key=lambda i: int(i.attributes))
        read = 0.0
        for name, own in zip(instruction.operands, parameters, strict=True):
            if _in_main_memory(results[name]):
                read += min(size_of(results[name]), _bytes_read(own, inside))
        return read + _bytes_written(instruction, inside)


def _instruction(name: str, text: str) -> Instruction:
    # The line is: name = result opcode(operands), attributes. A tuple's shape is in
    # parentheses.
    end = _closing(text, 0) if text[0] == "(" else text.index(" ")
    result = text[:end].strip()
    rest = text[end:].strip()
    opening = rest.index("(")
    opcode = rest[:opening]
    end = _closing(rest, opening)
    inner = rest[opening + 1 : end - 1]
    # In the parentheses of a parameter is its number.
    attributes = inner if opcode == "parameter" else rest[end:]
    return Instruction(
        name=name,
        result=result,
        opcode=opcode,
        operands=re.findall(r"%[\w.\-]+", inner),
        attributes=attributes,
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
    arrays = [array for array in ARRAY.finditer(shape) if _in_main_memory(array[0])]
    return sum(map(_size, arrays))


def _size(array: re.Match) -> int:
    lengths = [int(n) for n in array[2].split(",") if n]
    return SIZES.get(array[1], 0) * math.prod(lengths)


def _in_main_memory(shape: str) -> bool:
    # A layout such as {1,0:S(1)} names another memory space.
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
    sizes = [size_of(results[name]) for name in instruction.operands]
    written = size_of(instruction.result)
    # Reads what it writes.
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * min(written, sizes[0])
    # Reads the update, and writes it in place.
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    return sum(sizes) + written


def _bytes_read(parameter: Instruction, inside: list[Instruction]) -> float:
    """What a fusion reads of one parameter."""
    total = 0.0
    users = [i for i in inside if parameter.name in i.operands]
    for user in users:
        if user.opcode == "bitcast":
            total += _bytes_read(user, inside)
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += size_of(user.result)
            continue
        # What is updated in place is not read; all others read everything.
        is_updated = parameter.name not in user.operands[1:]
        if user.opcode != "dynamic-update-slice" or not is_updated:
            return math.inf
    return total


def _bytes_written(fusion: Instruction, inside: list[Instruction]) -> float:
    """What a fusion writes: of what is updated in place, the update."""
    results = {i.name: i for i in inside}
    root = inside[-1]
    parts = [root]
    if root.opcode == "tuple":
        parts = [results[name] for name in root.operands]
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
