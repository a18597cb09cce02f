"""What works on one device works on a mesh, split over batch, heads or both, wherever the split can be known from."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention
from flax_mha.masks import FunctionMask

B, N, H = 4, 4, 8
SPLITS = {"batch": ((4, 1), ("data", None)), "heads": ((1, 4), (None, "model")), "both": ((2, 4), ("data", "model"))}
# From where it is known: nothing, or a mesh in the context; the argument; types.
KINDS = ("auto", "auto, set_mesh", "argument", "explicit", "explicit, set_mesh")


def mesh_of(sizes, kind):
    axis_type = AxisType.Explicit if "explicit" in kind else AxisType.Auto
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)


def context(mesh, kind):
    return jax.set_mesh(mesh) if "set_mesh" in kind else contextlib.nullcontext()


def collectives(text):
    """What moves floats between devices, but for sums of gradients."""
    moves = ("all-gather", "all-to-all", "collective-permute")
    return {name for name in moves if re.search(rf"= \(?f32\S* {name}(-start)?\(", text)}


def arrays(length, num_kv_heads):
    rng = np.random.default_rng(length)
    shapes = (B, length, N, H), (B, length, num_kv_heads, H), (B, length, num_kv_heads, H)
    query, key, value = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    lengths = jnp.asarray([length, 3, length // 2, 0], jnp.int32)
    slopes = jnp.asarray(rng.standard_normal(N), jnp.float32)
    return {"query": query, "key": key, "value": value, "lengths": lengths, "slopes": slopes}


def attend(x, sharding=None):
    """All that depends on batch entry, head and position; dropout is not divided by the layout."""

    def alibi(score, b, h, q_idx, kv_idx):
        return score + x["slopes"][h] * (kv_idx - q_idx).astype(jnp.float32) * 0.01 * (b + 1).astype(jnp.float32)

    return dot_product_attention(
        x["query"],
        x["key"],
        x["value"],
        mask=FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx % (h + 2) != b),
        is_causal=True,
        key_value_seq_lengths=x["lengths"],
        score_mod=alibi,
        dropout_rate=0.1,
        dropout_rng=jax.random.key(0),
        qkv_sharding=sharding,
    )


def with_gradients(x, sharding=None):
    trainable = {name: x[name] for name in ("query", "key", "value", "slopes")}
    output, pull = jax.vjp(lambda arrays: attend(x | arrays, sharding), trainable)
    return output, pull(jnp.cos(output))


@functools.cache
def on_one_device(length, num_kv_heads):
    return jax.device_get(jax.jit(with_gradients)(arrays(length, num_kv_heads)))


def placed(x, mesh, axes, num_kv_heads):
    batch, heads = axes
    kv_heads = heads if num_kv_heads == N else None
    specs = {"query": (batch, None, heads), "key": (batch, None, kv_heads), "value": (batch, None, kv_heads)}
    specs |= {"lengths": (batch,), "slopes": ()}
    return {name: jax.device_put(x[name], jax.NamedSharding(mesh, jax.P(*specs[name]))) for name in x}


def compare(got, expected):
    """Up to the order of sums, which blocks of another size change."""
    for answer, value in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(jax.device_get(answer), value, rtol=0, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("length", "num_kv_heads"), [(40, N), (600, 1)], ids=["dense", "tiles, one key head"])
def test_any_mesh(length, num_kv_heads, split, kind):
    sizes, axes = SPLITS[split]
    mesh = mesh_of(sizes, kind)
    sharding = jax.NamedSharding(mesh, jax.P(axes[0], None, axes[1])) if kind == "argument" else None
    x = placed(arrays(length, num_kv_heads), mesh, axes, num_kv_heads)
    with context(mesh, kind):
        program = jax.jit(functools.partial(with_gradients, sharding=sharding)).lower(x).compile()
        compare(program(x), on_one_device(length, num_kv_heads))
    assert not collectives(program.as_text())
