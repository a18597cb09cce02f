"""Latent attention on meshes: heads split by `head_axis`, sequences by
`context_parallel`.
"""

import functools

import jax
import numpy as np
import pytest
from cases import close, refused
from flax import nnx
from marks import core
from meshes import gradients, mesh_of, put
from test_tensor_parallel import FEATURES, N, inputs

import flax_mha
from flax_mha.rope import RoPE

SIZES = {
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "q_lora_rank": 9,
}
SIZES |= {"rope": RoPE(interleaved=True), "sinks": True}


def nnx_layer(**options):
    return flax_mha.MultiHeadLatentAttention(
        N, FEATURES, rngs=nnx.Rngs(0), **SIZES | options
    )


@functools.cache
def gradients_on_one_device(length):
    graph, state = nnx.split(nnx_layer(decode=False))
    apply = jax.jit(
        functools.partial(
            gradients, lambda s, x: nnx.merge(graph, s)(x, is_causal=True)
        )
    )
    return jax.device_get(apply(state, inputs(length)))


@pytest.mark.parametrize("kind", ["auto", core("explicit")])
def test_heads(kind):
    """Training; decoding, whose cache every device has for its batch entries."""
    mesh = mesh_of(kind)
    x = inputs(29)
    expected = gradients_on_one_device(29)
    with jax.set_mesh(mesh):
        split = nnx_layer(decode=False, head_axis="model")
        assert tuple(split.kv_b_proj.kernel[...].sharding.spec) == (None, "model", None)
        graph, state = nnx.split(split)
        x = put(x, mesh, "data")
        found = jax.jit(
            functools.partial(
                gradients, lambda s, x: nnx.merge(graph, s)(x, is_causal=True)
            )
        )(state, x)
        close(found, expected)
        split.init_cache(
            (4, 40, FEATURES), per_row=True, sharding=jax.P("data", None, None, None)
        )
        step = nnx.jit(lambda module, x: module(x, decode=True))
        outputs = [
            jax.device_get(step(split, x[:, i:j]))
            for i, j in ((0, 14), (14, 28), (28, 29))
        ]
    close(np.concatenate(outputs, 1), expected[0])
    assert not any(split.cached_key[...].sharding.spec[1:])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_an_indexer(kind):
    """Every device chooses for its batch entries."""
    options = {"decode": False, "indexer": flax_mha.Indexer(8, 7, 4)}
    mesh = mesh_of(kind)
    x = inputs(29)
    expected = jax.device_get(RUN(nnx_layer(**options), x))
    with jax.set_mesh(mesh):
        split = nnx_layer(**options, head_axis="model")
        x = put(x, mesh, "data")
        close(RUN(split, x), expected)
        split.init_cache((4, 40, FEATURES), sharding=jax.P("data", None, None, None))
        step = nnx.jit(lambda module, x: module(x, decode=True))
        outputs = [
            jax.device_get(step(split, x[:, i:j])) for i, j in ((0, 28), (28, 29))
        ]
    close(np.concatenate(outputs, 1), expected)


RUN = nnx.jit(lambda module, x: module(x, is_causal=True))


@functools.cache
def output_on_one_device():
    return jax.device_get(RUN(nnx_layer(decode=False), inputs()))


@pytest.mark.parametrize("strategy", ["ring", core("ulysses"), "allgather"])
def test_sequences(strategy):
    mesh = mesh_of("auto", (4, 2))
    x = inputs()
    attention_fn = flax_mha.context_parallel("data", strategy, mesh=mesh)
    split = nnx_layer(decode=False, attention_fn=attention_fn)
    close(RUN(split, put(x, mesh, None, "data")), output_on_one_device())
    split.init_cache((4, 40, FEATURES))
    refused("decode must be False with context_parallel", split, x, decode=True)
