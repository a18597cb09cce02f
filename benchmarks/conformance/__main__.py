"""Checks attention functions against the equation in float64: `python
benchmarks/conformance PACKAGE.FUNCTION`.

It lists which calls a function computes, which raise an error, which follow another
convention, and which are wrong. The function may take any of the arguments of
`flax_mha.dot_product_attention`. The reference and the table of cases are those of the
tests.
"""

import argparse
import importlib.metadata
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from conformance.checks import CHECKS, Result, check  # noqa: E402
from reference_cases import CASES  # noqa: E402

SYMBOLS = {
    "computes": "yes",
    "refuses": "-",
    "other convention": "other",
    "wrong": "WRONG",
}
CELLS = SYMBOLS | {"other convention": "*other*", "wrong": "**WRONG**"}  # in Markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns exit status 1 if a check found a wrong answer, else 0.
    Wrong arguments exit with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python benchmarks/conformance",
        description="Checks attention functions against the equation in float64: "
        "outputs, gradients, masked NaN, dtypes and transformations. A function may "
        "support any subset of the arguments of flax_mha.dot_product_attention; calls "
        'that need other arguments count as "refuses". Exits with status 1 if any '
        "result is wrong.",
    )
    parser.add_argument(
        "functions",
        nargs="+",
        metavar="PACKAGE.FUNCTION",
        help="for example jax.nn.dot_product_attention",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print a Markdown page for the documentation",
    )
    given = parser.parse_args(arguments)
    functions = {name: _find(parser, name) for name in given.functions}
    columns = {name: list(_run(name, function)) for name, function in functions.items()}
    for name, results in columns.items():
        # Other checks expect errors, so a function that always fails passes them.
        calls = [result for result in results if result.name in CASES]
        if all(result.kind == "refuses" for result in calls):
            detail = calls[0].detail if calls else ""
            parser.error(
                f"{name} must be an attention function, but every call raised an "
                f"error; the first was: {detail}"
            )
    lines = _markdown(columns) if given.markdown else _text(columns)
    print("\n".join(lines))
    kinds: set[str] = set()
    for results in columns.values():
        kinds |= {result.kind for result in results}
    return int("wrong" in kinds)


def _find(parser: argparse.ArgumentParser, name: str) -> Callable[..., Any]:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"PACKAGE.FUNCTION must be importable, but got {name!r}: {error}")
    if not callable(found):
        parser.error(
            f"PACKAGE.FUNCTION must be a function, but {name!r} is a "
            f"{type(found).__name__}"
        )
    return found


def _run(name: str, function: Callable[..., Any]) -> Sequence[Result]:
    results = []
    for number, question in enumerate(CHECKS, 1):
        # Progress, in one line that is written over.
        if sys.stderr.isatty():
            print(
                f"\r\033[K{name} {number}/{len(CHECKS)} {question}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        results.append(check(function, question))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return results


def _versions(names: Sequence[str]) -> str:
    packages = dict.fromkeys(["jax", *(name.partition(".")[0] for name in names)])
    found = importlib.metadata.packages_distributions()
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        if name in found:
            # A module's distribution may have another name.
            version = importlib.metadata.version(found[name][0])
            versions.append(f"{name} {version}")
    return f"{', '.join(versions)}, on {jax.devices()[0].device_kind}"


def _counts(results: Sequence[Result]) -> str:
    kinds = [result.kind for result in results]
    return ", ".join(f"{kind} {kinds.count(kind)}" for kind in SYMBOLS)


def _text(columns: dict[str, list[Result]]) -> list[str]:
    lines = [_versions(list(columns))]
    width = max(map(len, CHECKS))
    for name, results in columns.items():
        lines += ["", f"{name}: {_counts(results)}"]
        for x in results:
            line = f"  {x.name:{width}}  {SYMBOLS[x.kind]:5}  {x.detail}"
            lines.append(line.rstrip())
    return lines


def _markdown(columns: dict[str, list[Result]]) -> list[str]:
    lines = ["# What attention functions compute", ""]
    lines += [
        "Each row is a call. Its output and gradients are compared with a float64 "
        "reference that follows the rules in",
        "[Semantics](../../docs/semantics.md).",
        "",
        "- yes: correct up to rounding error.",
        "- `-`: raises an error, in most cases because the function has no such "
        "argument.",
        "- *other*: correct, but follows another convention. Queries whose keys are "
        "all masked return the mean of the",
        "  values or NaN instead of 0, or the soft cap applies to the sum of score "
        "and bias.",
        "- **WRONG**: wrong numbers, results affected by masked NaN, or no error for "
        "invalid input.",
        "",
        "This page is the output of the following command, which requires every "
        "package that it names:",
        "",
        f"    python benchmarks/conformance --markdown {' '.join(columns)}",
        "",
        f"The versions were {_versions(list(columns))}.",
        "",
        "| call | " + " | ".join(f"`{name}`" for name in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for row in zip(*columns.values(), strict=True):
        lines.append(f"| {row[0].name} | {' | '.join(CELLS[x.kind] for x in row)} |")
    totals = [_counts(results) for results in columns.values()]
    lines.append(f"| *total* | {' | '.join(totals)} |")
    titles = {"other convention": "Other conventions in", "wrong": "Wrong in"}
    for name, results in columns.items():
        for kind, title in titles.items():
            found = [f"- {x.name}: {x.detail}" for x in results if x.kind == kind]
            if found:
                lines += ["", f"## {title} `{name}`", "", *found]
    return lines


if __name__ == "__main__":
    sys.exit(main())
