"""The mesh of devices: how parameters, optimizer state and batches are split over it.

It has four axes. With one device only, "context" is left out:

    data     each device has all parameters and a part of the batch; gradients are added up once in a step
    fsdp     each device has a part of the batch and a part of all parameters and their optimizer state; a block's
             parameters are gathered where they are used
    context  each device has a part of every window's characters
    model    each device has some attention heads, and a part of the width of the small networks

The axes have the type Auto: these functions constrain how arrays are split, and XLA adds the communication. On one
device there is no mesh, and the functions return their arguments.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array

from train_demo.settings import Sizes

BATCH = ("data", "fsdp")  # the axes that split the batch
# How kernels and embeddings are split, by the name of the layer. All other parameters are whole on each device.
PARAMS = {
    "embedding": P(None, "fsdp"),  # [vocabulary, features]
    "query": P("fsdp", "model", None),  # [features, heads, head size]
    "key": P("fsdp", "model", None),
    "value": P("fsdp", "model", None),
    "out": P("model", None, "fsdp"),  # [heads, head size, features]
    "widen": P("fsdp", "model"),  # [features, width]
    "narrow": P("model", "fsdp"),  # [width, features]
    "head": P("fsdp", None),  # [features, vocabulary]
}

Tree = TypeVar("Tree")
Module = TypeVar("Module", bound=nnx.Module)


def make(sizes: Sizes, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Makes a mesh with axes of these sizes from the first of the devices; returns None if one is enough."""
    number = math.prod(sizes)
    if number == 1:
        return None
    # Without "context" of one device: the attention does not name it, and would add up gradients over it.
    axes = {name: size for name, size in sizes._asdict().items() if name != "context" or size > 1}
    devices = (jax.devices() if devices is None else devices)[:number]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def use(mesh: Mesh | None) -> AbstractContextManager:
    """Returns a context manager that sets the mesh, which the functions below and the attention read."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def leave() -> AbstractContextManager:
    """Returns a context manager in which no mesh is set, for computations on a single device."""
    return nullcontext() if current() is None else jax.set_mesh(Mesh(np.empty((), object), ()))


def current() -> AbstractMesh | None:
    """Returns the mesh that `use` has set; None on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def batch_parts() -> int:
    mesh = current()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def shardings(mesh: Mesh | None, tree: Tree) -> Tree | None:
    """Returns the sharding of each array in a tree of parameters, or of their optimizer state; None on one device."""
    if mesh is None:
        return None
    return jax.tree.map_with_path(lambda path, leaf: NamedSharding(mesh, _spec(path, leaf)), tree)


def placed(mesh: Mesh | None, shapes: Tree) -> Tree:
    """Adds its sharding to each `jax.ShapeDtypeStruct` in a tree of parameters, or of their optimizer state."""
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings(mesh, shapes)
    )


def as_stored(params: Tree) -> Tree:
    """Constrains parameters, or gradients, to be split as parameters are between two steps."""
    return _constrain(params, lambda path, leaf: _spec(path, leaf))


def gathered(module: Module) -> Module:
    """Returns a module whose parameters are gathered along the axis "fsdp", ready for use.

    Without this, XLA would leave the parameters where they are, and send the much larger activations.
    """
    if current() is None:
        return module
    structure, state = nnx.split(module)
    whole = _constrain(nnx.to_pure_dict(state), lambda path, leaf: _without_fsdp(_spec(path, leaf)))
    return nnx.merge(structure, whole)


def split_batch(windows: Array, axis: int = 0) -> Array:
    """Constrains windows to be split over the mesh axes `BATCH` along their batch axis, `axis`."""
    return _constrain(windows, lambda path, leaf: P(*[None] * axis, BATCH))


def split_characters(numbers: Array) -> Array:
    """Constrains `[B, T]` to be split along the characters of each window, too, if the mesh has "context"."""
    mesh = current()
    if mesh is None or "context" not in mesh.shape:
        return numbers
    return _constrain(numbers, lambda path, leaf: P(P.UNCONSTRAINED, "context"))


def put(mesh: Mesh | None, array: np.ndarray, *axes: Any) -> Array:
    """Puts an array that every process has onto the devices of all processes, split as `P(*axes)` says."""
    if mesh is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*axes)), lambda part: array[part])


def fetch(mesh: Mesh | None, tree: Tree) -> Tree:
    """Returns a tree of whole arrays on the first device of this process, gathered from all devices."""
    if mesh is None:
        return tree
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda array: array.addressable_data(0), whole)


def _constrain(tree: Tree, spec: Any) -> Tree:
    if current() is None:
        return tree
    return jax.tree.map_with_path(lambda *leaf: jax.lax.with_sharding_constraint(leaf[1], spec(*leaf)), tree)


def _spec(path: tuple[Any, ...], leaf: Any) -> P:
    """Returns how a parameter, or its optimizer state, is split, by the name of its layer in its path in the tree."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return next((PARAMS[name] for name in reversed(names) if name in PARAMS), P())


def _without_fsdp(spec: P) -> P:
    return P(*(None if axis == "fsdp" else axis for axis in spec))
