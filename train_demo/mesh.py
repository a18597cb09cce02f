"""The mesh of devices: how parameters, optimizer state and batches are split over it.

It has four axes; "context" is left out if it has one device:

    data     each device has all parameters and a part of the batch; gradients are added
             up once in a step
    fsdp     each device has a part of the batch and a part of all parameters and their
             optimizer state; a block's parameters are gathered where they are used
    context  each device has a part of every window's characters
    model    each device has some attention heads, and a part of the MLPs' width

The axes have the type Auto: these functions constrain how arrays are split, and XLA
adds the communication. On one device no mesh is set, and they return their arguments.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array

from train_demo.errors import UserError, reason
from train_demo.settings import Sizes, processes_in

BATCH = ("data", "fsdp")  # the axes that split the batch
# How kernels and embeddings are split, by the name of the layer. All other parameters
# are whole on each device.
PARAMS = {
    "embedding": P(None, "fsdp"),  # [vocabulary, features]
    "query": P("fsdp", "model", None),  # [features, heads, head size]
    "key": P("fsdp", "model", None),
    "value": P("fsdp", "model", None),
    "gate": P("fsdp", "model", None),
    "out": P("model", None, "fsdp"),  # [heads, head size, features]
    "q_proj": P("fsdp", "model", None),
    "kv_a_proj_with_mqa": P("fsdp", None),  # [features, latent and rotary features]
    "kv_b_proj": P(None, "model", None),  # [latent features, heads, head size]
    "o_proj": P("model", None, "fsdp"),
    "widen": P("fsdp", "model"),  # [features, width]
    "narrow": P("model", "fsdp"),  # [width, features]
    "head": P("fsdp", None),  # [features, vocabulary]
}
HEARTBEAT_SECONDS = 10  # JAX ends all processes when one is silent for longer

Tree = TypeVar("Tree")
Module = TypeVar("Module", bound=nnx.Module)


def connect_processes() -> None:
    """Connects the processes of a run, if JAX's environment variables name them."""
    processes = processes_in(os.environ)
    if processes is None or jax.distributed.is_initialized():
        return
    try:
        # JAX itself does not read the number and the index from the environment.
        jax.distributed.initialize(
            **processes, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        address = processes["coordinator_address"]
        raise UserError(
            f"cannot connect at JAX_COORDINATOR_ADDRESS {address} ({reason(error)}): "
            "choose a different port, and start all processes"
        ) from error


def make(sizes: Sizes) -> Mesh:
    """Makes a mesh with axes of these sizes."""
    axes = sizes._asdict()
    if sizes.context == 1:
        # The attention does not name this axis, and would add up gradients over it.
        del axes["context"]
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(sizes)],
    )


def use(mesh: Mesh) -> AbstractContextManager:
    """Sets the mesh, which the functions below and the attention read, in a context."""
    if mesh.size == 1:
        return nullcontext()
    return jax.set_mesh(mesh)


def current() -> AbstractMesh | None:
    """Returns the mesh that `use` has set; None on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    return mesh


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """Returns the sharding of each array in a tree of parameters or optimizer state."""
    return jax.tree.map_with_path(lambda *x: NamedSharding(mesh, _spec(*x)), tree)


def as_stored(params: Tree) -> Tree:
    """Constrains parameters or gradients to be split as between two steps."""
    return _constrain(params, _spec)


def gathered(module: Module) -> Module:
    """Returns a module whose parameters are gathered along "fsdp", ready for use.

    Without this, XLA would leave the parameters where they are, and send the much
    larger activations.
    """
    if current() is None:
        return module

    def without_fsdp(path: tuple[Any, ...], leaf: Any) -> P:
        return P(*[axis if axis != "fsdp" else None for axis in _spec(path, leaf)])

    structure, state = nnx.split(module)
    return nnx.merge(structure, _constrain(nnx.to_pure_dict(state), without_fsdp))


def split_batch(windows: Array, axis: int = 0) -> Array:
    """Constrains windows to be split over the axes `BATCH` along their batch axis."""
    return _constrain(windows, lambda path, leaf: P(*[None] * axis, BATCH))


def split_characters(numbers: Array) -> Array:
    """Constrains `[B, T]` to be split along T as well, if the mesh has "context"."""
    mesh = current()
    if mesh is None or "context" not in mesh.shape:
        return numbers
    return _constrain(numbers, lambda path, leaf: P(P.UNCONSTRAINED, "context"))


def put(mesh: Mesh, array: np.ndarray, *axes: Any) -> Array:
    """Puts an array that every process has onto all devices, split by `P(*axes)`."""
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))


def fetch(tree: Tree) -> Tree:
    """Returns a tree of whole arrays in the memory of each process."""
    return multihost_utils.process_allgather(tree, tiled=True)


def _constrain(tree: Tree, spec_of: Callable[[tuple[Any, ...], Any], P]) -> Tree:
    if current() is None:
        return tree

    def constrain(path: tuple[Any, ...], leaf: Any) -> Array:
        return jax.lax.with_sharding_constraint(leaf, spec_of(path, leaf))

    return jax.tree.map_with_path(constrain, tree)


def _spec(path: tuple[Any, ...], leaf: Any) -> P:
    """Returns how an array is split, by the name of its layer in the path."""
    for key in reversed(path):
        if isinstance(key, jax.tree_util.DictKey) and key.key in PARAMS:
            return PARAMS[key.key]
    return P()
