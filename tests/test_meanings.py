"""Extreme scores, dropout, a traced scale, and the signature."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import N, T, gradients, inputs
from marks import with_core

from flax_mha import dot_product_attention

DROP = {"dropout_rate": 0.2, "dropout_rng": jax.random.key(3)}
BOTH = pytest.mark.parametrize("implementation", ["xla", "blockwise"])
pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.core
@BOTH
def test_largest_of_huge_logits_takes_the_whole_weight(implementation):
    query, key, value = inputs()
    run = gradients(implementation, {}, return_residual=True)
    output, *others = run([query * 1e4, key, value])
    assert all(np.isfinite(x).all() for x in (output, *others))

    grouped = query.reshape(2, T, 2, 3, 8)
    scores = np.einsum("btngh,bsnh->btngs", grouped, key)
    best = np.argmax(scores, -1).reshape(2, T, N)
    picked = np.take_along_axis(np.repeat(value, 3, 2), best[..., None], 1)
    certain = np.abs(output - picked).max(-1) < 1e-5
    assert certain.mean() > 0.99  # few have two keys within rounding of each other


def dropped(shape, **arguments):
    """The weights after dropout times the number of keys, [B, N, T, S]; the values are
    the identity matrix.
    """
    batch, t, n, s = shape
    query = np.zeros((batch, t, n, 1), np.float32)
    key = np.zeros((batch, s, n, 1), np.float32)
    identity = np.broadcast_to(np.eye(s, dtype=np.float32)[:, None], (batch, s, n, s))
    attend = jax.jit(functools.partial(dot_product_attention, **arguments))
    weights = np.asarray(attend(query, key, identity))
    return np.moveaxis(weights, -2, 1) * s


@pytest.mark.parametrize("rate", with_core([0.1, 0.9], 0.1))
def test_dropout_keeps_the_right_share_and_scales_it(rate):
    drop = {"dropout_rate": rate, "dropout_rng": jax.random.key(0)}
    weights = dropped((4, 256, 4, 256), **drop)
    kept = weights != 0
    # Of a mean of independent draws.
    standard_error = np.sqrt(rate * (1 - rate) / kept.size)
    assert kept.size > 1e6
    assert abs(kept.mean() - (1 - rate)) < 4 * standard_error
    np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=1e-6)


def test_neighboring_weights_are_dropped_independently():
    drop = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    kept = dropped((2, 256, 4, 256), **drop) != 0
    for axis in range(4):
        first = np.take(kept, np.arange(kept.shape[axis] - 1), axis)
        second = np.take(kept, np.arange(1, kept.shape[axis]), axis)
        # Both are kept or dropped in half of the pairs, up to 4 standard errors.
        equal = (first == second).mean()
        assert abs(equal - 0.5) < 4 * np.sqrt(0.25 / first.size)


@pytest.mark.core
@BOTH
def test_broadcast_dropout_is_shared_and_plain_dropout_is_not(implementation):
    shape = (2, 19, 3, 23)
    drop = DROP | {"implementation": implementation}

    shared = dropped(shape, **drop, broadcast_dropout=True)
    assert (shared == shared[:1, :1]).all()

    own = dropped(shape, **drop).reshape(6, 19, 23)
    for of_head in own[1:]:
        assert not (of_head == own[0]).all()


@pytest.mark.core
def test_dropout_takes_every_kind_of_key():
    new = jax.random.key(7)
    raw = jax.random.key_data(new)
    weights = functools.partial(dropped, (1, 5, 1, 7), dropout_rate=0.5)
    np.testing.assert_array_equal(weights(dropout_rng=new), weights(dropout_rng=raw))
    weights(dropout_rng=jax.random.key(7, impl="rbg"))


@pytest.mark.core
def test_key_is_ignored_without_a_rate():
    weights = dropped((1, 5, 1, 7), dropout_rng=jax.random.key(7))
    assert (weights == 1).all()


@pytest.mark.core
@BOTH
def test_traced_scale_has_a_gradient(implementation):
    arrays = inputs()

    @jax.jit
    @jax.value_and_grad
    def run(scale):
        output = dot_product_attention(
            *arrays, scale=scale, implementation=implementation
        )
        return jnp.sum(jnp.sin(output))

    step = 1e-2
    # The central difference.
    above, _ = run(np.float32(0.3 + step))
    below, _ = run(np.float32(0.3 - step))
    _, gradient = run(np.float32(0.3))
    np.testing.assert_allclose(gradient, (above - below) / (2 * step), rtol=1e-2)


@pytest.mark.core
def test_signature_extends_that_of_jax_nn():
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    assert [*ours][:5] == [*theirs][:5] == ["query", "key", "value", "bias", "mask"]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default
