"""Constructors and calls of flax_mha's modules take the arguments of Flax's in the same
order, with the same effect.
"""

import contextlib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from flax_cases import (
    BATCH,
    FEATURES,
    KEYS,
    QUERIES,
    Case,
    assert_close,
    assert_same,
    flax_rules,
    normal,
)
from flax_modules import APIS, KEY, Linen, Nnx, X, Y, both

from flax_mha import linen


def parameters(function):
    return {
        name: x
        for name, x in inspect.signature(function).parameters.items()
        if name not in ("self", "parent")
    }


def of_flax(function):
    """Each API with each argument of a function of Flax's class, and its default."""
    cases = [
        (api, x.name, x.default)
        for api in APIS.values()
        for x in parameters(function(api)).values()
    ]
    ids = [f"{api.__name__}-{name}" for api, name, _ in cases]
    return pytest.mark.parametrize(("api", "name", "default"), cases, ids=ids)


ORDERS = {
    "nnx": (Nnx.ours.__init__, Nnx.flax.__init__),
    "nnx, the call": (Nnx.ours.__call__, Nnx.flax.__call__),
    **{
        name: (getattr(linen, name), getattr(nn, name))
        for name in ("MultiHeadAttention", "SelfAttention")
    },
    "MultiHeadDotProductAttention": (Linen.ours, Linen.flax),
}


@pytest.mark.core
@pytest.mark.parametrize("name", ORDERS)
def test_order_and_defaults_equal_those_of_flax(name):
    """New arguments follow, or are keywords."""
    ours, flax = map(parameters, ORDERS[name])
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    mine, theirs = (
        [n for n, x in each.items() if x.kind == positional and n != "name"]
        for each in (ours, flax)
    )
    new = mine[len(theirs) :]
    assert mine[: len(theirs)] == theirs
    assert "nnx" not in name or new == []
    assert all(ours[name].default in (None, False) for name in new)
    differ = {
        name
        for name in ours.keys() & flax.keys()
        if ours[name].default != flax[name].default
    }
    # None means causal while decoding, as in Flax, where False does not say otherwise.
    assert differ == (
        {"is_causal"}
        if name == "nnx, the call"
        else {"attention_fn", "broadcast_dropout"}
    )
    assert "broadcast_dropout" not in differ or not ours["broadcast_dropout"].default


def identity_dtype(arrays, *, dtype=None):
    return arrays


def einsum(*arguments, **options):
    return jnp.einsum(*arguments, **options)


EINSUMS = dict.fromkeys(
    ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: einsum
)
ones = jax.nn.initializers.ones
# Other values than the defaults of Flax's constructors.
VALUES = {
    "num_heads": 5,
    "qkv_features": 21,
    "out_features": 13,
    "num_kv_heads": 1,
    "in_kv_features": FEATURES,
    "name": "attention",
    "dtype": jnp.float32,
    "param_dtype": jnp.float16,
    "precision": "highest",
    "force_fp32_for_softmax": True,
    "use_bias": False,
    "normalize_qk": True,
    "dropout_rate": 0.5,
    "deterministic": True,
    "keep_rngs": False,
    **EINSUMS,
    **dict.fromkeys(
        ("kernel_init", "bias_init", "out_kernel_init", "out_bias_init"), ones
    ),
    **dict.fromkeys(("qkv_dot_general", "out_dot_general"), jax.lax.dot_general),
    **dict.fromkeys(
        ("qkv_dot_general_cls", "out_dot_general_cls"), lambda: jax.lax.dot_general
    ),
    **dict.fromkeys(
        ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"), identity_dtype
    ),
}
METADATA = (
    "kernel",
    "out_kernel",
    "bias",
    "out_bias",
    "query_ln_scale",
    "key_ln_scale",
)
VALUES |= {f"{name}_metadata": {"tag": name} for name in METADATA}


def state_and_output(module):
    if isinstance(module, nnx.Module):
        return nnx.state(module), module(X)
    return module.init_with_output(KEY, X)[::-1]


@of_flax(lambda api: api.flax if api is Linen else api.flax.__init__)
def test_constructor_takes_the_arguments_of_flax(api, name, default):
    options = {"deterministic": True} | (EINSUMS if name in EINSUMS else {})
    if name.startswith(("query_ln", "key_ln", "ln_")):
        options["normalize_qk"] = True
    values = VALUES | {"attention_fn": api.attention, "decode": api is Linen}
    if name in values or default is not inspect.Parameter.empty:
        options[name] = values.get(name, default)
    with flax_rules():  # for float16 parameters next to float32 inputs
        ours, flax = (api.make(kind, **options) for kind in (api.ours, api.flax))
        (state, output), (expected_state, expected) = map(
            state_and_output, (ours, flax)
        )
    assert_same(state, expected_state)
    assert_close(output, expected)
    if name not in ("attention_fn", "broadcast_dropout", "rngs"):
        assert getattr(ours, name, "absent") == getattr(flax, name, "absent")


CALL = {
    "inputs_k": Y,
    "inputs_v": normal(2, BATCH, KEYS, FEATURES),
    "inputs_kv": Y,
    "deterministic": True,
}
CALL |= {
    "mask": np.tri(QUERIES, dtype=bool)[None, None],
    "is_causal": True,
    "dropout_rng": KEY,
    "rngs": nnx.Rngs(2),
}


@of_flax(lambda api: api.flax.__call__)
def test_call_takes_the_arguments_of_flax(api, name, default):
    arguments = {} if name == "inputs_q" else {name: CALL.get(name, default)}
    if name == "inputs_v":
        arguments["inputs_k"] = Y
    deprecated = pytest.warns(
        DeprecationWarning, match="The inputs_kv arg will be deprecated soon"
    )
    with (
        deprecated
        if name == "inputs_kv"
        else contextlib.nullcontext([1, 2]) as warnings
    ):
        assert_close(*both(api, Case(arguments=arguments)))
    assert len(warnings) == 2  # of Flax and of ours


@pytest.mark.core
@pytest.mark.parametrize(
    ("api", "shape", "message"),
    [
        (Nnx, (3, 2, FEATURES), r"key shape \(2, 2, 3, 5\) instead got \(3, 2, 3, 5\)"),
        (Linen, (1, 1, FEATURES), r"query shape \(2, 1, 3, 5\) instead got"),
        (Linen, (1, QUERIES, FEATURES), r"query shape \(2, 7, 3, 5\) instead got"),
    ],
)
def test_decoding_refuses_another_shape(api, shape, message):
    step, _ = api.decoder(api.ours, None, X)
    refused(
        f"Autoregressive cache shape error, expected {message}",
        step,
        jnp.ones(shape),
        {},
    )
