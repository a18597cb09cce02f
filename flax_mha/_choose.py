"""Which implementation computes a call: what each refuses, and which is fastest."""

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from jaxtyping import Array, Float

from flax_mha._call import Call, platform
from flax_mha._impl import portable

Implementation = Literal["xla", "blockwise", "cudnn", "splash"]
NAMES: tuple[str, ...] = get_args(Implementation)
Output = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"] | None]

# Up to this many scores a head, T * S, all of them at once are about as fast as tiles, and sooner compiled.
DENSE_SCORES = 256 * 256


class Explanation(NamedTuple):
    """What `explain_implementation` answers; `print` shows it as a table.

    Attributes:
      chosen: The implementation that `implementation=None` runs.
      refusals: For each implementation the reasons why it cannot run; none where it can.
    """

    chosen: str
    refusals: dict[str, list[str]]

    def __str__(self) -> str:
        """A line for each implementation, and one for each further reason."""
        lines = []
        for name, reasons in self.refusals.items():
            verdict = "chosen" if name == self.chosen else "would run"
            lines.append(f"{name:<9}  {'no: ' + reasons[0] if reasons else verdict}")
            lines += [f"{'':<9}      {reason}" for reason in reasons[1:]]
        return "\n".join(lines)


class _Candidate(NamedTuple):
    refusals: Callable[[Call], list[str]]
    attend: Callable[[Call], Output]


def _candidate(name: str) -> _Candidate:
    """Accelerators' files are imported when they are asked for, not before: Pallas takes its time."""
    if name in ("cudnn", "splash"):
        module: Any = importlib.import_module(f"flax_mha._impl.{name}")
        return _Candidate(module.refusals, module.attend)
    return _Candidate(lambda call: [], portable.attend_whole if name == "xla" else portable.attend_in_tiles)


def _fastest_first(call: Call) -> list[str]:
    """What to try, by static shapes and platform alone; the last one always runs."""
    queries, keys = call.operands.lengths
    fused = {"gpu": ["cudnn"], "tpu": ["splash"]}.get(platform(), [])
    if queries == 1:
        return ["xla"]  # a vector times a matrix: nothing to fuse
    return [*fused, "xla" if queries * keys <= DENSE_SCORES else "blockwise"]


def chosen(call: Call) -> str:
    """The fastest of those with the same result."""
    return next(name for name in _fastest_first(call) if not _candidate(name).refusals(call))


def attend(call: Call, implementation: str | None) -> Output:
    """Runs what is named, or what is chosen.

    Raises:
      ValueError: If there is no such implementation.
      NotImplementedError: If the named one cannot compute this call.
    """
    if implementation is None:
        return _candidate(chosen(call)).attend(call)
    if implementation not in NAMES:
        known = ", ".join(f'"{name}"' for name in NAMES)
        raise ValueError(f"implementation must be {known} or None, but got {implementation!r}.")
    candidate = _candidate(implementation)
    if reasons := candidate.refusals(call):
        raise NotImplementedError(
            f'implementation="{implementation}" cannot compute this: {"; ".join(reasons)}. Use None to choose.'
        )
    return candidate.attend(call)


def explain(call: Call) -> Explanation:
    """The whole table."""
    return Explanation(chosen(call), {name: _candidate(name).refusals(call) for name in NAMES})
