"""PyTorch ports of the attentions whose weights flax_mha converts, including their
faults.

Shapes are batch first. Every port keeps the whole [batch, heads, queries, keys] matrix
of scores.
"""

import math

import torch
from torch import Tensor, nn


def attend(
    query,
    key,
    value,
    head_dim: int,
    length: int | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention by heads of inputs [batch, length, heads * head_dim]; if given,
    `length` is that of all three.
    """

    def split_heads(x: Tensor) -> Tensor:
        return x.view(len(x), length or x.shape[1], -1, head_dim).transpose(1, 2)

    q, k, v = (split_heads(x) for x in (query, key, value))
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    output = torch.softmax(scores, dim=-1) @ v
    return output.transpose(1, 2).flatten(2)


class NoteMHA(nn.Module):
    """Takes the length of keys and values from the queries, so it fails if they
    differ.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = d_model // num_heads
        self.w_q, self.w_k, self.w_v, self.w_out = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = self.w_q(query)
        k = self.w_k(key)
        v = self.w_v(value)
        # This is the fault.
        length = query.shape[1]
        return self.w_out(attend(q, k, v, self.head_dim, length))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.query, self.key, self.value, self.dense = (
            nn.Linear(hidden_size, hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        k = self.key(x)
        v = self.value(x)
        return self.dense(attend(q, k, v, self.head_dim))


class D2LMHA(nn.Module):
    """Queries, keys and values of three feature sizes, no biases."""

    def __init__(
        self,
        key_size: int,
        query_size: int,
        value_size: int,
        num_hiddens: int,
        num_heads: int,
    ) -> None:
        super().__init__()
        self.head_dim = num_hiddens // num_heads
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=False)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = self.W_q(queries)
        k = self.W_k(keys)
        v = self.W_v(values)
        return self.W_o(attend(q, k, v, self.head_dim))


class MaskedSelfAttention(nn.Module):
    """Where the mask is 0 the score is -inf, so a query without keys returns NaN."""

    def __init__(self, hidden_dim: int, head_num: int) -> None:
        super().__init__()
        self.head_dim = hidden_dim // head_num
        self.q, self.k, self.v, self.out_proj = (
            nn.Linear(hidden_dim, hidden_dim) for _ in range(4)
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        visible = None
        if attention_mask is not None:
            visible = attention_mask != 0
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        return self.out_proj(attend(q, k, v, self.head_dim, visible=visible))
