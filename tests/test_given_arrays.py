"""Modules are given padding, masks of numbers, and restored state."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import core, with_core_tuples

import flax_mha
from flax_mha import Norm, linen
from flax_mha.rope import RoPE

B = 2
T = 6
S = 5
D = 16
N = 4
draw = np.random.default_rng(0)
X = draw.standard_normal((B, T, D)).astype(np.float32)
Y = draw.standard_normal((B, S, D)).astype(np.float32)
LENGTHS = jnp.array([6, 4])
KEY_LENGTHS = jnp.array([2, 5])
# Which tokens are no padding.
INSIDE = (jnp.arange(T)[None] < LENGTHS[:, None])[..., None]
KEYS_INSIDE = (jnp.arange(S)[None] < KEY_LENGTHS[:, None])[..., None]
SIZES = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
WINDOWED = {"local_window_size": (2, 0)}
LATENT = functools.partial(flax_mha.MultiHeadLatentAttention, **SIZES)


def module_of(api, kind, **options):
    """Returns the parameters of a module, and a function of parameters, inputs and
    keyword arguments that calls it.
    """
    options = {"num_heads": N} | options
    if api == "linen":
        layer = linen.MultiHeadDotProductAttention(**options)
        return layer.init(jax.random.key(0), X), layer.apply

    given = {"decode": False}
    if kind == "prompt":
        layer = decoding(20, per_row=True, gate=True)
        given = {}
    elif kind == "latent":
        layer = LATENT(in_features=D, rngs=nnx.Rngs(0), **options)
    else:
        layer = flax_mha.MultiHeadAttention(in_features=D, rngs=nnx.Rngs(0), **options)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def call(params, *inputs, **arguments):
        # A copy, whose cache the call may change.
        state = jax.tree.map(lambda x: x, rest)
        return nnx.merge(graph, params, state)(*inputs, **given, **arguments)

    return params, call


def decoding(
    slots, cls=flax_mha.MultiHeadAttention, dtype=None, per_row=False, **options
):
    """A module of nnx with an empty cache."""
    layer = cls(N, D, decode=True, rngs=nnx.Rngs(0), **options)
    layer.init_cache((B, slots, D), dtype, per_row=per_row)
    return layer


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


KINDS = {
    "plain": {},
    "gate": {"gate": True, "sinks": True},
    "norms": {"normalize_qk": Norm("layer", bias=True), "rope": RoPE()},
    "norms after": {
        "normalize_qk": Norm("rms", after_rope=True),
        "rope": RoPE(),
        "gate": True,
    },
    "latent": {"q_lora_rank": 8, "rope": RoPE()},
    "keys": {},  # of cross-attention, which have lengths of their own
}
PADDED = [*itertools.product(("nnx", "linen"), KINDS), ("nnx", "prompt")]
PADDED.remove(("linen", "latent"))


@pytest.mark.parametrize(("api", "kind"), with_core_tuples(PADDED, ("linen", "gate")))
def test_padding_never_affects_gradients(api, kind):
    """With NaN in the padding, gradients of parameters and inputs are the same as with
    zeros.
    """
    params, call = module_of(api, kind, **KINDS.get(kind, {}))

    @jax.jit
    @jax.value_and_grad
    def loss(given, lengths):
        output = call(*given, lengths=lengths, is_causal=True)
        return jnp.where(INSIDE, output, 0).var()

    def padded(filling):
        queries = jnp.where(INSIDE, X, filling)
        if kind != "keys":
            return loss((params, queries), LENGTHS)
        keys = jnp.where(KEYS_INSIDE, Y, filling)
        return loss((params, queries, keys), (LENGTHS, KEY_LENGTHS))

    for filling in jnp.float32([np.nan, np.inf]):
        got = padded(filling)
        assert_same(got, padded(jnp.float32(0)))
        _, (_, of_queries, *_) = got
        assert (of_queries[1, 4:] == 0).all()


@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("inputs", "lengths", "most"),
    [
        ([X], jnp.array([6, 7]), 6),
        ([X, Y], (None, jnp.array([5, 6])), 5),
        ([X], 7, 6),
    ],
    ids=["array", "of keys", "number"],
)
def test_lengths_of_a_module_must_fit_the_inputs(api, inputs, lengths, most):
    params, call = module_of(api, "plain")
    message = f"lengths must be at most {most}, the length of the array, but got"
    refused(message, call, params, *inputs, lengths=lengths)


@pytest.mark.core
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_of_the_function_must_fit_its_arrays(name):
    x = jnp.ones((B, T, N, 4))
    attend = functools.partial(flax_mha.dot_product_attention, x, x, x)
    message = f"{name} must be at most 6, the length of the array, but got 7"
    refused(message, attend, **{name: jnp.array([7, 3])})
    # A slice, which has offsets, belongs to longer sequences.
    for offset in (0, 6):
        longer = {name: jnp.array([12, 3])}
        attend(query_offset=offset, key_value_offset=offset, **longer)


@pytest.mark.core
def test_lengths_of_a_mask_object_may_be_longer_than_the_arrays():
    x = jnp.ones((B, T, N, 4))
    flax_mha.dot_product_attention(x, x, x, mask=flax_mha.LengthMask(100))


ADDITIVE = jnp.triu(jnp.ones((T, T)), 1)


def taking_a_mask(caller):
    """A function of a mask."""
    if caller == "attention_fn":
        x = jnp.ones((B, T, N, 4))
        return lambda mask: flax_mha.attention_fn(x, x, x, mask=mask)
    if caller == "decode":
        graph, state = nnx.split(decoding(T))

        def call(mask):
            # A copy, whose cache the call may change.
            layer = nnx.merge(graph, jax.tree.map(lambda x: x, state))
            return layer(X, mask=mask)

        return call
    params, apply = module_of(caller, "plain")
    return lambda mask: apply(params, X, mask=mask)


@pytest.mark.parametrize(
    "caller", [core("nnx"), core("linen"), core("attention_fn"), "decode"]
)
def test_a_mask_of_other_numbers_gives_nan(caller):
    """Its values are refused if they are known; under `jit`, an additive mask would
    otherwise be inverted.
    """
    call = taking_a_mask(caller)
    jitted = jax.jit(call)
    for additive in (ADDITIVE * -1e9, jnp.where(ADDITIVE == 1, -jnp.inf, 0.0)):
        refused("mask must be bool, or contain only 0 and 1", call, additive)
        assert jnp.isnan(jitted(additive)).all()
    # 0 and 1 of any dtype are a mask.
    for dtype in (jnp.float32, jnp.int32):
        mask = (1 - ADDITIVE).astype(dtype)
        want = call(mask.astype(bool))
        for got in (call(mask), jitted(mask)):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def read_only(x):
    x = np.array(x)
    x.flags.writeable = False
    return x


OF_DECODING = {
    "plain": {},
    "latent": {"cls": LATENT},
    "int8": {"dtype": jnp.int8},
    "ring": WINDOWED,
}
RESTORED = list(itertools.product(OF_DECODING, (np.array, read_only)))


@pytest.mark.parametrize(
    ("kind", "convert"), with_core_tuples(RESTORED, ("plain", np.array))
)
def test_restored_state_is_not_written_into(kind, convert):
    """Decoding from NumPy arrays leaves them as they are; two modules that were updated
    from them share nothing.
    """
    options = {"slots": 80, "dropout_rate": 0.5, "deterministic": False}
    options |= OF_DECODING[kind]

    def three_tokens(layer):
        return [layer(X[:, i : i + 1]) for i in range(3)]

    layer = decoding(**options)
    layer(X)
    stored = nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngKey)))
    host = jax.tree.map(convert, stored)
    outputs = []
    for _ in range(2):
        restored = decoding(**options)
        nnx.update(restored, host)
        outputs.append(three_tokens(restored))
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_array_equal(outputs[0], three_tokens(layer))
    assert_same(host, jax.tree.map(np.array, stored))


@pytest.mark.parametrize("kind", ["plain", "stored"])
def test_restored_variables_of_linen_are_not_written_into(kind):
    layer = linen.MultiHeadDotProductAttention(
        num_heads=N, decode=True, cache_dtype=jnp.int8
    )
    variables = layer.init(jax.random.key(0), X)
    inputs = (X, Y) if kind == "stored" else (X[:, :2],)
    _, stored = layer.apply(
        variables, *inputs, store_keys=kind == "stored", mutable="cache"
    )
    # NumPy raises an error if one is written into.
    host = jax.tree.map(read_only, variables | stored)
    before = jax.tree.map(np.copy, host)
    got, _ = layer.apply(host, X[:, 2:3], mutable="cache")
    want, _ = layer.apply(variables | stored, X[:, 2:3], mutable="cache")
    assert_same((got, host), (want, before))


@pytest.mark.core
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_cross_attention_is_not_decoded(api):
    """A cache would take the encoder's output for the decoder's own tokens; one token a
    call is Flax's own use.
    """
    if api == "nnx":
        call = decoding(T)
    else:
        layer = linen.MultiHeadDotProductAttention(num_heads=N, decode=True)
        variables = layer.init(jax.random.key(0), X)

        def call(*inputs):
            output, _ = layer.apply(variables, *inputs, mutable="cache")
            return output

    message = r"Autoregressive cache shape error.*store_keys=True.*decode=False"
    refused(message, call, X, np.array(X))
    refused(message, call, X[:, :1], Y)
    refused(message, call, X, Y[:, :1])
    refused(message, call, X[:, :3], Y[:, :3])
    token = X[:, :1]
    assert call(token, np.array(token)).shape == token.shape
    assert call(token, token).shape == token.shape
