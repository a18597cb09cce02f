"""The family that docs/contributing.md adds to the table, compared with a plain
computation.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from flax_mha import convert
from flax_mha._src.convert.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "contributing.md"
HEADS, KV_HEADS, SIZE, LENGTH = 4, 2, 8, 7
FEATURES = HEADS * SIZE


def family_of_page():
    section = PAGE.read_text().split("### A family in ten lines")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    names = {}
    exec(block, names)
    return names["entry"]["example"]


def weights(rng, has_bias):
    rows = {"q": FEATURES, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": FEATURES}
    arrays = {}
    for name, size in rows.items():
        prefix = f"model.layers.0.self_attn.{name}_proj"
        arrays[f"{prefix}.weight"] = rng.normal(size=(size, FEATURES)) / 4
        if has_bias:
            arrays[f"{prefix}.bias"] = rng.normal(size=size)
    return {key: array.astype(np.float32) for key, array in arrays.items()}


def plain(x, arrays):
    """One head and one query after the other, in float64."""

    def project(name, x):
        prefix = f"model.layers.0.self_attn.{name}_proj"
        bias = arrays.get(f"{prefix}.bias", 0.0)
        return x @ arrays[f"{prefix}.weight"].T.astype(np.float64) + bias

    query = project("q", x).reshape(LENGTH, HEADS, SIZE)
    key = project("k", x).reshape(LENGTH, KV_HEADS, SIZE)
    value = project("v", x).reshape(LENGTH, KV_HEADS, SIZE)
    heads = np.zeros((LENGTH, HEADS, SIZE))
    for i in range(LENGTH):
        visible = slice(max(i - 2, 0), i + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = np.exp(0.5 * key[visible, kv_head] @ query[i, head])
            heads[i, head] = scores / scores.sum() @ value[visible, kv_head]
    return project("o", heads.reshape(LENGTH, FEATURES))


@pytest.mark.parametrize("has_bias", [False, True])
def test_family_of_the_page_is_computed_as_it_says(monkeypatch, has_bias):
    monkeypatch.setitem(FAMILIES, "example", family_of_page())
    config = {
        "model_type": "example",
        "hidden_size": FEATURES,
        "num_attention_heads": HEADS,
        "attention_bias": has_bias,
    }
    rng = np.random.default_rng(0)
    arrays = weights(rng, has_bias)
    attention = convert.from_hf(config, arrays, layer=0)
    x = rng.normal(size=(LENGTH, FEATURES)).astype(np.float32)
    output = attention(x[None])[0]
    np.testing.assert_allclose(output, plain(x, arrays), rtol=1e-4, atol=1e-4)
