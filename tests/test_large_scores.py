"""Scores of any size, as additive masks make them: all results and derivatives are
those of a float64 softmax of the same float32 scores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from marks import with_core_tuples

from flax_mha import dot_product_attention

B = 1
T = 32
N = 8
K = 2
H = 4
LOWEST = np.finfo(np.float32).min
SIZES = np.float32([0, 1e4, -1e4, 1e6, -1e6, -1e9, -1e30, LOWEST])


@functools.cache
def arrays():
    """Arrays with gradients, and their tangents. The first rows of the bias each have
    one of SIZES for all keys; the others have it for some keys, and 0 for the rest.
    """
    rng = np.random.default_rng(0)

    def exact(*shape):
        # Products of these are exact, whatever the order of their sum.
        return rng.integers(-8, 9, shape).astype(np.float32) / 4

    rows = np.tile(SIZES, T // len(SIZES))[:, None]
    is_kept = (np.arange(T)[:, None] < T // 2) | (rng.random((N, T, T)) < 0.5)
    x = {
        "query": exact(B, T, N, H),
        "key": exact(B, T, K, H),
        "value": exact(B, T, K, H),
        "bias": np.where(is_kept, rows, np.float32(0))[None],
        "sinks": SIZES,
    }
    tangents = {name: rng.standard_normal(a.shape) for name, a in x.items()}
    tangents = {name: np.float32(a) for name, a in tangents.items()}
    return x, tangents


ARGUMENTS = {
    "full": {},
    "causal": {"is_causal": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "score_mod": {
        "score_mod": lambda score, *_: score / 4,
        "local_window_size": (9, 9),
    },
}


def float64_attention(x, arguments):
    """Output and log-sum-exp from scores that are rounded to float32, but have the
    derivatives of unrounded ones.
    """

    def scores_of(products, bias):
        cap = arguments.get("logits_soft_cap")
        if cap is not None:
            products = cap * jnp.tanh(products / cap)
        if "score_mod" in arguments:
            products = products / 4
        return products + bias

    key, value = (jnp.repeat(x[name], N // K, 2) for name in ("key", "value"))
    products = jnp.einsum("btnh,bsnh->bnts", x["query"], key) / H**0.5
    scores = scores_of(products, x["bias"])
    narrow = scores_of(products.astype(jnp.float32), x["bias"].astype(jnp.float32))
    rounded = narrow.astype(jnp.float64)
    scores = scores + jax.lax.stop_gradient(rounded - scores)

    distance = np.arange(T) - np.arange(T)[:, None]
    if "is_causal" in arguments:
        scores = jnp.where(distance <= 0, scores, -jnp.inf)
    if "local_window_size" in arguments:
        scores = jnp.where(abs(distance) <= 9, scores, -jnp.inf)
    if "sinks" in x:
        sinks = jnp.broadcast_to(x["sinks"][:, None, None], (B, N, T, 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores)[..., :T]
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value), jnp.swapaxes(lse, 1, 2)


def loss_of(attend):
    def loss(x):
        output, *lse = attend(x)
        total = jnp.sin(3 * output).sum()
        for each in lse:
            weights = jnp.cos(jnp.arange(each.size, dtype=each.dtype))
            total += (each * weights.reshape(each.shape)).sum()
        return total

    return loss


def gradient(attend):
    """Makes a function of arrays and tangents, which it ignores."""

    def answers(x, _):
        return {"results": attend(x), "gradient": jax.grad(loss_of(attend))(x)}

    return answers


def derivatives(attend):
    """Makes a function of arrays and tangents: results, gradient, and tangents of
    both; and the gradient of a gradient.
    """
    gradient_of = jax.grad(loss_of(attend))

    def squares(x):
        return sum((each**2).sum() for each in jax.tree.leaves(gradient_of(x)))

    def answers(x, tangents):
        results, moved = jax.jvp(attend, (x,), (tangents,))
        first, second = jax.jvp(gradient_of, (x,), (tangents,))
        return {
            "results": results,
            "tangents": moved,
            "gradient": first,
            "Hessian product": second,
            "gradient of gradient": jax.grad(squares)(x),
        }

    return answers


@functools.cache
def expected(derivatives, name, has_sinks, has_lse=True):
    """The answers of `gradient` or `derivatives`, with or without the log-sum-exp."""

    def attend(x):
        return float64_attention(x, ARGUMENTS[name])[: 1 + has_lse]

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        x, tangents = jax.tree.map(np.float64, given(has_sinks))
        return jax.device_get(jax.jit(derivatives(attend))(x, tangents))


def given(has_sinks):
    both = arrays()
    if not has_sinks:
        both = [{name: x[name] for name in x if name != "sinks"} for x in both]
    return tuple(both)


@pytest.mark.parametrize(
    ("implementation", "arguments", "has_sinks"),
    with_core_tuples(
        [
            ("xla", "full", True),
            ("xla", "causal", False),
            ("blockwise", "full", False),
            ("blockwise", "full", True),
            ("blockwise", "causal", True),
            ("blockwise", "soft cap", True),
            ("blockwise", "score_mod", True),
        ],
        ("blockwise", "causal", True),
    ),
)
def test_derivatives_are_those_of_a_float64_softmax(
    implementation, arguments, has_sinks, small_tiles
):
    def attend(x):
        return dot_product_attention(
            **x,
            **ARGUMENTS[arguments],
            implementation=implementation,
            return_residual=True,
        )

    got = jax.device_get(jax.jit(derivatives(attend))(*given(has_sinks)))
    want = expected(derivatives, arguments, has_sinks)

    close(got, want, 2e-6)
    np.testing.assert_allclose(got["results"][1], want["results"][1], rtol=1e-6)
