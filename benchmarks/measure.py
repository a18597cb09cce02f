"""Code shared by the benchmarks: peers that take turns, memory, a table, JSON and a
picture.

In a cell all peers do the same work in the same process. After a warm-up they take
turns (A B C, A B C, ...), so that what slows the machine down slows all of them; each
gets the median of its turns, and their spread: the distance between the quartiles in
percent of the median. A peer that cannot take part is shown with the reason.

The JSON also has the spread of the medians of eighths of the turns, `median_spread`: a
turn may vary a lot, although many of them have a reliable median. `--spread` takes
turns until this is small enough.
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

from train_demo.run_folder import write_atomically

Row = dict[str, Any]
# Seconds before each turn: a thread pool that hopes for more work keeps the cores busy
# for a while.
PAUSE = 0.01
TURN = 0.02  # seconds that a turn lasts at least: short calls are repeated
EIGHTHS = 8
FEWEST_TURNS = 3 * EIGHTHS  # for a spread of medians
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
        "--spread",
        type=float,
        help="end a cell before its --seconds if the medians of all peers vary by less "
        "than this, in %%",
    )
    parser.add_argument(
        "--resume", action="store_true", help="measure only what OUT.json lacks"
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
    """The torch module, using all cores, and its name of jax's device."""
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
    # Compile all peers before the turns, which compiling would slow down.
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
    while ready and not _enough(turns, time.perf_counter() - start, options):
        say(f"round {rounds + 1}")
        for name, peer in ready.items():
            seconds = seconds_of(peer, repeats[name])
            turns[name].append(seconds)
        rounds += 1
    for name, peer in ready.items():
        costs = {
            "temporaries_mib": peer.temporaries_mib,
            "compile_s": peer.compile_s,
            "note": peer.note,
        }
        results[name] = summary(turns[name]) | costs
    # In the order of the peers, absent ones included.
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
    row = {
        "ms": 1e3 * median,
        "spread": 100 * (high - low) / median,
        "rounds": len(seconds),
    }
    if len(seconds) >= FEWEST_TURNS:
        row["median_spread"] = median_spread(seconds)
    return row


def median_spread(seconds: Sequence[float]) -> float:
    """How much the medians of eighths of the turns vary, in %."""
    eighths = np.array_split(np.asarray(seconds), EIGHTHS)
    medians = [np.median(eighth) for eighth in eighths]
    low, middle, high = np.percentile(medians, (25, 50, 75))
    return 100 * (high - low) / middle


def _warm_up(peer: Ready) -> int:
    """How many calls make a turn."""
    seconds = seconds_of(peer)
    # The first call may include work that is done only once.
    if seconds < 1:
        seconds = seconds_of(peer)
    # What must happen before a call cannot happen between the calls of a turn.
    if peer.before is not None:
        return 1
    return max(1, round(TURN / seconds))


def _enough(
    turns: dict[str, list[float]], seconds: float, options: argparse.Namespace
) -> bool:
    rounds = min(map(len, turns.values()))
    if options.rounds is not None:
        return rounds >= options.rounds
    # A median needs a few rounds, even if they take longer than wanted.
    slow = rounds > 0 and seconds / rounds > options.seconds
    fewest = 3 if slow else 5
    if seconds >= options.seconds and rounds >= fewest:
        return True
    if options.spread is None or rounds < FEWEST_TURNS:
        return False
    return all(median_spread(own) < options.spread for own in turns.values())


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    # These are raised on purpose, with a reason as their text.
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
    # A product of n x n matrices takes n^3 multiplications and as many additions.
    product_gflop = 2 * n**3 / 1e9
    product_speed = 1e3 * product_gflop / results.pop("matrix product")["ms"]
    for result in results.values():
        if "ms" in result:
            speed = 1e3 * gflop / result["ms"]
            result["gflops"] = speed
            result["matmul_gflops"] = product_speed
            result["of_matmul"] = speed / product_speed
    return results


def ratios(results: dict[str, Row], peer: str, column: str) -> None:
    """Adds to every result how many times the milliseconds of `peer` it takes."""
    unit = results.get(peer, {}).get("ms")
    for result in results.values():
        if unit and "ms" in result:
            result[column] = result["ms"] / unit


class Report:
    """What a benchmark tells: progress while it runs, JSON after every cell, and at the
    end, or Ctrl-C, the table. With `--resume`, cells of an earlier JSON are skipped.

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
        self.file = self.out.with_name(f"{self.out.name}.json")
        self.rows: list[Row] = []
        self._cell = ""
        self.console = Console()
        # In a file, rich would wrap at 80 columns.
        if not self.console.is_terminal:
            self.console = Console(width=200)
        self.about = about()
        if self.about["load_at_start"] > 0.5:
            self.console.print(
                f"busy machine (load {self.about['load_at_start']}): expect wide "
                "spreads",
                style="yellow",
            )
        if options.resume and self.file.exists():
            saved = json.loads(self.file.read_text())
            for name in ("title", "device", "versions"):
                now = {"title": title, **self.about}[name]
                if saved[name] != now:
                    raise SystemExit(
                        f"{self.file} was measured with another {name}: {saved[name]} "
                        f"instead of {now}; choose another --out"
                    )
            self.rows = saved["rows"]

    def __enter__(self) -> "Report":
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
        )
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        self._progress.stop()
        stopped = kind is KeyboardInterrupt
        if stopped and not self.rows:
            raise SystemExit("stopped before a cell was complete")
        if kind is None or stopped:
            self.show()
            how = "stopped early" if stopped else "complete"
            self.console.print(f"{how}, {self.file}", soft_wrap=True)
        # True: Ctrl-C is no error.
        return stopped

    def each(self, cells: Sequence[Any]) -> Iterator[Any]:
        """The cells, one after the other."""
        self._task = self._progress.add_task("", total=len(cells))
        measured = {row.get("cell") for row in self.rows}
        for cell in cells:
            words = cell if isinstance(cell, tuple) else (cell,)
            self._cell = " ".join(map(str, words))
            if self._cell not in measured:
                yield cell
            self._progress.advance(self._task)

    def say(self, text: str) -> None:
        """What is being done in this cell."""
        self._progress.update(self._task, description=f"{self._cell}: {text}")

    def add(self, facts: Row, results: dict[str, Row]) -> None:
        """A cell's results; all its rows share `facts`."""
        for name, result in results.items():
            row = facts | {"cell": self._cell, "implementation": name}
            self.rows.append(row | result)
        # Written after each cell, so that a run that is stopped loses only one; whole,
        # even if it is killed while it writes.
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {"title": self.title, **self.about, "rows": self.rows}
        write_atomically(self.file, f"{json.dumps(content, indent=1)}\n".encode())

    def show(self) -> None:
        """Prints the table; under it who was absent everywhere, and why."""
        present = {row["implementation"] for row in self.rows if "ms" in row}
        table = Table(
            title=self.title,
            caption=self._caption(),
            title_justify="left",
            caption_justify="left",
        )
        rows = [row for row in self.rows if row["implementation"] in present]
        rows = [row | {"note": _note(row)} for row in rows]
        # Columns in which no row has anything are left out.
        columns = []
        for key, heading in self.columns.items():
            values = [row.get(key, "") for row in rows]
            if all(value in (None, "") for value in values):
                continue
            is_text = all(isinstance(value, str) for value in values)
            justify: Any = "left" if is_text else "right"
            table.add_column(heading, justify=justify, no_wrap=key != "note")
            columns.append(key)
        # A line between cells: rows that differ in a column before the peers' names.
        of_cell = columns[: columns.index("implementation")]
        before: list[Any] | None = None
        for row in rows:
            cell = [row.get(key) for key in of_cell]
            if before is not None and cell != before:
                table.add_section()
            table.add_row(*(_cell(row.get(key)) for key in columns))
            before = cell
        self.console.print(table)
        missing = {}
        for row in self.rows:
            if "absent" in row and row["implementation"] not in present:
                missing[f"absent: {row['implementation']}: {row['absent']}"] = None
        for text in missing:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _caption(self) -> str:
        about = self.about
        versions = [f"{name} {version}" for name, version in about["versions"].items()]
        return (
            f"{about['device']}, {about['cores']} cores, load {about['load_at_start']} "
            f"at the start; {', '.join(versions)}"
        )


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
    # A broken installation may have no name.
    names = [package.name for package in importlib.metadata.distributions()]
    installed = {name.lower() for name in names if name}
    versions = {"Python": platform.python_version()}
    for name in packages:
        if name in installed:
            versions[name] = importlib.metadata.version(name)
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _cpu() if ON_CPU else jax.devices()[0].device_kind,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "threads": "every library uses all cores",
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
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
    of_rows = list(dict.fromkeys(row[down] for row in rows))
    of_columns = list(dict.fromkeys(row[across] for row in rows))
    height = 4.2 * len(of_rows) + 0.6
    figure = Figure(figsize=(5.5 * len(of_columns), height), layout="constrained")
    all_axes = figure.subplots(
        len(of_rows), len(of_columns), squeeze=False, sharey=sharey
    )
    panels = []
    for (i, j), axes in np.ndenumerate(all_axes):
        place = (of_rows[i], of_columns[j])
        own = [row for row in rows if (row[down], row[across]) == place]
        # Benchmarks with one panel pass the same column twice.
        title = ", ".join(map(str, dict.fromkeys(place)))
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
        axes.grid(alpha=0.3)
        panels.append((axes, own))
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
        points = sorted((row[x], row[y]) for row in rows if row[series] == name)
        xs, ys = zip(*points, strict=True)
        look = style | _look(name)
        axes.loglog(xs, ys, "o-", markersize=4, label=name, **look)
    # A tick for each value of x, and 1, 2, 5, 10, ... along y.
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
    groups = list(dict.fromkeys(row[group] for row in rows))
    kinds = list(dict.fromkeys(row[series] for row in rows))
    height = 0.8 / max(1, len(kinds))
    for k, kind in enumerate(kinds):
        own = [row for row in rows if row[series] == kind and row.get(y) is not None]
        # The bars of a group stand around its tick.
        shift = (k - (len(kinds) - 1) / 2) * height
        places = [groups.index(row[group]) + shift for row in own]
        widths = [row[y] for row in own]
        drawn = axes.barh(places, widths, height, label=kind, **_look(kind))
        texts = [_cell(float(width)) for width in widths]
        axes.bar_label(drawn, texts, padding=2, fontsize=8)
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
    # By label, so that what is in several panels is listed once.
    entries = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns
    )
    figure.savefig(out.with_name(f"{out.name}.png"), dpi=130)
