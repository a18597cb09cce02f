"""The demo's transformer in PyTorch alone; `train_demo export` puts this file beside the weights.

There is no cache: each new token takes a pass over the whole text.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

EPSILON = 1e-6  # as in Flax's norms


class Attention(nn.Module):
    """Causal self-attention over the last `context_length` positions; normalizes, then rotates queries and keys."""

    def __init__(self, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.heads, self.size, self.context_length = heads, features // heads, context_length
        self.query, self.key, self.value, self.out = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.query_ln, self.key_ln = (nn.RMSNorm(self.size, EPSILON) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, self.size) for project in (self.query, self.key, self.value)
        )
        positions = torch.arange(length)
        query, key = rotated(self.query_ln(query), positions), rotated(self.key_ln(key), positions)
        before = positions[:, None] - positions
        visible = (before >= 0) & (before < self.context_length)
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        heard = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out(heard.transpose(1, 2).reshape(batch, length, features))


def rotated(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates x `[batch, length, heads, size]` by positions `[length]`; feature i is paired with i + size / 2."""
    size = x.shape[-1]
    frequencies = (1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)).float()
    angle = (positions.float()[:, None] * frequencies)[:, None].repeat(1, 1, 2)
    low, high = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-high, low], dim=-1) * angle.sin()


class MLP(nn.Module):
    """Squared ReLU between two matrices."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.widen = nn.Linear(features, 4 * features, bias=False)
        self.narrow = nn.Linear(4 * features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x)) ** 2)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP, each added to its input."""

    def __init__(self, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = (nn.RMSNorm(features, EPSILON) for _ in range(2))
        self.attention = Attention(features, heads, context_length)
        self.mlp = MLP(features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.network_norm(x))


class TokenShift(nn.Module):
    """Adds the embeddings of the tokens before each token, scaled feature by feature."""

    def __init__(self, distance: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(distance, features))

    def forward(self, x: Tensor) -> Tensor:
        shifted = [F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(1, len(self.scale) + 1)]
        return x + sum(scale * before for scale, before in zip(self.scale, shifted, strict=True))


class Transformer(nn.Module):
    """The model; its arguments are those under `model` in `config.json`."""

    def __init__(
        self, vocabulary_size: int, layers: int, features: int, heads: int, context_length: int, token_shift: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, features)
        self.shift = TokenShift(token_shift, features) if token_shift else nn.Identity()
        self.blocks = nn.ModuleList([Block(features, heads, context_length) for _ in range(layers)])
        self.norm = nn.RMSNorm(features, EPSILON)
        self.head = nn.Linear(features, vocabulary_size, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Turns int64 tokens `[batch, length]` into logits of the tokens after each, `[batch, length, vocabulary]`."""
        x = self.shift(self.embedding(numbers))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def continued(model: nn.Module, numbers: list[int], length: int) -> list[int]:
    """Returns the `length` tokens that follow the given ones, each the likeliest after all before it."""
    for _ in range(length):
        numbers = [*numbers, int(model(torch.tensor([numbers]))[0, -1].argmax())]
    return numbers[-length:]
