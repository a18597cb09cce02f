"""A run's folder: the configuration it was started with, files that appear whole, one writer at a time."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from train_demo import data
from train_demo.errors import UserError
from train_demo.settings import Settings, completed, restored

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two runs out of one folder there
    fcntl = None  # type: ignore[assignment]

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
# What the parameters of a checkpoint mean. Version 1, which had no number, learned an embedding of each position;
# version 2 normalized queries and keys with LayerNorm and saw each character alone.
MODEL_VERSION = 3


@dataclass(frozen=True)
class Config:
    """What `config.json` holds: enough to resume, to sample and to plot without being told anything again.

    Attributes:
        settings: the run's numbers.
        data: the text file; None means Python's documentation.
        sha256: the text's fingerprint.
        vocabulary: the text's distinct characters, in order.
        sentence: the piece of the validation part that the attention picture shows.
        earlier_ends: the numbers of steps that the run had before it was extended, in order.
        model_version: the version of the model that the run trains.
    """

    settings: Settings
    data: str | None
    sha256: str
    vocabulary: str
    sentence: str
    earlier_ends: tuple[int, ...] = ()
    model_version: int = MODEL_VERSION


def prepare(out: Path, path: str | None, given: dict[str, Any], resume: bool) -> tuple[Config, data.Text]:
    """Settles a run's configuration and text without writing anything.

    Args:
        out: the run's folder, which need not exist.
        path: the text file; None means the resumed run's, or Python's documentation.
        given: the settings that were named; the others come from the resumed run, or are the defaults. More `steps`
            than the resumed run has extend it.
        resume: whether a run that is there already may go on.

    Raises:
        UserError: the folder holds a run and `resume` is false, or its run has another configuration; or the text or
            the settings are unfit.
    """
    saved = read_config(out) if (out / CONFIG).exists() else None
    if saved and not resume:
        raise UserError(f"{out} holds a run already: pass --resume to go on with it, or another --out")
    if not saved and (out / CHECKPOINTS).exists():
        raise UserError(f"{out} holds checkpoints without their {CONFIG}: choose another --out")
    settings = replace(saved.settings, **given) if saved else Settings(**completed("tiny", given))
    path = saved.data if path is None and saved else path
    text = data.load(path, settings.context_length)
    found = None if path is None else str(Path(path).resolve())
    config = Config(settings, found, text.sha256, text.vocabulary, text.sentence(settings.context_length))
    if saved:
        extended = settings.steps > saved.settings.steps
        ends = (*saved.earlier_ends, saved.settings.steps) if extended else saved.earlier_ends
        config = replace(config, earlier_ends=ends)
        _refuse_differences(out, saved, config)
    return config, text


def newest(runs: Path) -> Path:
    """Finds the run that was started or resumed last.

    Raises:
        UserError: there is none.
    """
    found = [path for path in runs.glob("*/" + CONFIG) if path.is_file()]
    if not found:
        raise UserError(f"{runs} holds no run: train one with python -m train_demo, or name its folder with --out")
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def write_config(out: Path, config: Config) -> None:
    """Writes the configuration that marks a folder as a run's."""
    write_atomically(out / CONFIG, json.dumps(asdict(config), indent=2).encode())


def read_config(out: Path) -> Config:
    """Reads the configuration of the run in a folder.

    Raises:
        UserError: there is no run, or its `config.json` is damaged, or its model is one of another version.
    """
    try:
        saved = read_json(out / CONFIG)
        version = _version(saved)
        if version == MODEL_VERSION:
            return _checked(saved)
    except FileNotFoundError:
        raise UserError(f"{out} holds no run: start one with python -m train_demo --out {out}") from None
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{out / CONFIG} is damaged ({why}): start anew with another --out") from error
    raise UserError(
        f"{out} holds a run of version {version} of the demo's model, whose parameters do not fit version "
        f"{MODEL_VERSION}, which this program trains: train anew with another --out"
    )


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: it is not JSON.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _version(saved: Any) -> int:
    """The version of the model whose configuration this is."""
    names = {field.name for field in fields(Config)}
    if isinstance(saved, dict) and saved.keys() == names - {"model_version"}:
        return 1
    if not isinstance(saved, dict) or saved.keys() != names:
        raise ValueError("it is not a run's configuration")
    if type(saved["model_version"]) is not int:
        raise ValueError("its model version is not a whole number")
    return saved["model_version"]


def _checked(saved: dict[str, Any]) -> Config:
    ends = saved["earlier_ends"]
    if not isinstance(ends, list) or not all(type(end) is int and end > 0 for end in ends):
        raise ValueError("its earlier ends are not numbers of steps")
    config = Config(**{**saved, "settings": restored(saved["settings"]), "earlier_ends": tuple(ends)})
    steps = [*ends, config.settings.steps]
    if steps != sorted(set(steps)):
        raise ValueError("its earlier ends do not come before its last step")
    texts = (config.sha256, config.vocabulary, config.sentence, "" if config.data is None else config.data)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it holds something else where a text belongs")
    if list(config.vocabulary) != sorted(set(config.vocabulary)):
        raise ValueError("its vocabulary is not in order")
    if not 0 < len(config.sentence) <= config.settings.context_length or set(config.sentence) - set(config.vocabulary):
        raise ValueError("its sentence is not one of its text")
    return config


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is, at every moment and after a power cut, either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # half a file is of no use, and the disk may be full
        raise


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Makes the folder if need be and keeps a second run out of it; the lock falls with the process, however it ends.

    Raises:
        UserError: another run writes there now.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run writes into {out} now: wait for it, or choose another --out") from None
        yield


def _refuse_differences(out: Path, saved: Config, now: Config) -> None:
    before, after = _named(saved), _named(now)
    if now.settings.steps > saved.settings.steps:
        del before["--steps"]
    differing = [f"{name} {before[name]} there, {after[name]} here" for name in before if before[name] != after[name]]
    if differing:
        names = "; ".join(differing)
        raise UserError(f"{out} holds a run of another configuration ({names}): drop these or choose another --out")


def _named(config: Config) -> dict[str, Any]:
    options = {f"--{name.replace('_', '-')}": value for name, value in asdict(config.settings).items()}
    # The text counts, not where it lies.
    return {**options, "--data with the sha256": config.sha256[:12]}
