"""Functions with handwritten rules for both forward and reverse mode, and so with
derivatives of every order.

The tangent of attention is a linear function of its inputs' tangents, and the transpose
of that function is the backward pass of FlashAttention. `jax.custom_vjp` takes only the
transpose, so it has no forward mode. `jax.custom_jvp` takes only the tangent, and loses
its rule in a loop that is differentiated in reverse mode.
`jax.custom_derivatives.linear_call` takes both, but supports neither `jax.vmap` nor
derivatives with respect to arguments in which the function is not linear. The JAX
primitive in this file supports all of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from flax_mha._src.core.jaxprs import Program, as_function
from flax_mha._src.core.products import products_are_replaced

# For every `jax.vmap` around a call, the innermost first: the size of its axis, and
# which arguments it maps.
Levels = tuple[tuple[int, tuple[bool, ...]], ...]
Tangents = Mapping[int, Array]  # the tangents of some arguments, by argument number


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function of arrays as one JAX operation, with rules to differentiate, transpose
    and `vmap` it.
    """

    # Arrays, or structures, with the shapes and dtypes of the outputs.
    outputs: Sequence[Any]
    # `evaluate(*arguments)` computes the outputs; it need not be differentiable.
    evaluate: Callable[..., Sequence[Array]]
    # `jvp(arguments, tangents)` computes the outputs and their tangents (None for zero)
    # from some arguments' tangents.
    jvp: Callable[[Sequence[Any], Tangents], Any]
    # `transpose(residuals, cotangents)` maps the outputs' cotangents to cotangents of
    # the linear arguments; `residuals` are all arguments before the linear ones.
    transpose: Callable[[Sequence[Any], Sequence[Array]], Sequence[Array]] | None = None
    # The function is jointly linear in the argument with this number and all that
    # follow; None: not linear.
    first_linear: int | None = None
    # `evaluate`, traced, if JAX must find operations in it that depend on their
    # devices.
    program: Program | None = None

    def __call__(self, *arguments: Array) -> list[Array]:
        arguments = tuple(map(jnp.asarray, arguments))
        function = self
        if products_are_replaced():
            # Inside `jit`, JAX calls `evaluate` when it compiles the program; the tool
            # may be gone by then.
            traced = jax.make_jaxpr(self.evaluate)(*arguments)
            function = dataclasses.replace(self, evaluate=as_function(traced))
        return _function.bind(
            *arguments, function=function, levels=(), jaxpr=self.program
        )


def linear_function(
    outputs: Sequence[Any],
    evaluate: Callable[..., Sequence[Array]],
    transpose: Callable[[Sequence[Any], Sequence[Array]], Sequence[Array]],
    first: int,
    portable: Callable[..., Sequence[Array]] | None = None,
    program: Program | None = None,
) -> Function:
    """Makes a `Function` that is linear in `arguments[first:]` jointly: its tangent is
    the function of their tangents.

    If an earlier argument has a tangent, JAX differentiates `portable` instead, which
    has the same results; None means `evaluate` itself. The other parameters are fields
    of `Function`.
    """

    def jvp(arguments: Sequence[Any], tangents: Tangents) -> Any:
        outputs = function(*arguments)
        if min(tangents) < first:
            differentiable = portable or evaluate
            return outputs, differentiate(differentiable, arguments, tangents)
        linear = []
        for i in range(first, len(arguments)):
            linear.append(tangents.get(i, jnp.zeros_like(arguments[i])))
        return outputs, function(*arguments[:first], *linear)

    function = Function(
        outputs=outputs,
        evaluate=evaluate,
        jvp=jvp,
        transpose=transpose,
        first_linear=first,
        program=program,
    )
    return function


def reverse_only(x: Array, error: str) -> Array:
    """Returns `x`, but only reverse mode can differentiate it: forward mode raises a
    NotImplementedError (`error`).
    """

    def refuse(*_: Array) -> Sequence[Array]:
        raise NotImplementedError(error)

    def jvp(arguments: Sequence[Any], tangents: Tangents) -> Any:
        return arguments, tangent(tangents[0])

    def transpose(_: object, cotangents: Sequence[Array]) -> Sequence[Array]:
        return cotangents

    like = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    # Reverse mode transposes the tangent, and never evaluates it.
    tangent = Function(like, refuse, jvp, transpose, first_linear=0)
    identity = Function(like, lambda *x: x, jvp)
    return identity(x)[0]


def differentiate(
    function: Callable, arguments: Sequence[Any], tangents: Tangents
) -> Sequence[Array]:
    """Computes the tangents of the outputs of `function(*arguments)`; `tangents` maps
    argument numbers to tangents.
    """
    of_some, some = restricted(function, arguments, tangents)
    _, d_outputs = jax.jvp(of_some, some, tuple(tangents.values()))
    return d_outputs


def restricted(
    function: Callable, arguments: Sequence[Any], places: Iterable[int]
) -> tuple[Callable[..., list[Array]], tuple[Any, ...]]:
    """Returns `function` as a function of only the arguments at the indices `places`,
    and these arguments.
    """

    def of_some(*some: Array) -> list[Array]:
        return list(function(*replace_at(arguments, places, some)))

    return of_some, tuple(arguments[i] for i in places)


def replace_at(
    leaves: Sequence[Array], places: Iterable[int], some: Sequence[Array]
) -> list[Array]:
    """Returns a copy of the list `leaves` with the entries at the indices `places`
    replaced by the arrays `some`.
    """
    replaced = dict(zip(places, some, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(leaves)]


_function = Primitive("function")
_function.multiple_results = True


def _map(function: Callable, flags_of_levels: Sequence[Sequence[bool]]) -> Callable:
    for flags in flags_of_levels:
        axes = tuple(0 if flag else None for flag in flags)
        function = jax.vmap(function, axes)
    return function


@_function.def_impl
def _evaluate(
    *arguments: object, function: Function, levels: Levels, jaxpr: Program | None
) -> list[Array]:
    evaluate = _map(function.evaluate, [flags for _, flags in levels])
    return list(evaluate(*arguments))


mlir.register_lowering(_function, mlir.lower_fun(_evaluate, multiple_results=True))


@_function.def_abstract_eval
def _types(
    *arguments: Any, function: Function, levels: Levels, jaxpr: Program | None
) -> list[Any]:
    # In `jax.shard_map`, outputs vary over the arguments' mesh axes, which callers make
    # alike (`varying_alike`).
    like = next(x for x in arguments if jnp.issubdtype(x.dtype, jnp.floating))
    sizes = tuple(size for size, _ in reversed(levels))
    types = []
    for x in function.outputs:
        shape = (*sizes, *x.shape)
        unsplit = jax.P(*(None,) * len(shape))
        aval = like.update(
            shape=shape,
            dtype=x.dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=unsplit),
        )
        types.append(aval)
    return types


def _batch(
    arguments: Sequence[Any],
    axes: Sequence[int | None],
    *,
    function: Function,
    levels: Levels,
    jaxpr: Program | None,
) -> tuple[list[Array], list[int]]:
    first_linear = function.first_linear
    if first_linear is None:
        first_linear = len(arguments)
    sizes = []
    for x, axis in zip(arguments, axes, strict=True):
        if axis is not None:
            sizes.append(x.shape[axis])
    size = sizes[0]

    mapped = []
    flags = []
    for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
        is_linear = i >= first_linear
        if axis is not None:
            x = jnp.moveaxis(x, axis, 0)
        elif is_linear:
            # `_transpose` returns a cotangent for each mapped call; the broadcast sums
            # them.
            x = jnp.broadcast_to(x, (size, *x.shape))
        mapped.append(x)
        flags.append(axis is not None or is_linear)
    outputs = _function.bind(
        *mapped, function=function, levels=(*levels, (size, tuple(flags))), jaxpr=jaxpr
    )
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_function] = _batch


def _jvp(
    arguments: Sequence[Any],
    tangents: Sequence[Any],
    *,
    function: Function,
    levels: Levels,
    jaxpr: Program | None,
) -> tuple[list[Array], list[Any]]:
    count = len(arguments)
    places = []
    for i, x in enumerate(tangents):
        is_zero = isinstance(x, ad.Zero) or x.dtype == jax.dtypes.float0
        if not is_zero:
            places.append(i)
    if not places:
        outputs = _function.bind(
            *arguments, function=function, levels=levels, jaxpr=jaxpr
        )
        return outputs, [_zero_tangent(x) for x in outputs]

    def jvp(*both: Array) -> tuple[list[Array], list[Array]]:
        by_place = dict(zip(places, both[count:], strict=True))
        outputs, tangents = function.jvp(both[:count], by_place)
        return list(outputs), list(tangents)

    # A tangent is mapped like its argument.
    flags_of_both = []
    for _, flags in levels:
        flags_of_both.append((*flags, *(flags[i] for i in places)))
    mapped = _map(jvp, flags_of_both)
    outputs, d_outputs = mapped(*arguments, *(tangents[i] for i in places))
    known = []
    for x, d_x in zip(outputs, d_outputs, strict=True):
        if d_x is None:
            d_x = _zero_tangent(x)
        known.append(d_x)
    return outputs, known


def _zero_tangent(x: Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


ad.primitive_jvps[_function] = _jvp


def _transpose(
    cotangents: Sequence[Any],
    *arguments: object,
    function: Function,
    levels: Levels,
    jaxpr: Program | None,
) -> list[Any]:
    first = function.first_linear
    transpose = function.transpose
    if first is None or transpose is None:
        raise NotImplementedError(
            "jax.linear_transpose does not support attention; use jax.vjp."
        )

    def pull(*both: Array) -> list[Array]:
        return list(transpose(both[:first], both[first:]))

    # Outputs are always mapped (`_batch`), so their cotangents are.
    flags_of_both = []
    for _, flags in levels:
        flags_of_both.append((*flags[:first], *(True for _ in cotangents)))
    instantiated = map(ad.instantiate_zeros, cotangents)
    pulled = _map(pull, flags_of_both)(*arguments[:first], *instantiated)

    # JAX wants None for each argument that it does not transpose.
    result: list[Any] = [None] * first
    for x, argument in zip(pulled, arguments[first:], strict=True):
        is_wanted = ad.is_undefined_primal(argument)
        result.append(x if is_wanted else None)
    return result


ad.primitive_transposes[_function] = _transpose
