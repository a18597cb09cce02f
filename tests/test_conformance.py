"""The referee finds planted errors, and none in the package."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from marks import with_core

import flax_mha
from flax_mha.conformance import CHECKS, check
from flax_mha.conformance.__main__ import main


def window_too_wide(*arrays, local_window_size=None, **arguments):
    """The left side of a window shows one key more."""
    if isinstance(local_window_size, tuple) and local_window_size[0] is not None:
        local_window_size = (local_window_size[0] + 1, local_window_size[1])
    return jax.nn.dot_product_attention(*arrays, local_window_size=local_window_size, **arguments)


def ends_aligned(query, key, value, *, is_causal=False, **arguments):
    """The last query, not the first, stands at the last key."""
    rows, columns = query.shape[-3], key.shape[-3]
    mask = jnp.tri(rows, columns, columns - rows, dtype=bool)[None, None] if is_causal else None
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **arguments)


def no_gradient_of_bias(*arrays, bias=None, **arguments):
    """The bias gets no gradient."""
    bias = None if bias is None else jax.lax.stop_gradient(bias)
    return jax.nn.dot_product_attention(*arrays, bias=bias, **arguments)


PLANTED = {window_too_wide: "window", ends_aligned: "causal", no_gradient_of_bias: "bias"}


@pytest.mark.core
@pytest.mark.parametrize("broken", PLANTED, ids=lambda f: f.__name__)
def test_planted_errors_are_found(broken):
    name = PLANTED[broken]
    assert check(jax.nn.dot_product_attention, name).kind == "computes"
    assert check(broken, name).kind == "wrong"


# The other cases are those of test_attention.py.
OURS = [name for name in CHECKS if name not in flax_mha.conformance.cases.CASES]


@pytest.mark.parametrize("name", with_core(OURS, "log-sum-exp, causal", "NaN in a masked key", "bfloat16"))
def test_nothing_of_ours_is_wrong(name):
    result = check(flax_mha.dot_product_attention, name)
    assert result.kind == "computes", result


@pytest.mark.core
def test_what_a_function_does_not_take_is_refused():
    result = check(jax.nn.dot_product_attention, "soft cap")
    assert result.kind == "refuses"
    assert "logits_soft_cap" in result.detail


@pytest.mark.core
def test_the_table(monkeypatch, capsys):
    few = {name: CHECKS[name] for name in ("plain", "soft cap", "mask, nothing visible")}
    monkeypatch.setattr("flax_mha.conformance.__main__.CHECKS", few)
    assert main(["jax.nn.dot_product_attention", "--markdown"]) == 1
    page = capsys.readouterr().out
    assert "| plain | yes |\n| soft cap | - |\n| mask, nothing visible | **WRONG** |\n" in page
    assert "- mask, nothing visible: output: differs by 0.33" in page
    assert main(["flax_mha.dot_product_attention"]) == 0
    assert "computes 3, refuses 0, wrong 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no_such_package.f", "jax.nn.no_such_function", "jax.nn"])
def test_a_name_that_is_no_function(name, capsys):
    with pytest.raises(SystemExit) as error:
        main([name])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "error: PACKAGE.FUNCTION must be " in said.splitlines()[-1]
    assert name in said


@pytest.mark.core
def test_a_function_of_something_else(monkeypatch, capsys):
    few = {name: CHECKS[name] for name in ("plain", "a mask of floats is an error")}
    monkeypatch.setattr("flax_mha.conformance.__main__.CHECKS", few)
    with pytest.raises(SystemExit) as error:
        main(["os.getcwd"])
    assert error.value.code == 2
    assert "error: os.getcwd must be an attention function, but it raised" in capsys.readouterr().err


def test_the_command():
    command = [sys.executable, "-m", "flax_mha.conformance", "jax.nn.no_such_function"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "error: PACKAGE.FUNCTION must be " in ran.stderr.splitlines()[-1]
