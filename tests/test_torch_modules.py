"""flax_mha and PyTorch with the same weights: outputs, gradients and accuracy."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from flax import nnx
from flax_cases import assert_close, assert_grads_close, visible
from flax_modules import Linen, Nnx
from marks import with_core
from torch import nn
from torch_port import MaskedSelfAttention

import flax_mha
from flax_mha import convert

IMPLEMENTATIONS = ("xla", "blockwise")
BATCH = 2
QUERIES = 5
KEYS = 7
HEADS = 3
HEAD_SIZE = 13
FEATURES = HEADS * HEAD_SIZE


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Case(NamedTuple):
    """A PyTorch module, the shapes of its inputs, and the other arguments of PyTorch's
    call and of ours.
    """

    module: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]
    torch_arguments: dict = {}  # noqa: RUF012
    arguments: dict = {}  # noqa: RUF012


X = (BATCH, KEYS, FEATURES)
Q = (BATCH, QUERIES, FEATURES)
K = X
K17 = (2, 7, 17)
V19 = (2, 7, 19)
PADDING = visible(BATCH, KEYS)
MASK = visible(QUERIES, KEYS)
BY_HEAD = visible(BATCH, HEADS, QUERIES, KEYS)
MASKED = visible(BATCH, HEADS, KEYS, KEYS)
BIAS = normal(9, QUERIES, KEYS)
CAUSAL = {
    "is_causal": True,
    "attn_mask": torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1),
}


def torch_mha(**options):
    return lambda: nn.MultiheadAttention(FEATURES, HEADS, batch_first=True, **options)


# test_torch_convert.py has the other modules, with outputs of NumPy.
CASES = {
    "masked_self_attention": Case(
        lambda: MaskedSelfAttention(FEATURES, HEADS),
        [X],
        {"attention_mask": torch.tensor(MASKED.astype(int))},
        {"mask": MASKED},
    ),
    "no bias": Case(torch_mha(bias=False, kdim=17, vdim=17), [Q, K17, K17]),
    "three sizes": Case(torch_mha(kdim=17, vdim=19), [Q, K17, V19]),
    "key_padding_mask and attn_mask": Case(
        torch_mha(),
        [Q, K, K],
        {"key_padding_mask": torch.tensor(~PADDING), "attn_mask": torch.tensor(~MASK)},
        {"mask": PADDING[:, None, None] & MASK},
    ),
    "attn_mask by head": Case(
        torch_mha(),
        [Q, K, K],
        {"attn_mask": torch.tensor(~BY_HEAD).flatten(0, 1)},
        {"mask": BY_HEAD},
    ),
    "attn_mask of numbers": Case(
        torch_mha(), [Q, K, K], {"attn_mask": torch.tensor(BIAS)}, {"bias": BIAS}
    ),
    "is_causal": Case(torch_mha(), [X, X, X], CAUSAL, {"is_causal": True}),
}


@pytest.mark.parametrize("name", with_core(CASES, "key_padding_mask and attn_mask"))
@pytest.mark.parametrize(
    ("api", "implementation"), [(Nnx, "xla"), (Linen, "blockwise")]
)
def test_modules_equal_torch_in_outputs_and_gradients(name, api, implementation):
    make, shapes, torch_arguments, arguments = CASES[name]
    torch.manual_seed(0)
    module = make()
    # Biases are not 0, and scores are about 1.
    for parameter in module.parameters():
        std = 0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        nn.init.normal_(parameter, std=std)
    inputs = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    cotangent = normal(10, *inputs[0].shape[:2], FEATURES)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = module(*tensors, **torch_arguments)
    if isinstance(expected, tuple):
        expected, _ = expected
    expected.backward(torch.tensor(cotangent))
    of_tensors = [tensor.grad.numpy() for tensor in tensors]
    of_weights = {name: p.grad for name, p in module.named_parameters()}

    params = convert.from_torch(module.state_dict(), HEADS)
    options = {
        "num_heads": HEADS,
        "qkv_features": FEATURES,
        "out_features": FEATURES,
        "implementation": implementation,
        "use_bias": "bias" in params["out"],
    }
    if len({shape[-1] for shape in shapes[1:]}) > 1:
        api = Linen  # nnx has one size of keys and values
    if api is Nnx:
        options["in_features"] = shapes[0][-1]
        options["in_kv_features"] = shapes[-1][-1]
    output, weights, arrays = api.grads(
        api.ours, params, inputs, options, arguments, cotangent
    )

    assert_close((output, arrays), (expected.detach().numpy(), of_tensors))
    assert_grads_close(weights, convert.from_torch(of_weights, HEADS))


@pytest.mark.core
def test_add_zero_attn_equals_sinks_of_zero():
    """A key and a value of zeros add exp(0) to the denominator and nothing to the
    output. One row is fully masked.
    """
    torch.manual_seed(0)
    module = torch_mha(add_zero_attn=True)()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = normal(0, *X)
    mask = visible(BATCH, KEYS, KEYS)
    mask[0, 3] = False
    hidden = torch.tensor(~mask).repeat_interleave(HEADS, 0)
    tensor = torch.tensor(x)
    expected, _ = module(tensor, tensor, tensor, attn_mask=hidden)
    expected = expected.detach().numpy()

    def output(**options):
        ours = flax_mha.MultiHeadAttention(
            HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options
        )
        convert.load_torch(ours, module.state_dict())
        return ours(x, mask=mask[:, None])

    sinks = functools.partial(flax_mha.attention_fn, sinks=jnp.zeros(HEADS))
    assert_close(output(attention_fn=sinks), expected)
    # Without sinks, there is a difference.
    assert np.abs(output() - expected).max() > 1e-3


def with_grads(function):
    """A function of arrays and the output's cotangent that returns the output and the
    gradients of the arrays.
    """

    @jax.jit
    def run(arrays, cotangent):
        output, pull = jax.vjp(function, *arrays)
        return output, *pull(cotangent)

    return run


def torch_results(arrays, cotangent, is_causal):
    """The same for arrays [T, N, H] in PyTorch."""
    tensors = [torch.tensor(x).transpose(0, 1).requires_grad_() for x in arrays]
    output = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    output.backward(torch.tensor(cotangent).transpose(0, 1))
    results = [output.detach(), *(tensor.grad for tensor in tensors)]
    return [x.transpose(0, 1).numpy() for x in results]


def errors(results, references):
    """Root mean squares: the largest error depends on the order of sums."""
    squares = []
    for result, wanted in zip(results, references, strict=True):
        squares.append(np.mean((np.asarray(result, np.float64) - wanted) ** 2))
    return np.sqrt(squares)


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "size"),
    [
        (257, 257, True, 1),
        (257, 1031, False, 8),
        (1031, 257, True, 8),
        (1031, 1031, False, 1),
    ],
)
def test_float32_is_as_accurate_as_torch(queries, keys, is_causal, size):
    # With queries `size` times as large, a few weights dominate.
    attends = {}
    for name in IMPLEMENTATIONS:
        attend = functools.partial(
            flax_mha.dot_product_attention, is_causal=is_causal, implementation=name
        )
        attends[name] = with_grads(attend)
    for seed in range(3):
        first = 4 * seed
        query = normal(first, queries, 2, 17) * size
        key = normal(first + 1, keys, 2, 17)
        value = normal(first + 2, keys, 2, 17)
        cotangent = normal(first + 3, queries, 2, 17)
        arrays = (query, key, value)

        (output, _), gradients = reference.attention(
            *arrays,
            is_causal=is_causal,
            cotangents=(cotangent, np.zeros((queries, 2))),
        )
        want = (output, *gradients)
        # At most twice the error of PyTorch.
        allowed = 2 * errors(torch_results(arrays, cotangent, is_causal), want)
        for name, attend in attends.items():
            got = errors(attend(arrays, cotangent), want)
            assert np.all(got <= allowed), (name, seed, got, allowed)
