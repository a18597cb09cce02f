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

# Sizes that differ, so that swapped axes show.
OPTIONS = {
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "q_lora_rank": 9,
    "rope": RoPE(interleaved=True),
    "sinks": True,
}


def nnx_layer(**options):
    return flax_mha.MultiHeadLatentAttention(
        N, FEATURES, rngs=nnx.Rngs(0), **OPTIONS | options
    )


RUN = nnx.jit(lambda module, x: module(x, is_causal=True))
STEP = nnx.jit(lambda module, x: module(x, decode=True))


def gradients_of(layer, x):
    graph, state = nnx.split(layer)

    def call(state, x):
        return nnx.merge(graph, state)(x, is_causal=True)

    return jax.jit(functools.partial(gradients, call))(state, x)


@functools.cache
def gradients_on_one_device(length):
    found = gradients_of(nnx_layer(decode=False), inputs(length))
    return jax.device_get(found)


@pytest.mark.parametrize("kind", ["auto", core("explicit")])
def test_split_heads_equal_one_device(kind):
    """Training; decoding, whose cache every device has for its batch entries."""
    mesh = mesh_of(kind)
    x = inputs(29)
    expected = gradients_on_one_device(29)
    with jax.set_mesh(mesh):
        split = nnx_layer(decode=False, head_axis="model")
        assert tuple(split.kv_b_proj.kernel[...].sharding.spec) == (None, "model", None)
        x = put(x, mesh, "data")
        close(gradients_of(split, x), expected)
        split.init_cache(
            (4, 40, FEATURES), per_row=True, sharding=jax.P("data", None, None, None)
        )
        # A prompt for an empty cache, many tokens after others, and one.
        parts = x[:, :14], x[:, 14:28], x[:, 28:]
        outputs = [jax.device_get(STEP(split, part)) for part in parts]
    close(np.concatenate(outputs, 1), expected[0])
    # All heads share the latents, so only the batch is split.
    assert not any(split.cached_key[...].sharding.spec[1:])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_an_indexer_with_split_heads_equals_one_device(kind):
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
        parts = x[:, :28], x[:, 28:]
        outputs = [jax.device_get(STEP(split, part)) for part in parts]
    close(np.concatenate(outputs, 1), expected)


@functools.cache
def output_on_one_device():
    return jax.device_get(RUN(nnx_layer(decode=False), inputs()))


@pytest.mark.parametrize("strategy", ["ring", core("ulysses"), "allgather"])
def test_split_sequences_equal_one_device(strategy):
    mesh = mesh_of("auto", (4, 2))
    x = inputs()
    attention_fn = flax_mha.context_parallel("data", strategy, mesh=mesh)
    split = nnx_layer(decode=False, attention_fn=attention_fn)
    close(RUN(split, put(x, mesh, None, "data")), output_on_one_device())
    split.init_cache((4, 40, FEATURES))
    refused("decode must be False with context_parallel", split, x, decode=True)
