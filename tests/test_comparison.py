"""The comparison with other packages: every cell has a source, and JAX and Flax behave
as the page says.
"""

import inspect
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from conformance.checks import check
from flax import nnx
from marks import with_core

import flax_mha

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "comparison.md").read_text()
SOURCES = (ROOT / "benchmarks" / "results" / "comparison-sources.md").read_text()


def tables(text):
    """The cells of each line of each table, without the rule under the first."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            line.strip("|").split("|")
            for line in table.splitlines()
            if not line.startswith("|---")
        ]
        yield [[cell.strip(" `") for cell in line] for line in lines]


ANSWERS = {  # {package: {topic: cell}}, of the tables that compare
    package: {line[0]: line[n] for line in lines}
    for (_, *packages), *lines in tables(PAGE.partition("## What the functions")[0])
    for n, package in enumerate(packages, 1)
}
PEERS = [package for package in ANSWERS if package != "flax_mha"]


@pytest.mark.core
@pytest.mark.parametrize("package", PEERS)
def test_every_cell_has_a_source(package):
    section = re.search(
        rf"^## `?{re.escape(package)}`?\n(.*?)(?=^## |\Z)",
        SOURCES,
        re.MULTILINE | re.DOTALL,
    )[1]
    (table,) = tables(section)
    named = [
        topic for topics, source in table[1:] if source for topic in topics.split("; ")
    ]
    assert len(named) == len(set(named))
    cells = ANSWERS[package] | {'every "no"': ""}
    assert set(named) <= set(cells)
    assert [x for x in cells if x not in named and cells[x] != "no"] == ["version"]
    assert ANSWERS[package].keys() == ANSWERS["flax_mha"].keys()


FUNCTIONS = {"jax.nn": jax.nn.dot_product_attention, "Flax": nnx.dot_product_attention}
# Topic -> how the cell begins, the check of `python benchmarks/conformance` that shows
# it, and its answer.
CHECKS = {
    "rows whose keys are all masked": (
        "mean of the values",
        "everything masked",
        "other convention",
    ),
    "NaN in masked keys and values": ("spreads", "NaN in a masked value", "wrong"),
    "forward mode": ("in memory T x S", "forward mode (jax.jvp)", "computes"),
    "second derivatives": ("in memory T x S", "Hessian-vector product", "computes"),
    "soft cap": ("no", "soft cap", "refuses"),
    "sinks": ("no", "a sink per head", "refuses"),
    "packed documents": ("no", "segment ids", "refuses"),
}


@pytest.mark.parametrize("topic", with_core(list(CHECKS), "soft cap"))
@pytest.mark.parametrize("package", FUNCTIONS)
def test_behavior_of_jax_and_flax(package, topic):
    begins, name, kind = CHECKS[topic]
    assert ANSWERS[package][topic].startswith(begins)
    assert check(FUNCTIONS[package], name).kind == kind


@pytest.mark.core
def test_arguments_that_flax_lacks():
    """Its functions and modules have no argument for the features that they lack
    according to the page.
    """
    modules = [nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention]
    functions = [
        *FUNCTIONS.values(),
        nn.dot_product_attention,
        *modules,
        *(module.__call__ for module in modules),
    ]
    taken = {
        name
        for function in functions
        for name in inspect.signature(function).parameters
    }
    lacking = (
        "segment_ids|soft_cap|sink|score_mod|mask_mod|max_score|context_parallel|"
        "per_row|cache_dtype|indices"
    )
    assert not [name for name in taken if re.search(lacking, name)]
    of_nnx = inspect.signature(nnx.MultiHeadAttention).parameters
    assert "local_window_size" not in of_nnx


@pytest.mark.parametrize(
    ("package", "attention"),
    [
        ("flax_mha", flax_mha.dot_product_attention),
        ("Flax", nnx.dot_product_attention),
        ("jax.nn", jax.nn.dot_product_attention),
    ],
)
def test_memory_of_8192_tokens(package, attention):
    """Rounded, at most 1 MiB from the page, which has the numbers of a newer JAX."""

    def mebibytes(function):
        x = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)
        compiled = jax.jit(function).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    def forward(x):
        if package == "Flax":
            return attention(x, x, x, mask=nnx.make_causal_mask(x[..., 0, 0]))
        return attention(x, x, x, is_causal=True)

    def gradient(x):
        return jax.grad(lambda x: forward(x).sum())(x)

    stated = ANSWERS[package]["MiB for 8192 tokens: forward, gradient"].split(", ")
    for number, function in zip(stated, (forward, gradient), strict=True):
        assert abs(round(mebibytes(function)) - int(number)) <= 1
