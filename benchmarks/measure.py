"""Code shared by the benchmarks: peers that take turns, memory, a table, JSON and a
picture.

In a cell all peers do the same work in the same process. After a warm-up they take
turns (A B C, A B C, ...), so that what slows the machine down slows all of them; each
gets the median of its turns, and their spread: the distance between the quartiles in
percent of the median. A peer that cannot take part is shown with the reason.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# On a GPU, leave memory to torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

Row = dict[str, Any]
# Seconds before each turn: a thread pool that hopes for more work keeps the cores busy
# for a while.
PAUSE = 0.01
TURN = 0.02  # seconds that a turn lasts at least: short calls are repeated
ON_CPU = jax.default_backend() == "cpu"


class Ready(NamedTuple):
    """A peer that is compiled: how to start one call, how to wait for what it returned,
    what to do before a turn.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = lambda result: result
    before: Callable[[], Any] | None = None
    compile_s: float | None = None
    temporaries_mib: float | None = None
    note: str = ""


Peers = dict[str, Callable[[], Ready]]


def arguments(question: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=question, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    name = Path(sys.argv[0]).stem
    results = Path(__file__).parent / "results" / f"{name}-{jax.default_backend()}"
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        help="to spend on the turns of a cell (%(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, help="of turns in a cell, instead of --seconds"
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=6.0 if ON_CPU else 40.0,
        help="GiB of temporaries allowed (%(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=results,
        help=f"writes OUT.json, OUT.png (results/{results.name})",
    )
    return parser


def names(text: str) -> list[str]:
    """For argparse: `a,b` -> ["a", "b"]."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """For argparse: `1,2` -> [1, 2]."""
    return [int(number) for number in text.split(",")]


def program(
    f: Callable, *inputs: Any, memory: float
) -> tuple[Callable, dict[str, float]]:
    """The jitted `f` compiled for `inputs`, and what that cost; its temporaries must
    not exceed `memory` GiB.
    """
    start = time.perf_counter()
    executable = f.lower(*inputs).compile()
    seconds = time.perf_counter() - start
    mib = executable.memory_analysis().temp_size_in_bytes / 2**20
    if mib > 1024 * memory:
        raise MemoryError(f"{mib:,.0f} MiB of temporaries, more than {memory:g} GiB")
    return executable, {"compile_s": seconds, "temporaries_mib": mib}


def compiled(f: Callable, *inputs: Any, memory: float) -> Ready:
    """`f(*inputs)` under jit, unless its temporaries exceed `memory` GiB."""
    call, costs = program(jax.jit(f), *inputs, memory=memory)
    return Ready(lambda: call(*inputs), jax.block_until_ready, **costs)


def value_and_pullback(f: Callable) -> Callable:
    """`(cotangent, *inputs) -> f(*inputs), gradients of all inputs`."""

    def both(cotangent: Any, *inputs: Any) -> Any:
        value, pullback = jax.vjp(f, *inputs)
        return value, pullback(cotangent)

    return both


def torch_here() -> tuple[Any, str]:
    """The torch module, using all cores, and its name of the device that jax uses too."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    if not ON_CPU and not torch.cuda.is_available():
        raise NotImplementedError(
            f"this torch does not run on a {jax.default_backend()}"
        )
    return torch, "cpu" if ON_CPU else "cuda"


def torch_wait(result: Any) -> None:
    """Until the device has done what it was given."""
    if not ON_CPU:
        sys.modules["torch"].cuda.synchronize()


def compare(
    peers: Peers,
    options: argparse.Namespace,
    say: Callable[[str], Any] = lambda text: None,
) -> dict[str, Row]:
    """Lets all peers take turns; for each what was measured, or why not."""
    ready = {}
    repeats = {}
    results = {}
    for name, prepare in peers.items():
        say(f"{name}: compiling")
        jax.clear_caches()  # what one peer has traced makes no other compile faster
        try:
            candidate = prepare()
            repeats[name] = _warm_up(candidate)
            ready[name] = candidate
        except Exception as error:  # whatever it is, the table shows it
            results[name] = {"absent": _first_line(error)}
    turns: dict[str, list[float]] = {name: [] for name in ready}
    start = time.perf_counter()
    rounds = 0
    while ready and not _enough(rounds, time.perf_counter() - start, options):
        say(f"round {rounds + 1}")
        for name, peer in ready.items():
            turns[name].append(seconds_of(peer, repeats[name]))
        rounds += 1
    for name, peer in ready.items():
        costs = {
            "temporaries_mib": peer.temporaries_mib,
            "compile_s": peer.compile_s,
            "note": peer.note,
        }
        results[name] = summary(turns[name]) | costs
    return {name: results[name] for name in peers}


def seconds_of(peer: Ready, repeats: int = 1) -> float:
    """Of one call, as the mean of some."""
    if peer.before is not None:
        peer.before()
    time.sleep(PAUSE)
    start = time.perf_counter()
    for _ in range(repeats):
        result = peer.call()
        if ON_CPU:  # there, jax would run several calls at once
            peer.wait(result)
    peer.wait(result)
    return (time.perf_counter() - start) / repeats


def summary(seconds: Sequence[float]) -> Row:
    """Median and spread."""
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return {
        "ms": 1e3 * median,
        "spread": 100 * (high - low) / median,
        "rounds": len(seconds),
    }


def _warm_up(peer: Ready) -> int:
    """How many calls make a turn."""
    seconds = seconds_of(peer)
    if seconds < 1:
        seconds = seconds_of(peer)
    if peer.before is not None:
        return 1
    return max(1, round(TURN / seconds))


def _enough(rounds: int, seconds: float, options: argparse.Namespace) -> bool:
    if options.rounds is not None:
        return rounds >= options.rounds
    slow = rounds > 0 and seconds / rounds > options.seconds
    return seconds >= options.seconds and rounds >= (3 if slow else 5)


def _first_line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    plain = isinstance(error, NotImplementedError | MemoryError)
    if plain and first:
        return first
    return f"{type(error).__name__}: {first}"


def compare_speed(
    peers: Peers,
    gflop: float,
    dtype: str,
    options: argparse.Namespace,
    say: Callable[[str], Any],
) -> dict[str, Row]:
    """`compare` with a matrix product by jax among them, which scales the speeds of the
    others.
    """
    n = 2048 if ON_CPU else 8192
    x = jnp.ones((n, n), dtype)
    product = {
        "matrix product": lambda: compiled(jnp.matmul, x, x, memory=options.memory)
    }
    results = compare(peers | product, options, say)
    product_speed = 2 * n**3 / 1e6 / results.pop("matrix product")["ms"]
    for result in results.values():
        if "ms" in result:
            speed = 1e3 * gflop / result["ms"]
            result |= {
                "gflops": speed,
                "matmul_gflops": product_speed,
                "of_matmul": speed / product_speed,
            }
    return results


def ratios(results: dict[str, Row], peer: str, column: str) -> None:
    """Adds to every result how many times the milliseconds of `peer` it takes."""
    unit = results.get(peer, {}).get("ms")
    for result in results.values():
        if unit and "ms" in result:
            result[column] = result["ms"] / unit


class Report:
    """What a benchmark tells: progress while it runs, JSON after every cell, and at the
    end, or Ctrl-C, the table.

    Args:
      title: Of the table.
      columns: Key of a row -> its heading; a row may lack keys.
      options: What `arguments` parsed.
    """

    def __init__(
        self, title: str, columns: dict[str, str], options: argparse.Namespace
    ):
        self.title = title
        self.columns = columns
        self.out = options.out
        self.rows: list[Row] = []
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=200)
        self.about = about()
        if self.about["load_at_start"] > 0.5:
            self.console.print(
                f"busy machine (load {self.about['load_at_start']}): expect wide "
                "spreads",
                style="yellow",
            )

    def __enter__(self) -> "Report":
        bar = (
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*bar, console=self.console, transient=True)
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        self._progress.stop()
        stopped = kind is KeyboardInterrupt
        if stopped and not self.rows:
            raise SystemExit("stopped before a cell was complete")
        if kind is None or stopped:
            self.show()
            self.console.print(
                "stopped early," if stopped else "complete,",
                f"{self.out}.json",
                soft_wrap=True,
            )
        return stopped

    def each(self, cells: Sequence[Any]) -> Iterator[Any]:
        """The cells, one after the other."""
        self._task = self._progress.add_task("", total=len(cells))
        for cell in cells:
            self._cell = (
                " ".join(map(str, cell)) if isinstance(cell, tuple) else str(cell)
            )
            yield cell
            self._progress.advance(self._task)

    def say(self, text: str) -> None:
        """What is being done in this cell."""
        self._progress.update(self._task, description=f"{self._cell}: {text}")

    def add(self, facts: Row, results: dict[str, Row]) -> None:
        """A cell's results; all its rows share `facts`."""
        self.rows += [
            facts | {"implementation": name} | result
            for name, result in results.items()
        ]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"title": self.title, **self.about, "rows": self.rows}
        self.out.with_name(f"{self.out.name}.json").write_text(
            json.dumps(content, indent=1) + "\n"
        )

    def show(self) -> None:
        """Prints the table; under it who was absent everywhere, and why."""
        present = {row["implementation"] for row in self.rows if "ms" in row}
        table = Table(
            title=self.title,
            caption=self._caption(),
            title_justify="left",
            caption_justify="left",
        )
        rows = [
            row | {"note": _note(row)}
            for row in self.rows
            if row["implementation"] in present
        ]
        columns = [
            key
            for key in self.columns
            if any(row.get(key) not in (None, "") for row in rows)
        ]
        for key in columns:
            text = all(isinstance(row.get(key, ""), str) for row in rows)
            table.add_column(
                self.columns[key],
                justify="left" if text else "right",
                no_wrap=key != "note",
            )
        before: Row = {}
        for row in rows:
            same = columns[: columns.index("implementation")]
            if before and any(before.get(key) != row.get(key) for key in same):
                table.add_section()
            table.add_row(*(_cell(row.get(key)) for key in columns))
            before = row
        self.console.print(table)
        missing = {
            (row["implementation"], row["absent"]): None
            for row in self.rows
            if "absent" in row
        }
        for name, reason in missing:
            if name not in present:
                self.console.print(
                    f"absent: {name}: {reason}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )

    def _caption(self) -> str:
        versions = ", ".join(
            f"{name} {version}" for name, version in self.about["versions"].items()
        )
        load = f"{self.about['cores']} cores, load {self.about['load_at_start']} at the start"
        return f"{self.about['device']}, {load}; {versions}"


def _note(row: Row) -> str:
    if "absent" in row:
        return f"absent: {row['absent']}"
    return row.get("note", "")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if value >= 100:
            return f"{value:,.0f}"
        if value >= 10:
            return f"{value:.1f}"
        return f"{value:.2f}"
    return str(value)


def about() -> Row:
    """Where, with what and when."""
    packages = ("flax-mha", "flax", "jax", "jaxlib", "numpy", "torch")
    installed = {
        name.lower()
        for package in importlib.metadata.distributions()
        if (name := package.name)
    }
    versions = {
        name: importlib.metadata.version(name) for name in packages if name in installed
    }
    return {
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _cpu() if ON_CPU else jax.devices()[0].device_kind,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "threads": "every library uses all cores",
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"Python": platform.python_version()} | versions,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
    else:
        models = []
    if models:
        return models[0].split(":")[1].strip()
    return platform.processor()


def grid(
    rows: list[Row],
    down: str,
    across: str,
    labels: tuple[str, str],
    sharey: bool = False,
) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """A figure with one panel for each pair of values of two columns, and the rows that
    belong in it.
    """
    rows = [row for row in rows if "ms" in row]
    values = [list(dict.fromkeys(row[key] for row in rows)) for key in (down, across)]
    size = (len(values[0]), len(values[1]))
    figure = Figure(figsize=(5.5 * size[1], 4.2 * size[0] + 0.6), layout="constrained")
    panels = []
    for (i, j), axes in np.ndenumerate(
        figure.subplots(*size, squeeze=False, sharey=sharey)
    ):
        place = (values[0][i], values[1][j])
        panels.append(
            (axes, [row for row in rows if (row[down], row[across]) == place])
        )
        axes.set(
            title=", ".join(map(str, dict.fromkeys(place))),
            xlabel=labels[0],
            ylabel=labels[1],
        )
        axes.grid(alpha=0.3)
    return figure, panels


def lines(
    axes: Axes,
    rows: list[Row],
    x: str,
    y: str,
    series: str = "implementation",
    **style: Any,
) -> None:
    """Both axes logarithmic, a line for each value of `series`."""
    for name in dict.fromkeys(row[series] for row in rows):
        points = [(row[x], row[y]) for row in rows if row[series] == name]
        axes.loglog(
            *zip(*sorted(points), strict=True),
            "o-",
            markersize=4,
            label=name,
            **(style | _look(name)),
        )
    ticks = sorted({row[x] for row in rows})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def bars(
    axes: Axes, rows: list[Row], group: str, y: str, series: str = "implementation"
) -> None:
    """A group of horizontal bars for each value of `group`, a bar for each of `series`,
    the number beside it.
    """
    groups, kinds = (
        list(dict.fromkeys(row[key] for row in rows)) for key in (group, series)
    )
    height = 0.8 / max(1, len(kinds))
    for k, kind in enumerate(kinds):
        own = [row for row in rows if row[series] == kind and row.get(y) is not None]
        places = [
            groups.index(row[group]) + (k - (len(kinds) - 1) / 2) * height
            for row in own
        ]
        drawn = axes.barh(
            places, [row[y] for row in own], height, label=kind, **_look(kind)
        )
        axes.bar_label(
            drawn, [_cell(float(row[y])) for row in own], padding=2, fontsize=8
        )
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.margins(x=0.15)


LOOKS: dict[str, str] = {}


def _look(name: str) -> dict[str, str]:
    """The same colour for a name in every panel."""
    return {"color": LOOKS.setdefault(name, f"C{len(LOOKS) % 10}")}


def save(figure: Figure, out: Path, columns: int = 4) -> None:
    """Writes the picture, with one legend for all panels."""
    entries = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns
    )
    figure.savefig(out.with_name(f"{out.name}.png"), dpi=130)
