"""The reference of the checks: attention in float64 NumPy, with gradients written by
hand.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ArrayLike = Any  # NumPy's


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike = None,
    mask: ArrayLike = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike = None,
    added: ArrayLike = None,
    keep: ArrayLike = None,
    cotangents: tuple[ArrayLike, ArrayLike] | None = None,
    return_max_score: bool = False,
    masked_rows: Literal["zeros", "mean", "mean, padding zeros", "nan"] = "zeros",
    cap_bias: bool = False,
    **masking: Any,
) -> Any:
    """Computes (output, log-sum-exp) and, given their cotangents, the gradients of
    query, key, value, bias and sinks.

    `return_max_score` appends the largest score of each head to this pair. `masking`:
    arguments of `visible_scores`.

    `added` [..., N, T, S] replaces a `score_mod`: it is added to the scores, and -inf
    masks; its gradient comes first. `keep` [..., N, T, S] replaces dropout: it
    multiplies the weights.

    Two arguments follow other packages. `masked_rows` is the output of queries without
    visible keys: zeros, the mean of the values ("mean, padding zeros": 0 for padded
    queries), or NaN, with the gradients of zeros. `cap_bias` caps the sum of score and
    bias.
    """
    # [..., heads, length, size]
    q, k, v = (
        np.moveaxis(np.asarray(x, np.float64), -2, -3) for x in (query, key, value)
    )
    group = q.shape[-3] // k.shape[-3]
    k = np.repeat(k, group, -3)
    v = np.repeat(v, group, -3)
    if scale is None:
        scale = 1 / np.sqrt(q.shape[-1])
    # s = cap * tanh(scale * q k^T / cap) + bias; slope = ds / d(scale * q k^T)
    visible = visible_scores(q.shape[:-1] + k.shape[-2:-1], mask, **masking)
    scores = float(scale) * (q @ np.swapaxes(k, -1, -2))
    slope = np.ones(())
    terms = [added, bias]
    if cap_bias and bias is not None:
        scores = scores + np.asarray(bias, np.float64)
        terms = [added]
    if logits_soft_cap is not None:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        slope = 1 - (scores / logits_soft_cap) ** 2
    for term in terms:
        if term is not None:
            term = np.asarray(term, np.float64)
            visible = visible & (term != -np.inf)
            scores = scores + np.where(term == -np.inf, 0, term)
    scores = np.where(visible, scores, -np.inf)
    # A sink is a score in the denominator only: p = exp(s) / (sum exp(s) + exp(sink))
    if sinks is None:
        sink = np.full((1, 1), -np.inf)
    else:
        sink = np.asarray(sinks, np.float64)[..., None, None]
    largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    shift = np.where(largest == -np.inf, 0, largest)
    e = np.exp(scores - shift)
    total = e.sum(-1, keepdims=True) + np.exp(sink - shift)
    # Rows without visible keys are 0 / 0.
    weights = e / np.where(total == 0, 1, total)
    if masked_rows.startswith("mean"):
        rows = total == 0
        lengths = masking.get("query_seq_lengths")
        if masked_rows == "mean, padding zeros" and lengths is not None:
            rows = rows & visible_scores(rows.shape, query_seq_lengths=lengths)
        weights = np.where(rows, 1 / weights.shape[-1], weights)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + shift)[..., 0]
    if keep is None:
        keep = np.ones(())
    output = (weights * keep) @ v
    if masked_rows == "nan":
        output = np.where(total == 0, np.nan, output)
    answer: Any = np.moveaxis(output, -3, -2), np.moveaxis(lse, -2, -1)
    if return_max_score:
        answer = *answer, scores.max((-2, -1), initial=-np.inf)
    if cotangents is None:
        return answer

    d_output = np.moveaxis(np.asarray(cotangents[0], np.float64), -2, -3)
    d_lse = np.moveaxis(np.asarray(cotangents[1], np.float64), -1, -2)
    # ds = p * (dp - sum(p * dp) + dlse), as dp / ds of a softmax is p * (1 - p).
    d_weights = (d_output @ np.swapaxes(v, -1, -2)) * keep
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean + d_lse[..., None]) * visible
    d_dots = scale * slope * d_scores
    d_q = d_dots @ k
    d_k = np.swapaxes(d_dots, -1, -2) @ q
    d_v = np.swapaxes(weights * keep, -1, -2) @ d_output
    # Query heads of a group share their keys and values.
    d_k, d_v = (
        x.reshape(*x.shape[:-3], -1, group, *x.shape[-2:]).sum(-3) for x in (d_k, d_v)
    )
    gradients = [np.moveaxis(x, -3, -2) for x in (d_q, d_k, d_v)]
    if bias is not None:
        d_bias = d_scores * slope if cap_bias else d_scores
        gradients.append(_sum_to(d_bias, np.shape(bias)))
    if sinks is not None:
        share = np.exp(sink - shift) / np.where(total == 0, 1, total)
        d_sink = share * (d_lse[..., None] - mean)
        gradients.append(_sum_to(d_sink[..., 0].sum(-1), np.shape(sinks)))
    if added is not None:
        gradients.insert(0, d_scores)
    return answer, gradients


def visible_scores(
    shape: tuple[int, ...],
    mask: ArrayLike = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike = None,
    key_value_seq_lengths: ArrayLike = None,
    local_window_size: Any = None,
    query_offset: ArrayLike = 0,
    key_value_offset: ArrayLike = 0,
    query_segment_ids: ArrayLike = None,
    key_value_segment_ids: ArrayLike = None,
    key_indices: ArrayLike = None,
) -> NDArray:
    """Returns a bool array of this shape [..., N, T, S]: True for scores that no
    argument masks.
    """
    visible = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    window = local_window_size
    query_ids = query_segment_ids
    key_ids = key_value_segment_ids
    position = np.arange(shape[-2])[:, None] + _over_heads(query_offset)
    column = np.arange(shape[-1])[None, :] + _over_heads(key_value_offset)
    if window is None or isinstance(window, int):
        window = (window, window)
    left, right = window
    if is_causal:
        visible = visible & (column <= position)
    if left is not None:
        visible = visible & (column >= position - left)
    if right is not None:
        visible = visible & (column <= position + right)
    if query_seq_lengths is not None:
        visible = visible & (position < _over_heads(query_seq_lengths))
    if key_value_seq_lengths is not None:
        visible = visible & (column < _over_heads(key_value_seq_lengths))
    if query_ids is not None or key_ids is not None:
        query_ids = np.asarray(key_ids if query_ids is None else query_ids)
        key_ids = np.asarray(query_ids if key_ids is None else key_ids)
        same = query_ids[..., None, :, None] == key_ids[..., None, None, :]
        visible = visible & same
    if key_indices is not None:
        lists = np.asarray(key_indices)
        if lists.ndim < len(shape):
            # One list for all heads.
            lists = lists[..., None, :]
        # [..., 1 or K, T, k].
        lists = np.moveaxis(lists, -2, -3)
        listed = (lists[..., None] == np.arange(shape[-1])).any(-2)
        visible = visible & np.repeat(listed, shape[-3] // listed.shape[-3], -3)
    return visible


def _over_heads(x: ArrayLike) -> NDArray:
    return np.asarray(x)[..., None, None, None]


def _sum_to(x: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Sums a gradient over the axes along which an array of this shape was
    broadcast.
    """
    x = x.sum(tuple(range(x.ndim - len(shape))))
    of_size_1 = tuple(i for i, n in enumerate(shape) if n == 1)
    return x.sum(of_size_1, keepdims=True)
