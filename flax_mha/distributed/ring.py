"""Ring attention over a sequence that is split over devices: queries stay, keys and values travel around a ring.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889. In each of N hops a
device sends the keys that it holds to the next device, and meanwhile computes attention of its queries over them. The
output and log-sum-exp of each hop are merged with those before. The backward pass goes around once more: given the
merged output and log-sum-exp, the attention's own backward pass computes the share of each hop in the gradients. The
gradients of keys and values travel with these, and are back home after N hops.

No hop is skipped: keys travel N times, whatever the mask. All devices run one program, so the positions of a hop's keys
are data, and its block mask is made while it runs; tiles that are masked throughout are not computed.

Hops return float32 at least, so that nothing is rounded before it is merged or added up. They may still multiply
matrices in the dtype of the call, as a kernel does.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha.call.operands import Call, Context, Operands, Options, OutputAndLse, accumulation_dtype
from flax_mha.core.tile import Scalar
from flax_mha.core.tracing import T
from flax_mha.distributed import slices
from flax_mha.distributed.slices import SequenceAxes
from flax_mha.impl import registry
from flax_mha.impl.registry import IMPLEMENTATIONS, Explanation
from flax_mha.impl.shared import online_softmax
from flax_mha.impl.shared.online_softmax import State

DEFAULT = "blockwise"


class Ring(NamedTuple):
    """The static part of a ring.

    Attributes:
      axis: The mesh axis whose devices form the ring.
      size: Number of devices.
      chunks: Number of chunks of adjacent positions that each holds: 1, or 2 for "zigzag".
      axes: The axes of the operands along the sequences.
      options: Of the call.
      hop: Computes output and log-sum-exp of a slice of the call, given those over all keys or None. If they are given
        it returns them, and its gradients are the share of this slice.
    """

    axis: str
    size: int
    chunks: int
    axes: tuple[SequenceAxes, ...]
    options: Options
    hop: Callable[[Call, OutputAndLse | None], OutputAndLse]

    def for_pairs(self, step: Callable[[Scalar, Scalar, T], T]) -> Callable[[T], T]:
        """Folds `step(i, j, state)` over all pairs of a chunk of queries and a chunk of keys, one after another."""
        if self.chunks == 1:
            return functools.partial(step, 0, 0)
        pairs, chunks = self.chunks**2, self.chunks
        return lambda state: lax.fori_loop(0, pairs, lambda n, state: step(n // chunks, n % chunks, state), state)

    def slice(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """Cuts out chunk `i` of a device's queries and chunk `j` of the keys that device `source` sent it."""
        queries, keys = operands.query.shape[-3], operands.key.shape[-3]
        height, width = queries // self.chunks, keys // self.chunks
        first_query = slices.chunk_of(lax.axis_index(self.axis), i, self.size) * height
        first_key = slices.chunk_of(source, j, self.size) * width
        of_keys = j * width, source * keys + j * width, width
        part = slices.slice_call(operands, self.axes, (i * height, height), of_keys, (first_query, first_key))
        return Call(part, self.options)

    def wide_slice(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """As `slice`, with query, key and value in float32 at least."""
        part, options = self.slice(operands, source, i, j)
        query, key, value = (x.astype(options.dtype) for x in part[:3])
        return Call(part._replace(query=query, key=key, value=value), options)

    def send(self, tree: T) -> T:
        """Sends arrays to the next device, and returns those of the device before."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)


class Trainable(NamedTuple):
    """The operands that have gradients."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    captured: list[Array]
    scale: Array | None


def ring_attention(call: Call, context: Context, implementation: str | None) -> OutputAndLse:
    """Computes output and log-sum-exp of a device's queries, in a `jax.shard_map` over the mesh.

    Args:
      call: With the device's own queries and keys, and the numbers of its own batch entries and heads.
      context: Of `context_parallel`.
      implementation: The implementation that computes the hops; None chooses.

    Raises:
      NotImplementedError: If the named implementation cannot compute the hops.
    """
    if implementation is not None:
        registry.check_computes(implementation, _refusals(implementation, _first_slice(call, context)))
    operands, (ring, inner) = call.operands, _ring_of(call, context, implementation or DEFAULT)
    output, lse, *largest = _ring(ring, _trainable(inner), inner)
    if operands.sinks is not None:
        output, lse = _with_sinks(output, lse, operands.sinks[..., None, :].astype(lse.dtype))
    return output.astype(operands.query.dtype), lse, *largest


def explain(call: Call, context: Context, implementation: str | None) -> Explanation:
    """Explains which implementation computes the hops, by the slice of the first one.

    Raises:
      NotImplementedError: If the named implementation cannot compute it.
    """
    first = _first_slice(call, context)
    table = {name: _refusals(name, first) for name in registry.NAMES}
    if implementation is not None:
        registry.check_computes(implementation, table[implementation])
    return Explanation(implementation or DEFAULT, table)


def _first_slice(call: Call, context: Context) -> Call:
    ring, operands = _ring_of(call, context, DEFAULT)
    return ring.slice(operands, lax.axis_index(ring.axis), 0, 0)._replace(options=call.options)


def _refusals(name: str, call: Call) -> list[str]:
    """Lists why this implementation cannot compute the hops, of which this is one."""
    if IMPLEMENTATIONS[name].hop is None:
        known = " and ".join(f'"{name}"' for name in registry.NAMES if IMPLEMENTATIONS[name].hop is not None)
        return [f'with strategy="ring", only {known} compute the gradient of a hop from the merged result']
    return registry.refusals(name, call)


def _ring_of(call: Call, context: Context, implementation: str) -> tuple[Ring, Operands]:
    """Returns the ring, and the operands of its hops: random words are drawn before them, sinks are added after."""
    operands, hop = call.operands._replace(sinks=None, dropout_rng=None), IMPLEMENTATIONS[implementation].hop
    assert hop is not None
    ring = Ring(
        axis=context.axis,
        size=lax.axis_size(context.axis),
        chunks=2 if context.layout == "zigzag" else 1,
        axes=slices.sequence_axes(operands),
        options=call.options._replace(return_residual=True),
        hop=functools.partial(hop, dtype=operands.query.dtype),
    )
    return ring, operands


def _trainable(operands: Operands) -> Trainable:
    return Trainable(*(getattr(operands, name) for name in Trainable._fields))


def _with_sinks(output: Array, lse: Array, sinks: Float[Array, "*B 1 N"]) -> tuple[Array, Array]:
    """Adds to the softmax one more score, which has no value."""
    # Rows that saw NaN or infinity stay as they are, and have no gradient; so do those without any score.
    proper = (lse < jnp.inf) & ((lse > -jnp.inf) | (sinks > -jnp.inf))
    a, b = (jnp.where(proper, x, jnp.zeros_like(x)) for x in (lse, jnp.broadcast_to(sinks, lse.shape)))
    share = jnp.where(proper, jax.nn.sigmoid(a - b), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, jnp.logaddexp(a, b), lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, trainable: Trainable, operands: Operands) -> OutputAndLse:
    operands = operands._replace(**trainable._asdict())
    (*rows, _), features = operands.query.shape, operands.value.shape[-1]
    dtype, rank = ring.options.dtype, lax.axis_index(ring.axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        merged, arrays = state
        following, source = ring.send(arrays), (rank - number) % ring.size
        held = slices.replace_travelling(operands, ring.axes, arrays)

        def merge(i: Scalar, j: Scalar, merged: State) -> State:
            return _merge(merged, i, ring.hop(ring.wide_slice(held, source, i, j), None))

        return (ring.for_pairs(merge)(merged), following), None

    nothing = State(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, features), dtype))
    if ring.options.return_max_score:
        nothing = nothing._replace(largest=nothing.running_max)
    state = nothing, slices.travelling_arrays(operands, ring.axes)
    (merged, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    output, lse, largest = online_softmax.finish(merged)
    return (output, lse) if largest is None else (output, lse, largest)


def _flatten_rows(state: State) -> State:
    """Makes the rows of all heads one axis."""
    rows = state.running_sum.size
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[state.running_sum.ndim :]), state)


def _merge(merged: State, chunk: Scalar, result: OutputAndLse) -> State:
    """Merges the result over more keys into the rows of one chunk.

    To the running softmax a result is one more key, whose score is the log-sum-exp and whose value is the output. The
    state is a maximum and a sum: a merged log-sum-exp would be rounded in every hop, and errors of large scores add up.
    """
    output, lse, *largest = result
    before = _rows(merged, chunk, lse.shape[-2], lse.ndim - 2)
    values = output.reshape(lse.size, output.shape[-1])
    after = online_softmax.update(_flatten_rows(before), lse.reshape(lse.size, 1), lambda weights: weights * values)
    if before.largest is not None:  # of scores, not of log-sum-exps
        after = after._replace(largest=lax.max(before.largest, *largest))
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=chunk * lse.shape[-2], axis=lse.ndim - 2)
    return jax.tree.map(lambda x, rows, old: put(x, rows.reshape(old.shape)), merged, after, before)


def _rows(results: T, chunk: Scalar, size: int, axis: int) -> T:
    """Cuts one chunk of `size` queries out of arrays that have an entry for each query along `axis`."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * size, size, axis), results)


def _forward(ring: Ring, trainable: Trainable, operands: Operands) -> tuple[OutputAndLse, tuple]:
    results = _ring(ring, trainable, operands)
    return results, (trainable, operands, results)


def _backward(ring: Ring, saved: tuple, cotangents: OutputAndLse) -> tuple[Trainable, None]:
    trainable, operands, known = saved
    ring = ring._replace(options=ring.options._replace(return_max_score=False))  # which has no gradient
    operands = operands._replace(**trainable._asdict())
    dtype, rank = ring.options.dtype, lax.axis_index(ring.axis)
    axis = operands.query.ndim - 3
    rows = functools.partial(_rows, size=operands.query.shape[axis] // ring.chunks, axis=axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        sums, arrays = state
        following, source = ring.send(arrays), (rank - number) % ring.size
        held = slices.replace_travelling(operands, ring.axes, arrays)
        query, key, value = (x.astype(dtype) for x in held[:3])
        own = _trainable(held)._replace(query=query, key=key, value=value)

        def add(i: Scalar, j: Scalar, sums: Trainable) -> Trainable:
            def result(own: Trainable) -> OutputAndLse:
                part = ring.wide_slice(held._replace(**own._asdict()), source, i, j)
                return ring.hop(part, rows(known[:2], i))

            [gradients] = jax.vjp(result, own)[1](rows(cotangents[:2], i))
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, gradients)

        sums = ring.for_pairs(add)(sums)
        key, value = ring.send((sums.key, sums.value))
        return (sums._replace(key=key, value=value), following), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable)
    state = zeros, slices.travelling_arrays(operands, ring.axes)
    (sums, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    return jax.tree.map(lambda d, x: d.astype(x.dtype), sums, trainable), None


_ring.defvjp(_forward, _backward)
