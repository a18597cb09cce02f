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


@each(
    "self, without bias, normalized, groups",
    "self, without bias, normalized, sizes",
    core="groups, sizes",
)
def test_same_seed_initializes_the_same_parameters_as_in_flax(api, case):
    assert_same(api.initial(api.ours, case), api.initial(api.flax, case))


@each(
    core="padding, sizes, normalized, causal with mask, groups, key and value features"
)
def test_checkpoints_of_flax_give_the_same_outputs(api, case):
    assert_close(*both(api, case))


@each(
    "normalized, two batch axes, causal with mask, groups",
    "two batch axes, mask, normalized",
    core="groups, mask",
)
def test_checkpoints_of_flax_give_the_same_gradients(api, case):
    inputs = case.inputs()
    params = api.params(api.flax, inputs, **case.options)
    # Not ones: the gradient of a sum hides errors that add up to zero.
    cotangent = normal(5, *case.batch, QUERIES, FEATURES)

    def gradients(kind):
        return api.grads(kind, params, inputs, case.options, case.arguments, cotangent)

    result, weights, arrays = gradients(api.ours)
    with flax_rules():
        want, want_weights, want_arrays = gradients(api.flax)
    assert_close((result, arrays), (want, want_arrays))
    flax_cases.assert_grads_close(weights, want_weights)


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
def test_half_precision_is_no_worse_than_in_flax(api, dtype, options, arguments):
    params = api.params(api.flax, [X], **options)
    half = {**options, "dtype": dtype}
    with flax_rules():
        exact = api.call(api.flax, params, [X], options, **arguments)
        peer = api.call(api.flax, params, [X], half, **arguments)
    # Flax's LayerNorm promotes.
    rules = flax_rules() if "normalize_qk" in options else contextlib.nullcontext()
    call = jax.jit(lambda x: api.call(api.ours, params, [x], half, **arguments))
    with rules:
        got = call(X)
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
    options = {"dropout_rate": 0.5}

    def sown(deterministic):
        return api.capture(api.ours, params, [X], options, deterministic=deterministic)[
            1
        ]

    assert_same(sown(False), sown(True))


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
    (x,) = case.inputs()
    params = flax_cases.trained(api.params(api.ours, [x], **case.options))
    expected = api.call(
        api.ours, params, [x], case.options, is_causal=True, **case.arguments
    )
    # Both implementations decode, one in each API.
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
    ours, cache = api.decoder(api.ours, params, x, case.options)
    flax, flax_cache = api.decoder(api.flax, params, x, case.options)
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
    without_flag, _ = api.decoder(api.ours, params, X)
    with_flag, _ = api.decoder(api.ours, params, X, is_causal=True)
    assert_same(decode(without_flag, X), decode(with_flag, X))


@pytest.mark.core
@EACH_API
def test_decoding_past_the_end_raises(api):
    step, cache = api.decoder(api.ours, None, X[:, :3], jit=False)
    decode(step, X[:, :3])
    full = cache()

    for _ in range(2):
        refused(r"the cache is full: all 3 slots are in use", step, X[:, :1], {})
        assert_same(cache(), full)


@pytest.mark.core
@EACH_API
def test_decoding_past_the_end_returns_nan_under_jit(api):
    step, cache = api.decoder(api.ours, None, X[:, :3], jit=True)
    decode(step, X[:, :3])
    full = cache()

    for _ in range(2):
        result = step(X[:, :1], {})
        assert result.shape == (BATCH, 1, FEATURES)
        assert np.isnan(result).all()
        assert_same(cache(), full)


@pytest.mark.core
@EACH_API
def test_broadcast_dropout_drops_the_same_in_every_head_and_batch_entry(api):
    # Batch entries and heads are equal and the output layer is the identity, so only
    # dropout makes a difference.
    x = jnp.broadcast_to(X[:1], X.shape)
    of_flax = jax.tree.map(np.asarray, api.params(api.flax, [x], use_bias=False))
    params = {}
    for name in ("query", "key", "value"):
        first_head = of_flax[name]["kernel"][:, :1]
        params[name] = {"kernel": np.repeat(first_head, HEADS, 1)}
    identity = np.eye(FEATURES, dtype=np.float32)
    params["out"] = {"kernel": identity.reshape(HEADS, -1, FEATURES)}
    options = {"dropout_rate": 0.5, "deterministic": False, "use_bias": False}

    got = api.call(api.ours, params, [x], options | {"broadcast_dropout": True})

    of_heads = np.asarray(got).reshape(BATCH, QUERIES, HEADS, -1)
    parts = np.moveaxis(of_heads, 2, 1).reshape(BATCH * HEADS, -1)
    assert_close(parts, np.broadcast_to(parts[:1], parts.shape))


@each(
    "two batch axes, causal with mask, groups",
    "two batch axes, mask of numbers, normalized",
    core="groups, mask of numbers",
)
def test_attention_functions_can_be_exchanged_with_flax(api, case):
    inputs = case.inputs()
    params = api.params(api.flax, inputs, **case.options)
    of_flax = case.options | {"attention_fn": api.attention}
    of_ours = case.options | {"attention_fn": flax_mha.attention_fn}
    with flax_rules():
        ours = api.capture(api.ours, params, inputs, of_flax, **case.arguments)
        flax = api.capture(api.flax, params, inputs, of_ours, **case.arguments)
        assert_close(flax, ours)


def of_nnx(
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
def test_functions_that_flax_takes_get_the_same_arguments(api, function):
    # In linen only those that it takes.
    assert_close(*both(api, Case(), attention_fn=function))


@pytest.mark.parametrize(
    ("api", "implementation"),
    [(Nnx, "xla"), (Nnx, "blockwise"), core(Linen, "xla"), (Linen, "blockwise")],
)
def test_segments_of_queries_and_keys_and_bias_equal_a_mask_in_flax(
    api, implementation
):
    params = api.params(api.flax, [X, Y])
    bias = normal(7, HEADS, QUERIES, KEYS)
    q_ids = np.arange(QUERIES) % 3
    k_ids = np.arange(KEYS) // 4
    pair = tuple(jnp.broadcast_to(ids, (BATCH, len(ids))) for ids in (q_ids, k_ids))
    options = {"implementation": implementation}

    @jax.jit
    def run(keys, bias):
        inputs = [X, keys]
        return api.call(api.ours, params, inputs, options, segment_ids=pair, bias=bias)

    got = run(Y, None)
    got_with_bias = run(Y, bias)

    mask = (q_ids[:, None] == k_ids[None, :])[None, None]
    with_bias = {"attention_fn": functools.partial(api.attention, bias=bias)}
    with flax_rules():
        want = api.call(api.flax, params, [X, Y], mask=mask)
        want_with_bias = api.call(api.flax, params, [X, Y], with_bias, mask=mask)
    assert_close(got, want)
    assert_close(got_with_bias, want_with_bias)
    assert not np.allclose(got, got_with_bias)

    # Keys of document 1 affect only its queries.
    other = jnp.asarray(np.where(k_ids[:, None] == 1, Y + np.float32(1), Y))
    changed = run(other, None)
    np.testing.assert_array_equal(changed[:, q_ids != 1], got[:, q_ids != 1])
    d_bias = jax.grad(lambda bias: jnp.sum(run(Y, bias) ** 2))(bias)
    assert np.abs(d_bias).max() > 1e-3


def project(x, layer, equation="btd,dnh->btnh"):
    return jnp.einsum(equation, x, layer["kernel"]) + layer["bias"][None, None]


def rms_norm(y, layer):
    mean_square = jnp.mean(y**2, axis=-1, keepdims=True)
    return y / jnp.sqrt(mean_square + 1e-6) * layer["scale"][None, None, None]


@EACH_API
@pytest.mark.parametrize(
    "name", with_core(flax_cases.ADDED, "causal, segments", "everything")
)
def test_our_options_equal_the_function_between_the_projections(api, name):
    options, _, _, arguments = flax_cases.ADDED[name]
    has_sinks = "sinks" in options
    is_normalized = "normalize_qk" in options
    params = api.params(api.ours, [X], **options)

    # Both modules have the same parameters.
    of_nnx = Nnx.params(Nnx.ours, [X], **options)
    assert jax.tree.map(jax.typeof, params) == jax.tree.map(jax.typeof, of_nnx)
    names = {"query", "key", "value", "out"}
    if has_sinks:
        names |= {"sinks"}
        assert_same(params["sinks"], jnp.zeros(options.get("num_heads", HEADS)))
    if is_normalized:
        names |= {"query_ln", "key_ln"}
    assert params.keys() == names

    params = flax_cases.trained(params)
    query, key, value = (project(X, params[name]) for name in ("query", "key", "value"))
    core = dict(arguments)
    for name in ("logits_soft_cap", "local_window_size"):
        if name in options:
            core[name] = options[name]
    if "segment_ids" in core:
        core["query_segment_ids"] = core.pop("segment_ids")
    if has_sinks:
        core["sinks"] = params["sinks"]
    if is_normalized:
        query = rms_norm(query, params["query_ln"])
        key = rms_norm(key, params["key_ln"])
    output = flax_mha.dot_product_attention(query, key, value, **core)
    expected = project(output, params["out"], "btnh,nhd->btd")
    assert_close(api.call(api.ours, params, [X], options, **arguments), expected)
    plain = api.call(api.ours, api.params(api.ours, [X]), [X])
    assert not np.allclose(expected, plain, atol=1e-3)


@pytest.mark.core
@EACH_API
def test_sinks_are_learned(api):
    params = api.params(api.ours, [X], sinks=True)
    result = api.call(api.ours, params, [X], {"sinks": True})
    _, grads, _ = api.grads(api.ours, params, [X], {"sinks": True}, {}, result)
    assert grads["sinks"].shape == (HEADS,)
    assert np.all(np.abs(grads["sinks"]) > 1e-3)
    half = {"sinks": True, "param_dtype": jnp.bfloat16}
    with flax_rules():  # linen's `init` computes
        params = api.params(api.ours, [X], **half)
    assert params["sinks"].dtype == jnp.bfloat16


@pytest.mark.core
@EACH_API
@pytest.mark.parametrize("refusal", flax_cases.REFUSED_OPTIONS)
def test_wrong_options_raise_errors(api, refusal):
    make = functools.partial(api.make, api.ours, **refusal.options)
    # The constructor of nnx refuses them, and the call of linen.
    if api is Linen:
        make = functools.partial(api.fresh, make(), [X], {"deterministic": False})
    refused(refusal.message, make)


OF_NNX = flax_cases.RefusedCalls()
WRONG_FEATURES = "got 7 but module expects 15"
OF_NNX.add(rf"Incompatible input dimension, {WRONG_FEATURES} \(inputs_q", X[..., :7])
OF_NNX.add(rf"{WRONG_FEATURES} \(inputs_k", X, Y[..., :7])
OF_NNX.add(rf"{WRONG_FEATURES} \(inputs_v", X, Y, Y[..., :7])
OF_NNX.add(
    r"got 15 but module expects 13 \(inputs_k", X, options={"in_kv_features": 13}
)
OF_LINEN = flax_cases.RefusedCalls()
OF_LINEN.add(
    "complex inputs .* does not support implementation",
    X.astype(jnp.complex64),
    options={"implementation": "xla"},
)
OF_LINEN.add('"deterministic" must be passed', X, options={"dropout_rate": 0.5})
OF_LINEN.add(
    "passed to the constr",
    X,
    options={"dropout_rate": 0.5, "deterministic": True},
    deterministic=True,
)


def assert_refused(api, refusal):
    module = api.make(api.ours, **refusal.options)
    with flax_rules(), pytest.raises(refusal.error, match=refusal.message):
        api.fresh(module, refusal.inputs, refusal.arguments)


@pytest.mark.core
@EACH_API
@pytest.mark.parametrize("refusal", flax_cases.REFUSED_CALLS)
def test_wrong_calls_raise_errors(api, refusal):
    assert_refused(api, refusal)


@pytest.mark.core
@pytest.mark.parametrize("refusal", OF_NNX)
def test_wrong_calls_of_nnx_raise_errors(refusal):
    assert_refused(Nnx, refusal)


@pytest.mark.core
@pytest.mark.parametrize("refusal", OF_LINEN)
def test_wrong_calls_of_linen_raise_errors(refusal):
    assert_refused(Linen, refusal)
