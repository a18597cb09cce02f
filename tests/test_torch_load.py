"""`load_torch` with PyTorch's own objects: tensors of every kind, modules, quantized models."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import flax_mha
from flax_mha import convert


def make_module(**options):
    return flax_mha.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **options)


def torch_mha(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    """float32 holds the first two exactly; float64 is rounded to the module's dtype."""
    layer, module = torch_mha().to(dtype), make_module()
    convert.load_torch(module, layer.state_dict())
    expected = layer.out_proj.weight.detach().float().numpy().T.reshape(2, 4, 8)
    np.testing.assert_array_equal(module.out.kernel.get_value(), expected)


def test_views_that_are_not_contiguous():
    weights = torch_mha().state_dict()
    strided = {key: torch.stack([value, value], dim=-1).bfloat16()[..., 0] for key, value in weights.items()}
    assert not strided["in_proj_weight"].is_contiguous()
    one, other = make_module(), make_module()
    convert.load_torch(one, strided)
    convert.load_torch(other, {key: value.bfloat16() for key, value in weights.items()})
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one, nnx.Param), nnx.state(other, nnx.Param))


def changed(change):
    weights = torch_mha().state_dict()
    return weights | {"in_proj_weight": change(weights["in_proj_weight"])}


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# test_convert_load.py has the errors of arrays.
WRONG = {
    "a module": (torch_mha, "got a MultiheadAttention; pass module.state_dict()"),
    "sparse": (lambda: changed(torch.Tensor.to_sparse), "in_proj_weight must be a dense tensor .*sparse_coo"),
    "meta": (lambda: torch_mha(device="meta").state_dict(), "in_proj_weight has no values, .* the meta device"),
    "quantized": (lambda: changed(quantized), "in_proj_weight must be floating point, but got qint8; dequantize"),
    "float8": (
        lambda: changed(lambda x: x.to(torch.float8_e4m3fn)),
        "in_proj_weight must be floating point, but got float8_e4m3fn",
    ),
}


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_refuses_before_anything_changes(make, message):
    module = make_module()
    before = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    with pytest.raises(ValueError, match=message) as error:
        convert.load_torch(module, make())
    assert len(str(error.value).splitlines()) <= 10
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module, nnx.Param)), before)
