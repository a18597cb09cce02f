"""Every block of every page runs, links lead somewhere, and reference and gallery leave nothing out."""

import importlib
import inspect
import json
import re
from pathlib import Path

import jax
import pytest
from marks import with_core

import flax_mha
from flax_mha import recipes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if "_generated" not in page]
QUICKSTART = ("README.md", "docs/quickstart.md")
# The blocks of the one need runs of the demo, whose own tests make them; those of the other eight devices.
ELSEWHERE = ("docs/training.md", "docs/devices.md")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", with_core([page for page in PAGES if blocks(page) and page not in ELSEWHERE], *QUICKSTART)
)
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    """One after the other, as in one session of a reader, with JAX as it comes."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(page):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(block, page, "exec"), names)


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    """Only blocks that begin with ```python run, so there are no others of Python, such as indented ones of a list."""
    text = (ROOT / page).read_text()
    assert len(re.findall(r"```\s*(?:python|py)\b", text)) == len(blocks(page))
    assert ">>>" not in text


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page):
    """Those between pages with their anchors are checked by Sphinx, the README's by nobody else."""
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text()):
        assert re.match(r"https?://", target) or (folder / target).exists(), target


@pytest.mark.core
def test_every_known_issue_is_listed_linked_and_asserted():
    text = (DOCS / "known-issues.md").read_text()
    _, *entries = re.split(r"^### ", text, flags=re.MULTILINE)
    assert re.findall(r"^\| \[(.*)\]\(#\S+\) \|", text, re.MULTILINE) == [x.partition("\n")[0] for x in entries]
    for entry in entries:
        assert re.search(r"github\.com/\S+/(?:issues|pull)/\d+|No issue that we know of", entry), entry
        assert re.search(r"```python\n[^`]*^ *assert ", entry, re.MULTILINE), entry


MODULES = ("cached_attention", "context_parallel", "convert", "kv_cache", "linen", "masks", "plot", "recipes", "rope")
# Public by their names alone: what combined masks are, and steps of what the reference does name.
INTERNAL = ["And", "Or", "Not", "Occupancy", "WrittenMask"]


def public_names():
    """What users may import: at the top level, and of each public module what it defines or lists."""
    for module in (flax_mha, *(importlib.import_module(f"flax_mha.{name}") for name in MODULES)):
        for name in getattr(module, "__all__", vars(module)):
            x = vars(module)[name]
            own = (inspect.isclass(x) or inspect.isfunction(x)) and x.__module__.startswith(module.__name__)
            if not name.startswith("_") and (own or hasattr(module, "__all__")):
                yield name, x


@pytest.mark.core
def test_the_reference_names_every_public_name():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    documented = (
        [vars(recipes)[name] for name in (*gallery(), "combine")]
        if "automodule:: flax_mha.recipes\n   :members:" in text
        else []
    )
    for path in re.findall(r"auto(?:function|class):: flax_mha\.(\S+)", text):
        *module, name = path.split(".")
        documented.append(getattr(importlib.import_module(".".join(["flax_mha", *module])), name))
    undocumented = sorted(name for name, x in public_names() if x not in documented)
    assert undocumented == sorted(INTERNAL)


def gallery():
    functions = {
        name for name, x in vars(recipes).items() if inspect.isfunction(x) and x.__module__.startswith(recipes.__name__)
    }
    return {name for name in functions if not name.startswith("_")} - {"combine"}


def test_the_tables_of_the_performance_page(monkeypatch, tmp_path):
    """Every table that the page includes can be made from what was measured."""
    monkeypatch.syspath_prepend(DOCS)
    importlib.import_module("tables").write(tmp_path)
    included = re.findall(r"_generated/(\w+)\.md", (DOCS / "performance.md").read_text())
    assert sorted(included) == sorted(path.stem for path in tmp_path.iterdir())


@pytest.mark.core
def test_the_gallery_shows_every_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    pictures, text = importlib.import_module("pictures"), (DOCS / "masks.md").read_text()
    assert set(pictures.RECIPES) == gallery()
    for name in gallery():
        assert f"_generated/{name}.png" in text
        assert f":pyobject: {name}\n" in text
        assert f"recipes.{name}(" in text


@pytest.mark.core
def test_notebooks_are_the_pages(monkeypatch):
    """Where this fails, run `python docs/notebooks.py`."""
    monkeypatch.syspath_prepend(str(DOCS))
    notebooks = importlib.import_module("notebooks")
    assert sorted(path.stem for path in (DOCS / "notebooks").glob("*.ipynb")) == sorted(notebooks.PAGES)
    for page in notebooks.PAGES:
        text = (DOCS / "notebooks" / f"{page}.ipynb").read_text()
        assert text == notebooks.notebook(page)
        code = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert code[1:] == [block.strip() for block in blocks(f"docs/{page}.md")]
