"""flax_mha.linen's modules in the place of flax.linen's."""

import contextlib
import dataclasses
import functools
import inspect

import flax
import flax.linen as nn
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
from flax_mha import linen

OURS, FLAX = linen.MultiHeadDotProductAttention, nn.MultiHeadDotProductAttention
BOTH = (OURS, FLAX)
CASES = CASES | {"key and value features": Case(features=(FEATURES, 13, 17))}
CAUSAL = np.tri(QUERIES, dtype=bool)[None, None]
X = normal(0, BATCH, QUERIES, FEATURES)
Y = normal(1, BATCH, KEYS, FEATURES)
KEY = jax.random.key(0)


def make(cls, **options):
    """A module that is quick to initialize."""
    return cls(**{"num_heads": HEADS, "kernel_init": scaled, "bias_init": scaled} | options)


def outputs(inputs, arguments, **options):
    """Of ours and of Flax's, both with the variables that Flax's made."""
    ours, theirs = (make(cls, **options) for cls in BOTH)
    with flax_rules():
        checkpoint = theirs.init(KEY, *inputs)
        expected = theirs.apply(checkpoint, *inputs, **arguments)
    return ours.apply(checkpoint, *inputs, **arguments), expected


# Names, attributes and parameters -----------------------------------------------------------------------------------


NAMES = pytest.mark.parametrize("name", ["MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention"])
FLAX_DEPRECATES = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")


@pytest.mark.core
@NAMES
@FLAX_DEPRECATES
def test_parents_name_and_seed_it_as_flax_does(name):
    """The name decides the paths of the parameters, their initial values and the keys for dropout."""
    variables, calls = {}, {}
    for library in (linen, nn):
        attention_fn, calls[library] = recording()
        cls = getattr(library, name)
        assert cls.__name__ == name

        class Parent(nn.Module):
            cls: type
            attention_fn: object

            @nn.compact
            def __call__(self, x):
                x = self.cls(HEADS, dropout_rate=0.5, deterministic=False)(x)
                return self.cls(HEADS, dropout_rate=0.5, deterministic=False, attention_fn=self.attention_fn)(x)

        keys = dict(zip(("params", "dropout"), jax.random.split(KEY), strict=True))
        variables[library] = Parent(cls, attention_fn).init(keys, X)
    assert_same(variables[linen], variables[nn])
    assert variables[linen]["params"].keys() == {f"{name}_0", f"{name}_1"}
    assert_same(calls[linen][0]["dropout_rng"], calls[nn][0]["dropout_rng"])


@pytest.mark.core
@NAMES
@FLAX_DEPRECATES
def test_a_checkpoint_of_a_whole_model_with_automatic_names_loads(name):
    """Flax's variables as they are, and equal outputs; the mask of SelfAttention stands in the second place."""

    class Model(nn.Module):
        library: object

        @nn.compact
        def __call__(self, x, mask):
            cls = getattr(self.library, name)
            for _ in range(2):
                x = nn.LayerNorm()(x)
                x = x + (cls(HEADS)(x, mask) if name == "SelfAttention" else cls(HEADS)(x, mask=mask))
            return x

    theirs, ours, mask = Model(nn), Model(linen), jnp.asarray(CAUSAL)
    checkpoint = theirs.init(KEY, X, mask)
    assert {"LayerNorm_1", f"{name}_0", f"{name}_1"} < checkpoint["params"].keys()
    assert_close(ours.apply(checkpoint, X, mask), theirs.apply(checkpoint, X, mask))


@pytest.mark.core
def test_self_attention_takes_what_ours_takes_besides():
    """All but other keys than the queries; and `explain` has the signature of the call."""
    call = inspect.signature(linen.SelfAttention.__call__).parameters
    keys = {"inputs_k", "inputs_v", "inputs_kv", "store_keys"}
    assert call.keys() == inspect.signature(OURS.__call__).parameters.keys() - keys
    assert [name for name, x in call.items() if x.kind is not x.KEYWORD_ONLY] == [
        *inspect.signature(nn.SelfAttention.__call__).parameters
    ]
    layer, ids = linen.SelfAttention(HEADS), jnp.arange(QUERIES)[None] // 3
    variables = layer.init(KEY, X)
    arguments = {"is_causal": True, "segment_ids": jnp.broadcast_to(ids, X.shape[:2]), "lengths": jnp.array([7, 4])}
    arguments |= {"bias": CAUSAL * 0.5, "score_mod": lambda score, b, h, q_idx, kv_idx: 0.5 * score}
    assert_close(layer.apply(variables, X, **arguments), OURS(HEADS).apply(variables, X, **arguments))
    assert layer.explain(X, None, True, is_causal=True).chosen == "xla"
    with pytest.raises(TypeError, match="inputs_k"):
        layer.apply(variables, X, inputs_k=Y)


@pytest.mark.core
@NAMES
def test_attributes_are_those_of_flax(name):
    """In their order, so that they can be given by position; new ones come after."""
    ours, theirs = (
        [(f.name, f.default) for f in dataclasses.fields(getattr(library, name)) if f.name not in ("parent", "name")]
        for library in (linen, nn)
    )
    assert [name for name, _ in ours[: len(theirs)]] == [name for name, _ in theirs]
    differ = {name for (name, ours), (_, theirs) in zip(ours, theirs, strict=False) if ours != theirs}
    assert differ == {"broadcast_dropout", "attention_fn"}
    assert all(default in (None, False) for _, default in ours[len(theirs) :])
    assert not make(OURS).broadcast_dropout


def einsum(*arguments, **options):
    return jnp.einsum(*arguments, **options)


ATTRIBUTES = {
    "num_heads": 5,
    "dtype": jnp.float32,
    "param_dtype": jnp.float16,
    "qkv_features": 21,
    "out_features": 13,
    "precision": "highest",
    "kernel_init": nn.initializers.ones,
    "out_kernel_init": nn.initializers.zeros,
    "bias_init": nn.initializers.ones,
    "out_bias_init": nn.initializers.ones,
    "use_bias": False,
    "attention_fn": nn.dot_product_attention,
    "dropout_rate": 0.5,
    "decode": True,
    "normalize_qk": True,
    "force_fp32_for_softmax": True,
    "qkv_dot_general": jax.lax.dot_general,
    "out_dot_general": jax.lax.dot_general,
    "qkv_dot_general_cls": lambda: jax.lax.dot_general,
    "out_dot_general_cls": lambda: jax.lax.dot_general,
    "qk_attn_weights_einsum_cls": lambda: einsum,
    "attn_weights_value_einsum_cls": lambda: einsum,
}


@pytest.mark.parametrize("field", dataclasses.fields(FLAX), ids=lambda field: field.name)
def test_attributes_do_what_they_do_in_flax(field):
    if field.name in ("parent", "name"):
        options = {"name": "attention"}
    else:
        options = {field.name: ATTRIBUTES.get(field.name, field.default)}
    if field.name.endswith("einsum_cls"):  # the two come together
        options = {name: make for name, make in ATTRIBUTES.items() if name.endswith("einsum_cls")}
    options = {"deterministic": True} | options
    results = []
    for cls in BOTH:
        with flax_rules():  # for float16 parameters next to float32 inputs
            call = {"deterministic": True} if options["deterministic"] is None else {}
            results.append(make(cls, **options).init_with_output(KEY, X, **call))
    (got, variables), (expected, expected_variables) = results
    assert_same(variables, expected_variables)
    assert_close(got, expected)


CALL = {"inputs_k": Y, "inputs_v": normal(2, BATCH, KEYS, FEATURES), "inputs_kv": Y, "mask": CAUSAL, "dropout_rng": KEY}


@pytest.mark.parametrize("name", [name for name in inspect.signature(FLAX.__call__).parameters if name != "self"])
def test_call_takes_what_flax_takes(name):
    default = inspect.signature(FLAX.__call__).parameters[name].default
    arguments = {} if name == "inputs_q" else {name: CALL.get(name, default)}
    if name == "inputs_v":
        arguments["inputs_k"] = Y
    with pytest.warns(DeprecationWarning, match="inputs_kv arg") if name == "inputs_kv" else contextlib.nullcontext():
        assert_close(*outputs([X], arguments))


# Outputs -------------------------------------------------------------------------------------------------------------


@each(CASES, "self", "without bias", "normalized", "sizes", core=["normalized", "sizes"])
def test_same_parameters_from_the_same_key(case):
    assert_same(*(cls(HEADS, **case.options).init(KEY, *case.inputs()) for cls in BOTH))


@each(CASES, core=["self", "padding", "sizes", "normalized", "key and value features"])
def test_checkpoints_give_the_same_outputs(case):
    assert_close(*outputs(case.inputs(), case.arguments, **case.options))


@each(CASES, "two batch axes", "mask", "normalized", core=["mask"])
def test_same_gradients(case):
    inputs = case.inputs()
    cotangent = normal(5, *inputs[0].shape)
    checkpoint = make(FLAX, **case.options).init(KEY, *inputs)

    def grads(cls):
        def loss(params, *inputs):
            result = make(cls, **case.options).apply({"params": params}, *inputs, **case.arguments)
            return jnp.sum(result * cotangent)

        weights, *arrays = jax.jit(jax.grad(loss, argnums=range(len(inputs) + 1)))(checkpoint["params"], *inputs)
        return weights, arrays

    ours, ours_of_inputs = grads(OURS)
    with flax_rules():
        theirs, theirs_of_inputs = grads(FLAX)
    assert_grads_close(ours, theirs)
    assert_close(ours_of_inputs, theirs_of_inputs)


@pytest.mark.parametrize(
    ("dtype", "options", "arguments"),
    [
        (jnp.float16, {}, {}),
        (jnp.bfloat16, {"force_fp32_for_softmax": True}, {}),
        (jnp.bfloat16, {"normalize_qk": True}, {"mask": CAUSAL}),
    ],
)
def test_half_precision_is_no_worse(dtype, options, arguments):
    with flax_rules():
        checkpoint = make(FLAX, **options).init(KEY, X)
        exact = make(FLAX, **options).apply(checkpoint, X, **arguments)
        peer = make(FLAX, dtype=dtype, **options).apply(checkpoint, X, **arguments)
    with flax_rules() if "normalize_qk" in options else contextlib.nullcontext():  # Flax's LayerNorm promotes
        got = make(OURS, dtype=dtype, **options).apply(checkpoint, X, **arguments)
    assert_no_worse(got, peer, exact)


@pytest.mark.parametrize("arguments", [{}, {"mask": CAUSAL}, {"sow_weights": True}])
def test_complex_inputs_work_as_in_flax(arguments):
    inputs = jax.lax.complex(X, normal(3, *X.shape))
    with flax_rules():
        results = [make(cls).init_with_output(KEY, inputs, **arguments) for cls in BOTH]
    assert results[0][0].dtype == jnp.complex64
    assert_same(*results)


def test_quantized_einsums_reach_flax():
    calls = []

    def counted(*arguments):
        calls.append(arguments[0])
        return jnp.einsum(*arguments)

    names = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
    with flax_rules():
        results = [make(cls, **dict.fromkeys(names, lambda: counted)).init_with_output(KEY, X) for cls in BOTH]
        assert_same(*results)
        assert calls == ["...qhd,...khd->...hqk", "...hqk,...khd->...qhd"] * 2
        with pytest.raises(ValueError, match="must be specified together"):
            make(OURS, **{names[0]: lambda: counted}).init(KEY, X)


@pytest.mark.parametrize(("name", "used"), [("qkv_dot_general", 3), ("out_dot_general", 1)])
@pytest.mark.parametrize("by_class", [True, False])
def test_dot_generals_are_used(name, used, by_class):
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return jax.lax.dot_general(*arguments, **options)

    make(OURS, **({f"{name}_cls": lambda: counted} if by_class else {name: counted})).init(KEY, X)
    assert len(calls) == used


# What is sown --------------------------------------------------------------------------------------------------------


@each(CASES, "no batch", "two batch axes", "mask", core=["mask"])
def test_sown_weights_are_those_of_flax(case):
    inputs = case.inputs()
    checkpoint = make(FLAX).init(KEY, *inputs)
    arguments = {**case.arguments, "sow_weights": True, "mutable": ["intermediates"]}
    got = make(OURS).apply(checkpoint, *inputs, **arguments)
    with flax_rules():
        expected = make(FLAX).apply(checkpoint, *inputs, **arguments)
    assert_close(got, expected)
    assert got[1]["intermediates"].keys() == {"attention_weights"}


@pytest.mark.parametrize("force", [True, False])
def test_sown_weights_have_the_dtype_of_flax(force):
    sown = []
    for cls in BOTH:
        with flax_rules():
            module = make(cls, dtype=jnp.bfloat16, force_fp32_for_softmax=force)
            _, sown_by = module.apply(module.init(KEY, X), X, sow_weights=True, mutable=["intermediates"])
        (weights,) = sown_by["intermediates"]["attention_weights"]
        sown.append(weights)
    assert sown[0].dtype == sown[1].dtype == (jnp.float32 if force else jnp.bfloat16)
    # Flax's weights come from scores in bfloat16, off by 2**-9 of themselves; these are below 4.
    np.testing.assert_allclose(*(w.astype(jnp.float32) for w in sown), rtol=0, atol=4 * 2**-8)


def test_sown_weights_come_before_dropout():
    module = make(OURS, dropout_rate=0.5)
    checkpoint = make(OURS).init(KEY, X)
    arguments = {"sow_weights": True, "mutable": ["intermediates"]}
    _, dropping = module.apply(checkpoint, X, deterministic=False, dropout_rng=KEY, **arguments)
    _, keeping = module.apply(checkpoint, X, deterministic=True, **arguments)
    assert_same(dropping, keeping)


# Decoding ------------------------------------------------------------------------------------------------------------


def decode(module, variables, x, run, **by_query):
    """One token a call."""

    def step(variables, x, arguments):
        return module.apply(variables, x, **arguments, mutable=["cache"])

    step, x, results = run(step), np.asarray(x), []
    for t in range(x.shape[-2]):
        result, changed = step(variables, jnp.asarray(x[..., t : t + 1, :]), cut(by_query, t))
        variables = {**variables, **changed}
        results.append(result)
    return np.concatenate(results, axis=-2), variables


def eager(function):
    return function


DECODING = {
    "no batch": Case(batch=()),
    "two batch axes": Case(batch=(2, 3)),
    "normalized": Case({"normalize_qk": True}),
    "mask": Case(arguments={"mask": visible(BATCH, HEADS, QUERIES, QUERIES)}),
}
OUR_DECODING = {
    "key heads": Case({"num_kv_heads": 1}),
    "bias": Case(arguments={"bias": np.asarray(normal(7, HEADS, QUERIES, QUERIES))}),
    "window": Case({"local_window_size": 2}, arguments={"mask": visible(BATCH, 1, 1, QUERIES)}),
    "blockwise": Case({"num_kv_heads": 1, "implementation": "blockwise", "local_window_size": (3, None)}),
}


@each(OUR_DECODING, core=["window"])
def test_decoding_equals_the_whole_forward(case):
    (x,) = case.inputs()
    module = make(OURS, **case.options, decode=True)
    variables = module.init(KEY, x)
    expected = module.clone(decode=False).apply(variables, x, is_causal=True, **case.arguments)
    got, variables = decode(module, variables, x, jax.jit, **case.arguments)
    assert_close(got, np.asarray(expected))
    assert variables["cache"]["cache_index"] == QUERIES


@each(DECODING_ADDED, core=["everything"])
def test_decoding_with_what_flax_lacks(case):
    """By "xla"; test_nnx.py has "blockwise"."""
    (x,) = case.inputs()
    module = make(OURS, **case.options)
    variables = module.clone(decode=True).init(KEY, x)
    variables["params"] = trained(variables["params"])
    expected = module.apply(variables, x, is_causal=True, **case.arguments)
    module = module.clone(decode=True, implementation="xla")
    assert_close(decode(module, variables, x, jax.jit, **case.arguments)[0], np.asarray(expected))


@each(DECODING, core=["mask"])
def test_decoding_equals_that_of_flax(case):
    (x,) = case.inputs()
    ours, theirs = (make(cls, **case.options, decode=True) for cls in BOTH)
    variables = ours.init(KEY, x)
    assert_same(variables, theirs.init(KEY, x))
    got = decode(ours, variables, x, jax.jit, **case.arguments)
    with flax_rules():
        assert_close(got, decode(theirs, variables, x, jax.jit, **case.arguments))


def test_decoding_is_causal_with_or_without_the_flag():
    module = make(OURS, decode=True)
    variables = module.init(KEY, X)
    expected, _ = decode(module, variables, X, jax.jit)

    def flagged(step):
        return jax.jit(lambda variables, x, _: module.apply(variables, x, is_causal=True, mutable=["cache"]))

    assert_same(decode(module, variables, X, flagged)[0], expected)
    assert_close(expected, np.asarray(module.clone(decode=False).apply(variables, X, is_causal=True)))


@pytest.mark.core
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_cache_has_the_dtype_of_the_computation(dtype):
    cache = make(OURS, decode=True, dtype=dtype, num_kv_heads=1).init(KEY, X)["cache"]
    shape = (BATCH, QUERIES, 1, FEATURES // HEADS)
    dtype = jnp.dtype(dtype or jnp.float32)
    assert {name: (a.shape, a.dtype) for name, a in cache.items()} == {
        "cached_key": (shape, dtype),
        "cached_value": (shape, dtype),
        "cache_index": ((), jnp.int32),
    }


def full_cache():
    module = make(OURS, decode=True)
    variables = module.init(KEY, X[:, :3])
    return module, decode(module, variables, X[:, :3], eager)[1]


@pytest.mark.core
def test_decoding_past_the_end_raises():
    module, variables = full_cache()
    with pytest.raises(ValueError, match=r"the cache is full: all 3 slots are in use"):
        module.apply(variables, X[:, :1], mutable=["cache"])


@pytest.mark.core
def test_decoding_past_the_end_under_jit_answers_nan():
    module, variables = full_cache()
    step = jax.jit(functools.partial(module.apply, mutable=["cache"]))
    for _ in range(2):
        result, changed = step(variables, X[:, :1])
        assert result.shape == (BATCH, 1, FEATURES)
        assert np.isnan(result).all()
        assert_same(changed["cache"], variables["cache"])
        variables |= changed


# Dropout -------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("attribute", "call"), [(True, None), (None, True), (False, None), (None, False)])
def test_attention_fn_gets_the_arguments_of_flax(attribute, call, given):
    """The key of the call comes before that of the collection."""
    calls = {}
    for cls in BOTH:
        attention_fn, calls[cls] = recording()
        options = {"attention_fn": attention_fn, "dropout_rate": 0.5, "broadcast_dropout": True}
        options |= {"dtype": jnp.float32, "precision": "highest"}
        module = make(cls, deterministic=attribute, **options)
        checkpoint = make(FLAX).init(KEY, X)
        rng = jax.random.key(5) if given else None
        module.apply(checkpoint, X, mask=CAUSAL, deterministic=call, dropout_rng=rng, rngs={"dropout": KEY})
    assert_same_arguments(calls[OURS], calls[FLAX])
    if given:
        assert_same(calls[OURS][0]["dropout_rng"], jax.random.key(5))


def test_same_key_drops_the_same_and_another_key_other_weights():
    module = make(OURS, dropout_rate=0.5, deterministic=False)
    checkpoint = make(FLAX).init(KEY, X)
    one, again, other = (module.apply(checkpoint, X, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2))
    assert_same(one, again)
    assert not np.allclose(one, other)
    assert not np.allclose(one, make(OURS).apply(checkpoint, X))


@pytest.mark.core
@pytest.mark.parametrize("shared", [True, False])
def test_broadcast_dropout_shares_what_is_dropped(shared):
    """Batch entries and heads are alike and the output layer is the identity: dropout alone tells them apart."""
    options = {"dropout_rate": 0.5, "deterministic": False, "use_bias": False}
    x = jnp.broadcast_to(X[:1], X.shape)
    params = jax.tree.map(np.asarray, make(FLAX, use_bias=False).init(KEY, x)["params"])
    params = {
        name: {"kernel": np.repeat(params[name]["kernel"][:, :1], HEADS, 1)} for name in ("query", "key", "value")
    }
    params["out"] = {"kernel": np.eye(FEATURES, dtype=np.float32).reshape(HEADS, -1, FEATURES)}
    got = make(OURS, broadcast_dropout=shared, **options).apply({"params": params}, x, dropout_rng=KEY)
    parts = np.moveaxis(np.asarray(got).reshape(BATCH, QUERIES, HEADS, -1), 2, 1).reshape(BATCH * HEADS, -1)
    if shared:
        assert_close(parts, np.broadcast_to(parts[:1], parts.shape))
    else:
        assert len(np.unique(parts.round(4), axis=0)) == BATCH * HEADS


# attention_fn --------------------------------------------------------------------------------------------------------


@each(CASES, "two batch axes", "mask of numbers", "normalized", core=["mask of numbers"])
def test_attention_functions_can_be_exchanged(case):
    """Flax's own function inside our module, and ours inside Flax's."""
    inputs = case.inputs()
    ours = make(OURS, attention_fn=nn.dot_product_attention, **case.options)
    theirs = make(FLAX, attention_fn=flax_mha.attention_fn, **case.options)
    checkpoint = theirs.init(KEY, *inputs)
    arguments = {**case.arguments, "sow_weights": True, "mutable": ["intermediates"]}
    got = theirs.apply(checkpoint, *inputs, **arguments)
    with flax_rules():
        assert_close(got, ours.apply(checkpoint, *inputs, **arguments))


def flax_keywords(query, key, value, *, mask, dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype):
    return query + jnp.mean(value, axis=-3, keepdims=True)


def no_keywords(query, key, value):
    return query + jnp.mean(value, axis=-3, keepdims=True)


@pytest.mark.core
@pytest.mark.parametrize("attention_fn", [flax_keywords, no_keywords])
def test_any_function_that_flax_takes_will_do(attention_fn):
    """It gets all that Flax gives, as far as it knows it, and nothing else."""
    assert_close(*outputs([X], {}, attention_fn=attention_fn))


# inputs_kv, and a mask in the place of values ------------------------------------------------------------------------


@pytest.mark.core
def test_inputs_kv():
    with pytest.warns(DeprecationWarning, match="The inputs_kv arg will be deprecated soon") as warnings:
        assert_close(*outputs([X], {"inputs_kv": Y}))
    assert len(warnings) == 2  # of Flax and of ours
    for given in ({"inputs_k": Y}, {"inputs_k": Y, "inputs_v": Y}):
        with pytest.raises(ValueError, match="If either `inputs_k` or `inputs_v` is not None, `inputs_kv` must be"):
            make(OURS).init(KEY, X, inputs_kv=Y, **given)


@pytest.mark.core
def test_warns_of_a_mask_passed_as_values():
    square = jnp.ones((BATCH, QUERIES, QUERIES))
    for cls in BOTH:
        with pytest.warns(DeprecationWarning, match=r"array of shape \(2, 7, 7\) to the `inputs_v` arg"):
            make(cls).init(KEY, X, X, square)


# What Flax lacks -----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_key_heads_stand_for_their_groups():
    grouped, plain = make(OURS, num_kv_heads=1), make(OURS)
    params = jax.tree.map(np.asarray, grouped.init(KEY, X)["params"])
    assert params["key"]["kernel"].shape == params["value"]["kernel"].shape == (FEATURES, 1, FEATURES // HEADS)
    assert params["query"]["bias"].shape != params["key"]["bias"].shape
    repeated = {**params, **{name: _repeated(params[name]) for name in ("key", "value")}}
    got = grouped.apply({"params": params}, X, Y)
    assert_close(got, plain.apply({"params": repeated}, X, Y))


def _repeated(layer):
    return {name: np.repeat(array, HEADS, axis=-2) for name, array in layer.items()}


@pytest.mark.core
@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("options", "arguments", "same_as"),
    [
        ({}, {"is_causal": True}, {"mask": CAUSAL}),
        ({"local_window_size": (2, 0)}, {}, {"mask": CAUSAL & ~np.tri(QUERIES, k=-3, dtype=bool)}),
        (
            {},
            {"segment_ids": np.array([[5, 5, 5, 5, 3, 3, 3]] * BATCH)},
            {"mask": np.kron(np.eye(2), np.ones((4, 4)))[None, None, :QUERIES, :QUERIES].astype(bool)},
        ),
    ],
    ids=["causal", "window", "segments"],
)
def test_what_hides_equals_a_mask_in_flax(implementation, options, arguments, same_as):
    checkpoint = make(FLAX).init(KEY, X)
    got = make(OURS, implementation=implementation, **options).apply(checkpoint, X, **arguments)
    with flax_rules():
        assert_close(got, make(FLAX).apply(checkpoint, X, **same_as))


@pytest.mark.core
def test_segments_across_inputs_and_bias():
    checkpoint = make(FLAX).init(KEY, X, Y)
    q_ids, k_ids = np.arange(QUERIES) % 3, np.arange(KEYS) // 4
    pair = tuple(jnp.broadcast_to(ids, (BATCH, len(ids))) for ids in (q_ids, k_ids))
    bias = normal(7, HEADS, QUERIES, KEYS)
    got = make(OURS).apply(checkpoint, X, Y, segment_ids=pair, bias=bias)
    theirs = make(FLAX, attention_fn=functools.partial(nn.dot_product_attention, bias=bias))
    with flax_rules():
        mask = (q_ids[:, None] == k_ids[None, :])[None, None]
        assert_close(got, theirs.apply(checkpoint, X, Y, mask=mask))


@pytest.mark.core
@pytest.mark.parametrize(("mask", "array"), MASKS.values(), ids=MASKS)
def test_mask_objects_equal_arrays(mask, array):
    checkpoint = make(FLAX).init(KEY, X)
    expected = make(OURS).apply(checkpoint, X, mask=array)
    assert_close(make(OURS).apply(checkpoint, X, mask=mask), expected)
    assert not np.allclose(expected, make(OURS).apply(checkpoint, X), atol=1e-3)


@pytest.mark.core
@pytest.mark.parametrize(("options", "arguments"), ADDED.values(), ids=ADDED)
def test_what_flax_lacks_equals_that_of_nnx(options, arguments):
    """And test_nnx.py compares nnx's with the core."""
    options = {"num_heads": HEADS} | options
    peer = flax_mha.MultiHeadAttention(in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **options)
    module = make(OURS, **options)
    params = module.init(KEY, X)["params"]
    assert_same(*(jax.tree.map(jnp.zeros_like, p) for p in (params, nnx.to_pure_dict(nnx.state(peer, nnx.Param)))))
    params = trained(params)
    nnx.update(peer, params)
    assert_close(module.apply({"params": params}, X, **arguments), peer(X, **arguments))


@pytest.mark.core
def test_sinks_are_learned():
    module = make(OURS, sinks=True)
    params = module.init(KEY, X)["params"]
    assert_same(params["sinks"], jnp.zeros(HEADS))
    grads = jax.grad(lambda params: jnp.sum(module.apply({"params": params}, X) ** 2))(params)
    assert np.all(np.abs(grads["sinks"]) > 1e-3)


def test_vmap_over_modules():
    many = nn.vmap(OURS, variable_axes={"params": 0}, split_rngs={"params": True})
    x = normal(0, 5, BATCH, QUERIES, FEATURES)
    got, variables = many(HEADS).init_with_output(KEY, x)
    last = jax.tree.map(lambda w: w[4], variables)
    assert_close(got[4], OURS(HEADS).apply(last, x[4]))


# Errors --------------------------------------------------------------------------------------------------------------


COMPLEX = X.astype(jnp.complex64)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "inputs", "arguments", "error", "message"),
    [
        *(
            (options, [X], {"deterministic": False, "dropout_rng": KEY}, ValueError, message)
            for options, message in REFUSED_OPTIONS
        ),
        *REFUSED_CALLS,
        ({"logits_soft_cap": False}, [X], {}, ValueError, "logits_soft_cap must be .*got False"),
        ({"local_window_size": False}, [X], {}, ValueError, "local_window_size must be .*got False"),
        ({"implementation": "xla"}, [COMPLEX], {}, ValueError, "complex inputs .* does not support implementation"),
        ({"dropout_rate": 0.5}, [X], {}, ValueError, '"deterministic" must be passed'),
        (
            {"dropout_rate": 0.5, "deterministic": True},
            [X],
            {"deterministic": True},
            ValueError,
            "passed to the constr",
        ),
    ],
)
def test_call_refuses(options, inputs, arguments, error, message):
    with flax_rules(), pytest.raises(error, match=message):
        make(OURS, **options).init(KEY, *inputs, **arguments)


@pytest.mark.core
@pytest.mark.parametrize("inputs", [[X[..., :9]], [X, Y[..., :9]], [X, Y, Y[..., :9]]], ids=["q", "k", "v"])
def test_other_features_than_the_parameters_get_the_error_of_flax(inputs):
    checkpoint = make(FLAX).init(KEY, X)
    messages = []
    for cls in BOTH:
        with pytest.raises(flax.errors.ScopeParamShapeError) as error:
            make(cls, qkv_features=FEATURES).apply(checkpoint, *inputs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.core
@pytest.mark.parametrize("shape", [(1, 1, 10, 10), (2, 1, 10, 10), (2, 10, 10), (2, 7, 7), (10, 10)])
def test_a_mask_in_the_place_of_values_gets_the_error_of_flax(shape):
    """`test_multihead_mask_warning` of Flax: a mask was its third positional argument once."""
    x = jnp.ones((2, 10, 1))
    variables = FLAX(1).init(KEY, x)
    messages = []
    for cls in BOTH:
        with (
            pytest.warns(
                DeprecationWarning, match="the function signature of MultiHeadDotProductAttention's `__call__`"
            ),
            pytest.raises(flax.errors.ScopeParamShapeError) as error,
        ):
            cls(1).apply(variables, x, x, jnp.ones(shape))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.core
def test_square_values_are_values():
    """They are projected once, by parameters as in Flax."""
    inputs = jnp.ones((2, 5, 3)), jnp.ones((2, 4, 3)), jax.random.normal(KEY, (2, 4, 4))
    with pytest.warns(DeprecationWarning, match="you may have intended to pass it to the `mask`"):
        got, want = (cls(3, qkv_features=6).init_with_output(KEY, *inputs) for cls in BOTH)
    jax.tree.map(assert_close, got, want)


@pytest.mark.core
def test_dropout_without_a_key_is_refused():
    module = make(OURS, dropout_rate=0.5, deterministic=False)
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        module.apply(make(FLAX).init(KEY, X), X)


@pytest.mark.core
@pytest.mark.parametrize("x", [X[:1, :1], X[:1]], ids=["a token", "a prompt"])
def test_decoding_refuses_another_shape(x):
    module = make(OURS, decode=True)
    variables = module.init(KEY, X)
    expected = rf"expected query shape \(2, {x.shape[1]}, 3, 5\) instead got"
    with pytest.raises(ValueError, match=f"Autoregressive cache shape error, {expected}"):
        module.apply(variables, x, mutable=["cache"])
