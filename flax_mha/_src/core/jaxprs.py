"""Compares jaxprs by what they compute, and evaluates them inside `jax.shard_map`."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array

from flax_mha._src.core.tracing import is_key, varying_alike

# The parameters of primitives that are Python functions: rules for custom derivatives.
RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Iterates over the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Iterates over an equation's jaxprs: branches, loop bodies, functions with custom derivatives."""
    for parameter in equation.params.values():
        for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner


def key_of(value: Any, without_rules: frozenset | None = None) -> tuple:
    """Converts a jaxpr, or a value inside one, to a hashable key; jaxprs that compute the same have equal keys.

    An object that cannot be hashed is represented by its `id`, so it must live as long as the key.

    Args:
      value: A jaxpr, or a constant or parameter of one.
      without_rules: Keys of functions whose rules for custom derivatives are ignored. The rules of all other functions
        are compared by their `id`. None ignores all rules.
    """
    key = functools.partial(key_of, without_rules=without_rules)
    if isinstance(value, Jaxpr):
        return _key_of_jaxpr(value, without_rules), *map(key, getattr(value, "consts", ()))
    if isinstance(value, ClosedJaxpr):
        return key(value.jaxpr), *map(key, value.consts)
    if isinstance(value, tuple | list):
        return type(value), *map(key, value)
    if isinstance(value, jax.Array) and is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.core.Tracer):
        return "object", id(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return array.dtype.name, array.shape, array.tobytes()
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value


def _key_of_jaxpr(jaxpr: Jaxpr, without_rules: frozenset | None) -> tuple:
    """Converts a jaxpr to a key; ignores equations whose results nothing uses, as custom derivatives add them."""
    live, needed, numbers = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, [], dict[Any, int]()
    for equation in reversed(jaxpr.eqns):
        if equation.effects or live.intersection(equation.outvars):
            needed.append(equation)
            live.update(v for v in equation.invars if not isinstance(v, Literal))

    def atom(x: Any) -> tuple:
        name = key_of(x.val) if isinstance(x, Literal) else numbers.setdefault(x, len(numbers))
        return name, str(x.aval)

    def key(e: Any) -> tuple:
        rules = RULES.get(e.primitive.name, ())
        if rules and without_rules is not None and key_of(e.params["call_jaxpr"]) not in without_rules:
            rules = ()
        params = tuple((name, key_of(x, without_rules)) for name, x in sorted(e.params.items()) if name not in rules)
        return e.primitive, params, *map(atom, (*e.invars, *e.outvars))

    return *map(atom, (*jaxpr.constvars, *jaxpr.invars)), *map(key, reversed(needed)), *map(atom, jaxpr.outvars)


def evaluate_varying(jaxpr: Jaxpr, values: Sequence[Array]) -> Array:
    """Evaluates a jaxpr with one result inside `jax.shard_map`, though it was traced outside.

    Inside, the operands of a primitive must vary over the same mesh axes, so the operands of every equation are cast.
    """
    known = dict(zip(jaxpr.invars, values, strict=True))

    def read(atoms: Sequence[Any]) -> list[Array]:
        return varying_alike([jnp.asarray(x.val) if isinstance(x, Literal) else known[x] for x in atoms])

    for equation in jaxpr.eqns:
        if any(True for _ in inner_jaxprs(equation)):
            raise NotImplementedError(
                "score_mod and mask_mod must not use control flow or custom derivatives inside jax.shard_map, but "
                f"got {equation.primitive.name}; use jnp.where, or jax.shard_map(..., check_vma=False)."
            )
        results = read(equation.invars)
        if equation.primitive.name not in ("pvary", "pcast"):  # these cast captured arrays
            results = equation.primitive.bind(*results, **equation.params)
        results = results if isinstance(results, list | tuple) else [results]
        known.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)[0]


# Primitives whose derivatives are 0, 1, -1 or selections, for all numbers.
SELECTING = {
    *("add", "add_any", "sub", "neg", "max", "min", "clamp", "select_n", "stop_gradient", "copy"),
    *("convert_element_type", "reduce_precision", "broadcast_in_dim", "expand_dims", "reshape", "squeeze", "slice"),
    *("dynamic_slice", "gather", "concatenate", "iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
}


def derivative_is_finite(jaxpr: Jaxpr) -> bool:
    """Returns True if no derivative can be infinite or NaN, for any floats in captured arrays and arguments.

    That is so if floats are only selected, added, and multiplied by finite numbers, as in
    score - slopes[h] * (q_idx - kv_idx). Other functions return False even if their derivatives are finite.
    """
    data = {v for v in (*jaxpr.constvars, *jaxpr.invars) if is_float(v)}  # and floats computed from these
    unbounded: set[Any] = set()  # floats computed from integers alone that may be infinite or NaN
    for equation in jaxpr.eqns:
        name, floats = equation.primitive.name, [v for v in equation.outvars if is_float(v)]
        atoms = [x for x in equation.invars if not isinstance(x, Literal)]
        numbers = [x.val for x in equation.invars if isinstance(x, Literal)]
        of_data = [x for x in atoms if x in data]
        is_unbounded = any(x in unbounded for x in atoms) or not all(np.isfinite(x).all() for x in numbers)
        is_product = name == "mul" and len(of_data) == 1 and not is_unbounded
        if of_data and floats and not is_product and name not in SELECTING:
            return False
        if of_data:
            data.update(floats)
        elif is_unbounded or name not in SELECTING | {"mul"}:
            unbounded.update(floats)
    return True


def is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
