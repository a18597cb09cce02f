"""A call of attention as a value: its checked arguments as arrays (`Operands`) and
static `Options`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import Target
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.masks import Mask
from flax_mha._src.masks.base import axes_of
from flax_mha._src.masks.visible import Visible

DEFAULT_PRECISION = (None, "default", "bfloat16", lax.Precision.DEFAULT)


def may_mask(
    mask: Mask | None, bias: Array | None, score_mod: TracedFunction | None
) -> bool:
    """Returns whether a score may be masked: by the mask, by a bias of -inf, or by a
    `score_mod` that returns -inf.
    """
    return mask is not None or bias is not None or score_mod is not None


class _NoOffset(int):
    """The type of `NO_OFFSET`, the default offset: a 0 which means that the arrays hold
    whole sequences.

    If a caller passes an offset, even 0, the arrays may hold slices of longer
    sequences, to which lengths then refer.
    """


NO_OFFSET = _NoOffset(0)
ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
Axes = str | tuple[str, ...] | None  # the mesh axes that split one axis of an array
Strategy = Literal["ring", "ulysses", "allgather"]
Layout = Literal["contiguous", "zigzag"]


class Context(NamedTuple):
    """The arguments of `context_parallel`: the mesh axes that split sequence, batch and
    heads, and the strategy.
    """

    axis: str
    strategy: Strategy
    layout: Layout
    batch_axes: Axes
    head_axis: Axes
    mesh: Mesh | AbstractMesh | None

    def with_sharding(self, sharding: Any, rank: int) -> "Context":
        """Returns `self` with mesh, batch axes and head axis of the query's `sharding`;
        ValueError if the two disagree.

        `rank` is the query's number of axes. `sharding` is a PartitionSpec or
        NamedSharding, or None to add nothing.
        """
        if sharding is None or rank < 3:  # a query of rank < 3 is rejected later
            return self
        spec: PartitionSpec = getattr(sharding, "spec", sharding)
        mesh = getattr(sharding, "mesh", None)
        # A spec may leave out its last entries.
        entries = tuple(spec) + (None,) * (rank - len(spec))
        *batch, length, heads, size = entries
        first_batch_axis = batch[0] if batch else None
        both = self._replace(
            batch_axes=first_batch_axis or self.batch_axes,
            head_axis=heads or self.head_axis,
            mesh=mesh or self.mesh,
        )
        pairs = zip(both, self, strict=True)
        agrees = all(new == old for new, old in pairs if old is not None)
        splits_others = bool(size) or any(batch[1:])
        if not agrees or splits_others or length not in (None, self.axis):
            raise ValueError(
                "qkv_sharding and context_parallel must use the same mesh axes for the "
                f"first batch axis, the sequence and the heads, but got {spec} and "
                f"{tuple(self)}; specify them in only one of the two."
            )
        return both


Sharding = PartitionSpec | NamedSharding | Context


class IdsAndSeeds(NamedTuple):
    """Indices of batch entries and heads for `score_mod`, and random words for dropout;
    each None if not needed.
    """

    batch: Int[Array, "*B"] | None  # indices of the batch entries (flattened)
    head: Int[Array, " N"] | None  # indices of the query heads
    # Two random words for each head, or for all heads.
    dropout_seed: UInt32[Array, "*B N 2"] | None


class NonFinite(NamedTuple):
    """Flags from `guard.py`: infinity for each query or key that held NaN or infinity,
    else 0.

    A key is also flagged if its value held NaN or infinity.
    """

    query: Float[Array, "... T"]  # [B..., T, N]; in a `Head`, [T]
    key: Float[Array, "... S"]  # [B..., S, K]; in a `Head`, [S]


class Operands(NamedTuple):
    """The checked arrays of a call, in the caller's layout; None for each array that
    the call does not have.
    """

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Array | None
    sinks: Array | None
    mask: Visible | None
    captured: list[Array]  # arrays that `score_mod` captures and that get gradients
    constants: list[Array]  # all other arrays that `score_mod` captures
    offsets: Offsets  # positions of the first query and the first key
    scale: Array | None  # factor of query . key if it is an array, else None
    dropout_rng: Array | None
    # Of these heads, if the operands are a slice of a larger call.
    ids_and_seeds: IdsAndSeeds | None = None
    # Scales of keys and values in 8 bits; see `KVCache.scale`.
    cache_scale: Float[Array, "*B S K 2"] | None = None
    # Indices of the keys that each query attends to; -1 means no key, repeated indices
    # count once. None: all keys.
    key_indices: Int[Array, "*B T #K k"] | None = None
    # Made by `guard`; None before it, or if nothing is masked.
    nonfinite: NonFinite | None = None
    # The tiles to visit (`BlockMask`), if they are known before the call is computed.
    tiles: Any = None

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of queries T, and of keys S."""
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def groups(self) -> tuple[int, int]:
        """The number of key heads K, and the number of query heads that share a key
        head, G = N / K.
        """
        return self.key.shape[-2], self.query.shape[-2] // self.key.shape[-2]

    def axis_names(self) -> list[str]:
        """Lists the axis names of each array, such as "B T N H" (see `masks/base.py`),
        in pytree order.
        """
        named = [
            (self.query, "B T N H"),
            (self.key, "B S K H"),
            (self.value, "B S K H"),
            (self.bias, "B N T|1 S|1"),
            (self.sinks, "B N"),
            # A mask names the axes of its own arrays.
            *((axes, axes) for axes in axes_of(self.mask)),
            ((self.captured, self.constants), ""),
            (self.offsets, "B"),
            (self.scale, ""),
            (self.dropout_rng, ""),
            *zip(self.ids_and_seeds or (), ("B", "N", "B N words"), strict=False),
            (self.cache_scale, "B S K H"),
            (self.key_indices, "B T K k"),
        ]
        names: list[str] = []
        for tree, axes in named:
            names += [axes] * len(jax.tree.leaves(tree))
        return names


class Options(NamedTuple):
    """The static part of a call: hashable values that are known while tracing."""

    scale: float  # factor of query . key if it is a number, else 1
    soft_cap: float | None
    score_mod: TracedFunction | None
    dropout_rate: float
    broadcast_dropout: bool
    return_residual: bool
    precision: lax.PrecisionLike
    target: Target  # the devices that the call is compiled for
    # The caller's `qkv_sharding`, or the arguments of `context_parallel`.
    sharding: Sharding | None
    has_known_sizes: bool  # whether all sizes are numbers, not symbols of `jax.export`
    dtype: jnp.dtype  # of softmax and sums: float32, or float64 for float64 inputs
    cached: bool = False  # whether keys and values are a cache, which is read in place
    # Whether the cache is a ring; the key offset is then the position of the newest
    # key.
    ring: bool = False
    return_max_score: bool = False
    # `KVCache.value_size` of a cache in 8 bits, which is read in place.
    value_size: int | None = None


class Call(NamedTuple):
    """One call of attention: its operands and options."""

    operands: Operands
    options: Options


class LogSumExp(NamedTuple):
    """The log-sum-exp of each row's scores, the sum of two parts, m + log(l).

    They are kept apart, because their sum is rounded: at -1e9, a usual bias of masked
    scores, floats are 64 apart. All derivatives are those of `log_sum`.
    """

    maximum: Float[Array, "*L"]  # m: a score, the largest; a constant in derivatives
    log_sum: Float[Array, "*L"]  # log(l), where l is the sum of exp(score - m)

    @property
    def rounded(self) -> Float[Array, "*L"]:
        """The log-sum-exp as one number."""
        return self.maximum + self.log_sum

    def weights(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes the softmax's weights of these scores, exp(score - m) / l."""
        return jnp.exp((scores - self.maximum) - self.log_sum)


class Result(NamedTuple):
    """The result of a call: output, log-sum-exp and largest scores, in the caller's
    layout.
    """

    output: Float[Array, "*B T N Hv"]
    # The log-sum-exp of the scores, in two parts from engines, and one number once
    # `run` has returned it; None if a kernel does not return it.
    lse: LogSumExp | Float[Array, "*B T N"] | None
    # The largest visible score of each row, or of each head [B..., N] once `run` has
    # returned it; None unless `return_max_score` asks for it.
    largest: Float[Array, "*B T N"] | Float[Array, "*B N"] | None = None


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of softmax and sums for inputs of `dtype`: float64 for float64,
    otherwise float32.
    """
    if dtype == jnp.float64:
        return jnp.dtype("float64")
    return jnp.dtype("float32")
