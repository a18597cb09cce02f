"""Shared keys and values, and norms of values: Gemma 3n and Gemma 4 against a port to
PyTorch.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_families as port
from cases import refused
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
}
TYPES = ["sliding_attention", "full_attention"] * 2
SIZES |= {"num_hidden_layers": 4, "layer_types": TYPES, "num_kv_shared_layers": 2}
GLOBAL = {
    "global_head_dim": GLOBAL_H,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
PER_LAYER = {str(i): {"head_dim": GLOBAL_H, "num_key_value_heads": 1} for i in (1, 3)}
MODELS = {
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": SIZES | {"num_hidden_layers": 4},
    },
    "gemma4": SIZES | GLOBAL | {"model_type": "gemma4_text"},
    "gemma4, as Transformers 5 writes it": SIZES
    | {
        "model_type": "gemma4_unified_text",
        "per_layer_config": PER_LAYER,
        "attention_k_eq_v": True,
    },
}
OF_QUERIES = ("q_proj.weight", "o_proj.weight", "q_norm.weight")
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
        shapes |= {"k_proj": (kv * size, D), "k_norm": (size,)} if i < 2 else {}
        shapes |= {"v_proj": (kv * size, D)} if i < 2 and not is_global else {}
        for key, shape in shapes.items():
            drawn = rng.standard_normal(shape) * (
                shape[-1] ** -0.5 if len(shape) == 2 else 0.3 * (H / size) ** 0.5
            )
            found[f"model.layers.{i}.self_attn.{key}.weight"] = torch.from_numpy(
                np.float32(drawn)
            )
    return found


def expected(name):
    """Each layer adds to its input."""
    x = torch.from_numpy(X)
    state = weights(name)
    kvs = {}
    for i in range(4):
        w = {
            key.split("self_attn.")[1]: value
            for key, value in state.items()
            if f".{i}.self_attn" in key
        }
        if i % 2 == 0 or name == "gemma3n":
            rotate = port.rotary(x, 1e4 if i % 2 == 0 else 1e6)
        else:
            rotate = lambda y: gemma_4_global(y, torch.arange(T).expand(B, -1))  # noqa: E731
        kv_number = 1 if i % 2 == 1 and name != "gemma3n" else K
        output, kvs[i % 2] = port.gemma_4(
            w, x, N, kv_number, rotate, None if i % 2 else WINDOW, kvs.get(i % 2)
        )
        x = x + output
    return x.numpy()


@nnx.jit
def run(layers, x, arguments):
    kvs = {}
    for i, layer in enumerate(layers):
        output, kvs[i % 2] = layer(
            x, return_kv=True, **({"kv": kvs[i % 2]} if i > 1 else {}), **arguments
        )
        x = x + output
    return x


@pytest.mark.parametrize("name", with_core(MODELS, "gemma4"))
def test_layers_of_a_model_equal_the_port(name):
    """In one call and over caches: the first two layers have one, and the others
    nothing of their own.
    """
    layers = nnx.List(
        [convert.from_hf(MODELS[name], weights(name), i) for i in range(4)]
    )
    want = expected(name)
    assert_close(run(layers, X, {}), want)
    for layer in layers:
        layer.init_cache((B, T, D))
        layer.decode = True
    assert layers[2].key is layers[2].value is layers[3].cached_key is None
    assert (layers[1].value is None) == (name != "gemma3n")
    assert sorted(nnx.to_pure_dict(nnx.state(layers, nnx.Cache))) == [0, 1]
    for i, j in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 13)):
        assert_close(run(layers, X[:, i:j], {}), want[:, i:j])


def test_an_assistant_equals_the_port():
    """Layers 2 and 3 are the assistant's, whose queries come one position after the
    target's tokens.
    """
    config = MODELS["gemma4"] | {"num_hidden_layers": 2, "num_kv_shared_layers": 0}
    x = torch.from_numpy(X)
    prefix = "model.layers.{}.self_attn."
    state = weights("gemma4")
    for i, number in enumerate((K, 1)):

        def rotate(y, after=0):
            y = torch.cat([y[:, :1]] * after + [y], dim=1)
            positions = torch.arange(y.shape[1]).expand(B, -1)
            return (gemma_4_global(y, positions) if i else port.rotary(y, 1e4)(y))[
                :, after:
            ]  # noqa: B023

        w, own = (
            {key.removeprefix(prefix.format(j)): x for key, x in state.items()}
            for j in (i, i + 2)
        )
        _, kv = port.gemma_4(w, x, N, number, rotate, None)
        want, _ = port.gemma_4(
            own,
            x,
            N,
            number,
            functools.partial(rotate, after=1),
            None if i else WINDOW,
            kv,
        )
        _, kv = convert.from_hf(config, state, i)(X, return_kv=True)
        assistant = {"model_type": "gemma4_assistant", "text_config": config}
        layer = convert.from_hf(
            assistant, {key: state[prefix.format(i + 2) + key] for key in OF_QUERIES}, i
        )
        assert_close(
            layer(X, kv=kv, positions=jnp.arange(1, T + 1), is_causal=True), want
        )


def test_configs():
    gemma4 = MODELS["gemma4"]
    message = (
        "num_kv_shared_layers must leave an earlier layer of the same type as layer 3"
    )
    refused(message, convert.describe, gemma4 | {"num_kv_shared_layers": 3}, 3)
    for model_type in ("gemma4_assistant", "gemma4_unified_assistant"):
        config = {
            "model_type": model_type,
            "text_config": gemma4 | {"num_kv_shared_layers": 4},
        }
        described = [convert.describe(config, layer) for layer in range(4)]
        assert all(found["reuse_kv"] and not found["share_kv"] for found in described)
        assert [found["num_kv_heads"] for found in described] == [K, 1, K, 1]
        state = {
            key: x
            for key, x in weights("gemma4").items()
            if "k_" not in key and "v_" not in key
        }
        assert convert.from_hf(config, state, 0).key is None
    refused(
        "use_bidirectional_attention='all'",
        convert.describe,
        gemma4 | {"use_bidirectional_attention": "all"},
    )
    assert (
        convert.describe(gemma4 | {"use_bidirectional_attention": "vision"})["scale"]
        == 1.0
    )
    state = weights("gemma4") | {
        "model.layers.1.self_attn.v_proj.weight": torch.zeros(GLOBAL_H, D)
    }
    with pytest.raises(
        ValueError,
        match=r"value.kernel is missing from the module; create it with share_kv=False",
    ):
        convert.from_hf(gemma4, state, 1)


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
    """The causal formula."""

    def norm(y, scale=None):
        return (
            y
            / jnp.sqrt((y**2).mean(-1, keepdims=True) + 0.1)
            * (1 if scale is None else scale[None, None, None])
        )

    def attend(p, x, kv):
        query = jnp.einsum("btd,dnh->btnh", x, p["query"]["kernel"])
        query = flax_mha.rope.apply_rope(
            norm(query, p["query_ln"]["scale"]), jnp.arange(T), RoPE()
        )
        key, value = (jnp.repeat(y, N // K, axis=2) for y in kv)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(D // N)
        shares = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh,nhd->btd", shares, value, p["out"]["kernel"])

    first = params["first"]
    key, value = (
        jnp.einsum("btd,dnh->btnh", x, first[name]["kernel"])
        for name in ("key", "value")
    )
    key = flax_mha.rope.apply_rope(
        norm(key, first["key_ln"]["scale"]), jnp.arange(T), RoPE()
    )
    kv = key, norm(value)
    return attend(params["second"], x + attend(first, x, kv), kv)


@pytest.mark.core
def test_outputs_and_gradients_equal_the_formula():
    """Also with remat, and in linen; keys get gradients from both layers."""
    graph, params = nnx.split(Pair())
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(params))
    assert {*shapes["second"]} == {"query", "query_ln", "out"}
    fresh = jax.eval_shape(LinenPair().init, jax.random.key(0), X)["params"]
    assert jax.tree.map(lambda x: x.shape, fresh) == shapes

    def of_nnx(params, x, call=Pair.__call__):
        return call(nnx.merge(graph, params), x, is_causal=True)

    def of_linen(params, x):
        return LinenPair().apply(
            {"params": nnx.to_pure_dict(params)}, x, is_causal=True
        )

    def in_remat(params, x):
        return of_nnx(
            params,
            x,
            lambda pair, x, **given: nnx.remat(
                functools.partial(Pair.__call__, **given)
            )(pair, x),
        )

    functions = (
        lambda params, x: dense(nnx.to_pure_dict(params), x),
        of_linen,
        of_nnx,
        in_remat,
    )
    (want, slopes), *others = (
        jax.jit(
            jax.value_and_grad(
                lambda *given, f=f: (f(*given) ** 2).sum(), argnums=(0, 1)
            )
        )(params, X)
        for f in functions
    )
    for value, grads in others:
        np.testing.assert_allclose(value, want, rtol=1e-5)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
            grads,
            slopes,
        )
    assert_close(
        jax.jit(jax.vmap(functools.partial(of_nnx, params)))(X),
        jax.jit(of_nnx)(params, X),
    )


CACHES = {
    "float": {},
    "ring": {"local_window_size": (WINDOW, 0)},
    "8 bits": {"dtype": jnp.int8},
    "16 bits": {"dtype": jnp.bfloat16},
    "ring in 8 bits": {"local_window_size": (WINDOW, 0), "dtype": jnp.float8_e4m3fn},
    "lengths": {"per_row": True},
}


@pytest.mark.parametrize("name", CACHES)
def test_decoding_equals_the_whole_sequence(name):
    """With prompts of different lengths and NaN in padding; later calls overwrite a
    ring.
    """
    given = dict(CACHES[name])
    if "ring" in name:
        options = {"local_window_size": given.pop("local_window_size")}
    else:
        options = {}
    pair = Pair(**options)
    total = 153
    x = np.float32(np.random.default_rng(2).standard_normal((B, total, D)))
    want = nnx.jit(functools.partial(Pair.__call__, is_causal=True))(pair, x)
    pair.first.init_cache((B, total, D), **given)
    step = nnx.jit(functools.partial(Pair.__call__, decode=True))
    atol = 0.1 if "bits" in name else 1e-5
    starts = [0, 0]
    calls = ((20, (20, 7)), (1, (1, 1)), (30, (30, 12))) if name == "lengths" else None
    for number, lengths in calls or [
        (number, (number,) * 2) for number in (40, 1, 1, 40, 1, 70)
    ]:
        part = np.full((B, number, D), np.nan, np.float32)
        for b, length in enumerate(lengths):
            part[b, :length] = x[b, starts[b] : starts[b] + length]
        got = step(pair, part, **({"lengths": jnp.array(lengths)} if calls else {}))
        for b, length in enumerate(lengths):
            np.testing.assert_allclose(
                got[b, :length],
                want[b, starts[b] : starts[b] + length],
                rtol=0,
                atol=atol,
            )
            starts[b] += length
    assert {*nnx.to_pure_dict(nnx.state(pair, nnx.Cache))} == {"first"}


def test_decoding_in_linen_and_by_another_function():
    """Sown weights and other attention functions read the same cache; nothing is cached
    twice.
    """
    params = LinenPair().init(jax.random.key(0), X)["params"]
    want = LinenPair().apply({"params": params}, X, is_causal=True)
    cache = LinenPair(decode=True).init(jax.random.key(0), X)["cache"]
    assert {*cache} == {"first"}
    for i, arguments in (
        (0, {}),
        (5, {"sow_weights": True}),
        (6, {}),
        (9, {"sow_max_score": True}),
    ):
        part = X[:, i : {0: 5, 5: 6, 6: 9, 9: 13}[i]]
        variables = {"params": params, "cache": cache}
        got, changed = LinenPair(decode=True).apply(
            variables, part, mutable=["cache", "intermediates"], **arguments
        )
        cache = changed["cache"]
        assert_close(got, want[:, i : i + part.shape[1]])


@pytest.mark.core
def test_each_call_has_its_masks_and_positions():
    """NaN in padding affects no output and no gradient, and segments attend to their
    own keys.
    """
    pair = Pair()
    segments = np.array([[0] * 6 + [1] * 7, [0] * 2 + [1] * 11])
    more = {
        "lengths": jnp.array([T, 5]),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.arange(T) + 3,
    }

    @nnx.jit
    @functools.partial(nnx.value_and_grad, has_aux=True)
    def run(pair, x, more):
        output = pair(x, is_causal=True, **more)
        return output[1, :5].sum(), output

    padded = jnp.asarray(X).at[1, 5:].set(jnp.nan)
    (_, got), slopes = run(pair, padded, more)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slopes))
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & np.tri(
        T, dtype=bool
    )
    want = nnx.jit(lambda pair, x, mask: pair(x, mask=mask))(pair, X, mask)
    assert_close(got.at[1, 5:].set(0), want.at[1, 5:].set(0))


@pytest.mark.core
def test_views_explanations_and_errors():
    pair = Pair()
    other = Pair(num_kv_heads=1)
    view = nnx.view(pair, decode=True, batch_size=B, max_length=T)
    assert view.first.cached_key.shape == (B, T, K, D // N)
    assert view.second.cached_key is None
    first = nnx.jit(lambda layer: layer(X, return_kv=True)[1])
    kv = first(pair.first)
    kv_of_other = first(other.first)
    lengths = jnp.array([T, 5])
    assert (
        pair.second.explain(X, kv=kv, is_causal=True).chosen
        == pair.first.explain(X, is_causal=True).chosen
    )
    shared = flax_mha.MultiHeadAttention(
        N, D, share_kv=True, decode=False, rngs=nnx.Rngs(0)
    )
    of_linen = functools.partial(linen.MultiHeadAttention, N)
    key = jax.random.key(0)
    for call, error in (
        (
            lambda: pair.second(X),
            "kv must be the SharedKV that the call of an earlier layer returns .* got "
            "NoneType",
        ),
        (
            lambda: pair.first(X, kv=kv),
            "kv must be None if reuse_kv=False, .*; create the module with "
            "reuse_kv=True",
        ),
        (
            lambda: pair.second(X, kv=kv_of_other),
            r"shape \(2, 13, 2, 6\), but got \(2, 13, 1, 6\)",
        ),
        (
            lambda: pair.second(X[:, 1:], kv=kv),
            r"shape \(2, 12, 2, 6\), .* from the same step",
        ),
        (
            lambda: pair.second(X, kv=kv, lengths=lengths),
            "lengths must be passed when calling both layers or neither, .* only in "
            "this call",
        ),
        (
            lambda: pair.second(X, kv=kv, decode=True),
            "decode must be passed when calling both layers",
        ),
        (lambda: pair.second(X, X + 1, kv=kv), "reuse_kv=True requires self-attention"),
        (
            lambda: pair.first(X, X + 1, return_kv=True),
            "return_kv=True requires self-attention",
        ),
        (lambda: pair.first(X, return_kv=1), "return_kv must be True or False"),
        (lambda: Pair(share_kv=True), "share_kv must be False with reuse_kv=True"),
        (lambda: Pair(share_kv=1), "share_kv must be True or False"),
        (lambda: shared(X, X, X + 1), "inputs_v must be None with share_kv=True"),
        (
            lambda: of_linen(share_kv=True).init(key, X, X, X + 1),
            "inputs_v must be None with share_kv=True",
        ),
        (
            lambda: of_linen(reuse_kv=True, value_norm=Norm()).init(key, X),
            "value_norm must be None with reuse_kv=True",
        ),
    ):
        refused(error, call)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_shared_keys_are_processed_once_and_values_have_a_size_of_their_own(kind):
    """Rotated keys may be larger than the limit."""
    options = {"num_kv_heads": K, "value_dim": 5, "rope": RoPE()}

    def clip_keys(query, key, value):
        return query, key.clip(-0.3, 0.3), value

    if kind == "nnx":
        make = functools.partial(
            flax_mha.MultiHeadAttention, N, D, decode=False, rngs=nnx.Rngs(0), **options
        )
        first = make(process_heads=clip_keys)
        second = make(reuse_kv=True)
        assert second.key is second.value is None
        second.query = first.query
        second.out = first.out
    else:
        make = functools.partial(linen.MultiHeadDotProductAttention, N, **options)
        layers = make(process_heads=clip_keys), make(reuse_kv=True)
        params = layers[0].init(jax.random.key(0), X)["params"]
        of_second = {"params": {name: params[name] for name in ("query", "out")}}
        first = functools.partial(layers[0].apply, {"params": params})
        second = functools.partial(layers[1].apply, of_second)

    want, kv = first(X, is_causal=True, return_kv=True)

    assert kv.value.shape == (B, T, K, 5)
    assert np.abs(kv.key).max() > 0.3
    assert_close(second(X, kv=kv, is_causal=True), want)
