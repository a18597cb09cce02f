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
from flax_mha._src.engines.kernels.lower_for_platform import compile_for
from flax_mha._src.math.derivatives import (
    Function,
    differentiate,
    linear_function,
    restricted,
)
from flax_mha._src.math.softmax import RESIDUALS

Attend = Callable[[Call], Result]


def with_derivatives(
    kernel: Attend, portable: Attend, call: Call, platform: str | None
) -> Result:
    """Computes a call by a fused `kernel`, and the derivatives that the kernel lacks by
    `portable`.

    `kernel` has gradients of first order in reverse mode, `portable` derivatives of
    every order. The result has no log-sum-exp if the kernel returns none. `platform` is
    the kernel's platform if the program may also be compiled for others, otherwise
    None; see `lower_for_platform.py`.
    """
    leaves, structure = jax.tree.flatten(varying_alike(call))

    def run_kernel(*leaves: Array) -> list[Array]:
        return jax.tree.leaves(kernel(jax.tree.unflatten(structure, leaves)))

    program = traced(run_kernel, *leaves)
    count = len(program.out_avals)  # one less if the kernel returns no log-sum-exp

    def run_portable(*leaves: Array) -> list[Array]:
        results = jax.tree.leaves(portable(jax.tree.unflatten(structure, leaves)))
        return results[:count]

    functions = _Functions(
        kernel=run_kernel, portable=run_portable, platform=platform, num_results=count
    )
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
    platform: str | None  # as in `with_derivatives`
    # Output and, if the kernel returns them, log-sum-exp and largest scores.
    num_results: int

    def run(self, program: Program, arguments: Sequence[Array]) -> list[Array]:
        """Evaluates a program of the kernel or of its gradient, compiled only for
        `platform` unless that is None.
        """
        if self.platform is None:
            run = as_function(program)
        else:
            run = compile_for(self.platform, program)
        return run(*arguments)


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
        def is_kept(i: int) -> bool:
            if i < functions.num_results:
                return True
            only_this = with_outputs(program, [i == j for j in range(count)])
            return runs_kernel(only_this)

        kept = [is_kept(i) for i in range(count)]
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

    def all_residuals(
        self, arguments: Sequence[Any], kept: Sequence[Array]
    ) -> list[Array]:
        """Lists all residuals that `pull` needs, in order.

        `kept` are those from the kernel; the others are cheap, and are computed again
        from `arguments`.
        """
        arguments = lax.stop_gradient(list(arguments))
        cheap = iter(as_function(self.inputs)(*arguments))
        known = iter(kept)
        residuals = []
        for is_from_kernel in self.from_kernel:
            if is_from_kernel:
                residuals.append(next(known))
            else:
                residuals.append(next(cheap))
        return residuals


def _attention(
    functions: _Functions, program: Program, saved: _ForwardPass | None = None
) -> Function:
    """Wraps `program`, which runs the kernel, as a `Function`: one operation with
    derivatives of every order.

    Without `saved`, `program` returns the results. Given `saved`, it is
    `saved.program`, which also returns residuals.
    """

    def evaluate(*arguments: Any) -> Sequence[Array]:
        return functions.run(program, arguments)

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
        results = outputs[: functions.num_results]
        kept = outputs[functions.num_results :]
        for i, name in enumerate(RESIDUALS[: len(results)]):
            results[i] = checkpoint_name(results[i], name)
        largest = max((x.size for x in kept), default=0)
        kept = [checkpoint_name(x, RESIDUALS[int(x.size < largest)]) for x in kept]

        tangent = _tangent(
            functions,
            current,
            num_leaves=len(arguments),
            outputs=attend.outputs[: functions.num_results],
        )
        residuals = current.all_residuals(arguments, kept)
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


def _tangent(
    functions: _Functions, saved: _ForwardPass, num_leaves: int, outputs: Sequence[Any]
) -> Function:
    """Makes the kernel's tangent, a `Function` whose transpose is the kernel's
    gradient.

    The tangent's arguments are all `num_leaves` leaves of the call, the residuals,
    and the tangents of the leaves with indices `saved.argnums`. `outputs` have the
    shapes and dtypes of the results.
    """
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
            return functions.run(program, arguments[num_leaves:])

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
