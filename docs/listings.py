"""Lists what the package knows, from the tables of the package itself."""

from pathlib import Path

from flax_mha.convert import LAYOUTS


def write(folder: Path) -> None:
    """Writes a Markdown file for the list."""
    folder.mkdir(exist_ok=True)
    lines = ["| layout | keys of the weights |", "|---|---|"]
    for name, layout in LAYOUTS.items():
        weights = [key for key, paths in layout.stacks.items() if paths[0].endswith("kernel")]
        lines.append(f"| `{name}` | {', '.join(f'`{key}`' for key in weights)} |")
    (folder / "layouts.md").write_text("\n".join([*lines, ""]))
