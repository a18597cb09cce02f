"""Jaxprs as values: compared by what they compute, and evaluated inside `jax.shard_map`."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array

from flax_mha.core.tracing import is_key, varying_alike

# Parameters of primitives that hold Python functions: the rules of custom derivatives.
RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds: of branches, loops and custom derivatives."""
    for parameter in equation.params.values():
        for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner


def evaluated_alike(jaxpr: Jaxpr, captured: Sequence[Array], arguments: Sequence[Array]) -> Array:
    """The jaxpr's value inside `jax.shard_map`, where all operands must vary over the same axes of the mesh.

    The function was traced for scalars that vary over none.
    """
    values = dict(zip(inputs(jaxpr), (*captured, *arguments), strict=True))

    def read(atoms: Sequence[Any]) -> list[Array]:
        return varying_alike([jnp.asarray(x.val) if isinstance(x, Literal) else values[x] for x in atoms])

    for equation in jaxpr.eqns:
        if any(True for _ in inner_jaxprs(equation)):
            raise NotImplementedError(
                "score_mod and mask_mod must not use control flow or custom derivatives inside jax.shard_map, but "
                f"got {equation.primitive.name}; use jnp.where, or jax.shard_map(..., check_vma=False)."
            )
        if equation.primitive.name in ("pvary", "pcast"):  # captured arrays that varied already while tracing
            values[equation.outvars[0]] = read(equation.invars)[0]
            continue
        results = equation.primitive.bind(*read(equation.invars), **equation.params)
        results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)[0]


# Primitives whose derivatives are 0, 1 or selections, whatever the numbers are.
SELECTING = {
    *("add", "add_any", "sub", "neg", "max", "min", "clamp", "select_n", "stop_gradient", "copy"),
    *("convert_element_type", "reduce_precision", "broadcast_in_dim", "expand_dims", "reshape", "squeeze", "slice"),
    *("dynamic_slice", "gather", "concatenate", "iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
}


def inputs(jaxpr: Jaxpr) -> list[Any]:
    """The variables of captured arrays and arguments; newer jax does not keep the two apart."""
    return [*jaxpr.constvars, *jaxpr.invars]


def derivative_is_finite(jaxpr: Jaxpr, start: int, end: int) -> bool:
    """Returns whether no derivative can be infinite or NaN, whatever floats captured arrays and arguments hold.

    That is so if floats are only selected, added, and multiplied by finite numbers, as in
    score - slopes[h] * (q_idx - kv_idx). A False may be wrong, a True is not.

    Args:
      jaxpr: Of the function.
      start: The first of the inputs that are known to be finite.
      end: One past the last of them.
    """
    variables = inputs(jaxpr)
    data = {v for v in variables[:start] + variables[end:] if _is_float(v)}  # may hold anything
    unbounded: set[Any] = set()  # made of integers alone, but perhaps not finite
    for equation in jaxpr.eqns:
        atoms = [x for x in equation.invars if not isinstance(x, Literal)]
        infinite = [x for x in equation.invars if isinstance(x, Literal) and not np.isfinite(x.val).all()]
        of_data, is_unbounded = [x for x in atoms if x in data], any(x in unbounded for x in atoms) or bool(infinite)
        name, floats = equation.primitive.name, [v for v in equation.outvars if _is_float(v)]
        if name == "mul" and floats and (len(of_data) > 1 or (of_data and is_unbounded)):
            return False
        if name != "mul" and name not in SELECTING and of_data and floats:
            return False
        if of_data:
            data.update(floats)
        elif is_unbounded or name not in SELECTING | {"mul"}:
            unbounded.update(floats)
    return True


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


class _Itself:
    """Equal to the same object alone, for what cannot be compared."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any, with_rules: bool = False) -> Any:
    """Converts a value to a hashable one, equal to another if the values are; unknown objects equal only themselves."""
    if isinstance(value, ClosedJaxpr) and not isinstance(value, Jaxpr):
        return "closed", frozen(value.jaxpr, with_rules), tuple(frozen(x, with_rules) for x in value.consts)
    if isinstance(value, Jaxpr):
        consts = tuple(frozen(x, with_rules) for x in getattr(value, "consts", ()))
        return "jaxpr", key_of(value, with_rules), consts
    if isinstance(value, jax.core.Tracer):
        return _Itself(value)
    if isinstance(value, jax.Array) and is_key(value):
        return "key", str(value.dtype), np.asarray(jax.random.key_data(value)).tobytes()
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return "array", array.dtype.name, array.shape, array.tobytes()
    if isinstance(value, dict):
        return "dict", tuple(sorted((str(name), frozen(x, with_rules)) for name, x in value.items()))
    if isinstance(value, tuple | list):
        return type(value), tuple(frozen(x, with_rules) for x in value)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


def key_of(jaxpr: Jaxpr, with_rules: bool = False) -> tuple:
    """Returns a key that is equal for two jaxprs that compute the same.

    The functions in `RULES` are left out, or with `with_rules` equal to themselves alone.
    """
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Any:
        if isinstance(x, Literal):
            return "literal", str(x.aval), frozen(x.val, with_rules)
        return numbers.setdefault(x, len(numbers)), str(x.aval)

    def equation(e: Any) -> tuple:
        rules = () if with_rules else RULES.get(e.primitive.name, ())
        params = tuple((name, frozen(x, with_rules)) for name, x in sorted(e.params.items()) if name not in rules)
        return e.primitive, params, tuple(map(atom, e.invars)), tuple(map(atom, e.outvars))

    heads = tuple(map(atom, inputs(jaxpr)))
    return heads, tuple(map(equation, jaxpr.eqns)), tuple(map(atom, jaxpr.outvars))


def key_of_derivative(derivative: ClosedJaxpr) -> tuple:
    """Returns a key that is equal for two derivatives that compute the same, with the arrays that they hold.

    Without what is computed for nothing: rules call their own function, though often only its derivative is wanted.
    """
    jaxpr = derivative.jaxpr
    live, equations = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for equation in reversed(jaxpr.eqns):
        if live.intersection(equation.outvars) or equation.effects:
            equations.append(equation)
            live.update(v for v in equation.invars if not isinstance(v, Literal))
    key = key_of(jaxpr.replace(eqns=equations[::-1]), with_rules=True)
    return key, tuple(frozen(x, with_rules=True) for x in derivative.consts)
