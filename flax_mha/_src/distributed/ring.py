"""Ring attention, the strategy "ring" for a sequence that is split over devices.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context,
arXiv:2310.01889. Each of N devices keeps its queries, and sends keys and values around
the ring. In each of N *hops*, a device attends to the keys that it holds, while it
sends them to the next device. The online softmax merges the results, in float32 at
least. In "zigzag", a device holds two chunks of the sequence; a hop computes each pair
of a chunk of queries and a chunk of keys.

Given output and log-sum-exp over all keys (`known`), the derivative of attention is a
sum over keys. So the tangent is one more pass around the ring, and each hop computes
its *share*: the sum over its own keys (`Engine.share`). The transpose of the tangent,
the backward pass, is another. JAX differentiates these passes for higher orders.

No hop is skipped, whatever the mask. All devices run one program, so the positions of a
hop's keys, and the tiles to visit, are known only at run time; tiles that are masked
throughout are not computed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.call import slices
from flax_mha._src.call.call import (
    Call,
    Context,
    LogSumExp,
    Result,
    accumulation_dtype,
)
from flax_mha._src.core.tile import Scalar
from flax_mha._src.core.tracing import T
from flax_mha._src.distributed import split
from flax_mha._src.engines.engine import Engine
from flax_mha._src.guard import guard
from flax_mha._src.math.derivatives import linear_function, replace_at
from flax_mha._src.math.softmax import (
    OnlineSoftmax,
    attention_operation,
    name_residuals,
)

# Cuts a pair of chunks out of a device's part of a call; see `Ring.fold`.
Cut = Callable[[Call], Call]
# The fields of a call that get derivatives.
TRAINABLE = ("query", "key", "value", "bias", "captured", "scale_array")
Trainable = dict[str, Any]  # their arrays


def attention(
    call: Call, context: Context, engine_of: Callable[[Call], Engine]
) -> Result:
    """Computes a device's part of a call by ring attention, inside `jax.shard_map`.

    `engine_of(hop)` returns the engine that computes the hops, given the first one. It
    has derivatives of every order.
    """
    # Hops are merged by their log-sum-exp.
    call = call.replace(return_residual=True)
    # The calls of all hops have equal shapes, so one engine and one plan are for all.
    hop = first_hop(call, context)
    engine = engine_of(hop)
    plan, _ = engine.plan(hop)
    ring = _ring_of(call, context)._replace(engine=engine, plan=plan)
    output, lse, largest = _results(ring, _of_hops(call))
    if call.sinks is not None:
        sinks = call.sinks[..., None, :].astype(call.dtype)
        output, lse = _with_sinks(output, lse, sinks)
    return Result(output.astype(call.query.dtype), lse.rounded, largest)


def first_hop(call: Call, context: Context) -> Call:
    """Returns the call in which this device's first chunk of queries attends to its
    first chunk of keys.

    The calls of all pairs of chunks have equal shapes, so an engine that supports this
    one supports all of them, with the same plan.
    """
    rank = lax.axis_index(context.axis)
    return _ring_of(call, context).slice(_of_hops(call), source=rank, i=0, j=0)


def _ring_of(call: Call, context: Context) -> "Ring":
    """Returns the `Ring` of a call without its engine, which `attention` adds."""
    return Ring(
        axis=context.axis,
        size=lax.axis_size(context.axis),
        chunks=2 if context.layout == "zigzag" else 1,
        rows_axis=len(call.batch),
    )


def _of_hops(call: Call) -> Call:
    """Removes sinks, which `attention` adds after the last hop, and the dropout key,
    which `dropout_seed` replaces.
    """
    return call.replace(sinks=None, dropout_rng=None)


def trainable_of(call: Call) -> Trainable:
    return {name: getattr(call, name) for name in TRAINABLE}


def promote(call: Call) -> Call:
    """Converts query, key and value to the dtype of sums: results and gradients of hops
    are added up, and are rounded only after the last hop.
    """
    return call.replace(
        query=call.query.astype(call.dtype),
        key=call.key.astype(call.dtype),
        value=call.value.astype(call.dtype),
    )


class Ring(NamedTuple):
    """A ring of devices: how the sequence is split over it, and how its hops are
    computed. All of it is static.
    """

    axis: str  # the mesh axis along which the devices form the ring
    size: int  # the number of devices
    # The number of chunks of adjacent positions that each device holds: 1, or 2 for
    # "zigzag".
    chunks: int
    rows_axis: int  # the axis of queries in all results
    # The `Engine` that computes the hops; `attention` sets it and its plan.
    engine: Any = None
    plan: Any = None  # the `Plan` of every hop

    def fold(
        self,
        call: Call,
        step: Callable[[Call, Cut, Scalar, T], T],
        state: T,
        after_hop: Callable[[T], T] = lambda state: state,
    ) -> T:
        """Runs `state = step(held, cut, i, state)` for each pair of chunks in each hop;
        returns the last state.

        `held` is `call` with this hop's keys and values: first the device's own,
        later those of other devices. `cut(held)` makes the call of a pair: chunk `i` of
        the device's queries, and one chunk of these keys. `after_hop` updates the state
        at the end of each hop.
        """
        rank = lax.axis_index(self.axis)
        leaves, structure = jax.tree.flatten(call)
        # The leaves that travel around the ring: keys, values, and what masks have for
        # each key.
        travels = call.map_arrays(lambda _, axes: slices.travels_with_keys(axes))
        travelling = [n for n, flag in enumerate(jax.tree.leaves(travels)) if flag]

        def hop(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
            state, arrays = carry
            # Sent before anything is computed, so that both can happen together.
            following = self.send(arrays)
            source = (rank - number) % self.size
            held_leaves = replace_at(leaves, travelling, arrays)
            held = jax.tree.unflatten(structure, held_leaves)

            def pair(n: Scalar, state: T) -> T:
                i = n // self.chunks
                j = n % self.chunks
                cut = functools.partial(self.slice, source=source, i=i, j=j)
                return step(held, cut, i, state)

            # A loop, so that a program has one copy of a pair's operations.
            if self.chunks == 1:
                state = pair(0, state)
            else:
                state = lax.fori_loop(0, self.chunks**2, pair, state)
            return (after_hop(state), following), None

        start = (state, [leaves[n] for n in travelling])
        hops = jnp.arange(self.size, dtype=jnp.int32)
        (state, _), _ = lax.scan(hop, start, hops)
        return state

    def slice(self, call: Call, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """Makes a pair's call: chunk `i` of this device's queries, and chunk `j` of the
        keys of device `source`.
        """
        queries, keys = call.lengths
        height = queries // self.chunks
        width = keys // self.chunks
        # The positions of the chunks in the sequence, for masks and dropout.
        rank = lax.axis_index(self.axis)
        first_query = split.chunk_of(rank, i, self.size) * height
        first_key = split.chunk_of(source, j, self.size) * width
        # The places of the chunk of keys in arrays that travel and in the others, which
        # hold the keys of all devices in the order of devices.
        first_held = j * width
        first_of_all = source * keys + j * width
        return slices.slice_call(
            call,
            queries=(i * height, height),
            keys=(first_held, first_of_all, width),
            positions=(first_query, first_key),
        )

    def share(
        self, held: Call, cut: Cut, known: Result
    ) -> Callable[[Trainable], Result]:
        """Makes a function of the trainable arrays that returns `known`, with this
        pair's share as its derivative.

        `known` is the result of the pair's queries over all keys. For `held` and `cut`,
        see `fold`.
        """

        def hop(trainable: Trainable) -> Result:
            call = promote(cut(held.replace(**trainable)))
            return self.engine.share(self.plan, guard(call, self.plan), known)

        return hop

    def send(self, tree: T) -> T:
        """Sends arrays to the next device; returns those from the previous device."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def send_keys(self, trainable: Trainable) -> Trainable:
        keys = {"key": trainable["key"], "value": trainable["value"]}
        return trainable | self.send(keys)

    def rows(self, results: T, chunk: Scalar) -> T:
        """Returns the slice of each array in the pytree `results` that belongs to one
        chunk of queries.
        """

        def cut(x: Array) -> Array:
            size = x.shape[self.rows_axis] // self.chunks
            return lax.dynamic_slice_in_dim(x, chunk * size, size, self.rows_axis)

        return jax.tree.map(cut, results)

    def put_rows(self, results: T, chunk: Scalar, parts: T) -> T:
        """Returns the results with `parts` in place of `rows(results, chunk)`."""

        def put(x: Array, part: Array) -> Array:
            first = chunk * part.shape[self.rows_axis]
            return lax.dynamic_update_slice_in_dim(x, part, first, self.rows_axis)

        return jax.tree.map(put, results, parts)


def _merge_hops(ring: Ring, call: Call) -> Result:
    """Runs the forward pass: merges the results of all hops to output, log-sum-exp and,
    if wanted, largest scores.
    """

    def step(held: Call, cut: Cut, i: Scalar, merged: OnlineSoftmax) -> OnlineSoftmax:
        call = promote(cut(held))
        result: Any = ring.engine.forward(ring.plan, guard(call, ring.plan))
        return ring.put_rows(merged, i, ring.rows(merged, i).merge(*result))

    start = OnlineSoftmax.start(
        rows=call.query.shape[:-1],
        features=call.value.shape[-1],
        sink=None,  # `attention` adds sinks after the last hop
        fields=call,
    )
    merged = ring.fold(call, step, start)
    return Result(*merged.finish())


def _tangents(ring: Ring, call: Call, known: Result, d_trainable: Trainable) -> Result:
    """Computes the tangents of `known` (output and log-sum-exp) from those of a
    device's arrays, `d_trainable`.

    They are the sums of all hops' shares. Tangents of keys and values travel around the
    ring with keys and values.
    """

    def step(held: Call, cut: Cut, i: Scalar, state: tuple) -> tuple:
        sums, d_trainable = state
        share = ring.share(held, cut, ring.rows(known, i))
        _, more = jax.jvp(share, (trainable_of(held),), (d_trainable,))
        added = jax.tree.map(jnp.add, ring.rows(sums, i), more)
        return ring.put_rows(sums, i, added), d_trainable

    def after_hop(state: tuple) -> tuple:
        sums, d_trainable = state
        return sums, ring.send_keys(d_trainable)

    start = (jax.tree.map(jnp.zeros_like, known), d_trainable)
    sums, _ = ring.fold(call, step, start, after_hop)
    return sums


def _gradients(ring: Ring, call: Call, known: Result, cotangents: Result) -> Trainable:
    """Computes the gradients of a device's arrays from the cotangents of `known`: the
    transpose of `_tangents`.

    The gradients of keys and values travel around the ring with keys and values: after
    the last hop they are back on the device that holds these.
    """

    def step(held: Call, cut: Cut, i: Scalar, sums: Trainable) -> Trainable:
        share = ring.share(held, cut, ring.rows(known, i))
        # A gradient has the dtype of its array.
        trainable = trainable_of(promote(held))
        _, transpose = jax.vjp(share, trainable)
        [more] = transpose(ring.rows(cotangents, i))
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)

    trainable = trainable_of(call)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable
    )
    sums = ring.fold(call, step, zeros, ring.send_keys)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), sums, trainable)


def _with_sinks(
    output: Array, lse: LogSumExp, sinks: Float[Array, "*B 1 N"]
) -> tuple[Array, LogSumExp]:
    """Adds sinks (one score per head, without a value) to a finished softmax; returns
    new output and log-sum-exp.

    With the maximum m' and the sum l' of the scores, and a sink z, the output is
    multiplied by a share::

        m = max(m', z)    l = exp(m' - m) l' + exp(z - m)    share = exp(m' - m) l' / l
    """
    maximum = lax.stop_gradient(jnp.maximum(lse.maximum, sinks))
    # Rows that are NaN, or have neither a visible score nor a sink, stay as they are
    # and have no gradient.
    is_proper = jnp.isfinite(maximum + lse.log_sum)
    of_keys = jnp.exp(jnp.where(is_proper, (lse.maximum - maximum) + lse.log_sum, 0))
    of_sink = jnp.exp(jnp.where(is_proper, sinks - maximum, -jnp.inf))
    total = of_keys + of_sink
    output = output * (of_keys / total)[..., None]
    log_sum = jnp.where(is_proper, jnp.log(total), lse.log_sum)
    return output, LogSumExp(maximum, log_sum)


def _results(
    ring: Ring, call: Call
) -> tuple[Float[Array, "*B T N Hv"], LogSumExp, Float[Array, "*B T N"] | None]:
    """Computes `_merge_hops` as one JAX operation with the derivatives `_tangents` and
    `_gradients`.
    """

    def with_tangents(arguments: tuple, tangents: tuple) -> tuple[Any, Array, Array]:
        [call] = arguments
        [d_call] = tangents
        output, lse, largest = _results(ring, call)
        known = name_residuals(output, lse)
        d_output, _, d_log_sum = _linear(
            _tangents,
            ring,
            call.replace(return_max_score=False),
            known=Result(*known),
            linear=trainable_of(d_call),
        )
        return (known, largest), d_output, d_log_sum

    shape = (*call.query.shape[:-1], call.value.shape[-1])
    compute = functools.partial(_merge_hops, ring)
    return attention_operation(shape, call, compute, with_tangents, call)


def _linear(
    compute: Callable, ring: Ring, call: Call, known: Result, linear: Any
) -> list[Array]:
    """Returns the leaves of `compute(ring, call, known, linear)`, which is linear in
    `linear`, as one operation that JAX can transpose.

    `compute` is `_tangents`, and `linear` the tangents of the call's arrays; or
    `compute` is its transpose `_gradients`, and `linear` the cotangents of the results.
    """
    # The results look like `known` or, of the transpose, like the call's arrays.
    if compute is _tangents:
        other: Callable = _gradients
        like: Any = known
    else:
        other = _tangents
        like = trainable_of(call)
    residual_leaves, residual_structure = jax.tree.flatten((call, known))
    linear_leaves, linear_structure = jax.tree.flatten(linear)
    like_leaves, result_structure = jax.tree.flatten(like)
    first_linear = len(residual_leaves)

    def evaluate(*arguments: Any) -> Sequence[Array]:
        residuals = arguments[:first_linear]
        call, known = jax.tree.unflatten(residual_structure, residuals)
        linear = jax.tree.unflatten(linear_structure, arguments[first_linear:])
        return jax.tree.leaves(compute(ring, call, known, linear))

    def transpose(
        residuals: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        call, known = jax.tree.unflatten(residual_structure, residuals)
        linear = jax.tree.unflatten(result_structure, cotangents)
        return _linear(other, ring, call, known, linear)

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like_leaves]
    operation = linear_function(outputs, evaluate, transpose, first_linear)
    return operation(*residual_leaves, *linear_leaves)
