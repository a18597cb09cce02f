"""Programs that JAX has traced (jaxprs): how to read, shorten and evaluate them.

JAX changes the classes of its jaxprs, and the operations that it traces, from time to
time, so only this file reads them. Elsewhere, a jaxpr with its constants is a
`Program`, and one that takes all its arrays as arguments is a `Body`.

The second half recognizes what users' functions do. If JAX traces `x[i]` differently,
nothing fails but the checks of bounds stop; `tests/test_lookups.py` notices.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import Array

from flax_mha._src.core.tracing import varying_alike, varying_axes

Program = ClosedJaxpr
Body = Jaxpr
# The last inputs of a user's function of scores.
POSITIONS = ("b", "h", "q_idx", "kv_idx")
# Kernels are JAX primitives whose names begin with these.
KERNELS = ("pallas_call", "dot_product_attention", "__cudnn$fmha")
# Returns a function that evaluates a program and returns its results as a list.
as_function = jaxpr_as_fun
CONDITIONS = ("eq", "ne", "lt", "le", "gt", "ge", "max", "min", "clamp")


def traced(function: Callable, *arguments: object) -> Program:
    """Traces a function to a program that an operation may keep as a parameter.

    JAX 0.12 does not support parameters that hold operations which it expands before
    it compiles: `jnp.nonzero`, or `custom_vjp` with the flag jax_custom_vjp3.
    """
    program = jax.make_jaxpr(function)(*arguments)
    if getattr(program, "is_high", False) and hasattr(partial_eval, "lower_jaxpr2"):
        return partial_eval.lower_jaxpr2(program)
    return program


def with_outputs(program: Program, wanted: Sequence[bool]) -> Program:
    """Reduces a program to the outputs that `wanted` marks, and the equations that
    these need.
    """
    body, _ = partial_eval.dce_jaxpr(program.jaxpr, list(wanted), instantiate=True)
    return ClosedJaxpr(body, program.consts)


def open_program(program: Program, order: Sequence[int] | None = None) -> Body:
    """Turns the constants of a program, the arrays `program.consts`, into its first
    inputs; `order` holds their indices, and None keeps their order.
    """
    body = program.jaxpr
    captured = body.constvars
    if order is not None:
        captured = [captured[i] for i in order]
    return body.replace(constvars=[], invars=[*captured, *body.invars])


def is_jaxpr(x: object) -> TypeGuard[Body | Program]:
    """Returns whether `x` is a traced program, with or without its constants."""
    return isinstance(x, Jaxpr | ClosedJaxpr)


def evaluate(body: Body, values: Sequence[Array]) -> list[Array]:
    """Evaluates the jaxpr of a user's function.

    In `jax.shard_map`, it casts the operands of each equation by `varying_alike`, and
    raises an error for control flow.
    """
    if not any(map(varying_axes, values)):
        return as_function(ClosedJaxpr(body, ()))(*values)
    known = dict(zip(body.invars, values, strict=True))

    def value_of(atom: Var | Literal) -> Array:
        return jnp.asarray(atom.val) if isinstance(atom, Literal) else known[atom]

    def read(atoms: Sequence[Any]) -> list[Array]:
        return varying_alike([value_of(atom) for atom in atoms])

    for equation in body.eqns:
        # The equations inside would also need casts.
        if _has_jaxprs(equation):
            raise NotImplementedError(
                "score_mod and mask_mod must not use control flow or custom "
                f"derivatives inside jax.shard_map, but got {_name(equation)}; "
                "use jnp.where, or jax.shard_map(..., check_vma=False)."
            )
        results = read(equation.invars)
        # These cast captured arrays.
        if _name(equation) not in ("pvary", "pcast"):
            results = equation.primitive.bind(*results, **equation.params)
        if not isinstance(results, list | tuple):
            results = [results]
        known.update(zip(equation.outvars, results, strict=True))
    return read(body.outvars)


# What a program does ------------------------------------------------------------------


def runs_kernel(program: Program) -> bool:
    """Returns whether a program runs a fused kernel, by the name of an operation or of
    a custom call.
    """
    names = []
    for equation in _equations(program):
        names += [_name(equation), equation.params.get("target_name", "")]
    return any(name.startswith(KERNELS) for name in names)


def custom_functions(body: Body) -> set[tuple]:
    """Returns the functions with custom derivatives that a jaxpr calls: where each is
    defined, and the text of its jaxpr.
    """
    return {
        (called.debug_info.func_src_info, str(called))
        for _, called in _custom_calls(body)
    }


def missing_in_text(body: Body | Program) -> list[Any]:
    """Lists what the text of a jaxpr does not show: values of constants, and the
    functions of callbacks.
    """
    found = [*getattr(body, "consts", ())]
    for equation in _equations(body):
        for inner in _inner_jaxprs(equation):
            found.extend(getattr(inner, "consts", ()))
        if "callback" in equation.params:
            callback = equation.params["callback"]
            found.append(getattr(callback, "callback_func", callback))
    return found


def types_of(body: Body) -> tuple[list[Any], list[Any]]:
    """Returns the types of the inputs and of the outputs of a jaxpr."""
    return [x.aval for x in body.invars], [x.aval for x in body.outvars]


# What a function of positions does ----------------------------------------------------


class Lookup(NamedTuple):
    """An index of an array that is a position."""

    position: str  # "b", "h", "q_idx" or "kv_idx"
    axis: int
    shape: tuple[int, ...]  # of the array


class FunctionOfScalars:
    """What a user's function of scalars does, by its jaxpr `body`, whose last inputs
    are POSITIONS.
    """

    body: Body

    @functools.cached_property
    def calls_python(self) -> bool:
        """Whether it calls a Python function (a callback) whenever it runs."""
        return any("callback" in _name(x) for x in _equations(self.body))

    @functools.cached_property
    def has_custom_vjp(self) -> bool:
        """Whether it calls a function with a `jax.custom_vjp`, which has no forward
        mode.
        """
        names = [name for name, _ in _custom_calls(self.body)]
        return "custom_vjp_call" in names

    def uses(self, position: str) -> bool:
        """Returns whether the function reads the argument `position`: "b", "h", "q_idx"
        or "kv_idx".
        """
        body = self.body
        variable = body.invars[POSITIONS.index(position) - len(POSITIONS)]
        is_read = any(variable in e.invars for e in body.eqns)
        return is_read or variable in body.outvars

    @functools.cached_property
    def lookups(self) -> list[Lookup]:
        """Where the function indexes an array by b, h, q_idx or kv_idx.

        Leaves out an index that a condition also uses: the condition may discard what
        is read.
        """
        held = _positions(self.body)
        conditional = _conditional(self.body)
        found = []
        for equation in self.body.eqns:
            if _name(equation) != "dynamic_slice":
                continue
            array, *indices = _atoms(equation)
            for axis, index in enumerate(indices):
                if index not in held or held[index] in conditional:
                    continue
                # An int, or a symbol of `jax.export`.
                size = array.aval.shape[axis]
                # An index of few bits cannot leave a longer axis.
                largest = jnp.iinfo(index.aval.dtype).max
                if isinstance(size, int) and size <= largest:
                    found.append(Lookup(held[index], axis, array.aval.shape))
        return found

    @functools.cached_property
    def entries_of_heads(self) -> list[bool]:
        """For each captured array, whether the function only reads it as array[b, h,
        ...]: a head needs one entry.
        """
        body = self.body
        held = _positions(body)
        found = []
        for variable in body.invars[: -len(POSITIONS)]:
            readers = [e for e in body.eqns if variable in e.invars]
            is_returned = variable in body.outvars
            reads_entries = all(_is_entry(e, held) for e in readers)
            found.append(bool(readers) and reads_entries and not is_returned)
        return found


def _positions(body: Any) -> dict[Any, str]:
    """Maps variables to names: those that equal b, h, q_idx or kv_idx, or that are one
    of these after a cast or after wrapping negative indices (`where(i < 0, i + n, i)`).
    """
    inputs = body.invars[-len(POSITIONS) :]
    held: dict[Any, str] = dict(zip(inputs, POSITIONS, strict=True))
    # Variables that equal i + n.
    from_end: dict[Any, str] = {}
    for equation in body.eqns:
        name = _name(equation)
        atoms = _atoms(equation)
        if name == "convert_element_type" and atoms[0] in held:
            [result] = equation.outvars
            if jnp.issubdtype(result.aval.dtype, jnp.integer):
                held[result] = held[atoms[0]]
        elif name == "add" and atoms[0] in held and atoms[1] is None:
            [result] = equation.outvars
            if equation.invars[1].val > 0:
                from_end[result] = held[atoms[0]]
        # The operands: i < 0, i, i + n.
        elif name == "select_n" and atoms[1] in held:
            [result] = equation.outvars
            if from_end.get(atoms[2]) == held[atoms[1]]:
                held[result] = held[atoms[1]]
    return held


def _is_entry(equation: JaxprEqn, held: Mapping[Any, str]) -> bool:
    """Returns whether an equation reads array[b, h, ...], the part of one head; for
    `held` see `_positions`.
    """
    if _name(equation) != "dynamic_slice":
        return False
    if equation.params["slice_sizes"][:2] != (1, 1):
        return False
    _, *indices = _atoms(equation)
    return [held.get(x) for x in indices[:2]] == ["b", "h"]


def _conditional(body: Any) -> set[str]:
    """Returns which of b, h, q_idx and kv_idx affect a comparison or branch, as in
    `where(q_idx < 8, x[q_idx], 0)`.
    """
    inputs = body.invars[-len(POSITIONS) :]
    # The positions that each variable depends on.
    sources = {v: {name} for v, name in zip(inputs, POSITIONS, strict=True)}
    found: set[str] = set()
    for equation in body.eqns:
        name = _name(equation)
        atoms = _atoms(equation)
        # The position of an entry is no condition on it.
        read = atoms[:1] if name in ("dynamic_slice", "gather") else atoms
        of: set[str] = set().union(*(sources.get(x, ()) for x in read))
        sources.update(dict.fromkeys(equation.outvars, of))
        # JAX compares each index with 0, for indices that count from the end.
        is_sign = name == "lt" and atoms[1] is None and equation.invars[1].val == 0
        is_condition = name in CONDITIONS and not is_sign
        # A branch or a loop.
        if is_condition or _has_jaxprs(equation):
            found |= of
    return found


def _atoms(equation: JaxprEqn) -> list[Any]:
    """Lists the operands of an equation: variables, and None in place of each literal
    number.
    """
    return [None if isinstance(x, Literal) else x for x in equation.invars]


# Equations ----------------------------------------------------------------------------


def _equations(jaxpr: Body | Program) -> Iterator[JaxprEqn]:
    """Iterates over the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner_jaxprs(equation):
            yield from _equations(inner)


def _inner_jaxprs(equation: JaxprEqn) -> Iterator[Any]:
    """Iterates over an equation's jaxprs: branches, loop bodies, functions with custom
    derivatives.
    """
    for parameter in equation.params.values():
        # The branches of `lax.cond` are a tuple.
        several = parameter if isinstance(parameter, tuple | list) else (parameter,)
        yield from filter(is_jaxpr, several)


def _has_jaxprs(equation: JaxprEqn) -> bool:
    return any(True for _ in _inner_jaxprs(equation))


def _name(equation: JaxprEqn) -> str:
    return equation.primitive.name


def _custom_calls(body: Body) -> Iterator[tuple[str, Body]]:
    """Iterates over the names and the jaxprs of the functions with custom derivatives
    that a jaxpr calls.

    The name is "custom_jvp_call" or "custom_vjp_call", also with JAX's flags
    jax_custom_jvp3 and jax_custom_vjp3.
    """
    names = {"CustomJVPTraced": "custom_jvp_call", "CustomVJPTraced": "custom_vjp_call"}
    for equation in _equations(body):
        name = _name(equation)
        if name in names.values():
            yield name, equation.params["call_jaxpr"].jaxpr
        # With the flags, the primitive is an object that holds the traced function.
        primitive: Any = equation.params.get("_prim")
        kind = type(primitive).__name__
        if name == "call_hi_primitive" and kind in names:
            yield names[kind], primitive.traced.jaxpr.jaxpr
