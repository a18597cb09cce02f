"""`dot_product_attention`, and `explain_implementation`, which says how a call of it
would be computed.

`canonical` checks the arguments and returns a `Call`, which holds arrays and static
values. `_src/run.py` then splits the call over devices, chooses an
implementation, and computes it.
"""

import inspect
from typing import Any, Literal, Unpack, overload

from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.arguments import (
    Arguments,
    CallArguments,
    canonical,
    naming_siblings,
)
from flax_mha._src.call.call import ScoreMod, Sharding
from flax_mha._src.core.tracing import Platform, with_shapes
from flax_mha._src.explanation import Explanation
from flax_mha._src.masks import Mask
from flax_mha._src.run import Implementation, explain, run


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
    query_offset: int | ArrayLike | None = None,
    key_value_offset: int | ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    key_indices: ArrayLike | None = None,
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
    """Computes exact multi-head attention; memory grows linearly with the length of
    long sequences.

    For each head, with a softmax in float32 or higher over the visible (not masked)
    keys::

        scores = score_mod(soft_cap(scale * query @ key.T)) + bias
        out = dropout(softmax(scores)) @ value

    This is a superset of `jax.nn.dot_product_attention`: arguments with the same name
    have the same meaning. There are three main differences; docs/semantics.md
    lists them all. Queries whose keys are all masked return 0 and have
    zero gradients. NaN and infinity in masked queries, keys and values do not affect
    any output or gradient. The residual (log-sum-exp) is float32 (float64 for float64
    inputs) and differentiable; in `jax.nn` it has the query's dtype and no gradient.

    B is the batch (any number of axes), T the query length, S the key length, N the
    number of query heads, K the number of key and value heads (N is a multiple of K:
    grouped-query attention), H the head size. Query i has the position `query_offset +
    i` in its sequence, key j the position `key_value_offset + j`. Masks, windows,
    lengths, `score_mod` and dropout depend on positions. A call on a slice of the
    queries and keys, with the right offsets, therefore returns the same slice of the
    full result. Arrays [..., T, S] and segment ids are sliced like the queries and
    keys.

    Args:
      query: [B..., T, N, H]; float16, bfloat16, float32 or float64, the same for query,
        key and value.
      key: [B..., S, K, H].
      value: [B..., S, K, Hv]; Hv may differ from H.
      bias: Added to the scores after `score_mod`; broadcasts to [B..., N, T, S]. -inf
        masks a score. The bias receives a gradient, even if it is broadcast.
      mask: bool, True attends; broadcasts to [B..., N, T, S]. Or a mask object such as
        `flax_mha.CausalMask()`, which needs no T x S array.
      scale: Factor that multiplies query . key; None means 1 / sqrt(H).
      is_causal: Queries attend only to keys up to their own position.
      query_seq_lengths: int [B...], at least 0. Queries at this position or later
        return 0. None uses all queries.
      key_value_seq_lengths: int [B...], at least 0. Keys at this position or later are
        masked. None masks no key.
      local_window_size: (left, right): a query at position p attends to the keys at
        positions p - left to p + right, inclusive. An int sets both sides; None in the
        pair means no limit on that side. If `is_causal` is also set, both masks apply.
      query_offset: Position of the first query: an int, or ints [B...] or []; None
        means 0. Positions and the distances between them must be in the range of int32,
        which is checked unless the values are traced. If an offset is given, even 0,
        the arrays may be slices of longer sequences, and lengths may exceed theirs.
      key_value_offset: Position of the first key, in the same form as `query_offset`.
      query_segment_ids: int [B..., T]; a query attends only to keys in the same
        segment.
      key_value_segment_ids: int [B..., S]; if T = S, you can pass only one of the two.
      key_indices: int [B..., T, k], or [B..., T, K, k]: the keys that each query
        attends to, by their index in `key`; -1 means no key, and repeated indices count
        once. Other masks also apply. Time and memory then grow with T * k instead of T
        * S. Any other index outside the keys is an error or, if its value is traced,
        makes the output of its query NaN.
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); at most 1e30.
        None means no cap.
      sinks: Broadcasts to [B..., N]. One additional logit per head: exp(sink) is added
        to the softmax's denominator, as for a key whose value is 0.
      score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, a function of scalars
        as in PyTorch's FlexAttention. `score` is scaled and capped (float32, or float64
        for float64 inputs), `b` is the index of the batch entry (flattened if there are
        several batch axes), `h` the index of the head, `q_idx` and `kv_idx` the
        positions of query and key (int32). Captured arrays and numbers are read at
        every call. Inside your own `jit` they are read while tracing, so pass values
        that change as arguments. Captured floating-point arrays receive gradients.
        Returning -inf masks the score. An index `b`, `h`, `q_idx` or `kv_idx` beyond
        the end of a captured array is an error if sizes are known while tracing. Not
        checked are computed indices, indices that the function compares (`q_idx < 8`)
        and, with masks other than causal ones and windows, positions: JAX then uses the
        last entry.
      dropout_rate: Fraction of the softmax's weights set to 0, in [0, 1); the others
        are scaled by 1 / (1 - rate).
      dropout_rng: Key of `jax.random`; required if `dropout_rate > 0`. The dropped
        weights depend only on the key, the batch entry, the number of heads, the head
        and the positions, so they are the same in every implementation. The entries of
        a `jax.vmap` drop the same weights unless their keys differ.
      broadcast_dropout: Drop the same weights in every batch entry and head.
      implementation: None selects one by shapes, platform and arguments; see
        `explain_implementation`. "xla" computes all scores of a head together or, for
        few queries, reads keys in place. "blockwise" computes the scores tile by tile
        and skips fully masked tiles. "cudnn" (NVIDIA GPUs) and "splash" (TPUs) are
        fused kernels that support fewer arguments. All have derivatives of every order,
        in forward and reverse mode.
      return_residual: Also return the log-sum-exp of the scores, a scalar per query and
        head. It is rounded, so merging the results of several calls by it adds a
        relative error of about the largest absolute score times 6e-8 (in float32).
      return_max_score: Also return the largest visible score of each head, for example
        for QK-Clip.
      precision: Precision of the matrix products; None means
        `jax.default_matmul_precision`.
      qkv_sharding: How a mesh splits the batch axes and heads of query, key and value,
        for example `jax.P("data", None, "model")`. If there are fewer key heads than
        devices, several devices hold the same heads. Each device computes its part
        without communication. Only needed inside `jit` on a mesh with Auto axes: arrays
        outside `jit`, and types with Explicit axes, contain their sharding. A `jax.P`
        refers to the mesh set by `jax.set_mesh`; without a mesh, `jax.P()` means that
        nothing is split.

    Returns:
      [B..., T, N, Hv] in the dtype of `query`. With `return_residual`, also the
      log-sum-exp [B..., T, N], which is differentiable, in float32, or float64 for
      float64 inputs; if all keys of a query are masked, it is the sink or, without
      sinks, -inf. With `return_max_score`, the last result is each head's largest
      visible score, [B..., N], in the dtype of the log-sum-exp. It ignores sinks and
      has no gradient. It is -inf if all scores are masked, and NaN if the log-sum-exp
      of a query is NaN.

    Raises:
      ValueError: If arguments do not fit together, or if `score_mod` or a `mask_mod`
        looks up an entry outside an array. The message names the argument, what is
        expected and what was given.
      NotImplementedError: If a named implementation cannot compute this call (the
        message lists every reason), or if `score_mod` or a `mask_mod` uses control flow
        or custom derivatives inside `jax.shard_map`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import dot_product_attention
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 8, 16))  # [B, T, N, H]
      >>> key = jax.random.normal(jax.random.key(1), (2, 7, 4, 16))  # [B, S, K, H]
      >>> lengths = jnp.array([7, 3])
      >>> dot_product_attention(query, key, key, key_value_seq_lengths=lengths).shape
      (2, 5, 8, 16)

    References:
      Vaswani et al., Attention is all you need, arXiv:1706.03762; Ainslie et al., GQA,
      arXiv:2305.13245; Dao, FlashAttention-2, arXiv:2307.08691.
    """
    call = canonical(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_offset=query_offset,
        key_value_offset=key_value_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        key_indices=key_indices,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        return_residual=return_residual,
        return_max_score=return_max_score,
        precision=precision,
        qkv_sharding=qkv_sharding,
    )
    result = run(call, implementation)
    results: list[Any] = [result.output]
    # An engine may return the log-sum-exp although nobody asked for it.
    if return_residual:
        results.append(result.lse)
    if result.largest is not None:
        results.append(result.largest)
    if len(results) == 1:
        return result.output
    return tuple(results)


def explain_implementation(  # noqa: D417 - dot_product_attention describes the others
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
    """Explains which implementation computes a call of `dot_product_attention`, and why
    the others do not.

    All arguments but `platform` are those of `dot_product_attention`. The choice
    depends only on shapes, dtypes and values known while tracing. So this also works
    under `jit`, and arrays may be `jax.ShapeDtypeStruct`, or anything that has a shape
    and a dtype.

    Args:
      platform: Explain the call for "cpu", "cuda" (or "gpu") or "tpu" instead of the
        device that would compute it. The platform need not be available: "cuda" then
        assumes H100s, and nothing is compiled for them. cuDNN may still reject the
        shapes, because it can check them only on a machine with a GPU.

    Returns:
      An `Explanation`: `chosen` is the implementation that computes the call, and
      `refusals` maps each implementation to the reasons why it cannot, and what to
      change. `print` shows a table.

    Raises:
      ValueError: If `platform` is unknown, or where `dot_product_attention` raises a
        ValueError.
      NotImplementedError: Where `dot_product_attention` raises a NotImplementedError.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((2, 1000, 4, 64))
      >>> explanation = explain_implementation(x, x, x, is_causal=True)
      >>> explanation.chosen, explanation.refusals["blockwise"]
      ('blockwise', [])
      >>> import jax
      >>> half = jax.ShapeDtypeStruct((2, 100_000, 4, 64), jnp.bfloat16)
      >>> explain_implementation(half, half, half, platform="tpu").chosen
      'splash'
    """

    def explained(*inputs: ArrayLike, **arguments: Any) -> Explanation:
        call = canonical(
            *inputs, return_residual=return_residual, platform=platform, **arguments
        )
        return explain(call, implementation)

    return with_shapes(explained, query, key, value, bias, mask, **arguments)


# Shows all arguments in `help` and editors, which do not resolve `Unpack`.
_parameters = inspect.signature(dot_product_attention).parameters
_platform = inspect.signature(explain_implementation).parameters["platform"]
explain_implementation.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_parameters.values(), _platform], return_annotation=Explanation
)
