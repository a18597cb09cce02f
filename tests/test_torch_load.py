"""`load_torch` from PyTorch's own objects: tensors of every kind, modules, quantized models."""

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


def quantized():
    weights = torch_mha().state_dict()
    return weights | {"in_proj_weight": torch.quantize_per_tensor(weights["in_proj_weight"], 0.1, 0, torch.qint8)}


WRONG = {
    "a module": (torch_mha, "got a MultiheadAttention; pass module.state_dict()"),
    "sparse": (
        lambda: {key: x.to_sparse() if key == "in_proj_weight" else x for key, x in torch_mha().state_dict().items()},
        "in_proj_weight must be a dense tensor with values, .*sparse_coo",
    ),
    "meta": (lambda: torch_mha(device="meta").state_dict(), "in_proj_weight has no values, .* the meta device"),
    "quantized": (quantized, "in_proj_weight must be floating point, but got qint8; dequantize"),
    "float8": (
        lambda: {key: value.to(torch.float8_e4m3fn) for key, value in torch_mha().state_dict().items()},
        "in_proj_weight must be floating point, but got float8_e4m3fn",
    ),
    "a checkpoint": (lambda: {"model": torch_mha().state_dict()}, r"pass state_dict\['model'\]"),
    "a larger module": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, batch_first=True), 3, enable_nested_tensor=False
        ).state_dict(),
        r"prefixes:\n  'layers.0.self_attn.', ... 'layers.2.self_attn.' \(3 layers\)$",
    ),
    "other sizes": (
        lambda: nn.MultiheadAttention(12, 2).state_dict(),
        r"(?s)query.kernel must have shape \(8, 2, 4\), but got \(12, 2, 6\)\n.*out.bias must have shape",
    ),
}


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_refuses_before_anything_changes(make, message):
    module = make_module()
    before = [leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(nnx.state(module, nnx.Param)))]
    with pytest.raises(ValueError, match=message) as error:
        convert.load_torch(module, make())
    assert len(str(error.value).splitlines()) <= 10
    after = [leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(nnx.state(module, nnx.Param)))]
    assert after == before
