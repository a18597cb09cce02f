"""Lists of keys on meshes that split batch and heads, also if several devices share a key head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import flax_mha
from flax_mha import dot_product_attention


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("key_heads", "lists"), [(4, (2, 20, 3)), (2, (2, 20, 2, 3))])
def test_as_on_one_device(key_heads, lists, kind):
    rng, spec = np.random.default_rng(0), jax.P("data", None, "model")
    shapes = (2, 20, 8, 8), *2 * [(2, 30, key_heads, 8)]
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    indices = jnp.asarray(rng.integers(-1, 30, lists), jnp.int32)

    def gradients(sharding, indices, *arrays):
        attend = functools.partial(dot_product_attention, key_indices=indices, qkv_sharding=sharding)
        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(jnp.cos(output))

    expected = jax.jit(functools.partial(gradients, None))(indices, *arrays)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    specs = spec, *2 * [spec if key_heads == 4 else jax.P("data")]
    split = [jax.device_put(x, NamedSharding(mesh, of_x)) for x, of_x in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(gradients, spec if kind == AxisType.Auto else None))(indices, *split)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_sequences_cannot_be_split():
    attend = flax_mha.context_parallel("c", mesh=jax.make_mesh((2,), ("c",), axis_types=(AxisType.Auto,)))
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="context_parallel does not support key_indices"):
        attend(x, x, x, key_indices=jnp.zeros((1, 4, 1), jnp.int32))
