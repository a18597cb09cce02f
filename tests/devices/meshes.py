"""What the tests on meshes share."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType


def mesh_of(kind, sizes=(2, 4)):
    """The axes "data" and "model", of the type that `kind` names."""
    axis_type = AxisType.Explicit if "explicit" in kind else AxisType.Auto
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)


def floats(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def put(x, mesh, *axes):
    """The array, split over these axes of the mesh."""
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))


def context(mesh, kind):
    """The mesh is set where `kind` says so."""
    return jax.set_mesh(mesh) if "set_mesh" in kind else contextlib.nullcontext()


def compare(got, expected):
    """Up to the order of sums, which parts of another size change."""
    for answer, value in zip(jax.tree.leaves(got), jax.tree.leaves(jax.device_get(expected)), strict=True):
        np.testing.assert_allclose(jax.device_get(answer), value, rtol=0, atol=1e-5 * np.abs(value).max())
