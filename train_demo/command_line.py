"""The commands `train`, `sample`, `report` (or `plot`), `export` and `plan`, and their options.

The options are the fields of `Settings` and `Layout`.
"""

import argparse
import itertools
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from train_demo import data, terminal
from train_demo.api import RUNS, SETTINGS, default_folder, load, start
from train_demo.errors import UserError, any_encoding, enough_memory, printable, reason
from train_demo.files import check_folder
from train_demo.run_folder import CONFIG, newest, read_config
from train_demo.settings import SAMPLING, SIZES, Layout, Settings, completed, count, default_of, one_of, option_of

# JAX and Matplotlib are imported where they are used, so that help and errors in options come at once.

METAVARS = {int: "N", int | None: "N", float: "X", str: "NAME", str | None: "HOST:PORT"}
LAYOUT = {option.name: option for option in fields(Layout)}


class Help(argparse.HelpFormatter):
    """Formats help whose lines do not break at hyphens, so that the names of options stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error as one line, or on a terminal as wrapped lines, without the usage."""

    def error(self, message: str) -> NoReturn:
        line = printable(f"{self.prog}: error: {' '.join(message.split())}") + "\n"
        self.exit(2, "".join(terminal.wrapped([line], terminal.columns())) if sys.stderr.isatty() else line)


class MainParser(Parser):
    """The parser of the whole command, whose help lists the options of `train`, too."""

    train: Parser

    def format_help(self) -> str:
        _, _, options = self.train.format_help().partition("\n\n")
        return f"{super().format_help()}\n{options}"


@any_encoding()
def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; see `train_demo.__main__.main`."""
    arguments = list(arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["train", *arguments]
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        code = chosen.command(chosen)
        sys.stdout.flush()
        return code
    except UserError as error:
        parser.error(str(error))
    except OSError as error:  # such as a full disk; errors of stdout have no file name
        if not error.filename:
            parser.error(f"cannot write to standard output ({reason(error)})")
        parser.error(
            f"cannot read or write {error.filename} ({reason(error)}): check its permissions and the free disk space"
        )
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: run pip install -e '.[demo]' in the repository")


def _train(chosen: argparse.Namespace) -> int:
    given = _given(chosen, SETTINGS)
    newest_run = chosen.resume and chosen.data is None and any(RUNS.glob(f"*/{CONFIG}"))
    out = _chosen_folder(chosen) if newest_run else chosen.out or default_folder(chosen.data)
    layout = Layout(**_given(chosen, LAYOUT))
    _keep_compiled()
    return start(out, chosen.data, given, chosen.resume, layout, samples=not chosen.no_samples, size=chosen.size)


def _given(chosen: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}


def _keep_compiled() -> None:
    """Makes JAX cache compiled programs in the user's cache folder, unless the environment names another folder.

    If the cache cannot be read or written, the run compiles without it.
    """
    if "jax" in sys.modules:  # another program runs in this process, and may have configured JAX
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "flax_mha")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)


def _chosen_folder(chosen: argparse.Namespace) -> Path:
    if chosen.out is not None:
        return chosen.out
    out = newest(RUNS)
    print(printable(f"Using the newest run: {out}"), file=sys.stderr)
    return out


def _sample(chosen: argparse.Namespace) -> int:
    if not all(chosen.prompt):
        raise UserError("--prompt is empty: pass at least one character")
    out = _chosen_folder(chosen)
    config = read_config(out)
    config.vocabulary.encode("".join(chosen.prompt))  # before anything slow begins
    _keep_compiled()
    from train_demo import generate

    model = generate.load_model(out, config)
    sampling = generate.Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
    options = {"num_samples": chosen.num_samples, "seed": chosen.seed}
    with enough_memory("--num-samples, or give fewer prompts"):
        pieces = generate.generate(model, config.vocabulary, chosen.prompt, chosen.max_new_tokens, sampling, **options)
        _show(chosen.prompt, chosen.num_samples, pieces)
    return 0


def _show(prompts: Sequence[str], num_samples: int, pieces: Iterator[list[str]]) -> None:
    """Prints prompts and what follows: a single text piece by piece as it is written, several texts at the end."""
    if len(prompts) * num_samples == 1:
        text = (printable(piece) for (piece,) in itertools.chain([prompts], pieces))
        for part in terminal.wrapped(text, terminal.columns()) if sys.stdout.isatty() else (*text, "\n"):
            print(part, end="", flush=True)
        return
    for number, parts in enumerate(zip(*pieces, strict=True)):
        prompt, sample = divmod(number, num_samples)
        print(f"--- prompt {prompt + 1} of {len(prompts)}, sample {sample + 1} of {num_samples} ---")
        print(printable(prompts[prompt] + "".join(parts)), flush=True)


def _plot(chosen: argparse.Namespace) -> int:
    out = _chosen_folder(chosen)
    check_folder("--out", out, writable=True)
    run = load(out)
    from train_demo import plots, report

    plots.draw(run.out, run.model, run.config)
    report.write(run.out, run.config, run.sample(run.config.prompt))
    print(printable(f"{run.out / report.FILE} is ready: open it in a browser"))
    return 0


def _export(chosen: argparse.Namespace) -> int:
    out = _chosen_folder(chosen)
    read_config(out)
    from train_demo import export

    export.check_target(chosen.to or export.default_target(out))  # before the model is loaded
    to = load(out).export(chosen.to)
    print(printable(f"Wrote {', '.join(sorted(path.name for path in to.iterdir()))} to {to}"))
    return 0


def _plan(chosen: argparse.Namespace) -> int:
    settings = Settings(**completed(chosen.size or "tiny", _given(chosen, SETTINGS)))
    layout, number = Layout(**_given(chosen, LAYOUT)), chosen.devices or 1
    text = data.load(chosen.data, settings.context_length)
    # JAX refuses the older way to ask for virtual devices beside the newer one.
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ |= {"XLA_FLAGS": " ".join(kept), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number)}
    import jax

    from train_demo.memory_estimate import estimate, table

    if jax.device_count() < number:
        raise UserError(f"JAX is already running on {jax.device_count()} devices: run plan in a separate process")
    print(table(estimate(settings, layout, len(text.vocabulary), len(text.training), jax.devices()[:number])))
    return 0


def folder(text: str) -> Path:
    """Returns the path that a text names; refuses an empty text, which a shell variable that is not set becomes."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return Path(text)


def _parser() -> Parser:
    parser = MainParser(
        prog="python -m train_demo",
        usage="%(prog)s [COMMAND] [options]",
        description="Trains a small transformer that writes text, one character at a time. "
        "The default command is train. COMMAND --help lists the options of the other commands.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def command(function: Any, explanation: str, where: str = "the newest run", also: Sequence[str] = ()) -> Parser:
        name = function.__name__[1:]
        usage = f"{parser.prog} {name} {'--prompt TEXT ' * (function is _sample)}[options]"
        made = commands.add_parser(
            name, help=explanation, usage=usage, aliases=also, allow_abbrev=False, formatter_class=Help
        )
        made.set_defaults(command=function)
        if function is not _plan:
            made.add_argument("--out", type=folder, metavar="DIR", help=f"run folder (default: {where})")
        return made

    train = parser.train = command(_train, "train a model, or resume a run (default)", "runs/NAME_OF_THE_DATA")
    train._optionals.title = "train options"
    source = "a UTF-8 text file, or a folder of them (default: the Python documentation)"
    again = (
        "resume --out, or the newest run, from its last checkpoint; options that are not given keep the values of the "
        "run; raise --steps to train longer"
    )
    train.add_argument("--resume", action="store_true", help=again)
    train.add_argument("--no-samples", action="store_true", help="do not write a short sample at each validation")
    size = f"preset for model, batch and steps: {', '.join(SIZES)} (default: tiny); other options override it"

    sample = command(_sample, "write text with a trained model")
    prompts = "text to continue; repeat this option to continue several prompts at once"
    sample.add_argument("--prompt", required=True, action="append", metavar="TEXT", help=prompts)
    for name, (parse, default, explanation) in SAMPLING.items():
        ending = "" if default is None else f" (default: {default})"
        metavar = "X" if name in ("temperature", "top_p", "min_p") else "N"
        option = option_of(name)
        sample.add_argument(option, type=parse, default=default, metavar=metavar, help=explanation + ending)

    command(_plot, "redraw the plots and report.html, even while a run is training", also=("report",))
    export = command(_export, "write the weights as safetensors, with a config and PyTorch code")
    export.add_argument("--to", type=folder, metavar="DIR", help="output folder (default: export/ in the run folder)")

    plan = command(_plan, "estimate how much memory a training step needs on each device")
    plan.add_argument("--devices", type=count, metavar="N", help="number of devices (default: 1)")
    for each in (train, plan):
        each.add_argument("--data", metavar="PATH", help=source)
        each.add_argument("--size", type=one_of(*SIZES), metavar="NAME", help=size)
        _add(each, (*SETTINGS.values(), *LAYOUT.values()))
    return parser


def _add(parser: Parser, options: Iterable[Any]) -> None:
    """Adds a command-line option for each field of `Settings` or `Layout`; its value is None if it is not given."""
    for option in options:
        parse, explanation = option.metadata["parse"], option.metadata["help"]
        if parse is None:
            parser.add_argument(option_of(option.name), action="store_true", default=None, help=explanation)
        else:
            ending = "" if option.default is None else f" (default: {default_of(option.name, option.default)})"
            metavar = METAVARS[option.type]
            parser.add_argument(option_of(option.name), type=parse, metavar=metavar, help=explanation + ending)
