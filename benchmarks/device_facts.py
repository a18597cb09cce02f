"""Facts about a GPU or TPU for benchmarks/on_device.py, as a JSON file.

    python benchmarks/device_facts.py {versions,demo} --out FILE [--small]

What is written:
  versions    those of all packages and of the driver, and which implementation is
              chosen for typical calls, with the reasons; fails without a GPU or TPU
              (unless --small), and if FILE was written with others
  demo        times and loss of the demo at 1024 tokens of context in bfloat16, and
              the library calls in its compiled step, which show which kernels ran
"""

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from train_demo.run_folder import write_atomically

# JAX is imported by the functions: on_device.py imports this file without it.

DEMO = {"size": "medium", "context_length": 1024, "steps": 500, "eval_every": 100}
SMALL_DEMO = {
    "layers": 1,
    "heads": 2,
    "features": 32,
    "context_length": 16,
    "batch_size": 2,
    "steps": 3,
    "optimizer": "adamw",
}
PACKAGES = ("jax", "libtpu", "nvidia-", "optax", "orbax", "triton")


def versions(out: Path, small: bool) -> None:
    """The device, all versions, and what runs typical calls."""
    import jax
    import measure

    if measure.ON_CPU and not small:
        raise SystemExit(
            "JAX found no GPU or TPU: install jax[cuda13] or jax[tpu], or pass --small "
            "to try the command on a CPU"
        )
    about = {**measure.about(), "revision": revision(), "small": small}
    if out.exists():
        before = json.loads(out.read_text())
        for name in ("device", "versions", "revision", "small"):
            if before[name] != about[name]:
                raise SystemExit(
                    f"{name} was {before[name]} for the results in --out, but is now "
                    f"{about[name]}: choose another --out"
                )
    packages = {}
    for package in importlib.metadata.distributions():
        if package.name and package.name.lower().startswith(PACKAGES):
            packages[package.name] = package.version
    chosen = {name: explained(*call) for name, call in typical_calls().items()}
    names = {name: text.splitlines()[0] for name, text in chosen.items()}
    about["summary"] = {
        "device": about["device"],
        "revision": about["revision"],
        **about["versions"],
        **names,
    }
    about["packages"] = packages
    about["explanations"] = chosen
    # With what nvidia-smi prints, such as the driver.
    about["environment"] = jax.print_environment_info(return_string=True)
    flags = [name for name in os.environ if name.startswith(("XLA_", "JAX_", "NVIDIA"))]
    about["variables"] = {name: os.environ[name] for name in flags}
    write_json(out, about)


def revision() -> str | None:
    """The commit of the repository; None in a copy without Git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def typical_calls() -> dict[str, tuple[Any, ...]]:
    """Name -> query, key and the options of `dot_product_attention`."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x = array(4, 4096, 16, 64)
    wide = array(4, 4096, 16, 128)
    single = array(4, 4096, 16, 64, dtype=jnp.float32)
    few = array(4, 4096, 4, 64)
    short = array(8, 128, 8, 64)
    one = array(8, 1, 16, 64)
    cache = array(8, 4096, 16, 64)
    ids = jnp.zeros((4, 4096), jnp.int32)
    of_documents = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    lengths = {"key_value_seq_lengths": jnp.full(4, 3000, jnp.int32)}
    mask = {"mask": jnp.ones((4, 1, 4096, 4096), bool)}
    causal = {"is_causal": True}
    return {
        "full": (x, x, {}),
        "causal": (x, x, causal),
        "causal, heads of 128": (wide, wide, causal),
        "causal, 4 key heads": (x, few, causal),
        "causal, 128 tokens": (short, short, causal),
        "causal, window of 512": (x, x, causal | {"local_window_size": (511, 0)}),
        "causal, float32": (single, single, causal),
        "causal, documents": (x, x, causal | of_documents),
        "causal, soft cap": (x, x, causal | {"logits_soft_cap": 30.0}),
        "lengths": (x, x, lengths),
        "mask as an array": (x, x, mask),
        "one query": (one, cache, {}),
    }


def explained(query: Any, key: Any, options: dict[str, Any]) -> str:
    """The implementation and its algorithm; in the lines below, why not the others."""
    import jax

    import flax_mha

    found = []

    def call(query: Any, key: Any) -> None:
        explanation = flax_mha.explain_implementation(query, key, key, **options)
        found.append(explanation)

    jax.eval_shape(call, query, key)
    (explanation,) = found
    first = explanation.chosen
    if explanation.variant is not None:
        first += f", {explanation.variant}"
    return f"{first}\n{explanation}"


def demo(out: Path, small: bool) -> None:
    """Trains the demo, and finds out which kernels its step consists of."""
    import train_demo
    from train_demo import metrics

    options: dict[str, Any] = {**DEMO, "dtype": "bfloat16", "samples": False}
    if small:
        options |= SMALL_DEMO
    # Not in --out: a checkpoint is large, and the run takes a minute or two.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        start = time.perf_counter()
        run = train_demo.train(
            out=f"{folder}/run", save_every=options["steps"], **options
        )
        seconds = time.perf_counter() - start
        explanation, kernels = engine_of(run.config, run.model)
    step = metrics.step_seconds(run.metrics)
    chosen = run.config.settings
    sizes = ("context_length", "batch_size", "layers", "heads", "features", "dtype")
    facts = {name: getattr(chosen, name) for name in sizes}
    facts |= {
        "steps": chosen.steps,
        "seconds of training, with compiling": run.metrics[-1]["seconds"],
        "seconds with pictures and a sample": round(seconds, 1),
        "ms per step": step and round(1000 * step, 2),
        "validation loss": round(run.val_loss, 4),
        "chosen attention": explanation.splitlines()[0],
        "library calls in the compiled step": kernels,
    }
    found = {"summary": facts, "explanation": explanation, "metrics": run.metrics}
    write_json(out, found)


def engine_of(config: Any, model: Any) -> tuple[str, dict[str, int]]:
    """What is chosen for the attention of a demo's training step; the targets of custom
    calls in its compiled program, with their numbers.
    """
    import jax
    import jax.numpy as jnp

    from train_demo import data, mesh, update
    from train_demo.model import blueprint
    from train_demo.settings import Layout

    settings = config.settings
    shape = (settings.batch_size, settings.context_length, settings.features)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(settings.dtype))
    found = []

    def explain(x: jax.Array) -> None:
        found.append(model.blocks[0].attention.explain(x, is_causal=True))

    jax.eval_shape(explain, x)

    # The same program as in the training, so it comes from the cache.
    text = data.load(config.data, settings.context_length)
    kinds = len(text.vocabulary)
    over = mesh.make(Layout().sizes(jax.device_count(), settings))
    structure, _ = blueprint(kinds, settings)

    def draw() -> update.State:
        return update.first_state(kinds, settings)

    shardings = mesh.shardings(over, jax.eval_shape(draw))
    state = jax.jit(draw, out_shardings=shardings)()
    step = update.compiled(update.make_update(structure, settings), over, shardings)
    characters = mesh.put(over, text.training)
    with mesh.use(over):
        program = step.lower(state, 1, characters).compile().as_text()
    targets = re.findall(r'custom_call_target="([^"]+)"', program)
    return f"{found[0].chosen}\n{found[0]}", collections.Counter(targets)


def write_json(file: Path, value: Any) -> None:
    write_atomically(file, f"{json.dumps(value, indent=1)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["versions", "demo"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    find = {"versions": versions, "demo": demo}[options.what]
    find(options.out, options.small)


if __name__ == "__main__":
    main()
