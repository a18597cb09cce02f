"""What `describe` returns as `process_heads`: values that compare equal, can be
pickled, and are called with heads.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha._src.core.validation import is_finite

MAX_FACTOR = 1e30  # float32 holds its square root and its inverse


@dataclasses.dataclass(frozen=True)
class ClipHeads:
    """Clips queries, keys and values to [-limit, limit], in their own dtype (DBRX, MPT,
    OLMo, OLMoE).

    Pass it to a module as `process_heads`, or as `process_heads` of a call.

    Args:
      limit: A finite number > 0, at most 1e30.

    Raises:
      ValueError: If `limit` is another value.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha.convert import ClipHeads
      >>> query, key, value = ClipHeads(8.0)(*jnp.full((3, 1, 5, 2, 4), -9.0))
      >>> float(query.min()), float(value.min())
      (-8.0, -8.0)
      >>> ClipHeads(8.0) == ClipHeads(8)
      True
    """

    limit: float

    def __post_init__(self) -> None:
        number = _positive("limit", self.limit)
        object.__setattr__(self, "limit", number)

    def __call__(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B T K H"],
        value: Float[Array, "*B T K Hv"],
    ) -> tuple[
        Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K Hv"]
    ]:
        """Returns the clipped arrays; NaN stays NaN."""
        return self._clip(query), self._clip(key), self._clip(value)

    def _clip(self, x: Array) -> Array:
        return jnp.clip(x, -self.limit, self.limit)


@dataclasses.dataclass(frozen=True)
class ScaleValues:
    """Multiplies values by a factor, in their own dtype (MiMo-V2); queries and keys
    stay.

    Pass it to a module as `process_heads`, or as `process_heads` of a call.

    Args:
      factor: A finite number > 0, at most 1e30.

    Raises:
      ValueError: If `factor` is another value.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha.convert import ScaleValues
      >>> query, key, value = ScaleValues(0.5)(*jnp.ones((3, 1, 5, 2, 4)))
      >>> float(key.max()), float(value.max())
      (1.0, 0.5)
    """

    factor: float

    def __post_init__(self) -> None:
        number = _positive("factor", self.factor)
        object.__setattr__(self, "factor", number)

    def __call__(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B T K H"],
        value: Float[Array, "*B T K Hv"],
    ) -> tuple[
        Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K Hv"]
    ]:
        """Returns queries, keys and the scaled values."""
        return query, key, value * self.factor


def _positive(name: str, number: object) -> float:
    """Checks that a number is finite and > 0; returns it as a Python float, so that
    multiplying by it keeps the dtype of arrays.
    """
    if not is_finite(number) or not 0 < number <= MAX_FACTOR:
        raise ValueError(
            f"{name} must be a finite number > 0, at most {MAX_FACTOR:g}, but got "
            f"{number!r}."
        )
    return float(number)
