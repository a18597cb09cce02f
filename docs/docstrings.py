"""What the pages say of public names: signatures as they stand in the source, and
docstrings as Markdown, because GitHub cannot read docstrings.
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "References")
WIDTH = 88  # of a signature in one line


def entry(path: str, obj: Any, level: int = 3) -> str:
    """The section of a public name: signature, file and docstring."""
    docstring = inspect.cleandoc(inspect.getdoc(obj) or "")
    file = Path(inspect.getfile(inspect.unwrap(_function(obj)))).relative_to(ROOT)
    return "\n".join(
        [
            f"{'#' * level} `{path}`",
            "",
            f"[Source](../../{file})",
            "",
            *_signature(path, obj),
            *markdown(docstring),
        ]
    )


def _function(obj: Any) -> Any:
    if isinstance(obj, property):
        return obj.fget
    return getattr(obj, "__func__", obj)


def _signature(path: str, obj: Any) -> list[str]:
    written = None
    if not isinstance(obj, property):
        written = arguments_as_written(obj)
    if written is None:
        return []
    arguments, returned = written
    result = ""
    if returned and not inspect.isclass(obj):
        result = f" -> {returned}"
    name = path.rpartition(".")[2]
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= WIDTH:
        lines = [line]
    else:
        lines = [f"{name}(", *(f"    {x}," for x in arguments), f"){result}"]
    return ["```text", *lines, "```", ""]


def markdown(docstring: str) -> Iterator[str]:
    """Converts a docstring in Google's style to lines of Markdown."""
    section = ""
    block: list[str] = []
    for line in [*docstring.splitlines(), "End:"]:
        found = re.fullmatch(r"(\w+):", line)
        if found and found[1] in (*SECTIONS, "End"):
            yield from _section(section, block)
            section = found[1]
            block = []
        else:
            block.append(line)


def _section(name: str, lines: list[str]) -> Iterator[str]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if name:
        yield from (f"**{name}**", "")
    if name == "Example":
        yield from ("```pycon", text, "```", "")
    elif name in ("Args", "Attributes", "Raises"):
        # Lines that are indented go on with the item before.
        for item in re.split(r"\n(?=\S)", text):
            first, _, rest = item.partition(":")
            yield f"- `{first}`: {' '.join(_inline(rest).split())}"
        yield ""
    elif text:
        yield from (_blocks(_inline(text)).strip("\n"), "")


def _blocks(text: str) -> str:
    """Converts literal blocks, which `::` announces, to fenced ones."""

    def fenced(found: re.Match) -> str:
        return f":\n\n```text\n{textwrap.dedent(found[1]).strip()}\n```\n"

    return re.sub(r"::\n\n((?: +.*\n|\n)+(?: +.*)?)", fenced, f"{text}\n")


def _inline(text: str) -> str:
    """Converts code, and names of pages to links."""
    linked = re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", text)
    return linked.replace("``", "`")


def arguments_as_written(obj: Any) -> tuple[list[str], str] | None:
    """Arguments and result as in the source: evaluated, `Float[Array, "*B T N H"]`
    would take lines.
    """
    if dataclasses.is_dataclass(obj) and "def __init__" not in source(obj):
        return fields_as_written(obj), ""
    if inspect.isclass(obj):
        function = obj.__init__
    else:
        function = inspect.unwrap(getattr(obj, "__func__", obj))
    if not inspect.isfunction(function):
        return None
    definition = ast.parse(source(function)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    given = definition.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    arguments = [
        one_argument(*pair)
        for pair in zip(positional, defaults, strict=True)
        if pair[0].arg not in ("self", "cls")
    ]
    if given.vararg or given.kwonlyargs:
        arguments.append(f"*{one_argument(given.vararg)}" if given.vararg else "*")
    arguments += [
        one_argument(*pair)
        for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    arguments += [f"**{one_argument(given.kwarg)}"] if given.kwarg else []
    returned = "" if definition.returns is None else ast.unparse(definition.returns)
    return arguments, returned.strip("'\"")


def one_argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    """An argument with its type and default."""
    return ast.unparse(argument) + (
        "" if default is None else f" = {ast.unparse(default)}"
    )


def fields_as_written(kind: type) -> list[str]:
    """What a dataclass is made of; each field is taken from the last class that writes
    it.
    """
    written: dict[str, ast.AnnAssign] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(source(base)).body[0].body
        written |= {
            ast.unparse(x.target): x for x in body if isinstance(x, ast.AnnAssign)
        }
    shown = []
    for field in dataclasses.fields(kind):
        # Flax's own.
        if (
            field.init
            and field.name in written
            and field.name not in ("parent", "name")
        ):
            line = f"{field.name}: {ast.unparse(written[field.name].annotation)}"
            default = written[field.name].value
            makers = ("field", "static", "with_axes")
            if isinstance(default, ast.Call) and ast.unparse(default.func).endswith(
                makers
            ):
                default = next(
                    (x.value for x in default.keywords if x.arg == "default"), None
                )
            shown.append(
                line if default is None else f"{line} = {ast.unparse(default)}"
            )
    return shown


@functools.cache
def source(obj: Any) -> str:
    """The source of a class or function, without its indentation."""
    return textwrap.dedent(inspect.getsource(obj))
