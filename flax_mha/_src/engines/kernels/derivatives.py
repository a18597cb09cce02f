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

from flax_mha._src.call.operands import Operands, Result
from flax_mha._src.core.jaxprs import Program, as_function, equations, with_outputs
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.engines.kernels.lower_for_platform import compile_for
from flax_mha._src.math.derivatives import (
    Function,
    differentiate,
    linear_function,
    replace_at,
)
from flax_mha._src.math.softmax import RESIDUALS

Attend = Callable[[Operands], Result]
# Kernels are JAX primitives whose names begin with these.
KERNELS = ("pallas_call", "dot_product_attention")


def with_derivatives(
    kernel: Attend, portable: Attend, operands: Operands, platform: str | None
) -> Result:
    """Computes a call by a fused `kernel`, and the derivatives that the kernel lacks by
    `portable`.

    `kernel` has gradients of first order in reverse mode, `portable` derivatives of
    every order. The result has no log-sum-exp if the kernel returns none. `platform` is
    the kernel's platform if the program may be compiled for others too, else None; see
    `lower_for_platform.py`.
    """
    leaves, structure = jax.tree.flatten(varying_alike(operands))

    def of_leaves(attend: Attend) -> Callable[..., list[Array]]:
        return lambda *leaves: jax.tree.leaves(
            attend(jax.tree.unflatten(structure, leaves))
        )

    program = jax.make_jaxpr(of_leaves(kernel))(*leaves)
    count = len(program.out_avals)  # one less if the kernel returns no log-sum-exp
    functions = _Functions(
        of_leaves(kernel),
        lambda *leaves: of_leaves(portable)(*leaves)[:count],
        platform,
        count,
    )
    output, *rows = _attention(functions, program)(*leaves)
    if rows:
        return Result(output, *rows)
    return Result(output, None)


class _Functions(NamedTuple):
    """The kernel and the portable engine as functions of the leaves (arrays) of a
    call's operands.
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


def _runs_kernel(program: Program) -> bool:
    return any(x.primitive.name.startswith(KERNELS) for x in equations(program))


class _ForwardPass(NamedTuple):
    """The kernel's forward pass, traced, with the residuals (saved arrays) that its
    gradient needs.
    """

    # Computes the results, and the residuals that come from the kernel.
    program: Program
    # Computes all other residuals, which are cheap: inputs in the kernel's layout.
    inputs: Program
    of_kernel: tuple[bool, ...]  # for each residual, whether it comes from the kernel
    argnums: tuple[int, ...]  # indices of the leaves that get gradients
    # Structure of the function, a pytree whose leaves are the residuals, that computes
    # these gradients.
    pull: Any

    @classmethod
    def of(
        cls, functions: _Functions, argnums: tuple[int, ...], arguments: Sequence[Any]
    ) -> "_ForwardPass":
        """Traces the forward pass. `arguments` are the operands' leaves; those at
        indices `argnums` get gradients.
        """
        structures = []

        def forward(*leaves: Array) -> list[Array]:
            some = tuple(leaves[i] for i in argnums)
            results, pull = jax.vjp(
                lambda *some: functions.kernel(*replace_at(leaves, argnums, some)),
                *some,
            )
            residuals, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return [*results, *residuals]

        program = jax.make_jaxpr(forward)(*arguments)
        results = functions.num_results
        count = len(program.out_avals)
        kept = [
            i < results
            or _runs_kernel(with_outputs(program, [i == j for j in range(count)]))
            for i in range(count)
        ]
        # No kernel was found by name.
        kept = kept if any(kept[results:]) else [True] * count
        inputs = with_outputs(program, [not flag for flag in kept])
        return cls(
            with_outputs(program, kept),
            inputs,
            tuple(kept[results:]),
            argnums,
            structures[0],
        )

    def all_residuals(
        self, arguments: Sequence[Any], kept: Sequence[Array]
    ) -> list[Array]:
        """Lists all residuals that `pull` needs, in order.

        `kept` are those from the kernel; the others are cheap, and are computed again
        from `arguments`.
        """
        computed = iter(as_function(self.inputs)(*lax.stop_gradient(list(arguments))))
        known = iter(kept)
        return [next(known if flag else computed) for flag in self.of_kernel]


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
        argnums = tuple(sorted(tangents))
        if saved is not None and saved.argnums == argnums:
            current = saved
        else:
            current = _ForwardPass.of(functions, argnums, arguments)
        outputs = (
            attend
            if current is saved
            else _attention(functions, current.program, current)
        )(*arguments)
        results = outputs[: functions.num_results]
        kept = outputs[functions.num_results :]
        named = [
            checkpoint_name(x, name)
            for x, name in zip(results, RESIDUALS, strict=False)
        ]
        results = [*named, *results[len(RESIDUALS) :]]
        largest = max((x.size for x in kept), default=0)
        kept = [checkpoint_name(x, RESIDUALS[int(x.size < largest)]) for x in kept]
        # Residuals have no tangent: only the kernel's gradient uses them.
        tangent = _tangent(
            functions, current, len(arguments), attend.outputs[: functions.num_results]
        )
        d_results = tangent(
            *arguments,
            *current.all_residuals(arguments, kept),
            *(tangents[i] for i in argnums),
        )
        if saved is None or saved is current:
            primal = [*results, *kept]
        else:
            primal = attend(*arguments)
        primal = primal[: len(attend.outputs)]
        return primal, [*d_results, *(None for _ in primal[functions.num_results :])]

    attend = Function(program.out_avals, evaluate, jvp, program=program)
    return attend


def _tangent(
    functions: _Functions, saved: _ForwardPass, num_leaves: int, outputs: Sequence[Any]
) -> Function:
    """Makes the kernel's tangent, a `Function` whose transpose is the kernel's
    gradient.

    The tangent's arguments are all `num_leaves` leaves of the operands, the residuals,
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
        some = tuple(leaves[i] for i in argnums)
        _, pull = jax.vjp(
            lambda *some: functions.portable(*replace_at(leaves, argnums, some)), *some
        )
        return list(pull(list(arguments[first:])))

    def transpose(
        residuals: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        def pull(*both: Array) -> list[Array]:
            return list(
                jax.tree.unflatten(saved.pull, both[:num_saved])(list(both[num_saved:]))
            )

        program = jax.make_jaxpr(pull)(*residuals[num_leaves:], *cotangents)
        gradient = linear_function(
            program.out_avals,
            lambda *arguments: functions.run(program, arguments[num_leaves:]),
            lambda residuals, cotangents: tangent(*residuals, *cotangents),
            first,
            portable_gradient,
            program,
        )
        return gradient(*residuals, *cotangents)

    tangent = linear_function(outputs, evaluate, transpose, first)
    return tangent
