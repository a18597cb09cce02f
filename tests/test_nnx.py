"""flax_mha.MultiHeadAttention in the place of flax.nnx.MultiHeadAttention."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import (
    ADDED,
    BATCH,
    CASES,
    DECODING_ADDED,
    FEATURES,
    GROUPED,
    HEADS,
    IMPLEMENTATIONS,
    KEYS,
    MASKS,
    QUERIES,
    REFUSED_CALLS,
    REFUSED_OPTIONS,
    Case,
    assert_close,
    assert_grads_close,
    assert_no_worse,
    assert_same,
    assert_same_arguments,
    cut,
    each,
    flax_rules,
    normal,
    recording,
    scaled,
    trained,
    visible,
)

import flax_mha

OURS, FLAX = flax_mha.MultiHeadAttention, nnx.MultiHeadAttention
CASES = CASES | {
    "causal, fewer queries": Case(features=(FEATURES,) * 2, arguments={"is_causal": True}),
    "causal with mask": Case(arguments={"is_causal": True, "mask": visible(BATCH, HEADS, QUERIES, QUERIES)}),
    "one key head": Case({"num_kv_heads": 1}),
    "groups": Case(GROUPED, features=(FEATURES,) * 2, arguments={"mask": visible(BATCH, 1, QUERIES, KEYS)}),
    "key features": Case({"in_kv_features": 13}, features=(FEATURES, 13)),
}
SOME = ("two batch axes", "causal with mask", "groups")


def make(cls, **options):
    """A module from seed 0."""
    given = {"num_heads": HEADS, "in_features": FEATURES, "decode": False, "rngs": nnx.Rngs(0, dropout=1)}
    return cls(**given | options)


def make_quickly(cls, **options):
    """A module whose weights and biases do not depend on a seed."""
    return make(cls, **{"kernel_init": scaled, "bias_init": scaled} | options)


def params(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def make_both(**options):
    """Ours and Flax's, with weights that ours loads from a checkpoint of Flax's."""
    flax = make_quickly(FLAX, **options)
    ours = make(OURS, kernel_init=nnx.initializers.zeros, **options)
    nnx.update(ours, params(flax))
    return ours, flax


def assert_same_outputs(ours, flax, *inputs, **arguments):
    got = ours(*inputs, **arguments)
    with flax_rules():
        assert_close(got, flax(*inputs, **arguments))


# The constructor and the call ------------------------------------------------------------------------------------


def identity_dtype(arrays, *, dtype=None):
    return arrays


CONSTRUCTOR = {
    "num_heads": 5,
    "qkv_features": 21,
    "out_features": 13,
    "num_kv_heads": 1,
    "in_kv_features": FEATURES,
    "dtype": jnp.float32,
    "param_dtype": jnp.float16,
    "dropout_rate": 0.5,
    "deterministic": True,
    "precision": "highest",
    "kernel_init": nnx.initializers.ones_init(),
    "out_kernel_init": nnx.initializers.ones_init(),
    "bias_init": nnx.initializers.ones_init(),
    "out_bias_init": nnx.initializers.ones_init(),
    "use_bias": False,
    "attention_fn": nnx.dot_product_attention,
    "decode": False,
    "normalize_qk": True,
    "qkv_promote_dtype": identity_dtype,
    "out_promote_dtype": identity_dtype,
    "ln_promote_dtype": identity_dtype,
    "qkv_dot_general": jax.lax.dot_general,
    "out_dot_general": jax.lax.dot_general,
    "qkv_dot_general_cls": lambda: jax.lax.dot_general,
    "out_dot_general_cls": lambda: jax.lax.dot_general,
    "keep_rngs": False,
    **{
        f"{name}_metadata": {"tag": name}
        for name in ("kernel", "out_kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")
    },
}


def parameters_of(function):
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("name", parameters_of(FLAX.__init__))
def test_constructor_takes_what_flax_takes(name):
    options = {"deterministic": True, "kernel_init": scaled, "bias_init": scaled}
    if name.startswith(("query_ln", "key_ln", "ln_")):
        options["normalize_qk"] = True
    default = parameters_of(FLAX.__init__)[name].default
    if name in CONSTRUCTOR or default is not inspect.Parameter.empty:
        options[name] = CONSTRUCTOR.get(name, default)
    with flax_rules():  # for float16 parameters next to float32 inputs
        ours, flax = make(OURS, **options), make(FLAX, **options)
        assert_same(nnx.state(ours), nnx.state(flax))
        x = normal(0, BATCH, QUERIES, FEATURES)
        assert_close(ours(x), flax(x))
    absent = object()
    if name not in ("attention_fn", "broadcast_dropout", "rngs"):
        assert getattr(ours, name, absent) == getattr(flax, name, absent)


@pytest.mark.core
def test_positional_parameters_have_flax_order():
    for function in ("__init__", "__call__"):
        ours, flax = (
            [name for name, p in parameters_of(getattr(cls, function)).items() if p.kind == p.POSITIONAL_OR_KEYWORD]
            for cls in (OURS, FLAX)
        )
        assert ours == flax


@pytest.mark.core
def test_defaults_are_those_of_flax():
    ours, flax = parameters_of(OURS.__init__), parameters_of(FLAX.__init__)
    differ = {name for name in ours.keys() & flax.keys() if ours[name].default != flax[name].default}
    assert differ == {"attention_fn", "broadcast_dropout"}
    assert not make(OURS).broadcast_dropout
    assert make(OURS, broadcast_dropout=True).broadcast_dropout


CALL = {
    "inputs_q": normal(0, BATCH, QUERIES, FEATURES),
    "inputs_k": normal(1, BATCH, KEYS, FEATURES),
    "mask": visible(BATCH, 1, QUERIES, KEYS),
    "deterministic": True,
    "rngs": nnx.Rngs(2),
    "sow_weights": False,
    "decode": False,
    "is_causal": True,
}


@pytest.mark.parametrize("name", parameters_of(FLAX.__call__))
def test_call_takes_what_flax_takes(name):
    """Everything that Flax names, where no value stands above at its default."""
    default = parameters_of(FLAX.__call__)[name].default
    needed = ["inputs_q", "inputs_k"] if name in ("inputs_v", "mask") else ["inputs_q"]
    arguments = {**{other: CALL[other] for other in needed}, name: CALL.get(name, default)}
    if name == "inputs_v":
        arguments[name] = normal(2, BATCH, KEYS, FEATURES)
    assert_same_outputs(*make_both(), **arguments)


# Parameters, checkpoints and outputs --------------------------------------------------------------------------------


def value_and_grad(module, inputs, arguments, cotangent):
    """The output, and the gradients of the weights and of the inputs."""

    def loss(module, *inputs):
        result = module(*inputs, **arguments)
        return jnp.sum(result * cotangent), result

    grad = nnx.jit(nnx.grad(loss, argnums=tuple(range(len(inputs) + 1)), has_aux=True))
    (weights, *arrays), result = grad(module, *inputs)
    return result, nnx.to_pure_dict(weights), arrays


@each(CASES, "self", "without bias", "normalized", "groups", core=["normalized", "groups"])
def test_same_parameters_from_the_same_seed(case):
    assert_same(*(nnx.state(make(cls, **case.options)) for cls in (OURS, FLAX)))


@each(CASES, core=["self", "padding", "sizes", "normalized", "causal with mask", "groups"])
def test_checkpoints_load_and_give_the_same_outputs(case):
    assert_same_outputs(*make_both(**case.options), *case.inputs(), **case.arguments)


@each(CASES, "normalized", *SOME, core=["groups"])
def test_same_gradients(case):
    ours, flax = make_both(**case.options)
    inputs = case.inputs()
    cotangent = normal(5, *case.batch, QUERIES, case.options.get("out_features", FEATURES))
    result, weights, arrays = value_and_grad(ours, inputs, case.arguments, cotangent)
    with flax_rules():
        expected, expected_weights, expected_arrays = value_and_grad(flax, inputs, case.arguments, cotangent)
    assert_close(result, expected)
    assert_grads_close(weights, expected_weights)
    assert_close(arrays, expected_arrays)


@pytest.mark.parametrize(
    ("dtype", "options", "arguments"),
    [
        (jnp.float16, {}, {}),
        (jnp.bfloat16, {"normalize_qk": True}, {"is_causal": True}),
        (jnp.bfloat16, GROUPED, {"mask": visible(1, QUERIES, QUERIES)}),
    ],
)
def test_half_precision_is_no_worse(dtype, options, arguments):
    _, exact = make_both(**options)
    ours, flax = make_both(**options, dtype=dtype)
    x = normal(0, BATCH, QUERIES, FEATURES)
    with flax_rules() if "normalize_qk" in options else contextlib.nullcontext():  # Flax's LayerNorm promotes
        got = nnx.jit(lambda module, x: module(x, **arguments))(ours, x)
    with flax_rules():
        assert_no_worse(got, flax(x, **arguments), exact(x, **arguments))


def test_half_precision_inputs():
    """Without a dtype the inputs and the weights decide, as in Flax."""
    options = {"param_dtype": jnp.bfloat16}
    ours, flax = (make_quickly(cls, **options) for cls in (OURS, FLAX))
    x = normal(0, BATCH, QUERIES, FEATURES)
    got = ours(x.astype(jnp.bfloat16))
    exact = make_quickly(OURS)
    nnx.update(exact, jax.tree.map(lambda w: w.astype(jnp.float32), params(flax)))
    with flax_rules():
        assert_no_worse(got, flax(x.astype(jnp.bfloat16)), exact(x.astype(jnp.bfloat16).astype(jnp.float32)))


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({}, {"mask": visible(BATCH, 1, QUERIES, QUERIES)}),
        ({}, {"is_causal": True}),
        ({"num_kv_heads": 1}, {}),
    ],
    ids=["plain", "mask", "causal", "one key head"],
)
def test_complex_inputs_work_as_in_flax(options, arguments):
    """As on Flax's way with dropout: its other way, jax.nn's, leaves out the imaginary part of the scores."""
    inputs = jax.lax.complex(normal(0, BATCH, QUERIES, FEATURES), normal(3, BATCH, QUERIES, FEATURES))
    ours, flax = make_both(**options, dropout_rate=0.5, deterministic=True)
    with flax_rules():
        assert_close(ours(inputs, **arguments), flax(inputs, **arguments))


# What is sown --------------------------------------------------------------------------------------------------------


def capture(module, *inputs, **arguments):
    result, sown = nnx.capture(module, nnx.Intermediate)(*inputs, **arguments, sow_weights=True)
    return result, nnx.to_pure_dict(sown)


@each(CASES, "no batch", *SOME, core=["groups"])
def test_sown_weights_are_those_of_flax(case):
    ours, flax = make_both(**case.options)
    inputs = case.inputs()
    result, sown = capture(ours, *inputs, **case.arguments)
    with flax_rules():
        expected, expected_sown = capture(flax, *inputs, **case.arguments)
    assert_close(sown, expected_sown)
    assert_close(result, expected)


def test_sown_largest_scores():
    """Those of the heads, in float32 whatever the dtype; the output, its gradient and `explain` know of them."""
    module, x = make_quickly(OURS, dtype=jnp.bfloat16), normal(0, BATCH, QUERIES, FEATURES)
    query, key, value = module.query(x), module.key(x), module.value(x)
    with jax.numpy_dtype_promotion("standard"):
        _, expected = flax_mha.dot_product_attention(query, key, value, is_causal=True, return_max_score=True)

    @functools.partial(nnx.jit, static_argnums=2)
    def run(module, x, sows):
        def loss(module, x):
            output, sown = nnx.capture(module, nnx.Intermediate)(x, is_causal=True, sow_max_score=sows)
            return jnp.sin(output.astype(jnp.float32)).sum(), nnx.to_pure_dict(sown)

        return nnx.value_and_grad(loss, argnums=1, has_aux=True)(module, x)

    (value, sown), gradient = run(module, x, True)
    [max_score] = sown["attention_max_score"]
    assert max_score.dtype == jnp.float32
    np.testing.assert_allclose(max_score, expected, rtol=1e-2)
    (plain, nothing), plain_gradient = run(module, x, False)
    assert nothing == {}
    assert_close((value, gradient), (plain, plain_gradient))
    assert "return_max_score" in module.explain(x, sow_max_score=True).refusals["cudnn"][0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sown_weights_have_the_dtype_of_the_module(dtype):
    _, sown = capture(make_quickly(OURS, dtype=dtype), normal(0, BATCH, QUERIES, FEATURES))
    assert {weights.dtype for weights in jax.tree.leaves(sown)} == {jnp.dtype(dtype)}


def test_sown_weights_come_before_dropout():
    x = normal(0, BATCH, QUERIES, FEATURES)
    module = make_quickly(OURS, dropout_rate=0.5)
    _, dropping = capture(module, x, deterministic=False)
    _, keeping = capture(module, x, deterministic=True)
    assert_same(dropping, keeping)


def test_sown_weights_of_a_query_without_keys_are_zero():
    mask = visible(BATCH, 1, QUERIES, QUERIES)
    mask[1, :, 3] = False
    module = make_quickly(OURS, bias_init=nnx.initializers.ones_init())
    result, sown = capture(module, normal(0, BATCH, QUERIES, FEATURES), mask=mask)
    (weights,) = sown["attention_weights"]
    sums = np.ones((BATCH, HEADS, QUERIES))
    sums[1, :, 3] = 0
    # Rounding of a sum of QUERIES weights of at most 1.
    np.testing.assert_allclose(weights.sum(-1), sums, rtol=0, atol=QUERIES * np.finfo(np.float32).eps)
    np.testing.assert_array_equal(result[1, 3], module.out.bias[...])


@pytest.mark.core
def test_sown_weights_of_a_row_that_is_nan_are_nan():
    inputs = np.array(normal(0, BATCH, QUERIES, FEATURES))
    inputs[1, 3, 0] = np.nan
    mask = visible(BATCH, 1, QUERIES, QUERIES) | True
    mask[..., 3] = False
    mask[1, :, 3, 3] = True
    result, sown = capture(make_quickly(OURS), jnp.asarray(inputs), mask=mask)
    (weights,) = sown["attention_weights"]
    assert np.isnan(result[1, 3]).all()
    assert np.isnan(weights[1, :, 3]).all()
    assert np.isnan(weights).sum() == HEADS * QUERIES


# Decoding ------------------------------------------------------------------------------------------------------------


@nnx.jit
def jitted_step(module, x, arguments):
    return module(x, **arguments)


def eager_step(module, x, arguments):
    return module(x, **arguments)


def decode(module, x, step=eager_step, **by_query):
    """One token a call."""
    x, outputs = np.asarray(x), []
    for t in range(x.shape[-2]):
        outputs.append(step(module, jnp.asarray(x[..., t : t + 1, :]), cut(by_query, t)))
    return np.concatenate(outputs, axis=-2)


DECODING = {
    "no batch": Case(batch=()),
    "groups": Case(GROUPED),
    "normalized": Case({"normalize_qk": True}),
    "mask": Case(arguments={"mask": visible(BATCH, HEADS, QUERIES, QUERIES)}),
}
OUR_DECODING = {
    "two batch axes": Case(batch=(2, 3)),
    "bias": Case(arguments={"bias": np.asarray(normal(7, HEADS, QUERIES, QUERIES))}),
    "window with groups": Case({"local_window_size": (3, None), **GROUPED}),
    "window with mask": Case({"local_window_size": 2}, arguments={"mask": visible(BATCH, 1, 1, QUERIES)}),
    "blockwise": Case({"implementation": "blockwise", "local_window_size": (1, 0)}),
}


@each(OUR_DECODING, core=["window with groups"])
def test_decoding_equals_the_whole_forward(case):
    (x,) = case.inputs()
    module = make_quickly(OURS, **case.options)
    expected = module(x, is_causal=True, **case.arguments)
    module.decode = True
    module.init_cache(x.shape)
    assert_close(decode(module, x, jitted_step, **case.arguments), expected)
    assert module.cache_index[...] == QUERIES


@each(DECODING_ADDED, core=["everything"])
def test_decoding_with_what_flax_lacks(case):
    """By "blockwise"; test_linen.py has "xla"."""
    (x,) = case.inputs()
    module = make_quickly(OURS, **case.options)
    nnx.update(module, trained(params(module)))
    expected = module(x, is_causal=True, **case.arguments)
    module.implementation, module.decode = "blockwise", True
    module.init_cache(x.shape)
    assert_close(decode(module, x, jitted_step, **case.arguments), expected)


@each(DECODING, core=["groups", "mask"])
def test_decoding_equals_that_of_flax(case):
    (x,) = case.inputs()
    modules = make_both(**case.options, decode=True)
    for module in modules:
        module.init_cache(x.shape)
    ours, flax = modules
    assert_same(nnx.state(ours, nnx.Cache), nnx.state(flax, nnx.Cache))
    got = decode(ours, x, jitted_step, **case.arguments)
    with flax_rules():
        expected = decode(flax, x, jitted_step, **case.arguments)
    assert_close(got, expected)
    assert_same(*(nnx.state(module, nnx.Cache) for module in modules))


def test_decoding_is_causal_with_or_without_the_flag():
    """Its single query is no first query: older Flax showed it key 0 alone."""
    x = normal(0, BATCH, QUERIES, FEATURES)
    results = []
    for step in map(nnx.jit, (lambda module, x: module(x), lambda module, x: module(x, is_causal=True))):
        module = make_quickly(OURS, decode=True)
        module.init_cache(x.shape)
        results.append(decode(module, x, lambda module, x, _, step=step: step(module, x)))
    assert_same(*results)
    assert_close(results[0], make_quickly(OURS)(x, is_causal=True))


def test_decode_of_the_call_comes_first():
    x = normal(0, BATCH, 1, FEATURES)
    module = make_quickly(OURS, decode=True)
    with pytest.raises(
        ValueError,
        match=r"cache not initialized, call ``init_cache`` first: layer.init_cache\(\(\*batch, max_length,",
    ):
        module(x)
    assert_same(module(x, decode=False), make_quickly(OURS)(x))
    module = make_quickly(OURS)
    module.init_cache(x.shape)
    module(x, decode=True)
    assert module.cache_index[...] == 1
    with pytest.raises(ValueError, match="No `decode` argument was provided"):
        make_quickly(OURS, decode=None)(x)


def full_cache():
    module = make_quickly(OURS, decode=True)
    module.init_cache((BATCH, 3, FEATURES))
    decode(module, normal(0, BATCH, 3, FEATURES))
    return module, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Cache)))


@pytest.mark.core
def test_decoding_past_the_end_raises():
    module, before = full_cache()
    with pytest.raises(ValueError, match=r"the cache is full: all 3 slots are in use"):
        module(normal(1, BATCH, 1, FEATURES))
    assert_same(nnx.to_pure_dict(nnx.state(module, nnx.Cache)), before)


@pytest.mark.core
def test_decoding_past_the_end_under_jit_answers_nan():
    module, before = full_cache()
    for _ in range(2):
        result = jitted_step(module, normal(1, BATCH, 1, FEATURES), {})
        assert result.shape == (BATCH, 1, FEATURES)
        assert np.isnan(result).all()
        assert_same(nnx.to_pure_dict(nnx.state(module, nnx.Cache)), before)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ({}, None, jnp.float32),
        ({"dtype": jnp.bfloat16}, None, jnp.bfloat16),
        ({"param_dtype": jnp.float16}, None, jnp.float16),
        ({"dtype": jnp.bfloat16, "param_dtype": jnp.float16}, None, jnp.bfloat16),
        ({"dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
    ],
)
def test_cache_has_the_dtype_of_the_computation(options, given, expected):
    module = make_quickly(OURS, **options)
    module.init_cache((BATCH, KEYS, FEATURES), given)
    assert module.cached_key.dtype == module.cached_value.dtype == expected
    assert module.cache_index.dtype == jnp.int32
    module = make_quickly(OURS, **options)
    module.set_view(decode=True, batch_size=BATCH, max_length=KEYS)
    assert module.cached_key.dtype == (expected if given is None else options["dtype"])


def test_cache_may_be_narrower_than_the_computation():
    x = normal(0, BATCH, QUERIES, FEATURES)
    module = make_quickly(OURS)
    expected = module(x, is_causal=True)
    module.init_cache(x.shape, jnp.bfloat16)
    with flax_rules():  # Flax's promote_dtype promotes the keys and values
        got = decode(module, x, lambda module, x, arguments: module(x, decode=True))
    assert got.dtype == jnp.float32
    assert module.cached_key.dtype == jnp.bfloat16
    # A key or value that is off by 2**-9 of itself moves scores and outputs by a few times that.
    np.testing.assert_allclose(got, expected, rtol=0, atol=8 * 2**-9 * np.abs(expected).max())


@pytest.mark.core
def test_view_makes_a_cache():
    module = make_quickly(OURS, num_kv_heads=1, dtype=jnp.float32, decode=None)
    view = nnx.view(module, decode=True, batch_size=BATCH, max_length=QUERIES)
    assert view.cached_key.shape == view.cached_value.shape == (BATCH, QUERIES, 1, FEATURES // HEADS)
    assert module.cached_key is None
    assert module.decode is None
    x = normal(0, BATCH, QUERIES, FEATURES)
    assert_close(decode(view, x), module(x, decode=False, is_causal=True))
    assert nnx.view(view, decode=True).cached_key.shape == view.cached_key.shape
    assert nnx.view(view, batch_size=(2, 3), max_length=5).cached_key.shape == (2, 3, 5, 1, FEATURES // HEADS)
    assert nnx.view(module, deterministic=True).deterministic
    assert "max_length" in nnx.view_info(module)


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "missing"),
    [({"decode": True}, "batch_size"), ({"decode": True, "batch_size": 2}, "max_length"), ({"max_length": 5}, "batch")],
)
def test_view_wants_the_size_of_the_cache(arguments, missing):
    with pytest.raises(TypeError, match=f"'{missing}.*must be provided when initializing cache"):
        make_quickly(OURS).set_view(**arguments)


# Dropout -------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("keep_rngs", "rngs"),
    [
        (True, lambda: None),
        (True, lambda: nnx.Rngs(dropout=3)),
        (True, lambda: nnx.Rngs(3).dropout),
        (False, lambda: nnx.Rngs(3)),
    ],
    ids=["own", "Rngs", "RngStream", "Rngs alone"],
)
@pytest.mark.parametrize(("constructor", "call"), [(True, None), (False, None), (True, False), (False, True)])
def test_attention_fn_gets_the_arguments_of_flax(constructor, call, keep_rngs, rngs):
    calls = {}
    for cls in (OURS, FLAX):
        attention_fn, calls[cls] = recording()
        options = {"attention_fn": attention_fn, "dropout_rate": 0.5, "broadcast_dropout": True}
        options |= {"dtype": jnp.float32, "precision": "highest"}
        module = make_quickly(cls, deterministic=constructor, keep_rngs=keep_rngs, **options)
        module(normal(0, BATCH, QUERIES, FEATURES), deterministic=call, rngs=rngs())
    assert_same_arguments(calls[OURS], calls[FLAX])
    drops = not (constructor if call is None else call)
    assert (calls[OURS][0]["dropout_rng"] is not None) == drops


@pytest.mark.core
def test_dropout_needs_to_know_whether_and_from_what():
    x = normal(0, BATCH, QUERIES, FEATURES)
    with pytest.raises(ValueError, match="No `deterministic` argument was provided"):
        make_quickly(OURS, dropout_rate=0.5)(x)
    with pytest.raises(ValueError, match=r"'rngs' must be provided to __call__.*keep_rngs=False"):
        make_quickly(OURS, dropout_rate=0.5, keep_rngs=False)(x, deterministic=False)
    make_quickly(OURS)(x)  # no dropout, no question


@pytest.mark.core
@pytest.mark.parametrize("run", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_each_call_drops_others_and_the_same_rngs_the_same(run):
    x = normal(0, BATCH, QUERIES, FEATURES)
    step = run(lambda module, x: module(x))
    first, second = (make_quickly(OURS, dropout_rate=0.5, deterministic=False) for _ in range(2))
    one, other = step(first, x), step(first, x)
    assert not np.allclose(one, other)
    assert_close([step(second, x), step(second, x)], [one, other])
    kept = first(x, deterministic=True)
    assert not np.allclose(kept, one)
    assert_same(kept, make_quickly(OURS)(x))


def heads_alike(broadcast_dropout):
    """Outputs [B, T, N, H] of a module whose batch entries and heads are alike, so that dropout alone tells them apart.

    Its output layer is the identity.
    """
    options = {"dropout_rate": 0.5, "deterministic": False, "use_bias": False}
    module = make_quickly(OURS, broadcast_dropout=broadcast_dropout, **options)
    for layer in (module.query, module.key, module.value):
        layer.kernel[...] = jnp.broadcast_to(layer.kernel[...][:, :1], layer.kernel.shape)
    module.out.kernel[...] = jnp.eye(FEATURES).reshape(module.out.kernel.shape)
    x = jnp.broadcast_to(normal(0, 1, QUERIES, FEATURES), (BATCH, QUERIES, FEATURES))
    return module(x).reshape(BATCH, QUERIES, HEADS, -1)


@pytest.mark.core
def test_broadcast_dropout_shares_what_is_dropped():
    shared = heads_alike(broadcast_dropout=True)
    assert_close(shared, jnp.broadcast_to(shared[:1, :, :1], shared.shape))
    own = heads_alike(broadcast_dropout=False)
    parts = np.moveaxis(own, 2, 1).reshape(BATCH * HEADS, -1)
    assert len(np.unique(parts.round(4), axis=0)) == BATCH * HEADS


# attention_fn --------------------------------------------------------------------------------------------------------


@each(CASES, *SOME, core=["groups"])
def test_attention_functions_can_be_exchanged(case):
    """Flax's own function inside our module, and ours inside Flax's."""
    ours, flax = make_both(**case.options)
    ours.attention_fn, flax.attention_fn = nnx.dot_product_attention, flax_mha.attention_fn
    inputs = case.inputs()
    with flax_rules():
        assert_close(capture(flax, *inputs, **case.arguments), capture(ours, *inputs, **case.arguments))


@pytest.mark.core
def test_any_function_that_flax_takes_will_do():
    """Nothing is passed that Flax does not pass."""

    def attention(
        query,
        key,
        value,
        *,
        mask,
        dropout_rng,
        dropout_rate,
        broadcast_dropout,
        deterministic,
        dtype,
        precision,
        module,
        is_causal,
    ):
        return query + jnp.mean(value, axis=-3, keepdims=True)

    ours, flax = make_both(attention_fn=attention)
    assert_same_outputs(ours, flax, normal(0, BATCH, QUERIES, FEATURES))


@pytest.mark.core
def test_what_the_call_does_not_know_reaches_attention_fn():
    def attention(query, key, value, *, input_positions=None, **arguments):
        return query * input_positions[..., None, None]

    x = normal(0, BATCH, QUERIES, FEATURES)
    module = make_quickly(OURS, attention_fn=attention, use_bias=False)
    positions = jnp.broadcast_to(jnp.arange(QUERIES, dtype=jnp.float32), (BATCH, QUERIES))
    result = module(x, input_positions=positions)
    assert_close(result, module.out(module.query(x) * positions[..., None, None]))
    module = make_quickly(OURS)
    assert module.attention_fn is flax_mha.attention_fn
    with pytest.raises(TypeError, match="maks"):
        module(x, maks=0)


# What Flax lacks -----------------------------------------------------------------------------------------------------


def test_bias_of_the_call():
    bias = normal(7, HEADS, QUERIES, KEYS)
    q, k = normal(0, BATCH, QUERIES, FEATURES), normal(1, BATCH, KEYS, FEATURES)
    ours, flax = make_both()
    got = ours(q, k, bias=bias)
    flax.attention_fn = functools.partial(nnx.dot_product_attention, bias=bias)
    assert not np.allclose(got, ours(q, k))
    with flax_rules():
        assert_close(got, flax(q, k))
    grad = jax.grad(lambda bias: jnp.sum(ours(q, k, bias=bias) ** 2))(bias)
    assert np.abs(grad).max() > 1e-3


@pytest.mark.core
@IMPLEMENTATIONS
def test_documents_do_not_see_each_other(implementation):
    x, other = normal(0, BATCH, QUERIES, FEATURES), normal(1, BATCH, QUERIES, FEATURES)
    ids = np.array([5, 5, 5, 5, 3, 3, 3])
    module = make_quickly(OURS, implementation=implementation)
    run = nnx.jit(lambda module, x: module(x, segment_ids=jnp.broadcast_to(ids, (BATCH, QUERIES))))
    got = run(module, x)
    assert_close(got, module(x, mask=(ids[:, None] == ids[None, :])[None, None]))
    for document in (5, 3):
        changed = run(module, jnp.asarray(np.where(ids[:, None] == document, x, other)))
        np.testing.assert_array_equal(changed[:, ids == document], got[:, ids == document])
        assert not np.allclose(changed[:, ids != document], got[:, ids != document])


@IMPLEMENTATIONS
def test_documents_across_inputs(implementation):
    q, k = normal(0, BATCH, QUERIES, FEATURES), normal(1, BATCH, KEYS, FEATURES)
    q_ids, k_ids = np.arange(QUERIES) % 3, np.arange(KEYS) // 4
    pair = tuple(jnp.broadcast_to(ids, (BATCH, len(ids))) for ids in (q_ids, k_ids))
    module = make_quickly(OURS, implementation=implementation)
    got = module(q, k, segment_ids=pair)
    assert_close(got, module(q, k, mask=(q_ids[:, None] == k_ids[None, :])[None, None]))
    changed = module(q, jnp.asarray(np.where(k_ids[:, None] == 1, k + np.float32(1), k)), segment_ids=pair)
    np.testing.assert_array_equal(changed[:, q_ids != 1], got[:, q_ids != 1])


@pytest.mark.core
@IMPLEMENTATIONS
@pytest.mark.parametrize("name", ["causal with mask", "groups"])
def test_implementations_agree_with_flax(implementation, name):
    ours, flax = make_both(**CASES[name].options)
    ours.implementation = implementation
    assert_same_outputs(ours, flax, *CASES[name].inputs(), **CASES[name].arguments)


@pytest.mark.core
@pytest.mark.parametrize(
    ("size", "left", "right"), [(2, 2, 2), ((2, 0), 2, 0), ((None, 1), QUERIES, 1), ((1, None), 1, QUERIES)]
)
def test_local_window(size, left, right):
    module = make_quickly(OURS, local_window_size=size)
    x = normal(0, BATCH, QUERIES, FEATURES)
    ahead = np.arange(QUERIES)[None, :] - np.arange(QUERIES)[:, None]
    mask = (-left <= ahead) & (ahead <= right)
    assert_close(module(x), make_quickly(OURS)(x, mask=mask[None, None]))


@pytest.mark.core
@pytest.mark.parametrize(("mask", "array"), MASKS.values(), ids=MASKS)
def test_mask_objects_equal_arrays(mask, array):
    module, x = make_quickly(OURS), normal(0, BATCH, QUERIES, FEATURES)
    expected = module(x, mask=array)
    assert_close(module(x, mask=mask), expected)
    assert not np.allclose(expected, module(x), atol=1e-3)


@pytest.mark.core
@pytest.mark.parametrize(("options", "arguments"), ADDED.values(), ids=ADDED)
def test_what_flax_lacks_equals_the_core_between_the_projections(options, arguments):
    module, x = make_quickly(OURS, **options), normal(0, BATCH, QUERIES, FEATURES)
    query, key = module.query(x), module.key(x)
    core = arguments | {name: options[name] for name in ("logits_soft_cap", "local_window_size") if name in options}
    if "sinks" in options:
        assert_same(module.sinks[...], jnp.zeros(module.num_heads))
    nnx.update(module, trained(params(module)))
    learned = params(module)
    assert learned.keys() - {"query", "key", "value", "out"} == {
        *(["sinks"] if "sinks" in options else []),
        *(["query_ln", "key_ln"] if "normalize_qk" in options else []),
    }
    if "sinks" in options:
        core["sinks"] = learned["sinks"]
    if "normalize_qk" in options:
        query, key = (
            y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * learned[name]["scale"][None, None, None]
            for y, name in ((query, "query_ln"), (key, "key_ln"))
        )
    expected = module.out(flax_mha.dot_product_attention(query, key, module.value(x), **core))
    assert_close(module(x, **arguments), expected)
    assert not np.allclose(expected, make_quickly(OURS)(x), atol=1e-3)


@pytest.mark.core
def test_sinks_are_learned():
    module = make_quickly(OURS, sinks=True, param_dtype=jnp.float32)
    grads = nnx.grad(lambda module, x: jnp.sum(module(x) ** 2))(module, normal(0, BATCH, QUERIES, FEATURES))
    assert grads["sinks"][...].shape == (HEADS,)
    assert np.all(np.abs(grads["sinks"][...]) > 1e-3)
    assert make_quickly(OURS, sinks=True, param_dtype=jnp.bfloat16).sinks.dtype == jnp.bfloat16


# nnx's transformations -----------------------------------------------------------------------------------------------


def test_vmap_over_modules_and_inputs():
    @nnx.split_rngs(splits=5)
    @nnx.vmap
    def make_five(rngs):
        return make_quickly(OURS, rngs=rngs)

    modules = make_five(nnx.Rngs(0))
    x = normal(0, 5, BATCH, QUERIES, FEATURES)
    got = nnx.vmap(lambda module, x: module(x, is_causal=True))(modules, x)
    assert got.shape == x.shape
    for i in range(5):
        module = make_quickly(OURS)
        nnx.update(module, jax.tree.map(lambda w, i=i: w[i], params(modules)))
        assert_close(got[i], module(x[i], is_causal=True))
    got = nnx.vmap(lambda module, x: module(x, is_causal=True), in_axes=(None, 0))(module, x)
    assert_close(got, module(x, is_causal=True))


def test_sharded_projections():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = normal(0, BATCH, QUERIES, FEATURES)
    expected = make_quickly(OURS)(x)
    with jax.set_mesh(mesh):
        got = make_quickly(OURS)(x, qkv_sharding=jax.P(None, None, "heads", None), out_sharding=jax.P())
    assert_close(got, expected)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("options", "message"), REFUSED_OPTIONS)
def test_constructor_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make_quickly(OURS, **options)


X, Y = jnp.ones((BATCH, QUERIES, FEATURES)), jnp.ones((BATCH, KEYS, FEATURES))


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "inputs", "arguments", "error", "message"),
    [
        ({}, [X[..., :7]], {}, ValueError, r"Incompatible input dimension, got 7 but module expects 15 \(inputs_q"),
        ({}, [X, Y[..., :7]], {}, ValueError, r"got 7 but module expects 15 \(inputs_k"),
        ({}, [X, Y, Y[..., :7]], {}, ValueError, r"got 7 but module expects 15 \(inputs_v"),
        ({"in_kv_features": 13}, [X], {}, ValueError, r"got 15 but module expects 13 \(inputs_k"),
        *REFUSED_CALLS,
    ],
)
def test_call_refuses(options, inputs, arguments, error, message):
    module = make_quickly(OURS, **options)
    with pytest.raises(error, match=message):
        module(*inputs, **arguments)


@pytest.mark.core
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 2, FEATURES), r"expected key shape \(2, 2, 3, 5\) instead got \(3, 2, 3, 5\)"),
        ((1, 1, FEATURES), "got"),
    ],
)
def test_decoding_refuses_another_shape(shape, expected):
    module = make_quickly(OURS, decode=True)
    module.init_cache((BATCH, KEYS, FEATURES))
    with pytest.raises(ValueError, match=f"Autoregressive cache shape error.*{expected}"):
        module(jnp.ones(shape))


def test_another_batch_than_that_of_the_cache_is_not_blamed_on_positions():
    module = make(OURS, qkv_features=4 * HEADS, decode=True, rope=flax_mha.rope.RoPE())
    module.init_cache((BATCH, KEYS, FEATURES), per_row=True)
    with pytest.raises(ValueError, match=r"cache shape error, expected key shape \(2, 1, 3, 4\) instead got \(3, 1,"):
        module(jnp.ones((3, 1, FEATURES)))


@pytest.mark.parametrize("shape", [(BATCH, KEYS, FEATURES - 1), (BATCH, KEYS, HEADS, 5)])
def test_init_cache_refuses_what_is_no_shape_of_inputs(shape):
    module = make_quickly(OURS, decode=True)
    with pytest.raises(ValueError, match=rf"input_shape must be \(batch..., length, {FEATURES}\), .*module sets the"):
        module.init_cache(shape)


def test_an_argument_given_twice_does_not_print_the_module():
    module, mask = make_quickly(OURS), {"mask": None}
    with pytest.raises(TypeError, match="got multiple values for keyword argument 'mask'") as error:
        module(jnp.ones((BATCH, QUERIES, FEATURES)), **mask, **mask)
    assert len(str(error.value)) < 120


@pytest.mark.core
def test_dropout_without_a_key_is_refused():
    query = jnp.ones((QUERIES, HEADS, 5))
    with pytest.raises(ValueError, match="dropout_rng must be a key"):
        flax_mha.attention_fn(query, query, query, dropout_rate=0.5)
