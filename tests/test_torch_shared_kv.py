"""Shared keys and values, and norms of values: Gemma 3n and Gemma 4 against a port to
PyTorch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_families as port
from cases import in_parts, refused
from flax import nnx
from marks import with_core
from torch_rope import gemma_4_global

import flax_mha
from flax_mha import Norm, convert, linen
from flax_mha.rope import RoPE

B = 2
T = 13
D = 24
N = 4
K = 2
H = 8
WINDOW = 4
GLOBAL_H = 512
X = np.float32(np.random.default_rng(0).standard_normal((B, T, D)))
SIZES = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
GEMMA_4 = SIZES | {
    "model_type": "gemma4_text",
    "global_head_dim": GLOBAL_H,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
OF_GLOBAL_LAYERS = {"head_dim": GLOBAL_H, "num_key_value_heads": 1}
MODELS = {
    "gemma3n": {"model_type": "gemma3n", "text_config": SIZES},
    "gemma4": GEMMA_4,
    "gemma4, as Transformers 5 writes it": SIZES
    | {
        "model_type": "gemma4_unified_text",
        "per_layer_config": {"1": OF_GLOBAL_LAYERS, "3": OF_GLOBAL_LAYERS},
        "attention_k_eq_v": True,
    },
}
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)


def weights(name):
    """Four layers; the last two have no keys and values, and full layers of Gemma 4
    have no values.
    """
    rng = np.random.default_rng(1)
    found = {}
    for i in range(4):
        is_global = i % 2 == 1 and name != "gemma3n"
        size, kv = (GLOBAL_H, 1) if is_global else (H, K)
        shapes = {"q_proj": (N * size, D), "o_proj": (D, N * size), "q_norm": (size,)}
        if i < 2:
            shapes |= {"k_proj": (kv * size, D), "k_norm": (size,)}
        if i < 2 and not is_global:
            shapes["v_proj"] = (kv * size, D)
        for key, shape in shapes.items():
            # Scores are about 1, whatever the head size.
            scale = 0.3 * (H / size) ** 0.5
            if len(shape) == 2:
                scale = shape[-1] ** -0.5
            drawn = np.float32(rng.standard_normal(shape) * scale)
            found[f"model.layers.{i}.self_attn.{key}.weight"] = torch.from_numpy(drawn)
    return found


def of_layer(state, i):
    """The weights of layer i, without its prefix."""
    prefix = f"model.layers.{i}.self_attn."
    return {
        key.removeprefix(prefix): x
        for key, x in state.items()
        if key.startswith(prefix)
    }


def rotate_global(y):
    """The rotary positions of Gemma 4's full layers."""
    return gemma_4_global(y, torch.arange(y.shape[1]).expand(B, -1))


def expected(name):
    """Each layer adds to its input; layers 2 and 3 attend to the keys of 0 and 1."""
    x = torch.from_numpy(X)
    state = weights(name)
    kvs = [None, None]
    for i in range(4):
        if i % 2 == 0:
            kv_number = K
            rotate = port.rotary(x, 1e4)
            window = WINDOW
        elif name == "gemma3n":
            kv_number = K
            rotate = port.rotary(x, 1e6)
            window = None
        else:
            kv_number = 1
            rotate = rotate_global
            window = None
        output, kvs[i % 2] = port.gemma_4(
            of_layer(state, i), x, N, kv_number, rotate, window, kvs[i % 2]
        )
        x = x + output
    return x.numpy()


@nnx.jit
def run(layers, x):
    first, second, third, fourth = layers
    output, of_sliding = first(x, return_kv=True)
    x = x + output
    output, of_full = second(x, return_kv=True)
    x = x + output
    output, of_sliding = third(x, kv=of_sliding, return_kv=True)
    x = x + output
    output, of_full = fourth(x, kv=of_full, return_kv=True)
    return x + output


def layers_of(name):
    state = weights(name)
    return nnx.List([convert.from_hf(MODELS[name], state, i) for i in range(4)])


@pytest.mark.parametrize("name", with_core(MODELS, "gemma4"))
def test_layers_of_a_model_equal_the_port(name):
    assert_close(run(layers_of(name), X), expected(name))


@pytest.mark.parametrize("name", with_core(MODELS, "gemma4"))
def test_decoding_of_a_model_equals_the_port(name):
    """The first two layers have a cache, and the others nothing of their own."""
    layers = layers_of(name)
    want = expected(name)
    for layer in layers:
        layer.init_cache((B, T, D))
        layer.decode = True

    # The layers that reuse keys have neither projections nor caches of their own.
    assert layers[2].key is layers[2].value is layers[3].cached_key is None
    assert (layers[1].value is None) == (name != "gemma3n")
    assert sorted(nnx.to_pure_dict(nnx.state(layers, nnx.Cache))) == [0, 1]
    # A prompt, single tokens, and several at once.
    for i, j in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 13)):
        assert_close(run(layers, X[:, i:j]), want[:, i:j])


class SharedLayer(NamedTuple):
    """A layer of the target, by its position among the types of layers."""

    layer: int
    num_kv_heads: int
    window: int | None
    rotate: Callable[[torch.Tensor], torch.Tensor]


SHARED_LAYERS = [
    SharedLayer(0, K, WINDOW, lambda y: port.rotary(y, 1e4)(y)),
    SharedLayer(1, 1, None, rotate_global),
]


@pytest.mark.parametrize("case", SHARED_LAYERS, ids=["sliding", "full"])
def test_an_assistant_equals_the_port(case):
    """Its queries come one position after the target's tokens."""
    i, num_kv_heads, window, rotate = case
    target = GEMMA_4 | {"num_hidden_layers": 2, "num_kv_shared_layers": 0}
    config = {"model_type": "gemma4_assistant", "text_config": target}
    state = weights("gemma4")
    # Layers 2 and 3 are the assistant's.
    own = of_layer(state, i + 2)

    def rotate_next(y):
        # The port rotates from position 0, so one more token comes before.
        one_more = torch.cat([y[:, :1], y], dim=1)
        return rotate(one_more)[:, 1:]

    x = torch.from_numpy(X)
    _, of_target = port.gemma_4(of_layer(state, i), x, N, num_kv_heads, rotate, None)
    want, _ = port.gemma_4(own, x, N, num_kv_heads, rotate_next, window, of_target)

    _, kv = convert.from_hf(target, state, i)(X, return_kv=True)
    layer = convert.from_hf(config, own, i)
    got = layer(X, kv=kv, positions=jnp.arange(1, T + 1), is_causal=True)

    assert_close(got, want)


def test_shared_layers_need_an_earlier_layer_of_their_type():
    refused(
        "num_kv_shared_layers must leave an earlier layer of the same type as layer 3",
        convert.describe,
        GEMMA_4 | {"num_kv_shared_layers": 3},
        3,
    )


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_assistants_have_no_keys_and_values(model_type):
    text_config = GEMMA_4 | {"num_kv_shared_layers": 4}
    config = {"model_type": model_type, "text_config": text_config}
    state = weights("gemma4")
    # The target has them.
    for key in list(state):
        if "k_" in key or "v_" in key:
            del state[key]

    described = [convert.describe(config, layer) for layer in range(4)]

    assert all(found["reuse_kv"] and not found["share_kv"] for found in described)
    assert [found["num_kv_heads"] for found in described] == [K, 1, K, 1]
    assert convert.from_hf(config, state, 0).key is None


def test_bidirectional_attention_of_all_tokens_is_rejected():
    config = GEMMA_4 | {"use_bidirectional_attention": "all"}
    refused("use_bidirectional_attention='all'", convert.describe, config)


def test_bidirectional_attention_of_images_is_described():
    config = GEMMA_4 | {"use_bidirectional_attention": "vision"}
    assert convert.describe(config)["scale"] == 1.0


NORM_OF_VALUES = Norm("rms", scale=None, epsilon=0.1)
OPTIONS = {
    "num_kv_heads": K,
    "normalize_qk": Norm("rms", epsilon=0.1),
    "rope": RoPE(),
    "use_bias": False,
}


class Pair(nnx.Module):
    """A layer that attends to the keys and values of the one before it."""

    def __init__(self, decode=False, **options):
        options = OPTIONS | options
        rngs = nnx.Rngs(0)
        self.first = flax_mha.MultiHeadAttention(
            N, D, value_norm=NORM_OF_VALUES, decode=decode, rngs=rngs, **options
        )
        self.second = flax_mha.MultiHeadAttention(
            N, D, reuse_kv=True, decode=decode, rngs=rngs, **options
        )

    def __call__(self, x, **arguments):
        y, kv = self.first(x, return_kv=True, **arguments)
        return self.second(x + y, kv=kv, **arguments)


class LinenPair(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, **arguments):
        layer = functools.partial(
            linen.MultiHeadDotProductAttention, N, decode=self.decode, **OPTIONS
        )
        y, kv = layer(value_norm=NORM_OF_VALUES, name="first")(
            x, return_kv=True, **arguments
        )
        return layer(reuse_kv=True, name="second")(x + y, kv=kv, **arguments)


def dense(params, x):
    """The causal formula: norm(y) = y / sqrt(mean(y^2) + 0.1)."""

    def norm(y, scale):
        y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 0.1)
        return y * scale[None, None, None]

    def project(layer, name):
        return jnp.einsum("btd,dnh->btnh", x, layer[name]["kernel"])

    def rotate(y):
        return flax_mha.rope.apply_rope(y, jnp.arange(T), RoPE())

    def attend(layer, x, key, value):
        query = jnp.einsum("btd,dnh->btnh", x, layer["query"]["kernel"])
        query = rotate(norm(query, layer["query_ln"]["scale"]))
        key = jnp.repeat(key, N // K, axis=2)
        value = jnp.repeat(value, N // K, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(D // N)
        scores = jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bnts,bsnh,nhd->btd", weights, value, layer["out"]["kernel"])

    first = params["first"]
    key = rotate(norm(project(first, "key"), first["key_ln"]["scale"]))
    value = norm(project(first, "value"), jnp.ones(D // N))
    x = x + attend(first, x, key, value)
    return attend(params["second"], x, key, value)


def with_slopes(function):
    """The loss of a function of parameters and inputs, and the gradients of both."""

    def loss(params, x):
        return (function(params, x) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@functools.cache
def split_pair():
    """The graph of a pair, and its parameters."""
    return nnx.split(Pair())


def of_dense(params, x):
    return dense(nnx.to_pure_dict(params), x)


def of_nnx(params, x):
    graph, _ = split_pair()
    return nnx.merge(graph, params)(x, is_causal=True)


def of_nnx_with_remat(params, x):
    graph, _ = split_pair()
    call = nnx.remat(functools.partial(Pair.__call__, is_causal=True))
    return call(nnx.merge(graph, params), x)


def of_linen(params, x):
    variables = {"params": nnx.to_pure_dict(params)}
    return LinenPair().apply(variables, x, is_causal=True)


@pytest.mark.core
@pytest.mark.parametrize("function", [of_nnx, of_nnx_with_remat, of_linen])
def test_outputs_and_gradients_equal_the_formula(function):
    """Keys get gradients from both layers."""
    _, params = split_pair()
    value, slopes = with_slopes(function)(params, X)
    want, wanted_slopes = with_slopes(of_dense)(params, X)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_close_slopes = functools.partial(
        np.testing.assert_allclose, rtol=1e-3, atol=1e-4
    )
    jax.tree.map(assert_close_slopes, slopes, wanted_slopes)


@pytest.mark.core
def test_vmap_over_batch_entries_equals_the_batch():
    _, params = split_pair()
    one = functools.partial(of_nnx, params)
    assert_close(jax.jit(jax.vmap(one))(X), jax.jit(of_nnx)(params, X))


@pytest.mark.core
def test_layer_that_reuses_keys_has_no_parameters_of_keys():
    _, params = split_pair()
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(params))
    of_linen = jax.eval_shape(LinenPair().init, jax.random.key(0), X)["params"]
    assert {*shapes["second"]} == {"query", "query_ln", "out"}
    assert jax.tree.map(lambda x: x.shape, of_linen) == shapes


RING = {"local_window_size": (WINDOW, 0)}


class Cache(NamedTuple):
    """Options of the layers, and arguments of `init_cache`."""

    options: dict[str, Any]
    arguments: dict[str, Any]
    atol: float


CACHES = {
    "float": Cache({}, {}, 1e-5),
    "ring": Cache(RING, {}, 1e-5),
    "8 bits": Cache({}, {"dtype": jnp.int8}, 0.1),
    "16 bits": Cache({}, {"dtype": jnp.bfloat16}, 0.1),
    "ring in 8 bits": Cache(RING, {"dtype": jnp.float8_e4m3fn}, 0.1),
}


@nnx.jit
def decode(pair, x, lengths=None):
    return pair(x, decode=True, lengths=lengths)


@pytest.mark.parametrize("name", CACHES)
def test_decoding_equals_the_whole_sequence(name):
    """Later calls overwrite a ring."""
    cache = CACHES[name]
    pair = Pair(**cache.options)
    x = np.float32(np.random.default_rng(2).standard_normal((B, 153, D)))
    want = nnx.jit(functools.partial(Pair.__call__, is_causal=True))(pair, x)
    pair.first.init_cache(x.shape, **cache.arguments)

    got = in_parts(functools.partial(decode, pair), x, (40, 1, 1, 40, 1, 70))

    np.testing.assert_allclose(got, want, rtol=0, atol=cache.atol)
    assert {*nnx.to_pure_dict(nnx.state(pair, nnx.Cache))} == {"first"}


def test_decoding_of_prompts_of_different_lengths_equals_whole_sequences():
    """With NaN in padding."""
    pair = Pair()
    x = np.float32(np.random.default_rng(2).standard_normal((B, 153, D)))
    want = nnx.jit(functools.partial(Pair.__call__, is_causal=True))(pair, x)
    pair.first.init_cache(x.shape, per_row=True)
    starts = np.array([0, 0])
    for number, lengths in ((20, (20, 7)), (1, (1, 1)), (30, (30, 12))):
        # Each sequence has as many new tokens as its length says.
        part = np.full((B, number, D), np.nan, np.float32)
        for b, length in enumerate(lengths):
            part[b, :length] = x[b, starts[b] : starts[b] + length]

        got = decode(pair, part, lengths=jnp.array(lengths))

        for b, length in enumerate(lengths):
            wanted = want[b, starts[b] : starts[b] + length]
            np.testing.assert_allclose(got[b, :length], wanted, rtol=0, atol=1e-5)
        starts += lengths
    assert {*nnx.to_pure_dict(nnx.state(pair, nnx.Cache))} == {"first"}


def test_decoding_in_linen_and_by_another_function():
    """Sown weights and other attention functions read the same cache; nothing is cached
    twice.
    """
    params = LinenPair().init(jax.random.key(0), X)["params"]
    want = LinenPair().apply({"params": params}, X, is_causal=True)
    decoder = LinenPair(decode=True)
    # Sowing needs all weights, so it takes another way through the cache.
    cache = decoder.init(jax.random.key(0), X)["cache"]
    assert {*cache} == {"first"}
    for start, stop, sown in (
        (0, 5, {}),
        (5, 6, {"sow_weights": True}),
        (6, 9, {}),
        (9, 13, {"sow_max_score": True}),
    ):
        got, changed = decoder.apply(
            {"params": params, "cache": cache},
            X[:, start:stop],
            mutable=["cache", "intermediates"],
            **sown,
        )
        cache = changed["cache"]
        assert_close(got, want[:, start:stop])


@pytest.mark.core
def test_each_call_has_its_masks_and_positions():
    """NaN in padding affects no output and no gradient, and segments attend to their
    own keys.
    """
    pair = Pair()
    segments = np.array([[0] * 6 + [1] * 7, [0] * 2 + [1] * 11])
    arguments = {
        "lengths": jnp.array([T, 5]),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.arange(T) + 3,
    }
    padded = jnp.asarray(X).at[1, 5:].set(jnp.nan)

    @nnx.jit
    @functools.partial(nnx.value_and_grad, has_aux=True)
    def run(pair, x, arguments):
        output = pair(x, is_causal=True, **arguments)
        return output[1, :5].sum(), output

    (_, got), slopes = run(pair, padded, arguments)

    # Positions are shifted for all tokens alike, so a mask is all that counts.
    same_segment = segments[:, None, :, None] == segments[:, None, None, :]
    mask = same_segment & np.tri(T, dtype=bool)
    want = nnx.jit(lambda pair, x, mask: pair(x, mask=mask))(pair, X, mask)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slopes))
    assert_close(got.at[1, 5:].set(0), want.at[1, 5:].set(0))


@pytest.mark.core
def test_view_has_one_cache():
    view = nnx.view(Pair(), decode=True, batch_size=B, max_length=T)
    assert view.first.cached_key.shape == (B, T, K, D // N)
    assert view.second.cached_key is None


@functools.cache
def kv_of_first(num_kv_heads=K):
    first = Pair(num_kv_heads=num_kv_heads).first
    _, kv = nnx.jit(lambda layer: layer(X, return_kv=True))(first)
    return kv


@pytest.mark.core
def test_both_layers_have_the_same_explanation():
    pair = Pair()
    of_second = pair.second.explain(X, kv=kv_of_first(), is_causal=True)
    of_first = pair.first.explain(X, is_causal=True)
    assert of_second.chosen == of_first.chosen


@pytest.mark.core
def test_layer_that_reuses_keys_needs_those_of_this_step():
    second = Pair().second
    kv = kv_of_first()
    refused(
        "kv must be the SharedKV that the call of an earlier layer returns .* got "
        "NoneType",
        second,
        X,
    )
    refused(
        r"shape \(2, 13, 2, 6\), but got \(2, 13, 1, 6\)",
        second,
        X,
        kv=kv_of_first(num_kv_heads=1),
    )
    refused(r"shape \(2, 12, 2, 6\), .* from the same step", second, X[:, 1:], kv=kv)


@pytest.mark.core
def test_arguments_of_one_layer_only_are_rejected():
    second = Pair().second
    kv = kv_of_first()
    refused(
        "lengths must be passed when calling both layers or neither, .* only in this "
        "call",
        second,
        X,
        kv=kv,
        lengths=jnp.array([T, 5]),
    )
    refused(
        "decode must be passed when calling both layers",
        second,
        X,
        kv=kv,
        decode=True,
    )


@pytest.mark.core
def test_layer_with_keys_of_its_own_takes_no_others():
    refused(
        "kv must be None if reuse_kv=False, .*; create the module with reuse_kv=True",
        Pair().first,
        X,
        kv=kv_of_first(),
    )


@pytest.mark.core
def test_cross_attention_shares_no_keys():
    pair = Pair()
    refused(
        "reuse_kv=True requires self-attention", pair.second, X, X + 1, kv=kv_of_first()
    )
    refused(
        "return_kv=True requires self-attention", pair.first, X, X + 1, return_kv=True
    )


@pytest.mark.core
def test_options_of_shared_keys_are_checked():
    refused("return_kv must be True or False", Pair().first, X, return_kv=1)
    refused("share_kv must be False with reuse_kv=True", Pair, share_kv=True)
    refused("share_kv must be True or False", Pair, share_kv=1)


@pytest.mark.core
def test_inputs_of_values_are_rejected_with_share_kv():
    message = "inputs_v must be None with share_kv=True"
    layer = flax_mha.MultiHeadAttention(
        N, D, share_kv=True, decode=False, rngs=nnx.Rngs(0)
    )
    refused(message, layer, X, X, X + 1)
    of_linen = linen.MultiHeadAttention(N, share_kv=True)
    refused(message, of_linen.init, jax.random.key(0), X, X, X + 1)


SMALL_VALUES = {"num_kv_heads": K, "value_dim": 5, "rope": RoPE()}


def clip_keys(query, key, value):
    return query, key.clip(-0.3, 0.3), value


def pair_of_nnx():
    """Two layers with the same queries and outputs; the first clips its keys."""
    make = functools.partial(
        flax_mha.MultiHeadAttention,
        N,
        D,
        decode=False,
        rngs=nnx.Rngs(0),
        **SMALL_VALUES,
    )
    first = make(process_heads=clip_keys)
    second = make(reuse_kv=True)
    assert second.key is second.value is None
    second.query = first.query
    second.out = first.out
    return first, second


def pair_of_linen():
    make = functools.partial(linen.MultiHeadDotProductAttention, N, **SMALL_VALUES)
    first = make(process_heads=clip_keys)
    params = first.init(jax.random.key(0), X)["params"]
    shared = {"query": params["query"], "out": params["out"]}
    return (
        functools.partial(first.apply, {"params": params}),
        functools.partial(make(reuse_kv=True).apply, {"params": shared}),
    )


@pytest.mark.core
@pytest.mark.parametrize("make", [pair_of_nnx, pair_of_linen])
def test_shared_keys_are_processed_once_and_values_have_a_size_of_their_own(make):
    first, second = make()

    want, kv = first(X, is_causal=True, return_kv=True)

    assert kv.value.shape == (B, T, K, 5)
    # Clipped before the rotation, which may enlarge a feature; not again after it.
    assert np.abs(kv.key).max() > 0.3
    assert_close(second(X, kv=kv, is_causal=True), want)
