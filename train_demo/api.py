"""The demo from Python: `train` does what the command does, and returns the run with its trained model."""

import argparse
import os
import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train_demo import metrics
from train_demo.data import Say, Text
from train_demo.errors import UserError, enough_memory, fitted, printable
from train_demo.layout import Layout
from train_demo.run_folder import Config, prepare, read_config
from train_demo.settings import SIZES, Settings, completed

if TYPE_CHECKING:
    from train_demo.model import Transformer

# JAX is imported where it is used, so that refusals come at once.

RUNS = Path("runs")
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
SETTINGS = {option.name: option for option in fields(Settings)}


@dataclass(frozen=True)
class Run:
    """A trained run.

    Attributes:
        out: its folder.
        config: its settings, its vocabulary, and where its data lies.
        model: the `flax.nnx` module, with the parameters of the newest checkpoint.
        losses: the training loss after each step, in nats per token, by the step.
        val_losses: the validation losses, likewise.
        seconds: how long the training took, with the time that compiling takes.
    """

    out: Path
    config: Config
    model: "Transformer"
    losses: dict[int, float]
    val_losses: dict[int, float]
    seconds: float

    @property
    def val_loss(self) -> float:
        """The last validation loss.

        Raises:
            UserError: there is none yet.
        """
        if not self.val_losses:
            raise UserError(f"{self.out} holds no validation loss yet: train it for eval_every steps")
        return self.val_losses[max(self.val_losses)]

    def sample(
        self,
        prompt: str,
        max_new_tokens: int = 500,
        *,
        temperature: float = 0.7,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: str | None = None,
        seed: int = 0,
    ) -> str:
        """Continues a text.

        Args:
            prompt: what the model goes on writing.
            max_new_tokens: tokens to write.
            temperature: 0 takes the likeliest token.
            top_k: choose among so many likeliest tokens.
            top_p: choose among the likeliest tokens that are this probable together, above 0 and at most 1.
            min_p: choose among tokens that are so many times as likely as the likeliest, from 0 to 1.
            stop: end before this.
            seed: another seed writes another text.

        Returns:
            What was written after the prompt.

        Raises:
            UserError: an argument is out of range, or the prompt holds what the model never saw.
        """
        from train_demo.command_line import SAMPLING
        from train_demo.generate import generate
        from train_demo.sampler import Sampling

        for name, text in (("prompt", prompt), ("stop", stop)):
            if not isinstance(text, str) and (name, text) != ("stop", None):
                raise UserError(f"{name}: expected a text, got {text!r}")
        if stop == "":
            raise UserError("stop is empty: give at least one character, or None")
        values: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        values |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        parsers = {name.replace("-", "_"): parse for name, parse, *_ in SAMPLING}
        checked = {name: _checked(name, value, parsers[name]) for name, value in values.items() if value is not None}
        filters = {name: checked[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in checked}
        pieces = generate(
            self.model,
            self.config.vocabulary,
            [prompt],
            checked["max_new_tokens"],
            Sampling(**filters),
            stop=stop,
            seed=checked["seed"],
        )
        return "".join(piece for (piece,) in pieces)

    def export(self, to: str | Path | None = None) -> Path:
        """Writes the model as safetensors with PyTorch's names, its configuration, and the PyTorch code that runs it.

        Args:
            to: the folder, which takes the place of an earlier export there; None means `export` in the run's folder.

        Returns:
            The folder.

        Raises:
            UserError: the folder holds something else, or is the current one, or cannot be written.
        """
        from train_demo import export

        if to == "":
            raise UserError("to is empty: name a folder, or leave it out")
        folder = self.out / "export" if to is None else Path(to)
        try:
            export.write(folder, self.model, self.config)
        except OSError as error:
            raise UserError(f"cannot write {error.filename or folder} ({error.strerror}): name another --to") from error
        return folder


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    tokenizer: str | Path | None = None,
    quiet: bool = False,
    samples: bool = True,
    layout: Layout | None = None,
    size: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    context_length: int | None = None,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    layers: int | None = None,
    heads: int | None = None,
    features: int | None = None,
    mlp: str | None = None,
    head: str | None = None,
    token_shift: int | None = None,
    dtype: str | None = None,
    dropout_rate: float | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
) -> Run:
    """Trains a model as `python -m train_demo` does, with the options of that command.

    What is None is what the resumed run has, or otherwise the default of the command.

    Args:
        data: a UTF-8 text file, or a folder of them; None means Python's documentation.
        out: the run's folder; None means `runs/` and the name of the data.
        resume: go on from the newest whole checkpoint; larger `steps` extend the run.
        tokenizer: "characters", "bytes", or a JSON file of the package `tokenizers`.
        quiet: print nothing.
        samples: write a short text at each validation, which is compiled the first time.
        layout: how it is computed, and on which devices.
        size: "tiny", "small", "medium" or "gpt2": model, batch and steps at once; what follows counts more.
        seed: where the weights, the batches and the dropout start.
        steps: parameter updates.
        batch_size: windows of text an update.
        context_length: tokens a window.
        optimizer: "muon", or "adamw" for the matrices, too.
        learning_rate: the highest, after the warm-up.
        layers: transformer blocks.
        heads: attention heads a block.
        features: width of the model.
        mlp: the small networks, "relu2", "gelu" or "swiglu".
        head: "untied", or "tied" to the embedding's parameters.
        token_shift: how many earlier tokens are mixed into each token's embedding.
        dtype: what the model computes in, "float32" or "bfloat16"; "auto" takes bfloat16 on GPUs and TPUs.
        dropout_rate: share of the activations dropped while training.
        eval_every: steps between two validation losses.
        save_every: steps between two checkpoints.

    Returns:
        The trained run.

    Raises:
        UserError: an argument, the data or the folder is unfit; the message says why, and what to do.
        KeyboardInterrupt: Ctrl-C was pressed. The run was saved, and `resume` goes on with it.
        SystemExit: the process got SIGTERM. The run was saved likewise.

    Example:
        ```python
        run = train_demo.train("my-texts", steps=500, eval_every=100)
        again = train_demo.train("my-texts", steps=1000, resume=True)
        ```
    """
    given = {name: value for name, value in locals().items() if name in SETTINGS and value is not None}
    given = {name: _checked(name, value, SETTINGS[name].metadata["parse"]) for name, value in given.items()}
    if size is not None:
        if not isinstance(size, str) or size not in SIZES:
            raise UserError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
        given = completed(size, given)
    if layout is not None and layout.num_processes is not None:
        raise UserError("layout names several processes: start each with the command python -m train_demo")
    if out == "":
        raise UserError("out is empty: name a folder, or leave it out")
    where = Path(out) if out is not None else default_folder(None if data is None else str(data))
    source, kind = (None if name is None else str(name) for name in (data, tokenizer))
    code = start(where, source, kind, given, resume=resume, layout=layout or Layout(), quiet=quiet, samples=samples)
    if code == TERMINATED:
        raise SystemExit(code)
    if code:
        raise KeyboardInterrupt(f"stopped and saved: train(out={str(where)!r}, resume=True) goes on")
    return load(where)


def load(out: str | Path) -> Run:
    """Loads the newest whole checkpoint of a run, finished or not.

    Raises:
        UserError: the folder holds no run, or none of its checkpoints is whole.
    """
    from train_demo.sample import load_model

    out = Path(out)
    config = read_config(out)
    model, measured = load_model(out, config), metrics.read(out)
    losses, val_losses = (
        {int(metric["step"]): metric[name] for metric in measured if name in metric} for name in ("loss", "val_loss")
    )
    seconds = max((metric.get("seconds", 0.0) for metric in measured), default=0.0)
    return Run(out, config, model, losses, val_losses, seconds)


def start(
    out: Path,
    data: str | None,
    tokenizer: str | None,
    given: dict[str, Any],
    *,
    resume: bool,
    layout: Layout,
    quiet: bool = False,
    samples: bool = True,
    say: Say = lambda line: None,
) -> int:
    """Trains; returns the exit code of the command: 0, 130 after Ctrl-C, or 143 after SIGTERM.

    Args:
        out: the run's folder.
        data: the text file or folder; None as for `run_folder.prepare`.
        tokenizer: likewise.
        given: the settings that were named.
        resume: whether a run that is there already may go on.
        layout: how it is computed.
        quiet: print nothing.
        samples: write a short text at each validation.
        say: told how far the preparation of large data is.

    Raises:
        UserError: whatever the user can fix.
    """
    config, text = prepare(out, data, given, resume, tokenizer, say)
    if layout.first and not quiet:  # before JAX is imported, which takes a second
        print(fitted(printable(_described(config, text)), sys.stdout), flush=True)
    # On a GPU some fast operations add numbers in whatever order they come; a resumed run must repeat the bits.
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags.split():  # a program may train several times
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
    from train_demo.processes import joined
    from train_demo.training import train as run_training

    with joined(layout), enough_memory("--batch-size, --context-length or --features"):
        return run_training(config, text, out, resume, layout, quiet, samples)


def _described(config: Config, text: Text) -> str:
    unit, kinds = text.vocabulary.unit, len(text.vocabulary)
    several = f"{text.documents:,} documents in " if text.packed else ""
    skipped = f" ({text.skipped} other files hold no UTF-8 text)" if text.skipped else ""
    found = several + (config.data or "the Python documentation") + skipped
    return f"{len(text):,} {unit}s of {found}, {kinds:,} kinds of {unit}s"


def default_folder(data: str | None) -> Path:
    """Where a run is kept that names no folder."""
    if data is None:
        return RUNS / "python-docs"
    path = Path(data)
    if path.name in ("", ".."):
        path = path.resolve()
    return RUNS / (path.name if path.is_dir() else path.stem)


def _checked(name: str, value: Any, parse: Any) -> Any:
    """Reads a value as the command line reads its text."""
    default = SETTINGS[name].default if name in SETTINGS else 0
    try:
        if isinstance(value, bool) or isinstance(value, str) != isinstance(default, str):
            expected = "a text" if isinstance(default, str) else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r}")
        return parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name}: {error}") from None
