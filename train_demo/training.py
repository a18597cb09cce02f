"""The training loop, which measures, saves and shows its progress, and can be stopped and resumed at any step."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from train_demo import checkpoint, mesh, metrics, processes, stopping, terminal
from train_demo.data import WINDOWS, Text, validation_windows
from train_demo.errors import printable
from train_demo.generate import generate
from train_demo.model import Params, Transformer, blueprint, chosen_dtype, initial_params
from train_demo.progress import progress_bar
from train_demo.run_folder import Config, sole_writer, write_config
from train_demo.settings import Layout
from train_demo.update import MOST_STEPS, State, largest_score, make_optimizer, make_update, make_updates, make_validate

SAMPLE = 64  # tokens of the sample at each validation
LONG_SAMPLE = 500  # tokens of the sample at the end
DISPATCH = 0.25  # seconds of one dispatch, after which Ctrl-C is handled and the bar moves
IN_STEP = 8  # steps in one dispatch of several processes, which must agree


@dataclass(frozen=True)
class Run:
    """What the functions below need to know of a run: its configuration, data, folder, devices and terminal."""

    config: Config
    text: Text
    out: Path
    layout: Layout
    mesh: jax.sharding.Mesh | None  # None on one device
    console: Console
    began: float  # of time.perf_counter

    @cached_property
    def blueprint(self) -> tuple[nnx.GraphDef[Transformer], Params]:
        return blueprint(len(self.text.vocabulary), self.config.settings, self.layout)

    @cached_property
    def shapes(self) -> State:
        params = self.blueprint[1]
        return mesh.placed(self.mesh, State(params, jax.eval_shape(make_optimizer(self.config.settings).init, params)))

    @cached_property
    def shardings(self) -> State | None:
        """The sharding of each array of `State`; None on one device."""
        return mesh.shardings(self.mesh, self.shapes)

    def say(self, text: str, style: str | None = None) -> None:
        """Prints a text on the terminal, its control characters escaped, unless the run is quiet."""
        lines = "".join(terminal.wrapped([printable(text)], terminal.columns()))
        self.console.print(lines, style=style, end="")

    def say_command(self, text: str) -> None:
        """Prints a command, which is to be copied, as one line."""
        self.console.print(printable(text))

    def first_state(self) -> State:
        def draw() -> State:
            params = initial_params(len(self.text.vocabulary), self.config.settings)
            return State(params, make_optimizer(self.config.settings).init(params))

        return jax.jit(draw, out_shardings=self.shardings)()

    def alone(self, params: Params) -> Transformer:
        structure, _ = blueprint(len(self.text.vocabulary), self.config.settings)
        return nnx.merge(structure, params)


class Dispatch:
    """Chooses how many steps a dispatch, one call of `updates`, runs by the time of those before; no loss changes."""

    def __init__(self, fixed: bool):
        self._fixed, self.steps = fixed, IN_STEP if fixed else 1
        self._since: float | None = None  # None until the first dispatch, which compiles, has ended
        self._taken, self._seconds = 0, 0.0

    def took(self, steps: int) -> None:
        """Records that this many steps have ended since the last call of `took` or `pause`."""
        now = time.perf_counter()
        if self._since is not None:
            seconds = max(now - self._since, 1e-6)
            self._taken, self._seconds = self._taken + steps, self._seconds + seconds
            if not self._fixed:
                self.steps = max(1, min(round(steps * DISPATCH / seconds), 2 * self.steps, MOST_STEPS))
        self._since = now

    def pause(self) -> None:
        """Starts the clock anew after work that is no step, such as validation, so that it counts for no dispatch."""
        self._since = time.perf_counter()

    @property
    def speed(self) -> float:
        """Steps per second so far, without compiling and pauses; 0 if not known yet."""
        return self._taken / self._seconds if self._taken else 0.0


class Compiling:
    """Measures the first call of a compiled function, and whether JAX loaded its program from the compilation cache.

    As a text it is "compiled in 2.1 s", with "(cached)" if every program came from the cache.
    """

    def __enter__(self) -> "Compiling":
        self._began, self._events = time.perf_counter(), list[str]()
        self._seconds: float | None = None
        jax.monitoring.register_event_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _note(self, event: str, **_: Any) -> None:
        self._events.append(event.rpartition("/")[2])

    def end(self) -> None:
        """Stops measuring, if it has not been stopped before."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._began
            jax.monitoring.unregister_event_listener(self._note)

    def __str__(self) -> str:
        requests, hits = map(self._events.count, ("compile_requests_use_cache", "cache_hits"))
        return f"compiled in {self._seconds:.1f} s" + " (cached)" * (0 < requests == hits)


def train(
    config: Config, text: Text, out: Path, resume: bool, layout: Layout, quiet: bool, samples: bool, began: float
) -> int:
    """Trains to the last step, or until Ctrl-C or SIGTERM; returns 0, or 128 + the number of the signal."""
    config = replace(config, settings=replace(config.settings, dtype=chosen_dtype(config.settings)))
    devices = mesh.make(layout.sizes(jax.device_count(), config.settings))
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
    run = Run(config, text, out, layout, devices, console, began)
    options = (config.settings, config.sha256, layout.alone(), resume)
    processes.refuse_differences("the options", repr(options))  # and waits until all have read the folder
    with mesh.use(devices), sole_writer(out) if layout.first else contextlib.nullcontext():
        if layout.first:
            write_config(out, config)
        start, state = _restored(run) if resume else (0, run.first_state())
        _introduce(run, state, samples)
        step, state, stopped = _loop(run, start, state, samples)
        if stopped:
            run.say(f"Stopped and saved at step {step}. To continue:")
            run.say_command(f"python -m train_demo --resume --out {shlex.quote(str(out))}")
            run.say("To write a report of the run so far:")
            run.say_command(f"python -m train_demo report --out {shlex.quote(str(out))}")
            return 128 + stopped
        params = mesh.fetch(devices, state.params)
    if layout.first:
        _finish(run, run.alone(params))
    return 0


def _restored(run: Run) -> tuple[int, State]:
    restored = checkpoint.restore_newest(run.out, run.shapes._asdict(), run.say)
    step, trees = restored or (0, {})
    processes.refuse_differences("the checkpoints", str(step))
    if run.layout.first:
        checkpoint.delete_after(run.out, step)
    if not step:
        run.say(f"{run.out} contains no complete checkpoint: starting from step 0")
        return 0, run.first_state()
    run.say(f"Resuming from the checkpoint at step {step}")
    state = State(**trees)
    return step, jax.device_put(state) if run.mesh is None else state


def _introduce(run: Run, state: State, samples: bool) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    devices = "" if run.mesh is None else f"{run.mesh.size} x "
    run.say(f"{size:,} parameters on {devices}{jax.devices()[0].device_kind}; compiling a training step ...")
    guess = math.log(len(run.text.vocabulary))
    run.say(f"Losses are in nats per character (1 nat = 1.443 bits). Random guessing: {guess:.3f}.", style="dim")
    if samples:
        run.say("In the samples, ↵ marks the end of a line.", style="dim")


def _loop(run: Run, start: int, state: State, samples: bool) -> tuple[int, State, int | None]:
    """Trains from after step `start`; returns the last step, its state, and the signal that stopped it, or None."""
    settings = run.config.settings
    updates, validate = _programs(run)
    characters, windows = _inputs(run)
    step, unread, dispatch = start, list[tuple[range, Array]](), Dispatch(run.layout.num_processes is not None)
    tokens = settings.batch_size * settings.context_length
    log = metrics.Log(run.out if run.layout.first else None, start, math.log(len(run.text.vocabulary)), run.began)
    with (
        contextlib.closing(log),
        stopping.heeded(run.say, run.layout.num_processes is not None) as stop_request,
        progress_bar(run.console) as progress,
        Compiling() as compiling,
    ):
        task = progress.add_task("compiling", total=settings.steps, completed=start, speed="")
        while step < settings.steps:
            end = min(step + dispatch.steps, next_stop(step, settings.steps, settings.eval_every, settings.save_every))
            state, losses = updates(state, step + 1, end - step, characters)
            compiling.end()
            unread.append((range(step + 1, end + 1), losses))
            step = end
            stop, last = stop_request.asked(), step == settings.steps
            measure, keep = last or step % settings.eval_every == 0, last or stop or step % settings.save_every == 0
            # Reading losses waits for them, so it is done a dispatch later, when the device has the next one to run.
            while len(unread) > (0 if measure or keep else 1):
                taken, losses = unread.pop(0)
                for number, loss in zip(taken, np.asarray(losses), strict=False):  # more losses than steps
                    last_loss = log.loss("loss", number, loss)
                    if number == start + 1:
                        run.say(f"First step done after {log.seconds:.1f} s; {compiling}")
                dispatch.took(len(taken))
                speed = f"{tokens * dispatch.speed:,.0f} characters/s"
                progress.update(task, description=f"loss {last_loss:.3f}", completed=taken[-1], speed=speed)
            if measure:
                val_loss = log.loss("val_loss", step, validate(state.params, windows), **_scores(run, state.params))
                run.say(f"step {step:>6}  validation loss {val_loss:.4f}")
                if samples:
                    _sample(run, log, step, state.params)
            if keep:
                log.sync()
                whole = mesh.fetch(run.mesh, state)
                if run.layout.first:
                    checkpoint.save(run.out, step, whole._asdict())
                processes.wait(f"checkpoint {step}")
            if measure or keep:
                dispatch.pause()
            if stop:
                break
    _conclude(run, tokens * dispatch.speed, compiling)
    return step, state, stop_request.number


def next_stop(step: int, last: int, *every: int) -> int:
    """Returns the next step after `step` at which a dispatch must end: `last`, or a multiple of one of `every`."""
    return min(last, *(step + number - step % number for number in every))


def _programs(run: Run) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makes the functions `updates` and `validate` of update.py, which compile when they are first called."""
    structure, _ = run.blueprint
    update = make_update(structure, run.config.settings, run.layout, run.text.packed)
    return make_updates(update, run.shardings), make_validate(structure, run.text.packed)


def _inputs(run: Run) -> tuple[Array, Array]:
    """Puts the training characters `[S]` and validation windows `[C, W, T + 1]` on the devices, and returns them."""
    parts = mesh.batch_parts()
    together = -(-WINDOWS // parts) * parts  # a multiple of the parts of the batch
    windows = validation_windows(run.text.validation, run.config.settings.context_length, together)
    return mesh.put(run.mesh, run.text.training), mesh.put(run.mesh, windows, None, mesh.BATCH)


def _scores(run: Run, params: Params) -> dict[str, Array]:
    """Returns the largest score in the first validation windows as `max_score`, in process 0 if that is on, else {}."""
    if not run.config.settings.max_score:
        return {}
    params = mesh.fetch(run.mesh, params)
    if not run.layout.first:
        return {}
    structure, _ = blueprint(len(run.text.vocabulary), run.config.settings)
    windows, *_ = validation_windows(run.text.validation, run.config.settings.context_length, WINDOWS)
    with mesh.leave():
        return {"max_score": largest_score(structure, params, windows[:, :-1], run.text.packed)}


def _sample(run: Run, log: metrics.Log, step: int, params: Params) -> None:
    """Generates, logs and prints a short text, which does not change the training."""
    params = mesh.fetch(run.mesh, params)
    if run.layout.first:
        prompt = run.config.prompt
        with mesh.leave():
            text = _generated(run, run.alone(params), SAMPLE)
        log.sample(step, prompt, text)
        indent = " " * 13
        run.say(indent + terminal.excerpt(prompt + text, terminal.columns() - len(indent)), style="dim")


def _generated(run: Run, model: Transformer, tokens: int) -> str:
    return "".join(piece for (piece,) in generate(model, run.config.vocabulary, [run.config.prompt], tokens))


def _conclude(run: Run, tokens_per_second: float, compiling: Compiling) -> None:
    if run.layout.first:
        metrics.write_resources(run.out, run.mesh, tokens_per_second, str(compiling))
        table = Table.grid(padding=(0, 2))
        for row in metrics.facts(run.out, run.config):
            table.add_row(*map(printable, row))
        run.console.print(table, soft_wrap=False)


def _finish(run: Run, model: Transformer) -> None:
    from train_demo import plots, report  # here, because importing Matplotlib takes half a second

    out, prompt = run.out, run.config.prompt
    run.say("Writing a sample and drawing the plots ...")
    text = _generated(run, model, LONG_SAMPLE)
    plots.draw(out, model, run.config)
    report.write(out, run.config, text)
    run.console.rule("a sample", style="dim")
    run.say(prompt + text)
    run.console.rule(style="dim")
    run.say(metrics.verdict(out, run.config))
    run.say(f"report.html, the plots, metrics.jsonl and the checkpoints are in {out}. To write more text:")
    options = [f"--out={out}", f"--prompt={prompt}"] if printable(prompt) == prompt else [f"--out={out}"]
    run.say_command(f"python -m train_demo sample {shlex.join(options)}")
