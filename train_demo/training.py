"""The training loop: it measures, saves, shows what it does, and can be stopped and resumed at any step."""

import functools
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import P
from jaxtyping import Array
from rich.console import Console

from train_demo import checkpoint, generate, mesh, metrics, processes, progress, samples, usage, utilization
from train_demo.data import WINDOWS, Text, shard_of_step, validation_windows
from train_demo.errors import printable
from train_demo.layout import Layout
from train_demo.model import Params, Transformer, blueprint, chosen_dtype
from train_demo.pace import Pace, next_stop
from train_demo.programs import Programs
from train_demo.run import Run
from train_demo.run_folder import Config, sole_writer, write_config
from train_demo.update import MOST_STEPS, State, Validate, make_updates, make_validate

INTERRUPTED = 128 + signal.SIGINT


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
    programs: Path | None = None,
) -> int:
    """Trains to the last step, or until Ctrl-C, and leaves checkpoints, metrics and pictures in the run's folder.

    Args:
        config: the run's configuration.
        text: its text.
        out: its folder.
        resume: whether to go on from the newest whole checkpoint.
        layout: how it is computed. Of several processes each calls this; the first one prints and writes.
        quiet: print nothing.
        write_samples: write a short text at each validation.
        programs: where compiled programs are kept for a later run on one device; None keeps none.

    Returns:
        The exit code of the process.

    Raises:
        UserError: another run writes into `out`, or the loss is no longer finite, or the layout does not fit the
            devices, or the processes were started with different options.
    """
    console = SafeConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
    config = replace(config, settings=replace(config.settings, dtype=chosen_dtype(config.settings)))
    devices = mesh.make(layout.sizes(jax.device_count(), config.settings))
    sizes = len(text.vocabulary), len(text.training), len(text.validation)
    decisive = config.settings, config.earlier_ends, layout, sizes, text.packed
    kept = Programs(programs if devices is None else None, *decisive)
    run = Run(config, text, out, layout, devices, console, write_samples, kept)
    options = (config.settings, config.sha256, config.vocabulary.name, config.earlier_ends, layout.alone(), resume)
    processes.refuse_differences("the options", repr(options))  # and every process has looked at the folder
    with mesh.use(devices), sole_writer(out) if layout.first else nullcontext():
        if layout.first:
            write_config(out, config)
        start, state = _restored(run) if resume else (0, run.first_state())
        _introduce(run, state)
        step, state, stopped = _loop(run, start, state)
        if stopped:
            console.print(
                f"Stopped and saved at step {step}. Go on with: python -m train_demo --resume --out {_shell(out)} "
                f"(its pictures: python -m train_demo plot --out {_shell(out)})"
            )
            return INTERRUPTED
        params = mesh.fetch(devices, state.params)
    if layout.first:
        usage.write(out, usage.measure(devices))
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


def _loop(run: Run, start: int, state: State) -> tuple[int, State, bool]:
    """Trains from after `start`; returns the last step, its state, and whether Ctrl-C was pressed."""
    settings, ends = run.config.settings, {*run.config.earlier_ends, run.config.settings.steps}
    updates, validate = _programs(run)
    training, windows = _characters(run)
    step, unread, pace = start, list[tuple[range, Array]](), Pace(MOST_STEPS, run.layout)
    if run.layout.first:
        samples.drop_after(run.out, start)
    with (
        checkpoint.manager(run.out) as checkpoints,
        metrics.Log(run.out, start) if run.layout.first else metrics.NoLog() as log,
        _interruption(run.layout) as interrupted,
        progress.bar(run.console, start, settings) as show,
    ):
        while step < settings.steps:
            end = min(step + pace.steps, next_stop(step, ends, settings.eval_every, settings.save_every))
            state, losses = updates(state, step + 1, end - step, training(step + 1))
            unread.append((range(step + 1, end + 1), losses))
            step = end
            stop, last = interrupted.is_set(), step in ends
            measure, keep = last or step % settings.eval_every == 0, last or stop or step % settings.save_every == 0
            # Reading losses waits for them: a dispatch late, when the device has the next one to do.
            while len(unread) > (0 if measure or keep else 1):
                taken, losses = unread.pop(0)
                for number, loss in zip(taken, np.asarray(losses), strict=False):  # there are fewer steps than places
                    show(*log.write("loss", number, loss))
                pace.took(len(taken))
            if measure:
                _, val_loss = log.write("val_loss", step, validate(state.params, windows))
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
    _say_speed(run, pace.speed)
    return step, state, interrupted.is_set()


def _programs(run: Run) -> tuple[Callable[..., Any], Validate]:
    """What takes steps, and what validates, both of which compile when they are called first."""
    config, settings = run.config, run.config.settings
    packed = run.text.packed

    def updates() -> jax.stages.Wrapped:
        return make_updates(run.structure, settings, config.earlier_ends, run.layout, run.shardings, packed)

    def validate() -> jax.stages.Wrapped:  # the windows are not accumulated
        structure, _ = blueprint(len(run.text.vocabulary), settings, replace(run.layout, accumulate=1))
        return make_validate(structure, packed)

    return run.programs.get("updates", updates), run.programs.get("validate", validate)


def _say_speed(run: Run, steps_per_second: float) -> None:
    settings = run.config.settings
    tokens = steps_per_second * settings.batch_size * settings.context_length
    if tokens:
        run.console.print(f"{1000 / steps_per_second:,.1f} ms a step: {tokens:,.0f} tokens/s")
    devices = 1 if run.mesh is None else run.mesh.size
    line = utilization.report(settings, run.shapes.params, devices, tokens)
    if tokens and line:
        run.console.print(line)


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
    console.print(f"python -m train_demo sample {_shell(f'--out={out}')}{again}")


def _shell(argument: Path | str) -> str:
    return shlex.quote(str(argument))


@contextmanager
def _interruption(layout: Layout) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, which the loop heeds at the end of its step; a second one interrupts.

    Several processes would not all stop at the same step: there the first one interrupts.
    """
    event = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    if layout.num_processes is not None or threading.current_thread() is not threading.main_thread():
        yield event  # only a main thread may say what a signal does
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
