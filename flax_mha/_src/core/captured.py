"""Replaces the NumPy arrays that a function captures by JAX arrays, because NumPy cannot index with traced numbers."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_JITTED = type(jax.jit(abs))


def with_jax_arrays(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Copies a value with every NumPy array that it holds or captures converted to a JAX array.

    `seen` maps the `id` of each value copied so far to its copy, as a value may contain itself; None starts empty.
    """
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = value  # a function may capture itself
        seen[id(value)] = _replace_parts(value, functools.partial(with_jax_arrays, seen=seen))
    return seen[id(value)]


def _replace_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a NumPy array as a JAX one, a container or callable with `change` applied to each part; else `value`."""
    if isinstance(value, np.ndarray):
        return jnp.asarray(value.copy())  # JAX would keep the values that a 64-bit array had at first
    if isinstance(value, dict):
        return {name: change(x) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if isinstance(value, functools.partial):
        return functools.partial(change(value.func), *map(change, value.args), **change(value.keywords))
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copy_object(value.__self__, change))
    if isinstance(value, _JITTED):
        return change(value.__wrapped__)  # type: ignore[attr-defined]  # it is called without `jit` anyway
    if isinstance(value, types.FunctionType):
        return _copy_function(value, change)
    is_callable = callable(value) and not isinstance(value, type | types.BuiltinFunctionType)
    return _copy_object(value, change) if is_callable else value


def _copy_object(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(getattr(value, "__dict__", None), dict) or type(value).__module__.startswith(("jax", "numpy")):
        return value
    copy = object.__new__(type(value))
    vars(copy).update(change(vars(value)))
    return copy


def _copy_function(function: types.FunctionType, change: Callable[[Any], Any]) -> types.FunctionType:
    """Copies a function, with `change` applied to its closure, its defaults and the global variables that it reads."""
    names = function.__globals__
    names = names | {name: change(names[name]) for name in function.__code__.co_names if name in names}
    closure = tuple(types.CellType(change(cell.cell_contents)) for cell in function.__closure__ or ())
    copy = types.FunctionType(function.__code__, names, function.__name__, change(function.__defaults__), closure)
    copy.__kwdefaults__ = change(function.__kwdefaults__)
    return copy
