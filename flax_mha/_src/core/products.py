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
from collections.abc import Callable
from operator import attrgetter, is_
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
_in_lax = [(vars(lax), name) for name in _of_lax]
_in_numpy = [(vars(jnp), name) for name in _of_numpy]
# Older versions of JAX lack some.
_PLACES = [(module, name) for module, name in _in_lax + _in_numpy if name in module]
# What these names stood for when this file was imported, and the code of those that are
# Python functions.
_PRODUCTS = [module[name] for module, name in _PLACES]
_IN_PYTHON = [product for product in _PRODUCTS if hasattr(product, "__code__")]
_get_code = attrgetter("__code__")
_CODES = [_get_code(product) for product in _IN_PYTHON]


def products_are_replaced() -> bool:
    """Returns whether a tool has replaced a matrix product or convolution of `jax.lax`
    or `jax.numpy`.
    """
    # Every call asks, so the loops are those of `map`.
    have_same_code = all(map(is_, map(_get_code, _IN_PYTHON), _CODES))
    products = [module[name] for module, name in _PLACES]
    are_same_products = all(map(is_, products, _PRODUCTS))
    return not (have_same_code and are_same_products)


def jit_products(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Returns `jax.jit(function, **options)`, but traces `function` in every call while
    `products_are_replaced`.
    """
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not products_are_replaced():
            return compiled(*arguments, **keywords)
        if being_traced():
            return function(*arguments, **keywords)
        # JAX forgets the program of a function that is gone. It would keep the loops of
        # one that it does not compile.
        once = functools.partial(function)
        return jax.jit(once, **options)(*arguments, **keywords)

    call.clear_cache = compiled.clear_cache  # type: ignore[attr-defined]
    return call
