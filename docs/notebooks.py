"""Makes a notebook of each tutorial page and runs it and the demo's own: `python
docs/notebooks.py`.

Needs `pip install --group notebooks`. Outputs and pictures are stored. Names of pages
as arguments make only these.
"""

import ast
import json
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
REPOSITORY = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"][
    "urls"
]["Repository"]
FILES = f"{REPOSITORY}/blob/main"
RAW = f"{REPOSITORY.replace('github', 'raw.githubusercontent', 1)}/main"
PAGES = ("quickstart", "masks", "inference", "derivatives")
DEMO = DOCS / "train_demo.ipynb"
FIRST = """\
# In a clone of the repository, `pip install -e .` installs flax_mha.
import flax_mha

%matplotlib inline"""

# Of what is no array, or one number.
SHOWN = {
    "loss": "loss",
    **{name: f"jax.tree.map(jnp.shape, {name})" for name in ("cache", "variables")},
}


def cells(page: str) -> list[tuple[str, str]]:
    """The page as cells: blocks of Python are code, the text between them Markdown
    whose links work everywhere.
    """
    text = re.sub(
        r"^(?:<!-- meta .*|\[This page as a notebook.*)\n",
        "",
        (DOCS / f"{page}.md").read_text(),
        flags=re.M,
    )
    text = re.sub(
        r"\]\((?!https?:|#)([^)]+)\)",
        lambda link: f"]({_address(FILES, link[1])})",
        text,
    )
    text = re.sub(
        r'(src|srcset)="([^"]+)"',
        lambda link: f'{link[1]}="{_address(RAW, link[2])}"',
        text,
    )
    made = [("code", FIRST)]
    for i, part in enumerate(
        re.split(r"^```python\n(.*?)^```\n?", text, flags=re.DOTALL | re.MULTILINE)
    ):
        if not i % 2:
            part = re.sub(r"\n{3,}", "\n\n", part.strip("\n"))
        else:
            part = _showing(part.strip())
        if part:
            made.append(("code" if i % 2 else "markdown", part))
    return made


def _address(start: str, target: str) -> str:
    """The address of a file that a page names by a relative path, perhaps with an
    anchor.
    """
    return f"{start}/{os.path.normpath(f'docs/{target}')}"


def _showing(block: str) -> str:
    """A block of a page with a last line that shows what it computed, unless it prints
    or draws by itself.
    """
    last = ast.parse(block).body[-1]
    if "print(" in block or isinstance(last, ast.Expr):
        return block
    value = last.value if isinstance(last, ast.Assign) else None
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        recipe = ast.unparse(keyword.value)
        if keyword.arg is None and recipe.startswith("recipes."):
            return f'{block}\nplot_mask({recipe}["mask"], 200, 200).figure'
    if isinstance(last, ast.Assert):
        test = last.test.values[0] if isinstance(last.test, ast.BoolOp) else last.test
        shown = test.left if isinstance(test, ast.Compare) else test
        return f"{block}\n{ast.unparse(shown)}"
    if isinstance(last, ast.Assign):
        target = last.targets[0]
        name = ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)
        return f"{block}\n{SHOWN.get(name, f'{name}.shape')}"
    return block


def notebook(made: list[tuple[str, str]]) -> dict:
    """These cells as a notebook without outputs."""
    empty = {"execution_count": None, "outputs": []}
    listed = [
        {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
            **(empty if kind == "code" else {}),
        }
        for number, (kind, text) in enumerate(made)
    ]
    metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
    }
    return {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(made: dict, path: Path) -> None:
    """Runs a notebook in a new kernel, outside the clone, and writes it with its
    outputs.
    """
    import nbformat
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = str(DOCS.parent)
    read = nbformat.reads(json.dumps(made), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            read,
            timeout=600,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        ).execute()
    read.metadata.pop("language_info", None)
    path.write_text(nbformat.writes(read).rstrip("\n") + "\n")


if __name__ == "__main__":
    for page in sys.argv[1:] or (*PAGES, DEMO.stem):
        is_demo = page == DEMO.stem
        made = json.loads(DEMO.read_text()) if is_demo else notebook(cells(page))
        run(made, DEMO if is_demo else DOCS / "notebooks" / f"{page}.ipynb")
