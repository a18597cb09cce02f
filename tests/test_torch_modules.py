"""flax_mha next to PyTorch, under the same weights: outputs, gradients and accuracy."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_port
from flax_modules import Linen, Nnx
from marks import with_core
from torch import nn
from torch_port import (
    D2LMHA,
    BertSelfAttention,
    DotProductAttention,
    GroupedQueryAttention,
    MaskedSelfAttention,
    NoteMHA,
)

import flax_mha
from flax_mha import convert

IMPLEMENTATIONS = ("xla", "blockwise")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
BATCH, QUERIES, KEYS, HEADS, HEAD_SIZE = 2, 5, 7, 3, 13
FEATURES = HEADS * HEAD_SIZE


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(got, expected):
    """Both computed in float32: 1e-5 of the largest value leaves room for the rounding of some 80 operations.

    Sums have up to 128 terms here, but their rounding errors differ in sign.
    """
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Modules -------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A PyTorch module, the shapes of its inputs, and what else PyTorch's and ours are called with."""

    module: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]
    heads: int = HEADS
    kv_heads: int | None = None
    torch_arguments: dict = {}  # noqa: RUF012
    arguments: dict = {}  # noqa: RUF012

    def make(self):
        """The module, with weights and biases that are not 0 and make scores of about 1."""
        torch.manual_seed(0)
        module = self.module()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
        return module

    def inputs(self):
        return [normal(seed, *shape) for seed, shape in enumerate(self.shapes)]


def bert(hidden_size, heads):
    return BertSelfAttention(SimpleNamespace(hidden_size=hidden_size, num_of_attention_heads=heads))


def visible(*shape):
    """A mask that hides a third of the keys, but never the first."""
    mask = np.random.default_rng(0).random(shape) > 1 / 3
    mask[..., 0] = True
    return mask


X, Q, K = ((BATCH, length, FEATURES) for length in (KEYS, QUERIES, KEYS))
PADDING = visible(BATCH, KEYS)
MASK = visible(QUERIES, KEYS)
MASK_BY_HEAD = visible(BATCH, HEADS, QUERIES, KEYS)
BIAS = normal(9, QUERIES, KEYS)


def torch_mha(**options):
    return lambda: nn.MultiheadAttention(FEATURES, HEADS, batch_first=True, **options)


MASKED = visible(3, 8, 2, 2)
EXAMPLES = {
    "note_mha": Case(lambda: NoteMHA(16, 4), [(2, 5, 16)] * 3, heads=4),
    "bert_self_attention": Case(lambda: bert(4, 2), [(1, 3, 4)], heads=2),
    "d2l_mha": Case(lambda: D2LMHA(100, 100, 100, 100, 5, 0.0), [(2, 4, 100), (2, 6, 100), (2, 6, 100)], heads=5),
    "masked_self_attention": Case(
        lambda: MaskedSelfAttention(128, 8, 0.0),
        [(3, 2, 128)],
        heads=8,
        torch_arguments={"attention_mask": torch.tensor(MASKED.astype(int))},
        arguments={"mask": MASKED},
    ),
}
GROUPED = {"heads": 6, "kv_heads": 2}
PRIMES = {
    "note_mha": Case(lambda: NoteMHA(FEATURES, HEADS), [X] * 3),
    "bert_self_attention": Case(lambda: bert(FEATURES, HEADS), [X]),
    "d2l_mha": Case(lambda: D2LMHA(17, 11, 17, FEATURES, HEADS, 0.0), [(2, 5, 11), (2, 7, 17), (2, 7, 17)]),
    "d2l_mha of three sizes": Case(
        lambda: D2LMHA(17, 11, 19, FEATURES, HEADS, 0.0), [(2, 5, 11), (2, 7, 17), (2, 7, 19)]
    ),
    "masked_self_attention": Case(
        lambda: MaskedSelfAttention(FEATURES, HEADS, 0.0),
        [X],
        torch_arguments={"attention_mask": torch.tensor(PADDING[:, None, None])},
        arguments={"mask": PADDING[:, None, None]},
    ),
    "groups": Case(lambda: GroupedQueryAttention(11, 6, 2, 5), [(2, 7, 11)], **GROUPED),
    "causal groups": Case(
        lambda: GroupedQueryAttention(11, 6, 2, 5, causal=True), [(2, 7, 11)], **GROUPED, arguments={"is_causal": True}
    ),
}
TORCH = {
    "no bias": Case(torch_mha(bias=False, kdim=17, vdim=17), [Q, (2, 7, 17), (2, 7, 17)]),
    "three sizes": Case(torch_mha(kdim=17, vdim=19), [Q, (2, 7, 17), (2, 7, 19)]),
    "key_padding_mask and attn_mask": Case(
        torch_mha(),
        [Q, K, K],
        torch_arguments={"key_padding_mask": torch.tensor(~PADDING), "attn_mask": torch.tensor(~MASK)},
        arguments={"mask": PADDING[:, None, None] & MASK},
    ),
    "attn_mask by head": Case(
        torch_mha(),
        [Q, K, K],
        torch_arguments={"attn_mask": torch.tensor(~MASK_BY_HEAD).flatten(0, 1)},
        arguments={"mask": MASK_BY_HEAD},
    ),
    "attn_mask of numbers": Case(
        torch_mha(), [Q, K, K], torch_arguments={"attn_mask": torch.tensor(BIAS)}, arguments={"bias": BIAS}
    ),
    "is_causal": Case(
        torch_mha(),
        [X, X, X],
        torch_arguments={"is_causal": True, "attn_mask": torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)},
        arguments={"is_causal": True},
    ),
}


def run_torch(case, module, inputs, cotangent):
    """Output, and gradients by the names of Flax and by input."""
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    module.zero_grad()
    output = module(*tensors, **case.torch_arguments)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.tensor(cotangent))
    weights = convert.from_torch({name: p.grad for name, p in module.named_parameters()}, case.heads, case.kv_heads)
    return output.detach().numpy(), weights, [tensor.grad.numpy() for tensor in tensors]


def run(api, params, heads, inputs, arguments, cotangent, implementation):
    """The same of flax_mha's module, into which goes what `from_torch` gives; nnx also takes the features of inputs."""
    options = {
        "num_heads": heads,
        "qkv_features": params["query"]["kernel"][0].size,
        "out_features": params["out"]["kernel"].shape[-1],
        "num_kv_heads": params["key"]["kernel"].shape[1],
        "use_bias": "bias" in params["out"],
        "implementation": implementation,
    }
    if api is Nnx:
        options["in_features"], options["in_kv_features"] = (params[x]["kernel"].shape[0] for x in ("query", "key"))
    return api.grads(api.ours, params, inputs, options, arguments, cotangent)


run_nnx, run_linen = (functools.partial(run, api) for api in (Nnx, Linen))
RUNS = {"nnx": run_nnx, "linen": run_linen}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def assert_same_gradients(got, expected):
    """Leaf by leaf; the key bias moves all scores of a row alike, so its gradient is 0 and only rounding shows."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name, layer in expected.items():
        for leaf, array in layer.items():
            if (name, leaf) == ("key", "bias"):
                size = np.abs(expected["query"]["bias"]).max()
                np.testing.assert_allclose([got[name][leaf], array], 0, atol=1e-5 * size)
            else:
                assert_close(got[name][leaf], array)


def check(case, run, implementation, module=None):
    module, inputs = case.make() if module is None else module, case.inputs()
    params = convert.from_torch(module.state_dict(), case.heads, case.kv_heads)
    cotangent = normal(10, *inputs[0].shape[:2], params["out"]["kernel"].shape[-1])
    output, weights, arrays = run(params, case.heads, inputs, case.arguments, cotangent, implementation)
    expected, expected_weights, expected_arrays = run_torch(case, module, inputs, cotangent)
    assert_close(output, expected)
    assert_same_gradients(weights, expected_weights)
    for got, array in zip(arrays, expected_arrays, strict=True):
        assert_close(got, array)


@pytest.mark.parametrize("name", with_core(EXAMPLES, "masked_self_attention"))
@each_run
@each_implementation
def test_examples(name, run, implementation):
    check(EXAMPLES[name], run, implementation)


def paired():
    """Each case with both implementations, and in both modules where these can hold its weights."""
    for name, case in PRIMES.items():
        one_size = len({shape[-1] for shape in case.shapes[1:]}) <= 1  # nnx has one for keys and values
        for run, implementation in zip(("nnx" if one_size else "linen", "linen"), IMPLEMENTATIONS, strict=True):
            yield pytest.param(case, RUNS[run], implementation, id=f"{name}-{run}-{implementation}")


@pytest.mark.parametrize(("case", "run", "implementation"), list(paired()))
def test_prime_sizes(case, run, implementation):
    check(case, run, implementation)


@pytest.mark.parametrize(
    ("name", "run", "implementation"),
    [
        ("no bias", run_nnx, "blockwise"),
        ("three sizes", run_linen, "xla"),
        ("key_padding_mask and attn_mask", run_nnx, "blockwise"),
        ("attn_mask by head", run_linen, "xla"),
        ("attn_mask of numbers", run_linen, "blockwise"),
        ("is_causal", run_nnx, "xla"),
    ],
)
def test_torch_multihead_attention(name, run, implementation):
    check(TORCH[name], run, implementation)


@each_run
@each_implementation
def test_a_query_without_keys_answers_the_bias_where_torch_answers_nan(run, implementation):
    """Variant 5's own example: nothing is visible to the second of three batch entries."""
    mask = np.broadcast_to(np.array([[0, 1], [0, 0], [1, 0]])[:, None, None], (3, 8, 2, 2))
    case = EXAMPLES["masked_self_attention"]._replace(torch_arguments={"attention_mask": torch.tensor(mask.copy())})
    module, (x,), cotangent = case.make(), case.inputs(), normal(10, 3, 2, 128)
    output, weights, (of_x,) = run_torch(case, module, [x], cotangent)
    assert np.isnan(output[1]).all()
    assert all(np.isnan(array).all() for array in (weights["out"]["kernel"], *weights["value"].values()))

    seen = [0, 2]
    case = case._replace(torch_arguments={"attention_mask": torch.tensor(mask[seen])})
    expected, expected_weights, (expected_of_x,) = run_torch(case, module, [x[seen]], cotangent[seen])
    expected_weights["out"]["bias"] += cotangent[1].sum(0)
    params = convert.from_torch(module.state_dict(), 8)
    output, weights, (of_x,) = run(params, 8, [x], {"mask": mask.astype(bool)}, cotangent, implementation)
    assert_close(output[np.array(seen)], expected)
    np.testing.assert_array_equal(output[1], np.broadcast_to(params["out"]["bias"], (2, 128)))
    # One key is visible in the two other entries: its weight is 1 whatever the scores, whose gradients are then 0.
    for name in ("query", "key"):
        for leaf, size in expected_weights["value"].items():
            np.testing.assert_allclose(weights[name][leaf], 0, atol=1e-5 * np.abs(size).max())
    for name in ("value", "out"):
        for leaf, array in expected_weights[name].items():
            assert_close(weights[name][leaf], array)
    assert_close(of_x[np.array(seen)], expected_of_x)
    assert np.all(of_x[1] == 0)


@pytest.mark.core
@pytest.mark.parametrize(("run", "implementation"), [(run_nnx, "xla"), (run_linen, "blockwise")])
def test_cross_attention_where_note_mha_fails(run, implementation):
    """Variant 1 takes the length of the keys from the queries; torch.nn with its weights is the peer."""
    case = PRIMES["note_mha"]._replace(shapes=[Q, K, K])
    note, peer = case.make(), torch_mha()()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        note(*(torch.tensor(x) for x in case.inputs()))
    weights = convert.to_torch(convert.from_torch(note.state_dict(), HEADS), "torch")
    peer.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    check(case, run, implementation, peer)


# Functions -----------------------------------------------------------------------------------------------------------


def with_grads(function):
    """Of arrays and the cotangent of the output: the output, and the gradients of the arrays."""

    @jax.jit
    def run(arrays, cotangent):
        output, pull = jax.vjp(function, *arrays)
        return output, *pull(cotangent)

    return run


def torch_value_and_grads(function, arrays, cotangent):
    tensors = [torch.as_tensor(x).clone().requires_grad_() for x in arrays]
    output = function(*tensors)
    output.backward(torch.as_tensor(cotangent))
    return [output.detach(), *(tensor.grad for tensor in tensors)]


def assert_functions_agree(function, torch_function, *arrays):
    shape = torch_function(*(torch.tensor(x) for x in arrays)).shape
    cotangent = normal(10, *shape)
    got = with_grads(function)(arrays, cotangent)
    expected = torch_value_and_grads(torch_function, arrays, cotangent)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other.numpy())


def one_head(implementation):
    """dot_product_attention for [B, T, H], [B, S, H], [B, S, Hv]."""

    def attend(query, key, value):
        arrays = (x[:, :, None] for x in (query, key, value))
        return flax_mha.dot_product_attention(*arrays, implementation=implementation)[:, :, 0]

    return attend


@each_implementation
def test_scaled_dot_product_attention(implementation):
    arrays = (normal(seed, BATCH, KEYS, HEAD_SIZE) for seed in range(3))
    assert_functions_agree(one_head(implementation), torch_port.scaled_dot_product_attention, *arrays)


@each_implementation
def test_single_head_with_values_of_another_size(implementation):
    arrays = normal(0, 2, 5, 13), normal(1, 2, 11, 13), normal(2, 2, 11, 7)
    assert_functions_agree(one_head(implementation), DotProductAttention(0.0), *arrays)


@pytest.mark.core
@each_implementation
def test_known_answer(implementation):
    """Keys that are all alike: the mean of the values, whatever the query."""
    values = np.arange(40, dtype=np.float32).reshape(1, 10, 4).repeat(2, axis=0)
    got = one_head(implementation)(normal(0, 2, 1, 2), np.ones((2, 10, 2), np.float32), values)
    # A sum of ten terms of at most 39 / 10, each off by one rounding.
    np.testing.assert_allclose(got, [[[18, 19, 20, 21]]] * 2, rtol=0, atol=39 * np.finfo(np.float32).eps)


def torch_attention(query, key, value, bias=None, **arguments):
    """F.scaled_dot_product_attention for [B, T, N, H]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    arguments = {"attn_mask": bias} | arguments
    return F.scaled_dot_product_attention(query, key, value, **arguments).transpose(1, 2)


HIDDEN_ROWS = visible(2, 3, 5, 11)
HIDDEN_ROWS[0, 1, 2] = HIDDEN_ROWS[1, :, 4] = False


class Sizes(NamedTuple):
    """Lengths, heads and head sizes."""

    queries: int = 5
    keys: int = 11
    heads: int = 3
    kv_heads: int = 3
    value_size: int = 13

    def arrays(self):
        kv = (2, self.keys, self.kv_heads)
        return normal(0, 2, self.queries, self.heads, 13), normal(1, *kv, 13), normal(2, *kv, self.value_size)


def same(**arguments):
    return arguments, arguments


def masked(mask):
    return {"attn_mask": torch.tensor(mask)}, {"mask": mask}


SDPA = {
    "values of another size": (Sizes(value_size=7), *same()),
    "causal, fewer queries": (Sizes(), *same(is_causal=True)),
    "causal, more queries": (Sizes(queries=17), *same(is_causal=True)),
    "mask": (Sizes(), *masked(visible(2, 1, 5, 11))),
    "mask that hides all": (Sizes(), *masked(HIDDEN_ROWS)),
    "groups": (Sizes(heads=6, kv_heads=2), {"enable_gqa": True, "is_causal": True}, {"is_causal": True}),
    "scale": (Sizes(), *same(scale=0.37)),
}


@pytest.mark.parametrize(("sizes", "torch_arguments", "arguments"), SDPA.values(), ids=SDPA)
@each_implementation
def test_torch_attention(sizes, torch_arguments, arguments, implementation):
    attend = functools.partial(flax_mha.dot_product_attention, implementation=implementation, **arguments)
    assert_functions_agree(attend, functools.partial(torch_attention, **torch_arguments), *sizes.arrays())


@pytest.mark.parametrize("shape", [(2, 3, 5, 11), (3, 1, 11)], ids=str)
@each_implementation
def test_torch_attention_with_bias(shape, implementation):
    """Added to the scores; its gradient is summed where it was broadcast."""
    attend = functools.partial(flax_mha.dot_product_attention, implementation=implementation)
    assert_functions_agree(attend, torch_attention, *Sizes().arrays(), normal(3, *shape))


# Accuracy ------------------------------------------------------------------------------------------------------------


def reference(query, key, value, cotangent, is_causal):
    """Output and gradients [T | S, N, H] in float64, from the equations."""
    query, key, value, cotangent = (
        np.moveaxis(np.asarray(x, np.float64), 1, 0) for x in (query, key, value, cotangent)
    )
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.swapaxes(1, 2)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = cotangent @ value.swapaxes(1, 2)
    d_scores = scale * weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    results = weights @ value, d_scores @ key, d_scores.swapaxes(1, 2) @ query, weights.swapaxes(1, 2) @ cotangent
    return [np.moveaxis(x, 0, 1) for x in results]


def errors(results, references, norm):
    return np.array([norm(np.asarray(a, np.float64) - b) for a, b in zip(results, references, strict=True)])


def largest(x):
    return np.abs(x).max()


def root_mean_square(x):
    return np.sqrt(np.mean(x**2))


def long_arrays(queries, keys, size, seed):
    """Query, key, value and the cotangent [T | S, N, H]; the queries are `size` times as large."""
    lengths = (queries, keys, keys, queries)
    query, key, value, cotangent = (normal(4 * seed + i, length, 2, 17) for i, length in enumerate(lengths))
    return np.float32(size) * query, key, value, cotangent


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "size"),
    [(257, 257, True, 1), (257, 1031, False, 8), (1031, 257, True, 8), (1031, 1031, False, 1)],
)
def test_float32_is_as_accurate_as_torch(queries, keys, is_causal, size):
    """Output and gradients are each at most twice as far from float64 as torch's; weights are even, or a few are large.

    As root mean squares: the largest error is one element's luck. That of dV grows fourfold with the order in which a
    matrix product adds its terms, even where exact weights go into numpy's.
    """
    torch_attend = functools.partial(torch_attention, is_causal=is_causal)
    attends = {
        name: with_grads(functools.partial(flax_mha.dot_product_attention, is_causal=is_causal, implementation=name))
        for name in IMPLEMENTATIONS
    }
    for seed in range(3):
        *arrays, cotangent = long_arrays(queries, keys, size, seed)
        exact = reference(*arrays, cotangent, is_causal)
        peer = torch_value_and_grads(torch_attend, [x[None] for x in arrays], cotangent[None])
        allowed = 2 * errors([x[0].numpy() for x in peer], exact, root_mean_square)
        for name, attend in attends.items():
            got = errors(attend(arrays, cotangent), exact, root_mean_square)
            assert np.all(got <= allowed), (name, seed, got, allowed)


def naive(query, key, value, is_causal):
    """Attention [T, N, H] with every step in the dtype of the inputs."""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -math.inf)
    return (torch.softmax(scores, dim=-1) @ value).transpose(0, 1)


@pytest.mark.parametrize(("queries", "keys", "is_causal", "size"), [(257, 257, True, 1), (257, 1031, False, 1)])
@each_implementation
def test_bfloat16_is_no_worse_than_the_plain_computation(queries, keys, is_causal, size, implementation):
    """FlashAttention's rule: at most twice the error of the plain computation, and one rounding of the result."""
    arrays = [torch.tensor(x).bfloat16() for x in long_arrays(queries, keys, size, 0)]
    exact = reference(*(x.float().numpy() for x in arrays), is_causal)
    plain = torch_value_and_grads(functools.partial(naive, is_causal=is_causal), arrays[:3], arrays[3])
    allowed = 2 * errors([x.float().numpy() for x in plain], exact, largest)
    allowed += [2**-9 * largest(x) for x in exact]  # bfloat16 keeps eight bits: half of 2**-8
    *arrays, cotangent = (jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in arrays)
    attend = functools.partial(flax_mha.dot_product_attention, is_causal=is_causal, implementation=implementation)
    results = with_grads(attend)(arrays, cotangent)
    assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
    got = errors(results, exact, largest)
    assert np.all(got <= allowed), (got, allowed)
