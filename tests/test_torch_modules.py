"""flax_mha and PyTorch with the same weights: outputs, gradients and accuracy."""

import functools
import math
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


X, Q, K = ((BATCH, length, FEATURES) for length in (KEYS, QUERIES, KEYS))
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
def test_modules(name, api, implementation):
    """Outputs, and gradients of weights and inputs."""
    make, shapes, torch_arguments, arguments = CASES[name]
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():  # biases are not 0, and scores are about 1
        nn.init.normal_(
            parameter, std=0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        )
    inputs = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    cotangent = normal(10, *inputs[0].shape[:2], FEATURES)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = module(*tensors, **torch_arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.backward(torch.tensor(cotangent))
    of_weights = convert.from_torch(
        {name: p.grad for name, p in module.named_parameters()}, HEADS
    )

    params = convert.from_torch(module.state_dict(), HEADS)
    options = {
        "num_heads": HEADS,
        "qkv_features": FEATURES,
        "out_features": FEATURES,
        "implementation": implementation,
    }
    options["use_bias"] = "bias" in params["out"]
    sizes = {"in_features": shapes[0][-1], "in_kv_features": shapes[-1][-1]}
    if len({shape[-1] for shape in shapes[1:]}) > 1:
        api = Linen  # nnx has one size of keys and values
    options |= sizes if api is Nnx else {}
    output, weights, arrays = api.grads(
        api.ours, params, inputs, options, arguments, cotangent
    )
    assert_close(
        (output, arrays),
        (expected.detach().numpy(), [tensor.grad.numpy() for tensor in tensors]),
    )
    assert_grads_close(weights, of_weights)


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
    expected = module(*[torch.tensor(x)] * 3, attn_mask=hidden)[0].detach().numpy()

    attention_fn = functools.partial(flax_mha.attention_fn, sinks=jnp.zeros(HEADS))
    options = {"decode": False, "attention_fn": attention_fn, "rngs": nnx.Rngs(0)}
    ours = flax_mha.MultiHeadAttention(HEADS, FEATURES, **options)
    convert.load_torch(ours, module.state_dict())
    assert_close(ours(x, mask=mask[:, None]), expected)
    without = flax_mha.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0)
    )
    convert.load_torch(without, module.state_dict())
    assert np.abs(without(x, mask=mask[:, None]) - expected).max() > 1e-3


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
    *tensors, cotangent = (
        torch.tensor(x).transpose(0, 1) for x in (*arrays, cotangent)
    )
    tensors = [x.requires_grad_() for x in tensors]
    output = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    output.backward(cotangent)
    return [
        x.detach().transpose(0, 1).numpy()
        for x in (output, *(tensor.grad for tensor in tensors))
    ]


def errors(results, references):
    """Root mean squares: the largest error of one element depends on the order of sums."""
    pairs = zip(results, references, strict=True)
    return np.array(
        [math.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2)) for a, b in pairs]
    )


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
    """Errors are at most twice PyTorch's. With queries `size` times as large, a few
    weights dominate.
    """
    attends = {
        name: with_grads(
            functools.partial(
                flax_mha.dot_product_attention, is_causal=is_causal, implementation=name
            )
        )
        for name in IMPLEMENTATIONS
    }
    for seed in range(3):
        lengths = (queries, keys, keys, queries)
        *arrays, cotangent = (
            normal(4 * seed + i, length, 2, 17) for i, length in enumerate(lengths)
        )
        arrays[0] *= size
        cotangents = cotangent, np.zeros((queries, 2))
        (output, _), gradients = reference.attention(
            *arrays, is_causal=is_causal, cotangents=cotangents
        )
        allowed = 2 * errors(
            torch_results(arrays, cotangent, is_causal), (output, *gradients)
        )
        for name, attend in attends.items():
            got = errors(attend(arrays, cotangent), (output, *gradients))
            assert np.all(got <= allowed), (name, seed, got, allowed)
