"""The demo from Python: `train` works like the command, `load` returns what it left."""

import os
import signal
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train_demo import metrics
from train_demo.data import Text
from train_demo.errors import UserError
from train_demo.run_folder import Config, prepare, read_config
from train_demo.settings import SAMPLING, Layout, Settings, Sizes, checked, one_of

if TYPE_CHECKING:
    from train_demo.model import Transformer

# JAX is imported inside functions, so that errors in arguments come immediately.

RUNS = Path("runs")


@dataclass(frozen=True)
class Run:
    """A trained run.

    Attributes:
      out: The folder of the run.
      config: Settings, vocabulary, and the path of the data.
      model: The `flax.nnx` module, with the parameters of the newest checkpoint.
      metrics: The lines of `metrics.jsonl`: dicts with `step`, `seconds`, and `loss` or
        `val_loss` in nats per character.
    """

    out: Path
    config: Config
    model: "Transformer"
    metrics: list[dict[str, Any]]

    @property
    def val_loss(self) -> float:
        """The last validation loss."""
        found = metrics.values(self.metrics, "val_loss")
        if not found:
            raise UserError(f"{self.out} has no validation loss yet: train for longer")
        return found[-1]

    def sample(self, prompt: str, max_new_tokens: int = 500, **filters: float) -> str:
        """Continues a text, and returns the continuation alone.

        Args:
          prompt: The text.
          max_new_tokens: Number of characters to write.
          filters: `temperature`, `top_k`, `top_p`, `min_p` and `seed`, as in the
            command `sample`.
        """
        from train_demo.generate import Sampling, generate

        if not isinstance(prompt, str):
            raise UserError(f"prompt: expected a string, got {prompt!r}")
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "seed": 0,
            **filters,
        }
        for name, value in options.items():
            checked("option", name, str, one_of(*SAMPLING))
            parse, _, _ = SAMPLING[name]
            options[name] = checked(name, value, float, parse)
        length = options.pop("max_new_tokens")
        seed = options.pop("seed")
        pieces = generate(
            model=self.model,
            vocabulary=self.config.vocabulary,
            prompts=[prompt],
            max_new_tokens=length,
            sampling=Sampling(**options),
            seed=seed,
        )
        return "".join(piece for (piece,) in pieces)


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    samples: bool = True,
    layout: Layout | None = None,
    size: str | None = None,
    **settings: int | float | str,
) -> Run:
    """Trains a model like `python -m train_demo`.

    Args:
      data: A UTF-8 text file, or a folder of such files; None means Python's
        documentation.
      out: The run's folder; None means `runs/` and the name of the data.
      resume: Continue from the newest whole checkpoint; larger `steps` extend the run.
      quiet: Print nothing.
      samples: Write a short text at each validation.
      layout: How the run is computed, and on which devices.
      size: "tiny", "small", "medium" or "gpt2": sets model, batch and steps, unless
        they are given as well.
      settings: Fields of `train_demo.settings.Settings`, such as `steps=500`; others
        are those of the resumed run, or the defaults of the command.

    Raises:
      UserError: An argument, the data or the folder cannot be used; the message says
        why, and how to fix it.
      KeyboardInterrupt: Ctrl-C was pressed. The run is saved, and `resume` continues
        it.
      SystemExit: The process got SIGTERM. The run is saved, and `resume` continues it.

    Example:
      ```python
      run = train_demo.train("my-texts", steps=500, eval_every=100)
      again = train_demo.train("my-texts", steps=1000, resume=True)
      ```
    """
    flags = {"resume": resume, "quiet": quiet, "samples": samples}
    for name, flag in flags.items():
        checked(name, flag, bool, None)
    if layout is not None and not isinstance(layout, Layout):
        raise UserError(f"layout: expected a train_demo.Layout, got {layout!r}")
    in_layout = {field.name for field in fields(Layout)}
    names = [field.name for field in fields(Settings)]
    for name, value in settings.items():
        if name in in_layout:
            raise UserError(
                f"{name} belongs to a layout: pass layout=Layout({name}={value!r})"
            )
        checked("setting", name, str, one_of(*names))
    source = None
    if data is not None:
        source = str(as_path("--data", data))
    folder = default_folder(source)
    if out is not None:
        folder = as_path("--out", out)
    code = start(
        out=folder,
        data=source,
        given=settings,
        resume=resume,
        layout=layout or Layout(),
        quiet=quiet,
        samples=samples,
        size=size,
    )
    if code == 128 + signal.SIGTERM:
        raise SystemExit(code)
    if code:
        again = f"train(out={str(folder)!r}, resume=True) continues"
        raise KeyboardInterrupt(f"stopped and saved: {again}")
    return load(folder)


def load(out: str | Path) -> Run:
    """Loads a run, finished or not, with the model of its newest whole checkpoint."""
    folder = as_path("--out", out)
    config = read_config(folder)
    from train_demo.generate import load_model

    model = load_model(folder, config)
    return Run(folder, config, model, metrics.read(folder))


def start(
    out: Path,
    data: str | None,
    given: dict[str, Any],
    resume: bool,
    layout: Layout,
    quiet: bool,
    samples: bool,
    size: str | None,
) -> int:
    """Starts or resumes a run, and trains; returns the command's exit code."""
    began = time.perf_counter()
    config, text = prepare(out, data, given, resume, size)
    return run_prepared(config, text, out, resume, layout, quiet, samples, began)


def run_prepared(
    config: Config,
    text: Text,
    out: Path,
    resume: bool,
    layout: Layout,
    quiet: bool,
    samples: bool,
    began: float,
    only_bar: str | None = None,
) -> int:
    """Trains a run that `prepare` has checked; returns the command's exit code."""
    sizes = sizes_here(layout, config.settings)
    import jax

    from train_demo import mesh, model, training

    settings = replace(config.settings, dtype=model.chosen_dtype(config.settings))
    run = training.Run(
        config=replace(config, settings=settings),
        text=text,
        out=out,
        resume=resume,
        layout=layout,
        mesh=mesh.make(sizes),
        quiet=quiet,
        samples=samples,
        began=began,
        only_bar=only_bar,
    )
    try:
        return training.train(run)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            "there is not enough memory on the device: reduce --batch-size, "
            "--context-length or --features"
        ) from error


def sizes_here(layout: Layout, settings: Settings) -> Sizes:
    """Connects the processes of a run; returns the mesh's sizes for all devices."""
    import jax

    from train_demo import mesh

    mesh.connect_processes()
    several = jax.process_count() > 1
    return layout.sizes(jax.device_count(), settings, use_all=several)


def as_path(option: str, path: str | os.PathLike[str]) -> Path:
    """Returns the path in an argument of a Python call."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            f"{option} must be a path, but got {path!r}: pass a str or a pathlib.Path"
        )
    text = os.fsdecode(path)
    if not text:
        raise UserError(f"{option} is empty: specify a path")
    return Path(text)


def default_folder(data: str | None) -> Path:
    """Returns the folder of a run without `out`: `runs/` and the name of the data."""
    if data is None:
        return RUNS / "python-docs"
    path = Path(os.path.abspath(data))
    if path.is_dir():
        return RUNS / path.name
    return RUNS / path.stem
