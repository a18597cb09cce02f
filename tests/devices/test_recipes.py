"""Lists of keys, and recipes with an entry for each batch entry and head, on meshes
that split both.
"""

import jax
import numpy as np
import pytest
from cases import close
from contexts import mesh_of as mesh_of_one_axis
from meshes import floats, gradients, mesh_of, put

from flax_mha import context_parallel, dot_product_attention, recipes


def listed(*shape):
    """A function of sinks; queries list their keys."""
    indices = np.random.default_rng(0).integers(-1, 40, shape)
    return lambda sinks: {"key_indices": indices, "sinks": sinks}


# Key heads, a function that makes the arguments of a call, and the array that it takes,
# with a gradient.
CALLS = {
    "forgetting": (4, recipes.forgetting, jax.nn.log_sigmoid(floats(3, 2, 40, 8))),
    "relative terms": (4, recipes.relative_terms, floats(4, 2, 8, 40, 5)),
    "lists": (4, listed(2, 40, 3), floats(5, 2, 8)),
    "lists of key heads that several devices share": (
        2,
        listed(2, 40, 2, 3),
        floats(5, 2, 8),
    ),
}


def arrays(kv_heads):
    return [floats(i, 2, 40, n, 8) for i, n in enumerate((8, kv_heads, kv_heads))]


def run(attend, make, *operands, **more):
    return jax.jit(gradients, static_argnums=0)(
        lambda x, *arrays: attend(*arrays, **make(x), **more), *operands
    )


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    [
        ("forgetting", "auto", "blockwise"),
        ("relative terms", "auto", "xla"),
        *((name, kind, None) for name in [*CALLS][2:] for kind in ("auto", "explicit")),
    ],
)
def test_as_on_one_device(name, kind, implementation):
    kv_heads, make, learned = CALLS[name]
    want = run(dot_product_attention, make, learned, *arrays(kv_heads))
    mesh = mesh_of(kind)
    spec = jax.P("data", None, "model")
    split = [
        put(x, mesh, *spec if x.shape[2] > 2 else ("data",)) for x in arrays(kv_heads)
    ]
    more = {
        "qkv_sharding": spec if kind == "auto" else None,
        "implementation": implementation,
    }
    with jax.set_mesh(mesh):
        close(
            run(
                dot_product_attention, make, put(learned, mesh, "data"), *split, **more
            ),
            want,
        )


@pytest.mark.parametrize("name", ["forgetting", "relative terms"])
def test_sequences_may_be_split(name):
    kv_heads, make, learned = CALLS[name]
    split = context_parallel("context", mesh=mesh_of_one_axis(context=4))
    close(
        *(
            run(attend, make, learned, *arrays(kv_heads))
            for attend in (split, dot_product_attention)
        )
    )
