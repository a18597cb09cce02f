"""Measures how time and memory of a module's gradient grow with sequence length,
compared with Flax and PyTorch.

    python benchmarks/curves.py [--lengths 256,512,...,16384] [--out
    benchmarks/results/NAME]

Value and gradients of one causal module: batch 1, 256 features, 4 heads of 64, float32,
as in benchmarks/module.py. Memory is the size of XLA's temporaries. PyTorch does not
report its temporaries; its memory is how much one call raises the peak memory of a new
process (Linux only).
"""

import subprocess
import sys
from pathlib import Path

import measure
import module

module.SIZES = {256 * 2**i: (1, 256, 4) for i in range(7)}
COLUMNS = {
    "length": "length",
    "implementation": "implementation",
    "ms": "ms",
    "spread": "spread",
    "temporaries_mib": "MiB",
    "note": "",
}


def peak_of_torch(length: int) -> float | None:
    """MiB by which one call of PyTorch's module raises the peak of a new process; None
    if that is below 1 MiB.
    """
    code = f"import curves; curves.print_peak_of_torch({length})"
    run = [sys.executable, "-c", code]
    done = subprocess.run(
        run, cwd=sys.path[0], capture_output=True, text=True, check=True
    )
    mib = float(done.stdout.split()[-1])
    # Less is what a call leaves in memory that was free before.
    return mib if mib >= 1 else None


def print_peak_of_torch(length: int) -> None:
    # Starts threads and loads kernels.
    module.by_torch(module.Cell(256, "float32", "backward")).call()
    peer = module.by_torch(module.Cell(length, "float32", "backward"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kib_of("VmRSS")
    peer.call()
    print((kib_of("VmHWM") - before) / 1024)


def kib_of(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    # A line is "VmRSS:     1234 kB".
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields[name].split()[0])


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--lengths",
        type=measure.numbers,
        default=list(module.SIZES),
        help=f"of {list(module.SIZES)}",
    )
    options = parser.parse_args()
    title = "Value and gradient of one module, causal"
    with measure.Report(title, COLUMNS, options) as report:
        for length in report.each(options.lengths):
            cell = module.Cell(length, "float32", "backward")
            peers = module.peers(cell, options.memory)
            results = measure.compare(peers, options, report.say)
            results[module.TORCH]["temporaries_mib"] = peak_of_torch(length)
            report.add({"length": length}, results)


if __name__ == "__main__":
    main()
