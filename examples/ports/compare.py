"""Compares a public program with itself, with flax_mha's classes in place of Flax's.

Each script in this folder describes one model of one repository. It needs a clone:

    git clone https://github.com/google/flax
    python examples/ports/lm1b.py flax

The model's file is loaded twice. The second time, `nn.MultiHeadDotProductAttention`
(or `nnx.MultiHeadAttention`) in it is flax_mha's; nothing else changes. Both models get
the same key and the same input. The script prints how far initial parameters, output,
gradient and the losses of ten training steps differ, relative to the largest number.
"""

import argparse
import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_mha
import flax_mha.linen

CLASSES_OF_LINEN = (
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "SelfAttention",
)
STEPS = 10


class Model(NamedTuple):
    """Parameters, and the function that computes the output from them."""

    params: Any
    apply: Callable[[Any], jax.Array]


class Port(NamedTuple):
    """A model of a repository.

    Attributes:
      folder: The folder in the clone from which its modules are imported.
      module: The module that holds the model.
      build: Makes the model, given the module.
    """

    folder: str
    module: str
    build: Callable[[Any], Model]


def of_linen(model: Any, *inputs: Any, **options: Any) -> Model:
    """Initializes a linen model with key 0."""
    variables = model.init(jax.random.key(0), *inputs, **options)

    def apply(variables: Any) -> jax.Array:
        return model.apply(variables, *inputs, **options)

    return Model(variables, apply)


def of_nnx(model: nnx.Module, *inputs: Any, **options: Any) -> Model:
    """Takes an nnx model apart."""
    structure, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def apply(params: Any) -> jax.Array:
        return nnx.merge(structure, params, rest)(*inputs, **options)

    return Model(params, apply)


def run(port: Port) -> None:
    """Compares the model in the clone that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path, help="folder of the cloned repository")
    clone = parser.parse_args().clone
    file = clone / port.folder / f"{port.module.replace('.', '/')}.py"
    if not file.exists():
        parser.error(f"clone must hold {file.relative_to(clone)}, but {clone} does not")

    theirs = port.build(load(clone / port.folder, port.module))
    ours = port.build(with_our_classes(load(clone / port.folder, port.module)))
    print(f"{file.relative_to(clone)} at {commit_of(clone)}, jax {jax.__version__}")
    compared = {
        "parameters": (ours.params, theirs.params),
        "output": (output_of(ours), output_of(theirs)),
        "gradient": (gradient_of(ours), gradient_of(theirs)),
        f"losses of {STEPS} steps": (losses_of(ours), losses_of(theirs)),
    }
    for name, (got, expected) in compared.items():
        print(f"{name:20} differs by {difference(got, expected):.1e}")


def load(folder: Path, name: str) -> Any:
    """Imports a fresh copy of a module, without running the packages around it.

    Their `__init__` may import what the model does not need.
    """
    parts = name.split(".")
    for module in list(sys.modules):
        if module.split(".")[0] == parts[0]:
            del sys.modules[module]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for package in folder.joinpath(parts[0]).rglob("__init__.py"):
        dotted = ".".join(package.parent.relative_to(folder).parts)
        empty = types.ModuleType(dotted)
        empty.__path__ = [str(package.parent)]
        sys.modules[dotted] = empty
    return importlib.import_module(name)


def with_our_classes(module: Any) -> Any:
    """Replaces the attention classes in what `module` calls `nn` or `nnx`.

    Raises:
      SystemExit: If the module's code does not use one of them. Then nothing would be
        replaced, and two equal models be compared.
    """
    names = "|".join(CLASSES_OF_LINEN)
    if not re.search(rf"\bnnx?\.({names})\b", inspect.getsource(module)):
        raise SystemExit(f"{module.__name__} uses none of {names} of nn or nnx")
    if hasattr(module, "nn"):
        module.nn = copy_of(module.nn)
        for name in CLASSES_OF_LINEN:
            setattr(module.nn, name, getattr(flax_mha.linen, name))
    if hasattr(module, "nnx"):
        module.nnx = copy_of(module.nnx)
        module.nnx.MultiHeadAttention = flax_mha.MultiHeadAttention
    return module


def copy_of(module: types.ModuleType) -> types.ModuleType:
    """Makes a module with the same names, which may be changed."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module))
    return copy


def commit_of(clone: Path) -> str:
    """Asks git which commit is checked out."""
    command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "an unknown commit"


def loss_of(model: Model, params: Any) -> jax.Array:
    """Computes the mean square error of an output that should be 1 everywhere."""
    output = model.apply(params)
    return jnp.mean(jnp.square(output.astype(jnp.float32) - 1))


def output_of(model: Model) -> jax.Array:
    """Computes the output for the initial parameters."""
    return jax.jit(model.apply)(model.params)


def gradient_of(model: Model) -> Any:
    """Computes the gradient of the loss with respect to all parameters."""
    return jax.jit(jax.grad(lambda params: loss_of(model, params)))(model.params)


def losses_of(model: Model) -> list[float]:
    """Trains for some steps of Adam."""
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[jax.Array, Any, Any]:
        loss, gradient = jax.value_and_grad(lambda p: loss_of(model, p))(params)
        updates, state = optimizer.update(gradient, state)
        return loss, optax.apply_updates(params, updates), state

    params = model.params
    state = optimizer.init(params)
    losses = []
    for _ in range(STEPS):
        loss, params, state = step(params, state)
        losses.append(float(loss))
    return losses


def difference(got: Any, expected: Any) -> float:
    """Returns the largest difference of two trees, relative to the largest number."""
    structures = [str(jax.tree.structure(tree)) for tree in (got, expected)]
    if structures[0] != structures[1]:
        raise SystemExit("the trees differ in their structure")
    differences = []
    largest = []
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        differences.append(np.abs(np.asarray(one) - np.asarray(other)).max())
        largest.append(np.abs(np.asarray(other)).max())
    # Unlike `max`, `np.max` does not lose NaN.
    return float(np.max(differences) / np.max(largest))
