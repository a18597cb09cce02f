"""A PyTorch port of the demo's transformer, without a cache: every character takes a pass over the whole text."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_rope import angles, default_frequencies, rotate_halves

EPSILON = 1e-6  # Flax's, of both norms


class Attention(nn.Module):
    """Causal over the last `context_length` positions; queries and keys are normalized, then rotated."""

    def __init__(self, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.heads, self.size, self.context_length = heads, features // heads, context_length
        self.query, self.key, self.value, self.out = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.query_ln, self.key_ln = (nn.LayerNorm(self.size, EPSILON, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, self.size) for project in (self.query, self.key, self.value)
        )
        positions = torch.arange(length)
        angle = angles(positions[None], default_frequencies(10_000.0, self.size))
        query, key = rotate_halves(self.query_ln(query), angle), rotate_halves(self.key_ln(key), angle)
        before = positions[:, None] - positions
        visible = (before >= 0) & (before < self.context_length)
        heard = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (query, key, value)), attn_mask=visible)
        return self.out(heard.transpose(1, 2).reshape(batch, length, features))


class Block(nn.Module):
    def __init__(self, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = (nn.RMSNorm(features, EPSILON) for _ in range(2))
        self.attention = Attention(features, heads, context_length)
        self.widen = nn.Linear(features, 4 * features, bias=False)
        self.narrow = nn.Linear(4 * features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(F.relu(self.widen(self.network_norm(x))) ** 2)


class Transformer(nn.Module):
    def __init__(self, vocabulary_size: int, layers: int, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, features)
        self.blocks = nn.ModuleList([Block(features, heads, context_length) for _ in range(layers)])
        self.norm = nn.RMSNorm(features, EPSILON)
        self.head = nn.Linear(features, vocabulary_size, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def continued(model: nn.Module, numbers: list[int], length: int) -> list[int]:
    """The likeliest characters after the given ones."""
    for _ in range(length):
        numbers = [*numbers, int(model(torch.tensor([numbers]))[0, -1].argmax())]
    return numbers[-length:]
