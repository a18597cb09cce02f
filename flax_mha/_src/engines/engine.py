"""`Engine`: the interface of an implementation of attention. `run.py` lists the
engines.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_mha._src.call.call import Call, Result
from flax_mha._src.plan import Plan


@dataclasses.dataclass(frozen=True)
class Engine:
    """An implementation of attention.

    Attributes:
      name: The value of the argument `implementation` that selects this engine.
      platform: The only platform that it runs on, "gpu" or "tpu". None if it runs
        everywhere; then it has derivatives of every order. For other engines,
        `kernels/derivatives.py` adds the derivatives that they lack.
      guard_first: Whether `guard.guard` makes keys and values finite first; if False,
        `forward` guards by itself.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None
    guard_first: ClassVar[bool] = True

    def supports(self, call: Call) -> list[str]:
        """Lists the reasons why this engine cannot compute a call, each with a remedy;
        empty if it can.

        This default is right for engines that only need known sizes, and that attend to
        all keys.
        """
        reasons = []
        if not call.has_known_sizes:
            reasons.append(
                "it needs static shapes, but some dimensions are symbolic: export with "
                "static shapes"
            )
        if call.key_indices is not None:
            reasons.append(
                'key_indices is not supported: pass implementation=None or "xla"'
            )
        return reasons

    def doubts(self, call: Call) -> list[str]:
        """Lists the reasons why `implementation=None` should not choose this engine for
        a call that it supports, each with a remedy.
        """
        return []

    def variant(self, call: Call) -> str | None:
        """Says in words how this engine computes a call; None if there is one way."""
        if self.platform is None:
            return self.plan(call)[0].variant
        return None

    def supports_hop(self, call: Call) -> list[str]:
        """Lists the reasons why a hop of strategy="ring" is not supported: attention
        over one device's keys, which needs `share`.
        """
        return [
            'it cannot differentiate a single hop of strategy="ring": pass '
            'implementation="blockwise" or None, or strategy="ulysses" or "allgather"'
        ]

    def plan(self, call: Call) -> tuple[Plan, Call]:
        """Decides how to compute a call; also returns the call, perhaps with more
        arrays, such as the tiles to visit.

        The default plan multiplies matrices in the query's dtype.
        """
        return Plan(call.query.dtype, self.guard_first), call

    def forward(self, plan: Plan, call: Call) -> Result:
        """Computes a call that `guard.guard` returned; the log-sum-exp may be None
        unless `return_residual` is True.
        """
        raise NotImplementedError

    def share(self, plan: Plan, call: Call, result: Result) -> Result:
        """Returns `result` with the call's *share* as its derivative: the part that
        comes from this call's keys.

        `result` holds output and log-sum-exp over the keys of all devices in a ring.
        The ring adds up the shares of its hops.
        """
        raise NotImplementedError


def reasons_against_dtype(dtypes: Sequence[DTypeLike], dtype: jnp.dtype) -> list[str]:
    """Returns [a reason] if the inputs' `dtype` is not among the `dtypes` that a kernel
    supports, otherwise [].
    """
    if dtype in dtypes:
        return []
    known = " and ".join(jnp.dtype(x).name for x in dtypes)
    remedy = "pass dtype=jnp.bfloat16 to the module, or cast query, key and value"
    return [f"it supports only {known}, but the inputs are {dtype}: {remedy}"]


EMPTY = "an axis has length 0: pass non-empty arrays, or skip the call"


def reason_against_platform(platform: str, devices: str, here: str) -> str:
    """Returns why a kernel that needs `devices`, such as "TPUs", cannot run on the
    device `here`.

    The text suggests `explain_implementation` with `platform`, such as "tpu", which
    works on any device.
    """
    remedy = f'run it there, or explain it with platform="{platform}"'
    return f"it runs only on {devices}, but this call runs on {here}: {remedy}"
