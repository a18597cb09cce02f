"""The folder of a run: its configuration, and a lock for its only writer."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train_demo import data
from train_demo.errors import UserError, reason
from train_demo.files import check_folder, write_atomically
from train_demo.settings import SIZES, Settings, checked_size, completed, option_of
from train_demo.vocabulary import Vocabulary

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
# The version of the configuration and the parameters. Version 1, without a number, learned embeddings of positions;
# version 2 had LayerNorm for queries and keys, and no token shift; version 3 had another configuration.
MODEL_VERSION = 4


@dataclass(frozen=True)
class Config:
    """The content of `config.json`: all that is needed to resume, to sample and to plot.

    Attributes:
      settings: The settings of the run.
      data: The text file or folder; None means Python's documentation.
      sha256: The fingerprint of the text.
      vocabulary: The characters of the text.
      sentence: The piece of the validation part that the attention picture shows.
      model_version: `MODEL_VERSION` when the run was started.
    """

    settings: Settings
    data: str | None
    sha256: str
    vocabulary: Vocabulary
    sentence: str
    model_version: int = MODEL_VERSION

    @property
    def prompt(self) -> str:
        """The first word of the sentence, which samples continue."""
        return self.sentence.split(" ")[0] or self.sentence


def prepare(
    out: Path, path: str | None, given: dict[str, Any], resume: bool, size: str | None = None
) -> tuple[Config, data.Text]:
    """Returns the configuration and the text of a run that is to be started or resumed; writes nothing.

    Args:
      out: The run's folder, which need not exist.
      path: The text file or folder; None means that of the resumed run, or Python's documentation.
      given: The settings that the user gave; others are those of the resumed run, or the defaults. More `steps` extend
        the resumed run.
      resume: True continues a run that is in the folder; False refuses the folder.
      size: The preset that the user gave. A resumed run must have its model and batch, but keeps its own steps.
    """
    checked_size(size)
    check_folder("--out", out, writable=True)
    if path == "":  # a shell variable that is not set
        raise UserError("--data is empty: specify a file or a folder, or omit it")
    saved = read_config(out) if (out / CONFIG).exists() else None
    if saved and not resume:
        raise UserError(f"{out} already contains a run: pass --resume to continue it, or choose a different --out")
    if not saved and (out / CHECKPOINTS).exists():
        raise UserError(f"{out} contains checkpoints but no {CONFIG}: choose a different --out")
    if saved and given.get("dtype") == "auto":  # the run has settled it
        given = {name: value for name, value in given.items() if name != "dtype"}
    preset: dict[str, Any] = {}
    if saved:
        if size is not None:
            # The preset's steps are a default, which does not replace the saved number.
            preset = {name: value for name, value in SIZES[size].items() if name not in {"steps", *given}}
        settings = replace(saved.settings, **preset, **given)
    else:
        settings = Settings(**completed(size or "tiny", given))
    path = saved.data if path is None and saved else path
    text = data.load(path, settings.context_length)
    found = None if path is None else str(Path(path).resolve())
    config = Config(settings, found, text.sha256, text.vocabulary, text.sentence(settings.context_length))
    if saved:
        sources = {option_of(name): f" from --size {size}" for name in preset}
        _refuse_differences(out, saved, config, sources)
    return config, text


def _refuse_differences(out: Path, saved: Config, now: Config, sources: Mapping[str, str]) -> None:
    """Raises a `UserError` if the settings differ; `sources` says which of them the user did not give one by one."""
    before, after = _named(saved), _named(now)
    if now.settings.steps > saved.settings.steps:
        del before["--steps"]
    differing = []
    for name in before:
        if before[name] != after[name]:
            differing.append(f"{name} was {before[name]}, now {after[name]}{sources.get(name, '')}")
    if differing:
        names = "; ".join(differing)
        raise UserError(
            f"{out} contains a run with different settings ({names}): drop these options, or choose a different --out"
        )


def _named(config: Config) -> dict[str, Any]:
    options = {option_of(name): value for name, value in asdict(config.settings).items()}
    # The text must be the same, its path need not.
    return {**options, "the sha256 of --data": config.sha256[:12]}


def newest(runs: Path) -> Path:
    """Returns the folder of the run that was started or resumed last."""
    found = [path for path in runs.glob("*/" + CONFIG) if path.is_file()]
    if not found:
        raise UserError(
            f"{runs} contains no runs: train a model with python -m train_demo, or point --out to an existing run"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def write_config(out: Path, config: Config) -> None:
    """Writes the configuration that marks a folder as a run's."""
    write_atomically(out / CONFIG, json.dumps(asdict(config), indent=2).encode())


def read_config(out: Path) -> Config:
    """Reads the configuration of the run in a folder; raises a `UserError` if there is none that this demo can use."""
    check_folder("--out", out)
    try:
        saved = json.loads((out / CONFIG).read_bytes())
        version = saved.get("model_version", 1) if isinstance(saved, dict) and "settings" in saved else MODEL_VERSION
        if version == MODEL_VERSION:
            return _checked(saved)
    except FileNotFoundError:
        raise UserError(f"{out} contains no runs: start one with python -m train_demo --out {out}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{out / CONFIG} is damaged ({reason(error)}): start over with a different --out") from error
    raise UserError(
        f"{out} contains a run with model version {version}, but this program can resume only runs with version "
        f"{MODEL_VERSION}: train again with a different --out"
    )


def _checked(saved: Any) -> Config:
    """Turns a value read from JSON into the `Config` that was written so; raises a ValueError if none was."""
    try:
        settings, vocabulary = Settings(**saved["settings"]), Vocabulary(**saved["vocabulary"])
        config = Config(**saved | {"settings": settings, "vocabulary": vocabulary})
        vocabulary.encode(config.sentence)
    except (AttributeError, LookupError, TypeError, UserError) as error:
        raise ValueError("it is not a run configuration") from error
    if asdict(config) != saved:
        raise ValueError("it is not a run configuration")
    return config


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Makes and locks a run's folder for the context, or raises a `UserError`; the lock also ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to --out {out} ({reason(error)}): choose a different --out") from error
    with lock as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {out}: wait for it to finish, or choose a different --out"
            ) from None
        yield
