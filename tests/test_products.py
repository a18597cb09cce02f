"""No program is kept that was traced while a tool had replaced JAX's products, and
programs are kept again as soon as the tool is gone.
"""

import functools
import importlib.util
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_mha._src.core import products
from flax_mha._src.core.products import jit_products, products_are_replaced

OF_JAX = lax.dot_general


def zeros(*operands, **options):
    return 0 * OF_JAX(*operands, **options)


class Tool:
    """A second thread that replaces a product when it is told to."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def replace(self):
        self.run(lambda: self.monkeypatch.setattr(lax, "dot_general", zeros))

    def leave(self):
        self.run(lambda: self.monkeypatch.setattr(lax, "dot_general", OF_JAX))

    def run(self, change):
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()


@pytest.mark.core
@pytest.mark.parametrize("leaves", ["before the end", "after an inner call", "later"])
def test_a_tool_that_comes_while_a_program_is_traced_leaves_no_trace(
    monkeypatch, leaves
):
    tool = Tool(monkeypatch)
    comes = True
    traces = []

    @jit_products
    def inner(x):
        return lax.dot_general(x, x, (((0,), (0,)), ((), ())))

    @jit_products
    def outer(x):
        nonlocal comes
        traces.append(comes)
        if comes:
            tool.replace()
        product = inner(x)
        if comes and leaves == "after an inner call":
            tool.leave()
        comes = False
        product = product + inner(x)
        if leaves == "before the end":
            tool.leave()
        return product

    x = jnp.arange(3.0)
    outer(x)
    tool.leave()

    assert outer(x) == 10
    # The program without the tool is kept.
    count = len(traces)
    assert outer(x) == 10
    assert len(traces) == count


# Tools replace JAX's functions, so these do.
def by_name(patch):
    patch.setattr(lax, "dot_general", zeros)


def by_a_wrapper(patch):
    patch.setattr(lax, "dot_general", functools.wraps(OF_JAX)(zeros))


def by_a_jitted_wrapper(patch):
    wrapper = functools.wraps(jnp.matmul)(lambda x, y: x)
    patch.setattr(jnp, "matmul", jax.jit(wrapper))


def by_code(patch):
    def other(*operands, **options):
        raise NotImplementedError

    patch.setattr(OF_JAX, "__code__", other.__code__)


@pytest.mark.parametrize(
    "replace", [by_name, by_a_wrapper, by_a_jitted_wrapper, by_code]
)
def test_the_package_may_be_imported_while_a_product_is_replaced(monkeypatch, replace):
    spec = importlib.util.spec_from_file_location("imported", products.__file__)
    imported = importlib.util.module_from_spec(spec)

    with monkeypatch.context() as patch:
        replace(patch)
        spec.loader.exec_module(imported)
        assert imported.products_are_replaced()

    assert not imported.products_are_replaced()
    with monkeypatch.context() as patch:
        replace(patch)
        assert imported.products_are_replaced()


def test_products_of_this_version_of_jax_are_its_own():
    assert not products_are_replaced()
