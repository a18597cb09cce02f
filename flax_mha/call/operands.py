"""One call: its arguments checked once, and put into the form that every implementation takes."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from flax_mha.core.tile import Offsets
from flax_mha.core.tracing import Target
from flax_mha.core.user_function import TracedFunction
from flax_mha.masks import Mask

DEFAULT_PRECISION = (None, "default", "bfloat16", lax.Precision.DEFAULT)

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
# Output, and log-sum-exp; None where a kernel keeps that to itself. With `return_max_score` also the largest score of
# each row, of which `distributed/dispatch.py` makes that of each head.
Output = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"] | None, *tuple[Float[Array, "*B T N"], ...]]
OutputAndLse = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"], *tuple[Float[Array, "*B T N"], ...]]

Axes = str | tuple[str, ...] | None  # the mesh axes that split one axis of an array
Strategy = Literal["ring", "ulysses", "allgather"]
Layout = Literal["contiguous", "zigzag"]


class Context(NamedTuple):
    """The arguments of `context_parallel`."""

    axis: str
    strategy: Strategy
    layout: Layout
    batch_axes: Axes
    head_axis: Axes
    mesh: Mesh | AbstractMesh | None

    def with_sharding(self, sharding: Any, rank: int) -> "Context":
        """Adds the batch axes, heads and mesh of a sharding of the query, which has this rank.

        Raises:
          ValueError: If the two contradict each other.
        """
        if sharding is None or rank < 3:  # such a query is refused later
            return self
        spec: PartitionSpec = getattr(sharding, "spec", sharding)
        *batch, length, heads, size = tuple(spec) + (None,) * (rank - len(spec))
        both = self._replace(
            batch_axes=(batch[0] if batch else None) or self.batch_axes,
            head_axis=heads or self.head_axis,
            mesh=getattr(sharding, "mesh", None) or self.mesh,
        )
        agrees = all(new == old for new, old in zip(both, self, strict=True) if old is not None)
        if not agrees or size or any(batch[1:]) or length not in (None, self.axis):
            raise ValueError(
                f"qkv_sharding and context_parallel must agree on the mesh axes of the first batch axis, the sequence "
                f"and the heads, but got {spec} and {tuple(self)}; say it once."
            )
        return both


Sharding = PartitionSpec | NamedSharding | Context


class HeadIds(NamedTuple):
    """Indices and random words by batch entry and head; None where the call does not use them.

    Attributes:
      batch: Indices of the batch entries, counted through all batch axes; for `score_mod`.
      head: Indices of the query heads; for `score_mod`.
      dropout_seed: Two random words for each head, or for all of them.
    """

    batch: Int[Array, "*B"] | None
    head: Int[Array, " N"] | None
    dropout_seed: UInt32[Array, "*B N 2"] | None


class Operands(NamedTuple):
    """The arrays of a call, checked, in the caller's layout; None where there is none.

    Attributes:
      captured: The arrays that the `score_mod` captures and that get gradients.
      constants: The other arrays that it captures, and the floats in it.
      offsets: Positions of the first query and the first key.
      scale: What multiplies query . key, where that is an array.
      head_ids: What depends on the index of batch entry and head, where this is a slice of a larger call.
      cache_scale: What vectors of keys and values in 8 bits are multiplied by; see `KVCache.scale`.
    """

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Array | None
    sinks: Array | None
    mask: Mask | None
    captured: list[Array]
    constants: list[Array]
    offsets: Offsets
    scale: Array | None
    dropout_rng: Array | None
    head_ids: "HeadIds | None" = None
    cache_scale: Float[Array, "*B S K _"] | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def groups(self) -> tuple[int, int]:
        """K, and G = N / K."""
        return self.key.shape[-2], self.query.shape[-2] // self.key.shape[-2]

    def axis_names(self) -> list[str]:
        """Lists the names of the axes of each array, as in `masks/base.py`, in the order of `jax.tree.leaves`."""
        mask: Any = None if self.mask is None else self.mask.map_arrays(_axes)
        named = [
            (self.query, "B T N H"),
            (self.key, "B S K H"),
            (self.value, "B S K H"),
            (self.bias, "B N T|1 S|1"),
            (self.sinks, "B N"),
            *((axes, axes) for axes in jax.tree.leaves(mask)),
            ((self.captured, self.constants), ""),
            (self.offsets, "B"),
            (self.scale, ""),
            (self.dropout_rng, ""),
            *zip(self.head_ids or (), ("B", "N", "B N words"), strict=False),
            (self.cache_scale, "B S K H"),
        ]
        return [axes for tree, axes in named for _ in jax.tree.leaves(tree)]


def _axes(x: Any, axes: str) -> Any:
    return axes


class Options(NamedTuple):
    """The static (hashable) part of a call.

    Attributes:
      scale: What multiplies query . key, where that is a number; else 1.
      cached: Whether keys and values are a cache, which is read in place.
      dtype: Of softmax and sums: float32, or float64 for such inputs.
      ring: Whether the keys form a ring (`core.tile.Tile`); the key's offset is then the position of the newest one.
      score_mod: The traced function.
      target: What the call is compiled for.
      has_known_sizes: Whether all sizes are numbers; `jax.export` knows sizes that are symbols.
      sharding: How the caller says that a mesh splits the query, or None.
    """

    scale: float
    soft_cap: float | None
    score_mod: TracedFunction | None
    dropout_rate: float
    broadcast_dropout: bool
    return_residual: bool
    precision: lax.PrecisionLike
    target: Target
    sharding: Sharding | None
    has_known_sizes: bool
    dtype: jnp.dtype
    cached: bool = False
    ring: bool = False
    return_max_score: bool = False


class Call(NamedTuple):
    """One call of attention: its operands and options."""

    operands: Operands
    options: Options


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """In what softmax and sums are computed: float32, or float64 for such inputs."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")
