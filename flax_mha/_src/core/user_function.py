"""Traces a user's function of one score or one position into a value that `jit` can
compare.

A Python function is a poor static argument of `jit`: two lambdas are never equal, and a
function whose closure has changed still equals itself. So every attention call traces
the function again (inside a user's `jit`, only while JAX traces the program). Two
traces are equal if their printed jaxprs, and what these omit, are equal.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_mha._src.core.jaxprs import (
    Body,
    Program,
    captured_variables,
    custom_call,
    equations,
    evaluate,
    inner_jaxprs,
    is_jaxpr,
    is_literal,
    open_program,
)
from flax_mha._src.core.tracing import without_mesh

NAMES = {
    "b": "batch entries",
    "h": "heads",
    "q_idx": "query positions",
    "kv_idx": "key positions",
}
POSITIONS = tuple(NAMES)
CONDITIONS = ("eq", "ne", "lt", "le", "gt", "ge", "max", "min", "clamp")


class TracedFunction:
    """The jaxpr of a user's function of ([score,] b, h, q_idx, kv_idx). Equal instances
    compute the same.

    Attributes:
      name: Name of the function in errors; not compared.
      body: Its inputs are the captured arrays, then the arguments of the function.
      made_for: The sizes that the function declares by `recipes.masks.made_for`, such
        as {"h": 8}; not compared.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        made_for: Mapping[str, int],
        rules: Sequence[Any] = (),
    ) -> None:
        self.name = name
        self.body = body
        self.made_for = made_for
        # Kept alive, because the key holds the `id` of objects in it.
        self._compared = body, *rules
        self._key = tuple(map(_key, self._compared))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, captured: Sequence[Array], *arguments: Array) -> Array:
        return evaluate(self.body, (*captured, *arguments))[0]

    @property
    def primitives(self) -> set[str]:
        """The names of the primitives in the jaxpr, such as "custom_vjp_call", which
        has no forward mode.
        """
        names = set()
        for equation in equations(self.body):
            call = custom_call(equation)
            names.add(equation.primitive.name if call is None else call[0])
        return names

    def uses(self, position: str) -> bool:
        """Returns whether the function reads the argument `position`: "b", "h", "q_idx"
        or "kv_idx".
        """
        variable = self.body.invars[POSITIONS.index(position) - len(POSITIONS)]
        return any(
            v is variable
            for atoms in (*(e.invars for e in self.body.eqns), self.body.outvars)
            for v in atoms
        )

    @functools.cached_property
    def lookups(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Where the function indexes an array by b, h, q_idx or kv_idx: (name of the
        index, axis, shape of the array).

        Omits an index that also affects a condition, because the condition may discard
        the entry it reads.
        """
        held = _positions(self.body)
        conditional = _conditional(self.body)
        found = []
        for equation in (
            e for e in self.body.eqns if e.primitive.name == "dynamic_slice"
        ):
            array, *indices = _atoms(equation)
            for axis, index in enumerate(indices):
                # An int, or a symbol of `jax.export`.
                size: Any = array.aval.shape[axis]
                is_known = (
                    index in held
                    and isinstance(size, int)
                    and size <= jnp.iinfo(index.aval.dtype).max
                )
                if is_known and held[index] not in conditional:
                    found.append((held[index], axis, array.aval.shape))
        return found

    @functools.cached_property
    def entries_of_heads(self) -> list[bool]:
        """For each captured array, whether the function only reads it as array[b, h,
        ...]: a head needs one entry.
        """
        held = _positions(self.body)
        found = []
        for variable in self.body.invars[: -len(POSITIONS)]:
            uses = [e for e in self.body.eqns if any(x is variable for x in e.invars)]
            found.append(
                bool(uses)
                and all(_is_entry(e, held) for e in uses)
                and variable not in self.body.outvars
            )
        return found

    def size(self, position: str) -> int | None:
        """Returns how many values `position`, such as "q_idx", may have by `lookups`
        and `made_for`; None: no limit.
        """
        sizes = [shape[axis] for name, axis, shape in self.lookups if name == position]
        return min(
            [
                *sizes,
                *(size for name, size in self.made_for.items() if name == position),
            ],
            default=None,
        )

    def check(self, last: Mapping[str, int | None]) -> None:
        """Raises a ValueError if the call does not fit `made_for`, or if an index is
        certainly beyond a captured array.

        JAX clamps an index that is too large, so an array that is too short would give
        wrong numbers and no error. `last` maps b, h, q_idx and kv_idx to their largest
        visible value, or to None if it is not known.
        """
        for name, size in self.made_for.items():
            value = last[name]
            if value is not None and (
                value >= size or (name in "bh" and value + 1 < size)
            ):
                raise ValueError(
                    f"{self.name} was created for {size} {NAMES[name]}, but the call "
                    f"has {value + 1}."
                )
        for name, axis, shape in self.lookups:
            if (value := last[name]) is not None and value >= shape[axis]:
                raise ValueError(
                    f"{self.name} must not index arrays out of bounds, but at {name} = "
                    f"{value}, it uses index {value} on axis {axis} of an array with "
                    f"shape {shape}; extend that axis to at least {value + 1}, or clip "
                    f"the index with jnp.clip(index, 0, {shape[axis] - 1})."
                )


class Trace(NamedTuple):
    """A traced function and the arrays that it captures: `learned` get gradients,
    `constants` do not.

    The first inputs of the jaxpr are the arrays `learned`, then `constants`.
    """

    function: TracedFunction
    learned: list[Array]
    constants: list[Array]


def trace(name: str, function: Any, score: jnp.dtype | None = None) -> Trace:
    """Traces a `score_mod` (`score`: dtype of scores) or `mask_mod` (`score`: None);
    copies captured NumPy arrays.

    Raises:
      ValueError: If `function` is not callable, raises an error, or does not return one
        score or one bool.
    """
    program = _checked_program(name, function, score)
    # NumPy arrays are copied: JAX would keep the first values of one that changes, for
    # as long as it holds the array.
    captured = [
        x if isinstance(x, jax.Array) else jnp.asarray(np.array(x))
        for x in program.consts
    ]
    pairs = list(zip(captured_variables(program), captured, strict=True))
    if score is not None and any(
        jnp.issubdtype(x.dtype, jnp.complexfloating) for x in captured
    ):
        raise ValueError(
            f"{name} must not capture complex arrays, but {function!r} does; capture "
            "x.real and x.imag."
        )

    # An array that is differentiated is a tracer.
    def is_constant(pair: tuple[Any, Array]) -> bool:
        is_float = jnp.issubdtype(pair[1].dtype, jnp.floating)
        return score is None or not is_float or not isinstance(pair[1], jax.core.Tracer)

    pairs = sorted(pairs, key=is_constant)
    number = sum(not is_constant(pair) for pair in pairs)
    body = open_program(program, [variable for variable, _ in pairs])
    rules = () if score is None else _rules(body, function)
    traced = TracedFunction(
        f"{name} {_name_of(function)}", body, getattr(function, "made_for", {}), rules
    )
    return Trace(traced, [x for _, x in pairs[:number]], [x for _, x in pairs[number:]])


def _checked_program(name: str, function: Any, score: jnp.dtype | None) -> Program:
    """Traces a function and checks that it returns one scalar, of dtype `score` or, if
    `score` is None, a bool.
    """
    if not callable(function):
        raise ValueError(f"{name} must be a function of scalars, but got {function!r}.")
    scores = {} if score is None else {"score": score}
    [result] = scores.values() or [jnp.dtype(bool)]
    wanted = f"{name}({', '.join([*scores, *POSITIONS])}) must return a {result.name} scalar for scalar arguments"

    def run(*scalars: Array) -> Any:
        # JAX would reuse old traces of jitted helpers, even if their closures have
        # changed.
        with jax.disable_jit():
            return function(*scalars)

    try:
        with without_mesh():
            program = jax.make_jaxpr(run)(
                *(
                    jax.ShapeDtypeStruct((), x)
                    for x in (*scores.values(), *[jnp.int32] * 4)
                )
            )
    except Exception as error:
        reason = (
            f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
        )
        raise ValueError(
            f"{wanted}, but {_name_of(function)} raised {reason}{_fix(error)}."
        ) from error
    if [(x.shape, x.dtype) for x in program.out_avals] != [((), result)]:
        got = ", ".join(aval.str_short() for aval in program.out_avals) or "nothing"
        raise ValueError(
            f"{wanted}, but {_name_of(function)} returned {got}; use .astype or "
            "jnp.where on scalars."
        )
    return program


def _name_of(function: Any) -> str:
    """Returns the name of a function, of the function inside a `functools.partial`, or
    of a callable's class.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__).replace(
        "<locals>.", ""
    )


def _fix(error: Exception) -> str:
    """Returns advice on an error that a user's function raised, or an empty string."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            "; use jnp.where instead of `if`, and & | ~ instead of `and`, `or`, `not`"
        )
    if type(error).__name__ == "ShardingTypeError":
        return "; capture jax.reshard(array, jax.P()) instead of a sharded array: every device needs all its entries"
    conversions = (
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    # The latter from torch.
    if isinstance(error, conversions) or "len() of unsized" in str(error):
        return "; captured NumPy arrays, lists and torch tensors cannot be indexed by positions: use jnp.asarray(...)"
    return ""


def _key(compared: Any) -> tuple:
    """Returns what `==` compares: a function's `id`, or a jaxpr's text and the `id`s of
    its constants and callbacks.
    """
    if not is_jaxpr(compared):
        return (id(compared),)
    inside = list(equations(compared))
    nested = (
        compared,
        *(inner for equation in inside for inner in inner_jaxprs(equation)),
    )
    constants = (x for one in nested for x in getattr(one, "consts", ()))
    callbacks = (x.params["callback"] for x in inside if "callback" in x.params)
    return (
        str(compared),
        *map(id, constants),
        *(id(getattr(x, "callback_func", x)) for x in callbacks),
    )


def _rules(body: Body, function: Any) -> list[Any]:
    """Lists what else must be equal for equal functions: jaxprs of derivatives, which
    show rules of custom derivatives.

    Goes on while new rules appear. `function` is added if tracing fails, or if the
    fourth derivative has new rules.
    """

    def custom(body: Body) -> set[tuple]:
        calls = [
            call
            for equation in equations(body)
            if (call := custom_call(equation)) is not None
        ]
        return {(called.debug_info.func_src_info, str(called)) for _, called in calls}

    def pull(values: list[Array], cotangents: list[Array]) -> Any:
        with jax.disable_jit():
            pulled = jax.vjp(lambda *values: evaluate(body, values), *values)[1](
                cotangents
            )
        return [x for x in pulled if x.dtype != jax.dtypes.float0]

    found = list[Any]()
    known = set[tuple]()
    while (new := custom(body) - known) and len(found) < 4:
        known |= new
        try:
            found.append(
                jax.make_jaxpr(pull)(
                    [v.aval for v in body.invars], [v.aval for v in body.outvars]
                )
            )
        except Exception:  # the function may still be used without derivatives
            return [*found, function]
        body = open_program(found[-1])
    if new:
        return [*found, function]
    return found


def _positions(body: Any) -> dict[Any, str]:
    """Maps each variable that equals b, h, q_idx or kv_idx, cast or wrapped (`where(i <
    0, i + n, i)`), to its name.
    """
    held = dict[Any, str](zip(body.invars[-len(POSITIONS) :], POSITIONS, strict=True))
    from_end = dict[Any, str]()
    for equation in body.eqns:
        name = equation.primitive.name
        result = (*equation.outvars, None)[0]
        atoms = _atoms(equation)
        if (
            name == "convert_element_type"
            and atoms[0] in held
            and jnp.issubdtype(result.aval.dtype, jnp.integer)
        ):
            held[result] = held[atoms[0]]
        elif (
            name == "add"
            and atoms[0] in held
            and atoms[1] is None
            and equation.invars[1].val > 0
        ):
            from_end[result] = held[atoms[0]]
        elif (
            name == "select_n"
            and atoms[1] in held
            and from_end.get(atoms[2]) == held[atoms[1]]
        ):
            held[result] = held[atoms[1]]
    return held


def _is_entry(equation: Any, held: Mapping[Any, str]) -> bool:
    """Returns whether an equation reads array[b, h, ...], the part of one head; for
    `held` see `_positions`.
    """
    is_slice = equation.primitive.name == "dynamic_slice" and equation.params[
        "slice_sizes"
    ][:2] == (1, 1)
    return is_slice and [held.get(x) for x in _atoms(equation)[1:3]] == ["b", "h"]


def _conditional(body: Any) -> set[str]:
    """Returns which of b, h, q_idx and kv_idx affect a comparison or branch, as in
    `where(q_idx < 8, x[q_idx], 0)`.
    """
    sources = {
        v: {name}
        for v, name in zip(body.invars[-len(POSITIONS) :], POSITIONS, strict=True)
    }
    found = set[str]()
    for equation in body.eqns:
        name = equation.primitive.name
        atoms = _atoms(equation)
        # JAX checks this for each index.
        is_sign = name == "lt" and atoms[1] is None and equation.invars[1].val == 0
        read = atoms[:1] if name in ("dynamic_slice", "gather") else atoms
        of = set[str]().union(*(sources.get(x, ()) for x in read))
        sources.update(dict.fromkeys(equation.outvars, of))
        if (name in CONDITIONS and not is_sign) or any(
            True for _ in inner_jaxprs(equation)
        ):
            found |= of
    return found


def _atoms(equation: Any) -> list[Any]:
    """Lists the operands of an equation: variables, and None in place of each literal
    number.
    """
    return [None if is_literal(x) else x for x in equation.invars]
