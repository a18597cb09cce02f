"""Measures how fast a small transformer learns a text: the demo against nanoGPT's
recipe on the same machine.

    python benchmarks/training.py --data FILE [--steps N] [--twin-steps N] [--every N]
                                   [--seconds S | --rounds N] [--out
                                   benchmarks/results/NAME]

Each contender trains in a process of its own, one after the other, and is given the
same text, split alike, and the same validation windows, for which the clock stands
still. Seconds count from before its interpreter starts: imports and compiling are part
of them. Contenders:

  nanoGPT's recipe, PyTorch   benchmarks/nanogpt.py
  ours, first run             the demo's default settings, with an empty cache of
                              compiled programs
  ours, again                 the same once more, with what the first run compiled
  ours, Flax's attention      likewise with a filled cache, with
                              flax.nnx.dot_product_attention

Then their training steps take turns in one process. "ours at the twin's size" has its 4
layers, and AdamW.

Columns:
  seconds     from the start to the end
  loss        validation loss at the end, nats per character
  passed      seconds until the loss is no higher than the twin's at its end
  of twin     these as a share of the twin's seconds
  loss then   the last loss before the twin ended
  lower by    the twin's last loss without it
  ms, spread  of one training step; distance between the quartiles, in % of the median
  x twin      milliseconds as a multiple of the twin's
  x Flax      milliseconds as a multiple of those with Flax's attention
"""

import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import contender
import jax
import jax.numpy as jnp
import measure
import nanogpt
from contender import BY_FLAX, OURS, TWIN
from flax import nnx
from matplotlib.figure import Figure

from train_demo import data, model, update
from train_demo.settings import Settings, completed

FIRST = f"{OURS}, first run"
AGAIN = f"{OURS}, again"
SAME_SIZE = "ours at the twin's size"
COLUMNS = {
    "implementation": "",
    "parameters": "parameters",
    "seconds": "seconds",
    "loss": "loss",
    "passed": "passed",
    "of_twin": "of twin",
    "loss_then": "loss then",
    "lower_by": "lower by",
    "ms": "ms",
    "spread": "spread",
    "to_twin": "x twin",
    "to_flax": "x Flax",
    "note": "",
}


def trained(name: str, options, cache: str, *more: str) -> list[measure.Row]:
    """What a contender printed: its validations."""
    # Every program is kept, however fast it compiles.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [
        sys.executable,
        contender.__file__,
        name,
        "--data",
        str(options.data),
        "--started",
        repr(time.time()),
    ]
    steps = options.twin_steps if name == TWIN else options.steps
    command += ["--steps", str(steps), "--every", str(options.every), *more]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def races(options, say) -> dict[str, list[measure.Row]]:
    curves = {}
    kinds = {TWIN: TWIN, FIRST: OURS, AGAIN: OURS, BY_FLAX: BY_FLAX}
    with tempfile.TemporaryDirectory() as cache:
        for name, kind in kinds.items():
            say(f"{name} trains")
            if kind == BY_FLAX:
                trained(kind, options, cache, "--until", "1")  # fills the cache
            curves[name] = trained(kind, options, cache)
    return curves


def compared(curves: dict[str, list[measure.Row]]) -> dict[str, measure.Row]:
    """The columns that tell of whole runs."""
    results = {}
    end = curves[TWIN][-1]
    for name, curve in curves.items():
        last = curve[-1]
        row = {"seconds": last["seconds"], "loss": last["val_loss"], "curve": curve}
        results[name] = row
        if name == TWIN:
            continue
        # When it had learned as much as the twin learns.
        as_good = [point for point in curve if point["val_loss"] <= end["val_loss"]]
        passed = as_good[0]["seconds"] if as_good else None
        row["passed"] = passed
        row["of_twin"] = passed and passed / end["seconds"]
        # How much it had learned when the twin ended.
        in_time = [point for point in curve if point["seconds"] <= end["seconds"]]
        if in_time:
            row["loss_then"] = in_time[-1]["val_loss"]
            row["lower_by"] = end["val_loss"] - row["loss_then"]
    return results


def step_of_jax(
    text: data.Text, settings: Settings, flax: bool = False
) -> measure.Ready:
    """One update a call."""
    # The demo's transformer, or the same with Flax's attention.
    structure, _ = model.blueprint(len(text.vocabulary), settings)
    params = model.initial_params(len(text.vocabulary), settings)
    if flax:
        transformer = nnx.merge(structure, params)
        for block in transformer.blocks:
            block.attention.attention_fn = nnx.dot_product_attention
            # Which no window of the training is longer than.
            block.attention.local_window_size = None
        structure, _ = nnx.split(transformer, nnx.Param)
    characters = jnp.asarray(text.training)
    state = update.State(params, update.make_optimizer(settings).init(params))
    step = jax.jit(update.make_update(structure, settings), donate_argnums=0)
    numbers = itertools.count(1)

    # Each update gets the state that the last one returned: the one before is donated.
    def call() -> jax.Array:
        nonlocal state
        state, loss = step(state, next(numbers), characters)
        return loss

    return measure.Ready(call, jax.block_until_ready)


def step_of_torch(text: data.Text) -> measure.Ready:
    measure.torch_here()
    _, step = nanogpt.trainer(text.training, len(text.vocabulary))
    numbers = itertools.count()
    return measure.Ready(lambda: step(next(numbers) % nanogpt.STEPS))


def parameters(text: data.Text, settings: Settings) -> int:
    _, params = model.blueprint(len(text.vocabulary), settings)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def steps(text: data.Text, options, say) -> dict[str, measure.Row]:
    ours = Settings()
    given = {"layers": nanogpt.LAYERS, "optimizer": "adamw"}
    same = Settings(**completed("tiny", given))
    peers = {
        TWIN: functools.partial(step_of_torch, text),
        AGAIN: functools.partial(step_of_jax, text, ours),
        BY_FLAX: functools.partial(step_of_jax, text, ours, flax=True),
        SAME_SIZE: functools.partial(step_of_jax, text, same),
    }
    results = measure.compare(peers, options, say)
    measure.ratios(results, TWIN, "to_twin")
    own = {name: results[name] for name in (AGAIN, BY_FLAX)}
    measure.ratios(own, BY_FLAX, "to_flax")
    for name, settings in ((AGAIN, ours), (BY_FLAX, ours), (SAME_SIZE, same)):
        results[name]["parameters"] = parameters(text, settings)
    twin = nanogpt.GPT(len(text.vocabulary))
    results[TWIN]["parameters"] = sum(array.numel() for array in twin.parameters())
    return results


def plot(results: dict[str, measure.Row], title: str, options) -> None:
    """Loss against seconds."""
    # Small, so that its text can be read on a phone.
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in results.items():
        if "curve" in row:
            points = [(point["seconds"], point["val_loss"]) for point in row["curve"]]
            axes.plot(*zip(*points, strict=True), ".-", label=name)
    axes.axhline(results[TWIN]["loss"], color="0.6", linewidth=0.8)
    axes.set(
        xlabel="seconds since the command",
        ylabel="validation loss (nats per character)",
    )
    axes.set_title(title, fontsize="medium")
    axes.set_ylim(top=min(3.0, axes.get_ylim()[1]))
    axes.grid(alpha=0.3)
    measure.save(figure, options.out, columns=2)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="a UTF-8 text of about 1 MB"
    )
    parser.add_argument(
        "--steps", type=int, default=Settings().steps, help="of ours (%(default)s)"
    )
    parser.add_argument(
        "--twin-steps",
        type=int,
        default=nanogpt.STEPS,
        help="of the twin (%(default)s)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=50,
        help="steps between two validations (%(default)s)",
    )
    options = parser.parse_args()
    if options.every < 1:
        parser.error(f"--every: expected at least 1 step, got {options.every}")
    text = data.load(str(options.data), nanogpt.CONTEXT)
    digest = hashlib.sha256(options.data.read_bytes()).hexdigest()
    facts = {
        "data": options.data.name,
        "bytes": options.data.stat().st_size,
        "sha256": digest,
    }
    title = f"{facts['data']}, {facts['bytes']:,} bytes, sha256 {digest[:12]}"
    with measure.Report(f"Loss against seconds: {title}", COLUMNS, options) as report:
        for _ in report.each([title]):
            results = compared(races(options, report.say))
            turns = steps(text, options, report.say)
            turns = {FIRST: turns[AGAIN], **turns}  # the same program
            names = (TWIN, FIRST, AGAIN, BY_FLAX, SAME_SIZE)
            results = {name: results.get(name, {}) | turns[name] for name in names}
            facts |= {"steps": options.steps, "twin_steps": options.twin_steps}
            report.add(facts, results)
    plot(results, title, options)


if __name__ == "__main__":
    main()
