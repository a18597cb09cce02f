"""Estimates the memory of a training step on each device, from a program that is compiled but not run."""

import math

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from train_demo import mesh
from train_demo.model import blueprint
from train_demo.settings import Layout, Settings
from train_demo.update import State, compiled, make_optimizer, make_update

# LLVM need not optimize code that never runs; XLA assigns memory before.
UNOPTIMIZED: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": "0"}


def estimate(
    settings: Settings, layout: Layout, vocabulary_size: int, characters: int, devices: list[jax.Device]
) -> dict[str, int]:
    """Compiles a training step on this many characters of data, and returns the bytes of each device, by purpose."""
    sizes = layout.sizes(len(devices), settings)
    devices = devices[: math.prod(sizes)]
    structure, params = blueprint(vocabulary_size, settings, layout)
    device_mesh = mesh.make(sizes, devices)
    state = mesh.placed(device_mesh, State(params, jax.eval_shape(make_optimizer(settings).init, params)))
    whole = NamedSharding(device_mesh, P()) if device_mesh else None
    step, text = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), (characters,)))
    with mesh.use(device_mesh):
        update = compiled(make_update(structure, settings, layout), mesh.shardings(device_mesh, state))
        used = update.lower(state, step, text).compile(UNOPTIMIZED).memory_analysis()
    assert used is not None
    return {
        "state and text": used.argument_size_in_bytes,
        "temporaries": used.temp_size_in_bytes,
        "results": used.output_size_in_bytes - used.alias_size_in_bytes,
    }


def table(memory: dict[str, int]) -> str:
    rows = {**memory, "together": sum(memory.values())}.items()
    lines = (f"{name:<20} {size:>18,} bytes  {size / 2**20:>13,.2f} MiB" for name, size in rows)
    return "\n".join(["memory of each device", *lines])
