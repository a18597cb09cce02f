"""How do time and memory of a module's gradient grow with the sequence length, beside Flax's and PyTorch's?

    python benchmarks/curves.py [--lengths 256,512,...,16384] [--out benchmarks/results/NAME]

Value and gradients of one causal module: batch 1, 256 features, 4 heads of 64, float32, as in benchmarks/module.py.
Memory is that of XLA's temporaries; for PyTorch, which does not report them, how far one call raises the peak of the
memory of a process of its own.
"""

import functools
import resource
import subprocess
import sys

import measure
import module
from flax import nnx

import flax_mha

module.SIZES = {256 * 2**i: (1, 256, 4) for i in range(7)}
COLUMNS = {"length": "length", "implementation": "implementation", "ms": "ms", "spread": "spread"}
COLUMNS |= {"temporaries_mib": "MiB", "note": ""}


def peak_of_torch(length: int) -> float:
    """MiB by which one call of PyTorch's module raises the peak of a new process."""
    code = f"import curves; curves.print_peak_of_torch({length})"
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, cwd=sys.path[0], capture_output=True, text=True, check=True).stdout
    return float(said.split()[-1])


def print_peak_of_torch(length: int) -> None:
    module.by_torch(module.Cell(256, "float32", "backward")).call()  # starts threads and loads kernels
    peer = module.by_torch(module.Cell(length, "float32", "backward"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peer.call()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--lengths", type=measure.numbers, default=list(module.SIZES), help=f"of {list(module.SIZES)}")
    options = parser.parse_args()
    with measure.Report("Value and gradient of one module, causal", COLUMNS, options) as report:
        for length in report.each(options.lengths):
            cell = module.Cell(length, "float32", "backward")
            peers = {
                module.OURS: functools.partial(module.by_jax, flax_mha.MultiHeadAttention, cell, options.memory),
                module.FLAX: functools.partial(module.by_jax, nnx.MultiHeadAttention, cell, options.memory),
                module.TORCH: functools.partial(module.by_torch, cell),
            }
            results = measure.compare(peers, options, report.say)
            results[module.TORCH]["temporaries_mib"] = peak_of_torch(length)
            report.add({"length": length}, results)


if __name__ == "__main__":
    main()
