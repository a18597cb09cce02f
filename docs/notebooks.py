"""Makes a notebook of each tutorial page, for Colab: `python docs/notebooks.py`, after a page was changed."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("quickstart", "masks", "inference", "derivatives")
INSTALL = "%pip install -q flax-mha"


def notebook(page: str) -> str:
    """The page as a notebook: its blocks of Python are cells, the text between them is Markdown."""
    text = re.sub(r"^---\n.*?\n---\n", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"```\{(\w+)\}.*?```\n?|\{colab\}`[^`]*`\n?", "", text, flags=re.DOTALL)  # what only Sphinx can show
    text = re.sub(r"\]\((?!https?:|#)([^)#]+)\.md", r"](../\1.md", text)
    parts = re.split(r"```python\n(.*?)```\n?", text, flags=re.DOTALL)
    cells = [_cell("code", INSTALL, 0)]
    for i, part in enumerate(parts):
        if part.strip():
            cells.append(_cell("code" if i % 2 else "markdown", part.strip(), len(cells)))
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(kind: str, text: str, number: int) -> dict:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = text.splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines, **code}


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / "notebooks" / f"{page}.ipynb").write_text(notebook(page))
