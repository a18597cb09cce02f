"""Pages, errors and help texts avoid constructions that read as translated. `BANNED` says what to write instead."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Regular expressions, and what a native engineer writes. Words that are often right, such as "where", are not listed.
BANNED = {
    r"alike": "equally, in the same way",
    r"alone": "only",
    r"anew": "again",
    r"as \w+ (?:does|do)": "like Flax",
    r"besides": "in addition to, also",
    r"heed(?:s|ed)?": "follow, use",
    r"in turn": "one after another, cyclically",
    r"lest": "so that ... not",
    r"nobody": "no query, no one",
    r"(?:quer(?:y|ies)|keys?|masks?|patch(?:es)?|rows?|tokens?) (?:sees?|meets?)": "attend to",
    r"sees": "attends to",
    r"speaks? of": "describe, use",
    r"stands?": "is, is at",
    r"that of": "repeat the noun",
    r"told": "given, distinguished",
    r"what is": "name the thing",
}
# Right uses of these words.
ALLOWED = ["nobody else", "nobody measured"]

PAGES = ["*.md", ".github/**/*.md", ".github/ISSUE_TEMPLATE/*.yml", "docs/*.md", "docs/api/*.md"]
SOURCES = ["flax_mha/**/*.py", "train_demo/**/*.py", "benchmarks/*.py", "examples/*.py"]
# What `docs/write_pages.py` writes, blocks of code, pictures with the texts that describe them, and code in a line.
NO_PROSE = r"<!-- begin: .*?<!-- end -->|```.*?```|^    .*?$|^<picture>.*?$|`[^`\n]+`"


def files(patterns: list[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def pages() -> Iterator[tuple[str, str]]:
    """Each page of the documentation with its prose."""
    for path in files(PAGES):
        yield str(path.relative_to(ROOT)), re.sub(NO_PROSE, "{}", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def nodes(kind: type) -> Iterator[tuple[str, ast.AST]]:
    for path in files(SOURCES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def strings(node: ast.AST | None) -> Iterator[str]:
    """The string literals in an expression, with {} for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from strings(part.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif node is not None:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def errors() -> Iterator[tuple[str, str]]:
    """The texts of errors and warnings that are written where they are raised."""
    yield from ((place, text) for place, node in nodes(ast.Raise) for text in strings(node.exc))
    for place, node in nodes(ast.Call):
        if getattr(node.func, "attr", "") in ("error", "warn"):
            yield from ((place, text) for expression in node.args for text in strings(expression))


def help_texts() -> Iterator[tuple[str, str]]:
    """The texts that argparse prints with `--help`."""
    for place, node in nodes(ast.Call):
        for keyword in node.keywords:
            if keyword.arg in ("help", "description", "epilog"):
                yield from ((place, text) for text in strings(keyword.value))


@pytest.mark.core
@pytest.mark.parametrize("texts", [pages, errors, help_texts])
def test_texts_are_plain_english(texts):
    found = []
    for place, text in texts():
        line = " ".join(re.sub("|".join(ALLOWED), "{}", " ".join(text.split())).split())
        for banned, better in BANNED.items():
            for match in re.finditer(rf"\b{banned}\b", line, re.IGNORECASE):
                around = line[max(0, match.start() - 40) : match.end() + 40]
                found.append(f"{place}: {match[0]!r} in {around!r}; better: {better}")
    assert not found, "\n".join(found)
