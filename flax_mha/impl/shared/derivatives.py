"""Functions whose derivatives are written by hand, and which have derivatives of every order.

The tangent of attention is a linear function of its inputs' tangents, and the transpose of that is FlashAttention's
backward pass. `jax.custom_vjp` takes the second alone, and so has no forward mode. `jax.custom_jvp` takes the first
alone, and is forgotten in the body of a loop that is differentiated in reverse mode.
`jax.custom_derivatives.linear_call` takes both, but knows neither `jax.vmap` nor derivatives by what the function is
not linear in. So this is a primitive that knows all of it.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

# For every `jax.vmap` around a call, the innermost first: its size, and which arguments it maps.
Levels = tuple[tuple[int, tuple[bool, ...]], ...]


class Function(abc.ABC):
    """A function of arrays with a rule for `jax.jvp`.

    Attributes:
      outputs: Shapes and dtypes of the arrays that it returns.
      first_linear: It is linear in its arguments from this one on, jointly; None if it is not.
      jaxpr: Of what it evaluates, if `jax` has to look through it for operations that need to know their devices.
    """

    outputs: Sequence[jax.ShapeDtypeStruct]
    first_linear: int | None = None
    jaxpr: ClosedJaxpr | None = None

    @abc.abstractmethod
    def evaluate(self, *arguments: Any) -> Sequence[Array]:
        """Computes the outputs by operations that `jax` need not differentiate."""

    @abc.abstractmethod
    def jvp(self, arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        """Computes outputs and their tangents (None: zero) from the tangents of some arguments, by their places."""

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        """Computes the cotangents of the linear arguments from the arguments before them and those of the outputs."""
        raise NotImplementedError

    def __call__(self, *arguments: Array) -> list[Array]:
        """Calls the function as one operation, which `jax` can differentiate, transpose and map."""
        return _function.bind(*map(jnp.asarray, arguments), function=self, levels=(), jaxpr=self.jaxpr)


@dataclasses.dataclass(frozen=True, eq=False)
class ReverseOnly(Function):
    """The identity of an array, which raises `error` where its tangent is computed, and is not transposed before."""

    outputs: tuple[jax.ShapeDtypeStruct]
    error: str
    first_linear: int | None = None  # 0 of the tangent

    @classmethod
    def of(cls, x: Array, error: str) -> Array:
        """Calls it."""
        [x] = cls((jax.ShapeDtypeStruct(x.shape, x.dtype),), error)(x)
        return x

    def evaluate(self, *arguments: Any) -> Sequence[Array]:
        """Returns the array."""
        if self.first_linear is not None:
            raise NotImplementedError(self.error)
        return arguments

    def jvp(self, arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        """Returns the array and its tangent, if that is only transposed."""
        return arguments, dataclasses.replace(self, first_linear=0)(tangents[0])

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        """Returns the cotangent."""
        return cotangents


def replace_at(leaves: Sequence[Array], places: Iterable[int], some: Sequence[Array]) -> list[Array]:
    """Replaces the entries at these places."""
    replaced = dict(zip(places, some, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(leaves)]


def move_linear(
    function: Function, arguments: Sequence[Any], tangents: Mapping[int, Array], portable: Callable | None = None
) -> Sequence[Array]:
    """The tangents of a linear function: itself if only its linear arguments move, else those that `jax.jvp` returns.

    Args:
      function: The function.
      arguments: Its arguments.
      tangents: Tangents of some, by their places.
      portable: Computes the same by operations that `jax` can differentiate; None: `function.evaluate` does.
    """
    first = function.first_linear
    assert first is not None
    if min(tangents) >= first:
        linear = [tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(arguments) if i >= first]
        return function(*arguments[:first], *linear)

    def moved(*some: Array) -> list[Array]:
        return list((portable or function.evaluate)(*replace_at(arguments, tangents, some)))

    return jax.jvp(moved, tuple(arguments[i] for i in tangents), tuple(tangents.values()))[1]


_function = Primitive("function")
_function.multiple_results = True


def _map(function: Callable, flags_of_levels: Sequence[Sequence[bool]]) -> Callable:
    for flags in flags_of_levels:
        function = jax.vmap(function, tuple(0 if flag else None for flag in flags))
    return function


@_function.def_impl
def _evaluate(*arguments: Any, function: Function, levels: Levels, jaxpr: Any) -> list[Array]:
    return list(_map(function.evaluate, [flags for _, flags in levels])(*arguments))


mlir.register_lowering(_function, mlir.lower_fun(_evaluate, multiple_results=True))


@_function.def_abstract_eval
def _types(*arguments: Any, function: Function, levels: Levels, jaxpr: Any) -> list[Any]:
    like = next(x for x in arguments if jnp.issubdtype(x.dtype, jnp.floating))
    sizes, types = tuple(size for size, _ in reversed(levels)), []
    for x in function.outputs:
        shape = (*sizes, *x.shape)
        sharding = like.sharding.update(spec=jax.P(*(None,) * len(shape)))
        types.append(like.update(shape=shape, dtype=x.dtype, weak_type=False, sharding=sharding))
    return types


def _batch(
    arguments: Sequence[Any], axes: Sequence[int | None], *, function: Function, levels: Levels, jaxpr: Any
) -> tuple[list[Array], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None)
    first_linear = len(arguments) if function.first_linear is None else function.first_linear
    mapped, flags = [], []
    for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
        if axis is not None:
            x = jnp.moveaxis(x, axis, 0)
        elif i >= first_linear:  # what the transpose returns is mapped; the transpose of this sums it
            x = jnp.broadcast_to(x, (size, *x.shape))
        mapped.append(x)
        flags.append(axis is not None or i >= first_linear)
    outputs = _function.bind(*mapped, function=function, levels=(*levels, (size, tuple(flags))), jaxpr=jaxpr)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_function] = _batch


def _jvp(
    arguments: Sequence[Any], tangents: Sequence[Any], *, function: Function, levels: Levels, jaxpr: Any
) -> tuple[list[Array], list[Any]]:
    count = len(arguments)
    places = [i for i, x in enumerate(tangents) if not (isinstance(x, ad.Zero) or x.dtype == jax.dtypes.float0)]
    if not places:
        outputs = _function.bind(*arguments, function=function, levels=levels, jaxpr=jaxpr)
        return outputs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]

    def jvp(*both: Any) -> tuple[list[Array], list[Array]]:
        outputs, tangents = function.jvp(both[:count], dict(zip(places, both[count:], strict=True)))
        return list(outputs), list(tangents)

    mapped = _map(jvp, [(*flags, *(flags[i] for i in places)) for _, flags in levels])
    outputs, moved = mapped(*arguments, *(tangents[i] for i in places))
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]
    return outputs, [zero if x is None else x for x, zero in zip(moved, zeros, strict=True)]


ad.primitive_jvps[_function] = _jvp


def _transpose(cotangents: Sequence[Any], *arguments: Any, function: Function, levels: Levels, jaxpr: Any) -> list[Any]:
    first = function.first_linear
    assert first is not None

    def pull(*both: Any) -> list[Array]:
        return list(function.transpose(both[:first], both[first:]))

    flags = [(*flags[:first], *(True for _ in cotangents)) for _, flags in levels]
    linear = _map(pull, flags)(*arguments[:first], *map(ad.instantiate_zeros, cotangents))
    wanted = map(ad.is_undefined_primal, arguments[first:])
    return [None] * first + [x if mine else None for x, mine in zip(linear, wanted, strict=True)]


ad.primitive_transposes[_function] = _transpose
