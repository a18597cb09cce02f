"""Measures the time before anything is computed: importing the package and tracing one
call.

    python benchmarks/start.py [--length 2048] [--seconds S | --rounds N] [--out
    benchmarks/results/NAME]

Imports happen in fresh interpreters. A call of 8 heads of size 64 is traced
(jax.make_jaxpr) and lowered (jit's .lower(), tracing included), every time with jax's
caches cleared; `backward` is the gradient of query, key and value.

Columns:
  spread      distance between the quartiles, in % of the median
  x jax.nn    milliseconds as a multiple of those of jax.nn.dot_product_attention
  x Flax      milliseconds of the additional import as a multiple of those of Flax's own
"""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import measure

from flax_mha import dot_product_attention

COLUMNS = {
    "what": "what",
    "pass": "pass",
    "implementation": "",
    "ms": "ms",
    "spread": "spread",
    "to_jax_nn": "x jax.nn",
    "to_flax": "x Flax",
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
FLAX = "flax, flax.nnx, flax.linen"
THEIRS = "jax.nn"
ATTENTIONS = {
    "flax_mha xla": functools.partial(dot_product_attention, implementation="xla"),
    "flax_mha blockwise": functools.partial(
        dot_product_attention, implementation="blockwise"
    ),
    THEIRS: jax.nn.dot_product_attention,
}


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
        "flax_mha, after these": measure.summary(ours),
    }
    measure.ratios(results, FLAX, "to_flax")
    return results


def tracing(
    what: str, direction: str, length: int, options, say
) -> dict[str, measure.Row]:
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)

    def peer(attend) -> measure.Ready:
        f = attend
        if direction == "backward":
            f = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2))
        call = jax.make_jaxpr(f) if what == "tracing" else jax.jit(f).lower
        # Otherwise jax would return what it has traced before.
        return measure.Ready(lambda: call(x, x, x), before=jax.clear_caches)

    peers = {name: functools.partial(peer, f) for name, f in ATTENTIONS.items()}
    results = measure.compare(peers, options, say)
    measure.ratios(results, THEIRS, "to_jax_nn")
    return results


def plot(rows: list[measure.Row], options) -> None:
    """Milliseconds of everything."""
    shown = []
    # The picture shows only the calls.
    for row in rows:
        if row["what"] != "import":
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
    cells = [
        ("import", ""),
        ("tracing", "forward"),
        ("tracing", "backward"),
        ("lowering", "forward"),
        ("lowering", "backward"),
    ]
    with measure.Report("Before anything is computed", COLUMNS, options) as report:
        for what, direction in report.each(cells):
            if what == "import":
                results = imports(options.rounds or 7, report.say)
            else:
                results = tracing(what, direction, options.length, options, report.say)
            report.add({"what": what, "pass": direction}, results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
