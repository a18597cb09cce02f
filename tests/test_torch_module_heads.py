"""Norms, gates and other options of heads, against layers of PyTorch written from the
definitions.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import refused
from flax import nnx
from marks import with_core_tuples

import flax_mha
from flax_mha import Gate, Norm, linen
from flax_mha.rope import RoPE

B = 2
T = 7
D = 24
N = 4
K = 2
H = 6
SIZES = {"num_heads": N, "num_kv_heads": K, "qkv_features": N * H}
X = np.float32(np.random.default_rng(0).standard_normal((B, T, D)))
LENGTHS = jnp.array([T, 4])
BITNET = Norm("rms", scale="heads", over="all_heads", epsilon=0.5)


def clipped(query, key, value):
    """Asymmetric, so that swapped arrays show."""
    return query.clip(-0.5, 0.5), key.clip(-0.8, 0.8), value.clip(-0.3, 0.3)


def scaled(query, key, value):
    return query, key, value * 0.5


# An epsilon of 0.5 is large enough to show where it is added.
KINDS = {
    "gate of heads": {"gate": Gate("head"), "use_bias": False},
    "norm of each head": {
        "normalize_qk": Norm("layer", scale="heads", epsilon=0.5),
        "rope": RoPE(),
    },
    "norm after rope": {
        "gate": Gate("head", "softplus"),
        "normalize_qk": Norm("rms", epsilon=0.5, after_rope=True),
        "process_heads": clipped,
        "rope": RoPE(),
    },
    "Laguna": {
        "gate": Gate("head", "softplus"),
        "normalize_qk": Norm("rms"),
        "rope": RoPE(),
    },
    "BitNet": {"out_norm": BITNET, "use_bias": False, "rope": RoPE()},
    "Muse Glimmer": {
        "normalize_qk": Norm("rms", scale=None, epsilon=0.5),
        "gate": True,
        "rope": RoPE(),
    },
    "OLMoE": {
        "normalize_qk": Norm(scale="heads", over="all_heads"),
        "process_heads": clipped,
        "rope": RoPE(),
    },
    "MiMo-V2": {"value_dim": 5, "process_heads": scaled, "rope": RoPE(), "sinks": True},
    "no scale over all heads": {
        "normalize_qk": Norm("layer", scale=None, over="all_heads"),
        "rope": RoPE(),
    },
    "norms of values": {
        "value_norm": Norm("layer", bias=True, epsilon=0.5),
        "out_norm": Norm("layer", scale="heads"),
    },
    "all": {
        "value_dim": 10,
        "process_heads": clipped,
        "gate": Gate(activation="softplus"),
        "normalize_qk": Norm("layer", bias=True, epsilon=0.5),
        "value_norm": Norm("rms", scale="heads"),
        "out_norm": BITNET,
        "rope": RoPE(),
        "logits_soft_cap": 5.0,
    },
}
APIS = ("nnx", "linen")
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)


# What the calls take that is no array.
STATIC = ("is_causal", "store_keys", "process_heads", "return_kv")
CALL = nnx.jit(flax_mha.MultiHeadAttention.__call__, static_argnames=STATIC)


def module_of(kind, decode=False, cache=None, length=T, **options):
    """Returns a function (inputs, **arguments) of a module with random parameters, and
    the parameters.
    """
    cache = cache or {}
    module = flax_mha.MultiHeadAttention(
        in_features=D, decode=decode, rngs=nnx.Rngs(0), **SIZES | options
    )
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = tree.unflatten(
        [jnp.asarray(0.5 * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    )
    module = nnx.merge(graph, params, rest)
    # linen's module takes the same parameters.
    pure = jax.tree.map(np.array, nnx.to_pure_dict(params))
    if kind == "nnx":
        if decode:
            module.init_cache((B, length, D), **cache)
        return functools.partial(CALL, module), pure
    layer = linen.MultiHeadDotProductAttention(decode=decode, **SIZES | options)
    variables = {"params": pure}
    if decode:
        layer = layer.copy(
            per_row=cache.get("per_row", False), cache_dtype=cache.get("dtype")
        )
        slots = jnp.zeros((B, length, D))
        variables["cache"] = jax.jit(layer.init)(jax.random.key(0), slots)["cache"]
    apply = jax.jit(
        functools.partial(layer.apply, mutable="cache"), static_argnames=STATIC
    )

    def step(variables, *x, **arguments):
        output, changed = apply(variables, *x, **arguments)
        variables.update(changed)
        return output

    return functools.partial(step, variables), pure


def rotated(y):
    frequencies = 10000.0 ** (-torch.arange(0, H, 2) / H)
    angles = torch.arange(T)[:, None] * frequencies
    # Both halves of a head turn by the same angles.
    angles = torch.cat([angles, angles], -1)[:, None]
    low, high = y.chunk(2, dim=-1)
    return y * torch.cos(angles) + torch.cat([-high, low], -1) * torch.sin(angles)


def torch_layer(params, x, options):
    """The causal layer with these options, for NumPy's arrays or PyTorch's tensors."""
    w, x = jax.tree.map(torch.as_tensor, (params, x))

    def project(name):
        return torch.tensordot(x, w[name]["kernel"], 1) + w[name].get("bias", 0)

    def normalized(y, name, norm):
        leaves = w.get(name, {})
        axes = (-1,)
        if norm.over == "all_heads":
            axes = (-2, -1)
        if norm.kind == "layer":
            y = y - y.mean(axes, keepdim=True)
        unit = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + norm.epsilon)
        return unit * leaves.get("scale", 1) + leaves.get("bias", 0)

    q = project("query")
    k = project("key")
    v = project("value")
    norm = options.get("normalize_qk")
    if norm and not norm.after_rope:
        q = normalized(q, "query_ln", norm)
        k = normalized(k, "key_ln", norm)
    if "value_norm" in options:
        v = normalized(v, "value_ln", options["value_norm"])
    if "process_heads" in options:
        q, k, v = options["process_heads"](q, k, v)
    if "rope" in options:
        q = rotated(q)
        k = rotated(k)
    if norm and norm.after_rope:
        q = normalized(q, "query_ln", norm)
        k = normalized(k, "key_ln", norm)
    k = k.repeat_interleave(N // K, dim=2)
    v = v.repeat_interleave(N // K, dim=2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    if cap := options.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    if "sinks" in options:
        # The score of one more key, whose value is 0.
        sinks = w["sinks"][:, None, None].expand(B, N, T, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., :T]
    y = torch.einsum("bnts,bsnh->btnh", weights, v)
    if gate := options.get("gate"):
        gate = Gate() if gate is True else gate
        activation = getattr(torch.nn.functional, gate.activation)
        factor = activation(project("gate"))
        if gate.per == "head":
            factor = factor[..., None]
        y = y * factor
    if "out_norm" in options:
        y = normalized(y, "out_norm", options["out_norm"])
    out = torch.einsum("btnh,nhd->btd", y, w["out"]["kernel"])
    return out + w["out"].get("bias", 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    with_core_tuples(
        itertools.product(KINDS, APIS), ("all", "nnx"), ("norm after rope", "linen")
    ),
)
def test_options_of_heads_equal_pytorch(name, kind):
    """With padding, and in steps over a cache with an index for each sequence."""
    options = KINDS[name]
    module, params = module_of(kind, **options)
    expected = torch_layer(params, X, options)

    # Outputs of padding are not compared, but must not be NaN.
    padded = jnp.asarray(X).at[1, 4:, 3].set(jnp.nan)
    got = module(padded, is_causal=True, lengths=LENGTHS)
    close(got[0], expected[0])
    close(got[1, :4], expected[1, :4])
    assert jnp.isfinite(got).all()

    decoder, _ = module_of(kind, decode=True, cache={"per_row": True}, **options)
    close(decoder(X[:, :3]), expected[:, :3])
    close(decoder(X[:, 3:6]), expected[:, 3:6])
    close(decoder(X[:, 6:]), expected[:, 6:])


def test_gradients_equal_pytorch():
    options = KINDS["all"]
    module, params = module_of("linen", **options)

    def loss(params):
        return jnp.sin(module.func({"params": params}, X, is_causal=True)).sum()

    got = jax.grad(loss)(params)
    of_torch = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    torch_layer(of_torch, X, options).sin().sum().backward()
    expected = jax.tree.map(lambda x: x.grad.numpy(), of_torch)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    jax.tree.map(near, got, expected)


@pytest.mark.parametrize("kind", APIS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(jnp.float32, 2e-5), (jnp.int8, 0.05)],
    ids=["float32", "int8"],
)
def test_rings_of_values_of_another_size_equal_one_call(kind, dtype, tolerance):
    options = KINDS["all"] | {"local_window_size": (3, 0)}
    x = jnp.tile(X, (1, 12, 1))
    module, _ = module_of(kind, **options)
    decoder, _ = module_of(
        kind, decode=True, cache={"dtype": dtype}, length=x.shape[1], **options
    )

    steps = [decoder(part) for part in jnp.split(x, [40, 41, 42, 43, 83], axis=1)]

    (holder,) = decoder.args
    if kind == "nnx":
        cached = holder.cached_value[...]
    else:
        cached = holder["cache"]["cached_value"]
    # A window of 3, its query, and 64 spare slots.
    assert (cached.shape, cached.dtype) == ((B, 3 + 1 + 64, K, 10), dtype)
    got = jnp.concatenate(steps, 1)
    expected = module(x, is_causal=True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", APIS)
def test_the_call_replaces_the_function_of_the_constructor(kind):
    module, params = module_of(kind, process_heads=scaled)

    in_call = module(X, is_causal=True, process_heads=clipped)

    close(in_call, torch_layer(params, X, {"process_heads": clipped}))
    close(module(X, is_causal=True), torch_layer(params, X, {"process_heads": scaled}))


class Mixed(nnx.Module):
    """Values plus a learned multiple of themselves."""

    def __init__(self):
        self.weight = nnx.Param(jnp.array(0.5))

    def __call__(self, query, key, value):
        return query, key, value * self.weight


@pytest.mark.parametrize("kind", APIS)
def test_values_of_the_first_layer_mixed_into_later_ones(kind):
    """Value residual learning, whole and in steps; the function captures arrays of the
    same call.
    """
    options = {"use_bias": False, "rope": RoPE()}
    layers = [module_of(kind, **options)[0] for _ in range(2)]
    steps = [module_of(kind, decode=True, **options)[0] for _ in range(2)]
    _, params = module_of(kind, **options)

    def both(layers, x, **arguments):
        y, kv = layers[0](x, return_kv=True, **arguments)

        def mix(query, key, value):
            return query, key, 0.3 * value + 0.7 * kv.value

        return layers[1](x + 0.1 * y, process_heads=mix, **arguments)

    got = both(layers, X, is_causal=True)
    decoded = [both(steps, part) for part in np.split(X, [3, 6], axis=1)]

    x = torch.as_tensor(X)
    kernel = torch.as_tensor(params["value"]["kernel"])
    of_first = torch.tensordot(x, kernel, 1)

    def mix(query, key, value):
        return query, key, 0.3 * value + 0.7 * of_first

    y = torch_layer(params, X, options)
    expected = torch_layer(params, x + 0.1 * y, options | {"process_heads": mix})
    # The largest entry is about 20.
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    near(got, expected)
    near(np.concatenate(decoded, axis=1), expected)


def test_embeddings_of_tokens_added_to_values():
    module, params = module_of("nnx")
    table = np.random.default_rng(3).standard_normal((5, K, H), np.float32)
    embedded = table[np.arange(B * T).reshape(B, T) % 5]

    got = module(X, is_causal=True, process_heads=lambda q, k, v: (q, k, v + embedded))

    added = {"process_heads": lambda q, k, v: (q, k, v + torch.as_tensor(embedded))}
    close(got, torch_layer(params, X, added))


def whole(**options):
    """A module that does not decode."""
    return flax_mha.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)


@pytest.mark.core
def test_a_module_as_process_heads_learns():
    layer = whole(process_heads=Mixed())
    names = nnx.to_pure_dict(nnx.state(layer, nnx.Param)).keys()
    names_without = nnx.to_pure_dict(nnx.state(whole(), nnx.Param)).keys()
    assert names - names_without == {"process_heads"}

    weight = layer.process_heads.weight
    slope = nnx.grad(lambda layer: layer(X).sum())(layer).process_heads.weight[...]

    weight.set_value(jnp.array(0.4))
    below = layer(X).sum()
    weight.set_value(jnp.array(0.6))
    above = layer(X).sum()
    # The output is linear in the weight.
    np.testing.assert_allclose(slope, (above - below) / 0.2, rtol=1e-3)


@pytest.mark.core
def test_processed_keys_and_values_are_cached_and_returned():
    module, _ = module_of("nnx", decode=True, process_heads=clipped)

    _, kv = flax_mha.MultiHeadAttention.__call__(*module.args, X, return_kv=True)

    (holder,) = module.args
    assert np.abs(kv.value).max() <= 0.3
    np.testing.assert_array_equal(holder.cached_value[...], kv.value)


# Errors -------------------------------------------------------------------------------


@pytest.mark.core
def test_process_heads_must_return_three_arrays_like_its_arguments():
    layer = flax_mha.MultiHeadAttention(
        **SIZES, in_features=D, decode=False, rngs=nnx.Rngs(0)
    )

    def result_refused(message, function):
        refused(message, layer, X, process_heads=function)

    message = r"must return three arrays \(query, key, value\), but got 2 of them"
    result_refused(message, lambda q, k, v: (q, k))
    message = "must return three arrays .* but got NoneType"
    result_refused(message, lambda q, k, v: None)
    message = (
        r"must return the value with shape \(2, 7, 2, 6\) and dtype float32, but got"
    )
    result_refused(message, lambda q, k, v: (q, k, v[..., :3]))
    message = "the key with shape .* and dtype bfloat16; use .astype if only"
    result_refused(message, lambda q, k, v: (q, k.astype(jnp.bfloat16), v))
    message = "must return the query with shape .* but got float"
    result_refused(message, lambda q, k, v: (1.0, k, v))


@pytest.mark.core
def test_process_heads_needs_keys_of_this_call():
    layer = flax_mha.MultiHeadAttention(
        N, D, decode=True, process_heads=scaled, rngs=nnx.Rngs(0)
    )
    message = "process_heads must be None .* store_keys=True"
    refused(message, layer, X, X[:, 1:], store_keys=True)

    _, kv = whole()(X, return_kv=True)
    later = whole(reuse_kv=True)
    message = "got keys from an earlier layer"
    refused(message, later, X, kv=kv, process_heads=scaled)


def options_refused(message, kind, **options):
    def call():
        if kind == "nnx":
            return whole(**options)(X)
        layer = linen.MultiHeadDotProductAttention(N, **options)
        return layer.init(jax.random.key(0), X)

    refused(message, call)


@pytest.mark.core
@pytest.mark.parametrize("kind", APIS)
def test_norms_and_gates_must_be_values_of_their_classes(kind):
    message = "gate must be True, False or a flax_mha.Gate, but got 'head'"
    options_refused(message, kind, gate="head")
    message = "normalize_qk must be True, .* but got 'rms_norm'"
    options_refused(message, kind, normalize_qk="rms_norm")
    message = "value_norm must be a flax_mha.Norm or None, but got True"
    options_refused(message, kind, value_norm=True)
    message = "out_norm must have after_rope=False"
    options_refused(message, kind, out_norm=Norm(after_rope=True))


@pytest.mark.core
@pytest.mark.parametrize("kind", APIS)
def test_process_heads_must_be_a_function(kind):
    message = (
        r"process_heads must be a function of \(query, key, value\) or None, but got 3"
    )
    options_refused(message, kind, process_heads=3)


@pytest.mark.core
@pytest.mark.parametrize("kind", APIS)
def test_reused_keys_and_values_are_not_changed(kind):
    message = "process_heads must be None with reuse_kv=True"
    options_refused(message, kind, process_heads=scaled, reuse_kv=True)
    message = "value_norm must be None with reuse_kv=True"
    options_refused(message, kind, value_norm=Norm(), reuse_kv=True)


@pytest.mark.core
@pytest.mark.parametrize("kind", APIS)
def test_value_dim_must_be_a_positive_int(kind):
    options_refused("value_dim must be an int >= 1, but got 0", kind, value_dim=0)


@pytest.mark.core
def test_fields_of_a_norm_are_checked():
    message = 'kind must be "rms" or "layer", but got \'batch\''
    refused(message, Norm, kind="batch")
    message = 'scale must be None, "head_dim" or "heads", but got \'all\''
    refused(message, Norm, scale="all")
    refused('over must be "head" or "all_heads", but got None', Norm, over=None)
    message = 'scale must be "heads" or None with over="all_heads"'
    refused(message, Norm, over="all_heads")
    refused("bias must be False unless kind is", Norm, bias=True)
    heads = {"kind": "layer", "scale": "heads"}
    refused("bias must be False unless", Norm, **heads, bias=True)
    message = "epsilon must be a finite number > 0, but got 0.0"
    refused(message, Norm, epsilon=0.0)
    refused("after_rope must be True or False", Norm, after_rope="yes")


@pytest.mark.core
def test_fields_of_a_gate_are_checked():
    refused('per must be "feature" or "head", but got \'row\'', Gate, per="row")
    message = 'activation must be "sigmoid" or "softplus", but got \'relu\''
    refused(message, Gate, activation="relu")
