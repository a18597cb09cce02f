"""PyTorch ports of the attentions that flax_mha reproduces, faults included, and of grouped-query attention.

Shapes are batch first. Every port keeps the whole [batch, heads, queries, keys] matrix of scores.
"""

import math

import torch
from torch import Tensor, nn


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head; leading axes are batch."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return torch.softmax(scores, dim=-1) @ value


def split_heads(x: Tensor, length: int, num_heads: int, head_dim: int) -> Tensor:
    return x.view(len(x), length, num_heads, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class NoteMHA(nn.Module):
    """Takes the length of keys and values from the queries, so it fails where they differ."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads, d_model // num_heads
        self.w_q, self.w_k, self.w_v, self.w_out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = self.w_q(query), self.w_k(key), self.w_v(value)
        q, k, v = (split_heads(x, query.shape[1], *self.heads) for x in inputs)
        return self.w_out(merge_heads(scaled_dot_product_attention(q, k, v)))


class BertSelfAttention(nn.Module):
    """Takes a config with `hidden_size` and `num_of_attention_heads`."""

    def __init__(self, config) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_of_attention_heads, size // config.num_of_attention_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.query(x), self.key(x), self.value(x)
        q, k, v = (split_heads(y, x.shape[1], *self.heads) for y in inputs)
        return self.dense(merge_heads(scaled_dot_product_attention(q, k, v)))


class DotProductAttention(nn.Module):
    """One head with dropout on the weights; the values may have another feature size than queries and keys."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        return self.dropout(torch.softmax(scores, dim=-1)) @ values


class D2LMHA(nn.Module):
    """Queries, keys and values of three feature sizes, no biases."""

    def __init__(self, key_size, query_size, value_size, num_hiddens: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = num_heads, num_hiddens // num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=False)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        inputs = self.W_q(queries), self.W_k(keys), self.W_v(values)
        q, k, v = (split_heads(x, x.shape[1], *self.heads) for x in inputs)
        return self.W_o(merge_heads(self.attention(q, k, v)))


class MaskedSelfAttention(nn.Module):
    """Where the mask is 0 the score is -inf, so a query with no key left answers NaN; any head_num is taken."""

    def __init__(self, hidden_dim: int, head_num: int, attention_dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = head_num, hidden_dim // head_num
        self.dropout = nn.Dropout(attention_dropout)
        self.q, self.k, self.v, self.out_proj = (nn.Linear(hidden_dim, hidden_dim) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(y, x.shape[1], *self.heads) for y in (self.q(x), self.k(x), self.v(x)))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.heads[1])
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask == 0, -math.inf)
        return self.out_proj(merge_heads(self.dropout(torch.softmax(scores, dim=-1)) @ v))


class GroupedQueryAttention(nn.Module):
    """Groups of query heads share one key and value head, as in Llama, but without rotary positions."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.causal = num_heads, num_kv_heads, head_dim, causal
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, groups = x.shape[1], self.num_heads // self.num_kv_heads
        q = split_heads(self.q_proj(x), length, self.num_heads, self.head_dim)
        k, v = (split_heads(y, length, self.num_kv_heads, self.head_dim) for y in (self.k_proj(x), self.v_proj(x)))
        scores = q @ k.repeat_interleave(groups, dim=1).transpose(-2, -1) / math.sqrt(self.head_dim)
        if self.causal:
            scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
        return self.o_proj(merge_heads(torch.softmax(scores, dim=-1) @ v.repeat_interleave(groups, dim=1)))
