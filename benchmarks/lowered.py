"""Compares the programs that JAX lowers for more than a hundred calls, before and after
a change.

    python benchmarks/lowered.py OLD [NEW] [--only WORDS]

OLD and NEW are git revisions; without NEW, the working tree is compared with OLD. The
calls are those of `lowered_calls.py` in the working tree. Nothing is compiled and
nothing runs: calls for GPUs, TPUs and eight devices are lowered on a CPU, too.

For each call it prints one of:

  same                 equal texts
  same up to names     equal but for names, and the order of functions
  same operations      the same operations with the same shapes, counted as often as
                       functions are called; names, the order of operations, arguments
                       and results, and who calls whom may differ
  DIFFERENT            and which operations NEW has more (+) or less often (-)
  not in OLD           OLD raises an error for this call

The exit code is 1 if anything is DIFFERENT, or raises an error only in NEW. Equal
operations may still be connected differently, so tests have to agree, too.
"""

import argparse
import base64
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
# Each group of calls is lowered by a process of its own.
GROUPS = ("cpu", "mesh", "cuda", "tpu")
SAME = "same"
SAME_BUT_NAMES = "same up to names"
SAME_OPERATIONS = "same operations"
DIFFERENT = "DIFFERENT"
LINES = 12  # of operations to print for a call that differs
Texts = dict[str, str]

# In the text of a program.
FUNCTION = re.compile(r'  func\.func \w+ @("[^"]*"|[\w.$-]+)(.*?)\n  }\n', re.DOTALL)
SYMBOL = re.compile(r'@("[^"]*"|[\w.$-]+)')
VALUE = re.compile(r"%[\w.$-]+")
NUMBER_OF_RESULT = re.compile(r"%#\d+")
TYPE = re.compile(r"tensor<[^>]*>")
CALL_OR_RETURN = re.compile(r"^(%\S* = )?(func\.)?(call|return)\b")
# Operations whose arguments or results are a list in any order.
LIST = re.compile(r"stablehlo\.(while|return|case)|sdy\.|^\^|^}")
PUNCTUATION = re.compile(r"[%=:,()\s]+")
# Where results come from in the caller's tree: a name.
RESULT_INFO = re.compile(r'jax\.result_info = "[^"]*"')
KERNEL_OF_TPU = re.compile(r"(?<=\\22body\\22: \\22)[\w+/=]+")


class Function(NamedTuple):
    """A function of a lowered program: its first line after the name, and the others,
    without indentation.
    """

    head: str
    body: list[str]


class Module(NamedTuple):
    """A lowered program."""

    functions: dict[str, Function]
    outside: list[str]  # all other lines


def module_of(text: str) -> Module:
    text = RESULT_INFO.sub("", text)
    functions = {}
    for name, function in FUNCTION.findall(text):
        head, *body = function.split("\n")
        functions[name] = Function(head, [line.strip() for line in body])
    first, *others = FUNCTION.sub("", text).split("\n")
    # The module's name is that of the user's function.
    outside = [SYMBOL.sub("@", first, count=1), *others]
    return Module(functions, outside)


def without_names(module: Module) -> list[str]:
    """A text without the names of functions and values; it does not depend on the order
    of functions, either.
    """
    digests: dict[str, str] = {}

    def digest(match: re.Match) -> str:
        name = match[1]
        if name not in module.functions:
            return match[0]
        if name not in digests:
            text = "\n".join(lines_of(module.functions[name]))
            digests[name] = hashlib.sha256(text.encode()).hexdigest()
        return f"@{digests[name]}"

    def lines_of(function: Function) -> list[str]:
        names: dict[str, str] = {}

        def number(match: re.Match) -> str:
            return names.setdefault(match[0], f"%{len(names)}")

        lines = []
        for line in (function.head, *function.body):
            lines.append(SYMBOL.sub(digest, VALUE.sub(number, line)))
        return lines

    return module.outside + lines_of(module.functions["main"])


def operations_of(module: Module) -> Counter[str]:
    """How often each operation, with attributes and shapes, is in a program in which
    every call of a function is replaced by what the function does.
    """
    known: dict[str, Counter[str]] = {}

    def without_name(match: re.Match) -> str:
        return "@" if match[1] in module.functions else match[0]

    def of_function(name: str) -> Counter[str]:
        if name in known:
            return known[name]
        counts: Counter[str] = Counter()
        for line in module.functions[name].body:
            for callee in SYMBOL.findall(line):
                if callee in module.functions:
                    counts += of_function(callee)
            line = SYMBOL.sub(without_name, VALUE.sub("%", line))
            line = NUMBER_OF_RESULT.sub("%", line)
            if CALL_OR_RETURN.match(line):
                continue
            if LIST.search(line):
                types = sorted(TYPE.findall(line))
                words = PUNCTUATION.sub(" ", TYPE.sub("", line)).strip()
                line = f"{words}: {', '.join(types)}"
            counts[line] += 1
        known[name] = counts
        return counts

    # Arguments and results are at the value's mark, and at the type.
    arguments, _, results = module.functions["main"].head.partition(" -> ")
    operations = Counter(module.outside) + of_function("main")
    for argument in VALUE.split(arguments)[1:]:
        operations[f"argument{argument.rstrip('), ')}"] += 1
    for result in results.split("tensor<")[1:]:
        operations[f"result: tensor<{result.rstrip('){, ')}"] += 1
    return operations


def compared(old: str, new: str) -> tuple[str, list[str]]:
    """The verdict on two programs, and the operations that differ."""
    if old == new:
        return SAME, []
    before = module_of(old)
    after = module_of(new)
    if without_names(before) == without_names(after):
        return SAME_BUT_NAMES, []
    operations_before = operations_of(before)
    operations_after = operations_of(after)
    differences = []
    for sign, counts in (
        ("-", operations_before - operations_after),
        ("+", operations_after - operations_before),
    ):
        differences += [f"{sign}{n} {line}" for line, n in counts.most_common()]
    if not differences:
        return SAME_OPERATIONS, []
    return DIFFERENT, differences


# Lowering: in a process whose PYTHONPATH is the revision.


def lowered(program: Any, platform: str) -> str:
    """The program's text, without locations."""
    import jax

    mesh = contextlib.nullcontext()
    if program.mesh is not None:
        mesh = jax.set_mesh(program.mesh)
    with mesh:
        traced = jax.jit(program.function).trace(*program.arguments)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    return KERNEL_OF_TPU.sub(digest_of_kernel, text)


def digest_of_kernel(match: re.Match) -> str:
    """A TPU kernel's digest; its bytes also hold the lines of the code it came from."""
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu
    from jax._src.lib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context:
        module = ir.Module.parse(base64.b64decode(match[0]))
        text = module.operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def as_on(platform: str, root: Path) -> Iterator[None]:
    """As on one such device; the revision's own `targets.py` knows how."""
    if platform == "cpu":
        yield
        return
    sys.path.insert(0, str(root / "benchmarks"))
    import targets

    name = "gpu" if platform == "cuda" else platform
    with targets.compiling_for(targets.Target(name, [])):
        yield


def lower(group: str, only: str) -> dict[str, Texts]:
    """The texts of a group's calls, and the errors of those that raise one."""
    from lowered_calls import calls_of

    import flax_mha

    root = Path(flax_mha.__file__).parent.parent
    if str(root) != os.environ["PYTHONPATH"]:
        raise RuntimeError(f"flax_mha was imported from {root}")
    texts = {}
    errors = {}
    platform = "cpu" if group == "mesh" else group
    with as_on(platform, root):
        for name, call in calls_of(group).items():
            if only not in name:
                continue
            try:
                texts[name] = lowered(call(), platform)
            except Exception as error:  # whatever it is, the report shows it
                lines = str(error).strip().splitlines() or [""]
                errors[name] = f"{type(error).__name__}: {lines[0]}"
    return {"texts": texts, "errors": errors}


# The comparison.


@contextlib.contextmanager
def checkout(revision: str | None) -> Iterator[Path]:
    """A folder with the revision's files; None is the working tree."""
    if revision is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "revision"
        add = ["add", "--quiet", "--detach", str(root), revision]
        subprocess.run([*git, *add], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def lower_apart(root: Path, group: str, only: str) -> dict[str, Texts]:
    """`lower`, in a process of its own."""
    devices = "8" if group == "mesh" else "1"
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "0",  # sets have the same order
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": devices,
        "XLA_FLAGS": "",
    }
    command = [sys.executable, __file__, "--lower", group, "--only", only]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


def report(old: dict[str, Texts], new: dict[str, Texts]) -> Counter[str]:
    """Prints the verdict on each call; counts verdicts."""
    verdicts: Counter[str] = Counter()
    names = [*old["texts"], *old["errors"]]
    for name in names:
        details: list[str] = []
        if name in old["errors"]:
            verdict = "not in OLD"
            details = [old["errors"][name]]
        elif name in new["errors"]:
            verdict = DIFFERENT
            details = [f"NEW raises {new['errors'][name]}"]
        else:
            verdict, details = compared(old["texts"][name], new["texts"][name])
        verdicts[verdict] += 1
        print(f"{verdict:16}  {name}")
        for line in details[:LINES]:
            print(f"    {line[:160]}")
        if len(details) > LINES:
            print(f"    and {len(details) - LINES} more")
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", help="git revision")
    parser.add_argument("new", nargs="?", help="git revision; default: working tree")
    parser.add_argument("--only", default="", help="calls that contain these words")
    parser.add_argument("--lower", choices=GROUPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lower:
        print(json.dumps(lower(options.lower, options.only)))
        return 0
    if options.old is None:
        parser.error("OLD is missing: pass a git revision")
    verdicts: Counter[str] = Counter()
    with (
        checkout(options.old) as old_root,
        checkout(options.new) as new_root,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):

        def start(root: Path, group: str) -> concurrent.futures.Future:
            return pool.submit(lower_apart, root, group, options.only)

        runs = [(start(old_root, x), start(new_root, x)) for x in GROUPS]
        for old, new in runs:
            verdicts += report(old.result(), new.result())
    print(", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()))
    return 1 if verdicts[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())
