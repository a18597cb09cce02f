"""A run's folder: the configuration it was started with, and one writer at a time."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from train_demo import data, vocabulary
from train_demo.errors import UserError, printable, reason
from train_demo.files import read_json, write_atomically
from train_demo.settings import Settings, completed, option_of
from train_demo.vocabulary import Bytes, Characters, Subwords, Vocabulary

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
      settings: The run's numbers.
      data: The text file or folder; None means Python's documentation.
      sha256: The text's fingerprint.
      vocabulary: Its tokens.
      sentence: The piece of the validation part that the attention picture shows.
      earlier_ends: The numbers of steps that the run had before it was extended, in order.
      model_version: The version of the model that the run trains.
    """

    settings: Settings
    data: str | None
    sha256: str
    vocabulary: Vocabulary
    sentence: str
    earlier_ends: tuple[int, ...] = ()
    model_version: int = MODEL_VERSION

    @property
    def prompt(self) -> str:
        """The first word of the sentence, which the run's samples continue."""
        word = self.sentence.split(" ")[0]
        return word if len(self.vocabulary.encode(word)) else self.sentence


def prepare(
    out: Path, path: str | None, given: dict[str, Any], resume: bool, tokenizer: str | None = None
) -> tuple[Config, data.Text]:
    """Settles a run's configuration and text without writing anything.

    Args:
      out: The run's folder, which need not exist.
      path: The text file or folder; None means the resumed run's, or Python's documentation.
      given: The settings that were named; the others come from the resumed run, or are the defaults. More `steps` than
        the resumed run has extend it.
      resume: Whether a run that is there already may go on.
      tokenizer: "characters", "bytes" or a file; None means the resumed run's, or characters.
    """
    _refuse_unusable(out, path, tokenizer)
    saved = read_config(out) if (out / CONFIG).exists() else None
    if saved and not resume:
        raise UserError(f"{out} holds a run already: pass --resume to go on with it, or another --out")
    if not saved and (out / CHECKPOINTS).exists():
        raise UserError(f"{out} holds checkpoints without their {CONFIG}: choose another --out")
    if saved and given.get("dtype") == "auto":  # what it was when the run began
        given = {name: value for name, value in given.items() if name != "dtype"}
    settings = replace(saved.settings, **given) if saved else Settings(**completed("tiny", given))
    path = saved.data if path is None and saved else path
    tokens = vocabulary.chosen(tokenizer or Characters.name)
    if tokenizer is None and saved and not isinstance(saved.vocabulary, Characters):
        tokens = saved.vocabulary
    text = data.load(path, settings.context_length, tokens)
    found = None if path is None else str(Path(path).resolve())
    config = Config(settings, found, text.sha256, text.vocabulary, text.sentence(settings.context_length))
    if saved:
        extended = settings.steps > saved.settings.steps
        ends = (*saved.earlier_ends, saved.settings.steps) if extended else saved.earlier_ends
        config = replace(config, earlier_ends=ends)
        _refuse_differences(out, saved, config)
    return config, text


def _refuse_unusable(out: Path, path: str | None, tokenizer: str | None) -> None:
    for name, given in (("--data", path), ("--tokenizer", tokenizer)):
        if given == "":  # a variable of the shell that is not set
            raise UserError(f"{name} is empty: name a file or a folder, or leave it out")
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{printable(str(out))} is no UTF-8, as checkpoints need it: choose another --out") from None


def _refuse_differences(out: Path, saved: Config, now: Config) -> None:
    before, after = _named(saved), _named(now)
    if now.settings.steps > saved.settings.steps:
        del before["--steps"]
    differing = [f"{name} {before[name]} there, {after[name]} here" for name in before if before[name] != after[name]]
    if differing:
        names = "; ".join(differing)
        raise UserError(f"{out} holds a run of another configuration ({names}): drop these or choose another --out")


def _named(config: Config) -> dict[str, Any]:
    options = {option_of(name): value for name, value in asdict(config.settings).items()}
    # The text counts, not where it lies.
    return {**options, "--data with the sha256": config.sha256[:12], "--tokenizer": config.vocabulary.name}


def newest(runs: Path) -> Path:
    """Finds the run that was started or resumed last."""
    found = [path for path in runs.glob("*/" + CONFIG) if path.is_file()]
    if not found:
        raise UserError(f"{runs} holds no run: train one with python -m train_demo, or name its folder with --out")
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def write_config(out: Path, config: Config) -> None:
    """Writes the configuration that marks a folder as a run's, and its tokenizer file if it has one."""
    if isinstance(config.vocabulary, Subwords):
        write_atomically(out / vocabulary.FILE, config.vocabulary.content)
    write_atomically(out / CONFIG, json.dumps(_as_json(config), indent=2).encode())


def _as_json(config: Config) -> dict[str, Any]:
    saved = {field.name: getattr(config, field.name) for field in fields(config)}
    return saved | {"settings": asdict(config.settings), "vocabulary": saved_vocabulary(config.vocabulary)}


def saved_vocabulary(tokens: Vocabulary) -> Any:
    """Puts a vocabulary in JSON: a text that holds all characters, or an object."""
    if isinstance(tokens, Characters):
        return tokens.characters
    if isinstance(tokens, Subwords):
        return {vocabulary.FILE: hashlib.sha256(tokens.content).hexdigest()}
    return {Bytes.name: len(tokens)}


def read_config(out: Path) -> Config:
    """Reads the configuration of the run in a folder."""
    try:
        saved = read_json(out / CONFIG)
        version = saved.get("model_version", 1) if isinstance(saved, dict) and "sentence" in saved else MODEL_VERSION
        if version == MODEL_VERSION:
            return _checked(saved, out)
    except FileNotFoundError:
        raise UserError(f"{out} holds no run: start one with python -m train_demo --out {out}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{out / CONFIG} is damaged ({reason(error)}): start anew with another --out") from error
    raise UserError(
        f"{out} holds a run of version {version} of the demo's model, whose parameters do not fit version "
        f"{MODEL_VERSION}, which this program trains: train anew with another --out"
    )


def _checked(saved: Any, out: Path) -> Config:
    """Rebuilds a configuration of which this was saved."""
    try:
        settings = Settings(**saved["settings"])
        tokens, ends = _vocabulary(saved["vocabulary"], out), tuple(saved["earlier_ends"])
        config = Config(**saved | {"settings": settings, "vocabulary": tokens, "earlier_ends": ends})
        steps, size = [0, *ends, settings.steps], len(tokens.encode(config.sentence))
        sane = steps == sorted(set(steps)) and set(map(type, steps)) == {int}
        sane &= size > 0 and (size <= settings.context_length or len(config.sentence) == 1)
        sane &= isinstance(config.data, str | None) and isinstance(config.sha256, str)
    except (AttributeError, KeyError, TypeError, UserError) as error:
        raise ValueError("it is not a run's configuration") from error
    if not sane or json.dumps(_as_json(config), sort_keys=True) != json.dumps(saved, sort_keys=True):
        raise ValueError("it is not a run's configuration")
    return config


def _vocabulary(saved: Any, out: Path) -> Vocabulary:
    """Rebuilds a vocabulary; ValueError or TypeError where that cannot be done."""
    if isinstance(saved, str):
        if not saved or list(saved) != sorted(set(saved)):
            raise ValueError("its vocabulary is not in order")
        return Characters(saved)
    if vocabulary.FILE not in saved:
        return Bytes()
    try:
        content = (out / vocabulary.FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"its {vocabulary.FILE} cannot be read: {reason(error)}") from error
    if hashlib.sha256(content).hexdigest() != saved[vocabulary.FILE]:
        raise ValueError(f"its {vocabulary.FILE} is not the run's")
    return Subwords(content)


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Makes the folder if need be, and keeps a second run out of it; the lock falls with the process."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run writes into {out} now: wait for it, or choose another --out") from None
        yield
