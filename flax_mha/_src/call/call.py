"""`Call`: a call of attention as a value, with its checked arguments as fields, arrays
and static values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from flax_mha._src.core.fields import WithAxes, static, with_axes
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import Target
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.masks import Mask
from flax_mha._src.masks.visible import Visible

DEFAULT_PRECISION = (None, "default", "bfloat16", lax.Precision.DEFAULT)


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


class NonFinite(NamedTuple):
    """Flags from `guard.py`: infinity for each query or key that held NaN or infinity,
    else 0.

    A key is also flagged if its value held NaN or infinity.
    """

    query: Float[Array, "... T"]  # [B..., T, N]; in a `Head`, [T]
    key: Float[Array, "... S"]  # [B..., S, K]; in a `Head`, [S]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreFields(WithAxes):
    """The fields of a call that say how products of queries and keys become scores, and
    scores become weights.

    In a `Call`, arrays are in the caller's layout. A `ScoreRule` has these fields in
    the layout of one head, and the formulas.
    """

    mask: Mask | None = None
    # Positions of the first query and the first key.
    offsets: Offsets = with_axes("B", default=Offsets())
    # Two random words for each head, or for all heads; None without dropout. A slice of
    # a larger call gets these and the indices below from that call; otherwise
    # `with_indices` makes them.
    dropout_seed: UInt32[Array, "*B N 2"] | None = with_axes("B N words", default=None)
    # Indices of the batch entries (flattened), for `score_mod`.
    batch_index: Int[Array, "*B"] | None = with_axes("B", default=None)
    # Indices of the query heads, for `score_mod`.
    head_index: Int[Array, " N"] | None = with_axes("N", default=None)
    # Arrays that `score_mod` captures and that get no gradient.
    constants: list[Array] = with_axes("")

    # Of scores and sums: float32, or float64 for float64 inputs.
    dtype: jnp.dtype = static()
    # The devices that the call is compiled for.
    target: Target = static()
    # Factor of query . key; 1 if it is an array, or if queries are scaled.
    scale: float = static()
    # C in c * tanh(s / c).
    soft_cap: float | None = static()
    score_mod: TracedFunction | None = static()
    # Fraction of the weights that are dropped.
    dropout_rate: float = static()
    # Of matrix products.
    precision: lax.PrecisionLike = static()
    return_max_score: bool = static()
    # The number of slots if the keys are a ring cache that is read in place; the key
    # offset is then the position of the newest key (see `Tile`).
    ring: int | None = static(default=None)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Does not call the constructor, as `dataclasses.replace` does: setting every
        field again takes a large part of the time of a small call.
        """
        assert changes.keys() <= vars(self).keys(), changes.keys()
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    @property
    def has_custom_vjp(self) -> bool:
        """Whether `score_mod` calls a function with a `jax.custom_vjp`, which has no
        forward mode.
        """
        mod = self.score_mod
        return mod is not None and mod.has_custom_vjp

    def masks_scores(self, bias: Array | None) -> bool:
        """Returns whether a score may be masked: by the mask, by a bias of -inf, or by
        a `score_mod` that returns -inf.
        """
        masking = (self.mask, bias, self.score_mod)
        return any(x is not None for x in masking)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(ScoreFields):
    """One call of attention: its checked arguments.

    Arrays are in the caller's layout, and None if the call does not have them; the
    metadata of their fields names their axes, as in masks. All other values are static.
    """

    mask: Visible | None = None
    query: Float[Array, "*B T N H"] = with_axes("B T N H")
    # Keys and values are None until `with_keys` adds them.
    key: Float[Array, "*B S K H"] = with_axes("B S K H", default=None)
    value: Float[Array, "*B S K Hv"] = with_axes("B S K H", default=None)
    bias: Float[Array, "*#B #N #T #S"] | None = with_axes("B N T|1 S|1", default=None)
    sinks: Float[Array, "*#B #N"] | None = with_axes("B N")
    # Arrays that `score_mod` captures and that get gradients.
    captured: list[Array] = with_axes("")
    # Factor of query . key if it is an array; `scale` is then 1.
    scale_array: Float[Array, ""] | None = with_axes("")
    dropout_rng: Array | None = with_axes("")
    # Scales of keys and values in 8 bits; see `KVCache.scale`.
    cache_scale: Float[Array, "*B S K 2"] | None = with_axes("B S K H", default=None)
    # Indices of the keys that each query attends to; -1 means no key, repeated indices
    # count once. None: all keys.
    key_indices: Int[Array, "*B T #K k"] | None = with_axes("B T K k", default=None)
    # Made by `guard`; None before it, or if nothing is masked.
    nonfinite: NonFinite | None = None
    # The tiles to visit (`BlockMask`), if they are known before the call is computed.
    tiles: Any = None

    broadcast_dropout: bool = static()
    return_residual: bool = static()
    # The caller's `qkv_sharding`, or the arguments of `context_parallel`.
    sharding: Sharding | None = static()
    # Whether all sizes are numbers, not symbols of `jax.export`; set with the keys.
    has_known_sizes: bool = static(default=False)
    # Whether keys and values are a cache, which is read in place.
    cached: bool = static(default=False)
    # `KVCache.value_size` of a cache in 8 bits, which is read in place.
    value_size: int | None = static(default=None)

    @property
    def inputs(self) -> tuple[Array, Array, Array]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the batch axes."""
        return self.query.shape[:-3]

    @property
    def num_heads(self) -> int:
        """The number of query heads N."""
        return self.query.shape[-2]

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of queries T, and of keys S."""
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def groups(self) -> tuple[int, int]:
        """The number of key heads K, and the number of query heads that share a key
        head, G = N / K.
        """
        num_kv_heads = self.key.shape[-2]
        return num_kv_heads, self.num_heads // num_kv_heads


class LogSumExp(NamedTuple):
    """The log-sum-exp of each row's scores, the sum of two parts, m + log(l).

    They are kept apart, because their sum is rounded: at -1e9, a usual bias of masked
    scores, floats are 64 apart. All derivatives are those of `log_sum`.
    """

    maximum: Float[Array, "*L"]  # m: a score, the largest; a constant in derivatives
    log_sum: Float[Array, "*L"]  # log(l), where l is the sum of exp(score - m)

    @property
    def rounded(self) -> Float[Array, "*L"]:
        """The log-sum-exp as a single number, rounded."""
        return self.maximum + self.log_sum

    def weights(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes the softmax's weights of these scores, exp(score - m) / l."""
        return jnp.exp((scores - self.maximum) - self.log_sum)


class Result(NamedTuple):
    """The result of a call: output, log-sum-exp and largest scores, in the caller's
    layout.
    """

    output: Float[Array, "*B T N Hv"]
    # The log-sum-exp of the scores. Engines return it in two parts, `run` their sum.
    # None if a kernel does not return it.
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
