"""Attention over a sequence that is split over devices: queries stay, keys and values travel around a ring.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889. In each of N hops a
device sends the keys that it holds to the next device, and meanwhile computes blockwise attention of its queries over
them. Output and log-sum-exp are merged with those of the hops before. The backward pass goes around once more: given
the merged output and log-sum-exp, blockwise attention's own backward pass computes what each hop adds to the gradients.
Those of keys and values travel with these, and are back home after N hops.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._call import Call, Operands, Options, accumulation_dtype
from flax_mha._impl import parts, xla
from flax_mha._tiles import Scalar

T = TypeVar("T")
OutputAndLse = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]


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

    def chunk(self, device: Scalar, number: Scalar) -> Scalar:
        """Which chunk of the whole sequence is this one of a device."""
        return device + number * (2 * self.size - 1 - 2 * device)

    def over_pairs(self, step: Callable[[Scalar, Scalar, T], T], state: T) -> T:
        """Folds `step` over all pairs of a chunk of queries and a chunk of keys, one after another."""
        if self.chunks == 1:
            return step(0, 0, state)
        return lax.fori_loop(0, self.chunks**2, lambda n, state: step(n // self.chunks, n % self.chunks, state), state)

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


def ring_attention(call: Call, axis: str, chunks: int) -> OutputAndLse:
    """Output and log-sum-exp of a device's queries, in a `jax.shard_map` over the mesh.

    Args:
      call: With the device's own queries and keys, and numbers of its own batch entries and heads.
      axis: The mesh axis that splits the sequence.
      chunks: How many chunks a device holds.
    """
    operands, options = call
    ring = Ring(axis, lax.axis_size(axis), chunks, options._replace(return_residual=True))
    trainable = _trainable(operands, options)
    output, lse = _ring(ring, trainable, operands._replace(sinks=None, dropout_rng=None))
    if operands.sinks is not None:
        output, lse = _with_sinks(output, lse, operands.sinks[..., None, :].astype(lse.dtype))
    return output.astype(operands.query.dtype), lse


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
    proper = lse < jnp.inf  # rows that saw NaN or infinity stay as they are, and have no gradient
    lse_or_0 = jnp.where(proper, lse, jnp.zeros_like(lse))
    total = _log_add(lse_or_0, sinks)
    share = jnp.where(proper, _share(lse_or_0, total), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, total, lse)


def _log_add(a: Array, b: Array) -> Array:
    """log(exp(a) + exp(b)), whose gradient is finite where both are -inf."""
    largest = lax.stop_gradient(jnp.maximum(a, b))
    shift = jnp.where(jnp.isinf(largest), jnp.zeros_like(largest), largest)
    total = jnp.exp(a - shift) + jnp.exp(b - shift)
    seen = total != 0
    return jnp.where(seen, jnp.log(jnp.where(seen, total, jnp.ones_like(total))) + shift, -jnp.inf)


def _share(lse: Array, total: Array) -> Array:
    """exp(lse - total): how much of the whole softmax is in a part; 0 where the part saw nothing."""
    seen = lse != -jnp.inf
    return jnp.where(seen, jnp.exp(jnp.where(seen, lse - total, jnp.zeros_like(lse))), jnp.zeros_like(lse))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, trainable: Trainable, operands: Operands) -> OutputAndLse:
    operands = _with_trainable(operands, ring.options, trainable)
    query, value = operands.query, operands.value
    dtype = accumulation_dtype(query.dtype)
    rank = lax.axis_index(ring.axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        results, arrays = state
        following, source = ring.next(arrays), (rank - number) % ring.size
        held = parts.with_arrays_of_keys(operands, arrays)

        def pair(i: Scalar, j: Scalar, results: OutputAndLse) -> OutputAndLse:
            return _merged(ring, results, i, _result(ring, held, source, i, j))

        return (ring.over_pairs(pair, results), following), None

    nothing = jnp.zeros((*query.shape[:-1], value.shape[-1]), dtype), jnp.full(query.shape[:-1], -jnp.inf, dtype)
    state = nothing, parts.arrays_of_keys(operands)
    (results, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    return results


def _rows(ring: Ring, results: OutputAndLse, chunk: Scalar) -> OutputAndLse:
    """Of one chunk of the queries."""
    output, lse = results
    size = lse.shape[-2] // ring.chunks
    output, lse = (
        lax.dynamic_slice_in_dim(x, chunk * size, size, axis)
        for x, axis in ((output, lse.ndim - 2), (lse, lse.ndim - 2))
    )
    return output, lse


def _merged(ring: Ring, results: OutputAndLse, chunk: Scalar, more: OutputAndLse) -> OutputAndLse:
    """The results so far, and in the rows of one chunk those over more keys besides."""
    (before, before_lse), (after, after_lse) = _rows(ring, results, chunk), more
    total = _log_add(before_lse, after_lse)
    merged = before * _share(before_lse, total)[..., None] + after * _share(after_lse, total)[..., None]
    axis = total.ndim - 2
    first = chunk * total.shape[axis]
    output, lse = (
        lax.dynamic_update_slice_in_dim(x, part, first, axis) for x, part in zip(results, (merged, total), strict=True)
    )
    return output, lse


def _result(
    ring: Ring, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: OutputAndLse | None = None
) -> OutputAndLse:
    """The result of chunk `i` of the queries over chunk `j` of the keys.

    Args:
      ring: The static part.
      operands: The device's own, with keys that it was sent.
      source: The device whose keys these are.
      i: Which chunk of the queries.
      j: Which chunk of the keys.
      known: The results over all keys, if they are known; they are returned then, for their gradients.
    """
    (queries, keys), rank = operands.lengths, lax.axis_index(ring.axis)
    height, width = queries // ring.chunks, keys // ring.chunks
    # As blockwise attention does itself; here, so that nothing is rounded before it is merged.
    dtype = accumulation_dtype(operands.query.dtype)
    query, key, value = (x.astype(dtype) for x in operands[:3])
    part = parts.of_queries(operands._replace(query=query, key=key, value=value), i * height, height)
    part = parts.of_keys(part, j * width, source * keys + j * width, width)
    positions = ring.chunk(rank, i) * height, ring.chunk(source, j) * width
    call = Call(*parts.at_positions(part, ring.options, *positions))
    return xla.blockwise_attention(call, None if known is None else _rows(ring, known, i))


def _forward(ring: Ring, trainable: Trainable, operands: Operands) -> tuple[OutputAndLse, tuple]:
    results = _ring(ring, trainable, operands)
    return results, (trainable, operands, results)


def _backward(ring: Ring, saved: tuple, cotangents: OutputAndLse) -> tuple[Trainable, None]:
    trainable, operands, known = saved
    operands = _with_trainable(operands, ring.options, trainable)
    dtype, rank = accumulation_dtype(operands.query.dtype), lax.axis_index(ring.axis)

    def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        sums, arrays = state
        following, source = ring.next(arrays), (rank - number) % ring.size
        held = parts.with_arrays_of_keys(operands, arrays)
        query, key, value = (x.astype(dtype) for x in held[:3])
        own = _trainable(held, ring.options)._replace(query=query, key=key, value=value)

        def pair(i: Scalar, j: Scalar, sums: Trainable) -> Trainable:
            def result(own: Trainable) -> OutputAndLse:
                return _result(ring, _with_trainable(held, ring.options, own), source, i, j, known)

            [gradients] = jax.vjp(result, own)[1](_rows(ring, cotangents, i))
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, gradients)

        sums = ring.over_pairs(pair, sums)
        key, value = ring.next((sums.key, sums.value))
        return (sums._replace(key=key, value=value), following), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable)
    state = zeros, parts.arrays_of_keys(operands)
    (sums, _), _ = lax.scan(hop, state, jnp.arange(ring.size, dtype=jnp.int32))
    return jax.tree.map(lambda d, x: d.astype(x.dtype), sums, trainable), None


_ring.defvjp(_forward, _backward)
