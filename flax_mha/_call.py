"""One call: its arguments checked once, and put into the form that every implementation takes."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, UInt32

from flax_mha import _check, _lookups
from flax_mha._context import Context
from flax_mha._integers import extremes
from flax_mha._platform import Target, being_traced, readable, target_of
from flax_mha._traced_function import Trace, TracedFunction, trace
from flax_mha.masks import ArrayMask, CausalMask, LengthMask, LocalMask, Mask, SegmentMask, WrittenMask
from flax_mha.masks.base import CallsFunction

DEFAULT_PRECISION = (None, "default", "bfloat16", lax.Precision.DEFAULT)

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
Sharding = PartitionSpec | NamedSharding | Context


class Numbers(NamedTuple):
    """What depends on the numbers of batch entries and heads; None where the call does not.

    Attributes:
      batch: Numbers of the batch entries, counted through all batch axes; for `score_mod`.
      head: Numbers of the query heads; for `score_mod`.
      dropout_seed: Two random words for each head, or for all of them.
    """

    batch: Int[Array, "*B"] | None
    head: Int[Array, " N"] | None
    dropout_seed: UInt32[Array, "*B N 2"] | None


class Operands(NamedTuple):
    """The arrays of a call, checked, in the caller's layout; None where there is none.

    Attributes:
      captured: What the `score_mod` captures.
      offsets: Positions of the first query and the first key [B...], where these are arrays.
      scale: What multiplies query . key, where that is an array.
      numbers: What depends on the numbers of batch entries and heads, where this is a part of a larger call.
    """

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Array | None
    sinks: Array | None
    mask: Mask | None
    captured: list[Array]
    offsets: tuple[Array | None, Array | None]
    scale: Array | None
    dropout_rng: Array | None
    numbers: "Numbers | None" = None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def has_known_offsets(self) -> bool:
        """Whether positions are known while tracing."""
        return all(x is None for x in self.offsets)

    @property
    def groups(self) -> tuple[int, int]:
        """K, and G = N / K."""
        return self.key.shape[-2], self.query.shape[-2] // self.key.shape[-2]

    def map_arrays(self, change: Callable[[Array, str], Any]) -> "Operands":
        """The operands with `change(array, axes)` in the place of every array, axes as in `masks/base.py`."""

        def changed(x: Any, axes: str) -> Any:
            return None if x is None else change(x, axes)

        return Operands(
            query=changed(self.query, "B T N H"),
            key=changed(self.key, "B S K H"),
            value=changed(self.value, "B S K H"),
            bias=changed(self.bias, "B N T|1 S|1"),
            sinks=changed(self.sinks, "B N"),
            mask=None if self.mask is None else self.mask.map_arrays(change),
            captured=[changed(x, "") for x in self.captured],
            offsets=(changed(self.offsets[0], "B"), changed(self.offsets[1], "B")),
            scale=changed(self.scale, ""),
            dropout_rng=changed(self.dropout_rng, ""),
            numbers=self.numbers and Numbers(*map(changed, self.numbers, ("B", "N", "B N words"))),
        )


class Options(NamedTuple):
    """The static (hashable) part of a call.

    Attributes:
      offsets: Positions of the first query and the first key, where these are numbers; else 0.
      scale: What multiplies query . key, where that is a number; else 1.
      cached: Whether keys and values are a cache, which is read in place.
      ring: Whether the keys form a ring (`_tiles.Tile`); the key's offset is then the position of the newest one.
      score_mod: The traced function.
      captured_trainable: Which of the arrays that it captures get gradients.
      target: What the call is compiled for.
      sharding: How the caller says that a mesh splits the query, or None.
    """

    offsets: tuple[int, int]
    scale: float
    soft_cap: float | None
    score_mod: TracedFunction | None
    captured_trainable: tuple[bool, ...]
    dropout_rate: float
    broadcast_dropout: bool
    return_residual: bool
    precision: lax.PrecisionLike
    target: Target
    sharding: Sharding | None
    cached: bool = False
    ring: bool = False


class Call(NamedTuple):
    """What every implementation takes."""

    operands: Operands
    options: Options

    @property
    def has_known_sizes(self) -> bool:
        """Whether all sizes are numbers; `jax.export` knows sizes that are symbols."""
        sizes = (*self.operands.query.shape, *self.operands.key.shape, *self.operands.value.shape)
        return all(isinstance(size, int) for size in sizes)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """In what softmax and sums are computed: float32, or float64 for such inputs."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def canonical(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | Mask | None,
    *,
    scale: ArrayLike | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int | None, int | None] | None,
    query_offset: ArrayLike,
    key_value_offset: ArrayLike,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    logits_soft_cap: float | None,
    sinks: ArrayLike | None,
    score_mod: ScoreMod | None,
    dropout_rate: float,
    dropout_rng: Array | None,
    broadcast_dropout: bool,
    return_residual: bool,
    precision: lax.PrecisionLike,
    qkv_sharding: Sharding | None,
    cached: bool = False,
    ring: bool = False,
) -> Call:
    """The arguments of `dot_product_attention`, if they fit together; all that masks scores becomes one mask.

    Besides, `Options.cached`: keys and values may have another dtype than queries then; and `Options.ring`.
    """
    query, key, value, shape = _check.inputs(query, key, value, cached)
    offsets, offset_arrays = _check.offsets(query_offset, key_value_offset, shape)
    number, scale_array = _check.scale(scale, shape)
    window = _check.window(local_window_size)
    masks = [
        CausalMask() if _check.flag("is_causal", is_causal) else None,
        None if window is None else LocalMask(*window),
        _length_mask(query_seq_lengths, key_value_seq_lengths, shape),
        _segment_mask(query_segment_ids, key_value_segment_ids, shape),
        _given_mask(mask, shape),
        WrittenMask() if ring else None,
    ]
    present = [m for m in masks if m is not None]
    score_trace = _score_trace(score_mod, accumulation_dtype(query.dtype))
    rate = _check.dropout(dropout_rate, dropout_rng)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=_check.bias(bias, shape),
        sinks=_check.sinks(sinks, shape),
        mask=functools.reduce(operator.and_, present) if present else None,
        captured=[] if score_trace is None else score_trace.captured,
        offsets=offset_arrays,
        scale=scale_array,
        dropout_rng=dropout_rng if rate else None,
    )
    options = Options(
        offsets=offsets,
        scale=number,
        soft_cap=_check.soft_cap(logits_soft_cap),
        score_mod=None if score_trace is None else score_trace.function,
        captured_trainable=() if score_trace is None else score_trace.trainable,
        dropout_rate=rate,
        broadcast_dropout=_check.flag("broadcast_dropout", broadcast_dropout),
        return_residual=_check.flag("return_residual", return_residual),
        precision=_check.precision(precision),
        target=target_of((query, key, value)),
        sharding=_check.sharding(qkv_sharding, jnp.ndim(query)),
        cached=cached,
        ring=ring,
    )
    _check_lookups(operands, options)
    return Call(operands, options)


def _check_lookups(operands: Operands, options: Options) -> None:
    """Refuses functions that look up entries that their arrays do not have, as far as positions are known."""
    functions = [] if options.score_mod is None else [options.score_mod]

    def find(part: CallsFunction) -> Mask:
        functions.append(part.function)
        return CausalMask()

    if operands.mask is not None:
        operands.mask.map_functions(find)
    batch, num_heads = math.prod(operands.query.shape[:-3]), operands.query.shape[-2]
    lengths = operands.lengths[0], 1 if options.ring else operands.lengths[1]
    if not functions or 0 in (batch, *lengths):
        return
    queries, keys = (_span(*where) for where in zip(options.offsets, operands.offsets, lengths, strict=True))
    ahead = None if operands.mask is None else operands.mask.ahead
    for function in functions:
        _lookups.check(function, batch, num_heads, queries, keys, ahead)


def _span(number: int, array: Array | None, length: int) -> tuple[int, int] | None:
    """The first and the last of so many positions from an offset, where they are known."""
    if not isinstance(length, int) or not (array is None or readable(array)):
        return None
    first, last = (number, number) if array is None else extremes(array)
    return first, last + length - 1


def _length_mask(query_lengths: ArrayLike | None, key_lengths: ArrayLike | None, shape: _check.Shape) -> Mask | None:
    keys = _check.lengths("key_value_seq_lengths", key_lengths, shape)
    queries = _check.lengths("query_seq_lengths", query_lengths, shape)
    return None if keys is None and queries is None else LengthMask(keys, queries)


def _segment_mask(query_ids: ArrayLike | None, key_ids: ArrayLike | None, shape: _check.Shape) -> Mask | None:
    queries, keys = _check.segment_ids(query_ids, key_ids, shape)
    return None if queries is None or keys is None else SegmentMask(queries, keys)


def _given_mask(mask: ArrayLike | Mask | None, shape: _check.Shape) -> Mask | None:
    if isinstance(mask, Mask):
        return mask.canonical(shape)
    visible = _check.mask(mask, shape)
    return None if visible is None else ArrayMask(visible)


def _score_trace(score_mod: ScoreMod | None, dtype: jnp.dtype) -> Trace | None:
    if score_mod is None:
        return None
    _check.user_function("score_mod", score_mod)
    signature = {"score": dtype} | dict.fromkeys(("b", "h", "q_idx", "kv_idx"), jnp.int32)
    return trace("score_mod", score_mod, signature, dtype.name)


def numbered(operands: Operands, options: Options) -> Numbers:
    """The numbers of batch entries and heads, and the random words of each, from which dropout follows."""
    if operands.numbers is not None:
        return operands.numbers
    batch, num_heads = operands.query.shape[:-3], operands.query.shape[-2]
    entry = head = seed = None
    if options.score_mod is not None:
        entry = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
        head = jnp.arange(num_heads, dtype=jnp.int32)
    if operands.dropout_rng is not None:
        own = (1,) * (len(batch) + 1) if options.broadcast_dropout else (*batch, num_heads)
        seed = jax.random.bits(operands.dropout_rng, (*own, 2), jnp.uint32)
    return Numbers(entry, head, seed)


def numbers_as_arrays(call: Call) -> Call:
    """Converts the scale and nonzero offsets to arrays, so that new values of them do not cause recompilation.

    While an outer `jit` is tracing, they stay Python numbers: that program is compiled anyway, and constants make it
    faster. Offsets of 0 always stay numbers, so that the tiles to visit can be computed at trace time.
    """
    if being_traced():
        return call
    operands, options = call
    offsets = tuple(
        jnp.asarray(number, jnp.int32) if number and array is None else array
        for number, array in zip(options.offsets, operands.offsets, strict=True)
    )
    scale = operands.scale
    if scale is None:
        scale = jnp.asarray(options.scale, accumulation_dtype(operands.query.dtype))
    rank = operands.query.ndim - 3
    offsets = tuple(x if x is None else x.reshape((1,) * (rank - x.ndim) + x.shape) for x in offsets)
    return Call(
        operands._replace(offsets=offsets, scale=scale),  # type: ignore[arg-type]
        options._replace(offsets=(0, 0), scale=1.0),
    )
