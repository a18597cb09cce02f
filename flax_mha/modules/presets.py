"""`functools.partial` around our attention function: its keywords, combined with the arguments of a module's call."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array

from flax_mha.modules.attention_fn import attention_fn as our_attention_fn

PARAMETERS = inspect.signature(our_attention_fn).parameters
FROM_MODULE = ("query", "key", "value", "dropout_rng", "dropout_rate", "module")
STATIC = (bool, int, float, str, tuple)


def without_partials(attention_fn: Callable[..., Array]) -> tuple[Callable[..., Array], dict[str, Any]]:
    """Returns the function inside of `functools.partial`s that set keywords, and these keywords."""
    function: Any = attention_fn
    keywords: dict[str, Any] = {}
    # Of exactly these types: a subclass may do more in its call.
    while type(function) in (functools.partial, jax.tree_util.Partial) and not function.args:
        function, keywords = function.func, function.keywords | keywords
        inner = getattr(function, "fun", None)  # by which jax.tree_util.Partial keeps another partial
        function = inner if type(inner) is functools.partial else function
    return function, keywords


def combined(keywords: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of our attention function, with the keywords that partials set.

    A default, such as None, leaves an argument to the other side.

    Raises:
      TypeError: If our function has no such keyword.
      ValueError: If a keyword is one that modules set, or if the call gives another value.
    """
    result = dict(arguments)
    for name, preset in keywords.items():
        if name not in PARAMETERS:
            raise TypeError(f"flax_mha.attention_fn() got an unexpected keyword argument {name!r} of functools.partial")
        if _is_default(name, preset):
            continue
        if name in FROM_MODULE:
            raise ValueError(
                f"attention_fn must not set {name}, which the module sets in every call, but got a functools.partial "
                "that does; use the arguments of the module."
            )
        given = result.get(name)
        if name in result and not _is_default(name, given) and not _is_same(preset, given):
            raise ValueError(
                f"{name} must be given once, but got one by the functools.partial of attention_fn and another by the "
                "module or its call; leave one of them out."
            )
        result[name] = preset
    return result


def _is_default(name: str, x: Any) -> bool:
    return x is None or _is_same(x, PARAMETERS[name].default)


def _is_same(x: Any, y: Any) -> bool:
    """Whether two arguments are one object, or equal static values; arrays are not read."""
    return x is y or (isinstance(x, STATIC) and isinstance(y, STATIC) and x == y)
