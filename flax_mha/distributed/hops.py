"""The hops of a ring: its static part, and the loops that compute results, tangents and gradients around it.

Hops return float32 at least, so that nothing is rounded before it is merged or added up. They may still multiply
matrices in the dtype of the call, as a kernel does.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from flax_mha.call.operands import Call, Operands, Options, OutputAndLse, accumulation_dtype
from flax_mha.core.tile import Scalar
from flax_mha.core.tracing import T
from flax_mha.distributed import slices
from flax_mha.distributed.slices import SequenceAxes
from flax_mha.impl.registry import IMPLEMENTATIONS
from flax_mha.impl.shared import online_softmax
from flax_mha.impl.shared.online_softmax import State

DEFAULT = "blockwise"


class Trainable(NamedTuple):
    """The operands that have derivatives."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    captured: list[Array]
    scale: Array | None


def trainable_of(operands: Operands) -> Trainable:
    return Trainable(*(getattr(operands, name) for name in Trainable._fields))


class Ring(NamedTuple):
    """The static part of a ring of `size` devices along a mesh axis."""

    axis: str
    size: int
    chunks: int  # of adjacent positions that each device holds: 1, or 2 for "zigzag"
    axes: tuple[SequenceAxes, ...]
    options: Options
    dtype: DTypeLike  # of the call's query
    implementation: str  # computes the hops

    @property
    def portable(self) -> "Ring":
        """The ring whose hops have derivatives of every order."""
        return self._replace(implementation=DEFAULT)

    def fold(self, operands: Operands, step: Callable[[Operands, Scalar, T], T], state: T) -> T:
        """Folds `step(held, source, state)` over the hops: operands with the keys that device `source` sent."""
        rank = lax.axis_index(self.axis)

        def hop(state: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
            own, arrays = state
            following, source = self.send(arrays), (rank - number) % self.size
            return (step(slices.replace_travelling(operands, self.axes, arrays), source, own), following), None

        start = state, slices.travelling_arrays(operands, self.axes)
        return lax.scan(hop, start, jnp.arange(self.size, dtype=jnp.int32))[0][0]

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

    def hop(
        self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: OutputAndLse | None = None
    ) -> OutputAndLse:
        """Computes output and log-sum-exp of a `slice`, from query, key and value in float32 at least.

        Given those over all keys it returns them, and its derivatives are the share of this slice.
        """
        part, options = self.slice(operands, source, i, j)
        query, key, value = (x.astype(options.dtype) for x in part[:3])
        hop = IMPLEMENTATIONS[self.implementation].hop
        assert hop is not None
        return hop(Call(part._replace(query=query, key=key, value=value), options), known, dtype=self.dtype)

    def share(
        self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: OutputAndLse
    ) -> Callable[[Trainable], OutputAndLse]:
        """Makes a function of the trainable operands that returns `known`; its derivatives are the share of a slice."""
        return lambda own: self.hop(operands._replace(**own._asdict()), source, i, j, known)

    def send(self, tree: T) -> T:
        """Sends arrays to the next device, and returns those of the device before."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)


def merged(ring: Ring, operands: Operands) -> OutputAndLse:
    """Output, log-sum-exp and, if they are asked for, largest scores over all keys."""
    (*rows, _), features, dtype = operands.query.shape, operands.value.shape[-1], ring.options.dtype

    def step(held: Operands, source: Scalar, merged: State) -> State:
        def merge(i: Scalar, j: Scalar, merged: State) -> State:
            return _merge(merged, i, ring.hop(held, source, i, j))

        return ring.for_pairs(merge)(merged)

    nothing = State(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, features), dtype))
    if ring.options.return_max_score:
        nothing = nothing._replace(largest=nothing.running_max)
    output, lse, largest = online_softmax.finish(ring.fold(operands, step, nothing))
    return (output, lse) if largest is None else (output, lse, largest)


def _merge(merged: State, chunk: Scalar, result: OutputAndLse) -> State:
    """Merges the result over more keys into the rows of one chunk.

    To the running softmax a result is one more key, whose score is the log-sum-exp and whose value is the output. The
    state is a maximum and a sum: a merged log-sum-exp would be rounded in every hop, and errors of large scores add up.
    """
    output, lse, *largest = result
    before = _rows(merged, chunk, lse.shape[-2], lse.ndim - 2)
    values = output.reshape(lse.size, output.shape[-1])
    flat = jax.tree.map(lambda x: x.reshape(lse.size, *x.shape[lse.ndim :]), before)  # the rows of all heads
    after = online_softmax.update(flat, lse.reshape(lse.size, 1), lambda weights: weights * values)
    if before.largest is not None:  # of scores, not of log-sum-exps
        after = after._replace(largest=lax.max(before.largest, *largest))
    after = jax.tree.map(lambda rows, old: rows.reshape(old.shape), after, before)
    return _put_rows(merged, chunk, after, lse.shape[-2], lse.ndim - 2)


def _rows(results: T, chunk: Scalar, size: int, axis: int) -> T:
    """Cuts one chunk of `size` queries out of arrays that have an entry for each query along `axis`."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * size, size, axis), results)


def _put_rows(results: T, chunk: Scalar, parts: T, size: int, axis: int) -> T:
    """The inverse of `_rows`."""
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=axis)
    return jax.tree.map(put, results, parts)


def tangents(ring: Ring, operands: Operands, known: OutputAndLse, moved: Trainable) -> OutputAndLse:
    """The tangents of the results: sums of the shares of all hops. Those of keys and values travel with them."""
    ring = ring.portable
    axis = operands.query.ndim - 3
    height = operands.query.shape[axis] // ring.chunks

    def step(held: Operands, source: Scalar, state: tuple) -> tuple:
        sums, moved = state

        def add(i: Scalar, j: Scalar, sums: OutputAndLse) -> OutputAndLse:
            share = ring.share(held, source, i, j, _rows(known, i, height, axis))
            _, more = jax.jvp(share, (trainable_of(held),), (moved,))
            return _put_rows(sums, i, jax.tree.map(jnp.add, _rows(sums, i, height, axis), more), height, axis)

        key, value = ring.send((moved.key, moved.value))
        return ring.for_pairs(add)(sums), moved._replace(key=key, value=value)

    return ring.fold(operands, step, (jax.tree.map(jnp.zeros_like, known), moved))[0]


def gradients(ring: Ring, operands: Operands, known: OutputAndLse, cotangents: OutputAndLse) -> Trainable:
    """The gradients of a device's operands: sums of the shares of all hops. Those of keys and values travel home."""
    axis = operands.query.ndim - 3
    rows = functools.partial(_rows, size=operands.query.shape[axis] // ring.chunks, axis=axis)

    def step(held: Operands, source: Scalar, sums: Trainable) -> Trainable:
        query, key, value = (x.astype(ring.options.dtype) for x in held[:3])
        own = trainable_of(held)._replace(query=query, key=key, value=value)

        def add(i: Scalar, j: Scalar, sums: Trainable) -> Trainable:
            [more] = jax.vjp(ring.share(held, source, i, j, rows(known, i)), own)[1](rows(cotangents, i))
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)

        sums = ring.for_pairs(add)(sums)
        key, value = ring.send((sums.key, sums.value))
        return sums._replace(key=key, value=value)

    trainable = trainable_of(operands)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), ring.fold(operands, step, zeros), trainable)
