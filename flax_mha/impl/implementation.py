"""The class of implementations: one object each, registered in `registry.py`."""

import dataclasses
from collections.abc import Callable

from flax_mha.call.operands import Call, Output, OutputAndLse


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a call.

    Attributes:
      name: What users call it.
      attention: Computes a call that it does not refuse.
      refusals: Every reason why it cannot compute a call; None if it computes every one.
      hop: `hop(call, result, dtype)`: attention over some of the keys, inputs in float32 at least, which may be rounded
        to `dtype` for matrix products. Given the result over all keys, output and log-sum-exp, it returns that, and its
        gradients are what these keys contribute. None if it has no such thing.
      variant: Which of several ways of its own computes a call, in words; None if there is one.
    """

    name: str
    attention: Callable[[Call], Output]
    refusals: Callable[[Call], list[str]] | None = None
    hop: Callable[..., OutputAndLse] | None = None
    variant: Callable[[Call], str] | None = None
