"""Runs on a GPU or TPU what matters most there, and keeps the results in a folder.

    python benchmarks/on_device.py --out FOLDER [--minutes 25] [--retry] [--list]
    [--small]

The parts, in order of worth: versions, and which implementation is chosen for typical
calls; the demo at 1024 tokens of context in bfloat16; a module beside Flax's and
PyTorch's; the tests of kernels; tables of attention and of decoding; the core tests.

Each part is a process of its own with a time limit. Results are written as they come,
so a run may end at any time, at the end of its minutes or by `kill -9`: the same
command, on a machine with the same device and versions, continues with what is missing.
Parts that failed or took too long are final, unless `--retry` is passed. The folder:

  parts/PART.json   status, seconds, command and, unless it is "ok", the last output
  raw/PART.json     what was measured (of tests .jsonl, with a line for each test)
  logs/PART.txt     all output
  summary.txt       what is also printed at the end

PyTorch may be missing: its columns say so. The exit code is 0 even if parts failed, and
2 if nothing can be run. `--small` runs tiny sizes, on a CPU too, to try the command.
"""

import argparse
import collections
import ctypes
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import outcomes
from device_facts import write_json

from train_demo.errors import UserError
from train_demo.run_folder import sole_writer, write_atomically

# JAX is imported only by the processes of the parts: it would take the device's memory.

ROOT = Path(__file__).resolve().parent.parent
# Those that a CPU skips.
KERNEL_TESTS = ["tests/test_choose.py::test_the_kernel_of_this_gpu"]
SPREAD = "5"  # %, of the medians of eighths of the turns; see measure.py
SHORTEST = 20  # seconds: with less time left, no part is started
TAIL = 3000  # characters of the output of a part
# The status of a part that is not run again; "unfinished" ones are.
FINAL = ("ok", "failed", "time limit")


class Part(NamedTuple):
    """A process of Python with these arguments; `limit` in seconds."""

    name: str
    limit: int
    arguments: list[str]


def parts(folder: Path, small: bool) -> list[Part]:
    """In order of worth."""

    def facts(name: str, limit: int) -> Part:
        script = str(ROOT / "benchmarks" / "device_facts.py")
        arguments = [script, name, "--out", str(folder / "raw" / f"{name}.json")]
        if small:
            arguments.append("--small")
        return Part(name, limit, arguments)

    def benchmark(name: str, limit: int, options: str) -> Part:
        script = ROOT / "benchmarks" / f"{name.split('-')[0]}.py"
        out = str(folder / "raw" / name)
        more = ["--resume", "--out", out]
        return Part(name, limit, [str(script), *shlex.split(options), *more])

    def tests(name: str, limit: int, *options: str) -> Part:
        file = str(folder / "raw" / f"{name}.jsonl")
        plugin = ["-p", "outcomes", "--outcomes", file]
        return Part(name, limit, ["-m", "pytest", "-q", *plugin, *options])

    if small:
        few = "--rounds 2"
        module = f"--lengths 128 --passes forward {few}"
        attention = "--lengths 128 --dtypes float32 --masks causal --passes forward"
        attention += f" --peers 'flax_mha xla' {few}"
        decode = "--what prompt --caches 8 --batches 1 --kv-heads 8"
        decode += f" --dtypes float32 {few}"
        return [
            facts("versions", 300),
            facts("demo", 300),
            benchmark("module-128", 300, module),
            tests("kernel-tests", 300, "-n0", *KERNEL_TESTS),
            benchmark("attention-128", 300, attention),
            benchmark("decode-prompt", 300, decode),
        ]

    def module(length: int) -> Part:
        options = f"--lengths {length} --dtype bfloat16"
        options += f" --spread {SPREAD} --seconds 12"
        return benchmark(f"module-{length}", 180, options)

    def attention(length: int) -> Part:
        options = f"--lengths {length} --head-dims 64 --dtypes bfloat16 --masks causal"
        options += f" --spread {SPREAD} --seconds 8"
        return benchmark(f"attention-{length}", 240, options)

    def decode(what: str, batch: int) -> Part:
        options = f"--what {what} --caches 4096 --batches {batch} --kv-heads 8,2"
        options += f" --dtypes bfloat16 --spread {SPREAD} --seconds 4"
        return benchmark(f"decode-{what}-{batch}", 180, options)

    steps = ("attention", "step", "prompt")
    return [
        facts("versions", 120),
        facts("demo", 300),
        *map(module, (512, 128, 1024, 2048, 4096)),
        tests("kernel-tests", 300, *KERNEL_TESTS),
        *map(attention, (4096, 1024, 16384)),
        *(decode(what, 8) for what in steps),
        *map(attention, (128, 512, 2048, 8192)),
        *(decode(what, 1) for what in steps),
        tests("core-tests", 1500),
    ]


def run(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs a part for so many seconds at most, and returns what became of it."""
    environment = dict(os.environ)
    places = [str(ROOT), str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    if "pytest" in part.arguments:  # whose processes share the memory of the device
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    log = folder / "logs" / f"{part.name}.txt"
    began = time.time()
    with log.open("ab") as output:
        before = output.tell()
        try:
            code = subprocess.run(
                [sys.executable, *part.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                timeout=min(seconds, part.limit),
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    status = "ok" if code == 0 else "failed"
    if code is None:
        status = "time limit" if seconds >= part.limit else "unfinished"
    record = {
        "part": part.name,
        "status": status,
        "exit_code": code,
        "began": began,
        "seconds": round(time.time() - began, 1),
        "limit": part.limit,
        "command": shlex.join(["python", *part.arguments]),
    }
    if status != "ok":
        text = log.read_bytes()[before:].decode(errors="replace")
        record["output"] = text[-TAIL:]
    return record


def end_with_parent() -> None:
    """Otherwise, after `kill -9`, a part would still use the device while its
    successor measures.
    """
    set_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_signal, signal.SIGKILL)


def record_of(part: Part, folder: Path) -> dict[str, Any] | None:
    file = folder / "parts" / f"{part.name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def is_missing(part: Part, folder: Path) -> bool:
    record = record_of(part, folder)
    return record is None or record["status"] not in FINAL


def run_missing(everything: list[Part], folder: Path, deadline: float) -> None:
    total = len(everything)
    for number, part in enumerate(everything, start=1):
        if not is_missing(part, folder):
            continue
        left = deadline - time.monotonic()
        if left < SHORTEST:
            return
        say = f"[{number}/{total}] {part.name}"
        print(f"{say} ... ({left / 60:.1f} minutes left)", flush=True)
        record = run(part, folder, left)
        write_json(folder / "parts" / f"{part.name}.json", record)
        print(f"{say}: {record['status']}, {record['seconds']} s", flush=True)


def forget_failures(everything: list[Part], folder: Path) -> None:
    """So that failed parts begin again; the others continue."""
    for part in everything:
        record = record_of(part, folder)
        if record is None or record["status"] == "ok":
            continue
        if record["status"] == "failed":
            for kind in ("json", "jsonl"):
                (folder / "raw" / f"{part.name}.{kind}").unlink(missing_ok=True)
        (folder / "parts" / f"{part.name}.json").unlink()


def summary(everything: list[Part], folder: Path) -> Iterator[str]:
    """What is known so far, in lines."""
    for part in everything:
        record = record_of(part, folder)
        if record is None:
            yield f"{part.name}: not run, at most {part.limit} s"
        else:
            yield f"{part.name}: {record['status']}, {record['seconds']} s"
        raw = folder / "raw" / f"{part.name}.json"
        if raw.exists():  # perhaps of a part that was killed
            yield from (f"  {line}" for line in of_facts(json.loads(raw.read_text())))
        yield from (f"  {line}" for line in of_tests(raw.with_suffix(".jsonl")))
        if record and "output" in record:
            yield from (f"  | {x}" for x in record["output"].splitlines()[-8:])
    missing = [part.name for part in everything if is_missing(part, folder)]
    if missing:
        yield f"Missing: {', '.join(missing)}. The same command continues."
    else:
        yield "Nothing is missing."


def of_facts(facts: dict[str, Any]) -> Iterator[str]:
    """The lines of `versions`, of `demo` or of a benchmark."""
    if "rows" not in facts:
        for name, value in facts["summary"].items():
            yield f"{name}: {value}"
        return
    yield "milliseconds, and the spread of medians (if there are few turns, of turns)"
    absent = {}
    for cell, rows in itertools.groupby(facts["rows"], lambda row: row["cell"]):
        times = []
        for row in rows:
            name = row["implementation"]
            if "ms" in row:
                spread = row.get("median_spread", row["spread"])
                times.append(f"{name} {row['ms']:.3g} ({spread:.1f} %)")
            else:
                absent[f"{name} is absent: {row['absent']}"] = None
        yield f"{cell}: {', '.join(times)}"
    yield from absent


def of_tests(file: Path) -> Iterator[str]:
    found = outcomes.read(file)
    counts = collections.Counter(test["outcome"] for test in found.values())
    if counts:
        yield ", ".join(f"{number} {kind}" for kind, number in counts.items())
    for name, test in found.items():
        if test["outcome"] == "failed":
            last = test["error"].strip().splitlines()[-1:]
            yield f"failed: {name}: {' '.join(last)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="to spend (%(default)s)"
    )
    parser.add_argument(
        "--retry", action="store_true", help="also run parts that failed before"
    )
    parser.add_argument(
        "--list", action="store_true", help="only print what is known and missing"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    folder = options.out.absolute()
    everything = parts(folder, options.small)
    if options.list:
        print("\n".join(summary(everything, folder)))
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    try:
        with sole_writer(folder):
            return keep(everything, folder, deadline, options.retry)
    except UserError as error:
        parser.error(str(error))


def keep(everything: list[Part], folder: Path, deadline: float, retry: bool) -> int:
    """Runs what is missing, and writes the summary."""
    for name in ("parts", "raw", "logs"):
        (folder / name).mkdir(exist_ok=True)
    if retry:
        forget_failures(everything, folder)
    # In every run, because the folder may have come from elsewhere.
    versions, *_ = everything
    record = run(versions, folder, versions.limit)
    if record["status"] != "ok":
        print(record["output"], file=sys.stderr)
        return 2
    write_json(folder / "parts" / f"{versions.name}.json", record)
    code = 0
    try:
        run_missing(everything, folder, deadline)
    except KeyboardInterrupt:
        code = 130
    lines = "\n".join(summary(everything, folder))
    write_atomically(folder / "summary.txt", f"{lines}\n".encode())
    print(lines)
    return code


if __name__ == "__main__":
    sys.exit(main())
