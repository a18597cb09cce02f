"""Ring attention, the strategy "ring" for a sequence that is split over devices.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889. Each of N devices
keeps its queries, and sends keys and values around the ring. In each of N *hops*, a device attends to the keys that it
holds, while it sends them to the next device. The online softmax merges the results, in float32 at least.

Given output and log-sum-exp over all keys, the derivative of attention is a sum over keys. So the tangent is one more
pass around the ring, and each hop computes its *share*: the sum over its own keys (`Engine.share`). The
transpose of the tangent, the backward pass, is another. JAX differentiates these passes for higher orders.

No hop is skipped, whatever the mask. All devices run one program, so the positions of a hop's keys are data, and its
block mask is made at run time; tiles that are masked throughout are not computed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.call.operands import Call, Context, Operands, Options, Result, accumulation_dtype
from flax_mha._src.core.tile import Scalar
from flax_mha._src.core.tracing import T
from flax_mha._src.distributed import slices
from flax_mha._src.distributed.slices import SequenceAxes
from flax_mha._src.engines.engine import Engine, name_residuals
from flax_mha._src.guard import guard
from flax_mha._src.math import online_softmax
from flax_mha._src.math.derivatives import Function, linear_function
from flax_mha._src.math.online_softmax import State
from flax_mha._src.plan import Plan


def attention(call: Call, context: Context, engine: Engine, portable: Engine) -> Result:
    """Computes a device's part of a call, inside `jax.shard_map`, with hops by `engine`.

    `portable` computes derivatives: it must have those of every order.
    """
    operands, (ring, step) = call.operands, _ring_of(call, context)
    ring = ring._replace(engines=tuple((x, x.plan(step)[0]) for x in (engine, portable)))
    output, lse, *largest = _results(ring, _without_sinks(operands))
    if operands.sinks is not None:
        output, lse = _with_sinks(output, lse, operands.sinks[..., None, :].astype(lse.dtype))
    return Result(output.astype(operands.query.dtype), lse, *largest)


def first_step(call: Call, context: Context) -> Call:
    """Returns the call that the first hop computes for the first of a device's queries."""
    return _ring_of(call, context)[1]._replace(options=call.options)


def _without_sinks(operands: Operands) -> Operands:
    """Returns the operands of hops: sinks are added after the last hop, and `head_ids` holds the random words."""
    return operands._replace(sinks=None, dropout_rng=None)


def _ring_of(call: Call, context: Context) -> tuple["Ring", Call]:
    """Returns the ring, without engines, and the call that its first hop computes."""
    operands = _without_sinks(call.operands)
    ring = Ring(
        axis=context.axis,
        size=lax.axis_size(context.axis),
        chunks=2 if context.layout == "zigzag" else 1,
        axes=slices.sequence_axes(operands),
        options=call.options._replace(return_residual=True),
        engines=(),
    )
    return ring, ring.slice(operands, lax.axis_index(ring.axis), 0, 0)


# Output, log-sum-exp and, with `return_max_score`, the largest scores of rows.
Rows = tuple[Array, ...]


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
    engines: tuple[tuple[Engine, Plan], ...]  # of the hops and, last, one whose hops have derivatives of every order

    @property
    def portable(self) -> "Ring":
        """The ring whose hops have derivatives of every order."""
        return self._replace(engines=self.engines[-1:])

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

    def hop(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: Rows | None = None) -> Rows:
        """Computes the pair of chunks that `slice` makes, in float32 at least.

        With `known`, the result of query chunk `i` over all keys, returns it; its derivatives are this pair's share.
        """
        pair, options = self.slice(operands, source, i, j)
        query, key, value = (x.astype(options.dtype) for x in pair[:3])
        engine, plan = self.engines[0]
        call = guard(Call(pair._replace(query=query, key=key, value=value), options), plan)
        result = engine.forward(plan, call) if known is None else engine.share(plan, call, Result(*known))
        return tuple(x for x in result if x is not None)

    def share(
        self, operands: Operands, source: Scalar, i: Scalar, j: Scalar, known: Rows
    ) -> Callable[[Trainable], Rows]:
        """Makes a function of the trainable operands that returns `known`; its derivatives are this pair's share."""
        return lambda trainable: self.hop(operands._replace(**trainable._asdict()), source, i, j, known)

    def send(self, tree: T) -> T:
        """Sends arrays to the next device, and returns those from the previous device."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)


def _merge_hops(ring: Ring, operands: Operands) -> Rows:
    """Computes output, log-sum-exp and, if asked for, largest scores over all keys, by merging all hops."""
    (*rows, _), features, dtype = operands.query.shape, operands.value.shape[-1], ring.options.dtype

    def step(held: Operands, source: Scalar, merged: State) -> State:
        def merge(i: Scalar, j: Scalar, merged: State) -> State:
            return _merge(merged, i, ring.hop(held, source, i, j))

        return ring.for_pairs(merge)(merged)

    start = online_softmax.start(tuple(rows), features, None, dtype, ring.options.return_max_score)
    output, lse, largest = online_softmax.finish(ring.fold(operands, step, start))
    return (output, lse) if largest is None else (output, lse, largest)


def _merge(merged: State, chunk: Scalar, result: Rows) -> State:
    """Merges a hop's result for the queries in `chunk` into their rows in `merged`.

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


def _tangents(ring: Ring, operands: Operands, known: Rows, d_operands: Trainable) -> Rows:
    """Computes the tangents of `known`, output and log-sum-exp over all keys: the sum of the shares of all hops.

    The tangents of keys and values travel around the ring with them.
    """
    ring = ring.portable
    axis = operands.query.ndim - 3
    height = operands.query.shape[axis] // ring.chunks

    def step(held: Operands, source: Scalar, state: tuple) -> tuple:
        sums, d_operands = state

        def add(i: Scalar, j: Scalar, sums: Rows) -> Rows:
            share = ring.share(held, source, i, j, _rows(known, i, height, axis))
            _, more = jax.jvp(share, (trainable_of(held),), (d_operands,))
            return _put_rows(sums, i, jax.tree.map(jnp.add, _rows(sums, i, height, axis), more), height, axis)

        key, value = ring.send((d_operands.key, d_operands.value))
        return ring.for_pairs(add)(sums), d_operands._replace(key=key, value=value)

    return ring.fold(operands, step, (jax.tree.map(jnp.zeros_like, known), d_operands))[0]


def _gradients(ring: Ring, operands: Operands, known: Rows, cotangents: Rows) -> Trainable:
    """Computes the gradients of a device's operands from the cotangents of `known`: the transpose of `_tangents`."""
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


def _with_sinks(output: Array, lse: Array, sinks: Float[Array, "*B 1 N"]) -> tuple[Array, Array]:
    """Adds sinks, one score per head without a value, to the softmax behind output and log-sum-exp; returns both."""
    # Rows that are NaN, or have neither a visible score nor a sink, stay as they are and have no gradient.
    proper = (lse < jnp.inf) & ((lse > -jnp.inf) | (sinks > -jnp.inf))
    a, b = (jnp.where(proper, x, jnp.zeros_like(x)) for x in (lse, jnp.broadcast_to(sinks, lse.shape)))
    share = jnp.where(proper, jax.nn.sigmoid(a - b), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, jnp.logaddexp(a, b), lse)


def _results(ring: Ring, operands: Operands) -> Any:
    """Computes `_merge_hops` as one operation, whose derivatives are `_tangents` and `_gradients`."""
    leaves, structure = jax.tree.flatten(operands)
    rows, dtype = operands.query.shape[:-1], ring.options.dtype
    shapes = (*rows, operands.value.shape[-1]), *(rows for _ in range(1 + ring.options.return_max_score))

    def evaluate(*arguments: Any) -> Rows:
        return _merge_hops(ring, jax.tree.unflatten(structure, arguments))

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        output, lse, *largest = attend(*arguments)
        result = name_residuals(output, lse)
        d_arguments = [tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(arguments)]
        operands, d_operands = (jax.tree.unflatten(structure, x) for x in (arguments, d_arguments))
        without_max = ring._replace(options=ring.options._replace(return_max_score=False))  # it has no tangent
        tangent = _linear(_tangents, without_max, operands, result, trainable_of(d_operands))
        return [*result, *largest], [*tangent, *(None for _ in largest)]

    attend = Function([jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], evaluate, jvp)
    return attend(*leaves)


def _linear(compute: Callable, ring: Ring, operands: Operands, known: Rows, linear: Any) -> list[Array]:
    """Returns the leaves of `compute(ring, operands, known, linear)`, as one operation that JAX can transpose.

    `compute` is `_tangents`, or its transpose `_gradients`; `linear` are the tangents or cotangents.
    """
    leaves, residuals = jax.tree.flatten((operands, known))
    linear_leaves, structure = jax.tree.flatten(linear)
    like, results = jax.tree.flatten(known if compute is _tangents else trainable_of(operands))
    first = len(leaves)

    def evaluate(ring: Ring, *arguments: Any) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, arguments[:first])
        return jax.tree.leaves(compute(ring, operands, known, jax.tree.unflatten(structure, arguments[first:])))

    def transpose(residual_leaves: Sequence[Any], cotangents: Sequence[Array]) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, residual_leaves)
        other = _gradients if compute is _tangents else _tangents
        return _linear(other, ring, operands, known, jax.tree.unflatten(results, cotangents))

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    here, portable = (functools.partial(evaluate, x) for x in (ring, ring.portable))
    return linear_function(outputs, here, transpose, first, portable)(*leaves, *linear_leaves)
