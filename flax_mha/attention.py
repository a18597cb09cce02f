"""`dot_product_attention`: check everything once, make it canonical, choose an implementation.

The way of a call: arguments -> `_call.checked` (errors, before any compute) -> `Call`: operands (arrays) and options
(static) -> `_choose` -> `_impl.portable` (one head's math, lifted over all heads), `_impl.cudnn` or `_impl.splash`.
"""

import inspect
from typing import Any, Literal, overload

from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha import _call, _choose
from flax_mha._call import ScoreMod
from flax_mha._choose import Explanation, Implementation
from flax_mha.masks import Mask


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
        times in both modes; "blockwise" holds tiles of them, and has a first-order reverse gradient, as have the fused
        kernels "cudnn" of NVIDIA's GPUs and "splash" of TPUs, which know fewer arguments. See `explain_implementation`.
      return_residual: Also return the log-sum-exp of the scores.
      precision: Of the matrix products; None means `jax.default_matmul_precision`.

    Returns:
      [B..., T, N, Hv] in the dtype of `query`; with `return_residual` also the log-sum-exp [B..., T, N] (float32, or
      float64 for such inputs; -inf for a query that sees nothing), differentiable too.

    Raises:
      ValueError: If arguments do not fit together; the message names the argument, what is expected and what was got.
      NotImplementedError: If a named implementation cannot compute this; the message lists every reason.

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
    arguments = dict(locals())
    output, lse = _choose.attend(_call.checked(**_without_implementation(arguments)), implementation)
    return (output, lse) if return_residual else output  # type: ignore[return-value]  # then no lse is None


def explain_implementation(*arguments: Any, **keywords: Any) -> Explanation:
    """Which implementation computes a call, and why the others do not.

    Args:
      *arguments: Those of `dot_product_attention`.
      **keywords: Likewise. Only shapes, dtypes and what is known while tracing count, so this works under `jit` too.

    Returns:
      What `implementation=None` chooses, and for each implementation the reasons why it cannot run, none where it can.

    Raises:
      ValueError: As `dot_product_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((2, 1000, 4, 64))
      >>> explanation = explain_implementation(x, x, x, is_causal=True)
      >>> explanation.chosen, explanation.refusals["blockwise"]
      ('blockwise', [])
    """
    bound = inspect.signature(dot_product_attention).bind(*arguments, **keywords)
    bound.apply_defaults()
    return _choose.explain(_call.checked(**_without_implementation(bound.arguments)))


def _without_implementation(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: given for name, given in arguments.items() if name != "implementation"}
