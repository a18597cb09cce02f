"""flax_mha.linen's modules replace those of flax.linen."""

import inspect
import re

import flax
import flax.linen as nn
import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax_cases import (
    FEATURES,
    HEADS,
    QUERIES,
    assert_close,
    assert_same,
    flax_rules,
    normal,
)
from flax_modules import KEY, Linen, X, Y

from flax_mha import linen

OURS = Linen.ours
FLAX = Linen.flax
make = Linen.make
BOTH = (OURS, FLAX)
CAUSAL = np.tri(QUERIES, dtype=bool)[None, None]


NAMES = pytest.mark.parametrize(
    "name", ["MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention"]
)
FLAX_DEPRECATES = pytest.mark.filterwarnings(
    "ignore:SelfAttention will be deprecated:DeprecationWarning"
)


@pytest.mark.core
@NAMES
@FLAX_DEPRECATES
def test_a_model_has_the_parameters_keys_and_outputs_of_flax(name):
    """The name decides the paths of the parameters, their initial values and the keys
    for dropout.

    So Flax's variables load unchanged, with equal outputs; the mask is the second
    argument of SelfAttention.
    """

    class Model(nn.Module):
        library: object
        attention_fn: object

        @nn.compact
        def __call__(self, x, mask, deterministic):
            for options in ({}, {"attention_fn": self.attention_fn}):
                layer = getattr(self.library, name)(
                    HEADS, dropout_rate=0.5, deterministic=deterministic, **options
                )
                x = nn.LayerNorm()(x)
                if name == "SelfAttention":
                    x = x + layer(x, mask)
                else:
                    x = x + layer(x, mask=mask)
            return x

    assert getattr(linen, name).__name__ == name
    variables = []
    outputs = []
    keys = []
    mask = jnp.asarray(CAUSAL)
    of_params, of_dropout = jax.random.split(KEY)
    rngs = {"params": of_params, "dropout": of_dropout}
    for library in (nn, linen):
        attention_fn, calls = flax_cases.recording()
        model = Model(library, attention_fn)
        variables.append(model.init(rngs, X, mask, deterministic=False))
        keys.append(calls[0]["dropout_rng"])
        # Ours runs with Flax's variables.
        outputs.append(model.apply(variables[0], X, mask, deterministic=True))
    assert_same(*variables)
    assert variables[0]["params"].keys() == {
        "LayerNorm_0",
        "LayerNorm_1",
        f"{name}_0",
        f"{name}_1",
    }
    assert_same(*keys)
    assert_close(*outputs)


@pytest.mark.core
def test_self_attention_takes_our_additional_arguments():
    """All except keys; and `explain` has the signature of the call."""
    call = inspect.signature(linen.SelfAttention.__call__).parameters
    keys = {"inputs_k", "inputs_v", "inputs_kv", "store_keys"}
    assert call.keys() == inspect.signature(OURS.__call__).parameters.keys() - keys
    positional = [name for name, x in call.items() if x.kind is not x.KEYWORD_ONLY]
    of_flax = inspect.signature(nn.SelfAttention.__call__).parameters
    assert positional == list(of_flax)

    layer = linen.SelfAttention(HEADS)
    ids = jnp.arange(QUERIES)[None] // 3
    variables = layer.init(KEY, X)
    arguments = {
        "is_causal": True,
        "segment_ids": jnp.broadcast_to(ids, X.shape[:2]),
        "lengths": jnp.array([7, 4]),
        "bias": CAUSAL * 0.5,
        "score_mod": lambda score, b, h, q_idx, kv_idx: 0.5 * score,
    }
    expected = OURS(HEADS).apply(variables, X, **arguments)
    assert_close(layer.apply(variables, X, **arguments), expected)
    assert layer.explain(X, None, True, is_causal=True).chosen == "xla"
    refused("inputs_k", layer.apply, variables, X, inputs_k=Y, error=TypeError)


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

    of_scores = {"qk_attn_weights_einsum_cls": lambda: counted}
    of_output = {"attn_weights_value_einsum_cls": lambda: counted}
    with flax_rules():
        layers = [make(cls, **of_scores, **of_output) for cls in BOTH]
        assert_same(*(layer.init_with_output(KEY, X) for layer in layers))
        assert calls == ["...qhd,...khd->...hqk", "...hqk,...khd->...qhd"] * 2
        alone = make(OURS, **of_scores)
        refused("must be specified together", alone.init, KEY, X)


@pytest.mark.parametrize(
    ("name", "used"), [("qkv_dot_general", 3), ("out_dot_general", 1)]
)
def test_dot_generals_are_used(name, used):
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return jax.lax.dot_general(*arguments, **options)

    # Flax takes the function, or a function that makes it.
    for options in ({name: counted}, {f"{name}_cls": lambda: counted}):
        calls.clear()
        make(OURS, **options).init(KEY, X)
        assert len(calls) == used, options


@pytest.mark.parametrize(
    ("force", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)]
)
def test_sown_weights_have_the_dtype_of_flax(force, dtype):
    sown = []
    for cls in BOTH:
        with flax_rules():
            module = make(cls, dtype=jnp.bfloat16, force_fp32_for_softmax=force)
            variables = module.init(KEY, X)
            _, sown_by = module.apply(
                variables, X, sow_weights=True, mutable=["intermediates"]
            )
        (weights,) = sown_by["intermediates"]["attention_weights"]
        assert weights.dtype == dtype
        sown.append(weights.astype(jnp.float32))
    # Flax's weights come from scores in bfloat16, off by 2**-9 of themselves; these are
    # below 4.
    np.testing.assert_allclose(*sown, rtol=0, atol=4 * 2**-8)


@pytest.mark.core
def test_cache_has_the_dtype_of_the_computation():
    caches = []
    for cls in BOTH:
        layer = make(cls, decode=True, dtype=jnp.bfloat16)
        caches.append(jax.eval_shape(layer.init, KEY, X)["cache"])
    assert caches[0] == caches[1]


@pytest.mark.core
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("attribute", "call"), [(True, None), (None, True), (False, None), (None, False)]
)
def test_attention_fn_gets_the_arguments_of_flax(attribute, call, given):
    """The key of the call has priority over the key of the collection."""
    arguments = {
        "mask": CAUSAL,
        "deterministic": call,
        "dropout_rng": jax.random.key(5) if given else None,
    }

    def run(kind, options):
        module = make(kind, deterministic=attribute, **options)
        module.apply(make(FLAX).init(KEY, X), X, **arguments, rngs={"dropout": KEY})

    ours = flax_cases.attention_arguments(run, OURS, FLAX)
    if given:
        assert_same(ours["dropout_rng"], jax.random.key(5))


@pytest.mark.core
def test_inputs_kv_and_separate_inputs_are_refused():
    message = "If either `inputs_k` or `inputs_v` is not None, `inputs_kv` must be"
    for given in ({"inputs_k": Y}, {"inputs_k": Y, "inputs_v": Y}):
        with pytest.raises(ValueError, match=message):
            make(OURS).init(KEY, X, inputs_kv=Y, **given)


def same_error(variables, *inputs, **options):
    """The error of Flax for these inputs."""
    messages = []
    for cls in BOTH:
        with pytest.raises(flax.errors.ScopeParamShapeError) as error:
            cls(**options).apply(variables, *inputs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.core
@pytest.mark.parametrize(
    "inputs", [[X[..., :9]], [X, Y[..., :9]], [X, Y, Y[..., :9]]], ids=["q", "k", "v"]
)
def test_other_features_than_the_parameters_get_the_error_of_flax(inputs):
    same_error(make(FLAX).init(KEY, X), *inputs, num_heads=HEADS, qkv_features=FEATURES)


@pytest.mark.core
@pytest.mark.parametrize("shape", [(2, 1, 10, 10), (10, 10)])
def test_a_mask_as_the_values_gets_the_error_of_flax(shape):
    """`test_multihead_mask_warning` of Flax: once a mask was its third positional
    argument.
    """
    x = jnp.ones((2, 10, 1))
    warned = (
        f"of shape {re.escape(str(shape))} to the `inputs_v` arg.* function signature "
        "of MultiHeadDotProductAtt"
    )
    with pytest.warns(DeprecationWarning, match=warned) as warnings:
        same_error(FLAX(1).init(KEY, x), x, x, jnp.ones(shape), num_heads=1)
    assert len(warnings) == 2  # of Flax and of ours


def test_square_values_are_values():
    """They are projected once, by the parameters of Flax."""
    inputs = jnp.ones((2, 5, 3)), jnp.ones((2, 4, 3)), jax.random.normal(KEY, (2, 4, 4))
    results = []
    message = "you may have intended to pass it to the `mask`"
    for cls in BOTH:
        layer = cls(3, qkv_features=6)
        with pytest.warns(DeprecationWarning, match=message):
            results.append(layer.init_with_output(KEY, *inputs))
    jax.tree.map(assert_close, *results)


@pytest.mark.core
def test_dropout_without_a_key_is_refused():
    module = make(OURS, dropout_rate=0.5, deterministic=False)
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        module.apply(make(FLAX).init(KEY, X), X)
