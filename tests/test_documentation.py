"""Every block of every page runs, links have targets, and the reference and the gallery
are complete.
"""

import doctest
import importlib
import inspect
import json
import operator
import re
import shlex
import tomllib
import warnings
from pathlib import Path

import jax
import pytest
from marks import with_core

import flax_mha
from flax_mha import recipes
from flax_mha._src.convert.families import FAMILIES
from train_demo import command_line

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")),
]
PAGES = [page for page in PAGES if "_generated" not in page]
# Tests of the demo run the blocks of the first, which need its runs; the second needs
# eight devices.
ELSEWHERE = ("docs/training.md", "docs/devices.md")


def by_hand(page):
    """The text of a page without the parts from `docs/write_pages.py`, such as tables
    of measurements.
    """
    return re.sub(
        r"<!-- begin: .*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.DOTALL
    )


def blocks(page):
    return re.findall(r"```python\n(.*?)```", by_hand(page), re.DOTALL)


RUN = [page for page in PAGES if blocks(page) and page not in ELSEWHERE]


@pytest.mark.parametrize("page", with_core(RUN, "README.md"))
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    """One after the other, as in one session of a reader, with JAX's defaults."""
    monkeypatch.chdir(tmp_path)
    if page == "docs/lora.md":
        # qwix uses methods of Flax that are deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
    names = {}
    for block in blocks(page):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(block, page, "exec"), names)


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    """Only blocks that begin with ```python run, so there must be no others, such as
    indented ones of a list.
    """
    text = by_hand(page)
    assert len(re.findall(r"```\s*(?:python|py)\b", text)) == len(blocks(page))
    assert ">>>" not in text


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_have_targets(page):
    """Sphinx checks links between pages with their anchors, but not those of the
    README.
    """
    folder = (ROOT / page).parent
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    targets += re.findall(r'src(?:set)?="([^"]+)"', text)
    for target in targets:
        assert re.match(r"https?://", target) or (folder / target).exists(), target


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The module or file of a command, and its arguments, which may continue on further
# lines in docstrings of scripts.
COMMAND = re.compile(
    r"\bpython (?:-m )?(train_demo|benchmarks/conformance|[\w/]+\.py)\b"
    r"([^`#\n]*(?:\n +\[--[^\n]*)*)"
)
SCRIPTS = (
    "benchmarks/*.py",
    "benchmarks/results/*.md",
    "docs/*.py",
    "examples/*.py",
    "tests/hf_*.py",
)


@pytest.mark.core
@pytest.mark.parametrize("files", [*PAGES, *SCRIPTS])
def test_commands_name_files_options_and_extras_that_exist(files):
    """Nothing runs, because most commands take minutes. The demo's own parser reads its
    commands.
    """
    text = "\n".join(path.read_text() for path in ROOT.glob(files))
    extras = re.findall(r"'\.\[([\w-]+)\]'", text)
    assert PROJECT["project"]["optional-dependencies"].keys() >= set(extras)
    groups = re.findall(r"--group (\w+)", text)
    assert PROJECT["dependency-groups"].keys() >= set(groups)
    for name, words in COMMAND.findall(text):
        if name == "train_demo":
            parse_demo_command(words)
        else:
            options = re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", words)
            assert options_of(name).issuperset(options), (name, words)


def parse_demo_command(words):
    words = re.split(r" &|;", words)[0].replace("$i", "0")
    arguments = [word for word in shlex.split(words) if word != "--help"]
    if not arguments or arguments[0].startswith("-"):
        arguments = ["train", *arguments]
    command_line.make_parser().parse_args(arguments)


def options_of(script):
    """The words in a script, and in `measure.py` beside it, that may be options."""
    file = ROOT / script
    if file.suffix != ".py":
        file = file / "__main__.py"
    files = (file, *file.parent.glob("measure.py"))
    source = "".join(path.read_text() for path in files)
    words = re.findall(r'"(?:--)?([a-z][\w-]*)"', source)
    return {f"--{word.replace('_', '-')}" for word in words}


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES)
def test_github_shows_the_whole_page(page):
    """It knows no directives, no roles, no front matter, and each picture has a variant
    for dark pages.
    """
    text = (ROOT / page).read_text()
    assert not re.search(
        r"^\s*(```|:::)\s*\{|\{[\w:-]+\}`|^\(\S+\)=$|^%|\A---$", text, re.MULTILINE
    )
    assert text.count("<!-- begin: ") == text.count("<!-- end -->")
    picture = r'<picture>.*srcset="(\S+)-dark.svg".*"\1-light.svg".*</picture>'
    assert re.findall(picture, text) == re.findall(r'src="(\S+)-light\.svg"', text)


@pytest.mark.core
def test_pages_hold_what_the_script_writes(write_pages):
    """If this fails, run `python docs/write_pages.py`."""
    for path, text in write_pages.written().items():
        assert path.read_text() == text, path


def test_pictures_are_what_the_script_draws(write_pages):
    """If this fails, run `python docs/write_pages.py`."""
    files = (DOCS / "_static").glob("*.svg")
    shown = {path.name: path.read_text() for path in files}
    assert shown == write_pages.pictures.draw()


@pytest.fixture
def write_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("write_pages")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("figures")


@pytest.mark.core
def test_the_first_page_links_to_every_page():
    text = (DOCS / "index.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"({path.name}" in text or path.name == "index.md", path.name


@pytest.mark.core
def test_figures_in_sentences_equal_their_sources(figures):
    """If this fails, run `python docs/figures.py`, and correct the page, or add the
    figure to its list.
    """
    assert list(figures.problems()) == []


@pytest.mark.core
def test_a_number_without_a_source_is_found(figures, monkeypatch):
    text = figures.by_hand("README.md")
    new = "It is 3.5 times as fast, in `f(17)`, on an H200, with [1 x 1](a-2.md#b3)."
    monkeypatch.setattr(figures, "by_hand", lambda page: f"{text}\n{new}\n")
    [found] = figures.unseen("README.md")
    assert "3.5 times" in found


@pytest.mark.core
def test_every_known_issue_is_listed_linked_and_asserted():
    text = (DOCS / "known-issues.md").read_text()
    _, *entries = re.split(r"^### ", text, flags=re.MULTILINE)
    linked = re.findall(r"^\| \[(.*)\]\(#\S+\) \|", text, re.MULTILINE)
    assert linked == [entry.partition("\n")[0] for entry in entries]
    issue = r"github\.com/\S+/(?:issues|pull)/\d+|We know of no report"
    for entry in entries:
        assert re.search(issue, entry), entry
        assert re.search(r"```python\n[^`]*^ *assert ", entry, re.MULTILINE), entry


MODULES = ("cache", "convert", "linen", "masks", "nnx", "plot", "recipes", "rope")
# Public only by their names: the classes of combined masks, parts of documented names,
# and tables.
INTERNAL = ["And", "LAYOUTS", "LayoutName", "Not", "Occupancy", "Or", "WrittenMask"]


def public_names():
    """The names that users may import: at the top level, and those that a public module
    defines or lists.
    """
    modules = [importlib.import_module(f"flax_mha.{name}") for name in MODULES]
    for module in (flax_mha, *modules):
        for name in module.__all__:
            yield name, getattr(module, name)  # some on first use


@pytest.mark.core
def test_the_reference_names_every_public_name():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    assert "automodule:: flax_mha.recipes\n   :members:" in text
    documented = [vars(recipes)[name] for name in recipes.__all__]
    # Users type these names; importing would find a module even if a function of the
    # package hides it.
    directive = r"^\.\. auto(?:function|class|module):: flax_mha\.(\S+)"
    for path in re.findall(directive, text, re.MULTILINE):
        documented.append(operator.attrgetter(path)(flax_mha))
    undocumented = sorted(name for name, x in public_names() if x not in documented)
    assert undocumented == sorted(INTERNAL)


@pytest.mark.core
def test_examples_of_every_public_name_are_collected():
    """Names are defined in `_src`, where pytest looks for examples, and not in the
    modules that re-export them.
    """
    collected = set()
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in (ROOT / "flax_mha" / "_src").rglob("*.py"):
        if path.stem != "__init__":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            tests = finder.find(importlib.import_module(name))
            collected.update(test.name for test in tests)

    shown = [x for _, x in public_names() if ">>>" in (x.__doc__ or "")]
    named = [x for x in shown if hasattr(x, "__qualname__")]
    assert len(shown) > 30
    assert {f"{x.__module__}.{x.__qualname__}" for x in named} <= collected


def gallery():
    return set(recipes.__all__) - {"combine", "RelativeBias"}


@pytest.mark.core
def test_features_of_models_name_arguments_and_families_that_exist():
    page = (DOCS / "model-features.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    takers = [flax_mha.Norm, flax_mha.Gate, flax_mha.Indexer, flax_mha.RoPE]
    for module in (flax_mha.MultiHeadAttention, flax_mha.MultiHeadLatentAttention):
        takers += [module, module.__call__, module.init_cache]
    taken = set()
    for taker in takers:
        taken.update(inspect.signature(taker).parameters)
    known = {"recipes": vars(recipes), "convert": vars(flax_mha.convert)}
    for _, arguments, families in rows:
        assert taken.issuperset(re.findall(r"(\w+)=", arguments))
        for module, name in re.findall(r"(recipes|convert)\.(\w+)", arguments):
            assert name in known[module]
        for name in re.findall(r"`(\w+)`", families):
            assert not FAMILIES[name].refused


@pytest.mark.core
def test_pages_have_every_table_and_every_recipe(write_pages):
    pages = "".join(path.read_text() for path in write_pages.written())
    tables = re.findall(r"begin: table (\w+)", pages)
    assert sorted(tables) == sorted(write_pages.tables.TABLES)
    assert set(write_pages.pictures.RECIPES) == gallery()
    assert gallery_entries().keys() == gallery()
    for name, entry in gallery_entries().items():
        assert f"_static/{name}-light.svg" in entry
        assert f"recipes.{name}(" in entry


def gallery_entries():
    """The entry of each recipe in the gallery, by the source that it links to."""
    text = (DOCS / "gallery.md").read_text()
    entries = {}
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        [name] = re.findall(r"<!-- begin: source (\w+) -->", entry)
        entries[name] = entry
    return entries


@pytest.mark.core
def test_notebooks_are_the_pages_and_were_run(monkeypatch):
    """If this fails, run `python docs/notebooks.py`. Outputs are not compared: they
    contain times.
    """
    monkeypatch.syspath_prepend(str(DOCS))
    notebooks = importlib.import_module("notebooks")
    files = (DOCS / "notebooks").glob("*.ipynb")
    assert sorted(path.stem for path in files) == sorted(notebooks.PAGES)
    for page in notebooks.PAGES:
        cells = run_cells(DOCS / "notebooks" / f"{page}.ipynb")
        written = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        assert written == notebooks.cells(page)
        code = [source for kind, source in written if kind == "code"]
        for cell, block in zip(code[1:], blocks(f"docs/{page}.md"), strict=True):
            assert cell.startswith(block.strip())
    assert '"image/png"' in (DOCS / "notebooks" / "masks.ipynb").read_text()
    run_cells(notebooks.DEMO)


def run_cells(path):
    """The cells of a notebook that was run from top to bottom without an error, and
    shows what it computed.
    """
    assert path.stat().st_size < 2**20
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        assert all(output["output_type"] != "error" for output in cell["outputs"])
    # The first only imports the package.
    assert all(cell["outputs"] for cell in code[1:])
    text = "".join("".join(cell["source"]) for cell in cells)
    # These fail unless the repository is public.
    assert "git clone" not in text
    assert "git+https" not in text
    relative = re.findall(r"(?:\]\(|src(?:set)?=\")(?!https?://|#)", text)
    assert not relative
    return cells
