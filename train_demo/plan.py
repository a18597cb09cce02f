"""What a training step needs of each device, known without running it: compiled with shapes in place of arrays."""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from train_demo import mesh
from train_demo.errors import UserError
from train_demo.layout import Layout, Sizes
from train_demo.model import blueprint
from train_demo.settings import Settings
from train_demo.traffic import Traffic, traffic
from train_demo.update import State, make_optimizer, make_update

# The machine code is never run, so LLVM need not work on it. Memory and collectives are settled before.
UNOPTIMIZED: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": "0"}


LONGEST = 16384


class Plan(NamedTuple):
    """Of one training step; sizes are bytes on each device.

    Attributes:
        sizes: of the mesh.
        numbers: parameters of the whole model.
        params: the parameters.
        optimizer: their optimizer's state.
        text: the characters to train on.
        temporaries: what the step computes and needs no more at its end: activations, gradients, gathered parameters.
        output: what the step returns and does not write over what it was given.
        traffic: what the devices send.
    """

    sizes: Sizes
    numbers: int
    params: int
    optimizer: int
    text: int
    temporaries: int
    output: int
    traffic: Traffic

    @property
    def memory(self) -> int:
        """All of it together."""
        return self.params + self.optimizer + self.text + self.temporaries + self.output


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a TPU slice such as "v5e:16x16", of which only the compiler has to be here.

    Raises:
        UserError: libtpu is not installed, or knows no such topology.
    """
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"--topology {topology} cannot be had ({why}): give one that libtpu knows, such as v5e:16x16, and have "
            "libtpu installed (pip install libtpu)"
        ) from error


def virtual_devices(number: int | None) -> list[jax.Device]:
    """As many devices of the CPU as the environment asks JAX for.

    Raises:
        UserError: JAX was used before, with another number of them.
    """
    if len(jax.devices("cpu")) < (number or 1):
        raise UserError(f"JAX runs on {len(jax.devices('cpu'))} devices already: plan in a process of its own")
    return jax.devices("cpu")[: number or 1]


def make_plan(settings: Settings, layout: Layout, vocabulary: int, characters: int, devices: list[jax.Device]) -> Plan:
    """Compiles a training step for devices, which need not exist, and reads what it needs.

    Args:
        settings: of the run.
        layout: likewise.
        vocabulary: the distinct characters of its text.
        characters: all of the characters that it trains on.
        devices: those that it would run on.

    Raises:
        UserError: the layout does not fit the devices or the settings.
    """
    sizes = layout.sizes(len(devices), settings)
    devices = devices[: math.prod(sizes)]
    structure, params = blueprint(vocabulary, settings, layout)
    state = State(params, jax.eval_shape(make_optimizer(settings).init, params))
    over = mesh.make(sizes, devices)
    shardings = mesh.shardings(over, state)
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: jax.sharding.SingleDeviceSharding(devices[0]), state)
    whole = jax.sharding.SingleDeviceSharding(devices[0]) if over is None else NamedSharding(over, P())
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, shardings)
    step, text = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), (characters,)))
    with mesh.use(over):
        update = make_update(structure, settings, (), layout, None if over is None else shardings)
        lowered = update.lower(state, step, text)
        compiled = lowered.compile(UNOPTIMIZED if devices[0].platform == "cpu" else None)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert hlo is not None
    return Plan(
        sizes,
        sum(leaf.size for leaf in jax.tree.leaves(params)),
        _local(state.params),
        _local(state.optimizer),
        4 * characters,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        traffic(hlo, len(devices)),
    )


def _local(tree: State) -> int:
    """Bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def flags(settings: Settings, layout: Layout) -> str:
    """The options that ask for this plan, all of them written out."""
    options = {name: getattr(settings, name) for name in ("layers", "heads", "features")}
    options |= {"batch-size": settings.batch_size, "context-length": settings.context_length, "dtype": settings.dtype}
    options |= {"data-parallel": layout.data_parallel, "fsdp": layout.fsdp, "tensor": layout.tensor}
    options |= {"context": layout.context, "accumulate": layout.accumulate}
    return " ".join([*(f"--{name} {value}" for name, value in options.items()), *["--remat"] * layout.remat])


def report(plan: Plan) -> str:
    """The plan as a table."""
    memory = {
        "parameters": plan.params,
        "optimizer state": plan.optimizer,
        "text": plan.text,
        "temporaries": plan.temporaries,
        "results": plan.output,
        "together": plan.memory,
    }
    lines = [f"{plan.numbers:,} parameters on {math.prod(plan.sizes)} devices", ""]
    lines += ["memory of each device"]
    lines += [f"  {name:<20} {size:>18,} bytes  {_unit(size):>11}" for name, size in memory.items()]
    lines += ["", "sent in a step, by each device"]
    for kind, (calls, size, sent) in plan.traffic.kinds.items():
        lines += [f"  {kind:<20} {sent:>18,.0f} bytes  {_unit(sent):>11}   {calls} calls of {size:,.0f} bytes in all"]
    sent = plan.traffic.sent
    lines += [f"  {'together':<20} {sent:>18,.0f} bytes  {_unit(sent):>11}"]
    if plan.traffic.unknown_loops:
        lines += [f"  at least: of {plan.traffic.unknown_loops} loops the compiler does not know the number of trips"]
    return "\n".join(lines)


def _unit(size: float) -> str:
    """A size in the largest unit that it has one of.

    Example:
        >>> _unit(3 * 2**19)
        '1.50 MiB'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log2(max(size, 1))) // 10, len(units) - 1)
    return f"{size / 1024**power:.2f} {units[power]}"


def fitting(layout: Layout, devices: int, context_length: int) -> Layout:
    """Splits windows over so many devices that none holds more than `LONGEST` characters of one; the others get "fsdp".

    A layout that names a size stays as it is.
    """
    if (layout.data_parallel, layout.fsdp, layout.context, layout.tensor) != (-1, 1, 1, 1):
        return layout
    divisors = [n for n in range(1, devices + 1) if devices % n == 0 and context_length % n == 0]
    context = next((n for n in divisors if context_length // n <= LONGEST), divisors[-1])
    return replace(layout, data_parallel=1, fsdp=devices // context, context=context)


def of_size(params: int, vocabulary: int) -> dict[str, int]:
    """Chooses layers, heads and features so that a model has about `params` parameters.

    A layer has 12 features**2 of them. As in models of the literature, there are about 128 features per layer.

    Raises:
        UserError: even the smallest model has more.
    """
    head = 32 if params < 2e7 else 64 if params < 1e9 else 128
    choices = []
    for heads in (*range(1, 9), *range(12, 64, 4), *range(64, 513, 16)):
        features = heads * head
        layers = round((params - 2 * vocabulary * features) / (12 * features**2))
        if layers >= 1:
            choices.append((abs(math.log(layers * 128 / features)), layers, heads, features))
    if not choices:
        raise UserError(f"--params {params:,} is too few for a model with {vocabulary} characters: give more")
    _, layers, heads, features = min(choices)
    return {"layers": layers, "heads": heads, "features": features}
