"""Every layout of flax_mha.convert with the PyTorch module that saves it, and
`load_torch` with PyTorch's objects.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from flax import nnx
from torch import nn
from torch_port import D2LMHA, BertSelfAttention, MaskedSelfAttention, NoteMHA

import flax_mha
from flax_mha import convert

BATCH = 2
QUERIES = 5
KEYS = 7
HEADS = 3
HEAD_DIM = 13
FEATURES = HEADS * HEAD_DIM


def torch_mha(**options):
    return nn.MultiheadAttention(FEATURES, HEADS, batch_first=True, **options)


SELF = (FEATURES,) * 4
KDIM = (FEATURES, 17, 19, FEATURES)
VDIM = (FEATURES, FEATURES, 19, FEATURES)
# name: (layout, module, the features of queries, keys, values and output);
# test_torch_families.py has other layouts.
MODULES = {
    "torch": ("torch", torch_mha, SELF),
    "torch without bias": ("torch", lambda: torch_mha(bias=False), SELF),
    "torch kdim": ("torch_separate", lambda: torch_mha(kdim=17, vdim=19), KDIM),
    "torch vdim without bias": (
        "torch_separate",
        lambda: torch_mha(vdim=19, bias=False),
        VDIM,
    ),
    "note_mha": ("note_mha", lambda: NoteMHA(FEATURES, HEADS), SELF),
    "bert_self_attention": (
        "bert_self_attention",
        lambda: BertSelfAttention(FEATURES, HEADS),
        SELF,
    ),
    "d2l_mha": (
        "d2l_mha",
        lambda: D2LMHA(17, 11, 19, FEATURES, HEADS),
        (11, 17, 19, FEATURES),
    ),
    "masked_self_attention": (
        "masked_self_attention",
        lambda: MaskedSelfAttention(FEATURES, HEADS),
        SELF,
    ),
}


@pytest.fixture(params=MODULES)
def case(request):
    """A layout, its module with nonzero biases, and the features."""
    torch.manual_seed(0)
    layout, make, features = MODULES[request.param]
    module = make().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layout, module, features


def attend(params, *inputs):
    """Attention in float64 of inputs [batch, length, features]."""
    names = zip(("query", "key", "value"), inputs, strict=True)
    arrays = []
    for name, x in names:
        layer = params[name]
        heads = np.einsum("btd,dnh->btnh", x, layer["kernel"])
        arrays.append(heads + layer.get("bias", 0.0))
    output, _ = reference.attention(*arrays)
    layer = params["out"]
    output = np.einsum("btnh,nho->bto", output, layer["kernel"])
    return output + layer.get("bias", 0.0)


@pytest.mark.core
def test_converted_weights_give_the_output_of_the_module(case):
    _, module, features = case
    # NoteMHA expects as many keys as queries.
    length = QUERIES if isinstance(module, NoteMHA) else KEYS
    sizes = zip((QUERIES, length, length), features, strict=False)
    inputs = [torch.randn(BATCH, *size, dtype=torch.float64) for size in sizes]
    given = inputs
    if isinstance(module, BertSelfAttention | MaskedSelfAttention):
        # Self-attention takes one array.
        given = inputs[:1]
        inputs = inputs[:1] * 3

    with torch.no_grad():
        expected = module.double()(*given)
    params = convert.from_torch(module.state_dict(), HEADS)
    got = attend(params, *(x.numpy() for x in inputs))

    if isinstance(expected, tuple):
        expected, _ = expected
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-12)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "of_arrays"),
    [
        (torch.float16, np.float16),
        (torch.float32, np.float32),
        (torch.float64, np.float64),
        (torch.bfloat16, ml_dtypes.bfloat16),
    ],
    ids=str,
)
def test_modules_load_the_result_of_to_torch(case, dtype, of_arrays):
    layout, module, _ = case
    weights = module.to(dtype).state_dict()
    original = {key: value.clone() for key, value in weights.items()}

    params = convert.from_torch(original, HEADS)
    arrays = convert.to_torch(params, layout)

    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(of_arrays)}
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    # PyTorch takes no arrays of bfloat16, and float32 holds them exactly.
    if dtype == torch.bfloat16:
        arrays = {key: x.astype(np.float32) for key, x in arrays.items()}
    module.load_state_dict({key: torch.from_numpy(x) for key, x in arrays.items()})
    for key, value in module.state_dict().items():
        assert torch.equal(bits(value), bits(original[key])), key


@pytest.mark.core
def test_every_bfloat16_is_exact():
    numbers = torch.arange(2**16, dtype=torch.int32).reshape(256, 256)
    numbers = numbers.to(torch.uint16)
    weight = numbers.view(torch.bfloat16)
    state_dict = {f"{name}_proj.weight": weight for name in "qkvo"}
    params = convert.from_torch(state_dict, 2)
    result = convert.to_torch(params, "hf_llama")["k_proj.weight"]
    np.testing.assert_array_equal(result.view(np.uint16), numbers.numpy())


def test_results_share_no_memory_with_parameters():
    module = torch_mha()
    params = convert.from_torch(dict(module.named_parameters()), HEADS)
    nn.init.zeros_(module.out_proj.weight)
    assert params["out"]["kernel"].any()
    assert all(parameter.requires_grad for parameter in module.parameters())


def make_module():
    return flax_mha.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))


def small_mha(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


@pytest.mark.core
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_load_torch_converts_dtypes(dtype):
    """float32 holds the first two exactly; float64 is rounded to the module's dtype."""
    layer = small_mha().to(dtype)
    module = make_module()
    convert.load_torch(module, layer.state_dict())
    expected = layer.out_proj.weight.detach().float().numpy().T.reshape(2, 4, 8)
    np.testing.assert_array_equal(module.out.kernel.get_value(), expected)


def test_load_torch_takes_views_that_are_not_contiguous():
    weights = small_mha().state_dict()
    strided = {
        key: torch.stack([value, value], dim=-1).bfloat16()[..., 0]
        for key, value in weights.items()
    }
    assert not strided["in_proj_weight"].is_contiguous()
    contiguous = {key: value.bfloat16() for key, value in weights.items()}

    def loaded(state_dict):
        module = make_module()
        convert.load_torch(module, state_dict)
        return nnx.state(module, nnx.Param)

    expected = loaded(contiguous)
    jax.tree.map(np.testing.assert_array_equal, loaded(strided), expected)


def changed(change):
    weights = small_mha().state_dict()
    return weights | {"in_proj_weight": change(weights["in_proj_weight"])}


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# test_convert_load.py has the errors of arrays.
WRONG = {
    "a module": (small_mha, "got a MultiheadAttention; pass module.state_dict()"),
    "sparse": (
        lambda: changed(torch.Tensor.to_sparse),
        "in_proj_weight must be a dense tensor .*sparse_coo",
    ),
    "meta": (
        lambda: small_mha(device="meta").state_dict(),
        "in_proj_weight has no values, .* the meta device",
    ),
    "quantized": (
        lambda: changed(quantized),
        "in_proj_weight must be floating point, but got qint8; dequantize",
    ),
    "float8": (
        lambda: changed(lambda x: x.to(torch.float8_e4m3fn)),
        "in_proj_weight must be floating point, but got float8_e4m3fn",
    ),
}


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_load_torch_refuses_before_anything_changes(make, message):
    module = make_module()
    before = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    with pytest.raises(ValueError, match=message) as error:
        convert.load_torch(module, make())
    assert len(str(error.value).splitlines()) <= 10
    after = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, after, before)
