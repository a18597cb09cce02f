"""The arguments that both kinds of modules add to Flax's, and the errors of wrong
arguments.
"""

import functools
import inspect
import pydoc
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx

import flax_mha
from flax_mha import CausalMask, LocalMask, linen, masks, recipes
from flax_mha._src.core import tracing
from flax_mha._src.modules.dot_general import dot_general

B = 2
T = 9
S = 13
D = 16
N = 4
K = 2
rng = np.random.default_rng(0)
X = np.float32(rng.standard_normal((B, T, D)))
Y = np.float32(rng.standard_normal((B, S, D)))


def nnx_module(**options):
    given = {"num_heads": N, "in_features": D, "decode": False, "rngs": nnx.Rngs(0)}
    return flax_mha.MultiHeadAttention(**given | options)


def linen_module(**options):
    return linen.MultiHeadDotProductAttention(**{"num_heads": N} | options)


def call(module, *inputs, **arguments):
    """The output of a module of either library; linen modules get new parameters."""
    if isinstance(module, nnx.Module):
        return module(*inputs, **arguments)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    output, _ = module.init_with_output(keys, *inputs, **arguments)
    return output


def partial(**preset):
    return functools.partial(flax_mha.attention_fn, **preset)


MAKES = pytest.mark.parametrize("make", [nnx_module, linen_module])
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)


@pytest.mark.core
@MAKES
def test_lengths_equal_a_mask_of_padding_and_hide_nan_in_it(make):
    lengths = jnp.array([9, 4])
    module = make(use_bias=False)
    padded = jnp.asarray(X).at[1, 4:].set(jnp.nan)
    inside = jnp.arange(T)[None] < lengths[:, None]
    mask = inside[:, None, :, None] & inside[:, None, None, :]

    assert_close(call(module, padded, lengths=lengths), call(module, X, mask=mask))


@pytest.mark.core
@MAKES
def test_explain_names_the_choice_and_the_reasons_against_others(make):
    module = make(num_kv_heads=K, logits_soft_cap=30.0)
    assert module.explain(X).chosen == "xla"

    long = jnp.ones((1, 700, D))
    explanation = module.explain(long, is_causal=True, lengths=jnp.array([650]))
    assert explanation.chosen == "blockwise"
    assert any("soft_cap" in reason for reason in explanation.refusals["cudnn"])


@pytest.mark.core
@MAKES
def test_explain_knows_the_implementation_of_options_and_partials(make):
    xla = partial(implementation="xla", is_causal=True)
    nested = functools.partial(xla, implementation="blockwise")
    assert make(implementation="blockwise").explain(X).chosen == "blockwise"
    assert make(attention_fn=nested).explain(X).chosen == "blockwise"


@pytest.mark.core
@MAKES
def test_explain_raises_where_the_call_would_or_the_function_is_not_ours(make):
    other = make(attention_fn=nnx.dot_product_attention)
    message = r"only attention_fn=flax_mha\.attention_fn can be explained"
    refused(message, other.explain, X)

    message = 'implementation="cudnn" does not support this call'
    with pytest.raises(NotImplementedError, match=message):
        make(implementation="cudnn").explain(X)


class Preset(NamedTuple):
    """Arguments of a partial, and the options and arguments that set the same."""

    preset: dict
    options: dict = {}  # noqa: RUF012
    arguments: dict = {}  # noqa: RUF012


PRESETS = {
    "scale, is_causal": Preset(
        {"scale": 0.3, "is_causal": True},
        options={"scale": 0.3},
        arguments={"is_causal": True},
    ),
    "local_window_size": Preset(
        {"local_window_size": (2, 0)}, options={"local_window_size": (2, 0)}
    ),
    "mask": Preset({"mask": CausalMask()}, arguments={"mask": CausalMask()}),
    "bias, logits_soft_cap": Preset(
        {"bias": X[:, None, :, :T], "logits_soft_cap": 1.0},
        options={"logits_soft_cap": 1.0},
        arguments={"bias": X[:, None, :, :T]},
    ),
    "key_value_seq_lengths": Preset(
        {"key_value_seq_lengths": jnp.array([3, 5])},
        arguments={"lengths": (None, jnp.array([3, 5]))},
    ),
}


@pytest.mark.core
@MAKES
@pytest.mark.parametrize("name", PRESETS)
def test_partial_sets_arguments_that_the_module_does_not(make, name):
    preset, options, arguments = PRESETS[name]
    attention_fn = partial(**preset)
    want = call(make(**options), X, **arguments)

    got = call(make(attention_fn=attention_fn), X)

    assert_close(got, want)
    # They make a difference.
    assert jnp.abs(got - call(make(), X)).max() > 1e-6
    # Both may set the same.
    twice = call(make(**options, attention_fn=attention_fn), X)
    assert_close(twice, want)


FUNCTIONS_WITHOUT_MASK_OBJECTS = {
    "nnx": nnx.dot_product_attention,
    "linen": nn.dot_product_attention,
    "jax": jax.nn.dot_product_attention,
    "a partial of a partial": jax.tree_util.Partial(
        functools.partial(nnx.dot_product_attention, dropout_rate=0.0)
    ),
    "jit": jax.jit(nnx.dot_product_attention, static_argnames="deterministic"),
    "remat": jax.checkpoint(jax.jit(nn.dot_product_attention)),
}


NO_MASK_OBJECT = (
    "mask must be an array for attention_fn=.*dot_product_attention.*, "
    "but got a CausalMask; pass an array, or"
)


@pytest.mark.core
@MAKES
@pytest.mark.parametrize("name", FUNCTIONS_WITHOUT_MASK_OBJECTS)
def test_functions_of_flax_and_jax_refuse_mask_objects(make, name):
    module = make(attention_fn=FUNCTIONS_WITHOUT_MASK_OBJECTS[name])
    combined = CausalMask() & masks.LengthMask(jnp.array([3, 4]))
    refused(NO_MASK_OBJECT, call, module, X, mask=CausalMask())
    # The error names the combination, not its parts.
    refused("but got a And", call, module, X, mask=combined)


@pytest.mark.core
def test_functions_of_flax_refuse_mask_objects_while_decoding():
    """The mask of visible keys would be added to the object."""
    module = nnx_module(attention_fn=nnx.dot_product_attention, decode=True)
    module.init_cache((B, T, D))
    refused(NO_MASK_OBJECT, module, X[:, :1], mask=CausalMask())


@MAKES
def test_partial_of_a_function_of_flax_refuses_its_mask_object(make):
    attention_fn = functools.partial(nnx.dot_product_attention, mask=CausalMask())
    module = make(attention_fn=attention_fn)

    refused("mask must be an array for attention_fn", call, module, X)

    # The mask of the call replaces it.
    got = call(module, X, mask=jnp.ones((T, T), bool))
    assert_close(got, call(make(), X))


def test_functions_of_flax_refuse_mask_objects_with_latents():
    latent = flax_mha.MultiHeadLatentAttention(
        2,
        D,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        decode=False,
        attention_fn=nnx.dot_product_attention,
        rngs=nnx.Rngs(0),
    )
    refused("mask must be an array for attention_fn", latent, X, mask=CausalMask())


@MAKES
def test_functions_of_users_get_mask_objects(make):
    """Even if they copy the name and the module of Flax's function."""

    @functools.wraps(nnx.dot_product_attention)
    def attention(query, key, value, mask=None, **arguments):
        if isinstance(mask, flax_mha.masks.Mask):
            mask = mask.picture(query.shape[-3], key.shape[-3])
        return nnx.dot_product_attention(query, key, value, mask=mask)

    module = make(attention_fn=functools.partial(attention))
    assert_close(call(module, X, mask=CausalMask()), call(make(), X, is_causal=True))


@MAKES
def test_partials_set_arguments_on_a_mesh(make):
    """Around `context_parallel`, and with the sharding that a module with `head_axis`
    would set.
    """
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1, 1), ("context", "model"), axis_types=(auto, auto))
    split = functools.partial(flax_mha.context_parallel("context"), logits_soft_cap=1.0)
    heads = partial(logits_soft_cap=1.0, qkv_sharding=jax.P(None, None, "model"))
    want = call(make(logits_soft_cap=1.0), X)
    with jax.set_mesh(mesh):
        for options in (
            {"attention_fn": split},
            {"attention_fn": heads, "head_axis": "model"},
        ):
            module = make(**options)
            assert_close(call(module, X), want)
            assert module.explain(X).chosen in ("xla", "blockwise")


def test_context_parallel_does_not_decode():
    split = functools.partial(flax_mha.context_parallel("context"), logits_soft_cap=1.0)
    module = nnx_module(attention_fn=split, decode=True)
    module.init_cache((B, T, D))
    refused("decode must be False with context_parallel", module, X)


@pytest.mark.core
def test_explain_of_decoding_depends_on_the_cache_and_leaves_it_alone():
    module = nnx_module(decode=True, dropout_rate=0.5)
    module.init_cache((1, 900, D))
    prompt = jnp.ones((1, 700, D))

    def refuses(name):
        explanation = module.explain(prompt, deterministic=True)
        return any(name in reason for reason in explanation.refusals["cudnn"])

    # A prompt may use any implementation while the cache is empty.
    assert not refuses("ArrayMask")
    assert not refuses("cache in place")
    assert module.explain(prompt, deterministic=False).chosen == "blockwise"
    assert not any(x.any() for x in jax.tree.leaves(nnx.state(module, nnx.Cache)))
    assert module.attention_fn is flax_mha.attention_fn

    # Later calls read keys in the cache.
    module(jnp.ones((1, 20, D)), deterministic=True)
    assert refuses("cache in place")
    assert module.explain(prompt[:, :1], deterministic=False).chosen == "xla"


@pytest.mark.core
def test_explain_of_decoding_in_linen_leaves_the_cache_alone():
    layer = linen_module(decode=True)
    prompt = jnp.ones((1, 700, D))
    variables = layer.init(jax.random.key(0), jnp.ones((1, 900, D)))
    bound = layer.bind(variables)

    assert bound.explain(prompt).chosen == "blockwise"
    assert bound.explain(prompt[:, :1]).chosen == "xla"
    np.testing.assert_array_equal(bound.variables["cache"]["cache_index"], 0)


@pytest.mark.core
def test_explain_of_storing_keys_makes_no_mask():
    module = nnx_module(decode=True)
    lengths = (None, jnp.array([7]))
    explanation = module.explain(X[:1], X[:1], lengths=lengths, store_keys=True)
    assert not any("mask" in reason for reason in explanation.refusals["cudnn"])


LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MODULES = {
    "nnx": functools.partial(nnx_module, qkv_features=N * 16),
    "nnx, latent": lambda **options: flax_mha.MultiHeadLatentAttention(
        N, D, rngs=nnx.Rngs(0), **LATENT | options
    ),
    "linen": functools.partial(linen_module, qkv_features=N * 16),
    "linen, self": functools.partial(linen.SelfAttention, N, qkv_features=N * 16),
}


PLATFORMS = (
    ("cuda", "cudnn"),
    ("tpu", "splash"),
    ("cpu", "blockwise"),
    (None, "blockwise"),
)


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_explain_for_another_platform_names_its_kernel(name):
    x = jnp.ones((1, 1024, D))
    module = MODULES[name](decode=False, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # norms of Flax
        for platform, chosen in PLATFORMS:
            explanation = module.explain(x, is_causal=True, platform=platform)
            assert explanation.chosen == chosen
        refused("platform must be", module.explain, x, platform="rocm")


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("name", ["nnx", "nnx, latent"])
@pytest.mark.parametrize(("platform", "chosen"), PLATFORMS[:2])
def test_explain_of_a_prompt_and_a_step_for_another_platform(
    name, dtype, platform, chosen
):
    module = MODULES[name](decode=True, dtype=jnp.bfloat16)
    module.init_cache((1, 1024, D), dtype)

    with jax.numpy_dtype_promotion("standard"):
        prompt = module.explain(jnp.ones((1, 1024, D)), platform=platform)
        step = module.explain(jnp.ones((1, 1, D)), platform=platform)

    assert prompt.chosen == chosen
    assert step.chosen == "xla"
    assert step.on_cpu is None
    assert "this call runs on cpu" not in str(step)


def of_flax(
    query,
    key,
    value,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
):
    return query


@MAKES
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_functions_like_flax_split_their_heads(make, kind):
    """As in Flax, `qkv_sharding` and `head_axis` are not their arguments."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(axis_type,) * 2)
    seen = []

    @functools.wraps(of_flax)
    def of_flax_seen(query, *arrays, **arguments):
        seen.append(jax.typeof(query).sharding.spec)
        return of_flax(query, *arrays, **arguments)

    want = call(make(attention_fn=of_flax), X)
    options = {"attention_fn": of_flax_seen}
    if kind == "Auto":
        options["head_axis"] = "model"
    with jax.set_mesh(mesh):
        module = make(**options)
        for sharding in (None, jax.P("data", None, None, None)):
            given = {"qkv_sharding": sharding}
            if kind == "Explicit" and make is nnx_module:
                given["out_sharding"] = jax.P()
            assert_close(call(module, X, **given), want)
    if kind == "Explicit":
        assert seen[-1][0] == "data"


def of_arrays(query, key, value, deterministic=True):
    return query


@pytest.mark.core
@MAKES
def test_functions_like_flax_cannot_take_our_options_and_arguments(make):
    module = make(attention_fn=of_flax)
    assert call(module, X).shape == X.shape
    scaled = make(attention_fn=of_flax, scale=1.0)
    refused("scale", call, scaled, X, error=TypeError)
    refused("lengths", call, module, X, lengths=jnp.array([3, 4]), error=TypeError)


@pytest.mark.core
def test_functions_of_arrays_cannot_take_masks_and_dropout_in_linen():
    module = linen_module(attention_fn=of_arrays)
    assert call(module, X).shape == X.shape
    refused("mask", call, module, X, mask=CausalMask(), error=TypeError)
    dropping = linen_module(attention_fn=of_arrays, dropout_rate=0.5)
    refused("dropout", call, dropping, X, deterministic=False, error=TypeError)


@MAKES
def test_wrapper_of_the_attention_function_is_called(make):
    """Also one by `functools.wraps`, which copies the attribute by which modules know
    our function.
    """

    @functools.wraps(flax_mha.attention_fn)
    def doubled(*arrays, **arguments):
        return 2 * flax_mha.attention_fn(*arrays, **arguments)

    got = call(make(use_bias=False, attention_fn=doubled), X, is_causal=True)
    assert_close(got, 2 * call(make(use_bias=False), X, is_causal=True))


@pytest.mark.core
def test_decoding_call_that_raises_leaves_the_cache():
    module = nnx_module(decode=True)
    module.init_cache((B, T, D))
    layer = linen_module(decode=True)
    bound = layer.bind(layer.init(jax.random.key(0), X), mutable=["cache"])
    wrong_mask = jnp.ones((3, 1, 1, T), bool)
    one_index = r"lengths must be None if all sequences share one index.*per_row=True"

    for step in (module, bound):
        with pytest.raises((ValueError, TypeError), match=r"mask|broadcast"):
            step(X[:, :1], mask=wrong_mask)
        refused(one_index, step, X[:, :1], lengths=jnp.array([1, 1]))

    assert module.cache_index[...] == 0
    assert (module.cached_key[...] == 0).all()
    assert bound.variables["cache"]["cache_index"] == 0


ARRAYS_OF_NUMBERS = {
    "jax": lambda x: jnp.linspace(0, x, 2)[1],
    "numpy": lambda x: np.array(x, np.float32),
    "variable": lambda x: nnx.Variable(jnp.float32(x)),
}


def of_module(name, **options):
    module = MODULES[name](decode=False, **options)
    return call(module, X, deterministic=False)


def of_function(function, **options):
    query = X.reshape(B, T, N, -1)
    key = jax.random.key(1)
    return function(query, query, query, dropout_rng=key, **options)


TAKE_NUMBERS = {
    "nnx": functools.partial(of_module, "nnx"),
    "nnx, latent": functools.partial(of_module, "nnx, latent"),
    "linen": functools.partial(of_module, "linen"),
    "function": functools.partial(of_function, flax_mha.dot_product_attention),
}


@pytest.mark.parametrize("kind", ARRAYS_OF_NUMBERS)
@pytest.mark.parametrize("name", TAKE_NUMBERS)
def test_options_may_be_0d_arrays(name, kind):
    to_array = ARRAYS_OF_NUMBERS[kind]
    run = TAKE_NUMBERS[name]
    want = run(dropout_rate=0.25, logits_soft_cap=2.0)
    arrays = {"dropout_rate": to_array(0.25), "logits_soft_cap": to_array(2.0)}

    np.testing.assert_array_equal(run(**arrays), want)
    # As in Flax, also under `jit`, where the arrays are constants.
    jitted = jax.jit(functools.partial(run, **arrays))
    np.testing.assert_allclose(jitted(), want, atol=1e-6)


@pytest.mark.core
@MAKES
def test_module_and_call_override_the_keywords_of_a_partial(make):
    def doubled(score, b, h, q_idx, kv_idx):
        return 2 * score

    def unchanged(score, b, h, q_idx, kv_idx):
        return score

    preset = partial(scale=0.3, mask=CausalMask(), score_mod=doubled)
    mask = LocalMask(3, 1)

    module = make(scale=0.4, attention_fn=preset)
    output = call(module, X, mask=mask, score_mod=unchanged)
    want = call(make(scale=0.4), X, mask=mask)
    np.testing.assert_array_equal(output, want)

    # Without them, the keywords count.
    output = call(make(attention_fn=preset), X)
    want = call(make(scale=0.3), X, mask=CausalMask(), score_mod=doubled)
    np.testing.assert_array_equal(output, want)


# What is refused with Flax: `flax_cases.py`.
NUMBERS = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
IDS = jnp.ones((B, T), int)
REFUSED = []


def refuses_option(message, **options):
    REFUSED.append((message, options, {}))


def refuses(message, **arguments):
    REFUSED.append((message, {}, arguments))


refuses_option("num_heads must be an int, but got 4.0", num_heads=4.0)
refuses_option("dropout_rate must be a concrete number in", dropout_rate=np.zeros(1))
refuses_option("local_window_size must be an int", local_window_size=(jnp.int32(3), 0))
refuses(
    "mask must be bool, or contain only 0 and 1.*-1000000000.0; pass it as bias=",
    mask=NUMBERS,
)
# No bias: integers, and NaN, would not mask either.
refuses(r"but got int32 containing 2\.", mask=jnp.full((1, 1, T, T), 2))
refuses(r"but got float32 containing nan\.", mask=jnp.full((1, 1, T, T), jnp.nan))
refuses(
    r"mask must be a boolean array or a mask object .*call it: CausalMask\(\)",
    mask=CausalMask,
)
refuses(r"got shape \(2, 9\); use bias\[:, None, None, :\]", bias=jnp.ones((B, T)))
refuses("^lengths must be at least 0, but got -1", lengths=jnp.array([3, -1]))
refuses(
    r"lengths must be a pair \(queries, keys\).*\(None, lengths\)",
    lengths=jnp.array([3, 4]),
    inputs_k=Y,
)
refuses(
    "lengths must be one array or a pair .* but got 3 arrays",
    lengths=(jnp.ones(B, int),) * 3,
)
refuses(
    "^segment_ids must have an integer dtype, but got float32",
    segment_ids=jnp.ones((B, T)),
)
refuses(
    r"^segment_ids of keys must have shape \[batch..., 9\]",
    segment_ids=(IDS, IDS[:, :4]),
)


@pytest.mark.core
@pytest.mark.parametrize(("message", "options", "arguments"), REFUSED)
@MAKES
def test_wrong_options_and_arguments_raise_errors(message, options, arguments, make):
    refused(message, lambda: call(make(**options), X, **arguments))


# Attributes that are set after construction -------------------------------------------

WRONG = {
    "dropout_rate": 2.0,
    "implementation": "fast",
    "scale": "big",
    "local_window_size": (-3, 0),
    "logits_soft_cap": 0.0,
    "rope": 10_000.0,
    "head_axis": 1,
    "reuse_kv": 1,
}


@pytest.mark.core
@pytest.mark.parametrize("attribute", WRONG)
@pytest.mark.parametrize("name", ["nnx", "nnx, latent"])
def test_wrong_attributes_raise_the_errors_of_the_constructor(name, attribute):
    if name == "nnx, latent" and attribute == "reuse_kv":
        pytest.skip("no argument of this module")
    wrong = {attribute: WRONG[attribute]}
    with pytest.raises(ValueError, match=attribute) as of_constructor:
        MODULES[name](**wrong)
    module = MODULES[name](decode=False)
    setattr(module, attribute, WRONG[attribute])
    # Before any draw from the stream of keys.
    rngs = nnx.Rngs(dropout=0)
    with pytest.raises(ValueError, match=attribute) as of_call:
        module(X, deterministic=False, rngs=rngs)

    assert str(of_call.value) == str(of_constructor.value)
    assert rngs.dropout.count[...] == 0


def only_first(query, key, value, **_):
    """An attention function in which all queries attend to the first key."""
    return jnp.broadcast_to(value[..., :1, :, :], query.shape)


NEW_ATTRIBUTES = {
    "attention_fn": only_first,
    "broadcast_dropout": True,
    "decode": True,
    "deterministic": True,
    "dropout_rate": 0.5,
    "local_window_size": (2, 0),
    "logits_soft_cap": 0.5,
    "process_heads": lambda query, key, value: (query, key, 2 * value),
    "rope": flax_mha.RoPE(),
    "scale": 3.0,
    "score_mod": lambda score, b, h, q_idx, kv_idx: score * (h + 1).astype(score.dtype),
}
ONLY_MULTI_HEAD = {"attention_fn", "process_heads", "score_mod"}


@pytest.mark.parametrize("attribute", NEW_ATTRIBUTES)
@pytest.mark.parametrize("name", ["nnx", "nnx, latent"])
def test_attributes_may_be_set_after_construction(name, attribute):
    if name == "nnx, latent" and attribute in ONLY_MULTI_HEAD:
        pytest.skip("no argument of this module, or no sizes for this function")
    new = {attribute: NEW_ATTRIBUTES[attribute]}
    options = {"decode": False, "deterministic": False, "dropout_rate": 0.25}

    def output(module):
        if module.decode:
            module.init_cache(X.shape)
        return module(X, rngs=nnx.Rngs(dropout=0))

    module = MODULES[name](**options)
    before = output(module)
    setattr(module, attribute, NEW_ATTRIBUTES[attribute])
    after = output(module)

    assert_close(after, output(MODULES[name](**options | new)))
    assert not np.allclose(after, before, atol=1e-4)


def test_the_implementation_may_be_set_after_construction():
    module = nnx_module(implementation="xla")
    module.implementation = "blockwise"
    assert module.explain(X).chosen == "blockwise"


def test_sizes_of_modules_may_be_read():
    module = nnx_module(num_kv_heads=K)
    sizes = (module.num_heads, module.num_kv_heads, module.head_dim, module.value_dim)
    assert sizes == (N, K, D // N, D // N)
    # Flax's users read what they have passed, or what follows from it.
    assert module.qkv_features == D
    assert module.in_features == D
    assert module.out_features == D


def test_fewer_heads_may_be_set_after_construction():
    """As when heads are pruned: the kernels decide."""
    module = nnx_module(use_bias=False)
    for layer in (module.query, module.key, module.value):
        layer.kernel = nnx.Param(layer.kernel[:, :3])
    module.out.kernel = nnx.Param(module.out.kernel[:3])
    module.num_heads = module.num_kv_heads = 3

    assert module(X).shape == X.shape


@pytest.mark.core
@pytest.mark.parametrize("size", [0, "8"])
def test_modules_of_nnx_need_features(size):
    latent = functools.partial(
        flax_mha.MultiHeadLatentAttention, N, rngs=nnx.Rngs(0), **LATENT
    )
    message = f"must be an int >= 1, but got {size!r}"
    for name in ("in_features", "in_kv_features", "out_features"):
        refused(f"{name} {message}", nnx_module, **{name: size})
    refused(f"in_features {message}", latent, size)
    refused(f"out_features {message}", latent, D, out_features=size)


@pytest.mark.core
@pytest.mark.parametrize("name", ["inputs_q", "inputs_k", "inputs_v"])
def test_modules_of_linen_need_features(name):
    inputs = {"inputs_q": X, "inputs_k": X, "inputs_v": X} | {name: X[..., :0]}
    message = f"{name} must have at least one feature.* got shape \\(2, 9, 0\\)"
    refused(message, call, linen_module(qkv_features=D), **inputs)


@pytest.mark.core
def test_remat_traces_flags_but_not_mask_objects():
    module = nn.remat(linen.MultiHeadDotProductAttention)(N)
    message = (
        "is_causal must be a concrete True or False, .*got a traced value; "
        r"pass mask=flax_mha.CausalMask\(\) instead.* nn.remat"
    )
    refused(message, call, module, X, is_causal=True)

    want = call(linen_module(), X, is_causal=True)
    got = call(module, X, mask=CausalMask())
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.core
@MAKES
def test_errors_of_misspelled_arguments_name_the_call_or_the_function(make):
    # Of modules the call, of partials the function that they call.
    unexpected = r"\(\) got an unexpected keyword argument "
    refused(f"__call__{unexpected}'maks'", call, make(), X, maks=None, error=TypeError)

    module = make(attention_fn=partial(scal=0.3))
    refused(f"attention_fn{unexpected}'scal'", call, module, X, error=TypeError)


@pytest.mark.core
def test_key_of_jax_random_is_no_rngs():
    key = jax.random.key(0)
    message = (
        r"rngs must be nnx.Rngs, but got PRNGKeyArray; pass a key as nnx.Rngs\(key\)"
    )
    refused(message, nnx_module, rngs=key)

    module = nnx_module(dropout_rate=0.5, deterministic=False)
    message = r"rngs must be nnx.Rngs or nnx.RngStream, but got PRNGKeyArray"
    refused(message, module, X, rngs=key)


@pytest.mark.core
def test_other_names_than_those_of_the_package_raise_errors():
    message = "module 'flax_mha' has no attribute 'linnen'"
    with pytest.raises(AttributeError, match=message):
        flax_mha.linnen  # noqa: B018


@pytest.mark.core
def test_dir_lists_only_public_names():
    names = dir(flax_mha)
    modules = {name for name in names if inspect.ismodule(getattr(flax_mha, name))}
    assert modules == {
        "cache",
        "convert",
        "linen",
        "masks",
        "nnx",
        "plot",
        "recipes",
        "rope",
    }
    assert set(names) == {*flax_mha.__all__, *modules, "__version__"}


@pytest.mark.core
def test_star_import_leaves_the_modules_of_flax_alone():
    names = {}
    exec("from flax import linen, nnx\nfrom flax_mha import *", names)
    assert names.pop("nnx") is nnx
    assert names.pop("linen") is nn
    public = {name for name in dir(flax_mha) if callable(getattr(flax_mha, name))}
    assert names.keys() - {"__builtins__"} == public


def parameters(function):
    """The parameters that `help` and editors show, without `*args` or `**kwargs`."""
    found = inspect.signature(function).parameters
    for parameter in found.values():
        assert parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
    return found


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_help_and_editors_show_the_signature_of_a_module(name):
    """An instance is shown with its call; `explain` has the signature of the call, and
    a platform.
    """
    layer = MODULES[name]()
    argument = "kv_lora_rank" if "latent" in name else "num_kv_heads"
    kind = type(layer)
    assert argument in parameters(kind)
    assert "self" not in parameters(kind)
    head = pydoc.render_doc(kind, renderer=pydoc.plaintext).partition("\n |  \n")[0]
    assert f"{argument}:" in head
    for function in (layer, layer.explain, kind.__call__, kind.explain):
        assert {"inputs_q", "score_mod"} <= parameters(function).keys()
    explained = dict(parameters(layer.explain))
    assert explained.pop("platform").default is None
    assert explained == parameters(kind.__call__.__get__(layer))
    assert "platform" in parameters(kind.explain)


@pytest.mark.core
def test_signature_of_a_subclass_is_its_own():
    class Wider(flax_mha.MultiHeadAttention):
        def __init__(self, width: int, rngs: nnx.Rngs):
            super().__init__(2, width, decode=False, rngs=rngs)

    assert list(parameters(Wider)) == ["width", "rngs"]
    assert Wider(8, nnx.Rngs(0)).in_features == 8


@pytest.mark.core
@pytest.mark.parametrize(
    "function",
    [
        flax_mha.attention_fn,
        flax_mha.cache.cached_attention,
        flax_mha.context_parallel,
        flax_mha.context_parallel("x"),
        flax_mha.dot_product_attention,
        flax_mha.explain_implementation,
    ],
)
def test_help_and_editors_show_the_signature_of_a_function(function):
    assert len(parameters(function)) > 5
    assert "arguments" not in parameters(function)


@pytest.mark.core
@pytest.mark.parametrize(
    "kind",
    [
        flax_mha.MultiHeadAttention,
        flax_mha.MultiHeadLatentAttention,
        linen.MultiHeadDotProductAttention,
    ],
)
def test_every_argument_of_a_constructor_is_described(kind):
    # In the docstring of the class, or in a docstring to which it refers.
    texts = kind.__doc__ + flax_mha.MultiHeadAttention.__doc__
    described = set()
    for names in re.findall(r"^(?:    )?  (\w+(?:, \w+)*): ", texts, re.M):
        described.update(names.split(", "))
    # Every linen module has these.
    undescribed = {"parent", "name"} if issubclass(kind, nn.Module) else set()
    assert parameters(kind).keys() - described == undescribed


def test_attention_fn_takes_every_argument_of_flax():
    ours = inspect.signature(flax_mha.attention_fn).parameters
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= set(ours)


def test_einsum_dot_general_computes_both_products():
    query = jnp.asarray(rng.standard_normal((B, T, N, 4)), jnp.float32)
    # The scores, and the sum over values.
    calls = []

    def counted(*arguments, **keywords):
        calls.append(1)
        return jax.lax.dot_general(*arguments, **keywords)

    got = flax_mha.attention_fn(query, query, query, einsum_dot_general=counted)

    assert len(calls) == 2
    want = flax_mha.attention_fn(query, query, query)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("tokens", [1, 3])
def test_projections_in_bfloat16_are_rounded_float32_sums(tokens, monkeypatch):
    # Where a CPU multiplies bfloat16.
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    x = jnp.asarray(rng.standard_normal((2, 31, tokens)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((N, 31, 8)), jnp.bfloat16)
    exact = (np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    expected = np.einsum("bdt,ndh->bthn", *exact)
    kernel = jnp.transpose(kernel, (1, 2, 0))

    def project(x, **options):
        last = ((x.T.ndim - 1,), (0,))
        return dot_general(x.T, kernel, (last, ((), ())), **options)

    def assert_rounded(got, expected):
        assert got.dtype == jnp.bfloat16
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-5)

    # Also of a single row and of transposed arrays.
    assert_rounded(jnp.stack([jax.jit(project)(own) for own in x]), expected)
    assert_rounded(jax.jit(jax.vmap(project))(x), expected)
    # A vector is no row.
    vector = x[0, :, 0]
    assert_rounded(project(vector), expected[0, 0])
    # A product into float32 is not rounded to bfloat16.
    wide = project(vector, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected[0, 0], rtol=0, atol=1e-5)


class Halved(nnx.Module):
    """Halves values, or scores, by a parameter."""

    def __init__(self, rngs=None):
        self.weight = nnx.Param(jnp.array(0.5))

    def __call__(self, query, key, value):
        return query, key, value * self.weight

    def score(self, score, b, h, q_idx, kv_idx):
        return score * self.weight

    def attend(self, *arrays, **arguments):
        return flax_mha.attention_fn(*arrays, **arguments) * self.weight


class Unlearned(nnx.Module):
    def __call__(self, query, key, value):
        return query, key, value / 2


HALVED = Halved()
BIAS = recipes.RelativeBias(N)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "arguments", "name"),
    [
        ({"process_heads": HALVED}, {}, "process_heads"),
        ({"process_heads": functools.partial(HALVED)}, {}, "process_heads"),
        ({}, {"process_heads": HALVED.__call__}, "process_heads"),
        ({}, {"score_mod": HALVED.score}, "score_mod"),
        ({}, {"score_mod": BIAS}, "score_mod"),
        ({"attention_fn": HALVED.attend}, {}, "attention_fn"),
        ({"attention_fn": partial(score_mod=BIAS)}, {}, "attention_fn"),
    ],
)
def test_modules_of_nnx_are_refused_in_linen(options, arguments, name):
    module = linen_module(**options)
    message = f"{name} must not be a module of flax.nnx .* not train its parameters; "
    refused(message, call, module, X, **arguments)


def test_modules_of_nnx_that_linen_can_use():
    """Without parameters; and converted, in a linen module, which trains them."""
    without = linen_module(process_heads=Unlearned(), use_bias=False)
    plain = linen_module(use_bias=False)
    assert_close(call(without, X), call(plain, X) / 2)

    converted = nnx.bridge.to_linen(Halved)
    module = linen_module(process_heads=converted, use_bias=False)
    params = module.init(jax.random.key(0), X)["params"]
    gradient = jax.grad(lambda p: jnp.sum(module.apply({"params": p}, X)))(params)
    assert abs(gradient["process_heads"]["weight"]) > 1e-3


class Scaled(nn.Module):
    """The same in linen."""

    @nn.compact
    def __call__(self, query, key, value):
        return query, key, value * self.param("weight", nn.initializers.ones, ())


def test_bound_modules_of_linen_are_refused_in_nnx():
    bound = Scaled().bind({"params": {"weight": jnp.ones(())}})
    for function in (bound, bound.__call__):
        message = "process_heads must be the nnx.Module itself, .* nnx.bridge.ToNNX"
        refused(message, nnx_module, process_heads=function)
    heads = jnp.ones((B, T, N, D // N))
    converted = nnx.bridge.ToNNX(Scaled(), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(converted, heads, heads, heads)
    module = nnx_module(process_heads=converted)

    gradient = nnx.grad(lambda module: jnp.sum(module(X)))(module)

    assert abs(gradient["process_heads"]["weight"][...]) > 1e-3
