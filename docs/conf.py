"""How Sphinx builds these pages: `sphinx-build -W docs OUT`.

Sphinx with MyST, because JAX and Flax use it: pages are Markdown, the reference is read
from the docstrings, and all of its parts are maintained. Pages hold no directives, so
that GitHub shows them too: what only Sphinx can show is added to their text here.
"""

import html
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import inventories  # noqa: E402
from docstrings import arguments_as_written  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

project = "flax_mha"
author = "The flax_mha authors"
project_copyright = author
version = release = importlib.metadata.version("flax-mha")
REPOSITORY = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"][
    "urls"
]["Repository"]

extensions = ["myst_parser", "sphinx_copybutton"]
extensions += [
    f"sphinx.ext.{name}" for name in ("autodoc", "intersphinx", "napoleon", "viewcode")
]
exclude_patterns = ["_build", "_generated"]
myst_heading_anchors = 3
# A short name in a docstring can match both an nnx and a linen class.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"flax_mha {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_use_index = html_domain_indices = False
html_theme_options = {
    "navigation_with_keys": True,
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}

# The hook below writes signatures as they stand in the source.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 70  # leaves room for the link to the source
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_attr_annotations = False
smartquotes_action = "D"  # dashes; but "xla" is a string
# `x` in a docstring is code, as in Markdown, and a link if it is a name with a page.
default_role = "py:obj"
intersphinx_mapping = inventories.write(HERE / "_generated")
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    """Adds to pages what only Sphinx can show; sets how signatures look."""
    app.connect("autodoc-process-signature", signature_as_written)
    # When napoleon has read it.
    app.connect("autodoc-process-docstring", add_long_signature, priority=600)
    app.connect("autodoc-process-docstring", keep_tildes)
    app.connect("html-page-context", break_names)
    app.connect("source-read", add_directives)
    app.connect("source-read", link_to_repository)


# The order of the pages in the sidebar: a caption, and the pages below it.
CONTENTS = {
    "index": {
        "Start": [
            "quickstart",
            "From Flax <from-flax>",
            "from-pytorch",
            "known-issues",
        ],
        "Use": [
            "everyday",
            "Models <model-features>",
            "Masks and score functions <masks>",
            "gallery",
            "padding",
            "Decoding <inference>",
            "whole-model-decoding",
            "Sparse and latent attention <sparse-latent>",
            "LoRA and quantization <lora>",
            "devices",
            "The demo: training <training>",
        ],
        "Know": [
            "how-it-works",
            "Implementations, GPUs and TPUs <implementations>",
            "comparison",
            "Programs that run unchanged <programs>",
            "derivatives",
            "Why is my output NaN? <nan>",
            "semantics",
            "performance",
        ],
        "Look up": [
            "api/index",
            "architecture",
            "contributing",
            f"Changelog <{REPOSITORY}/blob/main/CHANGELOG.md>",
        ],
    },
    "api/index": {
        "API": [
            "attention",
            "masks",
            "recipes",
            "modules",
            "rope",
            "decoding",
            "context_parallel",
            "convert",
        ],
    },
}


def add_directives(app: Sphinx, page: str, content: list[str]) -> None:
    """Adds the contents, and makes of comments and HTML, which GitHub understands, what
    Sphinx does.
    """
    text = content[0]
    meta = re.findall(r"^<!-- meta (\w+): (.*) -->$", text, re.MULTILINE)
    if meta:
        lines = [f"    {name}: {json.dumps(value)}" for name, value in meta]
        text = "\n".join(["---", "myst:", "  html_meta:", *lines, "---", "", text])
    text = re.sub(
        r"<!-- begin: reference\n(.*?)-->.*?<!-- end -->",
        r"```{eval-rst}\n\1```",
        text,
        flags=re.DOTALL,
    )
    # Furo hides one of these classes, as its button for light and dark says.
    text = re.sub(
        r'<picture>.*?srcset="(.*?)".*?<img (.*?)src="(.*?)"(.*?)></picture>',
        r'<img class="only-light" \2src="\3"\4><img class="only-dark" \2src="\1"\4>',
        text,
    )
    for caption, pages in CONTENTS.get(page, {}).items():
        text += "\n".join(
            [
                "",
                "```{toctree}",
                ":hidden:",
                f":caption: {caption}",
                "",
                *pages,
                "```",
                "",
            ]
        )
    content[0] = text


def link_to_repository(app: Sphinx, page: str, content: list[str]) -> None:
    """Points relative links to files that are no pages to the repository; pictures
    stay.
    """

    def link(found: re.Match) -> str:
        path = (HERE / page).parent.joinpath(found[2]).resolve()
        is_page = path.is_relative_to(HERE) and path.suffix == ".md"
        if is_page:
            return found[0]
        file = path.relative_to(HERE.parent)
        return f"{found[1]}({REPOSITORY}/blob/main/{file}{found[3]})"

    content[0] = re.sub(
        r"(?<!!)(\[[^\[\]]*\])\((?!https?:)([^)#\s]+)((?:#[\w-]+)?)\)", link, content[0]
    )


SHORT_NAME = 11  # characters, for which a phone has room
BREAKS = re.compile(
    r"((?<=[^\W_])(?:_(?=[^\W_])|[./=(](?=\w))|(?<=[a-z])(?=[A-Z]))(?=[^<>]*<)"
)


def break_names(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Lets long names in running text and tables break between their words, and short
    ones and options nowhere.
    """
    for code in set(re.findall(r"<code[^>]*>.*?</code>", context.get("body", ""))):
        if len(html.unescape(re.sub("<.*?>", "", code))) <= SHORT_NAME:
            shown = code.replace('class="', 'class="short ', 1)
        else:
            shown = BREAKS.sub(r"\1<wbr>", code).replace(
                'class="pre">-', 'class="pre short">-'
            )
        context["body"] = context["body"].replace(code, shown)
    # A signature that is too long breaks after its parenthesis, not inside a name.
    opening = '<span class="sig-paren">(</span>'
    context["body"] = context.get("body", "").replace(opening, f"{opening}<wbr>")


MOST_ARGUMENTS = 6  # of a signature that is shown whole, above the summary


def signature_as_written(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str] | None:
    """The signature of the source, or its beginning if it is long, so that a page opens
    with the summary.
    """
    written = arguments_as_written(obj)
    if written is None or len(written[0]) <= MOST_ARGUMENTS:
        return written and (
            f"({', '.join(written[0])})",
            "" if what == "class" else written[1],
        )
    names = [
        re.split("[:=]", argument)[0].strip()
        for argument in written[0]
        if "=" not in argument and argument != "*"
    ]
    return f"({', '.join([*names, '...'])})", ""


def add_long_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Adds the whole signature after the docstring, where only its beginning stands
    above.
    """
    if (
        what not in ("function", "method", "class")
        or (written := arguments_as_written(obj)) is None
    ):
        return
    arguments, returned = written
    if len(arguments) > MOST_ARGUMENTS:
        result = f" -> {returned}" if returned and what != "class" else ""
        whole = [
            f"{name.split('.')[-1]}(",
            *(f"    {argument}," for argument in arguments),
            f"){result}",
        ]
        lines += [
            "",
            ".. rubric:: Signature",
            "",
            ".. code-block:: python",
            "",
            *(f"   {line}" for line in whole),
            "",
        ]


def keep_tildes(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Writes the operator as code and nothing else: in a name, a leading `~` is an
    instruction and not shown.
    """
    lines[:] = [line.replace("`~`", "``~``") for line in lines]
