"""`dot_product_attention`: check everything once, make it canonical, choose an implementation.

The way of a call: arguments -> `_check.*` (errors, before any compute) -> `_Options` (static) and `_Operands` (arrays)
-> `_attend` (jit): one `Scores` a head -> `_impl.heads.over_heads` -> `_impl.dense` or `_impl.blockwise`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha import _check
from flax_mha._call import Operands, Options, attend
from flax_mha._impl import tiling
from flax_mha._impl.scores import accumulation_dtype
from flax_mha._program import Program, trace
from flax_mha._tiles import Grid
from flax_mha.masks import ArrayMask, CausalMask, LengthMask, LocalMask, Mask, SegmentMask

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
Implementation = Literal["xla", "blockwise", "cudnn", "splash"]

# Up to this many scores a head, T * S, all of them at once are fastest.
DENSE_SCORES = 256 * 256
# Rows and columns of a tile: large enough for fast matrix products, small enough for the caches.
LARGEST_TILE = (512, 512)


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    return_residual: Literal[False] = ...,
    **arguments: Any,
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    return_residual: Literal[True],
    **arguments: Any,
) -> tuple[Array, Array]: ...
def dot_product_attention(  # type: ignore[misc]  # the overloads say **arguments for what stands here
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: int | ArrayLike = 0,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    score_mod: ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, Array]:
    r"""Scaled dot-product attention of many heads, exact, in memory that grows linearly with the lengths.

    For each head, with the softmax over the visible keys in float32 at least:

    .. math:: \mathrm{out} = \mathrm{dropout}(\mathrm{softmax}(f(\mathrm{scale} \cdot Q K^T) + \mathrm{bias})) V

    where f is the soft cap, then `score_mod`.

    A superset of `jax.nn.dot_product_attention`: same names, same meaning, with one difference: a query that sees no
    key answers 0, and its gradients are 0, whatever hidden keys and values hold. B batch (any number of axes), T query
    length, S key length, N query heads, K key/value heads (N a multiple of K: grouped-query attention), H head size.

    Args:
      query: [B..., T, N, H]; float16, bfloat16, float32 or float64, the same for query, key and value.
      key: [B..., S, K, H].
      value: [B..., S, K, Hv]; Hv may differ from H.
      bias: Added to the scaled scores; broadcasts to [B..., N, T, S]. -inf hides. Gets a gradient, also if broadcast.
      mask: bool, True attends; broadcasts to [B..., N, T, S]. Or a mask object of `flax_mha.masks`, which holds no such
        array.
      scale: What multiplies query . key; None means 1 / sqrt(H).
      is_causal: Query i sees keys up to its own position, `query_offset + i`; key j stands at position j.
      query_seq_lengths: int [B...]; queries from here on answer 0. None: all are used.
      key_value_seq_lengths: int [B...]; keys from here on are hidden. None: all are visible.
      local_window_size: (left, right): how many positions before and after its own a query sees, both ends included;
        an int means the same on both sides, None in a pair no limit. With `is_causal` it only narrows.
      query_offset: Position of the first query: an int, or ints [B...] or [].
      query_segment_ids: int [B..., T]; a query sees keys of its own segment only.
      key_value_segment_ids: int [B..., S]; where T = S either of the two stands for both.
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); None caps nothing.
      sinks: [B..., N] or what broadcasts to it: one more logit a head that takes part in the softmax's sum only.
      score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, as FlexAttention's, of scalars: what to make of a
        scaled and capped score (float32, or float64 for such inputs), given batch entry (of several axes, counted
        through), head, and positions of query (`query_offset` included) and key (int32). It may capture arrays;
        floating ones get gradients. -inf hides.
      dropout_rate: Share of the softmax's weights set to 0, in [0, 1); the others grow by 1 / (1 - rate).
      dropout_rng: Key of `jax.random`; needed where `dropout_rate > 0`. The same key drops the same weights in every
        implementation.
      broadcast_dropout: Drop the same weights in every batch entry and head.
      implementation: None chooses; "xla" holds [T, S] scores of every head, and can be differentiated any number of
        times in both modes; "blockwise" holds tiles of them, and has a first-order reverse gradient.
      return_residual: Also return the log-sum-exp of the scores.
      precision: Of the matrix products; None means `jax.default_matmul_precision`.

    Returns:
      [B..., T, N, Hv] in the dtype of `query`; with `return_residual` also the log-sum-exp [B..., T, N] (float32, or
      float64 for such inputs; -inf for a query that sees nothing), differentiable too.

    Raises:
      ValueError: If arguments do not fit together; the message names the argument, what is expected and what was got.
      NotImplementedError: If a named implementation, or a named argument, cannot do what is asked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import dot_product_attention
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 8, 16))  # [B, T, N, H]
      >>> key = value = jax.random.normal(jax.random.key(1), (2, 7, 4, 16))  # [B, S, K, H]
      >>> dot_product_attention(query, key, value, key_value_seq_lengths=jnp.array([7, 3])).shape
      (2, 5, 8, 16)

    References:
      Vaswani et al., Attention is all you need, arXiv:1706.03762; Ainslie et al., GQA, arXiv:2305.13245; Dao,
      FlashAttention-2, arXiv:2307.08691.
    """
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
    program, learns, captured = _score_program(score_mod, accumulation_dtype(query.dtype))
    chosen = _choose(implementation, shape)
    layout = tiling.layout((shape.query_length, shape.key_length), LARGEST_TILE)
    present = [m for m in masks if m is not None]
    visible = functools.reduce(operator.and_, present) if present else None
    if visible is not None and chosen == "blockwise":
        visible = visible.known(
            Grid(layout.counts, layout.tile_shape, static_offset if offset_array is None else offset_array)
        )
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=_check.bias(bias, shape),
        sinks=_check.sinks(sinks, shape),
        mask=visible,
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
        precision=precision,
        layout=layout if chosen == "blockwise" else None,
        sequential=jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty,
    )
    _check.flag("return_residual", return_residual)
    output, lse = attend(operands, options)
    return (output, lse) if return_residual else output


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


def _choose(implementation: str | None, shape: _check.Shape) -> str:
    """The implementation to run: for None the fastest of those with the same result."""
    if implementation is None:
        return "xla" if shape.query_length * shape.key_length <= DENSE_SCORES else "blockwise"
    if implementation in ("cudnn", "splash"):
        raise NotImplementedError(f'implementation="{implementation}" is not available yet; use None to choose.')
    if implementation not in ("xla", "blockwise"):
        names = '"xla", "blockwise", "cudnn", "splash" or None'
        raise ValueError(f"implementation must be {names}, but got {implementation!r}.")
    return implementation
