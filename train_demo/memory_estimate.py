"""What a training step needs of each device, known without running it: compiled with shapes in place of arrays."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding, SingleDeviceSharding

from train_demo import collectives, mesh
from train_demo.model import blueprint
from train_demo.settings import Layout, Settings
from train_demo.update import State, compiled, make_optimizer, make_update

# The machine code is never run, so LLVM need not work on it. Memory and collectives are settled before.
UNOPTIMIZED: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": "0"}


class Estimate(NamedTuple):
    """One training step; sizes are bytes on each device."""

    devices: int
    numbers: int
    memory: dict[str, int]
    traffic: collectives.Counts


def estimate(
    settings: Settings, layout: Layout, vocabulary_size: int, characters: int, devices: list[jax.Device]
) -> Estimate:
    """Compiles a training step on so many characters for devices, and reads what it needs."""
    sizes = layout.sizes(len(devices), settings)
    devices = devices[: math.prod(sizes)]
    structure, params = blueprint(vocabulary_size, settings, layout)
    state = State(params, jax.eval_shape(make_optimizer(settings).init, params))
    over, alone = mesh.make(sizes, devices), SingleDeviceSharding(devices[0])
    shardings = mesh.shardings(over, state)
    placed = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        state,
        shardings or jax.tree.map(lambda leaf: alone, state),
    )
    whole = NamedSharding(over, P()) if over else alone
    step, text = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), (characters,)))
    with mesh.use(over):
        update = compiled(make_update(structure, settings, (), layout), shardings)
        program = update.lower(placed, step, text).compile(UNOPTIMIZED)
    used, hlo = program.memory_analysis(), program.as_text()
    assert used is not None
    assert hlo is not None
    memory = {
        "parameters": _local(placed.params),
        "optimizer state": _local(placed.optimizer),
        "text": 4 * characters,
        "temporaries": used.temp_size_in_bytes,
        "results": used.output_size_in_bytes - used.alias_size_in_bytes,
    }
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Estimate(len(devices), numbers, memory, collectives.count(hlo, len(devices)))


def _local(tree: State) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def table(found: Estimate) -> str:
    def line(name: str, size: float) -> str:
        return f"  {name:<20} {size:>18,.0f} bytes  {size / 2**20:>13,.2f} MiB"

    calls, sizes, sent = found.traffic
    lines = [f"{found.numbers:,} parameters on {found.devices} devices", "", "memory of each device"]
    lines += [line(*row) for row in {**found.memory, "together": sum(found.memory.values())}.items()]
    lines += ["", "sent in a step, by each device"]
    for kind in sorted(calls):
        lines += [f"{line(kind, sent[kind])}   {calls[kind]} calls of {sizes[kind]:,.0f} bytes in all"]
    return "\n".join([*lines, line("together", sent.total())])
