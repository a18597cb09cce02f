"""The folder of a run: its configuration, a lock for its only writer, atomic files."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train_demo import data
from train_demo.data import Vocabulary
from train_demo.errors import UserError, reason
from train_demo.settings import SIZES, Settings, checked, completed, one_of, option_of

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
# The version of the configuration, the parameters and the checkpoints. Version 4 had
# checkpoints of another format.
MODEL_VERSION = 5


@dataclass(frozen=True)
class Config:
    """The content of `config.json`: what a checkpoint needs to resume, sample and plot.

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
    out: Path,
    path: str | None,
    given: dict[str, Any],
    resume: bool,
    size: str | None = None,
) -> tuple[Config, data.Text]:
    """Returns the configuration and the text of a new or resumed run; writes nothing.

    Args:
      out: The run's folder, which need not exist.
      path: The text file or folder; None means that of the resumed run, or Python's
        documentation.
      given: The settings that the user gave; others are those of the resumed run, or
        the defaults. More `steps` extend the resumed run.
      resume: True continues a run that is in the folder; False raises an error for one.
      size: The preset that the user gave. A resumed run must have its model and batch,
        but keeps its own steps.
    """
    if size is not None:
        checked("size", size, str, one_of(*SIZES))
    check_folder("--out", out, writable=True)
    if path == "":  # a shell variable that is not set
        raise UserError("--data is empty: specify a file or a folder, or omit it")
    if not (out / CONFIG).exists():
        if (out / CHECKPOINTS).exists():
            message = f"{out} contains checkpoints but no {CONFIG}"
            raise UserError(f"{message}: choose a different --out")
        return _configured(Settings(**completed(size or "tiny", given)), path)
    saved = read_config(out)
    if not resume:
        raise UserError(
            f"{out} already contains a run: pass --resume to continue it, or choose a "
            "different --out"
        )
    # The preset's steps are a default, which does not replace the saved number.
    preset: dict[str, Any] = {}
    if size is not None:
        preset = {x: SIZES[size][x] for x in SIZES[size] if x not in {"steps", *given}}
    if given.get("dtype") == "auto":  # the run has settled it
        given = {**given, "dtype": saved.settings.dtype}
    settings = replace(saved.settings, **preset, **given)
    if path is None:
        path = saved.data
    config, text = _configured(settings, path)
    differing = _differences(saved, config, size, preset)
    if differing:
        raise UserError(
            f"{out} contains a run with different settings ({'; '.join(differing)}): "
            "drop these options, or choose a different --out"
        )
    # The text must be the same, its path need not.
    if saved.sha256 != config.sha256:
        raise UserError(_changed_text(out, saved, config))
    return config, text


def _configured(settings: Settings, path: str | None) -> tuple[Config, data.Text]:
    text = data.load(path, settings.context_length)
    config = Config(
        settings=settings,
        data=path and str(Path(path).resolve()),
        sha256=text.sha256,
        vocabulary=text.vocabulary,
        sentence=text.sentence(settings.context_length),
    )
    return config, text


def _differences(
    saved: Config, now: Config, size: str | None, preset: dict[str, int]
) -> list[str]:
    """Lists what keeps a run from being resumed with another configuration."""
    before = asdict(saved.settings)
    after = asdict(now.settings)
    if after["steps"] > before["steps"]:
        del before["steps"]
    differing = []
    for name in before:
        if before[name] != after[name]:
            line = f"{option_of(name)} was {before[name]}, now {after[name]}"
            if name in preset:
                line += f" from --size {size}"
            differing.append(line)
    return differing


def _changed_text(out: Path, saved: Config, now: Config) -> str:
    """Returns the error about a run that cannot be resumed with this text."""
    if now.data != saved.data:
        return (
            f"--data {now.data} is not the text that {out} was trained on: drop "
            "--data, or choose another --out"
        )
    if saved.data is None:
        return (
            "Python's documentation has changed since the run began: use the version "
            "of Python that began it, or choose another --out"
        )
    return (
        "the text in --data has changed since the run began; restore it, or choose "
        "another --out"
    )


def newest(runs: Path, trained: bool) -> Path:
    """Returns the folder of the run that was started or resumed last.

    Args:
      runs: The folder of runs.
      trained: Pass over runs without a checkpoint, such as those that diverged.
    """
    found = [path for path in runs.glob(f"*/{CONFIG}") if path.is_file()]
    missing = "runs"
    if found and trained:
        found = [path for path in found if saved_steps(path.parent)]
        missing = "run with a checkpoint"
    if not found:
        raise UserError(
            f"{runs} contains no {missing}: train a model with python -m train_demo, "
            "or point --out to an existing run"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def saved_steps(out: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, damaged ones included, in order."""
    folder = out / CHECKPOINTS
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def write_config(out: Path, config: Config) -> None:
    """Writes the configuration that marks a folder as a run's."""
    write_atomically(out / CONFIG, json.dumps(asdict(config), indent=2).encode())


def read_config(out: Path) -> Config:
    """Reads the configuration of the run in a folder."""
    check_folder("--out", out)
    try:
        saved = json.loads((out / CONFIG).read_bytes())
        if not isinstance(saved, dict) or "settings" not in saved:
            raise ValueError("it is not a run configuration")
        version = saved.get("model_version", 1)
        if version == MODEL_VERSION:
            return _restored(saved)
    except FileNotFoundError:
        runs = sorted(path.parent for path in out.glob(f"*/{CONFIG}"))
        if runs:  # such as a comparison
            raise UserError(
                f"{out} contains several runs: choose one, such as --out {runs[0]}"
            ) from None
        start = f"start one with python -m train_demo --out {out}"
        raise UserError(f"{out} contains no runs: {start}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(
            f"{out / CONFIG} is damaged ({reason(error)}): start over with a different "
            "--out"
        ) from error
    raise UserError(
        f"{out} contains a run with model version {version}, but this program can "
        f"resume only runs with version {MODEL_VERSION}: train again with a different "
        "--out"
    )


def _restored(saved: dict[str, Any]) -> Config:
    """Turns a value read from JSON into the `Config` that was written so."""
    try:
        # Earlier versions had only full attention.
        saved = {**saved, "settings": {"attention": "full", **saved["settings"]}}
        settings = Settings(**saved["settings"])
        vocabulary = Vocabulary(**saved["vocabulary"])
        config = Config(**saved | {"settings": settings, "vocabulary": vocabulary})
        vocabulary.encode(config.sentence)
    except (AttributeError, LookupError, TypeError, UserError) as error:
        raise ValueError("it is not a run configuration") from error
    if asdict(config) != saved:
        raise ValueError("it is not a run configuration")
    return config


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Makes and locks a run's folder; the lock also ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("w")
    except OSError as error:
        raise UserError(
            f"cannot write to --out {out} ({reason(error)}): choose a different --out"
        ) from error
    with lock as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {out}: wait for it to finish, or choose a "
                "different --out"
            ) from None
        yield


def check_folder(option: str, folder: Path, writable: bool = False) -> None:
    """Raises a `UserError` unless a path is a folder or may become one.

    If `writable`, the user must also be allowed to write into the folder, or into its
    nearest parent that exists.
    """
    fix = f"choose a different {option}"
    for path in (folder, *folder.parents):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # a parent may exist
        except (
            OSError,
            ValueError,
        ) as error:  # a name that is too long, or holds a NUL
            problem = f"{path} cannot be used ({reason(error)})"
            raise UserError(
                f"{option} must be a folder, but {problem}: {fix}"
            ) from None
        if path.is_dir():
            if writable and not os.access(path, os.W_OK | os.X_OK):
                raise UserError(
                    f"{option} must be a folder that you can write to, but {path} is "
                    f"not writable: {fix}"
                )
            return
        kind = "a broken link"
        if path.exists():
            kind = "a file"
        raise UserError(f"{option} must be a folder, but {path} is {kind}: {fix}")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is the old or the new one, even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # the disk may be full
        error.filename = error.filename or str(path)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of one JSON object per line; skips others, such as half of one."""
    if not path.exists():
        return []
    values = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
