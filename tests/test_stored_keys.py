"""Cross-attention while decoding: the encoder's keys, values and lengths are stored once, by `store_keys=True`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mha import CausalMask, MultiHeadAttention, linen
from flax_mha.rope import RoPE

X = jax.random.normal(jax.random.key(0), (2, 7, 12))
ENCODED = jax.random.normal(jax.random.key(1), (2, 11, 10))
LENGTHS = jnp.array([11, 4])
SPLITS = (slice(0, 1), slice(1, 3), slice(3, 7))


def nnx_module(**options):
    given = {"in_kv_features": 10, "num_kv_heads": 1, "decode": True, "rngs": nnx.Rngs(0)}
    return MultiHeadAttention(2, 12, **(given | options))


class Linen:
    """A linen module with its variables, called like one of nnx."""

    def __init__(self, **options):
        given = {"num_heads": 2, "num_kv_heads": 1, "decode": True}
        self.module = linen.MultiHeadDotProductAttention(**(given | options))
        positions = (jnp.arange(1), jnp.arange(11)) if "rope" in options else None
        self.variables = self.module.init(jax.random.key(0), X[:, :1], ENCODED, positions=positions, store_keys=True)

    def __call__(self, *inputs, decode=True, **arguments):
        if not decode:
            return self.module.clone(decode=False).apply(self.variables, *inputs, **arguments)
        output, cache = self.module.apply(self.variables, *inputs, **arguments, mutable=["cache"])
        self.variables = self.variables | cache
        return output


BOTH = pytest.mark.parametrize("make", [nnx_module, Linen], ids=["nnx", "linen"])


def decoded(module, first, positions=None):
    """The outputs of a call that stores the keys, and of calls that use them."""
    outputs = []
    for number, part in enumerate(SPLITS):
        given = {} if positions is None else {"positions": positions[part]}
        if number == 0:
            if positions is not None:
                given = {"positions": (positions[part], jnp.arange(11))}
            outputs.append(module(X[:, part], ENCODED, store_keys=True, **first, **given))
        else:
            outputs.append(module(X[:, part], **given))
    return np.concatenate(outputs, 1)


@pytest.mark.core
@BOTH
def test_stored_keys_equal_those_of_the_inputs(make):
    module = make()
    want = module(X, ENCODED, decode=False, lengths=(None, LENGTHS))
    for _ in range(2):  # stored keys can be stored anew
        np.testing.assert_allclose(decoded(module, {"lengths": (None, LENGTHS)}), want, rtol=0, atol=1e-6)


@BOTH
def test_without_lengths_all_keys_are_used_and_no_call_adds_any(make):
    module = make()
    want = module(X, ENCODED, decode=False)
    np.testing.assert_allclose(decoded(module, {}), want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(module(X, is_causal=True), want, rtol=0, atol=1e-6)


@BOTH
def test_rotary_positions(make):
    module, positions = make(rope=RoPE()), jnp.arange(100, 107)
    want = module(X, ENCODED, decode=False, positions=(positions, jnp.arange(11)))
    np.testing.assert_allclose(decoded(module, {}, positions), want, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="positions must be one array, of the queries, where rope is used with stored"):
        module(X[:, :1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx_module(num_kv_heads=2, attention_fn=nnx.dot_product_attention),
        lambda: Linen(num_kv_heads=2, attention_fn=nn.dot_product_attention),
    ],
    ids=["nnx", "linen"],
)
def test_another_attention_function_gets_the_lengths_as_a_mask(make):
    module = make()
    shown = (jnp.arange(11)[None] < LENGTHS[:, None])[:, None, None]
    want = module(X, ENCODED, decode=False, mask=shown)
    module(X[:, :1], ENCODED, store_keys=True)
    if isinstance(module, Linen):
        module.variables["cache"]["cached_lengths"] = LENGTHS
    else:
        module.cached_lengths[...] = LENGTHS
    np.testing.assert_allclose(module(X), want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(module(X, mask=jnp.ones((2, 1, 7, 11), bool)), want, rtol=0, atol=1e-6)


@pytest.mark.core
@BOTH
def test_what_does_not_fit_is_refused(make):
    module = make()
    if not isinstance(module, Linen):
        module(X, ENCODED, store_keys=True)
    for inputs, arguments, expected in (
        ([X, ENCODED], {}, "inputs_k must be None where keys are stored already.*store_keys=True"),
        ([X], {"lengths": LENGTHS}, "lengths must be None where keys are stored already"),
        ([X], {"store_keys": True}, "inputs_k must be given with store_keys, but got None"),
        ([X, ENCODED], {"store_keys": True, "decode": False}, "store_keys must be False where nothing is decoded"),
        ([X, ENCODED], {"store_keys": 1}, "store_keys must be True or False"),
    ):
        with pytest.raises(ValueError, match=expected):
            module(*inputs, **arguments)


@BOTH
@pytest.mark.parametrize("name", ["mask", "score_mod", "local_window_size"])
def test_what_depends_on_positions_is_refused(make, name):
    """A later call begins at an unknown position; counted from 0, its answer would be silently wrong."""
    window = {"local_window_size": 2} if name == "local_window_size" else {}
    options = {"mask": CausalMask(), "score_mod": lambda score, b, h, q_idx, kv_idx: score}
    arguments = {} if window else {name: options[name]}
    module = make(**window)
    module(X[:, :1], ENCODED, store_keys=True, **arguments)
    with pytest.raises(ValueError, match=f"{name} must not depend on positions where keys are stored"):
        module(X[:, 1:2], **arguments)


def test_making_a_cache_forgets_the_stored_keys():
    module = nnx_module(in_kv_features=12)
    module(X, X + 1, store_keys=True)
    module.init_cache(X.shape)
    assert module.cached_lengths is None
    np.testing.assert_allclose(module(X), module(X, decode=False, is_causal=True), rtol=0, atol=1e-6)


def test_steps_are_pure_under_jit():
    module = nnx_module()
    module(X[:, :1], ENCODED, store_keys=True)
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)
    output = jax.jit(lambda cache, rest, x: nnx.merge(graph, cache, rest)(x))(cache, rest, X)
    np.testing.assert_allclose(output, module(X), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [nnx_module, Linen])
def test_lengths_of_64_bits_are_kept(make):
    module = make()
    stored = module(X[:, :1], ENCODED, lengths=(None, np.array([2**40, 4])), store_keys=True)
    np.testing.assert_allclose(module(X[:, :1]), stored, rtol=0, atol=1e-6)


def test_one_length_without_a_batch_axis():
    module = nnx_module()
    stored = module(X[0, :1], ENCODED[0], lengths=(None, np.array([4])), store_keys=True)
    np.testing.assert_allclose(module(X[0, :1]), stored, rtol=0, atol=1e-6)
    assert module.cached_lengths.shape == ()
