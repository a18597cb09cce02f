"""Memory of temporaries is linear in the length; XLA reports it exactly."""

import functools

import jax
import jax.numpy as jnp
import pytest
from marks import with_core

from flax_mha import dot_product_attention

N = 4
H = 64

CASES = {
    "plain": lambda t: {},
    "causal": lambda t: {"is_causal": True},
    "bias of keys": lambda t: {"bias": jax.ShapeDtypeStruct((N, 1, t), jnp.float32)},
    "dropout": lambda t: {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
    "causal window, segments, lengths, soft cap, sinks": lambda t: {
        "is_causal": True,
        "local_window_size": (1000, 0),
        "query_segment_ids": jax.ShapeDtypeStruct((1, t), jnp.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((1,), jnp.int32),
        "logits_soft_cap": 3.0,
        "sinks": jax.ShapeDtypeStruct((N,), jnp.float32),
    },
}


def lowered(t, gradient, arguments, attend=dot_product_attention):
    x = jax.ShapeDtypeStruct((1, t, N, H), jnp.float32)
    arrays = {}
    static = {}
    for name, value in arguments.items():
        if isinstance(value, jax.ShapeDtypeStruct):
            arrays[name] = value
        else:
            static[name] = value
    bias = arrays.pop("bias", None)

    def loss(qkv, bias, others):
        return attend(*qkv, bias, **others, **static).sum()

    f = loss
    if gradient:
        f = jax.grad(loss, argnums=0 if bias is None else (0, 1))
    return jax.jit(f).lower((x, x, x), bias, arrays)


def temporaries(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


@functools.cache
def dense_temporaries(t, gradient):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return temporaries(lowered(t, gradient, {}, jax.nn.dot_product_attention))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    "name", with_core(CASES, "causal window, segments, lengths, soft cap, sinks")
)
def test_four_times_the_length_takes_at_most_five_times_the_memory(name, gradient):
    short = temporaries(lowered(2048, gradient, CASES[name](2048)))
    long = temporaries(lowered(8192, gradient, CASES[name](8192)))
    # Four times, and some for what does not grow evenly.
    assert long <= 5 * short
    assert long <= dense_temporaries(8192, gradient) / 10


@pytest.mark.parametrize("name", with_core(CASES, "dropout"))
def test_no_array_has_both_lengths(name):
    """Not even one that XLA might fuse away."""
    assert "8192x8192" not in lowered(8192, True, CASES[name](8192)).as_text()


DERIVATIVES = {
    "tangents": lambda loss, x: jax.jvp(loss, (x,), (x,)),
    "linearized": lambda loss, x: jax.linearize(loss, x)[1](x),
    "Hessian product": lambda loss, x: jax.jvp(jax.grad(loss), (x,), (x,))[1],
}


@pytest.mark.parametrize("derivative", with_core(DERIVATIVES, "tangents"))
def test_derivatives_of_other_orders_take_memory_linear_in_the_length(derivative):
    def size(t, implementation):
        attend = functools.partial(
            dot_product_attention, is_causal=True, implementation=implementation
        )

        def loss(qkv):
            return jnp.sin(attend(*qkv)).sum()

        run = jax.jit(functools.partial(DERIVATIVES[derivative], loss))
        x = jax.ShapeDtypeStruct((1, t, 1, H), jnp.float32)
        return temporaries(run.lower((x, x, x)))

    long = size(8192, "blockwise")
    assert long <= 5 * size(2048, "blockwise")
    if derivative == "Hessian product":
        assert long <= size(8192, "xla") / 20


def test_heads_of_a_group_share_their_keys():
    """Copies of keys and values for each head of a group would be temporaries."""

    def loss(query, key, value):
        return dot_product_attention(query, key, value, is_causal=True).sum()

    def gradient(n, k):
        query = jax.ShapeDtypeStruct((1, 4096, n, H), jnp.float32)
        key = jax.ShapeDtypeStruct((1, 4096, k, H), jnp.float32)
        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        return temporaries(run.lower(query, key, key))

    saved = gradient(8, 8) - gradient(8, 1)
    # At least the keys and values of seven heads, in float32.
    assert saved >= 2 * 7 * 4 * 4096 * H


@pytest.mark.core
def test_the_backward_pass_gets_no_more_than_inputs_output_and_rows():
    """For example, a condition on rows is not saved for every feature."""
    x = jax.ShapeDtypeStruct((1, 1024, 2, H), jnp.float32)
    attend = functools.partial(dot_product_attention, is_causal=True)
    _, saved = jax.eval_shape(functools.partial(jax.vjp, attend), x, x, x)
    sizes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))
    # Query, key, value and output; the rest has one number a row.
    arrays = 4 * x.size * x.dtype.itemsize
    assert arrays <= sizes <= 1.15 * arrays
