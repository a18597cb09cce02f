"""flax_mha.MultiHeadAttention and flax_mha.linen's module replace Flax's modules: every
test runs for both.
"""

import contextlib
import functools

import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax_cases import (
    BATCH,
    FEATURES,
    HEADS,
    KEYS,
    QUERIES,
    Case,
    assert_close,
    assert_same,
    flax_rules,
    normal,
)
from flax_modules import EACH_API, Linen, Nnx, X, Y, both, decode, each
from marks import core, with_core

import flax_mha

CAUSAL = np.tri(QUERIES, dtype=bool)[None, None]
COMPLEX = X.astype(jnp.complex64)


@each(
    "self, without bias, normalized, groups",
    "self, without bias, normalized, sizes",
    core="groups, sizes",
)
def test_same_parameters_from_the_same_seed(api, case):
    assert_same(*(api.initial(kind, case) for kind in (api.ours, api.flax)))


@each(
    core="padding, sizes, normalized, causal with mask, groups, key and value features"
)
def test_checkpoints_give_the_same_outputs(api, case):
    assert_close(*both(api, case))


@each(
    "normalized, two batch axes, causal with mask, groups",
    "two batch axes, mask, normalized",
    core="groups, mask",
)
def test_same_gradients(api, case):
    inputs = case.inputs()
    cotangent = normal(5, *case.batch, QUERIES, FEATURES)
    params = api.params(api.flax, inputs, **case.options)
    result, weights, arrays = api.grads(
        api.ours, params, inputs, case.options, case.arguments, cotangent
    )
    with flax_rules():
        of_flax = api.grads(
            api.flax, params, inputs, case.options, case.arguments, cotangent
        )
    assert_close((result, arrays), (of_flax[0], of_flax[2]))
    flax_cases.assert_grads_close(weights, of_flax[1])


HALF = [
    (Nnx, jnp.float16, {}, {}),
    (Nnx, jnp.bfloat16, {"normalize_qk": True}, {"is_causal": True}),
    (
        Nnx,
        jnp.bfloat16,
        flax_cases.GROUPED,
        {"mask": flax_cases.visible(1, QUERIES, QUERIES)},
    ),
    (Linen, jnp.float16, {}, {}),
    (Linen, jnp.bfloat16, {"force_fp32_for_softmax": True}, {}),
    (Linen, jnp.bfloat16, {"normalize_qk": True}, {"mask": CAUSAL}),
]


@pytest.mark.parametrize(("api", "dtype", "options", "arguments"), HALF)
def test_half_precision_is_no_worse(api, dtype, options, arguments):
    params = api.params(api.flax, [X], **options)
    half = {**options, "dtype": dtype}
    with flax_rules():
        exact = api.call(api.flax, params, [X], options, **arguments)
        peer = api.call(api.flax, params, [X], half, **arguments)
    # Flax's LayerNorm promotes.
    with flax_rules() if "normalize_qk" in options else contextlib.nullcontext():
        got = jax.jit(lambda x: api.call(api.ours, params, [x], half, **arguments))(X)
    flax_cases.assert_no_worse(got, peer, exact)


@each(
    "no batch, two batch axes, causal with mask, groups",
    "no batch, two batch axes, mask",
    core="groups, mask",
)
def test_sown_weights_equal_sown_weights_of_flax(api, case):
    assert_close(*both(api, case, "capture"))


@EACH_API
def test_sown_weights_come_before_dropout(api):
    params = api.params(api.flax, [X])
    runs = [
        api.capture(api.ours, params, [X], {"dropout_rate": 0.5}, deterministic=x)[1]
        for x in (False, True)
    ]
    assert_same(*runs)


DECODING = {
    "no batch": Case(batch=()),
    "two batch axes": Case(batch=(2, 3)),
    "groups": Case(flax_cases.GROUPED),
    "normalized": Case({"normalize_qk": True}),
    "mask": Case(
        arguments={"mask": flax_cases.visible(BATCH, HEADS, QUERIES, QUERIES)}
    ),
}


@each(core="everything", cases=flax_cases.DECODING_ADDED)
def test_decoding_equals_the_whole_forward(api, case):
    """In one by "blockwise", in the other by "xla"."""
    (x,) = case.inputs()
    params = flax_cases.trained(api.params(api.ours, [x], **case.options))
    expected = api.call(
        api.ours, params, [x], case.options, is_causal=True, **case.arguments
    )
    options = case.options | {"implementation": "blockwise" if api is Nnx else "xla"}
    step, cache = api.decoder(api.ours, params, x, options)
    assert_close(decode(step, x, **case.arguments), np.asarray(expected))
    assert cache()["cache_index"] == QUERIES


@each(
    "no batch, groups, normalized, mask",
    "no batch, two batch axes, normalized, mask",
    core="groups, mask",
    cases=DECODING,
)
def test_decoding_equals_decoding_of_flax(api, case):
    (x,) = case.inputs()
    params = api.params(api.flax, [x], **case.options)
    (ours, cache), (flax, flax_cache) = (
        api.decoder(kind, params, x, case.options) for kind in (api.ours, api.flax)
    )
    assert_same(cache(), flax_cache())
    got = decode(ours, x, **case.arguments)
    with flax_rules():
        assert_close(got, decode(flax, x, **case.arguments))
    if api is Nnx:
        assert_same(cache(), flax_cache())
    else:  # Two programs, which may round differently.
        assert_close(cache(), flax_cache())


@EACH_API
def test_decoding_is_causal_with_or_without_the_flag(api):
    """The query of a step attends to all keys so far: in older Flax it attended only to
    key 0.
    """
    params = api.params(api.ours, [X])
    results = [
        decode(api.decoder(api.ours, params, X, **flag)[0], X)
        for flag in ({}, {"is_causal": True})
    ]
    assert_same(*results)


@pytest.mark.core
@EACH_API
@pytest.mark.parametrize("jit", [False, True])
def test_decoding_past_the_end_raises_or_returns_nan_under_jit(api, jit):
    step, cache = api.decoder(api.ours, None, X[:, :3], jit=jit)
    decode(step, X[:, :3])
    before = cache()
    for _ in range(2):
        if jit:
            result = step(X[:, :1], {})
            assert result.shape == (BATCH, 1, FEATURES)
            assert np.isnan(result).all()
        else:
            refused(r"the cache is full: all 3 slots are in use", step, X[:, :1], {})
        assert_same(cache(), before)


@pytest.mark.core
@EACH_API
def test_broadcast_dropout_shares_what_is_dropped(api):
    """Batch entries and heads are equal and the output layer is the identity, so only
    dropout makes a difference.
    """
    x = jnp.broadcast_to(X[:1], X.shape)
    options = {"dropout_rate": 0.5, "deterministic": False, "use_bias": False}
    params = jax.tree.map(np.asarray, api.params(api.flax, [x], use_bias=False))
    params = {
        n: {"kernel": np.repeat(params[n]["kernel"][:, :1], HEADS, 1)}
        for n in ("query", "key", "value")
    }
    params["out"] = {
        "kernel": np.eye(FEATURES, dtype=np.float32).reshape(HEADS, -1, FEATURES)
    }
    got = api.call(api.ours, params, [x], options | {"broadcast_dropout": True})
    parts = np.moveaxis(
        np.asarray(got).reshape(BATCH, QUERIES, HEADS, -1), 2, 1
    ).reshape(BATCH * HEADS, -1)
    assert_close(parts, np.broadcast_to(parts[:1], parts.shape))


@each(
    "two batch axes, causal with mask, groups",
    "two batch axes, mask of numbers, normalized",
    core="groups, mask of numbers",
)
def test_attention_functions_can_be_exchanged(api, case):
    """Flax's own function inside our module, and ours inside Flax's."""
    inputs = case.inputs()
    options = case.options
    params = api.params(api.flax, inputs, **options)
    with flax_rules():
        ours = api.capture(
            api.ours,
            params,
            inputs,
            options | {"attention_fn": api.attention},
            **case.arguments,
        )
        of_flax = options | {"attention_fn": flax_mha.attention_fn}
        assert_close(
            api.capture(api.flax, params, inputs, of_flax, **case.arguments), ours
        )


def of_nnx(query, key, value, *, mask, dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype, precision,
           module, is_causal):  # fmt: skip
    return of_arrays(query, key, value)


def of_linen(
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
):
    return of_arrays(query, key, value)


def of_arrays(query, key, value):
    return query + jnp.mean(value, axis=-3, keepdims=True)


@pytest.mark.core
@pytest.mark.parametrize(
    ("api", "function"), [(Nnx, of_nnx), (Linen, of_linen), (Linen, of_arrays)]
)
def test_any_function_that_flax_takes_works(api, function):
    """It gets the arguments of Flax, in linen only those that it takes, and no others."""
    assert_close(*both(api, Case(), attention_fn=function))


@pytest.mark.parametrize(
    ("api", "implementation"),
    [(Nnx, "xla"), (Nnx, "blockwise"), core(Linen, "xla"), (Linen, "blockwise")],
)
def test_documents_across_inputs_and_bias(api, implementation):
    params = api.params(api.flax, [X, Y])
    bias = normal(7, HEADS, QUERIES, KEYS)
    q_ids = np.arange(QUERIES) % 3
    k_ids = np.arange(KEYS) // 4
    pair = tuple(jnp.broadcast_to(ids, (BATCH, len(ids))) for ids in (q_ids, k_ids))

    @jax.jit
    def run(keys, bias):
        return api.call(
            api.ours,
            params,
            [X, keys],
            {"implementation": implementation},
            segment_ids=pair,
            bias=bias,
        )

    got = run(Y, None)
    with_bias = {"attention_fn": functools.partial(api.attention, bias=bias)}
    assert not np.allclose(got, run(Y, bias))
    with flax_rules():
        mask = (q_ids[:, None] == k_ids[None, :])[None, None]
        assert_close(got, api.call(api.flax, params, [X, Y], mask=mask))
        assert_close(
            run(Y, bias), api.call(api.flax, params, [X, Y], with_bias, mask=mask)
        )
    changed = run(
        jnp.asarray(np.where(k_ids[:, None] == 1, Y + np.float32(1), Y)), None
    )
    np.testing.assert_array_equal(changed[:, q_ids != 1], got[:, q_ids != 1])
    assert np.abs(jax.grad(lambda bias: jnp.sum(run(Y, bias) ** 2))(bias)).max() > 1e-3


def project(x, layer, equation="btd,dnh->btnh"):
    return jnp.einsum(equation, x, layer["kernel"]) + layer["bias"][None, None]


@EACH_API
@pytest.mark.parametrize(
    "name", with_core(flax_cases.ADDED, "causal, segments", "everything")
)
def test_our_options_equal_the_function_between_the_projections(api, name):
    options, arguments = flax_cases.ADDED[name]
    params, of_nnx = (x.params(x.ours, [X], **options) for x in (api, Nnx))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), of_nnx
    )
    has_sinks = "sinks" in options
    is_normalized = "normalize_qk" in options
    added = ["sinks"] * has_sinks + ["query_ln", "key_ln"] * is_normalized
    assert params.keys() - {"query", "key", "value", "out"} == {*added}
    core = arguments | {
        name: options[name]
        for name in ("logits_soft_cap", "local_window_size")
        if name in options
    }
    if "segment_ids" in core:
        core["query_segment_ids"] = core.pop("segment_ids")
    if has_sinks:
        assert_same(params["sinks"], jnp.zeros(options.get("num_heads", HEADS)))
    params = flax_cases.trained(params)
    query, key, value = (project(X, params[name]) for name in ("query", "key", "value"))
    if has_sinks:
        core["sinks"] = params["sinks"]
    if is_normalized:
        query, key = (
            y
            / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
            * params[name]["scale"][None, None, None]
            for y, name in ((query, "query_ln"), (key, "key_ln"))
        )
    expected = project(
        flax_mha.dot_product_attention(query, key, value, **core),
        params["out"],
        "btnh,nhd->btd",
    )
    assert_close(api.call(api.ours, params, [X], options, **arguments), expected)
    assert not np.allclose(
        expected, api.call(api.ours, api.params(api.ours, [X]), [X]), atol=1e-3
    )


@pytest.mark.core
@EACH_API
def test_sinks_are_learned(api):
    params = api.params(api.ours, [X], sinks=True)
    result = api.call(api.ours, params, [X], {"sinks": True})
    _, grads, _ = api.grads(api.ours, params, [X], {"sinks": True}, {}, result)
    assert grads["sinks"].shape == (HEADS,)
    assert np.all(np.abs(grads["sinks"]) > 1e-3)
    with flax_rules():  # linen's `init` computes
        assert (
            api.params(api.ours, [X], sinks=True, param_dtype=jnp.bfloat16)[
                "sinks"
            ].dtype
            == jnp.bfloat16
        )


@pytest.mark.core
@EACH_API
@pytest.mark.parametrize(("options", "message"), flax_cases.REFUSED_OPTIONS)
def test_options_are_refused(api, options, message):
    """By nnx's constructor, and in linen when it is called."""
    refuses = functools.partial(api.make, api.ours, **options)
    if api is Linen:
        refuses = functools.partial(api.fresh, refuses(), [X], {"deterministic": False})
    refused(message, refuses)


QUIET = {"deterministic": True}

REFUSED_BY = {
    Nnx: [
        (
            {},
            [X[..., :7]],
            {},
            ValueError,
            r"Incompatible input dimension, got 7 but module expects 15 \(inputs_q",
        ),
        (
            {},
            [X, Y[..., :7]],
            {},
            ValueError,
            r"got 7 but module expects 15 \(inputs_k",
        ),
        (
            {},
            [X, Y, Y[..., :7]],
            {},
            ValueError,
            r"got 7 but module expects 15 \(inputs_v",
        ),
        (
            {"in_kv_features": 13},
            [X],
            {},
            ValueError,
            r"got 15 but module expects 13 \(inputs_k",
        ),
    ],
    Linen: [
        (
            {"logits_soft_cap": False},
            [X],
            {},
            ValueError,
            "logits_soft_cap must be .*got False",
        ),
        (
            {"local_window_size": False},
            [X],
            {},
            ValueError,
            "local_window_size must be .*got False",
        ),
        (
            {"implementation": "xla"},
            [COMPLEX],
            {},
            ValueError,
            "complex inputs .* does not support implementation",
        ),
        ({"dropout_rate": 0.5}, [X], {}, ValueError, '"deterministic" must be passed'),
        (
            {"dropout_rate": 0.5, **QUIET},
            [X],
            QUIET,
            ValueError,
            "passed to the constr",
        ),
    ],
}


@pytest.mark.core
@pytest.mark.parametrize(
    ("api", "options", "inputs", "arguments", "error", "message"),
    [
        (api, *row)
        for api, rows in REFUSED_BY.items()
        for row in (*rows, *flax_cases.REFUSED_CALLS)
    ],
)
def test_calls_are_refused(api, options, inputs, arguments, error, message):
    module = api.make(api.ours, **options)
    with flax_rules(), pytest.raises(error, match=message):
        api.fresh(module, inputs, arguments)
