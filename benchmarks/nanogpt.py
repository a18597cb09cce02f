"""Reimplements nanoGPT's CPU recipe in PyTorch: a GPT-2 trained with AdamW.

4 layers, 4 heads, 128 features, learned positions, LayerNorm without bias, GELU, a head
tied to the embedding, no dropout; 2000 steps of 12 windows of 64 characters; AdamW with
learning rate 1e-3 after 100 steps, along a cosine to 1e-4, beta2 0.99, weight decay 0.1
of matrices, gradients clipped to norm 1.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 4
HEADS = 4
FEATURES = 128
CONTEXT = 64
BATCH = 12
STEPS = 2000
WARM_UP = 100
HIGHEST = 1e-3
LOWEST = 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(FEATURES, bias=False)
        self.mlp_norm = nn.LayerNorm(FEATURES, bias=False)
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES, bias=False)
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.widen = nn.Linear(FEATURES, 4 * FEATURES, bias=False)
        self.narrow = nn.Linear(4 * FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        # [B, T, 3, N, H] becomes [B, N, 3, T, H].
        heads = qkv.unflatten(-1, (3, HEADS, FEATURES // HEADS)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        heard = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(heard.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.widen(self.mlp_norm(x)))
        return x + self.narrow(hidden)


class GPT(nn.Module):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, FEATURES)
        self.position = nn.Embedding(CONTEXT, FEATURES)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(FEATURES, bias=False)
        for name, array in self.named_parameters():
            if array.ndim > 1:
                std = 0.02
                # As in GPT-2: each layer adds two terms to the residual stream.
                if name.endswith(("out.weight", "narrow.weight")):
                    std /= math.sqrt(2 * LAYERS)
                nn.init.normal_(array, std=std)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean loss over windows `[B, T + 1]`, in nats per character."""
        tokens = windows[:, :-1]
        targets = windows[:, 1:]
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        # The head is tied to the embedding.
        logits = functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Of a step, from 0, in a run of so many."""
    if step < WARM_UP:
        return HIGHEST * (step + 1) / (WARM_UP + 1)
    # From 1 to 0 along half a cosine.
    done = (step - WARM_UP) / (steps - WARM_UP)
    share = (1 + math.cos(math.pi * done)) / 2
    return LOWEST + (HIGHEST - LOWEST) * share


def trainer(
    characters: np.ndarray, vocabulary_size: int, steps: int = STEPS
) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """The model, and a function that takes a step, numbered from 0, and returns its
    loss.

    Args:
        characters: to train on, int32 `[S]`.
        vocabulary_size: the distinct ones.
        steps: of the run, after which the learning rate is at its end.
    """
    torch.manual_seed(0)
    model = GPT(vocabulary_size)
    parameters = list(model.parameters())
    matrices = [array for array in parameters if array.ndim > 1]
    vectors = [array for array in parameters if array.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, HIGHEST, betas=(0.9, 0.99), fused=True)
    text = torch.from_numpy(characters).long()
    offsets = torch.arange(CONTEXT + 1)

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, steps)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        windows = text[starts + offsets]
        loss = model(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return model, step


def loss_on(model: nn.Module, windows: np.ndarray) -> float:
    """The mean loss over validation windows `[C, W, T + 1]`."""
    losses = []
    with torch.no_grad():
        for some in windows:
            loss = model(torch.from_numpy(some).long())
            losses.append(float(loss))
    return float(np.mean(losses))
