"""Attention over a sequence that is split over devices: queries stay, keys and values travel around a ring.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889. In each of N hops a
device sends the keys that it holds to the next device, and meanwhile computes attention of its queries over them.
Output and log-sum-exp are merged with those of the hops before. The backward pass goes around once more: given the
merged output and log-sum-exp, the attention's own backward pass computes what each hop adds to the gradients. Those of
keys and values travel with these, and are back home after N hops.

Hops compute in float32 at least, so that nothing is rounded before it is merged or added up. That concerns what an
attention returns: it may still multiply matrices in the dtype of the call, as a kernel does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha.call.context import chunk_of
from flax_mha.call.operands import Call, Operands, Options, accumulation_dtype
from flax_mha.core.tile import Scalar
from flax_mha.distributed import slices
from flax_mha.impl.shared import online_softmax
from flax_mha.impl.shared.online_softmax import State

T = TypeVar("T")
OutputAndLse = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]
# Of a part of the queries and a part of the keys. Given the results over all keys, it returns these, and its gradients
# are what this part of the keys contributes.
Attention = Callable[[Call, OutputAndLse | None], OutputAndLse]


class Ring(NamedTuple):
    """The static part: the devices, and the options of the call.

    Attributes:
      axis: The mesh axis whose devices form the ring.
      size: How many there are.
      chunks: How many chunks of adjacent positions each holds: 1, or 2 for "zigzag".
      options: Of the call.
    """

    axis: str
    size: int
    chunks: int
    options: Options

    def over_pairs(self, step: Callable[[Scalar, Scalar, T], T], state: T) -> T:
        """Folds `step` over all pairs of a chunk of queries and a chunk of keys, one after another."""
        if self.chunks == 1:
            return step(0, 0, state)
        return lax.fori_loop(0, self.chunks**2, lambda n, state: step(n // self.chunks, n % self.chunks, state), state)

    def part(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """The call of chunk `i` of a device's queries and chunk `j` of the keys that device `source` sent it."""
        (queries, keys), rank = operands.lengths, lax.axis_index(self.axis)
        height, width = queries // self.chunks, keys // self.chunks
        part = slices.of_queries(operands, i * height, height)
        part = slices.of_keys(part, j * width, source * keys + j * width, width)
        positions = chunk_of(rank, i, self.size) * height, chunk_of(source, j, self.size) * width
        return Call(slices.at_positions(part, *positions), self.options)

    def next(self, tree: Any) -> Any:
        """The arrays of the device before this one."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)


class Trainable(NamedTuple):
    """What gets gradients."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    captured: list[Array]
    scale: Array | None


def ring_attention(call: Call, axis: str, chunks: int, attention: Attention) -> OutputAndLse:
    """Output and log-sum-exp of a device's queries, in a `jax.shard_map` over the mesh.

    Args:
      call: With the device's own queries and keys, and numbers of its own batch entries and heads.
      axis: The mesh axis that splits the sequence.
      chunks: How many chunks a device holds.
      attention: What computes the parts; queries, keys and values are float32 at least.
    """
    operands, options = call
    ring = Ring(axis, lax.axis_size(axis), chunks, options._replace(return_residual=True))
    output, lse = _ring(ring, attention, _trainable(operands, options), _without_ends(operands))
    if operands.sinks is not None:
        output, lse = _with_sinks(output, lse, operands.sinks[..., None, :].astype(lse.dtype))
    return output.astype(operands.query.dtype), lse


def first_part(call: Call, axis: str, chunks: int) -> Call:
    """The first part of the call that a device computes, in the dtype of the call: to ask what can compute it."""
    ring = Ring(axis, lax.axis_size(axis), chunks, call.options)
    return ring.part(_without_ends(call.operands), lax.axis_index(axis), 0, 0)


def _without_ends(operands: Operands) -> Operands:
    """Without what is done before and after: random words made of the key, and sinks added to the merged result."""
    return operands._replace(sinks=None, dropout_rng=None)


def _trainable(operands: Operands, options: Options) -> Trainable:
    captured = [x for x, learned in zip(operands.captured, options.captured_trainable, strict=True) if learned]
    return Trainable(operands.query, operands.key, operands.value, operands.bias, captured, operands.scale)


def _with_trainable(operands: Operands, options: Options, trainable: Trainable) -> Operands:
    learned = iter(trainable.captured)
    captured = [
        next(learned) if is_learned else x
        for x, is_learned in zip(operands.captured, options.captured_trainable, strict=True)
    ]
    return operands._replace(**trainable._replace(captured=captured)._asdict())


def _with_sinks(output: Array, lse: Array, sinks: Float[Array, "*B 1 N"]) -> OutputAndLse:
    """Output and log-sum-exp with one more score in the denominator, which has no value."""
    # Rows that saw NaN or infinity stay as they are, and have no gradient; so do those without any score.
    proper = (lse < jnp.inf) & ((lse > -jnp.inf) | (sinks > -jnp.inf))
    a, b = (jnp.where(proper, x, jnp.zeros_like(x)) for x in (lse, jnp.broadcast_to(sinks, lse.shape)))
    share = jnp.where(proper, jax.nn.sigmoid(a - b), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, jnp.logaddexp(a, b), lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ring: Ring, attention: Attention, trainable: Trainable, operands: Operands) -> OutputAndLse:
    operands = _with_trainable(operands, ring.options, trainable)
    (*batch, length, num_heads, _), features = operands.query.shape, operands.value.shape[-1]
    dtype, rank = accumulation_dtype(operands.query.dtype), lax.axis_index(ring.axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        merged, arrays = state
        following, source = ring.next(arrays), (rank - number) % ring.size
        held = slices.with_arrays_of_keys(operands, arrays)

        def pair(i: Scalar, j: Scalar, merged: State) -> State:
            return _merge(ring, merged, i, attention(_wide_part(ring, held, source, i, j), None))

        return (ring.over_pairs(pair, merged), following), None

    of_rows = (*batch, length, num_heads)
    largest, total, output = online_softmax.start(math.prod(of_rows), features, None, dtype)
    nothing = State(largest.reshape(of_rows), total.reshape(of_rows), output.reshape(*of_rows, features))
    state = nothing, slices.arrays_of_keys(operands)
    (merged, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    output, lse = online_softmax.finish(_flat(merged))
    return output.reshape(nothing.output.shape), lse.reshape(of_rows)


def _flat(state: State) -> State:
    """With one axis for the rows of all heads."""
    largest, total, output = state
    return State(largest.reshape(total.size), total.reshape(total.size), output.reshape(total.size, output.shape[-1]))


def _merge(ring: Ring, merged: State, chunk: Scalar, result: OutputAndLse) -> State:
    """What was merged so far, and into the rows of one chunk the result over more keys.

    To the running softmax a result is one more key, whose score is the log-sum-exp and whose value is the output. What
    is kept are a maximum and a sum. A merged log-sum-exp would be rounded in every hop, and where scores are large,
    these errors add up.
    """
    output, lse = result
    axis, size = lse.ndim - 2, lse.shape[-2]
    before = State(*(lax.dynamic_slice_in_dim(x, chunk * size, size, axis) for x in merged))
    values = output.reshape(lse.size, output.shape[-1])
    after = online_softmax.update(_flat(before), lse.reshape(lse.size, 1), lambda weights: weights * values)
    rows = (x.reshape(old.shape) for x, old in zip(after, before, strict=True))
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=axis)
    return State(*(put(x, part) for x, part in zip(merged, rows, strict=True)))


def _rows(ring: Ring, results: OutputAndLse, chunk: Scalar) -> OutputAndLse:
    """Of one chunk of the queries."""
    axis = results[1].ndim - 2
    size = results[1].shape[axis] // ring.chunks
    output, lse = (lax.dynamic_slice_in_dim(x, chunk * size, size, axis) for x in results)
    return output, lse


def _wide_part(ring: Ring, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
    """`ring.part`, in float32 at least."""
    dtype = accumulation_dtype(operands.query.dtype)
    query, key, value = (x.astype(dtype) for x in operands[:3])
    return ring.part(operands._replace(query=query, key=key, value=value), source, i, j)


def _forward(ring: Ring, attention: Attention, trainable: Trainable, operands: Operands) -> tuple[OutputAndLse, tuple]:
    results = _ring(ring, attention, trainable, operands)
    return results, (trainable, operands, results)


def _backward(ring: Ring, attention: Attention, saved: tuple, cotangents: OutputAndLse) -> tuple[Trainable, None]:
    trainable, operands, known = saved
    operands = _with_trainable(operands, ring.options, trainable)
    dtype, rank = accumulation_dtype(operands.query.dtype), lax.axis_index(ring.axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        sums, arrays = state
        following, source = ring.next(arrays), (rank - number) % ring.size
        held = slices.with_arrays_of_keys(operands, arrays)
        query, key, value = (x.astype(dtype) for x in held[:3])
        own = _trainable(held, ring.options)._replace(query=query, key=key, value=value)

        def pair(i: Scalar, j: Scalar, sums: Trainable) -> Trainable:
            def result(own: Trainable) -> OutputAndLse:
                part = _wide_part(ring, _with_trainable(held, ring.options, own), source, i, j)
                return attention(part, _rows(ring, known, i))

            [gradients] = jax.vjp(result, own)[1](_rows(ring, cotangents, i))
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, gradients)

        sums = ring.over_pairs(pair, sums)
        key, value = ring.next((sums.key, sums.value))
        return (sums._replace(key=key, value=value), following), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable)
    state = zeros, slices.arrays_of_keys(operands)
    (sums, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    return jax.tree.map(lambda d, x: d.astype(x.dtype), sums, trainable), None


_ring.defvjp(_forward, _backward)
