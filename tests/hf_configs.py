"""The config files of Hugging Face models, as they are published, and what
`convert.describe` returns for them.

`tests/hf_configs/` has one `config.json` for each family in the library's table, with
the keys of the published file and small numbers. Files of models that are published in
the format of Transformers 5 are as it saves them. `tests/hf_configs.txt` has what
`describe` returns for each file. test_hf_configs.py compares the two in every run.

    python tests/hf_configs.py

compares all with Transformers, which it needs, and writes the text file.

This script compares the description of each file with that of the config that
Transformers makes from it, which has all defaults and only new keys.
"""

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from flax_mha import convert

FOLDER = Path(__file__).with_suffix("")
EXPECTED = Path(__file__).with_suffix(".txt")
LAYERS = 9  # more than any file has
LENGTH = 8192  # the length of sequences, for LongRoPE
# Files that Transformers reads in another way, and why its way is not ours.
DIFFERENT = {
    "dbrx": "Transformers 5.24 rotates with a base of 10000, and ignores the "
    "rope_theta in attn_config.",
    "kimi_k2": "Transformers has no such model type; the model is DeepSeek V3.",
}


def load() -> dict[str, dict[str, Any]]:
    """Returns the configs by the names of their files."""
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted(FOLDER.glob("*.json"))
    }


def show(value: Any) -> str:
    """Writes a value; of a dataclass, only the fields that are not the default."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return f"{float(value):.10g}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(show, value))})"
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: (getattr(value, field.name), field.default)
            for field in dataclasses.fields(value)
        }
        changed = [
            f"{name}={show(x)}" for name, (x, default) in fields.items() if x != default
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    return str(value)


def show_attention_fn(attention_fn: Any) -> str:
    """Writes what the preset functions do to a query far into the sequence."""
    shown = []
    keywords = attention_fn.keywords
    if "score_mod" in keywords:
        places = [jnp.asarray(i) for i in (0, 1, 100_000, 7)]
        score = keywords["score_mod"](jnp.float32(1.0), *places)
        shown.append(f"score_mod 1 -> {float(score):.6g}")
    if "mask" in keywords:
        visible = [
            k
            for k in range(32)
            if keywords["mask"].mask_mod(0, 0, jnp.asarray(20), jnp.asarray(k))
        ]
        shown.append(f"mask of query 20: keys {visible[0]} to {visible[-1]}")
    return f"[{'; '.join(shown)}]"


def describe(config: dict[str, Any], layer: int) -> str:
    """Describes one layer in one line; empty for a layer without attention, "end" after
    the last layer.
    """
    try:
        described = convert.describe(config, layer, max_length=LENGTH)
    except ValueError as error:
        message = str(error)
        if message.startswith("layer must be"):
            return "end"
        if message.startswith("layer must have type"):
            return ""
        return f"ValueError: {message}"
    described["kernel_metadata"] = described["kernel_metadata"]["model_type"]
    if "attention_fn" in described:
        described["attention_fn"] = show_attention_fn(described["attention_fn"])
    return " ".join(
        f"{key}={show(x)}"
        for key, x in described.items()
        if x is not None and x is not False
    )


def summary(config: dict[str, Any]) -> str:
    """Describes all layers: a line for each description, with its layers."""
    layers: dict[str, list[int]] = {}
    for layer in range(LAYERS):
        line = describe(config, layer)
        if line == "end":
            break
        if line:
            layers.setdefault(line, []).append(layer)
    return "".join(
        f"  {','.join(map(str, numbers))}: {line}\n" for line, numbers in layers.items()
    )


def expected() -> dict[str, str]:
    """Returns the committed summaries by the names of the files."""
    parts = EXPECTED.read_text().split("\n\n")
    return {
        name: f"{lines.rstrip()}\n"
        for name, _, lines in (part.partition("\n") for part in parts)
    }


def main() -> int:
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    warnings.filterwarnings("ignore")
    from transformers import CONFIG_MAPPING

    wrong = []
    summaries = {}
    for name, config in load().items():
        summaries[name] = summary(config)
        if name in DIFFERENT:
            continue
        theirs = CONFIG_MAPPING[config["model_type"]].from_dict(
            json.loads(json.dumps(config))
        )
        if summary(theirs.to_dict()) != summaries[name]:
            wrong.append(name)
            print(
                f"{name}\nraw:\n{summaries[name]}Transformers:\n{summary(theirs.to_dict())}"
            )
    print("wrong:", *wrong or ["none"])
    if not wrong:
        EXPECTED.write_text(
            "\n".join(f"{name}\n{lines}" for name, lines in summaries.items())
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
