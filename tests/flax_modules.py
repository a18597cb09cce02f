"""Modules of flax.nnx and flax.linen behind one interface, for tests of both."""

import functools

import flax.linen as nn
import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import (
    BATCH,
    FEATURES,
    GROUPED,
    HEADS,
    KEYS,
    QUERIES,
    Case,
    flax_rules,
    normal,
    scaled,
    visible,
)

import flax_mha
from flax_mha import linen

X = normal(0, BATCH, QUERIES, FEATURES)
Y = normal(1, BATCH, KEYS, FEATURES)
KEY = jax.random.key(0)


class Nnx:
    """Modules of flax.nnx: `ours` and `flax` are the classes, and `params` a dict of
    arrays.
    """

    ours = flax_mha.MultiHeadAttention
    flax = nnx.MultiHeadAttention
    attention = staticmethod(nnx.dot_product_attention)
    cases = flax_cases.CASES | {
        "causal, fewer queries": Case(
            features=(FEATURES,) * 2, arguments={"is_causal": True}
        ),
        "causal with mask": Case(
            arguments={
                "is_causal": True,
                "mask": visible(BATCH, HEADS, QUERIES, QUERIES),
            }
        ),
        "one key head": Case({"num_kv_heads": 1}),
        "groups": Case(
            GROUPED,
            features=(FEATURES,) * 2,
            arguments={"mask": visible(BATCH, 1, QUERIES, KEYS)},
        ),
        "key features": Case({"in_kv_features": 13}, features=(FEATURES, 13)),
    }

    @staticmethod
    def make(cls, params=None, **options):
        """A module that is quick to make; with `params` it has these weights."""
        given = {
            "num_heads": HEADS,
            "in_features": FEATURES,
            "decode": False,
            "rngs": nnx.Rngs(0, dropout=1),
        }
        if params:
            # They are replaced below; zeros are the quickest to make.
            given |= {"kernel_init": nnx.initializers.zeros}
        else:
            given |= {"kernel_init": scaled, "bias_init": scaled}
        module = cls(**given | options)
        nnx.update(module, params or {})
        return module

    @staticmethod
    def fresh(module, inputs, arguments):
        return module(*inputs, **arguments)

    @classmethod
    def initial(cls, kind, case):
        """All that a new module holds, from seed 0 and Flax's own initializers."""
        # `make` has initializers of its own.
        defaults = {
            "kernel_init": nnx.initializers.lecun_normal(),
            "bias_init": nnx.initializers.zeros_init(),
        }
        return nnx.state(cls.make(kind, **defaults, **case.options))

    @classmethod
    def params(cls, kind, inputs, **options):
        module = cls.make(kind, **options)
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    @classmethod
    def call(cls, kind, params, inputs, options=None, **arguments):
        module = cls.make(kind, params, **options or {})
        return module(*inputs, **arguments)

    @classmethod
    def capture(cls, kind, params, inputs, options=None, **arguments):
        """The output, and the weights that are sown."""
        module = nnx.capture(cls.make(kind, params, **options or {}), nnx.Intermediate)
        result, sown = module(*inputs, **arguments, sow_weights=True)
        return result, nnx.to_pure_dict(sown)

    @classmethod
    def grads(cls, kind, params, inputs, options, arguments, cotangent):
        """The output, and the gradients of the weights and of the inputs."""

        def loss(module, *inputs):
            result = module(*inputs, **arguments)
            return jnp.sum(result * cotangent), result

        module = cls.make(kind, params, **options)
        argnums = tuple(range(len(inputs) + 1))
        # Of the module, and of every input.
        grad = nnx.jit(nnx.grad(loss, argnums=argnums, has_aux=True))
        (weights, *arrays), result = grad(module, *inputs)
        return result, nnx.to_pure_dict(weights), arrays

    @classmethod
    def decoder(cls, kind, params, x, options=None, jit=True, **fixed):
        """A step of one token, and the variables of the cache as they are now."""
        module = cls.make(kind, params, decode=True, **options or {})
        module.init_cache(x.shape)

        def step(module, x, arguments):
            return module(x, **arguments, **fixed)

        def cache():
            state = nnx.to_pure_dict(nnx.state(module, nnx.Cache))
            return jax.tree.map(np.asarray, state)

        if jit:
            step = nnx.jit(step)
        return functools.partial(step, module), cache


class Linen:
    """The same of flax.linen."""

    ours = linen.MultiHeadDotProductAttention
    flax = nn.MultiHeadDotProductAttention
    attention = staticmethod(nn.dot_product_attention)
    cases = flax_cases.CASES | {
        "key and value features": Case(features=(FEATURES, 13, 17))
    }

    @staticmethod
    def make(cls, **options):
        given = {"num_heads": HEADS, "kernel_init": scaled, "bias_init": scaled}
        return cls(**given | options)

    @staticmethod
    def initial(kind, case):
        module = kind(HEADS, **case.options)
        return module.init(KEY, *case.inputs())

    @classmethod
    def params(cls, kind, inputs, **options):
        module = cls.make(kind, **options)
        return module.init({"params": KEY, "dropout": KEY}, *inputs)["params"]

    @staticmethod
    def fresh(module, inputs, arguments):
        keys = {"params": KEY, "dropout": KEY}
        output, _ = module.init_with_output(keys, *inputs, **arguments)
        return output

    @classmethod
    def call(cls, kind, params, inputs, options=None, **arguments):
        module = cls.make(kind, **options or {})
        rngs = {"dropout": KEY}
        return module.apply({"params": params}, *inputs, **arguments, rngs=rngs)

    @classmethod
    def capture(cls, kind, params, inputs, options=None, **arguments):
        arguments |= {"sow_weights": True, "mutable": ["intermediates"]}
        result, sown = cls.call(kind, params, inputs, options, **arguments)
        assert sown["intermediates"].keys() == {"attention_weights"}
        return result, sown["intermediates"]

    @classmethod
    def grads(cls, kind, params, inputs, options, arguments, cotangent):
        def loss(params, *inputs):
            result = cls.call(kind, params, inputs, options, **arguments)
            return jnp.sum(result * cotangent), result

        grad = jax.jit(jax.grad(loss, argnums=range(len(inputs) + 1), has_aux=True))
        (weights, *arrays), result = grad(params, *inputs)
        return result, weights, arrays

    @classmethod
    def decoder(cls, kind, params, x, options=None, jit=True, **fixed):
        module = cls.make(kind, decode=True, **options or {})
        variables = dict(module.init(KEY, x))
        variables["params"] = params or variables["params"]

        def step(variables, x, arguments):
            return module.apply(variables, x, **arguments, **fixed, mutable=["cache"])

        if jit:
            step = jax.jit(step)

        def one(x, arguments):
            result, changed = step(variables, x, arguments)
            variables.update(changed)
            return result

        def cache():
            return jax.tree.map(np.asarray, variables["cache"])

        return one, cache


APIS = {"nnx": Nnx, "linen": Linen}
EACH_API = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def each(of_nnx=None, of_linen=None, core="", cases=None):
    """One test for each of these cases, in one string, by default all; those in `core`
    are the core of both.
    """
    pairs = []
    core = core.split(", ")
    for (name, api), names in zip(APIS.items(), (of_nnx, of_linen), strict=True):
        table = cases or api.cases
        chosen = table if names is None else names.split(", ")
        for case in chosen:
            marks = [pytest.mark.core] if case in core else []
            id_ = f"{name}-{case}"
            pairs.append(pytest.param(api, table[case], id=id_, marks=marks))
    return pytest.mark.parametrize(("api", "case"), pairs)


def both(api, case, method="call", ours=None, **options):
    """Of ours and of Flax's, both with the weights that Flax's made; `ours` are options
    that Flax's lacks.
    """
    inputs = case.inputs()
    options = case.options | options
    run = getattr(api, method)
    # Flax promotes dtypes and ranks implicitly, which is an error in tests.
    with flax_rules():
        params = api.params(api.flax, inputs, **options)
        expected = run(api.flax, params, inputs, options, **case.arguments)
    of_ours = options | (ours or {})
    got = run(api.ours, params, inputs, of_ours, **case.arguments)
    return got, expected


def decode(step, x, **by_query):
    """One token a call."""
    x = np.asarray(x)
    outputs = []
    for t in range(x.shape[-2]):
        new = jnp.asarray(x[..., t : t + 1, :])
        outputs.append(step(new, flax_cases.cut(by_query, t)))
    return np.concatenate(outputs, axis=-2)
