"""Measures score_mod and mask objects, compared with PyTorch's compiled FlexAttention.

    python benchmarks/flex.py [--lengths 2048,8192] [--cases "no mod,ALiBi,causal,16
    documents"]
                              [--seconds S | --rounds N] [--out benchmarks/results/NAME]

float32; 8 heads of size 64 up to 2048 tokens, 4 beyond. On a CPU FlexAttention has no
gradient, so there our `backward` (the value and the gradients of query, key and value)
stands beside the dense one. Needs a C++ compiler.

Columns:
  spread      distance between the quartiles, in % of the median
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile; of torch until the first call has returned,
              without its cache on the disk
  x torch     milliseconds as a multiple of torch.compile(flex_attention)'s
  x dense     milliseconds as a multiple of those of our implementation="xla", which
              holds all scores
"""

import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

# Or a second run would not compile.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import jax.numpy as jnp
import measure
import numpy as np

from flax_mha import dot_product_attention, recipes

COLUMNS = {
    "shape": "B, T, N, H",
    "case": "case",
    "pass": "pass",
    "implementation": "implementation",
    "ms": "ms",
    "spread": "spread",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "to_torch": "x torch",
    "to_dense": "x dense",
    "note": "",
}
OURS = "flax_mha automatic"
DENSE = "flax_mha xla"
FLEX = "torch FlexAttention"


class Case(NamedTuple):
    """Our arguments; torch's score_mod and mask_mod."""

    ours: dict[str, Any]
    score_mod: Callable | None = None
    mask_mod: Callable | None = None


def no_mod(length: int, heads: int) -> Case:
    return Case({})


def alibi(length: int, heads: int) -> Case:
    """Without the causal mask."""
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)

    def with_slopes(slopes: Any) -> Callable:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - slopes[h] * abs(q_idx - kv_idx)

        return score_mod

    ours = with_slopes(jnp.asarray(slopes))
    theirs = with_slopes(torch_array(slopes))
    return Case({"score_mod": ours}, score_mod=theirs)


def causal(length: int, heads: int) -> Case:
    return Case(recipes.causal(), mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def documents(length: int, heads: int) -> Case:
    """16 of them, causal."""
    each = -(-length // 16)
    ids = np.repeat(np.arange(16, dtype=np.int32), each)[:length]
    theirs = torch_array(ids)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (theirs[q_idx] == theirs[kv_idx])

    ours = recipes.documents(jnp.asarray(ids)[None])
    return Case(ours, mask_mod=mask_mod)


CASES = {"no mod": no_mod, "ALiBi": alibi, "causal": causal, "16 documents": documents}


def torch_array(x: np.ndarray) -> Any:
    """None without torch: then nobody asks for it."""
    try:
        torch, device = measure.torch_here()
    except (ImportError, NotImplementedError):
        return None
    return torch.from_numpy(x).to(device)


def shape_of(length: int) -> tuple[int, int, int, int]:
    heads = 8 if length <= 2048 else 4
    return 1, length, heads, 64


def arrays(length: int) -> list[np.ndarray]:
    """Query, key, value, cotangent."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape_of(length), np.float32) for _ in range(4)]


def ours(
    implementation: str | None, case: Case, length: int, direction: str, memory: float
) -> measure.Ready:
    attend = functools.partial(
        dot_product_attention, **case.ours, implementation=implementation
    )
    *inputs, cotangent = map(jnp.asarray, arrays(length))
    if direction == "backward":
        both = measure.value_and_pullback(attend)
        return measure.compiled(both, cotangent, *inputs, memory=memory)
    return measure.compiled(attend, *inputs, memory=memory)


def theirs(
    case: Case, arrays: list[np.ndarray], direction: str, dtype: str = "float32"
) -> measure.Ready:
    """`arrays` are query, key, value and cotangent, [B, T, N, H]."""
    torch, device = measure.torch_here()
    if direction == "backward" and device == "cpu":
        raise NotImplementedError("no gradient on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # [B, N, T, H].
    tensors = (torch.from_numpy(x.swapaxes(1, 2).copy()) for x in arrays)
    *inputs, cotangent = (x.to(device, getattr(torch, dtype)) for x in tensors)
    length = arrays[0].shape[1]
    for x in inputs:
        x.requires_grad_(direction == "backward")
    block_mask = case.mask_mod and create_block_mask(
        case.mask_mod, None, None, length, length, device=device
    )
    # So that what an earlier case has compiled makes this one no faster.
    torch.compiler.reset()
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    attend = torch.compile(flex_attention)

    def call() -> object:
        for x in inputs:
            x.grad = None
        out = attend(*inputs, score_mod=case.score_mod, block_mask=block_mask)
        if direction == "backward":
            out.backward(cotangent)
        return out

    start = time.perf_counter()
    measure.torch_wait(call())
    seconds = time.perf_counter() - start
    return measure.Ready(call, measure.torch_wait, compile_s=seconds)


def plot(rows: list[measure.Row], options) -> None:
    """Milliseconds of every case."""
    figure, panels = measure.grid(rows, "pass", "shape", ("ms; lower is better", ""))
    for axes, own in panels:
        measure.bars(axes, own, "case", "ms")
    figure.suptitle(f"Score functions and masks ({measure.about()['device']})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--lengths", type=measure.numbers, default=[2048, 8192])
    parser.add_argument("--cases", type=measure.names, default=list(CASES))
    options = parser.parse_args()
    passes = ("forward", "backward")
    cells = list(itertools.product(options.lengths, options.cases, passes))
    with measure.Report("Score functions and masks", COLUMNS, options) as report:
        for length, name, direction in report.each(cells):
            _, _, heads, _ = shape_of(length)
            case = CASES[name](length, heads)
            cell = {"case": case, "length": length, "direction": direction}
            peers = {
                OURS: functools.partial(ours, None, **cell, memory=options.memory),
                DENSE: functools.partial(ours, "xla", **cell, memory=options.memory),
                FLEX: functools.partial(theirs, case, arrays(length), direction),
            }
            results = measure.compare(peers, options, report.say)
            measure.ratios(results, FLEX, "to_torch")
            measure.ratios(results, DENSE, "to_dense")
            shape = ", ".join(map(str, shape_of(length)))
            facts = {"length": length, "shape": shape, "case": name, "pass": direction}
            report.add(facts, results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
