"""The architecture: imports have one direction, and the package needs only JAX and
Flax.
"""

import ast
import dataclasses
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flax_mha._src.call.call import Call

pytestmark = pytest.mark.core
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flax_mha"

# All code is in `_src`. Each folder or file there imports only those to its left, and a
# folder its own files.
FOLDERS = [
    "__init__",
    "core",
    "masks",
    "rope",
    "call",
    "guard",
    "math",
    "plan",
    "engines",
    "explanation",
]
FOLDERS += [
    "distributed",
    "run",
    "attention",
    "cache",
    "modules",
    "nnx",
    "linen",
    "recipes",
]
FOLDERS += ["convert", "plot"]
ORDER = [f"_src.{name}" for name in FOLDERS]
# Users import these. They re-export names of `_src`, which imports none of them.
PUBLIC = {
    "__init__",
    "cache",
    "convert",
    "linen",
    "masks",
    "nnx",
    "plot",
    "recipes",
    "rope",
}
# `RoPE.from_config` imports `convert`, in the function.
EXCEPTION = ("_src.rope", "_src.convert")


def imports(path):
    """The dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                path = ROOT / node.module.replace(".", "/") / alias.name
                is_module = path.with_suffix(".py").exists() or path.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


FILES = {
    str(x.relative_to(PACKAGE).with_suffix("")).replace("/", "."): x
    for x in sorted(PACKAGE.rglob("*.py"))
}


@functools.cache
def every_import():
    return {name: frozenset(imports(path)) for name, path in FILES.items()}


def part_of(name):
    """The entry of ORDER that a file, without "flax_mha.", belongs to."""
    return ".".join(name.split(".")[: 2 if name.startswith("_src.") else 1])


def test_imports_point_to_the_left():
    for name, imported in every_import().items():
        if name in PUBLIC:
            continue
        own = part_of(name)
        allowed = set(ORDER[: ORDER.index(own) + 1])
        if own == EXCEPTION[0]:
            allowed.add(EXCEPTION[1])
        inside = {
            part_of(n.removeprefix("flax_mha."))
            for n in imported
            if n.startswith("flax_mha")
        }
        assert inside <= allowed, name


def test_public_modules_only_re_export():
    assert {name for name in FILES if not name.startswith("_src")} == PUBLIC
    for name in PUBLIC - {"__init__"}:
        docstring, *statements, names = ast.parse(FILES[name].read_text()).body
        assert isinstance(docstring.value, ast.Constant), name
        assert all(
            isinstance(x, ast.ImportFrom) and x.module.startswith("flax_mha._src.")
            for x in statements
        ), name
        assert names.targets[0].id == "__all__", name
        assert sorted(ast.literal_eval(names.value)) == sorted(
            alias.name for x in statements for alias in x.names
        )


def test_no_private_file_and_no_cycle():
    assert not [
        name
        for name in FILES
        if re.search(r"(^|\.)_(?!_(init|main)__)", name.removeprefix("_src."))
    ]
    graph = {
        name: {n.removeprefix("flax_mha.") for n in names} & set(FILES)
        for name, names in every_import().items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_field_of_a_call_is_static_or_names_its_axes():
    """An array without axes would not be cut with the others."""
    plain = [x.name for x in dataclasses.fields(Call) if not x.metadata]

    # A mask names the axes of its arrays; the others are made once a call is cut.
    assert plain == ["mask", "nonfinite", "tiles"]


def test_only_public_names_of_jax_and_flax_are_needed():
    allowed = {
        "flax",
        "flax_mha",
        "jax",
        "jaxtyping",
        "ml_dtypes",
        "numpy",
        *sys.stdlib_module_names,
    }
    for name, imported in every_import().items():
        assert {n.split(".")[0] for n in imported} <= allowed | (
            {"matplotlib"} if name == "_src.plot" else set()
        ), name
        assert not [n for n in imported if re.search(r"^(jax|flax)\..*\b_", n)], name


# The classes of jaxprs, the fields of their equations, and names of JAX's primitives,
# all of which JAX changes from time to time.
JAXPRS = (
    r"ClosedJaxpr|JaxprTracer|\.(jaxpr|eqns|primitive|invars|outvars|constvars|aval)\b"
    r"|[\"'](custom_[jv][jv]p_call|dynamic_slice|gather|select_n|pure_callback)[\"']"
)


def test_one_file_reads_jaxprs():
    users = [name for name in FILES if re.search(JAXPRS, FILES[name].read_text())]
    assert users == ["_src.core.jaxprs"]


def test_the_demo_uses_the_public_names():
    for path in (ROOT / "train_demo").glob("*.py"):
        if path.name == "torch_model.py":  # the export's model; nothing imports it
            assert {n.split(".")[0] for n in imports(path)} == {"torch"}
        else:
            assert not [
                n
                for n in imports(path)
                if re.match(r"flax_mha\._|torch|train_demo\.torch_model", n)
            ]


def test_importing_the_package_brings_no_peer_and_no_demo():
    others = "{'torch', 'matplotlib', 'train_demo'}"
    code = f"import flax_mha, sys; print(*sorted({others} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )
