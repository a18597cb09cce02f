"""The demo's transformer in PyTorch; `export` puts this file beside the weights.

There is no cache: each new token takes a pass over the whole text.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

EPSILON = 1e-6  # as in Flax's norms


class Attention(nn.Module):
    """Causal self-attention over the last `context_length` positions.

    Queries and keys are normalized, then rotated.
    """

    def __init__(self, features: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.heads = heads
        self.context_length = context_length
        self.query = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(features, features, bias=False)
        self.out = nn.Linear(features, features, bias=False)
        self.query_ln = nn.RMSNorm(features // heads, EPSILON)
        self.key_ln = nn.RMSNorm(features // heads, EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        query = rotated(self.query_ln(self.split(self.query(x))), positions)
        key = rotated(self.key_ln(self.split(self.key(x))), positions)
        value = self.split(self.value(x))
        before = positions[:, None] - positions
        visible = (before >= 0) & (before < self.context_length)
        heard = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out(heard.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """Returns the heads, `[batch, heads, length, size]`."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def rotated(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates x `[batch, heads, length, size]` by positions `[length]`.

    Feature i is paired with i + size / 2.
    """
    size = x.shape[-1]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies = (1.0 / base**exponents).float()
    angle = (positions.float()[:, None] * frequencies).repeat(1, 2)
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
        self.attention_norm = nn.RMSNorm(features, EPSILON)
        self.attention = Attention(features, heads, context_length)
        self.network_norm = nn.RMSNorm(features, EPSILON)
        self.mlp = MLP(features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.network_norm(x))


class TokenShift(nn.Module):
    """Adds the embeddings of the tokens before, scaled feature by feature."""

    def __init__(self, distance: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(distance, features))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for i, scale in enumerate(self.scale, start=1):
            total = total + scale * F.pad(x, (0, 0, i, 0))[:, : x.shape[1]]
        return total


class Transformer(nn.Module):
    """The model; its arguments are those under `model` in `config.json`."""

    def __init__(
        self,
        vocabulary_size: int,
        layers: int,
        features: int,
        heads: int,
        context_length: int,
        token_shift: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, features)
        self.shift: nn.Module = nn.Identity()
        if token_shift:
            self.shift = TokenShift(token_shift, features)
        blocks = [Block(features, heads, context_length) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(features, EPSILON)
        self.head = nn.Linear(features, vocabulary_size, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Turns int64 tokens `[batch, length]` into logits of the token after each."""
        x = self.shift(self.embedding(numbers))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def continued(model: nn.Module, numbers: list[int], length: int) -> list[int]:
    """Returns the `length` tokens that follow, each the likeliest."""
    for _ in range(length):
        logits = model(torch.tensor([numbers]))[0, -1]
        numbers = [*numbers, int(logits.argmax())]
    return numbers[-length:]
