"""The comparison with other packages: every cell names its source, and what can be run here is as the page says."""

import functools
import inspect
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from marks import with_core

import flax_mha
from flax_mha.conformance.checks import check

PAGE = (Path(__file__).parent.parent / "docs" / "comparison.md").read_text()


def rows(text):
    """The cells of each line of a table, without its rule."""
    lines = re.findall(r"^\| ?(.*)\|$", text, re.MULTILINE)
    return [[cell.strip(" `") for cell in line.split("|")] for line in lines if not line.startswith("---")]


TABLE = rows(PAGE.partition("## Which one")[0])
PACKAGES = TABLE[0][2:]
TOPICS = [topic for topic, *_ in TABLE[1:] if topic != "version"]


@pytest.mark.core
@pytest.mark.parametrize("package", PACKAGES)
def test_every_cell_has_a_source(package):
    section = re.search(rf"^### `?{re.escape(package)}`?\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    named = [topic for topics, source in rows(section)[1:] if source for topic in topics.split("; ")]
    cells = {topic: cells[1 + PACKAGES.index(package)] for topic, *cells in TABLE[1:]}
    unnamed = [topic for topic in TOPICS if topic not in named]
    assert all(cells[topic] == "no" for topic in unnamed), [x for x in unnamed if cells[x] != "no"]
    assert set(named) - set(TOPICS) <= {'every "no"'}
    assert len(named) == len(set(named))


FUNCTIONS = {"jax.nn": jax.nn.dot_product_attention, "Flax": nnx.dot_product_attention}
# Topic -> how the cell begins, the check of `python -m flax_mha.conformance` that shows it, and its answer.
ANSWERS = {
    "rows whose keys are all masked": ("mean of the values", "mask, nothing visible", "wrong"),
    "NaN in masked keys and values": ("spreads", "NaN in a masked value", "wrong"),
    "forward mode": ("in memory T x S", "jax.jvp", "computes"),
    "second derivatives": ("in memory T x S", "a Hessian-vector product", "computes"),
    "soft cap": ("no", "soft cap", "refuses"),
    "sinks": ("no", "sinks", "refuses"),
    "packed documents": ("no", "segments", "refuses"),
}


@pytest.mark.parametrize("topic", with_core(list(ANSWERS), "soft cap"))
@pytest.mark.parametrize("package", FUNCTIONS)
def test_what_jax_and_flax_compute(package, topic):
    (cell,) = [cells[TABLE[0].index(package)] for cells in TABLE if cells[0] == topic]
    begins, name, kind = ANSWERS[topic]
    assert cell.startswith(begins)
    assert check(FUNCTIONS[package], name).kind == kind


@pytest.mark.core
def test_what_flax_does_not_take():
    """No argument of its functions and modules speaks of what the page says they lack."""
    taken = set()
    for function in (
        jax.nn.dot_product_attention,
        nnx.dot_product_attention,
        nnx.MultiHeadAttention,
        nnx.MultiHeadAttention.__call__,
        nn.dot_product_attention,
        nn.MultiHeadDotProductAttention,
        nn.MultiHeadDotProductAttention.__call__,
    ):
        taken |= set(inspect.signature(function).parameters)
    lacking = "segment_ids|soft_cap|sink|score_mod|mask_mod|max_score|context_parallel|per_row|cache_dtype"
    assert not [name for name in taken if re.search(lacking, name)]
    assert "local_window_size" not in inspect.signature(nnx.MultiHeadAttention).parameters


def test_memory_of_8192_tokens():
    def megabytes(attention):
        x = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)
        compiled = jax.jit(lambda x: attention(x, x, x, is_causal=True)).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    assert megabytes(jax.nn.dot_product_attention) >= 1024
    assert megabytes(functools.partial(flax_mha.dot_product_attention, implementation="blockwise")) < 10
