"""One call: its arguments checked once, and put into the form that every implementation takes."""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from flax_mha import _check
from flax_mha._program import Program, trace
from flax_mha.masks import ArrayMask, CausalMask, LengthMask, LocalMask, Mask, SegmentMask

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]


class Operands(NamedTuple):
    """The arrays of a call, checked, in the caller's layout; None where there is none."""

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Array | None
    sinks: Array | None
    mask: Mask | None
    captured: list[Array]
    query_offset: Array | None
    scale: Array | None
    dropout_rng: Array | None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def groups(self) -> tuple[int, int]:
        """K, and G = N / K."""
        return self.key.shape[-2], self.query.shape[-2] // self.key.shape[-2]


class Options(NamedTuple):
    """What is known of a call while tracing."""

    static_offset: int
    scale: float
    soft_cap: float | None
    program: Program | None
    program_learns: tuple[bool, ...]
    dropout_rate: float
    broadcast_dropout: bool
    return_residual: bool
    precision: lax.PrecisionLike


class Call(NamedTuple):
    """What every implementation takes."""

    operands: Operands
    options: Options


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """In what softmax and sums are computed: float32, or float64 for such inputs."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def checked(
    *,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | Mask | None,
    scale: float | ArrayLike | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int | None, int | None] | None,
    query_offset: int | ArrayLike,
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
) -> Call:
    """The arguments of `dot_product_attention`, if they fit together; all that hides becomes one mask."""
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    shape = _check.inputs(query, key, value)
    static_scale, scale_array = _check.scale(scale, shape)
    static_offset, offset_array = _check.offset(query_offset, shape)
    query_ids, key_ids = _check.segment_ids(query_segment_ids, key_value_segment_ids, shape)
    rate = _check.dropout(dropout_rate, dropout_rng)
    window = _check.window(local_window_size)
    lengths = (
        _check.per_sequence("key_value_seq_lengths", key_value_seq_lengths, shape),
        _check.per_sequence("query_seq_lengths", query_seq_lengths, shape),
    )
    masks = [
        CausalMask() if _check.flag("is_causal", is_causal) else None,
        None if window is None else LocalMask(*window),
        None if lengths == (None, None) else LengthMask(*lengths),
        None if query_ids is None or key_ids is None else SegmentMask(query_ids, key_ids),
        mask.checked(shape) if isinstance(mask, Mask) else _array_mask(_check.mask(mask, shape)),
    ]
    present = [m for m in masks if m is not None]
    program, learns, captured = _score_program(score_mod, accumulation_dtype(query.dtype))
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=_check.bias(bias, shape),
        sinks=_check.sinks(sinks, shape),
        mask=functools.reduce(operator.and_, present) if present else None,
        captured=captured,
        query_offset=offset_array,
        scale=scale_array,
        dropout_rng=dropout_rng if rate else None,
    )
    options = Options(
        static_offset=static_offset,
        scale=static_scale,
        soft_cap=_check.soft_cap(logits_soft_cap),
        program=program,
        program_learns=learns,
        dropout_rate=rate,
        broadcast_dropout=_check.flag("broadcast_dropout", broadcast_dropout),
        return_residual=_check.flag("return_residual", return_residual),
        precision=precision,
    )
    return Call(operands, options)


def _array_mask(visible: Array | None) -> Mask | None:
    return None if visible is None else ArrayMask(visible)


def _score_program(
    score_mod: ScoreMod | None, dtype: jnp.dtype
) -> tuple[Program | None, tuple[bool, ...], list[Array]]:
    """The traced `score_mod`, which of the arrays that it captured get gradients, and all of these arrays."""
    if score_mod is None:
        return None, (), []
    signature = {"score": dtype} | dict.fromkeys(("b", "h", "q_idx", "kv_idx"), jnp.int32)
    program, captured = trace("score_mod", score_mod, signature, dtype.name)
    return program, tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in captured), captured


def finite_keys(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"]
) -> tuple[Array, Array, Bool[Array, "*B S K"]]:
    """Keys and values, zero where one of the two is not finite, and where that was.

    What is hidden must reach nothing, but a weight of 0 times NaN is NaN.
    """
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    key, value = (jnp.where(bad[..., None], jnp.zeros_like(x), x) for x in (key, value))
    return key, value, bad


def platform() -> str:
    """What a call is compiled for: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def sharded() -> bool:
    """Whether a mesh may split arrays unseen; inside `jax.shard_map` they are what they seem."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    return any(kind is not jax.sharding.AxisType.Manual for kind in axes)
