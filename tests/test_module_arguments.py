"""What the modules take besides Flax's arguments, `flax.nnx` and `flax.linen` alike, and what they refuse."""

import functools
import importlib
import inspect
import pydoc
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import with_core

import flax_mha
from flax_mha import CausalMask, convert, linen, masks
from flax_mha._src.core import tracing
from flax_mha._src.modules.call import dot_general
from flax_mha.rope import RoPE, apply_rope

B, T, S, D, N, K = 2, 9, 13, 16, 4, 2
rng = np.random.default_rng(0)
X, Y = (np.float32(rng.standard_normal((B, n, D))) for n in (T, S))


class Nnx:
    """An nnx module, and its call."""

    @staticmethod
    def make(**options):
        return flax_mha.MultiHeadAttention(
            **{"num_heads": N, "in_features": D, "decode": False, "rngs": nnx.Rngs(0)} | options
        )

    @staticmethod
    def call(module, *inputs, **arguments):
        return module(*inputs, **arguments)

    @staticmethod
    def explain(module, *inputs, **arguments):
        return module.explain(*inputs, **arguments)


class Linen:
    """A linen module with the same arguments, and its call."""

    @staticmethod
    def make(**options):
        return linen.MultiHeadDotProductAttention(**{"num_heads": N} | options)

    @staticmethod
    def call(module, *inputs, **arguments):
        return module.init_with_output(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs, **arguments
        )[0]

    @staticmethod
    def explain(module, *inputs, **arguments):
        return module.explain(*inputs, **arguments)


APIS = pytest.mark.parametrize("api", [Nnx, Linen])


@pytest.mark.core
@APIS
def test_scale(api):
    default, same, other = (api.call(api.make(scale=scale), X) for scale in (None, 0.5, 1.5))
    np.testing.assert_allclose(same, default, rtol=0, atol=1e-6)  # head size 4
    assert jnp.abs(other - default).max() > 1e-3


@pytest.mark.core
def test_gate():
    """A sigmoid of the input multiplies heads before they are projected back; the padding's is not asked."""
    options = {"gate": True, "use_bias": False, "num_kv_heads": K}
    module, layer = Nnx.make(**options), Linen.make(**options)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    query, key, value, gate = (
        jnp.einsum("btd,dnh->btnh", X, params[x]["kernel"]) for x in ("query", "key", "value", "gate")
    )
    output = flax_mha.dot_product_attention(query, key, value, is_causal=True) / (1 + jnp.exp(-gate))
    expected = jnp.einsum("btnh,nhd->btd", output, params["out"]["kernel"])
    padded = jnp.asarray(X).at[1, 5:].set(jnp.nan)
    for call in (module, functools.partial(layer.apply, {"params": params})):
        np.testing.assert_allclose(call(X, is_causal=True), expected, atol=1e-5)
        got = call(padded, is_causal=True, lengths=jnp.array([T, 5]))
        np.testing.assert_allclose(got, expected.at[1, 5:].set(0), atol=1e-5)
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(0), X)["params"]) == jax.tree.map(jnp.shape, params)
    with jax.debug_nans(True):  # values of 0 have gradients
        nnx.update(module, {"value": {"kernel": jnp.zeros_like(params["value"]["kernel"])}})
        slopes = nnx.grad(lambda module: module(X).sum())(module)
    assert jnp.abs(slopes["value"]["kernel"][...]).max() > 0


@pytest.mark.core
@APIS
def test_lengths_are_a_mask_of_padding(api):
    lengths = jnp.array([9, 4])
    got = api.call(api.make(use_bias=False), X, lengths=lengths)
    inside = jnp.arange(T)[None] < lengths[:, None]
    want = api.call(api.make(use_bias=False), X, mask=(inside[:, None, :, None] & inside[:, None, None, :]))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert (got[1, 4:] == 0).all()
    # What padding holds reaches nothing.
    spoilt = api.call(api.make(use_bias=False), jnp.asarray(X).at[1, 4:].set(jnp.nan), lengths=lengths)
    np.testing.assert_array_equal(spoilt[1, :4], got[1, :4])


def layer_norm(x, scale, bias=0.0):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.5) * scale + bias


def rms_norm(x, scale, axes=-1):
    return x / np.sqrt(np.square(x).mean(axes, keepdims=True) + 0.5) * scale


# The norm of [B, T, heads, head size], and the heads that its scale has.
NORMS = {
    "layer_norm": (layer_norm, ()),
    "layer_norm_bias": (layer_norm, ()),
    "layer_norm_each_head": (layer_norm, (N,)),
    "rms_norm": (rms_norm, ()),
    "rms_norm_all_heads": (functools.partial(rms_norm, axes=(-2, -1)), (N,)),
    "rms_norm_after_rope": (rms_norm, ()),
}


@pytest.mark.parametrize("kind", with_core(NORMS, "layer_norm_bias", "rms_norm_after_rope"))
def test_norms_of_queries_and_keys(kind):
    """Of a module's parameters in both APIs: the scores are those of the formula."""
    norm, heads = NORMS[kind]
    options = {"use_bias": False, "normalize_qk": kind, "qk_norm_epsilon": 0.5, "rope": RoPE(), "scale": 1.0}
    draw = np.random.default_rng(1)
    leaves = ("scale", "bias") if kind == "layer_norm_bias" else ("scale",)
    norms = {x: {leaf: draw.uniform(0.5, 2.0, (*heads, D // N)) for leaf in leaves} for x in ("query_ln", "key_ln")}
    kernels = {x: {"kernel": draw.standard_normal((D, N, D // N))} for x in ("query", "key", "value")}
    kernels["out"] = {"kernel": draw.standard_normal((N, D // N, D))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), kernels | norms)

    after = kind == "rms_norm_after_rope"
    rotate = lambda x: np.asarray(apply_rope(jnp.asarray(x, jnp.float32), jnp.arange(T), RoPE()))  # noqa: E731
    projected = {x: np.einsum("btd,dnh->btnh", X, kernels[x]["kernel"]) for x in ("query", "key", "value")}
    query, key = (
        norm(rotate(projected[x]), **norms[f"{x}_ln"]) if after else rotate(norm(projected[x], **norms[f"{x}_ln"]))
        for x in ("query", "key")
    )
    weights = np.asarray(jax.nn.softmax(jnp.asarray(np.einsum("btnh,bsnh->bnts", query, key)), axis=-1))
    expected = np.einsum("bnts,bsnh,nhd->btd", weights, projected["value"], kernels["out"]["kernel"])

    module = Nnx.make(**options)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(module, nnx.Param))) == jax.tree.map(jnp.shape, params)
    nnx.update(module, params)
    for got in (module(X), Linen.make(**options).apply({"params": params}, X)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@APIS
def test_lengths_of_keys_alone(api):
    lengths = jnp.array([13, 5])
    got = api.call(api.make(), X, Y, lengths=(None, lengths))
    want = api.call(api.make(), X, Y, mask=(jnp.arange(S)[None] < lengths[:, None])[:, None, None, :])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@APIS
def test_everything_together(api):
    """Each argument has its effect beside all others."""
    ids = jnp.asarray(np.sort(rng.integers(0, 2, (B, T))))
    arguments = {
        "lengths": jnp.array([9, 6]),
        "segment_ids": ids,
        "mask": CausalMask(),
        "bias": jnp.broadcast_to(jnp.linspace(0.0, 1.0, T), (N, T, T)),
        "score_mod": lambda score, b, h, q_idx, kv_idx: score * 0.5,
    }
    options = {
        "num_kv_heads": K,
        "normalize_qk": "rms_norm",
        "qk_norm_epsilon": 0.5,
        "scale": 2.0,
        "sinks": True,
        "logits_soft_cap": 1.0,
        "local_window_size": (3, 1),
    }
    whole = api.call(api.make(**options), X, **arguments)
    assert jnp.isfinite(whole).all()
    for name in arguments:
        fewer = {n: x for n, x in arguments.items() if n != name}
        assert jnp.abs(api.call(api.make(**options), X, **fewer) - whole).max() > 1e-6, name
    for name in ("qk_norm_epsilon", "scale", "sinks", "logits_soft_cap", "local_window_size"):
        fewer = {n: x for n, x in options.items() if n != name}
        assert jnp.abs(api.call(api.make(**fewer), X, **arguments) - whole).max() > 1e-6, name


@pytest.mark.core
@APIS
def test_explain_says_what_a_call_computes(api):
    module = api.make(num_kv_heads=K, sinks=True)
    long = jnp.ones((1, 700, D))
    assert api.explain(module, X).chosen == "xla"
    explanation = api.explain(module, long, is_causal=True, lengths=jnp.array([650]))
    assert explanation.chosen == "blockwise"
    assert any("sinks" in reason for reason in explanation.refusals["cudnn"])
    with pytest.raises(ValueError, match=r"only attention_fn=flax_mha\.attention_fn can be explained"):
        api.explain(api.make(attention_fn=nnx.dot_product_attention), X)


@APIS
def test_explain_heeds_what_a_partial_sets(api):
    inner = functools.partial(flax_mha.attention_fn, implementation="xla", is_causal=True)
    module = api.make(attention_fn=functools.partial(inner, implementation="blockwise"))
    assert api.explain(module, X).chosen == "blockwise"


@pytest.mark.core
@APIS
@pytest.mark.parametrize(
    ("preset", "options", "arguments"),
    [
        ({"scale": 0.3, "is_causal": True}, {"scale": 0.3}, {"is_causal": True}),
        ({"local_window_size": (2, 0)}, {"local_window_size": (2, 0)}, {}),
        ({"mask": CausalMask()}, {}, {"mask": CausalMask()}),
        ({"bias": X[:, None, :, :T], "logits_soft_cap": 1.0}, {"logits_soft_cap": 1.0}, {"bias": X[:, None, :, :T]}),
        ({"key_value_seq_lengths": jnp.array([3, 5])}, {}, {"lengths": (None, jnp.array([3, 5]))}),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_partial_sets_what_the_module_leaves_open(api, preset, options, arguments):
    attention_fn = functools.partial(flax_mha.attention_fn, **preset)
    kept = {name: x for name, x in options.items() if name not in preset}
    got = api.call(api.make(**kept, attention_fn=attention_fn), X)
    want = api.call(api.make(**options), X, **arguments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert jnp.abs(got - api.call(api.make(), X)).max() > 1e-6
    same_twice = api.make(**options, attention_fn=attention_fn)
    np.testing.assert_allclose(api.call(same_twice, X), want, rtol=0, atol=1e-6)


@APIS
def test_a_partial_can_switch_dropout_off(api):
    attention_fn = functools.partial(flax_mha.attention_fn, deterministic=True)
    got = api.call(api.make(attention_fn=attention_fn, dropout_rate=0.5), X, deterministic=False)
    np.testing.assert_allclose(got, api.call(api.make(), X), rtol=0, atol=1e-6)


@APIS
def test_partials_on_a_mesh(api):
    """Around `context_parallel`; and with the sharding that a module with `head_axis` otherwise says itself."""
    mesh = jax.make_mesh((1, 1), ("context", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = functools.partial(flax_mha.context_parallel("context"), logits_soft_cap=1.0)
    heads = functools.partial(flax_mha.attention_fn, logits_soft_cap=1.0, qkv_sharding=jax.P(None, None, "model"))
    want = api.call(api.make(logits_soft_cap=1.0), X)
    with jax.set_mesh(mesh):
        for options in ({"attention_fn": split}, {"attention_fn": heads, "head_axis": "model"}):
            module = api.make(**options)
            np.testing.assert_allclose(api.call(module, X), want, rtol=0, atol=1e-6)
            assert api.explain(module, X).chosen in ("xla", "blockwise")
    decoding = Nnx.make(attention_fn=split, decode=True)
    decoding.init_cache((B, T, D))
    with pytest.raises(ValueError, match="decode must be False with context_parallel"):
        decoding(X)


PRESETS = {
    "another scale": ({"scale": 0.3}, {"scale": 0.4}, {}, r"scale must be given only once"),
    "another mask": ({"mask": CausalMask()}, {}, {"mask": jnp.ones((T, T), bool)}, r"mask must be given only once"),
    "dropout": ({"dropout_rate": 0.3}, {}, {}, r"attention_fn must not set dropout_rate"),
    "a weight's place": ({"module": nnx.Module()}, {}, {}, r"attention_fn must not set module"),
}


@pytest.mark.core
@APIS
@pytest.mark.parametrize("name", PRESETS)
def test_a_partial_that_contradicts_is_refused(api, name):
    preset, options, arguments, message = PRESETS[name]
    module = api.make(attention_fn=functools.partial(flax_mha.attention_fn, **preset), **options)
    with pytest.raises(ValueError, match=message):
        api.call(module, X, **arguments)


@pytest.mark.core
@APIS
def test_a_misspelt_keyword_of_a_partial_is_refused(api):
    with pytest.raises(TypeError, match=r"attention_fn\(\) got an unexpected keyword argument 'scal'"):
        api.call(api.make(attention_fn=functools.partial(flax_mha.attention_fn, scal=0.3)), X)


@APIS
def test_explain_of_a_named_implementation(api):
    assert api.explain(api.make(implementation="blockwise"), X).chosen == "blockwise"
    with pytest.raises(NotImplementedError, match='implementation="cudnn" does not support this call'):
        api.explain(api.make(implementation="cudnn"), X)


def test_explain_of_a_bound_linen_module():
    layer = Linen.make(decode=True)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 700, D)))
    bound = layer.bind(variables)
    assert bound.explain(jnp.ones((1, 1, D))).chosen == "xla"
    np.testing.assert_array_equal(bound.variables["cache"]["cache_index"], 0)


@pytest.mark.core
def test_explain_of_decoding_is_of_what_the_cache_holds():
    """A prompt that meets an empty cache may use any implementation; later calls read keys in the cache."""
    module = Nnx.make(decode=True)
    module.init_cache((1, 900, D))
    prompt = jnp.ones((1, 700, D))

    def mentions_offset():
        reasons = module.explain(prompt).refusals["cudnn"]
        return any("query_offset" in reason for reason in reasons)

    assert not any("ArrayMask" in reason for reason in module.explain(prompt).refusals["cudnn"])
    assert module.explain(prompt).chosen == "blockwise"
    assert not mentions_offset()
    module(jnp.ones((1, 20, D)))
    assert mentions_offset()
    assert module.explain(prompt[:, :1]).chosen == "xla"

    layer = Linen.make(decode=True)
    bound = layer.bind(layer.init(jax.random.key(0), jnp.ones((1, 900, D))))
    assert bound.explain(prompt).chosen == "blockwise"


def test_explain_of_stored_keys_is_not_of_a_mask_array():
    module = Nnx.make(decode=True)
    arguments = {"lengths": (None, jnp.array([7])), "store_keys": True}
    assert not any("mask" in reason for reason in module.explain(X[:1], X[:1], **arguments).refusals["cudnn"])


@pytest.mark.core
@APIS
def test_explain_has_the_signature_of_the_call(api):
    module = api.make()
    explained = dict(inspect.signature(module.explain).parameters)
    assert explained.pop("platform").default is None
    assert explained == inspect.signature(type(module).__call__.__get__(module)).parameters


LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPLAINED = {
    "nnx": lambda **options: Nnx.make(qkv_features=N * 16, **options),
    "nnx, latent": lambda **options: flax_mha.MultiHeadLatentAttention(N, D, rngs=nnx.Rngs(0), **LATENT, **options),
    "linen": lambda **options: Linen.make(qkv_features=N * 16, **options),
    "linen, self": lambda **options: linen.SelfAttention(N, qkv_features=N * 16, **options),
    "linen, latent": lambda **options: linen.MultiHeadLatentAttention(N, **LATENT, **options),
}


@pytest.mark.core
@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_for_a_platform_that_is_not_here(name):
    x = jnp.ones((1, 1024, D))
    half, whole = (EXPLAINED[name](decode=False, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    for platform, chosen in (("cuda", "cudnn"), ("tpu", "splash"), ("cpu", "blockwise"), (None, "blockwise")):
        with jax.numpy_dtype_promotion("standard"):  # norms of Flax
            assert half.explain(x, is_causal=True, platform=platform).chosen == chosen
    [reason] = whole.explain(x, is_causal=True, platform="cuda").refusals["cudnn"]
    assert reason.endswith("pass dtype=jnp.bfloat16 to the module, or cast query, key and value")
    with pytest.raises(ValueError, match="platform must be"), jax.numpy_dtype_promotion("standard"):
        half.explain(x, platform="rocm")


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("latent", [False, True])
def test_explain_of_a_prompt_and_a_step_for_a_platform_that_is_not_here(latent, dtype):
    module = EXPLAINED["nnx, latent" if latent else "nnx"](decode=True, dtype=jnp.bfloat16)
    module.init_cache((1, 1024, D), dtype)
    for platform, chosen in (("cuda", "cudnn"), ("tpu", "splash")):
        with jax.numpy_dtype_promotion("standard"):
            assert module.explain(jnp.ones((1, 1024, D)), platform=platform).chosen == chosen
            step = module.explain(jnp.ones((1, 1, D)), platform=platform)
        assert (step.chosen, step.on_cpu) == ("xla", None)
        assert "this call runs on cpu" not in str(step)


def test_explain_leaves_an_nnx_module_as_it_is():
    module = Nnx.make(dropout_rate=0.5, decode=True)
    module.init_cache((B, T, D))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Cache)))
    assert module.explain(X[:, :1], deterministic=False).chosen == "xla"
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Cache)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert module.attention_fn is flax_mha.attention_fn


@pytest.mark.core
@APIS
def test_a_custom_attention_function_gets_what_it_does_not_know_and_fails(api):
    def attention(query, key, value, mask=None, broadcast_dropout=True, dropout_rng=None, dropout_rate=0.0,
                  deterministic=False, dtype=None, precision=None, module=None, is_causal=False):  # fmt: skip
        return query

    assert api.call(api.make(attention_fn=attention), X).shape == X.shape
    for options, arguments, name in (({"scale": 1.0}, {}, "scale"), ({}, {"lengths": jnp.array([3, 4])}, "lengths")):
        with pytest.raises(TypeError, match=name):
            api.call(api.make(attention_fn=attention, **options), X, **arguments)


@APIS
def test_a_wrapper_of_the_attention_function_is_called(api):
    """Also one by `functools.wraps`, which copies the attribute by which modules know our function."""

    @functools.wraps(flax_mha.attention_fn)
    def doubled(*arrays, **arguments):
        return 2 * flax_mha.attention_fn(*arrays, **arguments)

    got = api.call(api.make(use_bias=False, attention_fn=doubled), X, is_causal=True)
    want = 2 * api.call(api.make(use_bias=False), X, is_causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.core
def test_a_decoding_call_that_raises_leaves_the_cache():
    module, layer = Nnx.make(decode=True), Linen.make(decode=True)
    module.init_cache((B, T, D))
    variables = layer.init(jax.random.key(0), X)
    wrong = {"mask": jnp.ones((3, 1, 1, T), bool)}
    with pytest.raises((ValueError, TypeError), match=r"mask|broadcast"):
        module(X[:, :1], **wrong)
    assert module.cache_index[...] == 0
    assert (module.cached_key[...] == 0).all()
    bound = layer.bind(variables, mutable=["cache"])
    with pytest.raises((ValueError, TypeError), match=r"mask|broadcast"):
        bound(X[:, :1], **wrong)
    assert bound.variables["cache"]["cache_index"] == 0


def test_a_linen_attention_function_that_does_not_know_a_mask_fails():
    def attention(query, key, value, deterministic=True):
        return query

    assert Linen.call(Linen.make(attention_fn=attention), X).shape == X.shape
    with pytest.raises(TypeError, match="mask"):
        Linen.call(Linen.make(attention_fn=attention), X, mask=CausalMask())
    with pytest.raises(TypeError, match="dropout"):
        Linen.call(Linen.make(attention_fn=attention, dropout_rate=0.5), X, deterministic=False)


ARRAYS_OF_NUMBERS = {
    "jax": lambda x: jnp.linspace(0, x, 2)[1],
    "numpy": lambda x: np.array(x, np.float32),
    "variable": lambda x: nnx.Variable(jnp.float32(x)),
}


@pytest.mark.parametrize("kind", ARRAYS_OF_NUMBERS)
def test_options_in_0d_arrays_count_as_their_numbers(kind):
    """As in Flax, also under `jit`, where the arrays are constants."""
    numbers = {"dropout_rate": 0.25, "logits_soft_cap": 2.0}
    key = jax.random.key(1)

    def attend(arguments, function=flax_mha.dot_product_attention):
        query = X.reshape(B, T, N, -1)
        return function(query, query, query, dropout_rng=key, **arguments)

    def of_linen(options):
        return Linen.call(Linen.make(**options), X, deterministic=False)

    def of_nnx(options):
        module = Nnx.make(**options)
        return nnx.jit(lambda module: module(X, deterministic=False))(module)

    def of_latent(options):
        module = flax_mha.MultiHeadLatentAttention(N, D, **LATENT, decode=False, rngs=nnx.Rngs(0), **options)
        return nnx.jit(lambda module: module(X, deterministic=False))(module)

    arrays = {name: ARRAYS_OF_NUMBERS[kind](x) for name, x in numbers.items()}
    for compute in (attend, functools.partial(attend, function=flax_mha.attention_fn), of_linen, of_nnx, of_latent):
        want = compute(numbers)
        np.testing.assert_array_equal(compute(arrays), want)
        if compute is not of_nnx and compute is not of_latent:
            np.testing.assert_allclose(jax.jit(lambda compute=compute: compute(arrays))(), want, atol=1e-6)


REFUSED = [
    ({"num_heads": 4.0}, {}, "num_heads must be an int, but got 4.0"),
    ({"num_kv_heads": 3}, {}, r"num_heads \(4\) must be divisible by num_kv_heads"),
    ({"gate": 1}, {}, "gate must be True or False, but got 1"),
    ({"implementation": "flash"}, {}, "implementation must be \"xla\".*or None, but got 'flash'"),
    ({"dropout_rate": 1.5}, {}, r"dropout_rate must be a concrete number in \[0, 1\), .*got 1.5"),
    ({"dropout_rate": np.zeros(1)}, {}, "dropout_rate must be a concrete number in"),
    ({"dropout_rate": np.array(None)}, {}, "dropout_rate must be a concrete number in"),
    ({"scale": "big"}, {}, "scale must be a finite number, but got 'big'"),
    ({"qk_norm_epsilon": 0.0, "normalize_qk": True}, {}, "qk_norm_epsilon must be a finite number > 0"),
    ({"qk_norm_epsilon": 1e-3}, {}, 'must be None without normalize_qk, .*normalize_qk="rms_norm"'),
    (
        {},
        {"mask": jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)},
        "mask must be bool, or contain only 0 and 1.* float32 containing -1000000000.0; pass it as bias=",
    ),
    ({}, {"mask": CausalMask}, r"mask must be a boolean array or a mask object .*call it: CausalMask\(\)"),
    ({}, {"mask": jnp.ones((B, T), bool)}, r"got shape \(2, 9\); use mask\[:, None, None, :\]"),
    ({}, {"mask": jnp.ones((B, T, T), bool)}, r"\(2, 9, 9\); use mask\[:, None, :, :\]"),
    ({}, {"lengths": jnp.array([3, -1])}, "^lengths must be at least 0, but got -1"),
    ({}, {"lengths": jnp.array([3, 1, 2])}, "^lengths must broadcast to"),
    ({}, {"mask": jnp.ones((B, 1, T), bool)}, r"\(2, 1, 9\); use mask\[:, None, :, :\]"),
    (
        {},
        {"segment_ids": jnp.ones((B, 4), int)},
        r"^segment_ids must have shape \[batch..., 9\], one id per position, but got \(2, 4\)",
    ),
    ({}, {"segment_ids": jnp.ones((B, T))}, "^segment_ids must have an integer dtype, but got float32"),
    (
        {},
        {"segment_ids": (jnp.ones((B, T), int), jnp.ones((B, 4), int))},
        r"^segment_ids of keys must have shape \[batch..., 9\]",
    ),
]


@pytest.mark.core
@pytest.mark.parametrize("name", ["in_features", "in_kv_features", "out_features"])
@pytest.mark.parametrize("size", [0, -1, "8"])
def test_modules_need_features(name, size):
    message = f"{name} must be an int >= 1, but got {size!r}"
    with pytest.raises(ValueError, match=message):
        Nnx.make(**{name: size})
    if name in ("in_features", "out_features"):
        with pytest.raises(ValueError, match=message):
            flax_mha.MultiHeadLatentAttention(
                **{"num_heads": N, "in_features": D, **LATENT, name: size}, rngs=nnx.Rngs(0)
            )


@pytest.mark.core
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_linen_inputs_need_features(empty):
    inputs = [X[..., :0] if i == empty else X for i in range(3)]
    message = f"{('inputs_q', 'inputs_k', 'inputs_v')[empty]} must have at least one feature.* got shape \\(2, 9, 0\\)"
    with pytest.raises(ValueError, match=message):
        Linen.call(Linen.make(qkv_features=D), *inputs)
    if not empty:
        with pytest.raises(ValueError, match=message):
            Linen.call(linen.MultiHeadLatentAttention(N, **LATENT), X[..., :0])


@pytest.mark.core
def test_remat_traces_keyword_arguments():
    """So `is_causal=True` is no bool in it; the mask object is the same."""
    module = nn.remat(linen.MultiHeadDotProductAttention)(N)
    fix = r"got a traced value; pass mask=flax_mha.CausalMask\(\) instead.* nn.remat"
    with pytest.raises(ValueError, match="is_causal must be a concrete True or False, .*" + fix):
        Linen.call(module, X, is_causal=True)
    want = Linen.call(Linen.make(), X, is_causal=True)
    np.testing.assert_allclose(Linen.call(module, X, mask=CausalMask()), want, atol=1e-6)


@pytest.mark.core
def test_one_array_of_segments_for_keys_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"segment_ids must be a pair \(queries, keys\) .* lengths 9 and 13"):
        Nnx.call(Nnx.make(), X, Y, segment_ids=jnp.ones((B, T), int))


@pytest.mark.core
@pytest.mark.parametrize(("options", "arguments", "message"), REFUSED)
@APIS
def test_refused(options, arguments, message, api):
    with pytest.raises(ValueError, match=message) as error:
        api.call(api.make(**options), X, **arguments)
    assert "\n" not in str(error.value).partition("\n---")[0]


@pytest.mark.core
@APIS
def test_a_misspelt_argument_of_the_call_is_blamed_on_the_call(api):
    with pytest.raises(TypeError, match=r"__call__\(\) got an unexpected keyword argument 'maks'"):
        api.call(api.make(), X, maks=None)


@pytest.mark.core
@pytest.mark.parametrize("name", ["lengths", "segment_ids"])
@APIS
def test_three_arrays_for_queries_and_keys_are_refused(api, name):
    with pytest.raises(ValueError, match=rf"{name} must be one array or a pair .* but got 3 arrays"):
        api.call(api.make(), X, **{name: (jnp.ones(B, int),) * 3})


@pytest.mark.core
@APIS
def test_one_array_of_lengths_for_other_keys_is_refused(api):
    with pytest.raises(ValueError, match=r"lengths must be a pair \(queries, keys\).*\(None, lengths\)"):
        api.call(api.make(), X, Y, lengths=jnp.array([3, 4]))


@pytest.mark.core
def test_a_key_of_jax_random_is_no_rngs():
    with pytest.raises(ValueError, match=r"rngs must be nnx.Rngs, but got PRNGKeyArray; pass a key as nnx.Rngs\(key\)"):
        Nnx.make(rngs=jax.random.key(0))
    module = Nnx.make(dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match=r"rngs must be nnx.Rngs or nnx.RngStream, but got PRNGKeyArray"):
        module(X, rngs=jax.random.key(0))


@pytest.mark.core
def test_while_decoding_lengths_need_an_index_for_each_sequence():
    expected = "lengths must be None if all sequences share one index.*per_row=True"
    module = Nnx.make(decode=True)
    module.init_cache((B, T, D))
    with pytest.raises(ValueError, match=expected):
        module(X[:, :1], lengths=jnp.array([1, 1]))
    layer = Linen.make(decode=True)
    variables = layer.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=expected):
        layer.apply(variables, X[:, :1], lengths=jnp.array([1, 1]), mutable=["cache"])


@pytest.mark.core
def test_names_of_the_package():
    assert flax_mha.linen is linen
    assert flax_mha.convert is convert
    assert flax_mha.recipes.causal()["mask"] == CausalMask()
    assert flax_mha.CausalMask is masks.CausalMask
    assert flax_mha.RoPE is flax_mha.rope.RoPE
    assert flax_mha.KVCache is flax_mha.kv_cache.KVCache
    assert flax_mha.combine is flax_mha.recipes.combine
    for name in ("to_zigzag", "from_zigzag"):
        module = importlib.import_module("flax_mha.context_parallel")
        function = getattr(module, name)
        assert function is getattr(flax_mha, name) is getattr(flax_mha.context_parallel, name)
    assert flax_mha.__version__.count(".") >= 2
    with pytest.raises(AttributeError, match="module 'flax_mha' has no attribute 'linnen'"):
        flax_mha.linnen  # noqa: B018


@pytest.mark.core
def test_dir_lists_public_names_only():
    """Each can be had; what only the package uses, such as `importlib`, is not listed."""
    names = dir(flax_mha)
    modules = {name for name in names if inspect.ismodule(getattr(flax_mha, name))}
    assert modules == {"attention", "cached_attention", "convert", "kv_cache", "linen", "masks", "nnx", "plot",
                       "recipes", "rope"}  # fmt: skip
    assert set(names) == {*flax_mha.__all__, *modules, "__version__"}


SIGNED = {
    "nnx": (lambda: flax_mha.MultiHeadAttention(N, D, rngs=nnx.Rngs(0)), "rope"),
    "nnx, latent": (EXPLAINED["nnx, latent"], "kv_lora_rank"),
    "linen": (Linen.make, "num_kv_heads"),
    "linen, self": (EXPLAINED["linen, self"], "num_kv_heads"),
    "linen, latent": (EXPLAINED["linen, latent"], "kv_lora_rank"),
}


def parameters(function):
    """Those that `help` and editors show, of which none may take just anything."""
    found = inspect.signature(function).parameters
    assert not [x for x in found.values() if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    return found


@pytest.mark.core
@pytest.mark.parametrize("name", SIGNED)
def test_help_and_editors_show_the_signature_of_a_module(name):
    make, argument = SIGNED[name]
    layer = make()
    kind = type(layer)
    assert argument in parameters(kind)
    assert "self" not in parameters(kind)
    head = pydoc.render_doc(kind, renderer=pydoc.plaintext).partition("\n |  \n")[0]
    assert f"{argument}:" in head
    for call in (layer, layer.explain, kind.__call__, kind.explain):  # an instance is shown with its call
        assert {"inputs_q", "score_mod"} <= parameters(call).keys()
    assert "platform" in parameters(kind.explain)


@pytest.mark.core
def test_the_signature_of_a_subclass_is_its_own():
    class Wider(flax_mha.MultiHeadAttention):
        def __init__(self, width: int, rngs: nnx.Rngs):
            super().__init__(2, width, decode=False, rngs=rngs)

    assert list(parameters(Wider)) == ["width", "rngs"]
    assert Wider(8, nnx.Rngs(0))(jnp.ones((1, 3, 8))).shape == (1, 3, 8)


@pytest.mark.core
def test_help_and_editors_show_the_signature_of_a_function():
    functions = (
        flax_mha.attention_fn,
        flax_mha.cached_attention.cached_attention,
        flax_mha.context_parallel,
        flax_mha.context_parallel("x"),
    )
    for function in (*functions, flax_mha.dot_product_attention, flax_mha.explain_implementation):
        assert len(parameters(function)) > 5
        assert "arguments" not in parameters(function)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "undescribed"),
    [
        *((kind, set()) for kind in (flax_mha.MultiHeadAttention, flax_mha.MultiHeadLatentAttention)),
        # What every linen module has.
        *((x, {"parent", "name"}) for x in (linen.MultiHeadDotProductAttention, linen.MultiHeadLatentAttention)),
    ],
)
def test_every_argument_of_a_constructor_is_described(kind, undescribed):
    """In the docstring of the class, or of those to which the docstring sends its reader."""
    texts = kind.__doc__ + flax_mha.MultiHeadAttention.__doc__
    texts += flax_mha.MultiHeadLatentAttention.__doc__ if undescribed else ""
    described = re.findall(r"^(?:    )?  (\w+(?:, \w+)*): ", texts, re.M)
    assert parameters(kind).keys() - {name for names in described for name in names.split(", ")} == undescribed


@pytest.mark.core
def test_a_star_import_brings_functions_and_classes_and_no_modules():
    """Which would replace those of Flax that were imported before."""
    names = {}
    exec("from flax import linen, nnx\nfrom flax_mha import *", names)
    assert names["nnx"] is nnx
    assert names["linen"] is nn
    brought = names.keys() - {"__builtins__", "linen", "nnx"}
    assert {"CausalMask", "MultiHeadAttention", "context_parallel", "dot_product_attention"} <= brought
    assert {name for name in brought if not callable(names[name])} == set()
    assert brought == {name for name in dir(flax_mha) if callable(getattr(flax_mha, name))}
    assert {"RoPE", "KVCache", "to_zigzag", "from_zigzag", "combine"} <= brought


def test_attention_fn_takes_every_argument_of_flax():
    ours = inspect.signature(flax_mha.attention_fn).parameters
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= set(ours)
    query = jnp.asarray(rng.standard_normal((B, T, N, 4)), jnp.float32)
    calls = []

    def counted(*arguments, **keywords):
        calls.append(1)
        return jax.lax.dot_general(*arguments, **keywords)

    got = flax_mha.attention_fn(query, query, query, einsum_dot_general=counted)
    assert len(calls) == 2
    np.testing.assert_allclose(got, flax_mha.attention_fn(query, query, query), rtol=0, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("tokens", [1, 3])
def test_projections_in_bfloat16(tokens, monkeypatch):
    """Where a CPU multiplies bfloat16, they are rounded float32 sums, also of a single row and of transposed arrays."""
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 31, tokens), (N, 31, 8)))
    expected = np.einsum("bdt,ndh->btnh", np.asarray(x, np.float64), np.asarray(kernel, np.float64))

    def project(x):
        return dot_general(x.T, jnp.transpose(kernel, (1, 2, 0)), (((1,), (0,)), ((), ())))

    for got in (jnp.stack([jax.jit(project)(own) for own in x]), jax.jit(jax.vmap(project))(x)):
        assert got.dtype == jnp.bfloat16
        got = np.moveaxis(np.asarray(got, np.float64), -1, -2)
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-5)


@pytest.mark.core
def test_projections_of_a_vector_and_into_a_named_dtype(monkeypatch):
    """A product into float32 is not rounded to bfloat16, and a vector is no row."""
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((31,), (31, 8)))
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    axes = (((0,), (0,)), ((), ()))
    got, wide = dot_general(x, kernel, axes), dot_general(x, kernel, axes, preferred_element_type=jnp.float32)
    assert (got.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(wide, expected, rtol=0, atol=1e-5)
