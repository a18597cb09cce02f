"""`dot_product_attention` and `explain_implementation`: the public signatures.

`call.arguments.canonical` checks the arguments and returns a `Call`: operands (arrays) and options (static). Then
`distributed.dispatch.run` splits it over devices, chooses an implementation in `impl/`, and computes it.
"""

import inspect
from typing import Literal, Unpack, overload

from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha.call.arguments import Arguments, CallArguments, canonical, naming_siblings
from flax_mha.call.operands import NO_OFFSET, ScoreMod, Sharding
from flax_mha.core.tracing import Platform
from flax_mha.distributed import dispatch
from flax_mha.impl.registry import Explanation, Implementation
from flax_mha.masks import Mask


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    implementation: Implementation | None = ...,
    return_residual: Literal[False] = ...,
    **arguments: Unpack[Arguments],
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    implementation: Implementation | None = ...,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Array, Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    implementation: Implementation | None = ...,
    return_residual: bool = ...,
    return_max_score: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Array, ...]: ...
@naming_siblings
def dot_product_attention(
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
    query_offset: int | ArrayLike = NO_OFFSET,
    key_value_offset: int | ArrayLike = NO_OFFSET,
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
    return_max_score: bool = False,
    precision: lax.PrecisionLike = None,
    qkv_sharding: Sharding | None = None,
) -> Array | tuple[Array, ...]:
    """Scaled dot-product attention of many heads, exact, in memory that grows linearly with the lengths.

    For each head, with the softmax over the visible keys in float32 at least::

        out = dropout(softmax(score_mod(soft_cap(scale * query @ key.T)) + bias)) @ value

    This is a superset of `jax.nn.dot_product_attention`: arguments of the same name have the same meaning. Three things
    differ. Rows whose keys are all masked return 0 and have zero gradients. NaN and infinity in masked queries, keys
    and values do not affect any output or gradient. The residual is float32 (float64 for float64 inputs) and
    differentiable; in `jax.nn` it has the dtype of the query and no gradient. All of them:
    :doc:`differences </differences>`.

    B is the batch (any number of axes), T the query length, S the key length, N the number of query heads, K that of
    key and value heads (N a multiple of K: grouped-query attention), H the head size. Query i stands at position
    `query_offset + i` of its sequence, key j at `key_value_offset + j`. Masks, windows, lengths, `score_mod` and
    dropout speak of positions, so that a call on a slice of queries and keys, with the right offsets, equals that part
    of the whole call. Arrays [..., T, S] and segment ids are those of the slice.

    Args:
      query: [B..., T, N, H]; float16, bfloat16, float32 or float64, the same for query, key and value.
      key: [B..., S, K, H].
      value: [B..., S, K, Hv]; Hv may differ from H.
      bias: Added to the scaled scores; broadcasts to [B..., N, T, S]. -inf masks. Gets a gradient, also if broadcast.
      mask: bool, True attends; broadcasts to [B..., N, T, S]. Or a mask object such as `flax_mha.CausalMask()`, which
        holds no such array.
      scale: Factor of query . key; None means 1 / sqrt(H).
      is_causal: Queries see keys up to their own position.
      query_seq_lengths: int [B...], at least 0. Queries at this position or later return 0. None uses all queries.
      key_value_seq_lengths: int [B...], at least 0. Keys at this position or later are masked. None masks no key.
      local_window_size: (left, right): a query at position p sees the keys at positions p - left to p + right,
        inclusive. An int is used for both sides; None in the pair means no limit on that side. Combined with
        `is_causal`, both masks apply.
      query_offset: Position of the first query: an int, or ints [B...] or []. Positions, and distances between them,
        must be in the range of int32; that is checked where the values are known.
      key_value_offset: Position of the first key, in the same form as `query_offset`.
      query_segment_ids: int [B..., T]; a query sees only keys in the same segment.
      key_value_segment_ids: int [B..., S]; where T = S either of the two stands for both.
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); at most 1e30, None caps nothing.
      sinks: Broadcasts to [B..., N]. One additional logit per head, which is added to the softmax's denominator but has
        no value.
      score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, a function of scalars as in PyTorch's FlexAttention.
        It maps a scaled and capped score (float32, or float64 for float64 inputs), given the index of the batch entry
        (flattened if there are several batch axes), the index of the head, and the positions of query and key (int32).
        Captured arrays and numbers are read at every call (in a function that you jit, when it is traced: pass what
        changes as its argument); captured floating-point arrays get gradients. Returning -inf masks the score. A lookup
        that leaves a captured array is an error, if its index is known while tracing, unless the index depends on
        `q_idx` or `kv_idx` and a mask other than a causal mask or a window may hide that position. Indices computed
        from other arrays are not checked; JAX then returns the last entry.
      dropout_rate: Share of the softmax's weights set to 0, in [0, 1); the others grow by 1 / (1 - rate).
      dropout_rng: Key of `jax.random`; needed where `dropout_rate > 0`. What is dropped depends on the key and on
        batch entry, head and positions alone, so it is the same in every implementation.
      broadcast_dropout: Drop the same weights in every batch entry and head.
      implementation: None selects the fastest one that supports the call; see `explain_implementation`. "xla" computes
        all T x S scores. "blockwise" computes the scores tile by tile and skips fully masked tiles. "cudnn" (NVIDIA
        GPUs) and "splash" (TPUs) are fused kernels that support fewer arguments. "pallas" (TPUs) is a fused kernel that
        supports nearly every argument; it has never run on a TPU, so None never selects it. All have derivatives
        of every order, in forward and reverse mode.
      return_residual: Also return the log-sum-exp of the scores.
      return_max_score: Also return the largest visible score of each head, as QK-Clip needs it.
      precision: Precision of the matrix products; None means `jax.default_matmul_precision`.
      qkv_sharding: How a mesh splits the batch axes and heads of `query`, and of key and value alike, say
        `jax.P("data", None, "model")`; fewer key heads than devices are the same on several of them. Every device then
        computes its part without communication. Only needed inside `jit` on a mesh with Auto axes: arrays outside
        `jit`, and types with Explicit axes, contain their sharding. A `jax.P` refers to the mesh of `jax.set_mesh`;
        without a mesh, `jax.P()` says that nothing is split.

    Returns:
      [B..., T, N, Hv] in the dtype of `query`; with `return_residual` also the log-sum-exp [B..., T, N] (float32, or
      float64 for such inputs; -inf where all keys are masked), differentiable too. With `return_max_score` also, and
      last, the maximum [B..., N], in the same dtype, over the scores that a softmax sees, without sinks: -inf if all
      are masked, NaN if the log-sum-exp of a query is; it has no gradient.

    Raises:
      ValueError: If arguments do not fit together, or if `score_mod` or a `mask_mod` leaves an array that it looks up;
        the message names the argument, what is expected and what was given.
      NotImplementedError: If a named implementation cannot compute this call (the message lists every reason), or if
        `score_mod` or a `mask_mod` uses control flow or custom derivatives inside `jax.shard_map`.

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
    del arguments["implementation"]
    output, lse, *max_score = dispatch.run(canonical(**arguments), implementation)
    if return_residual:
        return (output, lse, *max_score)  # type: ignore[arg-type]  # then `lse` is an array
    return (output, *max_score) if max_score else output


def explain_implementation(  # noqa: D417 - dot_product_attention has the others
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    platform: Platform | None = None,
    **arguments: Unpack[CallArguments],
) -> Explanation:
    """Explains which implementation computes a call of `dot_product_attention`, and why the others do not.

    Arguments that are not described here are those of `dot_product_attention`. Only shapes, dtypes and what is known
    while tracing count, so this works under `jit` and on `jax.ShapeDtypeStruct` inside `jax.eval_shape`, too.

    Args:
      platform: Explain the call for "cpu", "cuda" (or "gpu") or "tpu" instead of the device that would compute it. The
        platform need not be available: "cuda" then assumes H100s, and nothing is compiled for them. cuDNN itself, which
        may still reject a shape, is only asked on a machine with a GPU.

    Returns:
      The implementation that computes the call, and for each implementation the reasons why it cannot, each with what
      to change. `print` shows them as a table.

    Raises:
      ValueError: If no such platform is known, or as in `dot_product_attention`.
      NotImplementedError: As in `dot_product_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((2, 1000, 4, 64))
      >>> explanation = explain_implementation(x, x, x, is_causal=True)
      >>> explanation.chosen, explanation.refusals["blockwise"]
      ('blockwise', [])
      >>> half = x.astype(jnp.bfloat16)
      >>> explain_implementation(half, half, half, platform="tpu").chosen
      'splash'
    """
    call = canonical(query, key, value, bias, mask, return_residual=return_residual, platform=platform, **arguments)
    return dispatch.explain(call, implementation)


# For `help` and editors, which do not resolve `Unpack`.
explain_implementation.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *inspect.signature(dot_product_attention).parameters.values(),
        inspect.signature(explain_implementation).parameters["platform"],
    ],
    return_annotation=Explanation,
)
