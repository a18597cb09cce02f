"""Adds the derivatives that fused kernels lack, forward mode and higher orders, by an
engine for all platforms.

A kernel comes with a gradient that cannot be differentiated again, and without a
forward mode. Here the kernel's tangent is a linear function (`math/derivatives.py`)
that this *portable* engine evaluates. The transpose of the tangent is the kernel's
gradient; the derivatives of this gradient are derivatives of the portable engine's
gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from flax_mha._src.call.call import Call, Result
from flax_mha._src.core.jaxprs import (
    Program,
    as_function,
    runs_kernel,
    traced,
    with_outputs,
)
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.math.derivatives import (
    Function,
    differentiate,
    linear_function,
    restricted,
)
from flax_mha._src.math.softmax import RESIDUALS

Attend = Callable[[Call], Result]
Compiled = Callable[[Program], Callable[..., list[Array]]]


def with_derivatives(
    kernel: Attend,
    portable: Attend,
    call: Call,
    compiled: Compiled = as_function,
) -> Result:
    """Computes a call by a fused `kernel`, and the derivatives that the kernel lacks by
    `portable`.

    `kernel` has gradients of first order in reverse mode, `portable` derivatives of
    every order. The result has no log-sum-exp if the kernel returns none. `compiled`
    makes a function of a program that runs the kernel or its gradient; if the call may
    be compiled for several platforms, only for the kernel's (`compile_for`).
    """
    leaves, structure = jax.tree.flatten(varying_alike(call))

    def run_kernel(*leaves: Array) -> list[Array]:
        return jax.tree.leaves(kernel(jax.tree.unflatten(structure, leaves)))

    program = traced(run_kernel, *leaves)
    count = len(program.out_avals)  # one less if the kernel returns no log-sum-exp

    def run_portable(*leaves: Array) -> list[Array]:
        results = jax.tree.leaves(portable(jax.tree.unflatten(structure, leaves)))
        return results[:count]

    functions = _Functions(run_kernel, run_portable, compiled, num_results=count)
    output, *rows = _attention(functions, program)(*leaves)
    if rows:
        return Result(output, *rows)
    return Result(output, None)


class _Functions(NamedTuple):
    """The kernel and the portable engine as functions of the leaves (arrays) of a
    call.
    """

    kernel: Callable[..., list[Array]]
    portable: Callable[..., list[Array]]
    compiled: Compiled  # as in `with_derivatives`
    # Output and, if the kernel returns them, log-sum-exp and largest scores.
    num_results: int


class _ForwardPass(NamedTuple):
    """The kernel's forward pass, traced, with the residuals (saved arrays) that its
    gradient needs.
    """

    # Computes the results, and the residuals that come from the kernel.
    program: Program
    # Computes all other residuals, which are cheap: inputs in the kernel's layout.
    inputs: Program
    from_kernel: tuple[bool, ...]  # for each residual, whether it comes from the kernel
    argnums: tuple[int, ...]  # indices of the leaves that get gradients
    # Structure of the function, a pytree whose leaves are the residuals, that computes
    # these gradients.
    pull: Any

    @classmethod
    def of(
        cls, functions: _Functions, argnums: tuple[int, ...], arguments: Sequence[Any]
    ) -> "_ForwardPass":
        """Traces the forward pass. `arguments` are the call's leaves; those at
        indices `argnums` get gradients.
        """
        structures = []

        def forward(*leaves: Array) -> list[Array]:
            of_some, some = restricted(functions.kernel, leaves, argnums)
            results, pull = jax.vjp(of_some, *some)
            residuals, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return [*results, *residuals]

        program = traced(forward, *arguments)
        count = len(program.out_avals)

        # Keep the results, and the residuals whose computation runs the kernel.
        kept = [True] * functions.num_results
        for i in range(functions.num_results, count):
            only_this = with_outputs(program, [i == j for j in range(count)])
            kept.append(runs_kernel(only_this))
        if not any(kept[functions.num_results :]):
            # No kernel was found by name.
            kept = [True] * count
        return cls(
            program=with_outputs(program, kept),
            inputs=with_outputs(program, [not flag for flag in kept]),
            from_kernel=tuple(kept[functions.num_results :]),
            argnums=argnums,
            pull=structures[0],
        )


def _attention(
    functions: _Functions, program: Program, saved: _ForwardPass | None = None
) -> Function:
    """Wraps `program`, which runs the kernel, as a `Function`: one operation with
    derivatives of every order.

    Without `saved`, `program` returns the results. Given `saved`, it is
    `saved.program`, which also returns residuals.
    """

    def evaluate(*arguments: Any) -> Sequence[Array]:
        return functions.compiled(program)(*arguments)

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        # Run the forward pass that saves what the gradient needs.
        argnums = tuple(sorted(tangents))
        if saved is not None and saved.argnums == argnums:
            current = saved
            outputs = attend(*arguments)
        else:
            current = _ForwardPass.of(functions, argnums, arguments)
            outputs = _attention(functions, current.program, current)(*arguments)

        # Name results and residuals for policies of `jax.checkpoint`: the largest
        # residuals like the output, the others like the log-sum-exp.
        named = zip(outputs[: functions.num_results], RESIDUALS, strict=False)
        results = [checkpoint_name(x, name) for x, name in named]
        kept = outputs[functions.num_results :]
        largest = max((x.size for x in kept), default=0)
        kept = [checkpoint_name(x, RESIDUALS[int(x.size < largest)]) for x in kept]

        # All residuals in order; those that are not from the kernel are cheap, and are
        # computed again.
        constants = lax.stop_gradient(list(arguments))
        cheap = iter(as_function(current.inputs)(*constants))
        known = iter(kept)
        residuals = []
        for is_from_kernel in current.from_kernel:
            source = known if is_from_kernel else cheap
            residuals.append(next(source))
        tangent = _tangent(functions, current)
        d_some = [tangents[i] for i in argnums]
        d_results = tangent(*arguments, *residuals, *d_some)

        if saved is None or saved is current:
            primal = [*results, *kept]
        else:
            primal = attend(*arguments)
        primal = primal[: len(attend.outputs)]
        # Residuals have no tangent: only the kernel's gradient uses them.
        d_residuals = [None] * (len(primal) - functions.num_results)
        return primal, [*d_results, *d_residuals]

    attend = Function(program.out_avals, evaluate, jvp, program=program)
    return attend


def _tangent(functions: _Functions, saved: _ForwardPass) -> Function:
    """Makes the kernel's tangent, a `Function` whose transpose is the kernel's
    gradient.

    The tangent's arguments are all leaves of the call, the residuals, and the tangents
    of the leaves with indices `saved.argnums`.
    """
    outputs = saved.program.out_avals[: functions.num_results]
    num_leaves = len(saved.program.in_avals)
    argnums = saved.argnums
    num_saved = saved.pull.num_leaves
    first = num_leaves + num_saved

    def evaluate(*arguments: Any) -> Sequence[Array]:
        tangents = dict(zip(argnums, arguments[first:], strict=True))
        return differentiate(functions.portable, arguments[:num_leaves], tangents)

    def portable_gradient(*arguments: Any) -> Sequence[Array]:
        leaves = arguments[:num_leaves]
        of_some, some = restricted(functions.portable, leaves, argnums)
        _, pull = jax.vjp(of_some, *some)
        return list(pull(list(arguments[first:])))

    def transpose(
        residuals: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        def pull(*both: Array) -> list[Array]:
            kernel_gradient = jax.tree.unflatten(saved.pull, both[:num_saved])
            return list(kernel_gradient(list(both[num_saved:])))

        program = traced(pull, *residuals[num_leaves:], *cotangents)

        def run(*arguments: Any) -> Sequence[Array]:
            return functions.compiled(program)(*arguments[num_leaves:])

        def transpose_again(
            residuals: Sequence[Any], cotangents: Sequence[Array]
        ) -> Sequence[Array]:
            return tangent(*residuals, *cotangents)

        gradient = linear_function(
            program.out_avals,
            run,
            transpose_again,
            first,
            portable=portable_gradient,
            program=program,
        )
        return gradient(*residuals, *cotangents)

    tangent = linear_function(outputs, evaluate, transpose, first)
    return tangent
