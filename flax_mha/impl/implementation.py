"""The class of implementations: one object each, registered in `registry.py`."""

import dataclasses
from collections.abc import Callable

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flax_mha.call.operands import Call, Output, OutputAndLse


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a call, or several under one name.

    Attributes:
      name: What users call it.
      attention: Computes a call that it does not refuse.
      refusals: Every reason why it cannot compute a call; None if it computes every one.
      hop: `hop(call, result, dtype)`: attention over some of the keys, inputs in float32 at least, which may be rounded
        to `dtype` for matrix products. Given the result over all keys, output and log-sum-exp, it returns that, and its
        gradients are what these keys contribute. None if it has no such thing.
      variant: Says in which of several ways it computes a call; None if it has one.
    """

    name: str
    attention: Callable[[Call], Output]
    refusals: Callable[[Call], list[str]] | None = None
    hop: Callable[..., OutputAndLse] | None = None
    variant: Callable[[Call], str] | None = None


# What gradients need besides the inputs, output and log-sum-exp: names for the policies of `jax.checkpoint`. `dense.py`
# also needs the products of queries and keys, "attention_scores".
RESIDUALS = ("attention_output", "attention_lse")


def name_residuals(
    output: Float[Array, "..."], lse: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Names the two by `RESIDUALS`."""
    return checkpoint_name(output, RESIDUALS[0]), checkpoint_name(lse, RESIDUALS[1])
