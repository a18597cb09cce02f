"""How Sphinx builds these pages: `sphinx-build -W docs OUT`.

Sphinx with MyST, because JAX and Flax use it: pages are Markdown, the reference is read from the docstrings, and all
of its parts are maintained. What a page shows and the package can say is made while it is built, so that it cannot grow
stale: pictures of masks, tables of benchmarks, signatures.
"""

import ast
import dataclasses
import importlib.metadata
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import listings  # noqa: E402
import pictures  # noqa: E402
import tables  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

project = "flax_mha"
author = "The flax_mha authors"
project_copyright = author
version = release = importlib.metadata.version("flax-mha")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "_generated"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # included results begin at any level

html_theme = "furo"
html_title = f"flax_mha {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_use_index = html_domain_indices = False
html_theme_options = {"navigation_with_keys": True}

# The hook below writes signatures as they stand in the source.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_attr_annotations = False
smartquotes_action = "D"  # dashes; but "xla" is a string
default_role = "code"  # `x` in a docstring is code, as in Markdown
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    """Makes what pages include, and tells autodoc how signatures look."""
    generated = HERE / "_generated"
    pictures.draw(generated)
    tables.write(generated)
    listings.write(generated)
    app.connect("autodoc-process-signature", signature_as_written)


def signature_as_written(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    """The signature of the source: evaluated, `Float[Array, "*B T N H"]` and `ArrayLike` would take lines each."""
    if dataclasses.is_dataclass(obj) and "def __init__" not in source(obj):
        return fields_as_written(obj), ""
    function = obj.__init__ if inspect.isclass(obj) else inspect.unwrap(getattr(obj, "__func__", obj))
    if not inspect.isfunction(function):
        return None
    definition = ast.parse(source(function)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = definition.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returned = "" if definition.returns is None or what == "class" else ast.unparse(definition.returns)
    return f"({ast.unparse(arguments)})", returned.strip("'\"")


def fields_as_written(kind: type) -> str:
    """What a dataclass is made of; each field is taken from the last class that writes it."""
    written: dict[str, ast.AnnAssign] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(source(base)).body[0].body
        written |= {ast.unparse(x.target): x for x in body if isinstance(x, ast.AnnAssign)}
    shown = []
    for field in dataclasses.fields(kind):
        if field.init and field.name in written and field.name not in ("parent", "name"):  # Flax's own
            line, default = f"{field.name}: {ast.unparse(written[field.name].annotation)}", written[field.name].value
            if isinstance(default, ast.Call) and ast.unparse(default.func).endswith("field"):
                default = next((x.value for x in default.keywords if x.arg == "default"), None)
            shown.append(line if default is None else f"{line} = {ast.unparse(default)}")
    return f"({', '.join(shown)})"


def source(obj: Any) -> str:
    """The source of a class or function, without its indentation."""
    return textwrap.dedent(inspect.getsource(obj))
