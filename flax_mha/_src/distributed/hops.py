"""The loops of ring attention: results, tangents and gradients, each in one pass of keys and values around the ring.

In a *hop*, a device computes the attention of its queries over the keys and values that it holds, while it sends these
to the next device. After as many hops as there are devices, every device has seen all keys. A hop's results are in
float32 at least, so that they are not rounded before they are merged; its matrix products may be in the call's dtype.

Derivatives work by hop, too. Given the output and log-sum-exp over all keys, the derivative of attention is a sum over
keys, so each hop computes its *share*: the part of that sum over the keys of this hop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from flax_mha._src.call.operands import Call, Operands, Options, OutputAndLse, accumulation_dtype
from flax_mha._src.core.tile import Scalar
from flax_mha._src.core.tracing import T
from flax_mha._src.distributed import slices
from flax_mha._src.distributed.slices import SequenceAxes
from flax_mha._src.engines.registry import IMPLEMENTATIONS
from flax_mha._src.math import online_softmax
from flax_mha._src.math.online_softmax import State

DEFAULT = "blockwise"  # the implementation of hops, unless one is named


class Trainable(NamedTuple):
    """The operands of a call that have derivatives."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    captured: list[Array]
    scale: Array | None


def trainable_of(operands: Operands) -> Trainable:
    return Trainable(*(getattr(operands, name) for name in Trainable._fields))


class Ring(NamedTuple):
    """A ring of devices: how the sequence is split over it, and how its hops are computed. All of it is static."""

    axis: str  # the mesh axis along which the devices form the ring
    size: int  # the number of devices
    chunks: int  # the number of chunks of adjacent positions that each device holds: 1, or 2 for "zigzag"
    axes: tuple[SequenceAxes, ...]  # the sequence axes of all operands
    options: Options  # the options of the call
    dtype: DTypeLike  # the dtype of the query
    implementation: str  # the implementation of the hops

    @property
    def portable(self) -> "Ring":
        """The ring with hops by "blockwise", which have derivatives of every order."""
        return self._replace(implementation=DEFAULT)

    def fold(self, operands: Operands, step: Callable[[Operands, Scalar, T], T], state: T) -> T:
        """Folds `step(held, source, state)` over all hops, and returns the last state.

        `held` are `operands`, but with the keys and values that device `source` had before the first hop.
        """
        rank = lax.axis_index(self.axis)

        def hop(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
            state, arrays = carry
            following, source = self.send(arrays), (rank - number) % self.size
            return (step(slices.replace_travelling(operands, self.axes, arrays), source, state), following), None

        start = state, slices.travelling_arrays(operands, self.axes)
        return lax.scan(hop, start, jnp.arange(self.size, dtype=jnp.int32))[0][0]

    def for_pairs(self, step: Callable[[Scalar, Scalar, T], T]) -> Callable[[T], T]:
        """Makes the function of `state` that folds `step(i, j, state)` over all chunks i of queries and j of keys."""
        if self.chunks == 1:
            return functools.partial(step, 0, 0)
        pairs, chunks = self.chunks**2, self.chunks
        return lambda state: lax.fori_loop(0, pairs, lambda n, state: step(n // chunks, n % chunks, state), state)

    def slice(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """Makes the call of one pair: chunk `i` of a device's queries, and chunk `j` of the keys of device `source`."""
        queries, keys = operands.query.shape[-3], operands.key.shape[-3]
        height, width = queries // self.chunks, keys // self.chunks
        first_query = slices.chunk_of(lax.axis_index(self.axis), i, self.size) * height
        first_key = slices.chunk_of(source, j, self.size) * width
        key_slice = j * width, source * keys + j * width, width
        pair = slices.slice_call(operands, self.axes, (i * height, height), key_slice, (first_query, first_key))
        return Call(pair, self.options)

    def hop(
        self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: OutputAndLse | None = None
    ) -> OutputAndLse:
        """Computes output and log-sum-exp of the pair of chunks that `slice` makes, in float32 at least.

        If `known` is given, the result of query chunk `i` over all keys, it is returned, and its derivatives are the
        share of this pair; see `Implementation.hop`.
        """
        pair, options = self.slice(operands, source, i, j)
        query, key, value = (x.astype(options.dtype) for x in pair[:3])
        hop = IMPLEMENTATIONS[self.implementation].hop
        assert hop is not None
        return hop(Call(pair._replace(query=query, key=key, value=value), options), known, dtype=self.dtype)

    def share(
        self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: OutputAndLse
    ) -> Callable[[Trainable], OutputAndLse]:
        """Makes a function of the trainable operands that returns `known`; its derivatives are this pair's share."""
        return lambda trainable: self.hop(operands._replace(**trainable._asdict()), source, i, j, known)

    def send(self, tree: T) -> T:
        """Sends arrays to the next device, and returns those from the previous device."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)


def merge_hops(ring: Ring, operands: Operands) -> OutputAndLse:
    """Computes output, log-sum-exp and, if asked for, largest scores over all keys, by merging all hops."""
    (*rows, _), features, dtype = operands.query.shape, operands.value.shape[-1], ring.options.dtype

    def step(held: Operands, source: Scalar, merged: State) -> State:
        def merge(i: Scalar, j: Scalar, merged: State) -> State:
            return _merge(merged, i, ring.hop(held, source, i, j))

        return ring.for_pairs(merge)(merged)

    start = online_softmax.start(tuple(rows), features, None, dtype, ring.options.return_max_score)
    output, lse, largest = online_softmax.finish(ring.fold(operands, step, start))
    return (output, lse) if largest is None else (output, lse, largest)


def _merge(merged: State, chunk: Scalar, result: OutputAndLse) -> State:
    """Merges the result of a hop for the queries of `chunk` into the rows of that chunk in `merged`.

    In the online softmax, the result over some keys is like one more key: its score is the log-sum-exp and its value is
    the output. The state keeps maximum and sum apart; a merged log-sum-exp would be rounded in every hop.
    """
    output, lse, *largest = result
    before = _rows(merged, chunk, lse.shape[-2], lse.ndim - 2)
    values = output.reshape(lse.size, output.shape[-1])
    flat = jax.tree.map(lambda x: x.reshape(lse.size, *x.shape[lse.ndim :]), before)  # rows of all heads
    after = online_softmax.update(flat, lse.reshape(lse.size, 1), lambda weights: weights * values)
    if before.largest is not None:  # largest scores, not log-sum-exps
        after = after._replace(largest=lax.max(before.largest, *largest))
    after = jax.tree.map(lambda rows, old: rows.reshape(old.shape), after, before)
    return _put_rows(merged, chunk, after, lse.shape[-2], lse.ndim - 2)


def _rows(results: T, chunk: Scalar, size: int, axis: int) -> T:
    """Cuts the rows of one chunk, of `size` queries, out of arrays with queries along `axis`."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * size, size, axis), results)


def _put_rows(results: T, chunk: Scalar, parts: T, size: int, axis: int) -> T:
    """Returns `results` with `parts` in place of the rows that `_rows` cuts out."""
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=axis)
    return jax.tree.map(put, results, parts)


def tangents(ring: Ring, operands: Operands, known: OutputAndLse, d_operands: Trainable) -> OutputAndLse:
    """Computes the tangents of `known`, output and log-sum-exp over all keys: the sum of the shares of all hops.

    The tangents of keys and values travel around the ring with them.
    """
    ring = ring.portable
    axis = operands.query.ndim - 3
    height = operands.query.shape[axis] // ring.chunks

    def step(held: Operands, source: Scalar, state: tuple) -> tuple:
        sums, d_operands = state

        def add(i: Scalar, j: Scalar, sums: OutputAndLse) -> OutputAndLse:
            share = ring.share(held, source, i, j, _rows(known, i, height, axis))
            _, more = jax.jvp(share, (trainable_of(held),), (d_operands,))
            return _put_rows(sums, i, jax.tree.map(jnp.add, _rows(sums, i, height, axis), more), height, axis)

        key, value = ring.send((d_operands.key, d_operands.value))
        return ring.for_pairs(add)(sums), d_operands._replace(key=key, value=value)

    return ring.fold(operands, step, (jax.tree.map(jnp.zeros_like, known), d_operands))[0]


def gradients(ring: Ring, operands: Operands, known: OutputAndLse, cotangents: OutputAndLse) -> Trainable:
    """Computes the gradients of a device's operands from the cotangents of `known`: the sum of the shares of all hops.

    The gradients of keys and values travel around the ring with them, and so return to their device.
    """
    axis = operands.query.ndim - 3
    rows = functools.partial(_rows, size=operands.query.shape[axis] // ring.chunks, axis=axis)

    def step(held: Operands, source: Scalar, sums: Trainable) -> Trainable:
        query, key, value = (x.astype(ring.options.dtype) for x in held[:3])
        trainable = trainable_of(held)._replace(query=query, key=key, value=value)

        def add(i: Scalar, j: Scalar, sums: Trainable) -> Trainable:
            [more] = jax.vjp(ring.share(held, source, i, j, rows(known, i)), trainable)[1](rows(cotangents, i))
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)

        sums = ring.for_pairs(add)(sums)
        key, value = ring.send((sums.key, sums.value))
        return sums._replace(key=key, value=value)

    trainable = trainable_of(operands)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), ring.fold(operands, step, zeros), trainable)
