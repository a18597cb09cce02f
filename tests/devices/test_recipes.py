"""Recipes with an entry for each batch entry and head, on meshes that split both."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from meshes import compare, floats, mesh_of, put

from flax_mha import context_parallel, dot_product_attention, recipes

RECIPES = {
    "forgetting": (recipes.forgetting, jax.nn.log_sigmoid(floats(3, 2, 40, 8))),
    "relative terms": (recipes.relative_terms, floats(4, 2, 8, 40, 5)),
}
ARRAYS = [floats(i, 2, 40, n, 8) for i, n in enumerate((8, 4, 4))]


def gradients(attend, make, learned, *arrays, **more):
    output, pull = jax.vjp(lambda learned, *arrays: attend(*arrays, **make(learned), **more), learned, *arrays)
    return output, pull(jnp.cos(output))


@pytest.mark.parametrize(("name", "implementation"), [("forgetting", "blockwise"), ("relative terms", "xla")])
def test_as_on_one_device(name, implementation):
    make, learned = RECIPES[name]
    want = gradients(dot_product_attention, make, learned, *ARRAYS)
    mesh, spec = mesh_of("auto", (2, 4)), jax.P("data", None, "model")
    split = [put(x, mesh, *spec) for x in ARRAYS]
    more = {"qkv_sharding": spec, "implementation": implementation}
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *arrays: gradients(dot_product_attention, make, *arrays, **more))
        compare(run(put(learned, mesh, "data"), *split), want)


@pytest.mark.parametrize("name", RECIPES)
def test_sequences_may_be_split(name):
    make, learned = RECIPES[name]
    mesh = jax.make_mesh((4,), ("c",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    run = jax.jit(lambda *arrays: gradients(context_parallel("c", mesh=mesh), make, *arrays))
    compare(run(learned, *ARRAYS), gradients(dot_product_attention, make, learned, *ARRAYS))
