"""flax_mha.MultiHeadAttention as a replacement for flax.nnx.MultiHeadAttention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from flax_cases import (
    BATCH,
    FEATURES,
    HEADS,
    KEYS,
    QUERIES,
    assert_close,
    assert_no_worse,
    assert_same,
    attention_arguments,
    flax_rules,
    normal,
    visible,
)
from flax_modules import Nnx, X

import flax_mha
from flax_mha._src.modules.dot_general import dot_general

OURS = Nnx.ours
FLAX = Nnx.flax
make = Nnx.make


def test_half_precision_inputs_are_no_less_exact_than_in_flax():
    """Without a `dtype`, the inputs and the weights determine it, as in Flax."""
    flax = make(FLAX, param_dtype=jnp.bfloat16)
    x = X.astype(jnp.bfloat16)
    got = make(OURS, param_dtype=jnp.bfloat16)(x)
    exact = make(OURS)
    weights = nnx.state(flax, nnx.Param)
    nnx.update(exact, jax.tree.map(lambda w: w.astype(jnp.float32), weights))
    with flax_rules():
        assert_no_worse(got, flax(x), exact(x.astype(jnp.float32)))


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({}, {"mask": visible(BATCH, 1, QUERIES, QUERIES)}),
        ({}, {"is_causal": True}),
        ({"num_kv_heads": 1}, {}),
    ],
)
def test_complex_inputs_work_as_in_flax(options, arguments):
    """Without dropout, Flax calls jax.nn, which ignores the imaginary part of the
    scores.
    """
    inputs = jax.lax.complex(X, normal(3, BATCH, QUERIES, FEATURES))
    params = Nnx.params(FLAX, [], **options)
    options = options | {"dropout_rate": 0.5, "deterministic": True}
    with flax_rules():
        ours = Nnx.call(OURS, params, [inputs], options, **arguments)
        flax = Nnx.call(FLAX, params, [inputs], options, **arguments)
        assert_close(ours, flax)


def capture(module, *inputs, **arguments):
    result, sown = nnx.capture(module, nnx.Intermediate)(
        *inputs, **arguments, sow_weights=True
    )
    return result, nnx.to_pure_dict(sown)


def test_sown_largest_scores():
    """One for each head, always in float32; sowing changes no output, and `explain`
    knows it.
    """
    module = make(OURS, dtype=jnp.bfloat16)
    x = X
    heads = module.query(x), module.key(x), module.value(x)
    # The projections are bfloat16, as the module computes them.
    with jax.numpy_dtype_promotion("standard"):
        _, expected = flax_mha.dot_product_attention(
            *heads, is_causal=True, return_max_score=True
        )

    run = nnx.capture(module, nnx.Intermediate)
    output, sown = run(x, is_causal=True, sow_max_score=True)

    [max_score] = nnx.to_pure_dict(sown)["attention_max_score"]
    assert max_score.dtype == jnp.float32
    np.testing.assert_allclose(max_score, expected, rtol=1e-2)
    unsown = module(x, is_causal=True)
    assert_close(output.astype(jnp.float32), unsown.astype(jnp.float32))
    refusals = module.explain(x, sow_max_score=True).refusals
    assert "return_max_score" in refusals["cudnn"][0]


def test_sown_weights_have_the_dtype_of_the_module():
    _, sown = capture(make(OURS, dtype=jnp.bfloat16), X)
    dtypes = {weights.dtype for weights in jax.tree.leaves(sown)}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.core
def test_sown_weights_of_a_query_without_keys_are_zero_and_of_a_nan_row_nan():
    inputs = np.array(X)
    inputs[1, 3, 0] = np.nan
    mask = visible(BATCH, 1, QUERIES, QUERIES)
    mask[..., 3] = False
    mask[1, :, 3, 3] = True  # only row 3 uses the NaN
    mask[1, :, 5] = False  # row 5 has no keys
    module = make(OURS, bias_init=nnx.initializers.ones_init())

    result, sown = capture(module, jnp.asarray(inputs), mask=mask)

    (weights,) = sown["attention_weights"]
    assert np.isnan(result[1, 3]).all()
    assert np.isnan(weights[1, :, 3]).all()
    assert np.isnan(weights).sum() == HEADS * QUERIES
    has_nan = np.isnan(inputs).any(-1)[:, None]
    sums = np.where(has_nan, np.nan, mask.any(-1))
    sums = np.broadcast_to(sums, (BATCH, HEADS, QUERIES))
    # Rounding of a sum of QUERIES weights of at most 1.
    tolerance = QUERIES * np.finfo(np.float32).eps
    np.testing.assert_allclose(weights.sum(-1), sums, rtol=0, atol=tolerance)
    # Attention returns 0, so only the bias is left.
    np.testing.assert_array_equal(result[1, 5], module.out.bias[...])


def test_decode_of_the_call_overrides_that_of_the_module():
    x = normal(0, BATCH, 1, FEATURES)
    module = make(OURS, decode=True)
    message = r"call ``init_cache`` first: layer.init_cache\(\(\*batch, max_length,"
    refused(message, module, x)
    assert_same(module(x, decode=False), make(OURS)(x))
    module = make(OURS)
    module.init_cache(x.shape)
    module(x, decode=True)
    assert module.cache_index[...] == 1
    refused("No `decode` argument was provided", make(OURS, decode=None), x)


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
    module = make(OURS, **options)
    module.init_cache((BATCH, KEYS, FEATURES), given)
    assert module.cached_key.dtype == module.cached_value.dtype == expected
    assert module.cache_index.dtype == jnp.int32
    module = make(OURS, **options)
    module.set_view(decode=True, batch_size=BATCH, max_length=KEYS)
    # A view takes no dtype, so it has that of the module.
    if given is None:
        assert module.cached_key.dtype == expected
    else:
        assert module.cached_key.dtype == options["dtype"]


@pytest.mark.core
def test_view_makes_a_cache():
    module = make(OURS, num_kv_heads=1, dtype=jnp.float32, decode=None)
    view = nnx.view(module, decode=True, batch_size=BATCH, max_length=QUERIES)
    shape = (BATCH, QUERIES, 1, FEATURES // HEADS)
    assert view.cached_key.shape == shape
    assert view.cached_value.shape == shape
    assert module.cached_key is None
    assert module.decode is None
    assert nnx.view(view, decode=True).cached_key.shape == shape
    larger = nnx.view(view, batch_size=(2, 3), max_length=5)
    assert larger.cached_key.shape == (2, 3, 5, 1, FEATURES // HEADS)
    assert nnx.view(module, deterministic=True).deterministic
    assert "max_length" in nnx.view_info(module)


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"decode": True, "batch_size": 2}, "max_length"),
        ({"max_length": 5}, "batch"),
    ],
)
def test_view_needs_the_size_of_the_cache(arguments, missing):
    message = f"'{missing}.*must be provided when initializing cache"
    with pytest.raises(TypeError, match=message):
        make(OURS).set_view(**arguments)


@pytest.mark.core
def test_view_that_decodes_may_get_its_cache_later():
    module = make(OURS, decode=False)
    module.set_view(decode=True)
    view = nnx.view(make(OURS), decode=True)
    assert module.decode
    assert view.cached_key is None
    with pytest.raises(ValueError, match="cache not initialized, call ``init_cache``"):
        view(X[:, :1])

    view.init_cache(X.shape)

    assert view(X[:, :1]).shape == X[:, :1].shape


RNGS = [
    (True, lambda: None),
    (True, lambda: nnx.Rngs(dropout=3)),
    (True, lambda: nnx.Rngs(3).dropout),
]


@pytest.mark.core
@pytest.mark.parametrize(("keep_rngs", "rngs"), [*RNGS, (False, lambda: nnx.Rngs(3))])
@pytest.mark.parametrize(
    ("constructor", "call"), [(True, None), (False, None), (True, False), (False, True)]
)
def test_attention_fn_gets_the_arguments_of_flax(constructor, call, keep_rngs, rngs):
    def run(kind, options):
        module = make(kind, deterministic=constructor, keep_rngs=keep_rngs, **options)
        module(X, deterministic=call, rngs=rngs())

    deterministic = constructor if call is None else call
    arguments = attention_arguments(run, OURS, FLAX)
    assert (arguments["dropout_rng"] is None) == deterministic


@pytest.mark.core
def test_dropout_needs_deterministic_and_rngs():
    refused("No `deterministic` argument was provided", make(OURS, dropout_rate=0.5), X)
    module = make(OURS, dropout_rate=0.5, keep_rngs=False)
    message = r"'rngs' must be provided to __call__.*keep_rngs=False"
    refused(message, module, X, deterministic=False)
    make(OURS)(X)  # needs neither


@pytest.mark.core
@pytest.mark.parametrize("run", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_each_call_draws_another_dropout_mask_and_the_same_rngs_the_same(run):
    step = run(lambda module, x: module(X))
    first = make(OURS, dropout_rate=0.5, deterministic=False)
    second = make(OURS, dropout_rate=0.5, deterministic=False)
    one = step(first, X)
    other = step(first, X)
    assert not np.allclose(one, other)
    assert_close([step(second, X), step(second, X)], [one, other])
    # The call decides, and draws nothing.
    kept = first(X, deterministic=True)
    assert not np.allclose(kept, one)
    assert_same(kept, make(OURS)(X))


@pytest.mark.core
def test_positions_of_the_call_reach_attention_fn():
    def attention(query, key, value, *, input_positions=None, **arguments):
        return query * input_positions[..., None, None]

    module = make(OURS, attention_fn=attention, use_bias=False)
    positions = normal(6, BATCH, QUERIES)
    expected = module.out(module.query(X) * positions[..., None, None])
    assert_close(module(X, input_positions=positions), expected)
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'input_positions'"
    ):
        make(OURS)(X, input_positions=positions)


def test_sharded_projections_give_the_same_output():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    expected = make(OURS)(X)
    with jax.set_mesh(mesh):
        of_heads = jax.P(None, None, "heads", None)
        got = make(OURS)(X, qkv_sharding=of_heads, out_sharding=jax.P())
    assert_close(got, expected)


def test_shapes_that_do_not_fit_a_cache_are_refused():
    module = make(OURS, qkv_features=4 * HEADS, decode=True, rope=flax_mha.rope.RoPE())
    message = (
        rf"input_shape must be \(batch..., length, {FEATURES}\), .*module sets the"
    )
    for shape in ((BATCH, KEYS, FEATURES - 1), (BATCH, KEYS, HEADS, 5)):
        refused(message, module.init_cache, shape)


def test_an_argument_given_twice_does_not_print_the_module():
    mask = {"mask": None}
    message = "got multiple values for keyword argument 'mask'"
    with pytest.raises(TypeError, match=message) as error:
        make(OURS)(X, **mask, **mask)
    assert len(str(error.value)) < 120


# The product of the projections -------------------------------------------------------

PROJECTIONS = ("query", "key", "value", "gate", "out")


def product_of_user(*operands, **options):
    return jax.lax.dot_general(*operands, **options)


@pytest.mark.core
@pytest.mark.parametrize("value_dim", [None, 5])
def test_projections_have_our_product_without_arguments_of_flax(value_dim):
    layer = OURS(4, 32, gate=True, value_dim=value_dim, rngs=nnx.Rngs(0))
    for name in PROJECTIONS:
        assert getattr(layer, name).dot_general is dot_general, name
    # As in Flax's module.
    assert layer.qkv_dot_general is None
    assert layer.out_dot_general is None


@pytest.mark.parametrize("value_dim", [None, 5])
@pytest.mark.parametrize("kind", ["qkv_dot_general", "out_dot_general"])
def test_product_of_a_user_wins(kind, value_dim):
    options = {"gate": True, "value_dim": value_dim, "rngs": nnx.Rngs(0)}
    by_function = OURS(4, 32, **{kind: product_of_user}, **options)
    made = {f"{kind}_cls": lambda: product_of_user}
    by_class = OURS(4, 32, **made, **options)
    for name in PROJECTIONS:
        of_function = getattr(by_function, name)
        of_class = getattr(by_class, name)
        if (name == "out") == (kind == "out_dot_general"):
            assert of_function.dot_general is product_of_user, name
            assert of_class.dot_general is None, name
            assert of_class.dot_general_cls() is product_of_user, name
        else:
            assert of_function.dot_general is dot_general, name
            assert of_class.dot_general is dot_general, name
