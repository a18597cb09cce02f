"""Draws the pictures of the pages as SVG, each for light and for dark pages.

Plain text instead of Matplotlib: the files are small, the same on every machine, and a
test compares them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_mha import CausalMask, FunctionMask, LocalMask, Mask, SegmentMask, recipes

ROOT = Path(__file__).parent.parent
LENGTH = 32
HEADS = 8
IDS = np.repeat(np.arange(4), (9, 5, 12, 6))[None]
BLOCKS = np.tri(4, dtype=bool) & (np.eye(4, dtype=bool) | (np.arange(4) == 0))

PARENTS = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 8]

KINDS = np.arange(8) * 0.7
ROWS, COLUMNS = np.indices((LENGTH, LENGTH))
GATES = np.full((LENGTH, HEADS), -0.03, np.float32)
GATES[[9, 23]] = np.float32([[-1.5], [-1.0]])
TERMS = np.cos(np.arange(12) * (0.2 + np.arange(LENGTH)[:, None] / LENGTH)).astype(
    np.float32
)
QUERY, KEY = (
    np.cos(np.outer(np.arange(LENGTH), x) + x**2).astype(np.float32)[:, None]
    for x in (KINDS, KINDS + 0.5)
)

# What each picture shows; a recipe's picture has its name.
RECIPES: dict[str, Mapping[str, Any]] = {
    "causal": recipes.causal(),
    "sliding_window": recipes.sliding_window(8),
    "prefix_lm": recipes.prefix_lm(12),
    "image_spans": recipes.image_spans([0] * 5 + [1] * 8 + [0] * 4 + [2] * 8 + [0] * 7),
    "documents": recipes.documents(jnp.asarray(IDS)),
    "alibi": recipes.alibi(HEADS),
    "t5_bias": recipes.t5_bias(
        np.linspace(0, -4, 16, dtype=np.float32)[:, None].repeat(HEADS, 1),
        max_distance=32,
    ),
    "soft_cap": recipes.soft_cap(50.0),
    "attention_sinks": recipes.attention_sinks(np.zeros(HEADS, np.float32), 8),
    "dilated": recipes.dilated(4),
    "block_sparse": recipes.block_sparse(BLOCKS[None].repeat(HEADS, 0), LENGTH // 4),
    "shared_prefix": recipes.shared_prefix(np.repeat(np.arange(4), (11, 6, 10, 5))),
    "block_diffusion": recipes.block_diffusion(LENGTH // 2, 4),
    "neighborhood": recipes.neighborhood(4, 8, 3),
    "shifted_windows": recipes.shifted_windows(
        np.linspace(0, -4, 49, dtype=np.float32)[:, None].repeat(HEADS, 1),
        4,
        8,
        window=4,
        shift=2,
    ),
    "sliding_tiles": recipes.sliding_tiles((4, 2, 4), (1, 2, 1), (3, 1, 3)),
    "forgetting": recipes.forgetting(GATES),
    "relative_terms": recipes.relative_terms(TERMS[None].repeat(HEADS, 0)),
    "top_blocks": recipes.top_blocks(QUERY, KEY, block=4, count=3),
    "differential": {"mask": CausalMask()},
    "tree_causal": recipes.tree_causal(PARENTS, LENGTH - len(PARENTS)),
}
MASKS: dict[str, Mask] = {
    "window_and_first": CausalMask()
    & (LocalMask(8, 0) | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < 4)),
    "packed": CausalMask() & SegmentMask(IDS, IDS),
}


def draw() -> dict[str, str]:
    """The text of each picture by its file's name: of masks, and beside them of what
    recipes do to scores.
    """
    panels = {name: _mask(mask.picture(LENGTH, LENGTH)) for name, mask in MASKS.items()}
    for name, arguments in RECIPES.items():
        visible = arguments["mask"].picture(LENGTH, LENGTH)
        if "key_indices" in arguments:
            listed = np.asarray(arguments["key_indices"])[:, 0]
            visible = visible & (listed[:, :, None] == np.arange(LENGTH)).any(1)
        panels[name] = _mask(visible)
        if "score_mod" in arguments:
            panels[f"{name}_scores"] = _added(visible, arguments["score_mod"])
        if "logits_soft_cap" in arguments:
            panels[f"{name}_scores"] = _cap(arguments["logits_soft_cap"])
    panels |= _differential()
    panels |= {"hero": draw_curves(curves())}
    panels |= {"tiles": _tiles(), "decoding_step": _decoding_step()}
    return {
        f"{name}-{theme}.svg": _svg(panel, colors)
        for name, panel in panels.items()
        for theme, colors in THEMES
    }


class Picture(NamedTuple):
    """Shapes in a box of this size, with colors by their names in `THEMES`."""

    width: int
    height: int
    shapes: list[str]


# GitHub's own colors: text, lines beside it, ours, the others, and what is masked.
THEMES = (
    (
        "light",
        {
            "ink": "#1f2328",
            "line": "#59636e",
            "ours": "#0969da",
            "empty": "#eaeef2",
            "page": "#ffffff",
        },
    ),
    (
        "dark",
        {
            "ink": "#f0f6fc",
            "line": "#9198a1",
            "ours": "#4493f8",
            "empty": "#2a313c",
            "page": "#0d1117",
        },
    ),
)


def _svg(picture: Picture, colors: Mapping[str, str]) -> str:
    width = picture.width
    height = picture.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    head += f' width="{width}" height="{height}" font-family="system-ui,sans-serif">'
    text = "\n".join([head, *picture.shapes, "</svg>", ""])
    for name, color in colors.items():
        text = text.replace(f"@{name}", color)
    return text


def _text(
    x: float, y: float, text: str, size: int = 18, more: str = 'fill="@ink"'
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" {more}>{escape(text)}</text>'
    )


MIDDLE = 'fill="@ink" text-anchor="middle"'
MINUS = str.maketrans("-", "\N{MINUS SIGN}")


def _path(points: Sequence[tuple[float, float]], more: str) -> str:
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{line}" fill="none" {more}/>'


CELL = 9  # of a mask
# Of the square, and the place of its corner.
SIDE = CELL * LENGTH
LEFT = 28
TOP = 30


def _square(shapes: list[str], x: str, y: str, title: str) -> Picture:
    """These shapes on a square with names of its axes and a title."""
    middle = SIDE // 2
    back = f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="@empty"/>'
    names = [
        _text(
            18,
            TOP + middle,
            y,
            more=f'{MIDDLE} transform="rotate(-90 18 {TOP + middle})"',
        ),
        _text(LEFT + middle, TOP + SIDE + 20, x, more=MIDDLE),
        _text(LEFT + middle, 20, title.translate(MINUS), more=MIDDLE),
    ]
    return Picture(LEFT + SIDE + 4, TOP + SIDE + 26, [back, *shapes, *names])


def _scores(layers: Sequence[tuple[np.ndarray, float]], title: str) -> Picture:
    """A row per query and a column per key; of each layer the cells that are True, this
    opaque.
    """
    shapes = [_cells(cells, opacity) for cells, opacity in layers]
    return _square(shapes, "key", "query", title)


def _cells(cells: np.ndarray, opacity: float) -> str:
    """The cells that are True, this opaque."""
    runs = []
    for row, line in enumerate(cells):
        for is_set, run in groupby(enumerate(line), key=lambda cell: bool(cell[1])):
            columns = [column for column, _ in run]
            x = LEFT + CELL * columns[0]
            y = TOP + CELL * row
            width = CELL * len(columns)
            runs += [f"M{x} {y}h{width}v{CELL}h-{width}z"] if is_set else []
    return f'<path d="{"".join(runs)}" fill="@ours" fill-opacity="{opacity:.2f}"/>'


def _mask(visible: np.ndarray) -> Picture:
    return _scores([(visible, 1.0)], f"visible: {100 * visible.mean():.0f} %")


def _shaded(visible: np.ndarray, values: np.ndarray, title: str) -> Picture:
    """Values from the smallest to the largest visible one, in eight shades."""
    low = values[visible].min()
    high = values[visible].max()
    shade = np.round(7 * (values - low) / (high - low))
    layers = [(visible & (shade == level), 0.3 + 0.1 * level) for level in range(8)]
    return _scores(layers, title.format(low, high))


def _added(visible: np.ndarray, score_mod: Any) -> Picture:
    """What a `score_mod` makes of scores of 0 in the first head, where they are
    visible.
    """
    places = jnp.asarray(ROWS, jnp.int32), jnp.asarray(COLUMNS, jnp.int32)
    added = np.asarray(score_mod(jnp.zeros((LENGTH, LENGTH)), 0, 0, *places))
    return _shaded(visible, added, "added in head 0: {:.3g} to {:.3g}")


def _differential() -> dict[str, Picture]:
    """The weights of a softmax over a signal and noise, and what is left without those
    of a softmax over the noise.
    """
    visible = COLUMNS <= ROWS
    noise = 1.5 * np.cos(3.0 * ROWS * COLUMNS + COLUMNS**2)
    signal = 2.5 * ((COLUMNS == ROWS) | (COLUMNS == ROWS // 2))
    first, second = (np.where(visible, np.exp(x), 0) for x in (noise + signal, noise))
    first, second = (x / x.sum(1, keepdims=True) for x in (first, second))
    names = {"differential": first, "differential_scores": first - 0.5 * second}
    titles = "first softmax", "difference of two"
    weights = {
        name: np.maximum(x, 0) / x.max(1, keepdims=True) for name, x in names.items()
    }
    return {
        name: _shaded(visible, x, title)
        for (name, x), title in zip(weights.items(), titles, strict=True)
    }


TILE = 4  # cells of a mask side by side in a tile
WINDOWED = CausalMask() & LocalMask(11, 0)


def tiles() -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of `WINDOWED` are full, and which are partial."""
    count = LENGTH // TILE
    visible = WINDOWED.picture(LENGTH, LENGTH).reshape(count, TILE, count, TILE)
    full = visible.all((1, 3))
    return full, visible.any((1, 3)) & ~full


def tile_counts() -> tuple[int, int, int, int]:
    """Numbers of all tiles, full ones, partial ones, and empty ones."""
    full, partial = tiles()
    computed = int(full.sum() + partial.sum())
    return full.size, int(full.sum()), int(partial.sum()), full.size - computed


OURS = 'fill="@ours"'
PALE = 'fill="@ours" fill-opacity="0.35"'
EMPTY = 'fill="@empty"'
LINE = 'stroke="@ink" stroke-width="3"'
OUTLINE = f'fill="none" {LINE}'


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f"<rect {place} {more}/>"


def _tiles() -> Picture:
    """The tiles of a mask, and what the loop over a row of tiles keeps."""
    full, partial = (x.repeat(TILE, 0).repeat(TILE, 1) for x in tiles())
    visible = WINDOWED.picture(LENGTH, LENGTH)
    shapes = [_cells(full, 1.0), _cells(partial, 0.35), _cells(partial & visible, 0.45)]
    side = CELL * TILE
    grid = 'stroke="@page" stroke-width="2"'
    for place in range(side, SIDE, side):
        x = LEFT + place
        y = TOP + place
        shapes.append(_path([(x, TOP), (x, TOP + SIDE)], grid))
        shapes.append(_path([(LEFT, y), (LEFT + SIDE, y)], grid))

    right = LEFT + SIDE + 24
    legend = {"full": OURS, "partial": PALE, "empty": EMPTY}
    for number, (name, color) in enumerate(legend.items()):
        y = TOP + 30 * number
        shapes.append(_rect(right, y, 20, 20, color))
        shapes.append(_text(right + 30, y + 16, name))

    # The tiles of one row, and its sums.
    row = 5
    y = TOP + side * row
    x = LEFT + side * (row - 3)
    shapes.append(_rect(x, y, 4 * side, side, OUTLINE))
    middle = y + side / 2
    shapes.append(_path([(x + 4 * side, middle), (right - 8, middle)], LINE))
    tip = [(right - 17, middle - 7), (right - 8, middle), (right - 17, middle + 7)]
    shapes.append(_path(tip, LINE))
    shapes.append(_text(right, y - 36, "kept for each query:"))
    widths = {"max": 14, "sum": 14, "output": 72}
    for number, (name, width) in enumerate(widths.items()):
        x = right + 48 * number
        shapes.append(_text(x, y - 8, name, 16, 'fill="@line"'))
        shapes.append(_rect(x, y, width, side, OUTLINE))
    square = _square(shapes, "key", "query", "causal, with a window")
    return square._replace(width=right + 180)


def _decoding_step() -> Picture:
    """The blocks of a cache, and which of them a step reads."""
    count = 16
    side = 26
    written = 10.4  # blocks
    rows = {
        "without a window": range(11),
        "with a window": range(8, 11),
        "Flax": range(count),
    }
    shapes = []
    for number, (title, read) in enumerate(rows.items()):
        y = 30 + 72 * number
        shapes.append(_text(2, y - 8, title))
        for block in range(count):
            x = 2 + side * block
            width = side - 4
            share = min(max(written - block, 0), 1)
            shapes.append(_rect(x, y, width, width, EMPTY))
            shapes.append(_rect(x, y, share * width, width, PALE))
            if block in read:
                shapes.append(_rect(x, y, width, width, OUTLINE))
    return Picture(side * count + 2, 204, shapes)


def _cap(cap: float) -> Picture:
    """The curve of a soft cap, and the scores as they are."""
    scores = np.linspace(-2 * cap, 2 * cap, 81)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + SIDE * (x / cap + 2) / 4, TOP + SIDE * (2 - y / cap) / 4

    shapes = [
        _path(
            [place(x, x) for x in (-2 * cap, 2 * cap)],
            'stroke="@line" stroke-width="2"',
        )
    ]
    shapes += [
        _path(
            [place(x, cap * math.tanh(x / cap)) for x in scores],
            'stroke="@ours" stroke-width="4"',
        )
    ]
    for y in (-cap, cap):
        ends = [place(-2 * cap, y), place(2 * cap, y)]
        shapes += [_path(ends, 'stroke="@line" stroke-dasharray="4 4"')]
        shapes += [
            _text(
                LEFT + 6 if y > 0 else LEFT + SIDE - 46,
                ends[0][1] - 6,
                f"{y:g}".translate(MINUS),
            )
        ]
    return _square(shapes, "scaled score", "capped", f"logits_soft_cap={cap:g}")


RESULTS = ROOT / "benchmarks" / "results"
NAMES = {  # of benchmarks/curves.py
    "flax_mha.MultiHeadAttention": "flax_mha",
    "torch.nn.MultiheadAttention": "PyTorch",
    "flax.nnx.MultiHeadAttention": "Flax",
}
LENGTHS = (256, 2048, 16384)


def curves() -> list[dict[str, Any]]:
    """Seconds and MiB of each length and library, as benchmarks/curves.py measured
    them; None where nothing was. `needs`: the MiB of what was too large to run.
    """
    rows = json.loads((RESULTS / "curves-cpu.json").read_text())["rows"]
    found = []
    for row in rows:
        seconds = None
        needs = None
        if "ms" in row:
            seconds = row["ms"] / 1000
        else:
            # "16,448 MiB of temporaries, more than 6 GiB"
            needs = float(row["absent"].split(" MiB")[0].replace(",", ""))
        found.append(
            {
                "length": row["length"],
                "name": NAMES[row["implementation"]],
                "seconds": seconds,
                "mib": row.get("temporaries_mib"),
                "needs": needs,
            }
        )
    return found


def amount(number: float, value: str) -> str:
    """Seconds or MiB, as they are read."""
    if value == "seconds":
        if number >= 10:
            return f"{number:.0f} s"
        if number >= 0.1:
            return f"{number:.2g} s"
        return f"{1000 * number:.2g} ms"
    if number < 1000:
        return f"{number:.0f} MiB"
    return f"{number / 1024:.2g} GiB"


def draw_curves(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Time and memory over the length, both axes logarithmic, names at the ends of the
    lines; None draws nothing.
    """
    return Picture(680, 330, _panel("seconds", 0, rows) + _panel("mib", 340, rows))


def _panel(value: str, left: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [row for row in rows if row[value] is not None]
    title = "time" if value == "seconds" else "memory"
    factor = 10 if value == "seconds" else 16  # between two ticks
    powers = [math.log(row[value], factor) for row in rows]
    ticks = range(
        math.floor(min(powers)),
        max(math.ceil(max(powers)), math.floor(min(powers)) + 1) + 1,
    )
    x0 = left + 72
    x1 = left + 218
    y0 = 272
    y1 = 44

    def place(length: float, number: float) -> tuple[float, float]:
        x = math.log(length / LENGTHS[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
        y = (math.log(number, factor) - ticks[0]) / (ticks[-1] - ticks[0])
        return x0 + (x1 - x0) * x, y0 + (y1 - y0) * y

    shapes = [_text(x0 - 8, 24, title, 21, 'fill="@ink" font-weight="600"')]
    for tick in ticks:
        _, y = place(LENGTHS[0], float(factor) ** tick)
        shapes.append(_path([(x0, y), (x1, y)], 'stroke="@empty" stroke-width="2"'))
        shapes.append(
            _text(
                x0 - 8,
                y + 7,
                amount(float(factor) ** tick, value),
                19,
                'fill="@line" text-anchor="end"',
            )
        )
    for length in LENGTHS:
        label = str(length) if length < 1024 else f"{length // 1024}k"
        shapes.append(
            _text(
                place(length, 1)[0],
                y0 + 26,
                label,
                19,
                'fill="@line" text-anchor="middle"',
            )
        )
    shapes.append(
        _text((x0 + x1) / 2, y0 + 50, "tokens", 19, 'fill="@line" text-anchor="middle"')
    )
    ends = []
    for name in reversed(NAMES.values()):
        line = sorted(
            (row["length"], row[value]) for row in rows if row["name"] == name
        )
        points = [place(*point) for point in line]
        color = "@ours" if name == "flax_mha" else "@line"
        if points:
            shapes.append(
                _path(
                    points, f'stroke="{color}" stroke-width="4" stroke-linejoin="round"'
                )
            )
            shapes.append(
                f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="5" '
                f'fill="{color}"/>'
            )
            ends.append((*points[-1][::-1], name, amount(line[-1][1], value), color))
    right = max(x for _, x, *_ in ends)
    lowest = math.inf
    # From below, each label clear of the one before.
    for y, x, name, last, color in sorted(ends, reverse=True):
        bold = f'fill="{color}" font-weight="600"'
        if x < right:
            shapes.append(
                _text(x - 10, y, f"{name} {last}", 20, f'{bold} text-anchor="end"')
            )
        else:
            lowest = min(y + 26, y0 - 4, lowest - 44)
            shapes += [
                _text(x + 10, lowest - 20, name, 20, bold),
                _text(x + 10, lowest, last, 19, f'fill="{color}"'),
            ]
    return shapes
