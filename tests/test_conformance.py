"""The referee finds planted errors, and none in the package."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conformance.__main__ import CELLS, main
from conformance.__main__ import _markdown as page_of
from conformance.checks import CHECKS, Result, check
from marks import with_core
from reference_cases import CASES

import flax_mha

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "conformance.md"


WINDOW = "window of 7 to the left, 3 to the right"
BIAS = "bias per sequence and head"


def window_too_wide(*arrays, local_window_size=None, **arguments):
    """The left side of a window shows one key more."""
    if isinstance(local_window_size, tuple):
        left, right = local_window_size
        local_window_size = (left + 1, right)
    return jax.nn.dot_product_attention(
        *arrays, local_window_size=local_window_size, **arguments
    )


def ends_aligned(query, key, value, *, is_causal=False, **arguments):
    """The last query is at the last key, not the first at the first."""
    rows = query.shape[-3]
    columns = key.shape[-3]
    mask = None
    if is_causal:
        mask = jnp.tri(rows, columns, columns - rows, dtype=bool)[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **arguments)


def no_gradient_of_bias(*arrays, bias=None, **arguments):
    """The bias gets no gradient."""
    if bias is not None:
        bias = jax.lax.stop_gradient(bias)
    return jax.nn.dot_product_attention(*arrays, bias=bias, **arguments)


def in_masked_rows(value, *arrays, mask=None):
    out = jax.nn.dot_product_attention(*arrays, mask=mask)
    return jnp.where(mask.any(-1).swapaxes(1, 2)[..., None], out, value)


nan_in_masked_rows = functools.partial(in_masked_rows, jnp.nan)
ones_in_masked_rows = functools.partial(in_masked_rows, 1.0)


def cap_of_score_and_bias(query, key, value, *, bias, mask, logits_soft_cap):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    # Right would be cap * tanh(scores / cap) + bias.
    scores = logits_soft_cap * jnp.tanh((scores + bias[None]) / logits_soft_cap)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def masked_nan_leaks(*arrays, mask=None):
    """Right by jax.nn's convention if nothing is NaN."""
    return jax.nn.dot_product_attention(*arrays, mask=mask)


def keys_counted_twice(query, key, value, *, key_indices):
    """Repeated keys count each time, and -1 is the last key."""
    listed = key_indices[..., None, None]
    key = jnp.take_along_axis(key[:, None], listed, 2)
    value = jnp.take_along_axis(value[:, None], listed, 2)
    scores = jnp.einsum("btnh,btknh->btnk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("btnk,btknh->btnh", jax.nn.softmax(scores), value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("function", "name", "kind", "detail"),
    [
        (window_too_wide, WINDOW, "wrong", "output: off by"),
        (ends_aligned, "causal", "wrong", "output: off by"),
        (no_gradient_of_bias, BIAS, "wrong", "gradient of bias: off by"),
        (keys_counted_twice, "9 keys per query", "computes", ""),
        (
            keys_counted_twice,
            "60 keys per query, some repeated or -1",
            "wrong",
            "output: off by",
        ),
        (keys_counted_twice, "only -1 as keys", "wrong", "output: off by"),
        (
            masked_nan_leaks,
            "everything masked",
            "other convention",
            "return the mean of the values",
        ),
        (nan_in_masked_rows, "everything masked", "other convention", "return NaN"),
        (
            cap_of_score_and_bias,
            "soft cap, then bias and mask",
            "other convention",
            "sum of score and bias",
        ),
        (
            jax.nn.dot_product_attention,
            "a sequence of length 0",
            "other convention",
            "and padded queries 0",
        ),
        # jax.nn has none.
        (jax.nn.dot_product_attention, "soft cap", "refuses", "logits_soft_cap"),
        (ones_in_masked_rows, "everything masked", "wrong", "output"),
        (
            masked_nan_leaks,
            "NaN in a masked value",
            "wrong",
            "37 of 3552 entries are NaN",
        ),
        # The output is right by a convention; the gradient is not by any.
        (
            masked_nan_leaks,
            "NaN in a query whose keys are all masked",
            "wrong",
            "gradient of key: 53 of 5088 entries",
        ),
    ],
)
def test_planted_errors_are_found_and_other_conventions_are_not_wrong(
    function, name, kind, detail
):
    with jax.numpy_rank_promotion("allow"):
        result = check(function, name)
    assert result.kind == kind, result
    assert detail in result.detail


# The other cases are those of test_attention.py.
OURS = [name for name in CHECKS if name not in CASES]
OURS_IN_CORE = (
    "causal, log-sum-exp and its gradient",
    "NaN in a masked key",
    "bfloat16, causal",
)


@pytest.mark.parametrize("name", with_core(OURS, *OURS_IN_CORE))
def test_checks_find_no_error_in_dot_product_attention(name):
    result = check(flax_mha.dot_product_attention, name)
    assert result.kind == "computes", result


FEW = {"no mask or bias": "computes", "soft cap": "refuses"}
FEW |= {"everything masked": "other convention", "NaN in a masked value": "wrong"}


@pytest.mark.core
def test_page_has_a_row_per_check_and_explains_conventions_and_errors(
    monkeypatch, capsys
):
    few = {name: CHECKS[name] for name in FEW}
    monkeypatch.setattr("conformance.__main__.CHECKS", few)

    assert main(["jax.nn.dot_product_attention", "--markdown"]) == 1
    page = capsys.readouterr().out

    for name, kind in FEW.items():
        assert f"| {name} | {CELLS[kind]} |\n" in page
    assert "| *total* | computes 1, refuses 1, other convention 1, wrong 1 |" in page
    title = "## Other conventions in `jax.nn.dot_product_attention`"
    _, _, rest = page.partition(title)
    other, wrong = rest.split("## Wrong in")
    convention = "queries without visible keys return the mean of the values"
    assert f"- everything masked: {convention}" in other
    assert "- NaN in a masked value: output: 37 of 3552 entries are NaN" in wrong

    assert main(["flax_mha.dot_product_attention"]) == 0
    total = "computes 4, refuses 0, other convention 0, wrong 0"
    assert total in capsys.readouterr().out


@pytest.mark.core
def test_the_documentation_shows_the_output_of_the_script():
    lines = PAGE.read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    cells = [[x.strip(" `") for x in line.strip("|").split("|")] for line in table]
    head, _, *rows, totals = cells
    assert [row[0] for row in rows] == list(CHECKS)

    # Totals fit their cells.
    kinds = {cell: kind for kind, cell in CELLS.items()}
    columns = {}
    for i, function in enumerate(head[1:], 1):
        found = [kinds[row[i]] for row in rows]
        columns[function] = list(map(Result, CHECKS, found))
        total = ", ".join(f"{kind} {found.count(kind)}" for kind in CELLS)
        assert totals[i] == total
    ours = columns["flax_mha.dot_product_attention"]
    assert {result.kind for result in ours} == {"computes"}
    for name, kind in FEW.items():
        assert Result(name, kind) in columns["jax.nn.dot_product_attention"]

    # The text up to the versions is what the script prints.
    written = page_of(columns)
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == [line for line in written if line.startswith("## ")]
    legend = [line.startswith("The versions were") for line in lines].index(True)
    assert lines[:legend] == written[:legend]


@pytest.mark.parametrize(
    "name", ["no_such_package.f", "jax.nn.no_such_function", "jax.nn"]
)
def test_names_without_a_function_end_the_command(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([name])
    said = capsys.readouterr().err
    assert "error: PACKAGE.FUNCTION must be " in said.splitlines()[-1]
    assert name in said


@pytest.mark.core
def test_function_that_always_raises_is_no_attention_function(monkeypatch, capsys):
    few = {name: CHECKS[name] for name in ("no mask or bias", "rejects a float mask")}
    monkeypatch.setattr("conformance.__main__.CHECKS", few)
    with pytest.raises(SystemExit, match="2"):
        main(["os.getcwd"])
    must = "error: os.getcwd must be an attention function, but every call raised an"
    assert f"{must} error" in capsys.readouterr().err


def test_folder_can_be_run_as_a_command():
    folder = ROOT / "benchmarks" / "conformance"
    command = [sys.executable, folder, "jax.nn.no_such_function"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "error: PACKAGE.FUNCTION must be " in ran.stderr.splitlines()[-1]
