"""Stand-ins for cuDNN's two custom calls: what they compute from their operands, dense
and in float32.

The backward call computes weights from the log-sum-exp that it is given. What cuDNN
leaves undefined is NaN here: rows whose keys are all hidden, and rows and keys past the
lengths.
"""

import jax.numpy as jnp


def visible_scores(kernel, operands):
    """Bools [B, 1, t, s], and which rows [B, t] and keys [B, s] are within the
    lengths.
    """
    batch, rows = operands.query.shape[:2]
    columns = operands.key.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    column = jnp.arange(columns, dtype=jnp.int32)[None, None, :]
    visible = jnp.ones((batch, rows, columns), bool)
    used_rows = jnp.ones((batch, rows), bool)
    used_keys = jnp.ones((batch, columns), bool)
    if operands.key_lengths is not None:
        used_rows = row[..., 0] < operands.query_lengths[:, None]
        used_keys = column[:, 0] < operands.key_lengths[:, None]
        visible = used_rows[:, :, None] & used_keys[:, None, :]
    if kernel.is_causal:
        assert rows == columns
        visible = visible & (column <= row)
    if kernel.left is not None:
        assert kernel.is_causal
        visible = visible & (column >= row - kernel.left)
    return visible[:, None], used_rows, used_keys


def all_heads(x, operands):
    """Keys or values of every query head, in float32."""
    group = operands.query.shape[2] // x.shape[2]
    return jnp.repeat(x, group, axis=2).astype(jnp.float32)


def scores_of(kernel, operands, visible):
    query = operands.query.astype(jnp.float32)
    key = all_heads(operands.key, operands)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * jnp.float32(kernel.scale)
    if operands.bias is not None:
        scores = scores + operands.bias.astype(jnp.float32)
    # NaN in a hidden key spreads, as by a product with a weight of 0.
    hidden = jnp.where(jnp.isnan(scores), jnp.nan, -jnp.inf)
    return jnp.where(visible, scores, hidden)


def call_forward(kernel, operands):
    visible, used_rows, _ = visible_scores(kernel, operands)
    scores = scores_of(kernel, operands, visible)
    largest = scores.max(-1)
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(-1)
    weights = (weights / total[..., None]).astype(operands.query.dtype)
    value = all_heads(operands.value, operands)
    output = jnp.einsum("bnts,bsnh->btnh", weights.astype(jnp.float32), value)
    output = jnp.where(used_rows[..., None, None], output, jnp.nan)
    lse = jnp.where(used_rows[:, None], largest + jnp.log(total), jnp.nan)
    return [output.astype(operands.query.dtype), lse]


def call_backward(kernel, operands, output, lse, d_output):
    visible, used_rows, used_keys = visible_scores(kernel, operands)
    scores = scores_of(kernel, operands, visible)
    in_rows = used_rows[..., None, None]
    in_keys = used_keys[..., None, None]
    output = jnp.where(in_rows, output.astype(jnp.float32), 0)
    d_output = jnp.where(in_rows, d_output.astype(jnp.float32), 0)
    lse = jnp.where(used_rows[:, None], lse, 1e30)

    query = operands.query.astype(jnp.float32)
    key = all_heads(operands.key, operands)
    value = all_heads(operands.value, operands)
    weights = jnp.exp(scores - lse[..., None])  # NaN if the log-sum-exp is -inf
    delta = jnp.einsum("btnh,btnh->bnt", d_output, output)
    d_weights = jnp.einsum("btnh,bsnh->bnts", d_output, value)
    d_scores = weights * (d_weights - delta[..., None])
    scale = jnp.float32(kernel.scale)
    d_query = jnp.einsum("bnts,bsnh->btnh", d_scores, key) * scale
    d_key = jnp.einsum("bnts,btnh->bsnh", d_scores, query) * scale
    d_value = jnp.einsum("bnts,btnh->bsnh", weights, d_output)

    def of_key_heads(x):
        batch, length, _, size = x.shape
        heads = operands.key.shape[2]
        x = x.reshape(batch, length, heads, -1, size).sum(3)
        return jnp.where(in_keys, x, jnp.nan)

    d_query = jnp.where(in_rows, d_query, jnp.nan)
    gradients = [d_query, of_key_heads(d_key), of_key_heads(d_value)]
    if kernel.bias_gradient:
        shape = operands.bias.shape
        axes = [i for i in range(4) if shape[i] != d_scores.shape[i]]
        in_lengths = in_rows[:, None, :, 0, 0, None] & in_keys[:, None, None, :, 0, 0]
        d_scores = jnp.where(in_lengths, d_scores, jnp.nan)
        gradients.append(d_scores.sum(axes, keepdims=True))
    dtypes = [x.dtype for x in operands[:4] if x is not None]
    return [x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=False)]
