"""Measures the time and memory of the attention function, compared with jax.nn and
PyTorch.

    python benchmarks/attention.py [--lengths 128,512] [--dtypes float32] [--passes
    forward] [--masks causal]
                                   [--head-dims 64] [--peers jax.nn] [--seconds S |
                                   --rounds N] [--out NAME]

On a CPU the shapes (batch, length, heads, head size) are (8,128,8,64), (4,512,8,64),
(1,2048,8,64), (1,8192,4,64) and (1,16384,4,64); on a GPU or TPU 16k tokens in 2048
features, as in FlashAttention's paper, and beside PyTorch's compiled FlexAttention.
`backward` is the value and the gradients of query, key and value for a given cotangent.

Columns:
  spread      distance between the quartiles, in % of the median
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile
  GFLOP/s     4 B N T S H forward, 3.5 times that with backward, half of it if causal
  x matmul    the same as a share of a matrix product by jax, in this dtype, measured in
              the same rounds
  x torch     milliseconds as a multiple of torch's scaled_dot_product_attention; on a
              GPU of its best backend
  x jax.nn    the same of jax.nn.dot_product_attention, as Flax's modules call it
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flex
import jax
import jax.numpy as jnp
import measure
import numpy as np

import flax_mha

COLUMNS = {
    "shape": "B, T, N, H",
    "mask": "mask",
    "dtype": "dtype",
    "pass": "pass",
    "implementation": "implementation",
    "ms": "ms",
    "spread": "spread",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "gflops": "GFLOP/s",
    "of_matmul": "x matmul",
    "to_torch": "x torch",
    "to_jax_nn": "x jax.nn",
    "note": "",
}
OURS = {
    f"flax_mha {name or 'automatic'}": name
    for name in (None, "xla", "blockwise", "cudnn", "splash")
}


class Cell(NamedTuple):
    """What all peers have to compute."""

    length: int
    head_dim: int
    dtype: str
    mask: str
    direction: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, T, N, H]."""
        if not measure.ON_CPU:
            batch = max(1, 16384 // self.length)
            heads = 2048 // self.head_dim
            return batch, self.length, heads, self.head_dim
        if self.length <= 128:
            batch = 8
        elif self.length <= 512:
            batch = 4
        else:
            batch = 1
        heads = 8 if self.length <= 2048 else 4
        return batch, self.length, heads, self.head_dim

    @property
    def gflop(self) -> float:
        """Of the matrix products, of what is visible."""
        batch, length, heads, size = self.shape
        # Two products, q . k and p . v, of a multiplication and an addition each.
        gflop = 4 * batch * heads * length**2 * size / 1e9
        # FlashAttention-2 counts so: 2 products forward, 5 backward.
        if self.direction == "backward":
            gflop *= 3.5
        if self.mask == "causal":
            gflop *= 0.5
        return gflop

    def arrays(self) -> list[np.ndarray]:
        """Query, key, value, cotangent."""
        rng = np.random.default_rng(0)
        return [rng.standard_normal(self.shape, np.float32) for _ in range(4)]


def by_jax(attend: Callable, cell: Cell, memory: float) -> measure.Ready:
    attend = functools.partial(attend, is_causal=cell.mask == "causal")
    *inputs, cotangent = (jnp.asarray(x, cell.dtype) for x in cell.arrays())
    if cell.direction == "backward":
        attend = measure.value_and_pullback(attend)
        inputs = [cotangent, *inputs]
    return measure.compiled(attend, *inputs, memory=memory)


def by_torch(cell: Cell) -> measure.Ready:
    """On a GPU, the fastest of its backends."""
    torch, device = measure.torch_here()
    # [B, N, T, H].
    tensors = (torch.from_numpy(x.swapaxes(1, 2).copy()) for x in cell.arrays())
    *inputs, cotangent = (x.to(device, getattr(torch, cell.dtype)) for x in tensors)
    backward = cell.direction == "backward"
    for x in inputs:
        x.requires_grad_(backward)

    def call() -> object:
        # Otherwise torch would add the new gradients to those of the last call.
        for x in inputs:
            x.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=cell.mask == "causal"
        )
        if backward:
            out.backward(cotangent)
        return out

    # On a CPU, torch has one implementation.
    if device == "cpu":
        return measure.Ready(call, measure.torch_wait)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    candidates = {}
    reasons = []
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        by_backend = sdpa_kernel(getattr(SDPBackend, name))(call)
        peer = measure.Ready(by_backend, measure.torch_wait, note=name.lower())
        try:
            seconds = min(measure.seconds_of(peer, 3) for _ in range(5))
            candidates[seconds] = peer
        except RuntimeError as error:
            reasons.append(str(error))
    if not candidates:
        raise NotImplementedError("; ".join(reasons))
    return candidates[min(candidates)]


def by_flex(cell: Cell) -> measure.Ready:
    make = flex.causal if cell.mask == "causal" else flex.no_mod
    _, length, heads, _ = cell.shape
    case = make(length, heads)
    return flex.theirs(case, cell.arrays(), cell.direction, cell.dtype)


def peers(cell: Cell, memory: float) -> measure.Peers:
    def ours(name: str | None) -> measure.Ready:
        attend = functools.partial(flax_mha.dot_product_attention, implementation=name)
        return by_jax(attend, cell, memory)

    def theirs(name: str | None) -> measure.Ready:
        attend = functools.partial(jax.nn.dot_product_attention, implementation=name)
        return by_jax(attend, cell, memory)

    # Those that the device does not support raise, and are listed as absent.
    everyone = {label: functools.partial(ours, name) for label, name in OURS.items()}
    everyone["jax.nn"] = functools.partial(theirs, None)
    if jax.default_backend() == "gpu":
        everyone["jax.nn cudnn"] = functools.partial(theirs, "cudnn")
        everyone[flex.FLEX] = functools.partial(by_flex, cell)
    return everyone | {"torch SDPA": functools.partial(by_torch, cell)}


def plot(rows: list[measure.Row], out: Path) -> None:
    """Speed against length; dashed, the matrix product."""
    with_panels = []
    for row in rows:
        panel = f"{row['mask']}, {row['dtype']}, head size {row['head_dim']}"
        with_panels.append(row | {"panel": panel})
    labels = ("length", "GFLOP/s")
    figure, panels = measure.grid(with_panels, "pass", "panel", labels, sharey=True)
    for axes, own in panels:
        measure.lines(axes, own, "length", "gflops")
        product = {row["length"]: row["matmul_gflops"] for row in own}
        axes.plot(
            product.keys(),
            product.values(),
            "--",
            color="grey",
            label="matrix product by jax",
        )
    figure.suptitle(f"Attention alone ({measure.about()['device']}); higher is better")
    measure.save(figure, out)


def main() -> None:
    parser = measure.arguments(__doc__)
    if measure.ON_CPU:
        lengths = [128, 512, 2048, 8192, 16384]
        head_dims = [64]
        dtypes = ["float32", "bfloat16"]
    else:
        lengths = [1024, 2048, 4096, 8192, 16384]
        head_dims = [64, 128]
        dtypes = ["bfloat16"]
    parser.add_argument("--lengths", type=measure.numbers, default=lengths)
    parser.add_argument("--head-dims", type=measure.numbers, default=head_dims)
    parser.add_argument("--dtypes", type=measure.names, default=dtypes)
    parser.add_argument("--passes", type=measure.names, default=["forward", "backward"])
    parser.add_argument("--masks", type=measure.names, default=["full", "causal"])
    parser.add_argument(
        "--peers",
        type=measure.names,
        help="of those in the table, separated by commas (default: all)",
    )
    options = parser.parse_args()
    # The dtype changes last.
    combinations = itertools.product(
        options.dtypes,
        options.head_dims,
        options.lengths,
        options.masks,
        options.passes,
    )
    cells = []
    for dtype, head_dim, length, mask, direction in combinations:
        cells.append(Cell(length, head_dim, dtype, mask, direction))
    with measure.Report("Attention alone", COLUMNS, options) as report:
        for cell in report.each(cells):
            facts = cell._asdict() | {
                "shape": ", ".join(map(str, cell.shape)),
                "pass": cell.direction,
            }
            everyone = peers(cell, options.memory)
            if options.peers is not None:
                everyone = {name: everyone[name] for name in options.peers}
            results = measure.compare_speed(
                everyone, cell.gflop, cell.dtype, options, report.say
            )
            measure.ratios(results, "torch SDPA", "to_torch")
            measure.ratios(results, "jax.nn", "to_jax_nn")
            report.add(facts, results)
    plot(report.rows, options.out)


if __name__ == "__main__":
    main()
