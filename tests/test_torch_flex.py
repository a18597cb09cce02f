"""The recipes of the gallery against PyTorch's FlexAttention: the same mods, line by line, in torch."""

import functools
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from marks import with_core_tuples
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flax_mha import dot_product_attention, recipes

B, N, K, H, S = 2, 6, 2, 8, 67
rng = np.random.default_rng(0)
IDS = np.sort(rng.integers(0, 4, (B, S)), -1)
BLOCKS = rng.random((N, 9, 9)) < 0.4
BLOCKS[:, :, 0] = True
TABLE = rng.standard_normal((12, N)).astype(np.float32)
SINKS = rng.standard_normal(N).astype(np.float32)


def causal(b, h, q, k):
    return q >= k


def t5_bias(score, b, h, q, k):
    distance = (q - k).clamp(min=0)
    ratio = torch.log(distance.clamp(min=1).float() / 6) / np.log(40 / 6)
    bucket = torch.where(distance < 6, distance, (6 + (ratio * 6).int()).clamp(max=11))
    return score + torch.from_numpy(TABLE)[bucket, h]


SLOPES = 2.0 ** -torch.tensor([2.0, 4, 6, 8, 1, 3])  # of six heads: those of four, and every second one of eight
# ours, torch's mask_mod, torch's score_mod
RECIPES = {
    "causal": (recipes.causal(), causal, None),
    "sliding window": (recipes.sliding_window(9), lambda b, h, q, k: (q >= k) & (q - k <= 9), None),
    "prefix-LM": (recipes.prefix_lm(20), lambda b, h, q, k: (q >= k) | (k < 20), None),
    "documents": (
        recipes.documents(IDS),
        lambda b, h, q, k: (q >= k) & (torch.from_numpy(IDS)[b, q] == torch.from_numpy(IDS)[b, k]),
        None,
    ),
    "ALiBi": (recipes.alibi(N), causal, lambda score, b, h, q, k: score - SLOPES[h] * (q - k)),
    "T5 bias": (recipes.t5_bias(TABLE, max_distance=40), causal, t5_bias),
    "soft cap": (recipes.soft_cap(1.5), causal, lambda score, b, h, q, k: 1.5 * torch.tanh(score / 1.5)),
    "attention sinks": (recipes.attention_sinks(SINKS, 9), lambda b, h, q, k: (q >= k) & (q - k <= 9), None),
    "dilated": (recipes.dilated(3), lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), None),
    "block-sparse": (
        recipes.block_sparse(BLOCKS, 8),
        lambda b, h, q, k: torch.from_numpy(BLOCKS)[h, q // 8, k // 8],
        None,
    ),
}
# In turns, for test_recipes.py has every recipe by both.
CASES = [*((name, ("xla", "blockwise")[i % 2]) for i, name in enumerate(RECIPES)), ("T5 bias", "xla")]
ARRAYS = [np.random.default_rng(i).standard_normal((B, S, n, H)).astype(np.float32) for i, n in enumerate((N, K, K))]


@functools.cache
def by_torch(name):
    _, mask_mod, score_mod = RECIPES[name]
    tensors = [torch.from_numpy(x.swapaxes(1, 2).copy()) for x in ARRAYS]
    block_mask = create_block_mask(mask_mod, B, N, S, S, device="cpu")
    with warnings.catch_warnings():  # uncompiled, it says that it is slow
        warnings.simplefilter("ignore")
        want, lse = flex_attention(
            *tensors, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, return_lse=True
        )
    if name == "attention sinks":  # FlexAttention knows none: each takes its share of the sum afterwards
        want = want * torch.sigmoid(lse - torch.from_numpy(SINKS)[:, None])[..., None]
    return want.numpy().swapaxes(1, 2)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "implementation"), with_core_tuples(CASES, *(x for x in CASES if x[0] == "T5 bias")))
def test_same_as_flex_attention(name, implementation):
    got = dot_product_attention(*map(jnp.asarray, ARRAYS), **RECIPES[name][0], implementation=implementation)
    want = by_torch(name)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
