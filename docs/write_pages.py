"""Writes into the pages what the repository knows, and draws their pictures: `python
docs/write_pages.py`.

A part that is written begins with a comment that says what it is, which neither GitHub
nor Sphinx shows, and ends with `<!-- end -->`:

    <!-- begin: source NAME -->     a link to the source of a recipe
    <!-- begin: thumbnails -->      small pictures of all recipes, which link to them
    <!-- begin: table NAME -->      a table of benchmarks, from `tables.py`
    <!-- begin: ratios -->          our times as multiples of others'
    <!-- begin: names PATH -->      the names of families in a table of the tests
    <!-- begin: layouts -->         the layouts of PyTorch's weights
    <!-- begin: conformance -->     how many calls other functions compute
    <!-- begin: curves PATH -->     the picture of time and memory, and what it says
    <!-- begin: reference ... -->   what GitHub shows in place of directives for Sphinx
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import docstrings  # noqa: E402
import pictures  # noqa: E402
import tables  # noqa: E402

from flax_mha import convert, recipes  # noqa: E402

# A part never holds another: one whose end is missing is left as it is, and a test
# finds it.
PART = re.compile(
    r"^<!-- begin: (\w+)(.*?) ?-->\n((?:(?!<!-- begin).)*?)<!-- end -->",
    re.DOTALL | re.MULTILINE,
)


def written() -> dict[Path, str]:
    """Each page that has such parts, with what belongs into them."""
    pages = {
        path: path.read_text()
        for path in [
            ROOT / "README.md",
            *sorted(DOCS.rglob("*.md")),
            *sorted(tables.RESULTS.glob("*.md")),
        ]
    }
    return {
        path: PART.sub(_part, text) for path, text in pages.items() if PART.search(text)
    }


def _part(found: re.Match[str]) -> str:
    kind, argument, _ = found.groups()
    begin = found[0][: found.start(3) - found.start()]
    return f"{begin}\n{KINDS[kind](argument.strip()).strip()}\n\n<!-- end -->"


def _source(name: str) -> str:
    recipe = inspect.unwrap(getattr(recipes, name))
    file = Path(inspect.getfile(recipe)).relative_to(ROOT)
    _, line = inspect.getsourcelines(recipe)
    return f"[Source of `{name}`](../{file}#L{line})"


def _thumbnails(_: str) -> str:
    text = (DOCS / "gallery.md").read_text()
    first = r"^### (.*)\n\n<picture>.*?src=\"(\S+)-light.svg\""
    links = []
    for title, path in re.findall(first, text, re.MULTILINE):
        anchor = re.sub("[^a-z0-9-]", "", title.lower().replace(" ", "-"))
        links.append(f'<a href="#{anchor}">{picture(path, title, 90)}</a>')
    return "\n".join(links)


def _table(name: str) -> str:
    return tables.markdown(tables.TABLES[name])


def _ratios(_: str) -> str:
    return tables.ratios()


def _names(path: str) -> str:
    """The first columns of the rows that end with a difference, and so ran."""
    table = (ROOT / path).read_text()
    names = re.findall(r"^\| (`.+?`) \|.* [\d.e-]+ \|$", table, re.MULTILINE)
    return ", ".join(names) + "."


def _conformance(_: str) -> str:
    """The last row of the list of calls, with a row for each function."""
    text = (ROOT / "benchmarks" / "results" / "conformance.md").read_text()
    names, totals = (
        re.search(rf"^\| {first} \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
        for first in ("call", r"\*total\*")
    )
    kinds = re.findall(r"([a-z ]+) \d+", totals[0])
    headings = " | ".join(kind.strip() for kind in kinds)
    lines = [f"| function | {headings} |", f"|---|{'---:|' * len(kinds)}"]
    for name, total in zip(names, totals, strict=True):
        counts = " | ".join(re.findall(r"\d+", total))
        lines.append(f"| {name} | {counts} |")
    return "\n".join(lines)


def _layouts(_: str) -> str:
    lines = ["| layout | keys of the weights |", "|---|---|"]
    for name, layout in convert.LAYOUTS.items():
        weights = [
            key for key, paths in layout.stacks.items() if paths[0].endswith("kernel")
        ]
        lines.append(f"| `{name}` | {', '.join(f'`{key}`' for key in weights)} |")
    return "\n".join(lines)


def _curves(folder: str) -> str:
    rows = pictures.curves()
    # The longest that Flax computed, and the longest of all.
    measured = [row["length"] for row in rows if row["seconds"] is not None]
    of_flax = [
        row["length"]
        for row in rows
        if row["name"] == "Flax" and row["seconds"] is not None
    ]
    alt = "Time and memory for one gradient vs. number of tokens."
    for length in (max(of_flax), max(measured)):
        shown = [_measured(row) for row in rows if row["length"] == length]
        alt += f" At {length} tokens: {', '.join(shown)}."
    return picture(f"{folder}/hero", alt, 680)


def _measured(row: dict[str, Any]) -> str:
    """The seconds and MiB of one library, or what it would have needed."""
    if row["seconds"] is None:
        return f"{row['name']} not run, it needs {pictures.amount(row['needs'], 'mib')}"
    seconds = pictures.amount(row["seconds"], "seconds")
    if row["mib"] is None:
        return f"{row['name']} {seconds}"
    return f"{row['name']} {seconds} and {pictures.amount(row['mib'], 'mib')}"


def picture(path: str, alt: str, width: int) -> str:
    """A picture in its light and its dark variant."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
    light = f'<img alt="{alt}" src="{path}-light.svg" width="{width}">'
    return f"<picture>{dark}{light}</picture>"


def _reference(directives: str) -> str:
    """Signatures and docstrings, because GitHub cannot read docstrings."""
    entries = []
    owner: Any = None
    path = ""
    for line in directives.splitlines():
        directive = re.match(r"( *)\.\. auto(\w+):: (\S+)$", line)
        members = re.match(r" +:members: (.+)$", line)
        names: list[str] = []
        if members:
            names = members[1].split(", ")
        elif directive and directive[1]:
            names = [directive[3]]
        for name in names:
            method = inspect.getattr_static(owner, name)
            entries.append(docstrings.entry(f"{path}.{name}", method, level=4))
        if not directive or directive[1]:
            continue
        path = directive[3]
        module, _, last = path.rpartition(".")
        if directive[2] != "module":
            owner = getattr(importlib.import_module(module), last)
            entries.append(docstrings.entry(path, owner))
        elif path == recipes.__name__:
            for name in recipes.__all__:
                recipe = getattr(recipes, name)
                entries.append(docstrings.entry(f"{path}.{name}", recipe))
    return "\n".join(entries)


KINDS = {
    "source": _source,
    "thumbnails": _thumbnails,
    "table": _table,
    "ratios": _ratios,
    "names": _names,
    "layouts": _layouts,
    "conformance": _conformance,
    "curves": _curves,
    "reference": _reference,
}


if __name__ == "__main__":
    drawn = {DOCS / "_static" / name: text for name, text in pictures.draw().items()}
    for path, text in {**written(), **drawn}.items():
        path.write_text(text)
    for path in (DOCS / "_static").glob("*.svg"):
        if path not in drawn:
            path.unlink()
