"""Constructors and calls of flax_mha's modules take the arguments of Flax's in the same
order, with the same effect.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

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
    found = dict(inspect.signature(function).parameters)
    found.pop("self", None)
    found.pop("parent", None)
    return found


def of_flax(function):
    """Each API with each argument of a function of Flax's class, and its default."""
    cases = []
    for api in APIS.values():
        for x in parameters(function(api)).values():
            name = f"{api.__name__}-{x.name}"
            cases.append(pytest.param(api, x.name, x.default, id=name))
    return pytest.mark.parametrize(("api", "name", "default"), cases)


class Order(NamedTuple):
    """Two signatures, and the arguments whose defaults differ."""

    ours: Callable
    flax: Callable
    differ: set


# Our attention functions broadcast no dropout by default.
OF_LINEN = {"attention_fn", "broadcast_dropout"}
ORDERS = {
    "nnx": Order(Nnx.ours.__init__, Nnx.flax.__init__, OF_LINEN),
    # None means causal while decoding, as in Flax, where False does not say otherwise.
    "nnx, the call": Order(Nnx.ours.__call__, Nnx.flax.__call__, {"is_causal"}),
    "MultiHeadAttention": Order(
        linen.MultiHeadAttention, nn.MultiHeadAttention, OF_LINEN
    ),
    "SelfAttention": Order(linen.SelfAttention, nn.SelfAttention, OF_LINEN),
    "MultiHeadDotProductAttention": Order(Linen.ours, Linen.flax, OF_LINEN),
}


def positional(arguments):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [n for n, x in arguments.items() if x.kind == kind and n != "name"]


@pytest.mark.core
@pytest.mark.parametrize("name", ORDERS)
def test_order_and_defaults_equal_those_of_flax(name):
    """New arguments of nnx are keywords; in linen they follow Flax's."""
    ours = parameters(ORDERS[name].ours)
    flax = parameters(ORDERS[name].flax)

    theirs = positional(flax)
    mine = positional(ours)
    new = mine[len(theirs) :]
    assert mine[: len(theirs)] == theirs
    assert "nnx" not in name or new == []
    assert all(ours[name].default in (None, False) for name in new)

    shared = ours.keys() & flax.keys()
    differ = {name for name in shared if ours[name].default != flax[name].default}
    assert differ == ORDERS[name].differ
    if "broadcast_dropout" in differ:
        assert not ours["broadcast_dropout"].default


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


def constructor(api):
    # Classes of linen are dataclasses.
    if api is Linen:
        return api.flax
    return api.flax.__init__


@of_flax(constructor)
def test_constructor_takes_the_arguments_of_flax(api, name, default):
    # Only one argument at a time differs from the defaults.
    options = {"deterministic": True}
    if name in EINSUMS:
        # Flax takes both or neither.
        options |= EINSUMS
    if name.startswith(("query_ln", "key_ln", "ln_")):
        options["normalize_qk"] = True
    values = VALUES | {"attention_fn": api.attention, "decode": api is Linen}
    if name in values or default is not inspect.Parameter.empty:
        options[name] = values.get(name, default)
    with flax_rules():  # for float16 parameters next to float32 inputs
        ours = api.make(api.ours, **options)
        flax = api.make(api.flax, **options)
        state, output = state_and_output(ours)
        expected_state, expected = state_and_output(flax)
    assert_same(state, expected_state)
    assert_close(output, expected)
    if name not in ("attention_fn", "broadcast_dropout", "rngs"):
        assert getattr(ours, name, "absent") == getattr(flax, name, "absent")


CALL = {
    "inputs_k": Y,
    "inputs_v": normal(2, BATCH, KEYS, FEATURES),
    "inputs_kv": Y,
    "deterministic": True,
    "mask": np.tri(QUERIES, dtype=bool)[None, None],
    "is_causal": True,
    "dropout_rng": KEY,
    "rngs": nnx.Rngs(2),
}


@of_flax(lambda api: api.flax.__call__)
def test_call_takes_the_arguments_of_flax(api, name, default):
    arguments = {}
    if name != "inputs_q":
        arguments[name] = CALL.get(name, default)
    if name == "inputs_v":
        arguments["inputs_k"] = Y
    case = Case(arguments=arguments)

    if name == "inputs_kv":
        message = "The inputs_kv arg will be deprecated soon"
        with pytest.warns(DeprecationWarning, match=message) as warnings:
            results = both(api, case)
        assert len(warnings) == 2  # of Flax and of ours
    else:
        results = both(api, case)
    assert_close(*results)


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
    message = f"Autoregressive cache shape error, expected {message}"
    refused(message, step, jnp.ones(shape), {})
