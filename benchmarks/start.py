"""Measures the time before anything is computed: importing the package, tracing and
lowering one call, and compiling many layers.

    python benchmarks/start.py [--length 2048] [--seconds S | --rounds N] [--out
    benchmarks/results/NAME]

Imports happen in fresh interpreters: flax, flax.nnx and flax.linen, then flax_mha, for
which only what it adds counts. A call of 8 heads of size 64 is traced (jax.make_jaxpr)
and lowered (jit's .lower(), tracing included), every time with jax's caches cleared;
`backward` is the gradient of query, key and value. For CUDA, bfloat16 calls of cuDNN's
kernel are lowered; for ours, jax also traces what a CPU would run instead. 12 causal
layers (512 features, 8 heads) are traced, lowered and compiled, without the compile
cache; `backward` is the gradient of all parameters.

Columns:
  spread      distance between the quartiles, in % of the median
  x jax.nn    milliseconds as a multiple of those of jax.nn.dot_product_attention
  x Flax      milliseconds as a multiple of Flax's
  kernels     in the program of all layers: fusions, those in loops counted once
"""

import contextlib
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import measure
from flax import nnx
from targets import Target, compiling_for

from flax_mha import MultiHeadAttention, dot_product_attention

COLUMNS = {
    "what": "what",
    "pass": "pass",
    "implementation": "",
    "ms": "ms",
    "spread": "spread",
    "to_jax_nn": "x jax.nn",
    "to_flax": "x Flax",
    "kernels": "kernels",
    "note": "",
}
IMPORTS = """
import json, time
times = [time.perf_counter()]
import flax, flax.nnx, flax.linen
times.append(time.perf_counter())
import flax_mha
times.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""
OURS = "flax_mha"
FLAX = "Flax"
THEIRS = "jax.nn"
CUDA = "lowering for CUDA"
ATTENTIONS = {
    "flax_mha xla": functools.partial(dot_product_attention, implementation="xla"),
    "flax_mha blockwise": functools.partial(
        dot_product_attention, implementation="blockwise"
    ),
    THEIRS: jax.nn.dot_product_attention,
}
ON_CUDA = {
    OURS: dot_product_attention,
    THEIRS: functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}
MODULES = {OURS: MultiHeadAttention, FLAX: nnx.MultiHeadAttention}
LAYERS = 12
HEADS = 8
FEATURES = 512


def imports(rounds: int, say) -> dict[str, measure.Row]:
    """The first, which may have to compile Python's bytecode, does not count."""
    seconds = []
    for i in range(rounds + 1):
        say(f"interpreter {i + 1} of {rounds + 1}")
        run = [sys.executable, "-c", IMPORTS]
        printed = subprocess.check_output(run, text=True)
        seconds.append(json.loads(printed))
    # Ours also loads jax and Flax, so only what it adds to them counts.
    flax, ours = zip(*seconds[1:], strict=True)
    results = {
        FLAX: measure.summary(flax),
        OURS: measure.summary(ours),
    }
    measure.ratios(results, FLAX, "to_flax")
    return results


def tracing(
    what: str, direction: str, length: int, options, say
) -> dict[str, measure.Row]:
    """Times a call or its gradient: tracing, or tracing and lowering."""
    if what == CUDA:
        attentions, dtype, platform = ON_CUDA, jnp.bfloat16, "cuda"
        device = compiling_for(Target("gpu", []))
    else:
        attentions, dtype, platform = ATTENTIONS, jnp.float32, "cpu"
        device = contextlib.nullcontext()
    x = jax.ShapeDtypeStruct((1, length, 8, 64), dtype)

    def peer(attend) -> measure.Ready:
        f = attend
        if direction == "backward":
            f = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2))

        def lower() -> jax.stages.Lowered:
            return jax.jit(f).trace(x, x, x).lower(lowering_platforms=(platform,))

        call = lower
        if what == "tracing":
            call = functools.partial(jax.make_jaxpr(f), x, x, x)
        # Otherwise jax would return what it has traced before.
        return measure.Ready(call, before=jax.clear_caches)

    peers = {name: functools.partial(peer, f) for name, f in attentions.items()}
    with device:
        results = measure.compare(peers, options, say)
    measure.ratios(results, THEIRS, "to_jax_nn")
    return results


def compiling(length: int, options, say) -> dict[str, measure.Row]:
    """Times tracing, lowering and compiling the gradient of many layers."""
    x = jax.ShapeDtypeStruct((1, length, FEATURES), jnp.float32)
    kernels = {}

    def peer(name: str) -> measure.Ready:
        layers = []
        for seed in range(LAYERS):
            rngs = nnx.Rngs(seed)
            layers.append(MODULES[name](HEADS, FEATURES, decode=False, rngs=rngs))
        structure, parameters = nnx.split(layers)

        def loss(parameters: nnx.State, x: jax.Array) -> jax.Array:
            for layer in nnx.merge(structure, parameters):
                x = x + layer(x, is_causal=True)
            return (x**2).sum()

        def compiled() -> jax.stages.Compiled:
            return jax.jit(jax.grad(loss)).lower(parameters, x).compile()

        kernels[name] = compiled().as_text().count(" fusion(")
        return measure.Ready(compiled, before=jax.clear_caches)

    peers = {name: functools.partial(peer, name) for name in MODULES}
    results = measure.compare(peers, options, say)
    for name, result in results.items():
        result["kernels"] = kernels.get(name)
    measure.ratios(results, FLAX, "to_flax")
    return results


def plot(rows: list[measure.Row], options) -> None:
    """Milliseconds of the calls."""
    shown = []
    for row in rows:
        if row["what"] in ("tracing", "lowering"):
            group = f"{row['what']}, {row['pass']}"
            shown.append(row | {"panel": "", "group": group})
    figure, panels = measure.grid(shown, "panel", "panel", ("ms; lower is better", ""))
    for axes, own in panels:
        measure.bars(axes, own, "group", "ms")
    device = measure.about()["device"]
    figure.suptitle(f"One call, before anything is computed ({device})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    # A program that is read from the compile cache is not compiled.
    jax.config.update("jax_enable_compilation_cache", False)
    passes = ("forward", "backward")
    calls = ("tracing", "lowering", CUDA)
    cells = [("import", "", None)]
    cells += [
        (what, direction, options.length) for what in calls for direction in passes
    ]
    for length in (128, 1024):
        cells.append(
            (f"compiling {LAYERS} layers, {length} tokens", "backward", length)
        )
    with measure.Report("Before anything is computed", COLUMNS, options) as report:
        for what, direction, length in report.each(cells):
            if what == "import":
                results = imports(options.rounds or 7, report.say)
            elif what.startswith("compiling"):
                results = compiling(length, options, report.say)
            else:
                results = tracing(what, direction, length, options, report.say)
            report.add({"what": what, "pass": direction}, results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
