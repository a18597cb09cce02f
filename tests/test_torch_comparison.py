"""Statements of the documentation about PyTorch, checked on a CPU."""

import jax
import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flax_mha import dot_product_attention
from flax_mha.masks import FunctionMask

X = torch.linspace(-1, 1, 96).reshape(1, 2, 6, 8)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_functions_of_scores_and_positions_have_the_arguments_of_flex_attention():
    """The same two functions, passed to both."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - (0.25 * h + b + 0.5) * abs(2 * q_idx - kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx + 2 * kv_idx + b) % (h + 2) != 1)

    x = torch.linspace(-1, 1, 192).sin().reshape(2, 2, 6, 8)
    block_mask = create_block_mask(mask_mod, 2, 2, 6, 6, device="cpu")
    want = flex_attention(x, x, x, score_mod, block_mask)
    ours = x.numpy().swapaxes(1, 2)
    with jax.numpy_dtype_promotion("standard"):
        got = dot_product_attention(
            ours, ours, ours, mask=FunctionMask(mask_mod), score_mod=score_mod
        )
    np.testing.assert_allclose(got, want.numpy().swapaxes(1, 2), rtol=0, atol=1e-6)


def test_masked_rows_are_zero_in_torch():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[1] = False
    output = scaled_dot_product_attention(X, X, X, attn_mask=mask)
    assert (output[:, :, 1] == 0).all()


def test_masked_nan_reaches_every_row_in_torch():
    damaged = X.clone()
    damaged[..., 5, :] = torch.nan
    visible = (torch.arange(6) < 5).expand(6, 6)
    output = scaled_dot_product_attention(X, damaged, damaged, attn_mask=visible)
    assert output.isnan().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_sequence_of_padding_is_nan_in_the_module_if_it_returns_weights(need_weights):
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.ones(2, 6, 16)
    padding = torch.tensor([[False] * 6, [True] * 6])
    output, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert output[1].isnan().any() == need_weights


# PyTorch's own, when it looks for a jvp.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_fused_kernels_of_torch_lack_derivatives():
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda x: scaled_dot_product_attention(x, x, x), (X,), (X,))
    x = X.clone().requires_grad_()
    output = scaled_dot_product_attention(x, x, x).sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)
