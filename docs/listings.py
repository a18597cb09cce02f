"""Lists what the package knows, from the tables of the package itself."""

from pathlib import Path

from flax_mha.convert import LAYOUTS
from flax_mha.hf_config.families import DESCRIBED


def write(folder: Path) -> None:
    """Writes a Markdown file for each list."""
    folder.mkdir(exist_ok=True)
    (folder / "model_types.md").write_text(", ".join(f"`{name}`" for name in sorted(DESCRIBED)) + ".\n")
    lines = ["| layout | keys of the weights |", "|---|---|"]
    for name, layout in LAYOUTS.items():
        weights = [key for key, paths in layout.stacks.items() if paths[0].endswith("kernel")]
        lines.append(f"| `{name}` | {', '.join(f'`{key}`' for key in weights)} |")
    (folder / "layouts.md").write_text("\n".join([*lines, ""]))
