"""`CoreAttention`: an attention function of this package as its modules call it, without passing through it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array

from flax_mha.call.arguments import Arguments, canonical, check_sharding
from flax_mha.call.operands import Call, Context, Output
from flax_mha.core import validation
from flax_mha.distributed import dispatch
from flax_mha.impl.registry import Implementation
from flax_mha.masks import Mask

CORE = Arguments.__optional_keys__ | {"bias", "mask", "implementation"}
# Of a call with other arguments the attention function itself takes care.
DIRECT = CORE | {"deterministic", "dtype", "force_fp32_for_softmax"}
FROM_MODULE = ("query", "key", "value", "dropout_rng", "dropout_rate", "module")
STATIC = (bool, int, float, str, tuple)


@dataclasses.dataclass(frozen=True)
class CoreAttention:
    """An attention function that computes with this package's core: its attribute `core`.

    Attributes:
      function: The function itself. A wrapper that copies attributes, such as `functools.wraps`, is another function.
      defaults: Its keyword arguments and their defaults.
      context: How its sequences are split over devices; None if they are not.
      run: Computes a call, or explains it.
      preset: Keyword arguments that `functools.partial`s around the function set.
    """

    function: Callable[..., Array]
    defaults: Mapping[str, Any]
    context: Context | None = None
    run: Callable[[Call, Implementation | None], Output] = dispatch.run
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def combine(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Combines the arguments of a module's call with those that partials set.

        A default, such as None, leaves an argument to the other side.

        Raises:
          TypeError: If the function has no such keyword.
          ValueError: If a keyword is one that modules set, or if the call gives another value.
        """
        result = dict(arguments)
        for name, preset in self.preset.items():
            if name not in self.defaults:
                raise TypeError(
                    f"flax_mha.attention_fn() got an unexpected keyword argument {name!r} of functools.partial"
                )
            if self._is_default(name, preset):
                continue
            if name in FROM_MODULE:
                raise ValueError(
                    f"attention_fn must not set {name}, which the module sets in every call, but got a "
                    "functools.partial that does; use the arguments of the module."
                )
            given = result.get(name)
            if not self._is_default(name, given) and not _is_same(preset, given):
                raise ValueError(
                    f"{name} must be given once, but got one by the functools.partial of attention_fn and another by "
                    "the module or its call; leave one of them out."
                )
            result[name] = preset
        return result

    def _is_default(self, name: str, x: Any) -> bool:
        return x is None or _is_same(x, self.defaults[name])

    def attend(self, query: Array, key: Array, value: Array, arguments: Mapping[str, Any]) -> Array:
        """Computes a call with keyword arguments of `attention_fn`, by the core if that knows all of them."""
        attend = self.compute if is_direct((query, key, value), arguments) else self.function
        return attend(query, key, value, **arguments)

    def compute(self, query: Array, key: Array, value: Array, **arguments: Any) -> Array:
        """Computes a call by the core, without what it does not know."""
        promote_dtype = arguments.get("promote_dtype") or dtypes.promote_dtype
        query, key, value = promote_dtype((query, key, value), dtype=arguments.get("dtype"))
        core = core_arguments(arguments)
        implementation = core.pop("implementation", None)
        if self.context is not None:
            sharding = check_sharding(core.get("qkv_sharding"), query.ndim)
            core["qkv_sharding"] = self.context.with_sharding(sharding, query.ndim)
        return self.run(canonical(query, key, value, **core), implementation)[0]


def core_of(attention_fn: Callable[..., Array]) -> CoreAttention | None:
    """Returns the core of an attention function, through `functools.partial`s that set keywords; None of another's."""
    function: Any = attention_fn
    preset: dict[str, Any] = {}
    # Of exactly these types: a subclass may do more in its call.
    while type(function) in (functools.partial, jax.tree_util.Partial) and not function.args:
        function, preset = function.func, function.keywords | preset
        inner = getattr(function, "fun", None)  # by which jax.tree_util.Partial keeps another partial
        function = inner if type(inner) is functools.partial else function
    core = getattr(function, "core", None)
    if not isinstance(core, CoreAttention) or core.function is not function:
        return None
    return dataclasses.replace(core, preset={**core.preset, **preset}) if preset else core


def is_direct(arrays: Sequence[Array], arguments: Mapping[str, Any]) -> bool:
    """Returns whether the core knows all arguments: no weights to sow, no einsums of Flax, no complex numbers."""
    given = {name for name, x in arguments.items() if x is not None}
    return given <= DIRECT and not any(map(jnp.iscomplexobj, arrays))


def core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the arguments of `dot_product_attention` among those of `attention_fn`."""
    dropout = {"dropout_rate", "dropout_rng"} if arguments.get("deterministic") else set()
    names = CORE - dropout
    core = {name: x for name, x in arguments.items() if name in names and x is not None}
    if not isinstance(core.get("mask"), Mask | None):
        core["mask"] = validation.mask_of_numbers(core["mask"])
    return core


def _is_same(x: Any, y: Any) -> bool:
    """Compares two arguments: one object, or equal static values; arrays are not read."""
    return x is y or (isinstance(x, STATIC) and isinstance(y, STATIC) and x == y)
