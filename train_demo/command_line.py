"""The commands `train`, `sample`, `plot`, `report`, `export` and `plan`, and their options."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from train_demo.api import RUNS, SETTINGS, default_folder, start
from train_demo.data import SHARD, load
from train_demo.errors import UserError, enough_memory, fitted, printable
from train_demo.layout import Layout
from train_demo.run_folder import newest, read_config
from train_demo.settings import (
    SIZES,
    Settings,
    above_zero_to_one,
    completed,
    count,
    number,
    one_of,
    seed,
    several,
    temperature,
    zero_to_one,
)

# JAX, Matplotlib and Orbax are imported where they are used, so that help and refusals come at once.


LAYOUT = {option.name: option for option in fields(Layout)}
ABSENT_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
PLANNED = (
    *("batch_size", "context_length", "layers", "heads", "features", "mlp", "head", "token_shift", "optimizer"),
    *("dropout_rate", "dtype"),
)
PLANNED_LAYOUT = ("data_parallel", "fsdp", "tensor", "context", "accumulate", "remat")
SAMPLING = (
    ("max-new-tokens", count, 500, "tokens to write"),
    ("temperature", temperature, 0.7, "lower is safer, 0 takes the likeliest"),
    ("top-k", count, None, "choose among the N likeliest tokens"),
    ("top-p", above_zero_to_one, None, "choose among the likeliest tokens that are this probable together"),
    ("min-p", zero_to_one, None, "choose among tokens that are so many times as likely as the likeliest"),
    ("num-samples", several, 1, "texts for each prompt"),
    ("seed", seed, 0, "another seed writes another text"),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        line = f"{self.prog}: error: {printable(' '.join(message.split()))}"
        self.exit(2, fitted(line, sys.stderr) + "\n")


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit code; `train_demo.__main__.main` says which ones there are."""
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
        parser.error(error.for_command)
    except OSError as error:  # say a full disk; what is written to stdout alone names no file
        parser.error(str(error) if error.filename else f"cannot write to {_stdout()} ({error.strerror or error})")
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: run pip install 'flax-mha[demo]'")


def _stdout() -> str:
    try:
        return f"standard output, {os.readlink('/proc/self/fd/1')}"
    except OSError:
        return "standard output"


def _train(chosen: argparse.Namespace) -> int:
    given = {name: getattr(chosen, name) for name in SETTINGS if getattr(chosen, name) is not None}
    out = chosen.out or default_folder(chosen.data)
    layout = Layout(**{name: getattr(chosen, name) for name in LAYOUT})
    if chosen.size is not None:
        given = completed(chosen.size, given)
    _keep_compiled()

    def say(line: str) -> None:
        if layout.first:
            print(fitted(printable(line), sys.stdout), flush=True)

    return start(
        out,
        chosen.data,
        chosen.tokenizer,
        given,
        resume=chosen.resume,
        layout=layout,
        samples=not chosen.no_samples,
        say=say,
    )


def _keep_compiled() -> None:
    """Has JAX keep what it compiles in the user's cache folder, for the next run, unless it was told where to.

    A cache that cannot be read or written is no error: the run compiles then.
    """
    if "jax" in sys.modules:  # this is no process of its own, and JAX has been configured
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "flax_mha")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)


def _sample(chosen: argparse.Namespace) -> int:
    _refuse_empty("--prompt", chosen.prompt)
    _refuse_empty("--stop", [] if chosen.stop is None else [chosen.stop])
    out = _chosen_run(chosen.out)
    config = read_config(out)
    config.vocabulary.encode("".join([*chosen.prompt, chosen.stop or ""]))  # before anything slow begins
    _keep_compiled()
    from train_demo import generate, sample
    from train_demo.sampler import Sampling

    model = sample.load_model(out, config)
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)

    def start() -> Iterator[list[str]]:
        return generate.generate(
            model,
            config.vocabulary,
            chosen.prompt,
            chosen.max_new_tokens,
            sampling,
            num_samples=chosen.num_samples,
            stop=chosen.stop,
            seed=chosen.seed,
        )

    with enough_memory("--num-samples, or give fewer prompts"):
        sample.show(chosen.prompt, chosen.num_samples, start)
    return 0


def folder(text: str) -> Path:
    """Reads a folder's name.

    Raises:
        argparse.ArgumentTypeError: it is empty, as a variable of the shell that is not set.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return Path(text)


def _refuse_empty(option: str, texts: Sequence[str]) -> None:
    if not all(texts):
        raise UserError(f"{option} is empty: give at least one character")


def _chosen_run(out: Path | None) -> Path:
    if out is None:
        out = newest(RUNS)
        print(printable(f"The newest run: {out}"), file=sys.stderr)
    return out


def _plot(chosen: argparse.Namespace) -> int:
    out = _chosen_run(chosen.out)
    config = read_config(out)
    from train_demo import plots
    from train_demo.sample import load_model

    plots.draw(out, plots.attention_weights(load_model(out, config), config), config)
    print(printable(f"{out / 'loss.png'} and {out / 'attention.png'} are drawn"))
    return 0


def _report(chosen: argparse.Namespace) -> int:
    out = _chosen_run(chosen.out)
    config = read_config(out)
    from train_demo import plots, report
    from train_demo.sample import load_model

    report.write(out, plots.attention_weights(load_model(out, config), config), config)
    print(printable(f"{out / report.FILE} is written: open it in a browser"))
    return 0


def _export(chosen: argparse.Namespace) -> int:
    out = _chosen_run(chosen.out)
    config = read_config(out)
    to = chosen.to or out / "export"
    from train_demo import export
    from train_demo.sample import load_model

    export.write(to, load_model(out, config), config)
    print(printable(f"{to} holds {', '.join(sorted(path.name for path in to.iterdir()))}"))
    return 0


def _plan(chosen: argparse.Namespace) -> int:
    layout = Layout(**{name: getattr(chosen, name) for name in PLANNED_LAYOUT})
    given = {name: getattr(chosen, name) for name in PLANNED if getattr(chosen, name) is not None}
    if chosen.params and {"layers", "heads", "features"} & given.keys():
        raise UserError("--params chooses --layers, --heads and --features: give either it or them")
    text = load(chosen.data, 1, say=print)
    if chosen.topology:
        given.setdefault("dtype", "bfloat16")  # what "auto" means there, which JAX, on this CPU, cannot know
    _pretend(chosen)
    from train_demo import plan

    devices = plan.devices_of(chosen.topology) if chosen.topology else plan.virtual_devices(chosen.devices)
    if chosen.devices not in (None, len(devices)):
        raise UserError(f"--topology {chosen.topology} has {len(devices)} devices, not --devices {chosen.devices}")
    context_length = given.setdefault("context_length", Settings().context_length)
    layout = plan.fitting(layout, len(devices), context_length)
    if chosen.params:
        given |= plan.of_size(chosen.params, len(text.vocabulary))
    parts = layout.accumulate * len(devices) // (layout.tensor * layout.context)
    if chosen.batch_size is None and (chosen.params or Settings().batch_size % max(parts, 1)):
        given["batch_size"] = max(parts, 1)
    settings = Settings(**given)
    characters = min(max(len(text.training), settings.context_length + 2), SHARD)
    made = plan.make_plan(settings, layout, len(text.vocabulary), characters, devices)
    print(plan.flags(settings, layout), plan.report(made), sep="\n")
    return 0


def _pretend(chosen: argparse.Namespace) -> None:
    """Makes JAX, which is not imported yet, run on the CPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if chosen.topology:
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        # libtpu looks for the TPU that is not here, and says so at length.
        for name, value in ABSENT_TPU.items():
            os.environ.setdefault(name, value)
    else:
        # The older way to ask for virtual devices may not stand beside the newer one.
        kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        os.environ["XLA_FLAGS"], os.environ["JAX_NUM_CPU_DEVICES"] = " ".join(kept), str(chosen.devices or 1)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m train_demo",
        description="Trains a small transformer that learns to write. Without a command it trains.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    train = commands.add_parser("train", help="train, or go on training (the default)", allow_abbrev=False)
    train.add_argument(
        "--data", metavar="PATH", help="a UTF-8 text file, or a folder of them (default: Python's own documentation)"
    )
    train.add_argument(
        "--tokenizer",
        metavar="KIND",
        help="characters, bytes, or a JSON file of the package tokenizers (default: characters)",
    )
    train.add_argument("--out", type=folder, metavar="DIR", help="the run's folder (default: runs/<the text's name>)")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the folder's newest good checkpoint; a larger --steps extends the run",
    )
    train.add_argument("--no-samples", action="store_true", help="write no short text at each validation")
    size = f"model, batch and steps at once: {', '.join(SIZES)} (default: tiny); options below count more"
    train.add_argument("--size", type=one_of(SIZES), metavar="NAME", help=size)
    for name, option in SETTINGS.items():
        parse, explanation = option.metadata["parse"], option.metadata["help"]
        train.add_argument(f"--{name.replace('_', '-')}", type=parse, help=f"{explanation} (default: {option.default})")
    _add_layout(train, LAYOUT)
    train.set_defaults(command=_train)

    sample = commands.add_parser("sample", help="write text with a trained model", allow_abbrev=False)
    sample.add_argument("--out", type=folder, metavar="DIR", help="the run's folder (default: the newest of runs)")
    sample.add_argument(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="what the model goes on writing; several prompts are continued at the same time",
    )
    for name, parse, default, explanation in SAMPLING:
        ending = "" if default is None else f" (default: {default})"
        sample.add_argument(f"--{name}", type=parse, default=default, help=explanation + ending)
    sample.add_argument("--stop", metavar="TEXT", help="end a text before this")
    sample.set_defaults(command=_sample)

    pictures = "draw loss.png and attention.png, also while the training runs"
    plot = commands.add_parser("plot", help=pictures, allow_abbrev=False)
    plot.add_argument("--out", type=folder, metavar="DIR", help="the run's folder (default: the newest of runs)")
    plot.set_defaults(command=_plot)

    report = commands.add_parser(
        "report", help="write report.html: curves, samples, attention, time and memory", allow_abbrev=False
    )
    report.add_argument("--out", type=folder, metavar="DIR", help="the run's folder (default: the newest of runs)")
    report.set_defaults(command=_report)

    export = commands.add_parser(
        "export", help="write the model as safetensors, with a config and its PyTorch code", allow_abbrev=False
    )
    export.add_argument("--out", type=folder, metavar="DIR", help="the run's folder (default: the newest of runs)")
    export.add_argument("--to", type=folder, metavar="DIR", help="where to write (default: export in the run's folder)")
    export.set_defaults(command=_export)

    plan = commands.add_parser("plan", help="memory and traffic of a training step on many devices, without them")
    plan.add_argument(
        "--params", type=number, metavar="N", help="parameters, say 7e9, instead of layers, heads, features"
    )
    plan.add_argument("--devices", type=count, metavar="N", help="devices (default: 1, or the topology's)")
    plan.add_argument("--topology", metavar="NAME", help="compile for a TPU slice, say v5e:16x16; needs libtpu")
    plan.add_argument("--data", metavar="PATH", help="the text to train on (default: Python's own documentation)")
    for name in PLANNED:
        parse, explanation = SETTINGS[name].metadata["parse"], SETTINGS[name].metadata["help"]
        plan.add_argument(f"--{name.replace('_', '-')}", type=parse, help=f"{explanation} (default: as for train)")
    _add_layout(plan, PLANNED_LAYOUT)
    plan.set_defaults(command=_plan)
    return parser


def _add_layout(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    for name in names:
        option, flag = LAYOUT[name], f"--{name.replace('_', '-')}"
        parse, explanation = option.metadata["parse"], option.metadata["help"]
        if parse is None:
            parser.add_argument(flag, action="store_true", help=explanation)
        else:
            ending = "" if option.default is None else f" (default: {option.default})"
            parser.add_argument(flag, type=parse, default=option.default, help=explanation + ending)
