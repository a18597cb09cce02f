"""The training: it measures, saves, and can be stopped and resumed."""

import collections
import contextlib
import functools
import math
import os
import shlex
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jaxtyping import Array
from orbax.checkpoint import CheckpointManager
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from train_demo import checkpoint, data, generate, mesh, metrics, report
from train_demo.data import WINDOWS, validation_windows
from train_demo.errors import printable
from train_demo.model import Params, blueprint
from train_demo.run_folder import Config, sole_writer, write_config
from train_demo.settings import Layout
from train_demo.update import (
    State,
    compiled,
    first_state,
    make_update,
    make_validate,
    repeatable,
)

SAMPLE = 64  # tokens of the sample at each validation
LONG_SAMPLE = 500  # tokens of the sample at the end


@dataclass(frozen=True)
class Run:
    """What is trained, where and how.

    Attributes:
      config: Its settings name the dtype that is computed in.
      text: The data.
      out: The run's folder.
      layout: How the run is computed.
      mesh: The devices.
      resume: Continue from the newest checkpoint.
      quiet: Print nothing.
      samples: Write a short text at each validation.
      began: The `time.perf_counter` at the start.
      only_bar: Words that a progress bar shows; only the bar and warnings are printed,
        and the bar disappears at the end. None prints everything.
    """

    config: Config
    text: data.Text
    out: Path
    layout: Layout
    mesh: jax.sharding.Mesh
    resume: bool
    quiet: bool
    samples: bool
    began: float
    only_bar: str | None = None

    @property
    def writes(self) -> bool:
        """Whether this is the one of several processes that writes and prints."""
        return jax.process_index() == 0

    @functools.cached_property
    def console(self) -> Console:
        quiet = self.quiet or not self.writes
        return Console(highlight=False, markup=False, emoji=False, quiet=quiet)

    @property
    def guess(self) -> float:
        """The loss of a model that guesses."""
        return math.log(len(self.text.vocabulary))

    def say(self, text: str, wrap: bool = True) -> None:
        """Prints a text on the terminal, its control characters escaped."""
        if self.only_bar is None:
            self.warn(text, wrap)

    def warn(self, text: str, wrap: bool = True) -> None:
        """Prints a text even if `only_bar` hides all other texts."""
        self.console.print(printable(text), soft_wrap=not wrap)


def train(run: Run) -> int:
    """Trains to the last step, or until Ctrl-C or SIGTERM.

    Returns:
      0, or 128 + the number of the signal that stopped the run, which is then saved.
    """
    with contextlib.ExitStack() as stack:
        if run.writes:
            stack.enter_context(sole_writer(run.out))
        start, state = _initial(run)
        # Orbax waits here until process 0 has written the configuration.
        checkpoints = stack.enter_context(checkpoint.manager(run.out))
        step, params, stopped = _loop(run, checkpoints, start, state)
        if stopped:
            run.say(f"Stopped and saved at step {step}. To continue:")
            place = shlex.quote(str(run.out))
            run.say(f"python -m train_demo --resume --out {place}", wrap=False)
            return 128 + stopped
        params = mesh.fetch(params)
        if run.writes:
            _finish(run, params)
    return 0


def _initial(run: Run) -> tuple[int, State]:
    """Returns the step and the state to start after, and introduces the run.

    A folder whose checkpoints cannot be restored stays as it is.
    """
    text = run.text
    source = run.config.data or "the Python documentation"
    if text.packed:
        source = f"{text.documents:,} documents in {source}"
    if text.skipped:
        source += f" (skipped {text.skipped} files without UTF-8 text)"
    kinds = len(text.vocabulary)
    size = len(text.training) + len(text.validation)
    run.say(f"{size:,} characters of {source}, {kinds:,} of them distinct")

    def draw() -> State:
        return first_state(kinds, run.config.settings)

    shapes = jax.eval_shape(draw)
    restored = None
    if run.resume:
        restored = checkpoint.restore_newest(run.out, shapes, run.mesh, run.warn)
    if restored and run.writes:
        newest, _ = restored
        checkpoint.move_aside(run.out, newest, shapes, run.warn)
    if run.writes:
        write_config(run.out, run.config)
    if restored:
        start, state = restored
        run.say(f"Resuming from the checkpoint at step {start}")
    else:
        start = 0
        state = jax.jit(draw, out_shardings=mesh.shardings(run.mesh, shapes))()
        if run.resume:
            none = f"{run.out} contains no complete checkpoint"
            run.say(f"{none}: starting from step 0")

    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    devices = f"{run.mesh.size} x {jax.devices()[0].device_kind}"
    run.say(f"{size:,} parameters on {devices}; compiling a training step ...")
    run.say(f"Losses are in nats per character. Random guessing: {run.guess:.3f}.")
    return start, state


def _loop(
    run: Run, checkpoints: CheckpointManager, start: int, state: State
) -> tuple[int, Params, int | None]:
    """Trains from after step `start`.

    Returns:
      The last step, its parameters, and the signal that stopped the loop, or None.
    """
    settings = run.config.settings
    structure, _ = blueprint(len(run.text.vocabulary), settings, run.layout)
    update = make_update(structure, settings, run.layout, run.text.packed)
    update = compiled(update, run.mesh, mesh.shardings(run.mesh, state))
    validate = jax.jit(
        make_validate(structure, run.text.packed),
        compiler_options=repeatable(jax.default_backend()),
    )

    # Put the text on the devices; windows are validated in a multiple of the parts.
    characters = mesh.put(run.mesh, run.text.training)
    parts = math.prod(run.mesh.shape[axis] for axis in mesh.BATCH)
    chunks = validation_windows(
        run.text.validation, settings.context_length, -(-WINDOWS // parts) * parts
    )
    windows = mesh.put(run.mesh, chunks, None, mesh.BATCH)

    log = metrics.Log(run.out, start, run.guess, run.began, writes=run.writes)
    step = start
    stopped = None
    unread: collections.deque[tuple[int, Array]] = collections.deque()
    bar = Progress(console=run.console, transient=run.only_bar is not None)
    shown: contextlib.AbstractContextManager[Any] = bar
    if run.only_bar is not None and not run.console.is_interactive:
        # A bar that ends leaves an empty line in a file.
        shown = contextlib.nullcontext()
    prefix = run.only_bar or ""
    task = bar.add_task(f"{prefix}compiling", total=settings.steps, completed=start)
    with contextlib.closing(log), Stop() as stop, shown:
        while step < settings.steps and stopped is None:
            step += 1
            with mesh.use(run.mesh):
                state, loss = update(state, step, characters)
            unread.append((step, loss))
            stopped = stop.requested_at(step)
            is_last = step == settings.steps
            validates = is_last or step % settings.eval_every == 0
            saves = is_last or stopped or step % settings.save_every == 0

            # Reading a loss waits for it. So it is done a step later, while the device
            # runs the next step, unless that has to be waited for.
            while len(unread) > 1 or (unread and (validates or saves)):
                number, loss = unread.popleft()
                value = log.loss("loss", number, loss)
                words = f"{prefix}step {number} of {settings.steps}, loss {value:.3f}"
                bar.update(task, completed=number, description=words)
            if validates:
                with mesh.use(run.mesh):
                    val_loss = validate(state.params, windows)
                val_loss = log.loss("val_loss", step, val_loss)
                run.say(f"step {step:>6}  validation loss {val_loss:.4f}")
                if run.samples:
                    params = mesh.fetch(state.params)
                    if run.writes:
                        _write_sample(run, log, step, params)
            if saves:
                log.sync()
                checkpoint.save(checkpoints, step, state)
    if run.writes and run.only_bar is None:
        table = Table.grid(padding=(0, 2))
        for row in report.facts(run.out, run.config):
            table.add_row(*map(printable, row))
        run.console.print(table)
    return step, state.params, stopped


class Stop:
    """Notes, in a context, that Ctrl-C or SIGTERM asks the training to stop.

    A second signal is handled as before the context.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if jax.process_count() > 1:
                numbers = [signal.SIGINT]  # JAX handles the other
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.__exit__()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._number = number

    def requested_at(self, step: int) -> int | None:
        """Returns the signal that asked to stop; None if none did.

        If any of several processes gets SIGTERM, JAX stops all of them at the same
        step.
        """
        if multihost_utils.reached_preemption_sync_point(step):
            self._number = signal.SIGTERM
        return self._number


def _write_sample(run: Run, log: metrics.Log, step: int, params: Params) -> None:
    """Logs a short sample, and prints its beginning on a line."""
    prompt = run.config.prompt
    sample = _sample(run, params, SAMPLE)
    log.sample(step, prompt, sample)
    line = Text(" " * 13 + printable((prompt + sample).replace("\n", "↵")))
    line.truncate(run.console.width, overflow="ellipsis")
    run.console.print(line, style="dim", soft_wrap=True)


def _sample(run: Run, params: Params, tokens: int) -> str:
    model = generate.merged(run.config, params)
    prompts = [run.config.prompt]
    pieces = generate.generate(model, run.config.vocabulary, prompts, tokens)
    return "".join(piece for (piece,) in pieces)


def _finish(run: Run, params: Params) -> None:
    """Writes the pictures and the report of a finished run, and shows a sample."""
    from train_demo import plots  # Matplotlib takes half a second

    out = run.out
    prompt = run.config.prompt
    run.say("Writing a sample and drawing the plots ...")
    sample = _sample(run, params, LONG_SAMPLE)
    plots.draw(out, generate.merged(run.config, params), run.config)
    report.write(out, run.config, sample)
    if run.only_bar is not None:
        return
    run.console.rule("a sample", style="dim")
    run.say(prompt + sample)
    run.say(report.verdict(out, run.config))
    run.say(
        f"report.html, the plots, metrics.jsonl and the checkpoints are in {out}. To "
        "write more text:"
    )
    options = [f"--out={out}"]
    if printable(prompt) == prompt:
        options.append(f"--prompt={prompt}")
    run.say(f"python -m train_demo sample {shlex.join(options)}", wrap=False)
