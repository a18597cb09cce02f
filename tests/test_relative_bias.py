"""`score_mod` of the constructor, above all a module with parameters such as
`recipes.RelativeBias`: it is trained, copied, saved and used like any other layer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx

import flax_mha
from flax_mha import recipes
from flax_mha.recipes import RelativeBias

B = 2
T = 9
D = 16
N = 4
rng = np.random.default_rng(0)
X = np.float32(rng.standard_normal((B, T, D)))
TABLE = np.float32(rng.standard_normal((8, N)))
SMALL = {"num_buckets": 8, "max_distance": 6}
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def filled(**options):
    bias = RelativeBias(N, **SMALL | options)
    bias.table[...] = jnp.asarray(TABLE)
    return bias


def attention(**options):
    given = {"use_bias": False, "decode": False, "rngs": nnx.Rngs(0)}
    return flax_mha.MultiHeadAttention(N, D, **given | options)


def of_function(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).astype(score.dtype)


def tables(state):
    """The leaves of the tables in a state, by path."""
    flat = nnx.to_flat_state(state)
    return {path: leaf for path, leaf in flat if path[-1] == "table"}


def learned(module, x):
    """The output, and the gradient of all parameters."""

    def loss(module):
        output = module(x)
        return jnp.sum(output**2), output

    gradient, output = nnx.grad(loss, has_aux=True)(module)
    return output, gradient


learned = nnx.jit(learned)


def by_call(table, x, **options):
    """What a call with `t5_bias` returns, and the gradient of its table."""

    def loss(table):
        mod = recipes.t5_bias(table, 6)["score_mod"]
        output = attention()(x, score_mod=mod, **options)
        return jnp.sum(output**2), output

    gradient, output = jax.grad(loss, has_aux=True)(jnp.asarray(table))
    return output, gradient


@pytest.mark.core
def test_a_module_of_the_constructor_is_trained():
    module = attention(score_mod=filled())

    output, gradient = learned(module, X)

    want, want_gradient = by_call(TABLE, X)
    assert_close(output, want)
    assert [*tables(nnx.state(module, nnx.Param))] == [("score_mod", "table")]
    assert_close(gradient["score_mod"]["table"][...], want_gradient)
    assert np.abs(want_gradient).max() > 0.1


def test_a_function_of_the_constructor_is_the_default_of_the_call():
    module = attention(score_mod=of_function)

    output, _ = learned(module, X)
    assert_close(output, attention()(X, score_mod=of_function))
    assert_close(module(X, score_mod=lambda score, *_: score), attention()(X))
    assert_close(module(X, score_mod=filled()), attention(score_mod=filled())(X))


def test_copies_have_their_own_table():
    module = attention(score_mod=filled())
    want = module(X)

    copies = [nnx.clone(module), nnx.merge(*nnx.split(module))]
    copies.append(nnx.view(module, decode=False))
    for copy in copies:
        assert_close(copy(X), want)
    copies[0].score_mod.table[...] *= 0.0

    assert_close(module(X), want)
    assert_close(copies[0](X), attention()(X))
    module.score_mod = None
    assert_close(module(X), attention()(X))
    module.score_mod = filled()
    assert_close(module(X), want)


@pytest.mark.core
def test_decoding_and_explaining_use_the_module():
    module = attention(score_mod=filled())
    want = module(X, is_causal=True)
    decoder = nnx.view(module, decode=True, batch_size=B, max_length=T)
    step = nnx.jit(lambda module, x: module(x))

    parts = [step(decoder, X[:, :4])]
    parts += [step(decoder, X[:, i : i + 1]) for i in range(4, T)]

    assert_close(jnp.concatenate(parts, axis=1), want)
    refusals = module.explain(X).refusals["splash"]
    assert any("score_mod" in reason for reason in refusals)


def test_a_module_for_other_heads_is_refused():
    module = attention(score_mod=RelativeBias(2 * N))
    message = f"RelativeBias was created for {2 * N} heads, but the call has {N}"
    refused(message, module, X)


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, *biases):
        layers = [
            attention(score_mod=bias, rngs=nnx.Rngs(i)) for i, bias in enumerate(biases)
        ]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x, is_causal=True)
        return x


@pytest.mark.core
def test_layers_that_share_a_module_have_one_table_and_add_its_gradients():
    bias = filled()
    shared = Model(bias, bias)

    output, gradient = learned(shared, X)

    want, parts = learned(Model(filled(), filled()), X)
    assert_close(output, want)
    assert len(tables(nnx.state(shared, nnx.Param))) == 1
    [got] = tables(gradient).values()
    each = [leaf[...] for leaf in tables(parts).values()]
    assert len(each) == 2
    assert_close(got[...], sum(each))
    copy = nnx.clone(shared)
    assert copy.layers[0].score_mod is copy.layers[1].score_mod


def test_layers_are_stacked_and_scanned():
    def make(key):
        bias = RelativeBias(N, **SMALL)
        bias.table[...] = jax.random.normal(key, bias.table.shape)
        return attention(score_mod=bias, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 2)
    stacked = nnx.vmap(make)(keys)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return x + layer(x, is_causal=True)

    @nnx.grad
    def gradient(stacked):
        return jnp.sum(forward(stacked, X) ** 2)

    want = X
    for key in keys:
        want = want + make(key)(want, is_causal=True)
    assert_close(forward(stacked, X), want)
    of_tables = gradient(stacked)["score_mod"]["table"][...]
    assert of_tables.shape == (2, 8, N)
    assert (np.abs(of_tables).max((1, 2)) > 1e-3).all()


def test_score_mod_must_be_set_in_one_place():
    preset = functools.partial(flax_mha.attention_fn, score_mod=of_function)
    message = "score_mod must be set .*, but got both"
    refused(message, attention, score_mod=filled(), attention_fn=preset)
    module = attention(attention_fn=preset)
    module.score_mod = nnx.data(filled())
    refused(message, module, X)
    refused(
        "score_mod must be a function .* or None, but got 3", attention, score_mod=3
    )


def test_other_functions_and_stored_keys_take_no_score_mod():
    foreign = attention(score_mod=filled(), attention_fn=nnx.dot_product_attention)
    with pytest.raises(TypeError, match="score_mod"):
        foreign(X)

    module = attention(score_mod=filled(), decode=True)
    module(X, X, X + 1, store_keys=True)
    refused("do not track positions, so score_mod cannot be used", module, X)


class Heads(nnx.Module):
    """Both kinds of functions, with a parameter."""

    def __init__(self):
        self.weight = nnx.Param(jnp.array(0.5))

    def __call__(self, query, key, value):
        return query, key, value * self.weight

    def score(self, score, b, h, q_idx, kv_idx):
        return score * self.weight


@pytest.mark.core
def test_modules_whose_parameters_would_be_hidden_are_refused():
    """Flax finds the parameters of a module, not those of what calls it."""
    heads = Heads()
    hidden = "must be the nnx.Module itself, .* would not be trained"
    bound = functools.partial(filled())
    refused(f"process_heads {hidden}", attention, process_heads=heads.__call__)
    refused(f"score_mod {hidden}", attention, score_mod=heads.score)
    refused(f"score_mod {hidden}", attention, score_mod=bound)
    preset = functools.partial(flax_mha.attention_fn, score_mod=filled())
    message = "attention_fn must not preset a module .* pass score_mod to the"
    refused(message, attention, attention_fn=preset)
    # A call hides nothing.
    got = attention()(X, score_mod=heads.score, process_heads=heads.__call__)
    assert got.shape == X.shape
