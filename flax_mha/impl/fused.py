"""Fused kernels with derivatives of every order: results and first gradients by the kernel, all others tile by tile.

A kernel comes with its gradient, which cannot be differentiated again, and without a forward mode. Tangents are linear
functions (`shared/derivatives.py`) that a portable implementation evaluates; their transpose is the kernel's gradient,
whose own derivatives are those of the portable gradient.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import Array

from flax_mha.call.operands import Operands, Output
from flax_mha.core.jaxprs import equations
from flax_mha.core.tracing import varying_alike
from flax_mha.impl.implementation import RESIDUALS
from flax_mha.impl.lower_for_platform import compile_for
from flax_mha.impl.shared.derivatives import Function, move_linear, replace_at

Attend = Callable[[Operands], Output]
# What the names of their operations begin with.
KERNELS = ("pallas_call", "dot_product_attention")


def attention(kernel: Attend, portable: Attend, operands: Operands, platform: str | None) -> Output:
    """Computes output and log-sum-exp by `kernel`, and by `portable` the derivatives that the kernel does not have.

    Args:
      kernel: Computes both; has gradients of first order, in reverse mode. The log-sum-exp may be None.
      portable: Computes the same; has derivatives of every order.
      operands: The operands.
      platform: Of the kernel, if the program may be compiled for others, too; see `lower_for_platform.py`.
    """
    leaves, structure = jax.tree.flatten(varying_alike(operands))

    def of_leaves(attend: Attend) -> Callable[[Sequence[Array]], list[Array]]:
        return lambda leaves: jax.tree.leaves(attend(jax.tree.unflatten(structure, leaves)))

    jaxpr = jax.make_jaxpr(lambda *leaves: of_leaves(kernel)(leaves))(*leaves)
    if jaxpr.effects:  # of a kernel that is interpreted to find races; an operation of ours would lose them
        return kernel(operands)
    count = len(jaxpr.out_avals)  # without the log-sum-exp, if the kernel keeps it for itself
    functions = _Functions(of_leaves(kernel), lambda leaves: of_leaves(portable)(leaves)[:count], platform)
    output, *rows = _Attention(functions, count, jaxpr)(*leaves)
    return (output, rows[0], *rows[1:]) if rows else (output, None)


@dataclasses.dataclass(frozen=True)
class _Functions:
    """Both as functions of the operands' leaves, and what the kernel is compiled for."""

    kernel: Callable[[Sequence[Array]], list[Array]]
    portable: Callable[[Sequence[Array]], list[Array]]
    platform: str | None

    def run(self, jaxpr: ClosedJaxpr, arguments: Sequence[Array]) -> list[Array]:
        """Evaluates a part of the kernel, where it is compiled."""
        run = jaxpr_as_fun(jaxpr) if self.platform is None else compile_for(self.platform, jaxpr)
        return run(*arguments)

    def portable_jvp(self, leaves: Sequence[Array], tangents: Mapping[int, Array]) -> list[Array]:
        """Computes the tangents of the results."""

        def moved(*some: Array) -> list[Array]:
            return self.portable(replace_at(leaves, tangents, some))

        return jax.jvp(moved, tuple(leaves[i] for i in tangents), tuple(tangents.values()))[1]

    def portable_gradient(self, leaves: Sequence[Array], places: Sequence[int], cotangents: Any) -> list[Array]:
        """Computes the gradients of these leaves."""
        _, pull = jax.vjp(lambda *some: self.portable(replace_at(leaves, places, some)), *(leaves[i] for i in places))
        return list(pull(list(cotangents)))


def _outputs(jaxpr: ClosedJaxpr, wanted: Sequence[bool]) -> ClosedJaxpr:
    """Leaves out all that these outputs do not need."""
    return ClosedJaxpr(partial_eval.dce_jaxpr(jaxpr.jaxpr, list(wanted), instantiate=True)[0], jaxpr.consts)


def _runs_kernel(jaxpr: ClosedJaxpr) -> bool:
    return any(x.primitive.name.startswith(KERNELS) for x in equations(jaxpr.jaxpr))


@dataclasses.dataclass(frozen=True, eq=False)
class _Attention(Function):
    """The kernel's results and, behind them, what its gradient needs of it, if there will be one.

    Attributes:
      functions: Kernel and portable implementation.
      num_results: How many outputs are results.
      jaxpr: Of the kernel, or of it and what it saves.
      inputs: Of what is saved but does not come from the kernel, as arrays in its layout: cheap to compute again.
      of_kernel: Which of all that is saved comes from the kernel.
      places: Of the operands that get gradients, among the leaves; None if none does.
      pull: The structure of the function that returns these gradients, whose leaves are what is saved.
    """

    functions: _Functions
    num_results: int
    jaxpr: ClosedJaxpr
    inputs: ClosedJaxpr | None = None
    of_kernel: tuple[bool, ...] = ()
    places: tuple[int, ...] | None = None
    pull: Any = None

    @property
    def outputs(self) -> Sequence[jax.ShapeDtypeStruct]:  # type: ignore[override]
        """Shapes and dtypes."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.out_avals]

    def evaluate(self, *arguments: Any) -> Sequence[Array]:
        """Runs the kernel."""
        return self.functions.run(self.jaxpr, arguments)

    def _with_gradient(self, places: tuple[int, ...], arguments: Sequence[Any]) -> "_Attention":
        structures = []

        def forward(*leaves: Array) -> list[Array]:
            some = tuple(leaves[i] for i in places)
            results, pull = jax.vjp(lambda *some: self.functions.kernel(replace_at(leaves, places, some)), *some)
            saved, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return [*results, *saved]

        jaxpr, results = jax.make_jaxpr(forward)(*arguments), self.num_results
        count = len(jaxpr.out_avals)
        kept = [i < results or _runs_kernel(_outputs(jaxpr, [i == j for j in range(count)])) for i in range(count)]
        kept = kept if any(kept[results:]) else [True] * count  # a kernel by another name
        inputs = _outputs(jaxpr, [not flag for flag in kept])
        return _Attention(
            self.functions, results, _outputs(jaxpr, kept), inputs, tuple(kept[results:]), places, structures[0]
        )

    def _saved(self, arguments: Sequence[Any], kept: Sequence[Array]) -> list[Array]:
        """Returns all that the gradient needs, given what comes from the kernel."""
        assert self.inputs is not None
        computed, known = iter(jaxpr_as_fun(self.inputs)(*lax.stop_gradient(list(arguments)))), iter(kept)
        return [next(known if flag else computed) for flag in self.of_kernel]

    def jvp(self, arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        """Computes outputs and tangents; what is saved has none, for it serves the gradient of the kernel alone."""
        places = tuple(sorted(tangents))
        saving = self if self.places == places else self._with_gradient(places, arguments)
        outputs = saving(*arguments)
        results, kept = outputs[: self.num_results], outputs[self.num_results :]
        named = [checkpoint_name(x, name) for x, name in zip(results, RESIDUALS, strict=False)]
        results = [*named, *results[len(RESIDUALS) :]]
        largest = max((x.size for x in kept), default=0)
        kept = [checkpoint_name(x, RESIDUALS[int(x.size < largest)]) for x in kept]
        saved = saving._saved(arguments, kept)
        tangent = _Tangent(self.functions, places, len(arguments), saving.pull, tuple(self.outputs[: self.num_results]))
        moved = tangent(*arguments, *saved, *(tangents[i] for i in places))
        own = [*results, *kept] if saving is self or self.places is None else self(*arguments)
        own = own[: len(self.outputs)]
        return own, [*moved, *(None for _ in own[self.num_results :])]


@dataclasses.dataclass(frozen=True, eq=False)
class _Tangent(Function):
    """The tangents of the results, from all operands, what the kernel saved and the tangents of some operands.

    Attributes:
      functions: Kernel and portable implementation.
      places: Of the operands that have tangents, among the leaves.
      num_leaves: How many leaves the operands have.
      pull: The structure of the kernel's gradient, as in `_Attention`.
      outputs: Shapes and dtypes.
    """

    functions: _Functions
    places: tuple[int, ...]
    num_leaves: int
    pull: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def first_linear(self) -> int:  # type: ignore[override]
        """The place of the first tangent."""
        return self.num_leaves + self.pull.num_leaves

    def evaluate(self, *arguments: Any) -> Sequence[Array]:
        """Computes them by the portable implementation."""
        tangents = dict(zip(self.places, arguments[self.first_linear :], strict=True))
        return self.functions.portable_jvp(arguments[: self.num_leaves], tangents)

    def jvp(self, arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        """Differentiates the portable implementation, unless all that moves are the tangents."""
        return self(*arguments), move_linear(self, arguments, tangents)

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        """Computes the gradient by the kernel."""

        def gradient(*both: Array) -> list[Array]:
            saved = both[: self.pull.num_leaves]
            return list(jax.tree.unflatten(self.pull, saved)(list(both[len(saved) :])))

        jaxpr = jax.make_jaxpr(gradient)(*residuals[self.num_leaves :], *cotangents)
        return _Gradient(self, jaxpr)(*residuals, *cotangents)


@dataclasses.dataclass(frozen=True, eq=False)
class _Gradient(Function):
    """The transpose of `tangent`: the kernel's gradient, from all operands, what the kernel saved and cotangents."""

    tangent: _Tangent
    jaxpr: ClosedJaxpr

    @property
    def outputs(self) -> Sequence[jax.ShapeDtypeStruct]:  # type: ignore[override]
        """Shapes and dtypes."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.out_avals]

    @property
    def first_linear(self) -> int:  # type: ignore[override]
        """The place of the first cotangent."""
        return self.tangent.first_linear

    def evaluate(self, *arguments: Any) -> Sequence[Array]:
        """Runs the kernel."""
        return self.tangent.functions.run(self.jaxpr, arguments[self.tangent.num_leaves :])

    def _portable(self, *arguments: Any) -> list[Array]:
        tangent = self.tangent
        leaves, cotangents = arguments[: tangent.num_leaves], arguments[self.first_linear :]
        return tangent.functions.portable_gradient(leaves, tangent.places, cotangents)

    def jvp(self, arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        """Differentiates the portable gradient, unless all that moves are the cotangents."""
        return self(*arguments), move_linear(self, arguments, tangents, self._portable)

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        """Computes tangents."""
        return self.tangent(*residuals, *cotangents)
