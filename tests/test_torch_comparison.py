"""What the comparison with other packages says of PyTorch, as it runs on a CPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

X = torch.linspace(-1, 1, 96).reshape(1, 2, 6, 8)


def test_masked_rows_and_nan():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[1] = False
    assert (scaled_dot_product_attention(X, X, X, attn_mask=mask)[:, :, 1] == 0).all()
    damaged = X.clone()
    damaged[..., 5, :] = torch.nan
    visible = (torch.arange(6) < 5).expand(6, 6)
    assert scaled_dot_product_attention(X, damaged, damaged, attn_mask=visible).isnan().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_sequence_of_padding_in_the_module(need_weights):
    module, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.ones(2, 6, 16)
    padding = torch.tensor([[False] * 6, [True] * 6])
    output, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert output[1].isnan().any() == need_weights


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, when it looks for a jvp
def test_derivatives_that_fused_kernels_lack():
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda x: scaled_dot_product_attention(x, x, x), (X,), (X,))
    x = X.clone().requires_grad_()
    output = scaled_dot_product_attention(x, x, x).sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)
