"""The training loop: it measures, saves, shows what it does, and can be stopped and resumed at any step."""

import functools
import math
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import P
from jaxtyping import Array
from rich.console import Console

from train_demo import (
    STARTED,
    checkpoint,
    generate,
    mesh,
    metrics,
    processes,
    progress,
    samples,
    stopping,
    usage,
    utilization,
)
from train_demo.data import WINDOWS, Text, shard_of_step, validation_windows
from train_demo.errors import printable
from train_demo.layout import Layout
from train_demo.model import Params, Transformer, blueprint, chosen_dtype
from train_demo.pace import Pace, next_stop
from train_demo.run import Run
from train_demo.run_folder import Config, sole_writer, write_config
from train_demo.update import MOST_STEPS, State, Validate, make_updates, make_validate


class SafeConsole(Console):
    """A console whose texts cannot command the terminal."""

    def print(self, *texts: Any, **options: Any) -> None:
        """Prints texts with their control characters escaped."""
        super().print(*(printable(text) if isinstance(text, str) else text for text in texts), **options)


def train(
    config: Config,
    text: Text,
    out: Path,
    resume: bool,
    layout: Layout,
    quiet: bool = False,
    write_samples: bool = True,
) -> int:
    """Trains to the last step, or until Ctrl-C or SIGTERM; leaves checkpoints, metrics and pictures in the folder.

    Args:
        config: the run's configuration.
        text: its text.
        out: its folder.
        resume: whether to go on from the newest whole checkpoint.
        layout: how it is computed. Of several processes each calls this; the first one prints and writes.
        quiet: print nothing.
        write_samples: write a short text at each validation.

    Returns:
        The exit code of the process.

    Raises:
        UserError: another run writes into `out`, or the loss is no longer finite, or the layout does not fit the
            devices, or the processes were started with different options.
    """
    # A terminal gets lines that end between words; a file or a pipe, lines as they are.
    soft_wrap = not sys.stdout.isatty()
    console = SafeConsole(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, quiet=quiet)
    config = replace(config, settings=replace(config.settings, dtype=chosen_dtype(config.settings)))
    devices = mesh.make(layout.sizes(jax.device_count(), config.settings))
    run = Run(config, text, out, layout, devices, console, write_samples)
    options = (config.settings, config.sha256, config.vocabulary.name, config.earlier_ends, layout.alone(), resume)
    processes.refuse_differences("the options", repr(options))  # and every process has looked at the folder
    with mesh.use(devices), sole_writer(out) if layout.first else nullcontext():
        if layout.first:
            write_config(out, config)
        start, state = _restored(run) if resume else (0, run.first_state())
        _introduce(run, state)
        step, state, stopped = _loop(run, start, state)
        if stopped:
            console.print(f"Stopped and saved at step {step}. Go on with:")
            console.print(f"python -m train_demo --resume --out {_shell(out)}", soft_wrap=True)  # can be copied whole
            console.print(f"Its pictures: python -m train_demo plot --out {_shell(out)}")
            return 128 + stopped
        params = mesh.fetch(devices, state.params)
    if layout.first:
        _finish(nnx.merge(run.alone, params), config, out, console)
    return 0


def _restored(run: Run) -> tuple[int, State]:
    like = run.shapes
    if run.shardings is not None:
        like = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), like, run.shardings
        )
    restored = checkpoint.restore_newest(run.out, like._asdict(), run.console.print)
    step = restored.step if restored else 0
    processes.refuse_differences("the checkpoints", str(step))
    if run.layout.first:
        checkpoint.set_aside(run.out, step)
    if restored is None:
        run.console.print(f"{run.out} holds no finished checkpoint: starting from the beginning")
        return 0, run.first_state()
    run.console.print(f"Going on from the checkpoint of step {step}")
    state = State(**restored.trees)
    return step, jax.device_put(state) if run.mesh is None else state


def _introduce(run: Run, state: State) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    devices = "" if run.mesh is None else f"{run.mesh.size} x "
    run.console.print(f"{size:,} parameters on {devices}{jax.devices()[0].device_kind}; compiling a training step ...")
    if run.write_samples:
        run.console.print("in the samples ␣ is a space, ↵ the end of a line, ⇥ a tab", style="dim")


def _loop(run: Run, start: int, state: State) -> tuple[int, State, int | None]:
    """Trains from after `start`; returns the last step, its state, and the number of the signal that stopped it."""
    settings, ends = run.config.settings, {*run.config.earlier_ends, run.config.settings.steps}
    updates, validate = _programs(run)
    training, windows = _characters(run)
    step, unread, pace = start, list[tuple[range, Array]](), Pace(MOST_STEPS, run.layout)
    if run.layout.first:
        samples.drop_after(run.out, start)
    with (
        checkpoint.manager(run.out) as checkpoints,
        metrics.Log(run.out if run.layout.first else None, start, math.log(len(run.text.vocabulary))) as log,
        stopping.heeded(run.console.print, run.layout.num_processes is not None) as stop_request,
        progress.bar(run.console, start, settings) as show,
    ):
        while step < settings.steps:
            end = min(step + pace.steps, next_stop(step, ends, settings.eval_every, settings.save_every))
            state, losses = updates(state, step + 1, end - step, training(step + 1))
            unread.append((range(step + 1, end + 1), losses))
            step = end
            stop, last = stop_request.asked(), step in ends
            measure, keep = last or step % settings.eval_every == 0, last or stop or step % settings.save_every == 0
            # Reading losses waits for them: a dispatch late, when the device has the next one to do.
            while len(unread) > (0 if measure or keep else 1):
                taken, losses = unread.pop(0)
                for number, loss in zip(taken, np.asarray(losses), strict=False):  # there are fewer steps than places
                    last_loss = log.write("loss", number, loss)
                if taken[0] == start + 1:
                    since = time.perf_counter() - STARTED
                    said = f"the first step is done {log.seconds:.1f} s after the start of the training"
                    run.console.print(f"{said}, {since:.1f} s after that of the program")
                pace.took(len(taken))
                show(taken[-1], last_loss, pace.speed)
            if measure:
                val_loss = log.write("val_loss", step, validate(state.params, windows))
                run.console.print(f"step {step:>6}  validation loss {val_loss:.4f}")
                if run.write_samples:
                    _sample(run, step, state.params)
            if keep:
                log.sync()
                checkpoint.save(checkpoints, step, state._asdict())
            if measure or keep:
                pace.pause()
            if stop:
                break
    _conclude(run, pace.speed, step)
    return step, state, stop_request.number


def _programs(run: Run) -> tuple[Callable[..., Any], Validate]:
    """What takes steps, and what validates, both of which compile when they are called first."""
    config, settings, packed = run.config, run.config.settings, run.text.packed
    updates = make_updates(run.structure, settings, config.earlier_ends, run.layout, run.shardings, packed)
    # The windows are not accumulated.
    structure, _ = blueprint(len(run.text.vocabulary), settings, replace(run.layout, accumulate=1))
    return updates, make_validate(structure, packed)


def _conclude(run: Run, steps_per_second: float, step: int) -> None:
    """Says what the report says, too: the speed, and the losses at the end."""
    settings, say = run.config.settings, run.console.print
    tokens = steps_per_second * settings.batch_size * settings.context_length
    devices = 1 if run.mesh is None else run.mesh.size
    if tokens:
        speed = f"{1000 / steps_per_second:,.1f} ms a step: {tokens:,.0f} tokens/s"
        say(f"{speed}, without compiling, validation and saving")
        line = utilization.report(settings, run.shapes.params, devices, tokens)
        if line:
            say(line)
    if run.layout.first:
        loss, number = metrics.mean_of_last(metrics.read(run.out))
        say(f"step {step:>6}  training loss {loss:.4f}, the mean of the last {number} steps")
        usage.write(run.out, usage.measure(run.mesh) | {"tokens_per_second": round(tokens)})


def _characters(run: Run) -> tuple[Callable[[int], Array], Array]:
    """What a step trains on, and the windows of the validation part, on the devices."""
    settings, part = run.config.settings, run.text.training
    parts = mesh.batch_parts()
    together = -(-WINDOWS // parts) * parts  # so many that every part of the mesh has equally many of them
    windows = validation_windows(run.text.validation, settings.context_length, together)

    @functools.lru_cache(maxsize=1)
    def shard(start: int, size: int) -> Array:
        return mesh.put(run.mesh, part.stretch(start, size))

    def training(step: int) -> Array:
        return shard(*shard_of_step(step, len(part), settings.seed, settings.eval_every))

    return training, mesh.put(run.mesh, windows, P(None, mesh.BATCH))


def _sample(run: Run, step: int, params: Params) -> None:
    """Writes and shows a short text; nothing that the training computes depends on it."""
    params = mesh.fetch(run.mesh, params)
    if run.layout.first:
        with mesh.leave():
            sample = samples.add(run.out, step, nnx.merge(run.alone, params), run.config)
        run.console.print(f"{'':13}{sample.line}", style="dim")


def _finish(model: Transformer, config: Config, out: Path, console: Console) -> None:
    from train_demo import plots, report  # Matplotlib takes half a second, and no step needs it

    with progress.busy(console, "Drawing the pictures"):
        weights = plots.attention_weights(model, config)
        plots.draw(out, weights, config)
        report.write(out, weights, config)
    prompt = samples.prompt_of(config)
    with progress.busy(console, "Writing a sample"):
        written = "".join(piece for (piece,) in generate.generate(model, config.vocabulary, [prompt]))
    console.rule("a sample", style="dim")
    console.print(prompt + written)
    console.rule(style="dim")
    console.print(f"{out} holds report.html, loss.png, attention.png, metrics.jsonl and the checkpoints. More text:")
    again = f" {_shell('--prompt=' + prompt)}" if printable(prompt) == prompt else ""  # else it could not be copied
    console.print(f"python -m train_demo sample {_shell(f'--out={out}')}{again}", soft_wrap=True)


def _shell(argument: Path | str) -> str:
    return shlex.quote(str(argument))
