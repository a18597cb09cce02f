"""`recipes.differential` equals the formula of the paper, and passes all arguments to
both softmaxes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, naive_attention, refused
from marks import with_core

from flax_mha import recipes

B = 2
S = 37
N = 4
K = 2
H = 8
rng = np.random.default_rng(0)
SHAPES = {
    "query": (B, S, 2 * N, H),
    "key": (B, S, 2 * K, H),
    "value": (B, S, K, 2 * H),
    "vectors": (4, H),
}
ARRAYS = {
    name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
ARRAYS["vectors"] *= 0.3
CAUSAL = recipes.causal()["mask"]


def by_the_paper(query, key, value, vectors, layer):
    """Head n uses query heads n and N + n, and their keys."""
    visible = np.tri(S, dtype=bool)
    q1, k1, q2, k2 = vectors
    # lambda = exp(q1 k1) - exp(q2 k2) + lambda_init
    start = 0.8 - 0.6 * np.exp(-0.3 * layer)
    first = naive_attention(query[..., :N, :], key[..., :K, :], value, visible)
    second = naive_attention(query[..., N:, :], key[..., K:, :], value, visible)
    heads = first - (jnp.exp(q1 @ k1) - jnp.exp(q2 @ k2) + start) * second
    return (1 - start) * heads / jnp.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("implementation", with_core(["xla", "blockwise"], "blockwise"))
def test_equals_the_formula_with_gradients(implementation, small_tiles):
    cotangent = rng.standard_normal((B, S, N, 2 * H)).astype(np.float32)

    def ours(arrays):
        return recipes.differential(
            **arrays, layer=2, mask=CAUSAL, implementation=implementation
        )

    def everything(function):
        output, pull = jax.vjp(function, ARRAYS)
        return output, pull(cotangent)

    want = everything(lambda arrays: by_the_paper(**arrays, layer=2))
    close(jax.jit(lambda: everything(ours))(), want, 2e-5)


def test_traced_layers_and_different_dropout_in_both_softmaxes():
    layers = jnp.arange(3)
    got = jax.vmap(
        lambda layer: recipes.differential(**ARRAYS, layer=layer, mask=CAUSAL)
    )(layers)
    want = [recipes.differential(**ARRAYS, layer=i, mask=CAUSAL) for i in range(3)]
    np.testing.assert_allclose(got, jnp.stack(want), rtol=0, atol=1e-5)
    twice = {
        name: jnp.concatenate([ARRAYS[name][..., :n, :]] * 2, -2)
        for name, n in (("query", N), ("key", K))
    }
    # 0.8 * the second softmax.
    same = {**ARRAYS, **twice, "vectors": np.zeros((4, H), np.float32), "layer": 10**6}
    # Hardly normalized.
    drop = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "epsilon": 1e3}
    plain = recipes.differential(**same)
    dropped = recipes.differential(**same, **drop)
    # Equal weights would only be scaled.
    assert not np.allclose(np.sign(plain), np.sign(dropped))
    masked = recipes.differential(
        **ARRAYS, layer=0, key_value_seq_lengths=jnp.array([0, S])
    )
    np.testing.assert_array_equal(masked[0], 0)


def test_bad_arguments():
    def attend(**changed):
        return recipes.differential(**ARRAYS | {"layer": 0} | changed)

    refused(
        "query must have an even number of heads",
        attend,
        query=ARRAYS["query"][..., :3, :],
    )
    refused(
        r"key twice as many as value, but got .* key \(2, 37, 2, 8\)",
        attend,
        key=ARRAYS["key"][..., :K, :],
    )
    refused(
        r"vectors must have shape \[4, head size\] = \(4, 8\)",
        attend,
        vectors=ARRAYS["vectors"][:3],
    )
    refused(
        "vectors must be floats .*, but got int", attend, vectors=np.ones((4, H), int)
    )
    refused("layer must be an int >= 0, but got -1", attend, layer=-1)
    refused("layer must have an integer dtype", attend, layer=0.5)
    refused(
        "unexpected keyword argument 'return_residual'",
        attend,
        return_residual=True,
        error=TypeError,
    )
    refused("only modules accept lengths", attend, lengths=3, error=TypeError)
