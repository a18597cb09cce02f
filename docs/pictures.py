"""Draws the pictures of the pages while they are built; run as a program, the README's own."""

import ast
import graphlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flax_mha import CausalMask, FunctionMask, LocalMask, Mask, SegmentMask, recipes
from flax_mha.plot import plot_mask

LENGTH, HEADS = 32, 8
IDS = np.repeat(np.arange(4), (9, 5, 12, 6))[None]
BLOCKS = np.tri(4, dtype=bool) & (np.eye(4, dtype=bool) | (np.arange(4) == 0))

PARENTS = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 8]

# What each picture shows; a recipe's picture has its name.
RECIPES: dict[str, Mapping[str, Any]] = {
    "causal": recipes.causal(),
    "sliding_window": recipes.sliding_window(8),
    "prefix_lm": recipes.prefix_lm(12),
    "documents": recipes.documents(jnp.asarray(IDS)),
    "alibi": recipes.alibi(HEADS),
    "t5_bias": recipes.t5_bias(np.linspace(0, -4, 16, dtype=np.float32)[:, None].repeat(HEADS, 1), max_distance=32),
    "soft_cap": recipes.soft_cap(50.0),
    "attention_sinks": recipes.attention_sinks(np.zeros(HEADS, np.float32), 8),
    "dilated": recipes.dilated(4),
    "block_sparse": recipes.block_sparse(BLOCKS[None].repeat(HEADS, 0), LENGTH // 4),
    "shared_prefix": recipes.shared_prefix(np.repeat(np.arange(4), (11, 6, 10, 5))),
    "block_diffusion": recipes.block_diffusion(LENGTH // 2, 4),
    "neighborhood": recipes.neighborhood(4, 8, 3),
    "shifted_windows": recipes.shifted_windows(
        np.linspace(0, -4, 49, dtype=np.float32)[:, None].repeat(HEADS, 1), 4, 8, window=4, shift=2
    ),
    "tree_causal": recipes.tree_causal(PARENTS, LENGTH - len(PARENTS)),
}
MASKS: dict[str, Mask] = {
    "window_and_first": CausalMask() & (LocalMask(8, 0) | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < 4)),
    "packed": CausalMask() & SegmentMask(IDS, IDS),
}


def draw(folder: Path) -> None:
    """Writes a PNG for each recipe and mask."""
    folder.mkdir(exist_ok=True)
    for name, mask in MASKS.items():
        _save(folder / f"{name}.png", {"mask": mask})
    for name, arguments in RECIPES.items():
        _save(folder / f"{name}.png", arguments)
    _draw_imports(folder / "architecture.png")


def _save(path: Path, arguments: Mapping[str, Any]) -> None:
    """The mask, and beside it what becomes of scores if the recipe changes them."""
    scored = "score_mod" in arguments or "logits_soft_cap" in arguments
    figure = Figure(figsize=(7.2 if scored else 3.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
    plot_mask(arguments["mask"], LENGTH, LENGTH, panels[0])
    if "score_mod" in arguments:
        _plot_added(arguments["mask"], arguments["score_mod"], panels[1])
    if "logits_soft_cap" in arguments:
        _plot_cap(arguments["logits_soft_cap"], panels[1])
    figure.savefig(path, dpi=144)


def _plot_added(mask: Mask, score_mod: Any, axes: Axes) -> None:
    """What a `score_mod` makes of scores of 0 in the first head, where they are visible."""
    q_idx, kv_idx = np.indices((LENGTH, LENGTH), np.int32)
    added = np.asarray(score_mod(jnp.zeros((LENGTH, LENGTH)), 0, 0, jnp.asarray(q_idx), jnp.asarray(kv_idx)))
    shown = np.where(mask.picture(LENGTH, LENGTH), added, np.nan)
    axes.figure.colorbar(axes.imshow(shown, cmap="viridis", interpolation="nearest"), ax=axes, shrink=0.8)
    axes.set(xlabel="key", ylabel="query", title="added to the score, head 0")


def _plot_cap(cap: float, axes: Axes) -> None:
    """The curve of a soft cap."""
    scores = np.linspace(-4 * cap, 4 * cap, 200)
    axes.plot(scores, scores, color="0.8", label="as it is")
    axes.plot(scores, cap * np.tanh(scores / cap), color="0.2", label="capped")
    axes.set(xlabel="scaled score", ylabel="score", title=f"logits_soft_cap={cap:g}", ylim=(-2 * cap, 2 * cap))
    axes.legend(frameon=False)


PACKAGE = Path(__file__).parent.parent / "flax_mha"


def _imports() -> dict[str, set[str]]:
    """For each folder and file at the top of the package, those that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        modules = [
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        found = {module.split(".")[1] for module in modules if module.startswith("flax_mha.")}
        graph.setdefault(name, set()).update(found - {name})
    return {name: found for name, found in graph.items() if name != "__init__"}


def _draw_imports(path: Path) -> None:
    """Boxes for folders and files, each above all that it imports; an arrow for each import that no other implies."""
    graph = _imports()
    level: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        level[name] = 1 + max((level[x] for x in graph[name]), default=-1)
    rows = [[name for name in sorted(graph) if level[name] == n] for n in range(max(level.values()) + 1)]
    place = {name: ((i + 0.5) / len(row), level[name]) for row in rows for i, name in enumerate(row)}
    figure = Figure(figsize=(7.2, 7.2), layout="constrained")
    axes = figure.subplots()
    for name, found in graph.items():
        direct = {x for x in found if not any(x in graph[y] for y in found)}
        for x in direct:
            axes.annotate(
                "", place[x], place[name], arrowprops={"arrowstyle": "->", "color": "0.6", "shrinkA": 18, "shrinkB": 22}
            )
    for name, (x, y) in place.items():
        is_folder = (PACKAGE / name).is_dir()
        color = "#dbe9f6" if is_folder else "white"
        text = f"{name}/" if is_folder else f"{name}.py"
        axes.text(
            x, y, text, ha="center", va="center", bbox={"boxstyle": "round", "facecolor": color, "edgecolor": "0.4"}
        )
    axes.set(xlim=(0, 1), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    figure.savefig(path, dpi=144)


STATIC, RESULTS = Path(__file__).parent / "_static", Path(__file__).parent.parent / "benchmarks" / "results"
MODULES = {  # the names of benchmarks/module.py, and those of the README's picture
    "flax_mha.MultiHeadAttention": "flax_mha",
    "torch.nn.MultiheadAttention": "PyTorch",
    "flax.nnx.MultiHeadAttention": "Flax",
}


def draw_comparison(path: Path) -> None:
    """Bars of memory and time of the three modules, value and gradient of the longest sequence that was measured."""
    report = json.loads((RESULTS / "module-cpu.json").read_text())
    longest = report["rows"][-1]["shape"]
    rows = {
        row["implementation"]: row for row in report["rows"] if (row["shape"], row["pass"]) == (longest, "backward")
    }
    figure = Figure(figsize=(7.2, 2.0), layout="constrained")
    for axes, value, unit in zip(
        figure.subplots(1, 2), ("temporaries_mib", "ms"), ("MiB of memory", "seconds"), strict=True
    ):
        shown = {label: rows[name][value] for name, label in MODULES.items() if rows[name][value] is not None}
        numbers = [number / 1000 if value == "ms" else number for number in shown.values()]
        bars = axes.barh(list(shown), numbers, color=["#1f77b4", *["0.65"] * (len(shown) - 1)])
        axes.bar_label(bars, [f"{n:,.0f}" if n >= 20 else f"{n:.2g}" for n in numbers], padding=3)
        axes.set(title=unit, xlim=(0, max(numbers) * 1.15), xticks=[])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=144)


if __name__ == "__main__":
    draw_comparison(STATIC / "comparison.png")
