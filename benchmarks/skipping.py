"""Measures the time saved by skipping empty tiles, and whether a window's cost grows
linearly with length.

    python benchmarks/skipping.py [--length 16384] [--passes forward,backward]
                                  [--seconds S | --rounds N] [--out
                                  benchmarks/results/NAME]

One sequence of T = `--length` tokens, 4 heads of size 64, float32: all cases take
turns. Then full against causal attention at T / 2, and the same window at T / 4, T / 2,
T and 4 T. `backward` is the value and the gradients of query, key and value.

Columns:
  spread      distance between the quartiles, in % of the median
  x full      milliseconds as a multiple of those of full attention of the same length
  tiles       share of the tiles of 512 x 512 scores in which something may be visible,
              and which are thus visited
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile
  ms / 1k     milliseconds for a thousand tokens: the same for every length if the cost
              grows linearly
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import measure
import numpy as np
from matplotlib.figure import Figure

from flax_mha import dot_product_attention, recipes
from flax_mha._src import plan as schedule
from flax_mha._src.core.validation import Shape
from flax_mha._src.masks.function import store_occupancy
from flax_mha._src.math import head, tiling
from flax_mha._src.math.head import one_of
from flax_mha.masks import CausalMask, LocalMask, Mask, SegmentMask

COLUMNS = {
    "length": "T",
    "pass": "pass",
    "implementation": "attention",
    "ms": "ms",
    "spread": "spread",
    "to_full": "x full",
    "tiles": "tiles",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "ms_per_1k": "ms / 1k",
    "note": "",
}
HEADS = 4
HEAD_DIM = 64
TILE = schedule.TILE_SHAPES[0].height
WINDOW = "window of 256"


class Case(NamedTuple):
    """Arguments of `dot_product_attention`, and a mask that says the same."""

    arguments: dict[str, Any]
    mask: Mask | None


def full(length: int) -> Case:
    return Case({}, None)


def documents(length: int) -> Case:
    each = -(-length // 16)
    ids = jnp.repeat(jnp.arange(16, dtype=jnp.int32), each)[None, :length]
    return Case({"query_segment_ids": ids}, SegmentMask(ids, ids))


def causal(length: int) -> Case:
    return Case({"is_causal": True}, CausalMask())


def window(length: int) -> Case:
    return Case({"is_causal": True, "local_window_size": (255, 0)}, LocalMask(255, 0))


def big_bird(length: int) -> Case:
    """The diagonal, the first tile, and one tile in ten at random, for each head
    others; every score of these.
    """
    count = -(-length // TILE)
    table = np.random.default_rng(0).random((HEADS, count, count)) < 0.1
    # So that no query is without keys.
    table |= np.eye(count, dtype=bool) | (np.arange(count) == 0)
    return of_recipe(recipes.block_sparse(table, TILE))


def of_recipe(arguments: dict[str, Any]) -> Case:
    return Case(arguments, arguments.get("mask"))


def unchanged(length: int) -> Case:
    return of_recipe({"score_mod": lambda score, b, h, q_idx, kv_idx: score})


CASES: dict[str, Callable[[int], Case]] = {
    "full": full,
    "16 documents": documents,
    "causal": causal,
    WINDOW: window,
    "prefix-LM, a quarter": lambda length: of_recipe(recipes.prefix_lm(length // 4)),
    "dilated by 4": lambda length: of_recipe(recipes.dilated(4)),
    "block-sparse": big_bird,
    "score_mod that changes nothing": unchanged,
}


def share_of_tiles(mask: Mask | None, length: int) -> float | None:
    """The mean over the heads."""
    if mask is None:
        return None
    lengths = (length, length)
    offsets = (0, 0)
    tiles = tiling.tiling_of(lengths, schedule.TILE_SHAPES[0])
    # As "blockwise" does it: the mask of each head, and which tiles it leaves visible.
    shape = Shape((1,), *lengths, HEADS, HEADS, HEAD_DIM, HEAD_DIM)
    stored = store_occupancy(mask.canonical(shape), lengths, offsets, tiling.CELL)
    by_head = head.mask_by_head(stored, 1, (HEADS, 1))
    each = [one_of(by_head, (0, n, 0)) for n in range(HEADS)]
    block_mask = tiling.static_block_mask(tiles, each, offsets)
    return float(np.mean(block_mask.num_tiles)) / tiles.cells


def peer(case: Case, length: int, direction: str, memory: float) -> measure.Ready:
    # Cotangent, query, key, value.
    shape = (4, 1, length, HEADS, HEAD_DIM)
    drawn = np.random.default_rng(0).standard_normal(shape, np.float32)
    cotangent, *inputs = map(jnp.asarray, drawn)
    attend = functools.partial(dot_product_attention, **case.arguments)
    if direction == "backward":
        both = measure.value_and_pullback(attend)
        return measure.compiled(both, cotangent, *inputs, memory=memory)
    return measure.compiled(attend, *inputs, memory=memory)


def plot(rows: list[measure.Row], options) -> None:
    """What each case costs, and the window by length."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = [row for row in rows if "ms" in row]
    longest = [row for row in rows if row["length"] == options.length]
    measure.bars(left, longest, "implementation", "to_full", series="pass")
    left.set(
        title=f"T = {options.length:,}",
        xlabel="milliseconds / those of full attention; lower is better",
    )
    windows = [row for row in rows if row["implementation"] == WINDOW]
    measure.lines(right, windows, "length", "ms", series="pass")
    right.set(title=WINDOW, xlabel="length", ylabel="ms")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"What skipping pays ({measure.about()['device']})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--passes", type=measure.names, default=["forward", "backward"])
    options = parser.parse_args()
    # Which cases to run at which length.
    names = {
        options.length: list(CASES),
        options.length // 2: ["full", "causal", WINDOW],
        options.length // 4: [WINDOW],
        options.length * 4: [WINDOW],
    }
    cells = [(length, direction) for length in names for direction in options.passes]
    with measure.Report("What skipping pays", COLUMNS, options) as report:
        for length, direction in report.each(cells):
            cases = {name: CASES[name](length) for name in names[length]}
            peers = {}
            for name, case in cases.items():
                peers[name] = functools.partial(
                    peer, case, length, direction, memory=options.memory
                )
            results = measure.compare(peers, options, report.say)
            for name, result in results.items():
                result["tiles"] = share_of_tiles(cases[name].mask, length)
                if "ms" in result:
                    result["ms_per_1k"] = 1000 * result["ms"] / length
            measure.ratios(results, "full", "to_full")
            report.add({"length": length, "pass": direction}, results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
