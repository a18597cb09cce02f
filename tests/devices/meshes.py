"""Helpers of the tests on meshes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType


def mesh_of(kind, sizes=(2, 4)):
    """The axes "data" and "model", of the type that `kind` names."""
    axis_type = AxisType.Explicit if "explicit" in kind else AxisType.Auto
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(
        sizes, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices
    )


def floats(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def put(x, mesh, *axes):
    """The array, split over these axes of the mesh."""
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))


def context(mesh, kind):
    """The mesh is set if `kind` says so."""
    if "set_mesh" in kind:
        return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def gradients(function, *arguments):
    """What it returns, and the gradients of all arguments."""
    output, pull = jax.vjp(function, *arguments)
    return output, pull(jnp.cos(output))
