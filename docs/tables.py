"""Makes the tables of measurements from the JSON files that the benchmarks
write.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
Row = dict[str, Any]


class Table(NamedTuple):
    """A table: of which file, which of its rows, what tells them apart, and what stands
    beside one another.
    """

    file: str
    keys: Mapping[str, str]  # columns of the file, and their headings here
    where: Mapping[str, Any] = {}
    across: str = "implementation"
    value: str = "ms"
    without: tuple[str, ...] = ("flax_mha cudnn", "flax_mha splash")  # no such device


SHAPE = {"shape": "batch, length, heads, size"}
CACHE = {"dtype": "dtype", "kv_heads": "key/value heads"}
DERIVATIVE = {"implementation": "derivative", "by": "implementation"}
TABLES = {
    "curves": Table("curves-cpu", {"length": "tokens"}),
    "curves_memory": Table("curves-cpu", {"length": "tokens"}, value="temporaries_mib"),
    "attention": Table("attention-cpu", SHAPE | {"mask": "mask", "pass": "pass"}),
    "attention_memory": Table(
        "attention-cpu",
        SHAPE | {"mask": "mask", "pass": "pass"},
        value="temporaries_mib",
    ),
    "bfloat16": Table(
        "attention-bfloat16-cpu",
        SHAPE | {"mask": "mask", "pass": "pass"},
        {"dtype": "bfloat16"},
    ),
    "short": Table(
        "short-cpu",
        {"length": "length", "mask": "mask", "pass": "pass"},
        {"implementation": "flax_mha automatic"},
        across="head_dim",
        value="to_jax_nn",
    ),
    "module": Table(
        "module-cpu", {"shape": "batch, length, features, heads", "pass": "pass"}
    ),
    "module_memory": Table(
        "module-cpu",
        {"shape": "batch, length, features, heads", "pass": "pass"},
        value="temporaries_mib",
        without=("torch.nn.MultiheadAttention",),
    ),
    "flex": Table("flex-cpu", SHAPE | {"case": "case", "pass": "pass"}),
    "gathered": Table("gathered-cpu", {"length": "tokens", "pass": "pass"}),
    "gathered_memory": Table(
        "gathered-cpu", {"length": "tokens", "pass": "pass"}, value="temporaries_mib"
    ),
    "skipping": Table(
        "skipping-cpu", {"implementation": "kind of attention"}, across="length"
    ),
    "decode_step": Table(
        "decode-cpu", CACHE | {"position": "tokens so far"}, {"what": "step"}
    ),
    "decode_attention": Table(
        "decode-cpu", CACHE | {"position": "tokens so far"}, {"what": "attention"}
    ),
    "decode_prompt": Table(
        "decode-cpu", CACHE | {"position": "tokens of the prompt"}, {"what": "prompt"}
    ),
    "h200": Table("attention-h200", SHAPE | {"mask": "mask", "pass": "pass"}),
    "h200_decode": Table("decode-h200", {"what": "what", "position": "tokens so far"}),
    "derivatives": Table("derivatives-cpu", DERIVATIVE, across="length"),
    "derivatives_memory": Table(
        "derivatives-cpu", DERIVATIVE, across="length", value="temporaries_mib"
    ),
    "start": Table("start-cpu", {"what": "what", "pass": "pass"}),
    "step": Table("step-cpu", {"implementation": "variant"}, across="batch_size"),
}


class Ratio(NamedTuple):
    """Our times as multiples of a peer's, in all cases that both computed."""

    what: str
    peer: str  # on the page
    file: str
    ours: str  # "implementation" of the file
    theirs: str
    where: Mapping[str, Any] = {}


ATTENTION = "attention in float32, 128 to 8,192 tokens"
OURS = "flax_mha.MultiHeadAttention"
RATIOS = [
    Ratio(
        f"{ATTENTION}, forward and gradients",
        "`jax.nn`",
        "attention-cpu",
        "flax_mha automatic",
        "jax.nn",
    ),
    Ratio(
        "the same, up to 16,384 tokens",
        "PyTorch's SDPA",
        "attention-cpu",
        "flax_mha automatic",
        "torch SDPA",
    ),
    Ratio(
        "attention in bfloat16, 2,048 and 8,192 tokens, forward and gradients",
        "`jax.nn`",
        "attention-bfloat16-cpu",
        "flax_mha automatic",
        "jax.nn",
        {"dtype": "bfloat16"},
    ),
    Ratio(
        "the same",
        "PyTorch's SDPA",
        "attention-bfloat16-cpu",
        "flax_mha automatic",
        "torch SDPA",
        {"dtype": "bfloat16"},
    ),
    Ratio(
        "a causal module, 128 to 8,192 tokens, forward and gradients",
        "Flax",
        "module-cpu",
        OURS,
        "flax.nnx.MultiHeadAttention",
    ),
    Ratio(
        "the same",
        "PyTorch",
        "module-cpu",
        OURS,
        "torch.nn.MultiheadAttention",
    ),
    Ratio(
        "ALiBi, causal masks and documents, forward",
        "compiled FlexAttention",
        "flex-cpu",
        "flax_mha automatic",
        "torch FlexAttention",
    ),
    Ratio(
        "64 listed keys per query, forward and gradients",
        "gathering the keys of all queries",
        "gathered-cpu",
        "flax_mha key_indices",
        "plain gather",
    ),
    Ratio(
        "a decoding step",
        "Flax, cache donated",
        "decode-cpu",
        "flax_mha",
        "Flax donated",
        {"what": "step"},
    ),
    Ratio(
        "attention over a cache",
        "PyTorch's SDPA",
        "decode-cpu",
        "flax_mha",
        "torch",
        {"what": "attention"},
    ),
    Ratio(
        "a prompt into an empty cache",
        "the same call without a cache",
        "decode-cpu",
        "flax_mha",
        "flax_mha without a cache",
        {"what": "prompt"},
    ),
]
# What tells the cases of a benchmark apart.
CASE = ("shape", "mask", "case", "pass", "dtype", "kv_heads", "position", "length")


def ratios() -> str:
    """The table of `RATIOS`."""
    lines = ["| what | compared with | times as long |", "|---|---|---:|"]
    for ratio in RATIOS:
        report = json.loads((RESULTS / f"{ratio.file}.json").read_text())
        ours, theirs = (
            {
                tuple(row.get(key) for key in CASE): row["ms"]
                for row in report["rows"]
                if row["implementation"] == name
                and ratio.where.items() <= row.items()
                and row.get("ms") is not None
            }
            for name in (ratio.ours, ratio.theirs)
        )
        found = [ours[case] / theirs[case] for case in ours.keys() & theirs]
        shown = f"{min(found):.2f} to {max(found):.2f}"
        lines.append(f"| {ratio.what} | {ratio.peer} | {shown} |")
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """The table, and under it where and how it was measured.

    Raises:
      ValueError: If the file has no such rows, or several for one place of the table.
    """
    report = json.loads((RESULTS / f"{table.file}.json").read_text())
    places, columns = _places(table, report["rows"])
    headings = [*table.keys.values(), *(_heading(table, column) for column in columns)]
    lines = [
        f"| {' | '.join(headings)} |",
        f"|{'---|' * len(table.keys)}{'---:|' * len(columns)}",
    ]
    for place, cells in places.items():
        shown = [_cell(cells.get(column), table.value) for column in columns]
        together = [str(part).replace(", ", ",\N{NO-BREAK SPACE}") for part in place]
        lines.append(f"| {' | '.join([*together, *shown])} |")
    versions = ", ".join(
        f"{name} {number}"
        for name, number in report["versions"].items()
        if name != "flax-mha"
    )
    machine = f"{report['device']}, {report['cores']} cores"
    measured = f"Measured on {report['date'][:10]}: {machine}; {versions}."
    return "\n".join([*lines, "", f"{measured} Command: `{report['command']}`.", ""])


def _places(
    table: Table, rows: list[Row]
) -> tuple[dict[tuple, dict[Any, Row]], list[Any]]:
    """Each line of the table with its cells by column, and the ordered columns."""
    places: dict[tuple, dict[Any, Row]] = {}
    columns: list[Any] = []
    for row in rows:
        column = row[table.across]
        if column in table.without or any(
            row.get(key) != wanted for key, wanted in table.where.items()
        ):
            continue
        cells = places.setdefault(tuple(row[key] for key in table.keys), {})
        if column in cells:
            raise ValueError(
                f"{table.file}.json: two rows for one cell of the table: {row}"
            )
        cells[column] = row
        columns += (
            [column]
            if column not in columns and row.get(table.value) is not None
            else []
        )
    if not columns:
        raise ValueError(
            f"{table.file}.json has no {table.value} where {dict(table.where)}"
        )
    return places, columns if table.across == "implementation" else sorted(columns)


def _heading(table: Table, column: Any) -> str:
    if table.across == "implementation":
        return str(column)
    return f"{table.across.replace('_', ' ')} {column}"


def _cell(row: Row | None, value: str) -> str:
    """Milliseconds with their spread, a ratio, or MiB; a dash where nothing was
    measured.
    """
    if row is None or row.get(value) is None:
        return "-"
    number = row[value]
    if value == "to_jax_nn":
        return f"{number:.2f}"
    if number >= 100:
        shown = f"{number:,.0f}"
    elif number < 10:
        shown = f"{number:.2g}"
    else:
        shown = f"{number:.0f}"
    if value == "ms":
        return f"{shown} ± {row['spread']:.0f}%"
    return shown
