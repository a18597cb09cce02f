"""Compiles the kernels of `implementation="pallas"` ahead of time for TPUs, and inspects the programs; nothing runs.

    python benchmarks/pallas.py programs|bundles|primitives [--only WORDS] [--out FILE.md]

This needs `pip install libtpu`, neither a driver nor a device. Three tables:

  programs     causal attention in bfloat16, forward and with its gradient, for several TPUs: launches of Pallas
               kernels, MiB of temporaries and of arguments (for gradients these are query, key, value and the gradient
               of the output), and collectives; in rings launches and collectives of one hop, and of one pair of chunks
  bundles      how many instruction bundles the compiler emits for a tile of 512 x 512 scores on v5e, beside the same of
               splash attention: first for tiles that are visible throughout, then for tiles to mask; splash has one for
               both. A bundle takes at least one cycle.
  primitives   a `score_mod` of every primitive that the kernels accept, and its derivative
"""

import argparse
import datetime
import importlib.metadata
import itertools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import hlo
import jax
import jax.numpy as jnp
from targets import Target, compiling_for, mesh_of, target_of

from flax_mha import context_parallel, dot_product_attention, recipes

CHIPS = ("v5e:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2")
HEADS, ALIBI_HEADS = 8, 2
Arguments = dict[str, Any]


def program(implementation: str, way: str, attention: Callable = dot_product_attention, **arguments: Any) -> Callable:
    """Attention of arrays, the last of which is the gradient of the output; `bias` may stand between."""

    def attend(*arrays: Any) -> Any:
        return attention(*arrays, implementation=implementation, **arguments)

    def both(*arrays: Any) -> Any:
        output, pull = jax.vjp(attend, *arrays[:-1])
        return output, pull(arrays[-1])

    return attend if way == "forward" else both


def shapes(length: int, size: int, heads: int, sharding: Any, way: str, bias: bool = False) -> list[Any]:
    sizes = [(1, length, heads, size)] * 3 + ([(heads, length, length)] if bias else [])
    sizes += [(1, length, heads, size)] if way == "gradient" else []
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in sizes]


def compiled(target: Target, function: Callable, arguments: list[Any], count: int = 1) -> Any:
    mesh = arguments[0].sharding.mesh.abstract_mesh
    with compiling_for(target, count), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).lower(*arguments).compile()


def row(name: str, make: Callable[[], Any]) -> str:
    """A line of the table of programs, or why it does not compile."""
    try:
        result = make()
    except Exception as error:  # whatever it is, the table shows it
        first = next(line.strip() for line in [*str(error).splitlines(), "?"] if line.strip())
        return f"| {name} | fails: {type(error).__name__}: {first[:160]} | | | |"
    costs, memory = hlo.Program(result.as_text()).costs(), result.memory_analysis()
    sizes = (memory.temp_size_in_bytes, memory.argument_size_in_bytes)
    collectives = ", ".join(f"{n:g} {what}" for what, n in costs.collectives.items()) or "none"
    return f"| {name} | {costs.attention:g} | {sizes[0] / 2**20:,.1f} | {sizes[1] / 2**20:,.1f} | {collectives} |"


def programs() -> Iterator[tuple[str, Callable[[], str]]]:
    """Names, and what makes the lines."""
    for chip in CHIPS:
        for length in (2048, 8192):
            for size in (64, 128):
                for way in ("forward", "gradient"):
                    name = f"{chip.partition(':')[0]}, (1, {length}, {HEADS}, {size}), {way}"
                    yield name, lambda name=name, at=(chip, length, size, way): row(name, lambda: alone(*at))
    name = f"v5e, (1, 2048, {HEADS}, 64), bias of every head, gradient"
    yield name, lambda name=name: row(name, lambda: alone("v5e:2x2", 2048, 64, "gradient", bias=True))
    name = f"v5e, 4 chips, jax.shard_map over heads, (1, 2048, {HEADS}, 64), gradient"
    yield name, lambda name=name: row(name, split)
    for layout, way in itertools.product(("contiguous", "zigzag"), ("forward", "gradient")):
        name = f"v5e, 4 chips, ring, {layout}, (1, 8192, {HEADS}, 64), {way}"
        yield name, lambda name=name, at=(layout, way): row(name, lambda: ring(*at))


def alone(chip: str, length: int, size: int, way: str, bias: bool = False) -> Any:
    """On one chip."""
    target = target_of(chip)
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(target.devices[:1], "x"), jax.P())
    function = program("pallas", way, is_causal=True)
    return compiled(target, function, shapes(length, size, HEADS, place, way, bias))


def split() -> Any:
    """On four chips, each with its own heads."""
    target = target_of("v5e:2x2")
    mesh, spec = mesh_of(target.devices), jax.P(None, None, ("data", "model"))
    arguments = shapes(2048, 64, HEADS, jax.sharding.NamedSharding(mesh, spec), "gradient")
    function = program("pallas", "gradient", is_causal=True)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return compiled(target, mapped, arguments, len(target.devices))


def ring(layout: Any, way: str) -> Any:
    """On four chips, each with its own part of the sequence."""
    target = target_of("v5e:2x2")
    mesh = jax.sharding.Mesh(target.devices, "context")
    attention = context_parallel("context", "ring", layout, mesh=mesh)
    arguments = shapes(8192, 64, HEADS, jax.sharding.NamedSharding(mesh, jax.P(None, "context")), way)
    return compiled(target, program("pallas", way, attention, is_causal=True), arguments, len(target.devices))


def bundles() -> Iterator[str]:
    """Compiles causal attention, and ALiBi, and reads what the compiler writes of it, which takes it a while."""
    folder = Path(tempfile.mkdtemp(prefix="bundles-"))
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    target = target_of("v5e:2x2")
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(target.devices[:1], "x"), jax.P())
    alibi = recipes.alibi(ALIBI_HEADS)
    calls: dict[str, tuple[str, str, Arguments]] = {
        "splash": ("splash", "gradient", {"is_causal": True}),
        "pallas": ("pallas", "gradient", {"is_causal": True}),
        "pallas, ALiBi": ("pallas", "forward", alibi),
    }
    for size, (name, (implementation, way, arguments)) in itertools.product((128, 64), calls.items()):
        seen = set(folder.iterdir())
        compiled(target, program(implementation, way, **arguments), shapes(1024, size, ALIBI_HEADS, place, way))
        for path in sorted(set(folder.glob("*final_bundles.txt")) - seen):
            if re.search(r"flax_mha|splash", path.name) and "schedule-analysis" not in path.name:
                tiles = [n for n in branches(path.read_text()) if n > 1000]
                kernel = re.sub(r"^\d+-|(\.\d+)?-\d+-final_bundles\.txt$", "", path.name)
                yield f"| {size} | {name} | {kernel} | {', '.join(map(str, tiles))} |"


def branches(text: str) -> list[int]:
    """How many bundles stand between the places that branches lead to."""
    places = [(int(m[1], 16), m[2]) for m in re.finditer(r"^\s*(0x[0-9a-f]+|0) (PF|LB|LE|  )", text, re.MULTILINE)]
    marks = [0, *(address for address, kind in places if kind.strip()), places[-1][0]]
    return [after - before for before, after in itertools.pairwise(marks)]


def of_floats(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """All that `flax_mha/_src/engines/pallas/split_function.py` accepts of floats."""
    x = jnp.abs(score) + 1.5
    y = [jnp.exp(-x), jnp.exp2(-x), jnp.log(x), jnp.log1p(x), jnp.tanh(x), jax.lax.logistic(x), jnp.isfinite(x) * 1.0]
    y += [jnp.sqrt(x), jax.lax.rsqrt(x), jnp.sin(x), jnp.cos(x), jnp.floor(x), jnp.ceil(x), jnp.round(x), x**3, x**1.5]
    y += [jnp.square(x), 1 / x, -x, jnp.sign(score), jax.lax.clamp(1.0, x, 2.0), jax.lax.stop_gradient(x)]
    return score + sum(y) + jnp.maximum(x, score) + jnp.minimum(x, score)


def of_integers(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The same of positions."""
    x = q - k
    y = [x // 3, x % 5, jnp.sign(x), jnp.abs(x), x & 3, x | 4, x ^ 1, ~x, x << 1, x >> 1, x**2, jnp.maximum(q, k)]
    y += [jnp.where((q > k) & ~(q == 3) | (k != 2) ^ (q <= k), q, k), jax.lax.shift_right_logical(x, 1)]
    return score + sum(y).astype(jnp.float32)


def primitives(score_mod: Callable) -> Any:
    """Forward and gradient."""
    target = target_of("v5e:2x2")
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(target.devices[:1], "x"), jax.P())
    function = program("pallas", "gradient", score_mod=score_mod)
    return compiled(target, function, shapes(512, 64, 1, place, "gradient"))


def head() -> list[str]:
    """Of the file: versions, command."""
    packages = ("jax", "jaxlib", "libtpu")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    date, python = datetime.datetime.now(datetime.UTC).date(), ".".join(map(str, sys.version_info[:3]))
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    said = f"{date}, Python {python}, {versions}; `{command}`. Nothing ran. The tables: see `benchmarks/pallas.py`."
    return ['# `implementation="pallas"`, compiled ahead of time', "", said, ""]


def lines(options: argparse.Namespace) -> Iterator[str]:
    if options.table == "programs":
        yield "| causal, bfloat16 | kernels | temporaries | arguments | collectives |"
        yield "|---|---:|---:|---:|---|"
        for name, make in programs():
            if options.only in name:
                yield make()
    elif options.table == "bundles":
        yield "| head size | causal, (1, 1024, 2, head size) | kernel | bundles of a tile |"
        yield "|---:|---|---|---|"
        yield from bundles()
    else:
        yield "| every primitive, v5e | kernels | temporaries | arguments | collectives |"
        yield "|---|---:|---:|---:|---|"
        yield row("of floats, (1, 512, 1, 64), gradient", lambda: primitives(of_floats))
        yield row("of positions, (1, 512, 1, 64), gradient", lambda: primitives(of_integers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("programs", "bundles", "primitives"))
    parser.add_argument("--only", default="", help="programs that contain these words")
    parser.add_argument("--out", type=Path, help="file to write the table to, in addition to the screen")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # it would want to load what is made for other devices
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    table = head()
    for line in lines(options):
        table.append(line)
        print(line, flush=True)
    if options.out:
        options.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
