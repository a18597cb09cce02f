"""Measures the whole module, including the projections, compared with Flax and PyTorch.

    python benchmarks/module.py [--lengths 128,512,2048,8192] [--dtype float32]
    [--passes forward,backward]
                                [--seconds S | --rounds N] [--out
                                benchmarks/results/NAME]

Causal self-attention without dropout. `backward` is the value and the gradients of all
parameters and of the input, for a given cotangent. Of the jax modules only the compute
is timed (nnx.split, then jit).

Columns:
  spread      distance between the quartiles, in % of the median
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile
  GFLOP/s     8 B T D D of the projections and 2 B T T D of the causal attention; with
              backward 3 and 3.5 times that
  x matmul    the same as a share of a matrix product by jax, in this dtype, measured in
              the same rounds
  x Flax      milliseconds as a multiple of flax.nnx.MultiHeadAttention's
  x torch     milliseconds as a multiple of torch.nn.MultiheadAttention's
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from flax import nnx

import flax_mha

COLUMNS = {
    "shape": "B, T, D, N",
    "dtype": "dtype",
    "pass": "pass",
    "implementation": "implementation",
    "ms": "ms",
    "spread": "spread",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "gflops": "GFLOP/s",
    "of_matmul": "x matmul",
    "to_flax": "x Flax",
    "to_torch": "x torch",
    "note": "",
}
# Length -> batch, features, heads.
SIZES = {
    128: (8, 512, 8),
    512: (4, 512, 8),
    1024: (2, 512, 8),
    2048: (1, 512, 8),
    4096: (1, 512, 8),
    8192: (1, 256, 4),
}
OURS = "flax_mha.MultiHeadAttention"
FLAX = "flax.nnx.MultiHeadAttention"
TORCH = "torch.nn.MultiheadAttention"


class Cell(NamedTuple):
    """What all peers have to compute."""

    length: int
    dtype: str
    direction: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, length, features, heads."""
        batch, features, heads = SIZES[self.length]
        return batch, self.length, features, heads

    @property
    def gflop(self) -> float:
        """Of the matrix products, of what is visible."""
        batch, length, features, _ = self.sizes
        projections = 8 * batch * length * features**2
        attention = 2 * batch * length**2 * features
        if self.direction == "backward":
            # A gradient of each factor; the attention also computes its scores again.
            projections *= 3
            attention *= 3.5
        return (projections + attention) / 1e9

    def arrays(self) -> list[np.ndarray]:
        """Input, cotangent."""
        rng = np.random.default_rng(0)
        return [rng.standard_normal(self.sizes[:3], np.float32) for _ in range(2)]


def by_jax(
    module: type[nnx.MultiHeadAttention], cell: Cell, memory: float
) -> measure.Ready:
    *_, features, heads = cell.sizes
    dtype = jnp.dtype(cell.dtype)
    layer = module(
        heads, features, dtype=dtype, param_dtype=dtype, decode=False, rngs=nnx.Rngs(0)
    )
    # Only the compute is timed, not nnx's handling of modules.
    structure, parameters = nnx.split(layer)

    def call(parameters: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x, is_causal=True)

    x, cotangent = (jnp.asarray(x, dtype) for x in cell.arrays())
    if cell.direction == "backward":
        both = measure.value_and_pullback(call)
        return measure.compiled(both, cotangent, parameters, x, memory=memory)
    return measure.compiled(call, parameters, x, memory=memory)


def by_torch(cell: Cell) -> measure.Ready:
    torch, device = measure.torch_here()
    _, length, features, heads = cell.sizes
    like = {"device": device, "dtype": getattr(torch, cell.dtype)}
    layer = torch.nn.MultiheadAttention(features, heads, batch_first=True, **like)
    x, cotangent = (torch.from_numpy(x).to(**like) for x in cell.arrays())
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length, **like)
    backward = cell.direction == "backward"
    x.requires_grad_(backward)

    def call() -> object:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(backward):
            out, _ = layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)
        if backward:
            out.backward(cotangent)
        return out

    return measure.Ready(call, measure.torch_wait)


def peers(cell: Cell, memory: float) -> measure.Peers:
    return {
        OURS: functools.partial(by_jax, flax_mha.MultiHeadAttention, cell, memory),
        FLAX: functools.partial(by_jax, nnx.MultiHeadAttention, cell, memory),
        TORCH: functools.partial(by_torch, cell),
    }


def plot(rows: list[measure.Row], options) -> None:
    """Milliseconds, as a multiple of Flax's."""
    label = "milliseconds / those of Flax; lower is better"
    figure, panels = measure.grid(rows, "dtype", "pass", (label, ""))
    for axes, own in panels:
        measure.bars(axes, own, "shape", "to_flax")
        axes.set_ylabel("batch, length, features, heads")
    figure.suptitle(f"The whole module, causal ({measure.about()['device']})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--lengths",
        type=measure.numbers,
        default=[128, 512, 2048, 8192],
        help=f"out of {list(SIZES)}",
    )
    parser.add_argument("--dtype", default="float32" if measure.ON_CPU else "bfloat16")
    parser.add_argument("--passes", type=measure.names, default=["forward", "backward"])
    options = parser.parse_args()
    cells = []
    for length in options.lengths:
        cells += [Cell(length, options.dtype, name) for name in options.passes]
    with measure.Report("The whole module, causal", COLUMNS, options) as report:
        for cell in report.each(cells):
            results = measure.compare_speed(
                peers(cell, options.memory), cell.gflop, cell.dtype, options, report.say
            )
            measure.ratios(results, FLAX, "to_flax")
            measure.ratios(results, TORCH, "to_torch")
            facts = cell._asdict() | {
                "shape": ", ".join(map(str, cell.sizes)),
                "pass": cell.direction,
            }
            report.add(facts, results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
