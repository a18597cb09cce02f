"""A run's folder: the configuration it was started with, files that appear whole, one writer at a time."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from train_demo import data, vocabulary
from train_demo.errors import UserError, printable
from train_demo.files import read_json, write_atomically
from train_demo.settings import Settings, completed, restored
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
        settings: the run's numbers.
        data: the text file or folder; None means Python's documentation.
        sha256: the text's fingerprint.
        vocabulary: its tokens.
        sentence: the piece of the validation part that the attention picture shows.
        earlier_ends: the numbers of steps that the run had before it was extended, in order.
        model_version: the version of the model that the run trains.
    """

    settings: Settings
    data: str | None
    sha256: str
    vocabulary: Vocabulary
    sentence: str
    earlier_ends: tuple[int, ...] = ()
    model_version: int = MODEL_VERSION


def prepare(
    out: Path,
    path: str | None,
    given: dict[str, Any],
    resume: bool,
    tokenizer: str | None = None,
    say: data.Say = lambda line: None,
) -> tuple[Config, data.Text]:
    """Settles a run's configuration and text without writing anything.

    Args:
        out: the run's folder, which need not exist.
        path: the text file or folder; None means the resumed run's, or Python's documentation.
        given: the settings that were named; the others come from the resumed run, or are the defaults. More `steps`
            than the resumed run has extend it.
        resume: whether a run that is there already may go on.
        tokenizer: "characters", "bytes" or a file; None means the resumed run's, or characters.
        say: told how far it is with large texts.

    Raises:
        UserError: the folder holds a run and `resume` is false, or its run has another configuration; or the text or
            the settings are unfit.
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
    text = data.load(path, settings.context_length, tokens, say)
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
    """Writes the configuration that marks a folder as a run's, and its tokenizer file if it has one."""
    saved: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(config)}
    saved |= {"settings": asdict(config.settings), "vocabulary": saved_vocabulary(config.vocabulary)}
    if isinstance(config.vocabulary, Subwords):
        write_atomically(out / vocabulary.FILE, config.vocabulary.content)
    write_atomically(out / CONFIG, json.dumps(saved, indent=2).encode())


def read_config(out: Path) -> Config:
    """Reads the configuration of the run in a folder.

    Raises:
        UserError: there is no run, or its `config.json` is damaged, or its model is one of another version.
    """
    try:
        saved = read_json(out / CONFIG)
        version = _version(saved)
        if version == MODEL_VERSION:
            return _checked(saved, out)
    except FileNotFoundError:
        raise UserError(f"{out} holds no run: start one with python -m train_demo --out {out}") from None
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{out / CONFIG} is damaged ({why}): start anew with another --out") from error
    raise UserError(
        f"{out} holds a run of version {version} of the demo's model, whose parameters do not fit version "
        f"{MODEL_VERSION}, which this program trains: train anew with another --out"
    )


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


def saved_vocabulary(tokens: Vocabulary) -> Any:
    """A vocabulary as JSON: a text that holds all characters, or an object."""
    if isinstance(tokens, Characters):
        return tokens.characters
    if isinstance(tokens, Subwords):
        return {vocabulary.FILE: hashlib.sha256(tokens.content).hexdigest()}
    return {Bytes.name: len(tokens)}


def _vocabulary(saved: Any, out: Path) -> Vocabulary:
    """The vocabulary of which this was saved.

    Raises:
        ValueError: it was not.
        UserError: its package is missing.
    """
    if isinstance(saved, str):
        if not saved or list(saved) != sorted(set(saved)):
            raise ValueError("its vocabulary is not in order")
        saved.encode()  # lone halves of characters are no text
        return Characters(saved)
    if saved == saved_vocabulary(Bytes()):
        return Bytes()
    if not isinstance(saved, dict) or saved.keys() != {vocabulary.FILE}:
        raise ValueError("it holds something else where a vocabulary belongs")
    try:
        content = (out / vocabulary.FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"its {vocabulary.FILE} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != saved[vocabulary.FILE]:
        raise ValueError(f"its {vocabulary.FILE} is not the run's")
    return Subwords(content)


def _checked(saved: dict[str, Any], out: Path) -> Config:
    ends = saved["earlier_ends"]
    if not isinstance(ends, list) or not all(type(end) is int and end > 0 for end in ends):
        raise ValueError("its earlier ends are not numbers of steps")
    tokens = _vocabulary(saved["vocabulary"], out)
    config = Config(
        **{**saved, "settings": restored(saved["settings"]), "earlier_ends": tuple(ends), "vocabulary": tokens}
    )
    steps = [*ends, config.settings.steps]
    if steps != sorted(set(steps)):
        raise ValueError("its earlier ends do not come before its last step")
    texts = (config.sha256, config.sentence, "" if config.data is None else config.data)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it holds something else where a text belongs")
    _check_sentence(config)
    return config


def _check_sentence(config: Config) -> None:
    try:
        tokens = len(config.vocabulary.encode(config.sentence))
    except UserError:
        tokens = 0
    if not tokens or (len(config.sentence) > 1 and tokens > config.settings.context_length):
        raise ValueError("its sentence is not one of its text")


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
    return {**options, "--data with the sha256": config.sha256[:12], "--tokenizer": config.vocabulary.name}
