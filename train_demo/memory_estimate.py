"""The memory that a training step needs of each device, known without running it: compiled with shapes, not arrays."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from train_demo import mesh
from train_demo.model import blueprint
from train_demo.settings import Layout, Settings
from train_demo.update import State, compiled, make_optimizer, make_update

# The machine code is never run, so LLVM need not work on it. Memory is settled before.
UNOPTIMIZED: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": "0"}


class Estimate(NamedTuple):
    """One training step; sizes are bytes on each device."""

    devices: int
    numbers: int
    memory: dict[str, int]


def estimate(
    settings: Settings, layout: Layout, vocabulary_size: int, characters: int, devices: list[jax.Device]
) -> Estimate:
    """Compiles a training step on so many characters for devices, and reads what it needs."""
    sizes = layout.sizes(len(devices), settings)
    devices = devices[: math.prod(sizes)]
    structure, params = blueprint(vocabulary_size, settings, layout)
    over = mesh.make(sizes, devices)
    state = mesh.placed(over, State(params, jax.eval_shape(make_optimizer(settings).init, params)))
    whole = NamedSharding(over, P()) if over else None
    step, text = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), (characters,)))
    with mesh.use(over):
        update = compiled(make_update(structure, settings, (), layout), mesh.shardings(over, state))
        used = update.lower(state, step, text).compile(UNOPTIMIZED).memory_analysis()
    assert used is not None
    memory = {
        "parameters": _local(state.params),
        "optimizer state": _local(state.optimizer),
        "text": 4 * characters,
        "temporaries": used.temp_size_in_bytes,
        "results": used.output_size_in_bytes - used.alias_size_in_bytes,
    }
    return Estimate(len(devices), sum(leaf.size for leaf in jax.tree.leaves(params)), memory)


def _local(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape for leaf in leaves]
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


def table(found: Estimate) -> str:
    rows = {**found.memory, "together": sum(found.memory.values())}.items()
    lines = [f"{found.numbers:,} parameters on {found.devices} devices", "", "memory of each device"]
    return "\n".join([*lines, *(f"  {name:<20} {size:>18,} bytes  {size / 2**20:>13,.2f} MiB" for name, size in rows)])
