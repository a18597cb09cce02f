"""The kernels as one differentiable function: first-order derivatives, in reverse mode."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from flax_mha.impl.pallas import backward
from flax_mha.impl.pallas.forward import forward
from flax_mha.impl.pallas.launch import Machine
from flax_mha.impl.pallas.operands import Inputs
from flax_mha.impl.pallas.prepare import Prepared
from flax_mha.impl.pallas.steps import Occupied
from flax_mha.impl.shared import nonfinite

OutputAndLse = tuple[Float[Array, "... T Hv"], Float[Array, "... T"]]


class Trainable(NamedTuple):
    """The inputs that may get gradients."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sink: Array | None
    values: list[Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which gradients are asked for, of those that cost something."""

    bias: bool = dataclasses.field(metadata={"static": True})
    values: tuple[bool, ...] = dataclasses.field(metadata={"static": True})


def attention(call: Prepared, machine: Machine, known: OutputAndLse | None) -> OutputAndLse:
    """Output and log-sum-exp [..., T] of padded queries.

    Args:
      call: What is computed.
      machine: Where.
      known: Output and log-sum-exp over these and other keys. Then they are returned, and nothing is computed but
        gradients: those of what these keys contribute.
    """
    inputs = call.inputs
    trainable = Trainable(*(getattr(inputs, name) for name in Trainable._fields))
    rest = inputs._replace(query=None, key=None, value=None, bias=None, sink=None, values=[])

    @jax.custom_vjp
    def attend(trainable: Trainable, rest: Inputs, occupied: Occupied, known: OutputAndLse | None) -> OutputAndLse:
        return known if known is not None else _forward(call, machine, rest._replace(**trainable._asdict()), occupied)

    def attend_forward(*arguments: Any) -> tuple[OutputAndLse, tuple]:
        values = jax.tree.map(lambda x: x.value, arguments)
        trainable, *_ = arguments
        wanted = _Wanted(
            trainable.bias is not None and trainable.bias.perturbed, tuple(x.perturbed for x in trainable.values)
        )
        results = attend(*values)
        return results, (wanted, *values[:3], results)

    def attend_backward(saved: tuple, cotangents: tuple) -> tuple:
        wanted, trainable, rest, occupied, results = saved
        cotangents = tuple(_instantiated(x) for x in cotangents)
        inputs = rest._replace(**trainable._asdict())
        return _backward(call, machine, wanted, inputs, occupied, results, cotangents), None, None, None

    attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)
    occupied = Occupied(None, None) if call.occupied.is_known else call.occupied  # type: ignore[arg-type]
    return attend(trainable, rest, occupied, known)


def _instantiated(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x


def _occupied(call: Prepared, occupied: Occupied) -> Occupied:
    """What is known while tracing stays known."""
    return call.occupied if occupied.some is None else occupied


def _rounded(call: Prepared, inputs: Inputs) -> Inputs:
    """With what the matrix products multiply; here, so that the gradients are not rounded."""
    query, key, value = (x.astype(call.dtype) for x in (inputs.query, inputs.key, inputs.value))
    return inputs._replace(query=query, key=key, value=value)


def _forward(call: Prepared, machine: Machine, inputs: Inputs, occupied: Occupied) -> OutputAndLse:
    def run(arrays: tuple[Inputs, Occupied]) -> OutputAndLse:
        inputs, occupied = arrays
        return forward(call.rules._replace(differentiated=False), inputs, _occupied(call, occupied), machine)

    return _over_mapped_axes(run, (_rounded(call, inputs), occupied))


def _backward(
    call: Prepared,
    machine: Machine,
    wanted: _Wanted,
    inputs: Inputs,
    occupied: Occupied,
    results: OutputAndLse,
    cotangents: OutputAndLse,
) -> Trainable:
    learned = () if call.rules.part is None else call.rules.part.from_learned
    learned = tuple(a and b for a, b in zip(learned, wanted.values, strict=True))
    inputs = _rounded(call, inputs)
    query, d_output, lse, delta = nonfinite.backward_rows(
        inputs.query, results, cotangents, keys_are_finite=inputs.key_marks is not None
    )
    inputs = inputs._replace(query=query, d_output=d_output, lse=lse, delta=delta)

    def run(arrays: tuple[Inputs, Occupied]) -> tuple:
        inputs, places = arrays[0], _occupied(call, arrays[1])
        d_query, d_values = backward.of_queries(call.rules._replace(learned=learned), inputs, places, machine)
        d_key, d_value = backward.of_keys(call.rules, inputs, places, machine)
        d_bias = backward.of_bias(call.rules, inputs, places, machine) if wanted.bias else None
        return d_query, d_key, d_value, d_bias, d_values

    d_query, d_key, d_value, d_bias, d_values = _over_mapped_axes(run, (inputs, occupied), copies_floats=True)
    d_sink = None
    if inputs.sink is not None:
        share = jnp.exp(inputs.sink[..., None] - inputs.lse)  # 0 in rows without a gradient
        d_sink = _summed(-jnp.sum(share * inputs.delta, axis=-1), inputs.sink)
    d_values = [
        None if d is None else _summed(d, x).astype(x.dtype) for d, x in zip(d_values, inputs.values, strict=True)
    ]
    return Trainable(d_query, d_key, d_value, d_bias, d_sink, d_values)


def _summed(x: Array, like: Array) -> Array:
    """The sum over the axes along which heads share an entry."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1 != x.shape[axis])
    return x.sum(axes, keepdims=True)


def _over_mapped_axes(run: Callable[[Any], Any], arrays: Any, copies_floats: bool = False) -> Any:
    """`run(arrays)`, where `jax.vmap` adds one more axis of heads in front of those that arrays have.

    Along it arrays that are not mapped are shared, unless `copies_floats`: a shared array would get one gradient, the
    sum, but `jax.vmap` asks for one for each call.
    """
    leaves, structure = jax.tree.flatten(arrays)

    @jax.custom_batching.custom_vmap
    def mapped(*leaves: Array) -> Any:
        return run(jax.tree.unflatten(structure, leaves))

    @mapped.def_vmap
    def _rule(axis_size: int, is_mapped: list[bool], *leaves: Array) -> tuple[Any, Any]:
        own = [x if mine else x[None] for x, mine in zip(leaves, is_mapped, strict=True)]
        if copies_floats:
            own = [
                jnp.repeat(x, axis_size // x.shape[0], 0) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in own
            ]
        outputs = _over_mapped_axes(run, jax.tree.unflatten(structure, own), copies_floats)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped(*leaves)
