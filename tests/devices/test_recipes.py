"""Lists of keys, and recipes with an entry for each batch entry and head, on meshes
that split both.
"""

from collections.abc import Callable
from typing import NamedTuple

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


class Call(NamedTuple):
    kv_heads: int
    # Makes the arguments of a call from the array, which gets a gradient.
    make: Callable
    learned: jax.Array


FORGETTING = "forgetting"
TERMS = "relative terms"
LISTS = "lists"
SHARED_LISTS = "lists of key heads that several devices share"
GATES = jax.nn.log_sigmoid(floats(3, 2, 40, 8))
CALLS = {
    FORGETTING: Call(4, recipes.forgetting, GATES),
    TERMS: Call(4, recipes.relative_terms, floats(4, 2, 8, 40, 5)),
    LISTS: Call(4, listed(2, 40, 3), floats(5, 2, 8)),
    SHARED_LISTS: Call(2, listed(2, 40, 2, 3), floats(5, 2, 8)),
}


def arrays(kv_heads):
    return [floats(i, 2, 40, n, 8) for i, n in enumerate((8, kv_heads, kv_heads))]


def run(attend, make, *operands, **more):
    def call(x, *arrays):
        return attend(*arrays, **make(x), **more)

    return jax.jit(gradients, static_argnums=0)(call, *operands)


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    [
        (FORGETTING, "auto", "blockwise"),
        (TERMS, "auto", "xla"),
        (LISTS, "auto", None),
        (LISTS, "explicit", None),
        (SHARED_LISTS, "auto", None),
        (SHARED_LISTS, "explicit", None),
    ],
)
def test_as_on_one_device(name, kind, implementation):
    kv_heads, make, learned = CALLS[name]
    want = run(dot_product_attention, make, learned, *arrays(kv_heads))
    mesh = mesh_of(kind)
    spec = jax.P("data", None, "model")
    split = []
    for x in arrays(kv_heads):
        # More devices than key heads: each has all of them.
        split.append(put(x, mesh, *(spec if x.shape[2] > 2 else ("data",))))
    more = {"implementation": implementation}
    if kind == "auto":
        more["qkv_sharding"] = spec

    with jax.set_mesh(mesh):
        learned = put(learned, mesh, "data")
        got = run(dot_product_attention, make, learned, *split, **more)
        close(got, want)


@pytest.mark.parametrize("name", [FORGETTING, TERMS])
def test_sequences_may_be_split(name):
    kv_heads, make, learned = CALLS[name]
    split = context_parallel("context", mesh=mesh_of_one_axis(context=4))
    got = run(split, make, learned, *arrays(kv_heads))
    close(got, run(dot_product_attention, make, learned, *arrays(kv_heads)))
