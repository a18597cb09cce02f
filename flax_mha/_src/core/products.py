"""Whether a tool has replaced JAX's matrix products, as quantization libraries do while
they run a model.

qwix replaces `jax.lax.dot_general`, `jax.numpy.einsum` and others, some by another
function under the same name, some by other code in the same function. What the
replacement computes depends on the module that calls it, and it may add parameters to
that module. `jax.jit` does not compare the functions that a function calls. So a
program that it keeps must not be traced while they are replaced, nor run instead of
them.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha._src.core.tracing import being_traced

P = ParamSpec("P")
T = TypeVar("T")

_of_lax = (
    "batch_matmul",
    "conv_general_dilated",
    "dot",
    "dot_general",
    "ragged_dot",
    "ragged_dot_general",
)
_of_numpy = ("dot", "einsum", "inner", "matmul", "tensordot", "vdot")
_PLACES = [(vars(lax), name) for name in _of_lax]
_PLACES += [(vars(jnp), name) for name in _of_numpy]
_JITTED = type(jax.jit(lambda: None))
# The folder with JAX's code, found by a function that tools do not replace.
_FOLDER = os.path.dirname(jax.eval_shape.__code__.co_filename)
# JAX's own products, and the code of those that are Python functions (else None). Not
# read on import, because a tool may have replaced the products then.
_of_jax: tuple[list[Any], list[Any]] | None = None


class _Trace(threading.local):
    """Whether the current trace of a thread has met replaced products."""

    met_tool = False


_trace = _Trace()


class _MetToolError(Exception):
    """Makes JAX forget a trace."""


def products_are_replaced() -> bool:
    """Returns whether a tool has replaced a matrix product or convolution of `jax.lax`
    or `jax.numpy`.
    """
    global _of_jax
    products = [module[name] for module, name in _PLACES]
    codes = [getattr(product, "__code__", None) for product in products]
    if (products, codes) == _of_jax:
        return False
    names = (*_of_lax, *_of_numpy)
    if _of_jax is None and all(map(_is_of_jax, names, products)):
        _of_jax = (products, codes)
        return False
    _trace.met_tool = True
    return True


def _is_of_jax(name: str, product: object) -> bool:
    """Returns whether a product is the function of this name in JAX, with JAX's code.

    A tool may give its function the name and the module of JAX's, but not the code.
    """
    if isinstance(product, _JITTED):
        product = product.__wrapped__  # type: ignore[attr-defined]
    code = getattr(product, "__code__", None)
    if code is None or getattr(product, "__name__", None) != name:
        return False
    return code.co_filename.startswith(_FOLDER)


def jit_products(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Returns `jax.jit(function, **options)`, but traces `function` in every call while
    `products_are_replaced`.
    """

    @functools.wraps(function)
    def trace(*arguments: P.args, **keywords: P.kwargs) -> T:
        """Raises an error instead of returning a program with a tool's products: a tool
        in another thread may replace them at any time.
        """
        met_before = _trace.met_tool
        _trace.met_tool = False
        try:
            products_are_replaced()
            result = function(*arguments, **keywords)
            products_are_replaced()
            if _trace.met_tool:
                raise _MetToolError
            return result
        finally:
            # A trace around this one has met the same tool.
            _trace.met_tool |= met_before

    compiled = jax.jit(trace, **options)

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not products_are_replaced():
            try:
                return compiled(*arguments, **keywords)
            except _MetToolError:
                pass
        if being_traced():
            return function(*arguments, **keywords)
        # JAX forgets the program of a function that is gone. It would keep the loops of
        # one that it does not compile.
        once = functools.partial(function)
        return jax.jit(once, **options)(*arguments, **keywords)

    call.clear_cache = compiled.clear_cache  # type: ignore[attr-defined]
    return call
