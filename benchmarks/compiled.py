"""Compiles programs ahead of time for accelerators that need not be present, and
inspects them; nothing runs.

    python benchmarks/compiled.py --target v5e:2x2|v5e:4x4|h200|h200x4 [--table
    fused|unfused|masks] [--only WORDS]
                                  [--skip WORDS] [--out FILE.md]

Attention, causal unless said, forward and with its gradient, and one training step of
the demo. For TPUs this needs `pip install libtpu`, for H200s `pip install
'jax[cuda13]'` (jax 0.12, 4.5 GB); neither a driver nor a device.

Columns:
  attention    launches of fused attention kernels: splash, cuDNN
  others       launches of all other kernels
  MiB moved    what the others read and write in the device's main memory
               (benchmarks/hlo.py says how it is counted)
  MiB a step   of these, one step of the innermost loop that moves most: a tile
  temporaries  MiB that the program needs besides its arguments and results
  collectives  what devices send one another
  chosen       the implementation that we choose

`--table unfused` compares calls that fused kernels refuse with Flax
(benchmarks/unfused.py), by a model of an H200: a program takes as long as it takes to
move its bytes, at 4 TB/s, and to launch its kernels, 3 microseconds each. This is
counted, not timed; arithmetic is taken to be free. `MAX_SCORES_GPU` in
`flax_mha/_src/plan.py` was chosen by it. Columns besides:
  ms           by the model
  of Flax's    the same, as a multiple of Flax's program
Loops over the tiles of a row count as often as they run on average there.

`--table masks` compiles the calls of benchmarks/gpu_calls.py, with the columns of the
first table: with the implementation that a GPU chooses now, which is named, because no
device can try it; and with the one that it chose before every mask was fused.

All of it while everything is finite. A loop whose trips the compiler does not tell
counts once: then numbers are marked with a +. Of several devices the numbers are those
of each.
"""

import argparse
import datetime
import functools
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import gpu_calls
import hlo
import jax
import jax.numpy as jnp
import unfused
from targets import Target, compiling_for, mesh_of, target_of

from flax_mha import dot_product_attention, explain_implementation
from train_demo import model, settings, update

# (batch, length, heads, key heads, size), all bfloat16
SHAPES = {
    "(4, 4096, 16, 64)": (4, 4096, 16, 16, 64),
    "(1, 16384, 16, 128)": (1, 16384, 16, 16, 128),
    "(2, 4096, 32 / 8, 128)": (2, 4096, 32, 8, 128),
}
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "not causal": {},
    "causal, window of 1024": {"is_causal": True, "local_window_size": (1023, 0)},
    "lengths": {"key_value_seq_lengths": "lengths"},
}
DEMOS = {
    "demo": {},
    "demo, larger": {"context_length": 1024, "features": 512, "heads": 8, "layers": 4},
}
PLACEMENTS = {
    "batch": ("data",),
    "heads": (None, None, "model"),
    "batch and heads": ("data", None, "model"),
}
BYTES_A_SECOND = 4e12
SECONDS_A_LAUNCH = 3e-6
COLUMNS_OF_MODEL = {
    "program": "---",
    "implementation": "---",
    "kernels": "---:",
    "MiB moved": "---:",
    "temporaries": "---:",
    "ms": "---:",
    "of Flax's": "---:",
    "chosen": "---",
}
COLUMNS = {
    "program": "---",
    "implementation": "---",
    "attention": "---:",
    "others": "---:",
    "MiB moved": "---:",
    "MiB a step": "---:",
    "temporaries": "---:",
    "collectives": "---",
    "chosen": "---",
}


class Cell(NamedTuple):
    """A program: its function, the shapes and placement of its arguments, and what
    tells the implementation chosen.
    """

    name: str
    implementation: str
    function: Callable
    arguments: tuple
    chosen: Callable[[], str] | None = None


def cells(target: Target) -> Iterator[Cell]:
    """All of them: on one device, and split over several if there are several."""
    alone = on_first(target)
    first_shape, *_ = SHAPES
    for shape in SHAPES:
        for call in CALLS:
            if shape == first_shape or call == "causal":
                yield from attention_cells(target, shape, call, lambda *axes: alone, "")
    for name, options in DEMOS.items():
        yield demo_cell(name, settings.Settings(**options), alone)
    if len(target.devices) == 1:
        return
    mesh = mesh_of(target.devices)
    for name, axes in PLACEMENTS.items():
        split = functools.partial(placed, mesh, axes)
        where = f", split by {name}"
        yield from attention_cells(target, first_shape, "causal", split, where)
        # Without qkv_sharding, XLA's partitioner splits the call.
        told = {"qkv_sharding": split(4)}
        where += ", as qkv_sharding says"
        yield from attention_cells(target, first_shape, "causal", split, where, told)


def mask_cells(target: Target) -> Iterator[Cell]:
    """Forward and gradient of each call in `gpu_calls`, now and before."""
    alone = on_first(target)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone)

    for name, call in gpu_calls.CALLS.items():
        arrays = jax.tree.map(placed, call.arrays)
        learned = {name: arrays.pop(name) for name in call.learned}
        arguments = (jax.tree.map(placed, call.inputs), learned, arrays)
        implementations = dict.fromkeys([call.chosen, call.before])
        for way in ("forward", "gradient"):
            for implementation in implementations:
                function = _of_call(call, implementation, way)
                is_before = implementation != call.chosen
                label = f"{implementation}, before" if is_before else implementation
                yield Cell(f"{name}, {way}", label, function, arguments)


def _of_call(call: gpu_calls.Call, implementation: str, way: str) -> Callable:
    def run(inputs: list, learned: dict, arrays: dict) -> Any:
        def attend(inputs: list, learned: dict) -> Any:
            return dot_product_attention(
                *inputs,
                **learned,
                **arrays,
                **call.static,
                implementation=implementation,
            )

        if way == "forward":
            return attend(inputs, learned)
        results, pull = jax.vjp(attend, inputs, learned)
        return results, pull(results)

    return run


def on_first(target: Target) -> jax.sharding.NamedSharding:
    """Everything on the first device."""
    mesh = jax.sharding.Mesh(target.devices[:1], "x")
    return jax.sharding.NamedSharding(mesh, jax.P())


def placed(
    mesh: jax.sharding.Mesh, axes: tuple, rank: int
) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.P(*axes[:rank]))


def attention_cells(
    target: Target,
    shape: str,
    call: str,
    sharding: Callable,
    where: str,
    told: dict[str, Any] | None = None,
) -> Iterator[Cell]:
    """Forward and gradient of ours, of our tiles, and of `jax.nn`."""
    batch, length, heads, key_heads, size = SHAPES[shape]
    arrays = []
    for n in (heads, key_heads, key_heads):
        array = jax.ShapeDtypeStruct(
            (batch, length, n, size), jnp.bfloat16, sharding=sharding(4)
        )
        arrays.append(array)
    arguments = dict(CALLS[call])
    # Lengths are an argument of the program, not a constant in it.
    if "key_value_seq_lengths" in arguments:
        arrays.append(jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=sharding(1)))
        del arguments["key_value_seq_lengths"]

    def peer(attend: Callable, **more: Any) -> Callable:
        def f(query: Any, key: Any, value: Any, lengths: Any = None) -> Any:
            return attend(
                query, key, value, key_value_seq_lengths=lengths, **arguments, **more
            )

        return f

    told = told or {}
    # jax.nn chooses cuDNN only if it is asked to.
    theirs = "cudnn" if target.platform == "gpu" else None
    peers = {
        "flax_mha": peer(dot_product_attention, **told),
        "flax_mha blockwise": peer(
            dot_product_attention, implementation="blockwise", **told
        ),
        "jax.nn": peer(jax.nn.dot_product_attention, implementation=theirs),
    }
    explain = peer(explain_implementation, **told)
    for way in ("forward", "gradient"):
        for name, f in peers.items():
            program = f if way == "forward" else with_gradient(f)
            chosen = None
            if name == "flax_mha":
                chosen = functools.partial(chosen_for, explain, arrays)
            what = f"{shape} {call}{where}, {way}"
            yield Cell(what, name, program, tuple(arrays), chosen)


def chosen_for(explain: Callable, arrays: list) -> str:
    """Which implementation we choose for these shapes."""
    names = []
    # Inside a trace, shapes without values are enough.
    jax.eval_shape(lambda *arrays: names.append(explain(*arrays).chosen), *arrays)
    return names[0]


def with_gradient(f: Callable, count: int = 3) -> Callable:
    """`f`, and its gradients of so many arrays for the output as the cotangent."""

    def both(*arrays: Any) -> Any:
        floats = arrays[:count]
        rest = arrays[count:]
        output, pull = jax.vjp(lambda *floats: f(*floats, *rest), *floats)
        return output, pull(output)

    return both


def demo_cell(name: str, options: settings.Settings, sharding: Any) -> Cell:
    """One step of training on 100,000 characters out of 100."""
    structure, params = model.blueprint(100, options)
    optimizer_state = jax.eval_shape(update.make_optimizer(options).init, params)
    shapes = (
        update.State(params, optimizer_state),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((100_000,), jnp.int32),
    )

    def put(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map(put, shapes)
    changed = [f"{word}={number}" for word, number in DEMOS[name].items()]
    words = ", ".join(changed) or "as it comes"
    step = jax.jit(update.make_update(structure, options), donate_argnums=0)
    return Cell(f"training step of the demo ({words})", "flax_mha", step, arguments)


def row(cell: Cell) -> dict[str, str]:
    """What the compiler reports, or why it does not compile."""
    facts = {"program": cell.name, "implementation": cell.implementation}
    try:
        facts["chosen"] = cell.chosen() if cell.chosen else ""
        function: Any = cell.function
        # The demo's step is already jitted, with its state donated.
        if not hasattr(function, "lower"):
            function = jax.jit(function)
        compiled = function.lower(*cell.arguments).compile()
    except Exception as error:  # whatever it is, the table shows it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = lines[0][:160] if lines else "?"
        reason = f"fails: {type(error).__name__}: {first}"
        return facts | {"chosen": f"{facts.get('chosen', '')} {reason}".strip()}
    costs = hlo.Program(compiled.as_text()).costs()
    more = "" if costs.is_exact else "+"
    counts = [f"{number:g} {name}" for name, number in costs.collectives.items()]
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return facts | {
        "attention": f"{costs.attention:g}",
        "others": f"{costs.others:g}{more}",
        "MiB moved": f"{costs.traffic / 2**20:,.0f}{more}",
        "MiB a step": f"{costs.step / 2**20:,.0f}" if costs.step else "",
        "temporaries": f"{temporaries / 2**20:,.0f}",
        "collectives": ", ".join(counts) or "none",
    }


def modelled(costs: hlo.Costs) -> float:
    """Seconds that a program takes if bytes and launches are all that takes time."""
    return costs.traffic / BYTES_A_SECOND + costs.others * SECONDS_A_LAUNCH


def rows_of_model(
    target: Target, programs: dict[str, unfused.Program]
) -> Iterator[dict[str, str]]:
    """One call, as Flax computes it and as we do."""
    alone = on_first(target)
    flax_takes = None
    for who, program in programs.items():
        arrays = []
        for shape in program.shapes:
            arrays.append(jax.ShapeDtypeStruct(*shape, sharding=alone))
        function = program.function
        if "gradient" in program.name:
            function = with_gradient(function, program.floats)
        compiled = jax.jit(function).lower(*arrays).compile()
        costs = hlo.Program(compiled.as_text(), program.trips).costs()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        takes = modelled(costs)
        # Flax's program is the first.
        if flax_takes is None:
            flax_takes = takes
        chosen = ""
        if who == "flax_mha":
            explain = unfused.explain_with(program.function, explain_implementation)
            chosen = chosen_for(explain, arrays)
        yield {
            "program": program.name,
            "implementation": who,
            "kernels": f"{costs.others:.0f}",
            "MiB moved": f"{costs.traffic / 2**20:,.0f}",
            "temporaries": f"{temporaries / 2**20:,.0f}",
            "ms": f"{1e3 * takes:.3f}",
            "of Flax's": f"{takes / flax_takes:.2f}",
            "chosen": chosen,
        }


def head(name: str, columns: dict[str, str], remark: str) -> list[str]:
    """Of a table: target, versions, command."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax")
    installed = {package.name.lower() for package in importlib.metadata.distributions()}
    present = [name for name in packages if name in installed]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in present]
    date = datetime.datetime.now(datetime.UTC).date()
    python = ".".join(map(str, sys.version_info[:3]))
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    command = shlex.join(["python", script, *sys.argv[1:]])
    return [
        f"# Compiled ahead of time for {name}",
        "",
        f"{date}, Python {python}, {', '.join(versions)}; `{command}`. {remark} The "
        "columns: see `benchmarks/compiled.py`.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'|'.join(columns.values())}|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target",
        required=True,
        help="v5e:2x2, v5e:4x4, h200, h200x4, or another TPU topology",
    )
    parser.add_argument("--only", default="", help="programs that contain these words")
    parser.add_argument(
        "--skip", default="no program", help="programs that contain these words"
    )
    parser.add_argument(
        "--out", type=Path, help="file to write the table to, in addition to the screen"
    )
    parser.add_argument(
        "--table",
        choices=("fused", "unfused", "masks"),
        default="fused",
        help="which calls",
    )
    options = parser.parse_args()
    target = target_of(options.target)
    # It would want to load what is made for other devices.
    jax.config.update("jax_enable_compilation_cache", False)
    columns = COLUMNS
    name = options.target
    remark = "Nothing ran."
    if options.table == "masks":
        name = f"{options.target}: calls of Flax programs"
    elif options.table == "unfused":
        columns = COLUMNS_OF_MODEL
        name = f"{options.target}: calls that fused kernels refuse"
        remark = "Nothing ran: milliseconds are counted, not timed."
    lines = head(name, columns, remark)
    print("\n".join(lines), flush=True)

    def is_wanted(name: str) -> bool:
        return options.only in name and options.skip not in name

    def rows_of(cells: Iterator[Cell]) -> Iterator[dict[str, str]]:
        for cell in cells:
            if is_wanted(cell.name):
                count = len(target.devices) if "split" in cell.name else 1
                with compiling_for(target, count):
                    yield row(cell)

    def rows_of_unfused() -> Iterator[dict[str, str]]:
        for programs in unfused.programs():
            if is_wanted(programs["Flax"].name):
                with compiling_for(target, 1):
                    yield from rows_of_model(target, programs)

    tables = {
        "fused": lambda: rows_of(cells(target)),
        "masks": lambda: rows_of(mask_cells(target)),
        "unfused": rows_of_unfused,
    }
    for facts in tables[options.table]():
        lines.append(f"| {' | '.join(facts.get(column, '') for column in columns)} |")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
