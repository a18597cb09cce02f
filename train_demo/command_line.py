"""The commands `train`, `compare`, `sample`, `report`, `export`, and their options."""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from train_demo.api import RUNS, default_folder, load, start
from train_demo.errors import UserError, printable, reason
from train_demo.run_folder import CONFIG, check_folder, newest, read_config
from train_demo.settings import (
    ATTENTIONS,
    SAMPLING,
    SIZES,
    Layout,
    Settings,
    count,
    default_of,
    one_of,
    option_of,
    seed,
)

# JAX and Matplotlib are imported inside functions, so that help and errors in options
# come immediately.

DESCRIPTION = """\
Trains a small transformer that writes text, one character
at a time. The default command is train. COMMAND --help
lists the options of the other commands."""
NEWEST = "newest run with a checkpoint"
METAVARS = {int: "N", float: "X", str: "NAME"}


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, printable(f"{self.prog}: error: {' '.join(message.split())}") + "\n"
        )


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; see `train_demo.__main__.main`."""
    for stream in (sys.stdout, sys.stderr):
        # Characters that the encoding, such as ASCII, does not have become "?".
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    arguments = list(arguments)
    is_help = arguments[:1] in (["-h"], ["--help"])
    if not is_help and not (arguments and not arguments[0].startswith("-")):
        arguments.insert(0, "train")
    parser = make_parser()
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unrecognized(chosen, arguments[0], unknown))
    try:
        code = chosen.command(chosen)
        sys.stdout.flush()
        return code
    except UserError as error:
        parser.error(str(error))
    except OSError as error:
        # Such as a full disk; errors of stdout have no file name.
        if not error.filename:
            parser.error(f"cannot write to standard output ({reason(error)})")
        parser.error(
            f"cannot read or write {error.filename} ({reason(error)}): check its "
            "permissions and the free disk space"
        )


def _unrecognized(
    chosen: argparse.Namespace, command: str, unknown: Sequence[str]
) -> str:
    """Returns the error about arguments that a command does not have."""
    first, _, _ = unknown[0].partition("=")
    options = [option_of(name) for name in vars(chosen) if name != "command"]
    similar = difflib.get_close_matches(first, options, n=1, cutoff=0.7)
    hint = ""
    if similar:
        hint = f" (did you mean {similar[0]}?)"
    elif not first.startswith("-"):
        hint = " (put quotes around a value with spaces)"
    return (
        f"unrecognized arguments: {' '.join(unknown)}{hint}: python -m train_demo "
        f"{command} --help lists all options"
    )


def _train(chosen: argparse.Namespace) -> int:
    layout = Layout(**_given(chosen, Layout))
    has_runs = any(RUNS.glob(f"*/{CONFIG}"))
    if chosen.resume and chosen.data is None and has_runs:
        out = _chosen_folder(chosen, trained=False)
    else:
        out = chosen.out or default_folder(chosen.data)
    _keep_compiled()
    return start(
        out=out,
        data=chosen.data,
        given=_given(chosen, Settings),
        resume=chosen.resume,
        layout=layout,
        quiet=False,
        samples=not chosen.no_samples,
        size=chosen.size,
    )


def _compare(chosen: argparse.Namespace) -> int:
    given = _given(chosen, Settings)
    kinds = given.pop("attention", None)
    _keep_compiled()
    from train_demo import compare

    return compare.compare(
        out=chosen.out or RUNS / "compare",
        kinds=kinds,
        data=chosen.data,
        given=given,
        resume=chosen.resume,
        layout=Layout(**_given(chosen, Layout)),
        size=chosen.size,
    )


def _given(chosen: argparse.Namespace, options: Any) -> dict[str, Any]:
    """Returns the options of `Settings` or `Layout` that the user gave."""
    given = {field.name: getattr(chosen, field.name) for field in fields(options)}
    return {name: value for name, value in given.items() if value is not None}


def _keep_compiled() -> None:
    """Makes JAX cache compiled programs in the user's cache folder.

    If the cache cannot be read or written, the run compiles without it.
    """
    if "jax" in sys.modules:  # another program, which may have configured JAX
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(home, "flax_mha")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    words = "Error (reading|writing) persistent compilation cache entry"
    warnings.filterwarnings("ignore", words, UserWarning)


def _chosen_folder(chosen: argparse.Namespace, trained: bool = True) -> Path:
    """Returns `--out`, or the newest run, which has a checkpoint if `trained`."""
    if chosen.out is not None:
        return chosen.out
    out = newest(RUNS, trained)
    which = "newest run"
    if trained:
        which = NEWEST
    print(printable(f"Using the {which}: {out}"), file=sys.stderr)
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
    sampling = generate.Sampling(
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
    )
    number = len(chosen.prompt)
    for i, prompt in enumerate(chosen.prompt, start=1):
        if number > 1:
            print(f"--- prompt {i} of {number} ---")
        pieces = generate.generate(
            model=model,
            vocabulary=config.vocabulary,
            prompts=[prompt],
            max_new_tokens=chosen.max_new_tokens,
            sampling=sampling,
            seed=chosen.seed,
        )
        print(printable(prompt), end="", flush=True)
        for (piece,) in pieces:
            print(printable(piece), end="", flush=True)
        print()
    return 0


def _report(chosen: argparse.Namespace) -> int:
    out = _chosen_folder(chosen)
    check_folder("--out", out, writable=True)
    trained = load(out)
    from train_demo import plots, report

    plots.draw(out, trained.model, trained.config)
    report.write(out, trained.config, trained.sample(trained.config.prompt))
    print(printable(f"{out / report.FILE} is ready: open it in a browser"))
    return 0


def _export(chosen: argparse.Namespace) -> int:
    out = _chosen_folder(chosen)
    config = read_config(out)
    from train_demo import export, generate

    to = chosen.to or out / "export"
    export.check(to, config)  # before the model is loaded
    try:
        export.write(to, generate.load_model(out, config), config)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or to} ({reason(error)}): choose a "
            "different --to"
        ) from error
    print(printable(f"Wrote {', '.join(sorted(export.FILES))} to {to}"))
    return 0


def folder(text: str) -> Path:
    """Returns the path that a text names, which an unset shell variable does not."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return Path(text)


def _kinds(text: str) -> list[str]:
    """Returns the kinds of attention that a text names, without repetitions."""
    parse = one_of(*ATTENTIONS)
    return list(dict.fromkeys(parse(name.strip()) for name in text.split(",")))


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m train_demo",
        usage="%(prog)s [COMMAND] [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        title="commands",
        metavar="COMMAND",
        required=True,
        parser_class=Parser,
        prog="python -m train_demo",
    )

    def command(
        name: str,
        function: Callable[[argparse.Namespace], int],
        explanation: str,
        default: str = f"the {NEWEST}",
    ) -> Parser:
        made = commands.add_parser(name, help=explanation, allow_abbrev=False)
        made.set_defaults(command=function)
        help_of_out = f"run folder (default: {default})"
        made.add_argument("--out", type=folder, metavar="DIR", help=help_of_out)
        return made

    train = command(
        "train",
        _train,
        "train a model, or resume a run (default)",
        "runs/NAME_OF_THE_DATA",
    )
    train._optionals.title = "train options"
    train.add_argument(
        "--resume",
        action="store_true",
        help="resume --out, or the newest run, from its last checkpoint; options that "
        "are not given keep the values of the run; raise --steps to train longer",
    )
    train.add_argument(
        "--no-samples",
        action="store_true",
        help="do not write a short sample at each validation",
    )
    _add_training_options(train)
    # The help of the whole command also lists the options of its default.
    _, _, parser.epilog = train.format_help().partition("\n\n")

    compare = command(
        "compare",
        _compare,
        "train one model with several kinds of attention, and compare them",
        "runs/compare",
    )
    compare.add_argument(
        "--resume",
        action="store_true",
        help="continue the comparison in --out, with its options",
    )
    _add_training_options(compare, several=True)

    sample = command("sample", _sample, "write text with a trained model")
    sample.add_argument(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="text to continue; repeat this option to continue several texts",
    )
    for name, (parse, default, explanation) in SAMPLING.items():
        metavar = "X"
        if parse in (count, seed):
            metavar = "N"
        if default is not None:
            explanation += f" (default: {default})"
        sample.add_argument(
            option_of(name),
            type=parse,
            default=default,
            metavar=metavar,
            help=explanation,
        )

    command(
        "report",
        _report,
        "redraw the plots and report.html, even while a run is training",
    )
    export = command(
        "export",
        _export,
        "write the weights as safetensors, with a config and PyTorch code",
    )
    export.add_argument(
        "--to",
        type=folder,
        metavar="DIR",
        help="output folder (default: export/ in the run folder)",
    )
    return parser


def _add_training_options(parser: Parser, several: bool = False) -> None:
    """Adds the options of a run, or of several runs that differ in their attention."""
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a UTF-8 text file, or a folder of them (default: Python's documentation)",
    )
    parser.add_argument(
        "--size",
        type=one_of(*SIZES),
        metavar="NAME",
        help=f"preset for model, batch and steps: {', '.join(SIZES)} (default: tiny); "
        "other options override it",
    )
    for field in (*fields(Settings), *fields(Layout)):
        # The value of an option that is not given is None.
        parse = field.metadata["parse"]
        explanation = field.metadata["help"]
        option = option_of(field.name)
        if parse is None:
            parser.add_argument(
                option, action="store_true", default=None, help=explanation
            )
            continue
        default = default_of(field.name, field.default)
        metavar = METAVARS[type(field.default)]
        if several and field.name == "attention":
            parse = _kinds
            explanation = f"kinds of attention, out of {', '.join(ATTENTIONS)}"
            default = "all"
            metavar = "NAME,..."
        explanation += f" (default: {default})"
        parser.add_argument(option, type=parse, metavar=metavar, help=explanation)
