"""The training loop: it measures, saves, shows what it does, and can be stopped and resumed at any step."""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

from train_demo import checkpoint, generate, metrics, plots, progress
from train_demo.data import Text, encode, validation_windows
from train_demo.errors import printable
from train_demo.model import Transformer, blueprint, initial_params
from train_demo.run_folder import Config, sole_writer, write_config
from train_demo.update import State, make_optimizer, make_update, make_validate

INTERRUPTED = 128 + signal.SIGINT


class SafeConsole(Console):
    """A console whose texts cannot command the terminal."""

    def print(self, *texts: Any, **options: Any) -> None:
        """Prints texts with their control characters escaped."""
        super().print(*(printable(text) if isinstance(text, str) else text for text in texts), **options)


def train(config: Config, text: Text, out: Path, resume: bool) -> int:
    """Trains to the last step, or until Ctrl-C, and leaves checkpoints, metrics and pictures in the run's folder.

    Args:
        config: the run's configuration.
        text: its text.
        out: its folder.
        resume: whether to go on from the newest whole checkpoint.

    Returns:
        The exit code of the process.

    Raises:
        UserError: another run writes into `out`, or the loss is no longer finite.
    """
    console = SafeConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with sole_writer(out):
        write_config(out, config)
        structure, _ = blueprint(len(text.vocabulary), config.settings)
        params = initial_params(len(text.vocabulary), config.settings)
        state = State(params, make_optimizer(config.settings).init(params))
        start, state = _restore(out, state, console) if resume else (0, state)
        _introduce(config, text, state, console)
        step, state, stopped = _loop(structure, config, text, out, start, state, console)
        if stopped:
            console.print(
                f"Stopped and saved at step {step}. Go on with: python -m train_demo --resume --out {_shell(out)} "
                f"(its pictures: python -m train_demo plot --out {_shell(out)})"
            )
            return INTERRUPTED
        _finish(nnx.merge(structure, state.params), config, out, console)
    return 0


def _restore(out: Path, state: State, console: Console) -> tuple[int, State]:
    restored = checkpoint.restore_newest(out, state._asdict(), console.print)
    step = restored.step if restored else 0
    checkpoint.set_aside(out, step)
    if restored is None:
        console.print(f"{out} holds no finished checkpoint: starting from the beginning")
        return 0, state
    console.print(f"Going on from the checkpoint of step {step}")
    return step, State(**jax.device_put(restored.trees))


def _introduce(config: Config, text: Text, state: State, console: Console) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(
        f"{size:,} parameters on {jax.devices()[0].device_kind}; "
        f"{len(text.characters):,} characters of {config.data or 'the Python documentation'}"
    )


def _loop(
    structure: nnx.GraphDef[Transformer],
    config: Config,
    text: Text,
    out: Path,
    start: int,
    state: State,
    console: Console,
) -> tuple[int, State, bool]:
    """Trains from after `start`; returns the last step, its state, and whether Ctrl-C was pressed."""
    settings = config.settings
    update, validate = make_update(structure, settings, config.earlier_ends), make_validate(structure)
    ends = {*config.earlier_ends, settings.steps}
    training = jnp.asarray(encode(text.training, text.vocabulary))
    windows = jnp.asarray(validation_windows(encode(text.validation, text.vocabulary), settings.context_length))
    step, unread = start, []
    with (
        checkpoint.manager(out) as checkpoints,
        metrics.Log(out, start) as log,
        _interruption() as interrupted,
        progress.bar(console, start, settings) as show,
    ):
        for step in range(start + 1, settings.steps + 1):
            state, loss = update(state, step, training)
            unread.append((step, loss))
            stop, last = interrupted.is_set(), step in ends
            measure, keep = last or step % settings.eval_every == 0, last or stop or step % settings.save_every == 0
            # Reading a loss waits for it: a step late, when the device has the next update to do.
            while len(unread) > (0 if measure or keep else 1):
                show(*log.write("loss", *unread.pop(0)))
            if measure:
                _, val_loss = log.write("val_loss", step, validate(state.params, windows))
                console.print(f"step {step:>6}  validation loss {val_loss:.4f}")
            if keep:
                log.sync()
                checkpoint.save(checkpoints, step, state._asdict())
            if stop:
                break
    return step, state, interrupted.is_set()


def _finish(model: Transformer, config: Config, out: Path, console: Console) -> None:
    plots.draw(out, model, config)
    prompt = config.sentence.split(" ")[0] or config.sentence[0]
    written = "".join(piece for (piece,) in generate.generate(model, config.vocabulary, [prompt]))
    console.rule("a sample", style="dim")
    console.print(prompt + written)
    console.rule(style="dim")
    console.print(f"{out} holds loss.png, attention.png, metrics.jsonl and the checkpoints. More text:")
    console.print(f"python -m train_demo sample --out {_shell(out)} --prompt {_shell(prompt)}")


def _shell(argument: Path | str) -> str:
    return shlex.quote(str(argument))


@contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, which the loop heeds at the end of its step; a second one interrupts."""
    event = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
