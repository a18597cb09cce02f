"""Norms, gates and other options of heads, against layers of PyTorch written from the definitions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import refused
from flax import nnx
from marks import with_core, with_core_tuples

import flax_mha
from flax_mha import linen
from flax_mha._src.modules.output import exclude_own
from flax_mha.rope import RoPE

B, T, D, N, K, H = 2, 7, 24, 4, 2, 6
SIZES = {"num_heads": N, "num_kv_heads": K, "qkv_features": N * H}
X = np.float32(np.random.default_rng(0).standard_normal((B, T, D)))
LENGTHS = jnp.array([T, 4])
BITNET = {"out_norm": "rms_norm", "out_norm_epsilon": 0.5}
KINDS = {
    "exclusive": {"exclusive": True},
    "exclusive, gate": {"exclusive": True, "gate": "elementwise", "rope": RoPE(), "logits_soft_cap": 5.0},
    "gate of heads": {"gate": "head", "use_bias": False},
    "norm of each head": {"normalize_qk": "layer_norm_each_head", "qk_norm_epsilon": 0.5, "rope": RoPE()},
    "norm after rope": {"gate": "head", "gate_activation": "softplus", "rope": RoPE()}
    | {"normalize_qk": "rms_norm_after_rope", "qk_norm_epsilon": 0.5},
    "Laguna": {"gate": "head", "gate_activation": "softplus", "normalize_qk": "rms_norm", "rope": RoPE()},
    "BitNet": BITNET | {"use_bias": False, "rope": RoPE()},
    "Muse Glimmer": {"normalize_qk": "rms_norm_no_scale", "qk_norm_epsilon": 0.5, "gate": True, "rope": RoPE()},
    "OLMoE": {"normalize_qk": "rms_norm_all_heads", "clip_qkv": 0.5, "rope": RoPE()},
    "DBRX": {"clip_qkv": 0.8, "rope": RoPE()},
    "MiMo-V2": {"value_dim": 5, "value_scale": 0.5, "rope": RoPE(), "sinks": True},
    "Dory": {"normalize_qk": "rms_norm_each_head_after_rope", "rope": RoPE(), "gate": True} | BITNET,
    "all": {"value_dim": 10, "clip_qkv": 1.0, "exclusive": True, "gate": True, "gate_activation": "softplus"}
    | {"normalize_qk": "layer_norm_bias", "qk_norm_epsilon": 0.5, "rope": RoPE()}
    | BITNET,
}
APIS = ("nnx", "linen")
MODULES = pytest.mark.parametrize("kind", with_core(APIS, "nnx"))
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)


STATIC = ("is_causal", "store_keys")
CALL = nnx.jit(flax_mha.MultiHeadAttention.__call__, static_argnames=STATIC)


def module_of(kind, decode=False, cache=None, length=T, **options):
    """Returns a function (inputs, **arguments) of a module with random parameters, and the parameters."""
    module = flax_mha.MultiHeadAttention(in_features=D, decode=decode, rngs=nnx.Rngs(0), **SIZES | options)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = tree.unflatten([jnp.asarray(0.5 * rng.standard_normal(x.shape), x.dtype) for x in leaves])
    module = nnx.merge(graph, params, rest)
    pure = jax.tree.map(np.array, nnx.to_pure_dict(params))
    if kind == "nnx":
        if decode:
            module.init_cache((B, length, D), **cache or {})
        return functools.partial(CALL, module), pure
    layer = linen.MultiHeadDotProductAttention(decode=decode, **SIZES | options)
    variables = {"params": pure}
    if decode:
        layer = layer.copy(per_row=(cache or {}).get("per_row", False), cache_dtype=(cache or {}).get("dtype"))
        variables["cache"] = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((B, length, D)))["cache"]
    apply = jax.jit(functools.partial(layer.apply, mutable="cache"), static_argnames=STATIC)

    def step(variables, *x, **arguments):
        output, changed = apply(variables, *x, **arguments)
        variables.update(changed)
        return output

    return functools.partial(step, variables), pure


def rotated(y):
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, H, 2) / H)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return y * cos + torch.cat([-y[..., H // 2 :], y[..., : H // 2]], -1) * sin


def torch_layer(params, x, options):
    """The causal layer with these options, for NumPy's arrays or PyTorch's tensors."""
    w, x = jax.tree.map(torch.as_tensor, (params, x))

    def project(name):
        return torch.tensordot(x, w[name]["kernel"], 1) + w[name].get("bias", 0)

    def norm(y, name, epsilon, kind):
        axes, leaves = (-2, -1) if "all" in kind else (-1,), w.get(name, {})
        if "layer" in kind:
            y = y - y.mean(axes, keepdim=True)
        unit = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + epsilon)
        return unit * leaves.get("scale", 1) + leaves.get("bias", 0)

    q, k, v = (project(name) for name in ("query", "key", "value"))
    kind = options.get("normalize_qk", "")
    of_kind = options.get("qk_norm_epsilon", 1e-6), kind
    if kind and "after" not in kind:
        q, k = norm(q, "query_ln", *of_kind), norm(k, "key_ln", *of_kind)
    if limit := options.get("clip_qkv"):
        q, k, v = (y.clamp(-limit, limit) for y in (q, k, v))
    if "rope" in options:
        q, k = rotated(q), rotated(k)
    if "after" in kind:
        q, k = norm(q, "query_ln", *of_kind), norm(k, "key_ln", *of_kind)
    k, v = (y.repeat_interleave(N // K, dim=2) for y in (k, v * options.get("value_scale", 1.0)))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    if cap := options.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    sinks = w["sinks"][:, None, None].expand(B, N, T, 1) if "sinks" in options else scores[..., :0]
    y = torch.einsum("bnts,bsnh->btnh", torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :T], v)
    if options.get("exclusive"):
        unit = torch.nn.functional.normalize(v, dim=-1)
        y = y - (y * unit).sum(-1, keepdim=True) * unit
    if kind := options.get("gate"):
        gate = getattr(torch.nn.functional, options.get("gate_activation", "sigmoid"))(project("gate"))
        y = y * (gate[..., None] if kind == "head" else gate)
    if "out_norm" in options:
        y = norm(y, "out_norm", options.get("out_norm_epsilon", 1e-6), "all")
    return torch.einsum("btnh,nhd->btd", y, w["out"]["kernel"]) + w["out"].get("bias", 0)


@pytest.mark.parametrize(
    ("name", "kind"), with_core_tuples(itertools.product(KINDS, APIS), ("all", "nnx"), ("norm after rope", "linen"))
)
def test_equals_pytorch(name, kind):
    """With padding, and in steps over a cache with an index for each sequence."""
    options = KINDS[name]
    module, params = module_of(kind, **options)
    expected = torch_layer(params, X, options)
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
    expected = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    torch_layer(expected, X, options).sin().sum().backward()
    got = jax.grad(lambda params: jnp.sin(module.func({"params": params}, X, is_causal=True)).sum())(params)
    for path, slope in jax.tree.leaves_with_path(got):
        want = functools.reduce(lambda tree, key: tree[key.key], path, expected).grad
        np.testing.assert_allclose(slope, want, rtol=0, atol=1e-4, err_msg=str(path))


@pytest.mark.parametrize(
    ("kind", "dtype"), with_core_tuples(itertools.product(APIS, (jnp.float32, jnp.int8)), ("linen", jnp.float32))
)
def test_caches(kind, dtype):
    """Rings, and caches of 8 bits, with values of another size."""
    options = KINDS["all"] | {"local_window_size": (3, 0)}
    x = jnp.tile(X, (1, 12, 1))
    expected = module_of(kind, **options)[0](x, is_causal=True)
    decoder, _ = module_of(kind, decode=True, cache={"dtype": dtype}, length=x.shape[1], **options)
    steps = [decoder(part) for part in jnp.split(x, [40, 41, 42, 43, 83], axis=1)]
    (holder,) = decoder.args
    cached = holder.cached_value[...] if kind == "nnx" else holder["cache"]["cached_value"]
    assert (cached.shape, cached.dtype) == ((B, 3 + 1 + 64, K, 10), dtype)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, rtol=0, atol=2e-5 if dtype == jnp.float32 else 0.05)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_first_token_excludes_its_rounded_value(dtype):
    """It attends only to itself, so nothing remains for the norm to enlarge."""
    options = {"exclusive": True, "out_norm": "rms_norm", "use_bias": False}
    decoder, _ = module_of("nnx", decode=True, cache={"dtype": dtype}, **options)
    np.testing.assert_allclose(decoder(X[:, :1]), 0, atol=1e-3)


@MODULES
def test_stored_keys_are_clipped_once(kind):
    """Rotated keys may be larger than the limit."""
    options = {"clip_qkv": 0.3, "value_dim": 5, "rope": RoPE()}
    y, positions = X[:, ::-1], jnp.arange(T)
    expected = module_of(kind, **options)[0](X, y, positions=(positions, positions))
    decoder, _ = module_of(kind, decode=True, **options)
    decoder(X, y, positions=(positions, positions), store_keys=True)
    close(decoder(X, positions=positions), expected)


@pytest.mark.core
def test_exclusive_values_of_any_length():
    """The length of a value does not matter; a value of 0 removes nothing, and adds no gradient."""
    x, value = (jnp.asarray(X[..., i : i + 12].reshape(B, T, -1, 6)) for i in (0, 12))
    exclude = jax.jit(exclude_own)
    expected = exclude(x, value[..., :1, :])
    np.testing.assert_allclose((expected * value[..., :1, :]).sum(-1), 0, atol=1e-6)
    for scale in (1e-34, 1e-20, 1e30):
        close(exclude(x, scale * value[..., :1, :]), expected)
    with jax.debug_nans(True):
        output, pull = jax.vjp(exclude, x, 0 * value)
        slopes = pull(x)
    np.testing.assert_array_equal(output, x)
    np.testing.assert_array_equal(slopes[0], x)
    np.testing.assert_array_equal(slopes[1], 0)
    spoilt = value.at[0, 0].set(jnp.nan)
    assert jnp.isnan(exclude(x, spoilt)[0, 0]).all()
    assert (exclude(x.at[0, 0].set(0), spoilt)[0, 0] == 0).all()


REFUSED = [
    ({"exclusive": 1}, {}, "exclusive must be True or False, but got 1"),
    ({"exclusive": True}, {"inputs_k": X[:, :3]}, "exclusive=True requires self-attention, but got inputs_k; use"),
    ({"gate": "heads"}, {}, 'gate must be True or False or one of "elementwise", "head", but got \'heads\''),
    ({"gate": True, "gate_activation": "relu"}, {}, 'gate_activation must be one of "sigmoid", "softplus", but got'),
    ({"gate_activation": "softplus"}, {}, "must be \"sigmoid\" without gate, but got 'softplus'; pass gate=True"),
    ({"out_norm": True}, {}, 'out_norm must be None or "rms_norm", but got True'),
    ({"out_norm_epsilon": 1e-5}, {}, 'out_norm_epsilon must be None without out_norm, .* pass out_norm="rms_norm"'),
    ({"out_norm": "rms_norm", "out_norm_epsilon": 0.0}, {}, "out_norm_epsilon must be a finite number > 0, but got 0"),
    *(
        ({"clip_qkv": x}, {}, f"clip_qkv must be .* from 1e-30 to 1e30, or None, but got {x}")
        for x in (0.0, -1, jnp.inf, True)
    ),
    *(({"value_scale": x}, {}, f"value_scale must be .* or None, but got {x}") for x in (0.0, -1, jnp.nan)),
    ({"value_scale": 0.5, "reuse_kv": True}, {}, "value_scale must be None with reuse_kv=True, .* but got 0.5"),
    *(({"value_dim": x}, {}, f"value_dim must be an int >= 1, but got {x}") for x in (0, 2.0, True)),
]


@pytest.mark.core
@pytest.mark.parametrize(("options", "arguments", "message"), REFUSED)
@pytest.mark.parametrize("kind", APIS)
def test_refused(options, arguments, message, kind):
    def call():
        if kind == "nnx":
            return flax_mha.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)(X, **arguments)
        return linen.MultiHeadDotProductAttention(N, **options).init(jax.random.key(0), X, **arguments)

    refused(message, call)
