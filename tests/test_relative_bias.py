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
from flax_mha import convert, recipes
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


CONFIG = {"model_type": "t5", "d_model": D, "d_kv": 6, "num_heads": N}
CONFIG |= {"num_layers": 2, "relative_attention_max_distance": 6}


def t5_weights(*tables_at, stack="encoder"):
    """Two layers, with tables in some of them."""
    weights = {}
    for i in range(2):
        layer = f"{stack}.block.{i}.layer.0.SelfAttention."
        for name in "qkv":
            shape = (N * 6, D)
            array = np.float32(rng.standard_normal(shape)) / 4
            weights[f"{layer}{name}.weight"] = array
        weights[f"{layer}o.weight"] = np.float32(rng.standard_normal((D, N * 6)))
        if i in tables_at:
            weights[f"{layer}relative_attention_bias.weight"] = TABLE + i
    return weights


@pytest.mark.core
@pytest.mark.parametrize(
    ("model_type", "tables_at", "layer", "stack"),
    [
        ("t5", [0], 1, "encoder"),
        ("mt5", [0], 0, "decoder"),
        ("umt5", [0, 1], 1, "encoder"),
    ],
)
def test_from_hf_loads_the_table_as_a_parameter(model_type, tables_at, layer, stack):
    weights = t5_weights(*tables_at, stack=stack)
    # An unused table of older files, and the other part's.
    others = {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "relative_attention_bias.weight",
    }
    weights = dict.fromkeys(others, TABLE * 0) | weights

    config = CONFIG | {"model_type": model_type}
    module = convert.from_hf(config, weights, layer, f"{stack}.")

    table = module.score_mod.table
    added = 1 if model_type == "umt5" else 0
    assert isinstance(table, nnx.Param)
    np.testing.assert_array_equal(table[...], TABLE + added)
    assert module.score_mod.bidirectional == (stack == "encoder")
    mod = recipes.t5_bias(jnp.asarray(TABLE + added), 6, stack == "encoder")
    assert_close(module(X), module(X, score_mod=mod["score_mod"]))
    _, gradient = learned(module, X)
    assert np.abs(gradient["score_mod"]["table"][...]).max() > 1e-3


def test_to_torch_and_load_torch_keep_the_table():
    weights = t5_weights(0)
    prefix = "encoder.block.0.layer.0.SelfAttention."
    module = convert.from_hf(CONFIG, weights, 0)

    back = convert.to_torch(module, "hf_t5")

    assert len(back) == 5
    for key, array in back.items():
        np.testing.assert_array_equal(array, weights[prefix + key])
    options = convert.describe(CONFIG) | {"decode": False, "rngs": nnx.Rngs(1)}
    bias = RelativeBias(N, **SMALL, bidirectional=True)
    again = flax_mha.MultiHeadAttention(**options, score_mod=bias)
    convert.load_torch(again, back)
    assert_close(again(X), module(X))
    # Later layers use the table of the first.
    again.score_mod.table[...] *= 0.0
    convert.load_torch(again, weights, "encoder.block.1.layer.0.SelfAttention")
    assert_close(again(X), convert.from_hf(CONFIG, weights, 1)(X))


def test_a_table_that_does_not_fit_is_refused():
    weights = t5_weights(0)
    prefix = "encoder.block.0.layer.0.SelfAttention."
    options = convert.describe(CONFIG) | {"decode": False, "rngs": nnx.Rngs(1)}

    def load(score_mod, weights=weights, prefix=prefix):
        module = flax_mha.MultiHeadAttention(**options, score_mod=score_mod)
        convert.load_torch(module, weights, prefix)

    larger = RelativeBias(N)
    lacking = t5_weights()
    for message, *arguments in (
        (r"score_mod\.table is missing from the module; .*RelativeBias", None),
        (r"score_mod\.table must have shape \(32, 4\), but got", larger),
        (r"score_mod\.table is missing from state_dict", larger, lacking),
    ):
        with pytest.raises(ValueError, match=message):
            load(*arguments)
    refused(
        r"state_dict must contain .*relative_attention_bias\.weight.* whole model",
        convert.from_hf,
        CONFIG,
        lacking,
    )
    message = r"state_dict must not contain relative_attention_bias\.weight.*t5_bias"
    refused(message, convert.from_torch, weights, N, prefix=prefix)


def test_only_families_with_a_table_get_one():
    """A text encoder of another model, beside a layer of Llama; and a stray table."""
    config = {"model_type": "llama", "hidden_size": D, "num_attention_heads": N}
    llama = {
        f"model.layers.0.self_attn.{name}_proj.weight": np.ones((D, D), np.float32)
        for name in "qkvo"
    }

    module = convert.from_hf(config, t5_weights(0) | llama, prefix="model.")

    assert module.score_mod is None
    key = "model.layers.0.self_attn.relative_attention_bias.weight"
    with pytest.raises(ValueError, match=r"extra .*relative_attention_bias"):
        convert.from_hf(config, llama | {key: TABLE})


def test_a_learned_bias_added_to_another_model_is_left_alone():
    config = {"model_type": "gpt2", "n_embd": D, "n_head": N}
    bias = filled()
    module = flax_mha.MultiHeadAttention(
        **convert.describe(config), score_mod=bias, decode=False, rngs=nnx.Rngs(0)
    )
    shapes = {"c_attn.weight": (D, 3 * D), "c_attn.bias": 3 * D}
    shapes |= {"c_proj.weight": (D, D), "c_proj.bias": D}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}

    convert.load_torch(module, weights)

    np.testing.assert_array_equal(bias.table[...], TABLE)
    refused("has no score_mod/table", convert.to_torch, module, "hf_gpt2")


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
