"""The demo from Python: `train` works like the command, and returns the run with its trained model."""

import os
import signal
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train_demo import terminal
from train_demo.errors import UserError, any_encoding, enough_memory, printable, reason
from train_demo.run_folder import Config, prepare, read_config
from train_demo.settings import SAMPLING, Layout, Settings, checked

if TYPE_CHECKING:
    from train_demo.model import Transformer

# JAX is imported where it is used, so that errors in arguments come at once.

RUNS = Path("runs")
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
SETTINGS = {option.name: option for option in fields(Settings)}


@dataclass(frozen=True)
class Run:
    """A trained run.

    Attributes:
      out: The folder of the run.
      config: Settings, vocabulary, and the path of the data.
      model: The `flax.nnx` module, with the parameters of the newest checkpoint.
      losses: For each step, the training loss in nats per character.
      val_losses: For each validated step, the validation loss in nats per character.
      seconds: The duration of the training, with compiling.
    """

    out: Path
    config: Config
    model: "Transformer"
    losses: dict[int, float]
    val_losses: dict[int, float]
    seconds: float

    @property
    def val_loss(self) -> float:
        if not self.val_losses:
            raise UserError(f"{self.out} has no validation loss yet: train for at least eval_every steps")
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
        seed: int = 0,
    ) -> str:
        """Continues a text, and returns the continuation alone.

        Args:
          prompt: The text.
          max_new_tokens: Number of characters to write.
          temperature: Divides the logits; 0 takes the likeliest character.
          top_k: Draw from the k likeliest characters.
          top_p: Draw from the likeliest characters whose probabilities add up to p, above 0 and at most 1.
          min_p: Draw from characters that are at least p times as likely as the likeliest, from 0 to 1.
          seed: The seed of the draws.

        Raises:
          UserError: An argument is out of range, or the prompt has characters that the model never saw.
        """
        given = {name: value for name, value in locals().items() if name in SAMPLING and value is not None}
        from train_demo.generate import Sampling, generate

        if not isinstance(prompt, str):
            raise UserError(f"prompt: expected a string, got {prompt!r}")
        given = {name: checked(name, value, float, SAMPLING[name][0]) for name, value in given.items()}
        sampling = Sampling(**{name: given[name] for name in Sampling._fields if name in given})
        length, seed, vocabulary = given["max_new_tokens"], given["seed"], self.config.vocabulary
        pieces = generate(self.model, vocabulary, [prompt], length, sampling, seed=seed)
        return "".join(piece for (piece,) in pieces)

    def export(self, to: str | Path | None = None) -> Path:
        """Writes the model as safetensors with PyTorch's names, its configuration, and the PyTorch code that runs it.

        Args:
          to: The folder; an earlier export in it is replaced. None means `export` in the run's folder.

        Raises:
          UserError: The folder has other files in it, or cannot be written.
        """
        from train_demo import export

        folder = export.default_target(self.out) if to is None else as_folder("--to", to)
        try:
            export.write(folder, self.model, self.config)
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename or folder} ({reason(error)}): choose a different --to"
            ) from error
        return folder


def train(  # noqa: D417 - `Settings` describes the others
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
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
    token_shift: int | None = None,
    dtype: str | None = None,
    dropout_rate: float | None = None,
    eval_every: int | None = None,
    max_score: bool | None = None,
    save_every: int | None = None,
) -> Run:
    """Trains a model like `python -m train_demo`, whose `--help` describes the arguments that are not described here.

    None means the value of the resumed run, or else the default of the command.

    Args:
      data: A UTF-8 text file, or a folder of such files; None means Python's documentation.
      out: The run's folder; None means `runs/` and the name of the data.
      resume: Continue from the newest whole checkpoint; larger `steps` extend the run.
      quiet: Print nothing.
      samples: Write a short text at each validation.
      layout: How the run is computed, and on which devices.
      size: "tiny", "small", "medium" or "gpt2": sets model, batch and steps, unless they are given, too.

    Raises:
      UserError: An argument, the data or the folder cannot be used; the message says why, and how to fix it.
      KeyboardInterrupt: Ctrl-C was pressed. The run is saved, and `resume` continues it.
      SystemExit: The process got SIGTERM. The run is saved, and `resume` continues it.

    Example:
      ```python
      run = train_demo.train("my-texts", steps=500, eval_every=100)
      again = train_demo.train("my-texts", steps=1000, resume=True)
      ```
    """
    given = {name: value for name, value in locals().items() if name in SETTINGS and value is not None}
    if layout is not None and layout.num_processes is not None:
        raise UserError("layout specifies multiple processes: start each one with python -m train_demo")
    source = None if data is None else as_path("--data", data)
    where = default_folder(source) if out is None else as_folder("--out", out)
    code = start(where, source, given, resume, layout or Layout(), quiet, samples, size)
    if code == 128 + signal.SIGTERM:
        raise SystemExit(code)
    if code:
        raise KeyboardInterrupt(f"stopped and saved: train(out={str(where)!r}, resume=True) continues")
    return load(where)


def load(out: str | Path) -> Run:
    """Loads a run, finished or not, with the model of its newest whole checkpoint."""
    out = as_folder("--out", out)
    config = read_config(out)
    from train_demo import metrics
    from train_demo.generate import load_model

    model, measured = load_model(out, config), metrics.read(out)
    losses, val_losses = (
        {metric["step"]: metric[name] for metric in measured if name in metric} for name in ("loss", "val_loss")
    )
    return Run(out, config, model, losses, val_losses, max((metric["seconds"] for metric in measured), default=0.0))


@any_encoding()
def start(
    out: Path,
    data: str | None,
    given: dict[str, Any],
    resume: bool,
    layout: Layout,
    quiet: bool = False,
    samples: bool = True,
    size: str | None = None,
) -> int:
    """Starts or resumes a run, and trains; returns the command's exit code: 0, 130 after Ctrl-C, 143 after SIGTERM."""
    began = time.perf_counter()
    config, text = prepare(out, data, given, resume, size)
    if layout.first and not quiet:  # before JAX is imported, which takes a second
        several = f"{text.documents:,} documents in " if text.packed else ""
        skipped = f" (skipped {text.skipped} files without UTF-8 text)" if text.skipped else ""
        found = several + (config.data or "the Python documentation") + skipped
        line = f"{len(text):,} characters of {found}, {len(text.vocabulary):,} of them distinct"
        print(*terminal.wrapped([printable(line)], terminal.columns()), sep="", end="", flush=True)
    # Some fast operations on GPUs add in any order, but a resumed run must compute the same bits.
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags.split():  # a program may call this several times
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
    from train_demo import processes, training

    with processes.joined(layout), enough_memory("--batch-size, --context-length or --features"):
        return training.train(config, text, out, resume, layout, quiet, samples, began)


def as_path(option: str, path: str | os.PathLike[str]) -> str:
    """Returns the path in an argument of a Python call; raises a `UserError` if it is no path."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{option} must be a path, but got {path!r}: pass a str or a pathlib.Path")
    return os.fsdecode(path)


def as_folder(option: str, path: str | os.PathLike[str]) -> Path:
    """Returns the folder in an argument of a Python call; raises a `UserError` if it is empty or no path."""
    text = as_path(option, path)
    if not text:  # as a variable of the shell that is not set
        raise UserError(f"{option} is empty: specify a folder")
    return Path(text)


def default_folder(data: str | None) -> Path:
    """Returns the folder of a run for which no `out` was given: `runs/` and the name of the data."""
    if data is None:
        return RUNS / "python-docs"
    path = Path(data)
    if path.name in ("", ".."):
        path = path.resolve()
    return RUNS / (path.name if path.is_dir() else path.stem)
