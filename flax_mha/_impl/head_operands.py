"""What the math of one head takes, for every head of a call: leading axes for batch and heads."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._call import Operands, Options, accumulation_dtype, numbered
from flax_mha._impl import layout, nonfinite
from flax_mha._impl.nonfinite import Magnitudes
from flax_mha._impl.scores import ScoreParams, Scores

OfHeads = tuple[Array, Array, Array, ScoreParams, Scores, Magnitudes | None]


def of_heads(
    operands: Operands,
    options: Options,
    sizes: bool,
    dtype: DTypeLike,
    held: DTypeLike | None = None,
    replaces: bool = True,
) -> OfHeads:
    """Query, key, value, params, scores and magnitudes, as `dense.dense_head` takes them.

    Args:
      operands: Of the call.
      options: Of the call.
      sizes: Whether magnitudes tell the sizes of finite entries, as `dense.fused_rows` needs it.
      dtype: Of query, key and value in the matrix products.
      held: Of query, key and value as they are returned, if they are rounded to `dtype` later.
      replaces: Whether what is not finite is replaced where scores may be masked. Else magnitudes are None.
    """
    params, scores = params_and_scores(operands, options)
    scale = options.scale if operands.scale is None else operands.scale
    return with_scores(
        operands.query, operands.key, operands.value, scale, params, scores, sizes, dtype, held, replaces
    )


def with_scores(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    scale: Float[Array, ""] | float,
    params: ScoreParams,
    scores: Scores,
    sizes: bool,
    dtype: DTypeLike,
    held: DTypeLike | None = None,
    replaces: bool = True,
) -> OfHeads:
    """The same, where `params` and `scores` are of heads already."""
    groups, wide = (key.shape[-2], query.shape[-2] // key.shape[-2]), accumulation_dtype(query.dtype)
    held = dtype if held is None else held
    query, key, value = query.astype(wide), key.astype(held), value.astype(held)
    scale = scale if isinstance(scale, float) else scale.astype(wide)
    magnitudes = None
    if replaces and scores.masks_scores(params):
        of_queries = nonfinite.magnitude_of(query * scale, sizes)
        query = nonfinite.finite(query, of_queries)
        key, value, of_keys = nonfinite.finite_keys(key, value, sizes)
        magnitudes = Magnitudes(
            layout.vectors_by_head(of_queries, groups),
            layout.vectors_by_head(of_keys, (groups[0], 1)).astype(wide),
        )
    if isinstance(scale, float) and dtype != wide:  # a scaled query would have to be rounded
        scores = dataclasses.replace(scores, scale=scale)
    elif replaces or isinstance(scale, float):
        query = query * scale
    else:  # what is not finite must not reach the gradient of the scale
        is_finite = lax.is_finite(query)
        query = jnp.where(is_finite, jnp.where(is_finite, query, jnp.zeros_like(query)) * scale, jnp.nan)
    queries = layout.split_heads(query.astype(held), groups)
    keys, values = (layout.split_heads(x, (groups[0], 1)) for x in (key, value))
    return queries, keys, values, params, scores, magnitudes


def params_and_scores(operands: Operands, options: Options) -> tuple[ScoreParams, Scores]:
    """What is added to the scores and gets gradients, and all else that makes scores; leading axes [B..., K, G]."""
    groups, rank = operands.groups, operands.query.ndim - 3
    dtype = accumulation_dtype(operands.query.dtype)
    captured = [layout.by_head(x, "", rank, groups) for x in operands.captured]
    is_learned = options.captured_trainable
    params = ScoreParams(
        bias=None if operands.bias is None else layout.by_head(operands.bias, "B N T S", rank, groups),
        sink=None if operands.sinks is None else layout.by_head(operands.sinks, "B N", rank, groups).astype(dtype),
        captured=[x for x, learned in zip(captured, is_learned, strict=True) if learned],
    )
    return params, _scores(
        operands, options, [x for x, learned in zip(captured, is_learned, strict=True) if not learned]
    )


def _scores(operands: Operands, options: Options, constants: list[jax.Array]) -> Scores:
    rank, groups = operands.query.ndim - 3, operands.groups
    numbers = numbered(operands, options)
    batch, head, seed = (
        None if x is None else layout.by_head(x, axes, rank, groups)
        for x, axes in zip(numbers, ("B", "N", "B N words"), strict=True)
    )
    query_offset, key_offset = (None if x is None else layout.by_head(x, "B", rank, groups) for x in operands.offsets)
    return Scores(
        mask=None if operands.mask is None else layout.mask_by_head(operands.mask, rank, groups),
        offset_arrays=(query_offset, key_offset),
        dropout_seed=seed,
        batch=batch,
        head=head,
        constants=constants,
        offset_numbers=options.offsets,
        soft_cap=options.soft_cap,
        score_mod=options.score_mod,
        captured_trainable=options.captured_trainable,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
        ring=operands.key.shape[-3] if options.ring else None,
    )
