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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.call import slices
from flax_mha._src.call.operands import (
    Call,
    Context,
    Operands,
    Options,
    Result,
    accumulation_dtype,
)
from flax_mha._src.core.tile import Scalar
from flax_mha._src.core.tracing import T
from flax_mha._src.distributed import split
from flax_mha._src.engines.engine import Engine
from flax_mha._src.guard import guard
from flax_mha._src.math.derivatives import Function, linear_function
from flax_mha._src.math.softmax import OnlineSoftmax, name_residuals
from flax_mha._src.plan import Plan

# Cuts a pair of chunks out of a device's operands; see `Ring.fold`.
Cut = Callable[[Operands], Call]
Trainable = dict[str, Any]  # the operands of a call that get derivatives, by name


def attention(call: Call, context: Context, engine: Engine) -> Result:
    """Computes a device's part of a call by ring attention, inside `jax.shard_map`.

    `engine` computes the hops, and has derivatives of every order.
    """
    operands, options = call
    ring, step = _ring_of(
        Call(operands, options._replace(return_residual=True)), context
    )
    plan, _ = engine.plan(step)
    ring = ring._replace(engine=engine, plan=plan)
    output, lse, largest = _results(ring, _of_hops(operands))
    if operands.sinks is not None:
        output, lse = _with_sinks(
            output, lse, operands.sinks[..., None, :].astype(lse.dtype)
        )
    return Result(output.astype(operands.query.dtype), lse, largest)


def first_step(call: Call, context: Context) -> Call:
    """Returns the call in which this device's first chunk of queries attends to its
    first chunk of keys.

    The calls of all pairs of chunks have equal shapes: an engine that plans, or
    refuses, this one does so for all.
    """
    return _ring_of(call, context)[1]


def _ring_of(call: Call, context: Context) -> tuple["Ring", Call]:
    """Returns the `Ring` of a call, still without its engine, which `attention` adds,
    and the call of `first_step`.
    """
    operands = _of_hops(call.operands)
    chunks = 2 if context.layout == "zigzag" else 1
    ring = Ring(
        context.axis,
        lax.axis_size(context.axis),
        chunks,
        operands.query.ndim - 3,
        call.options,
    )
    return ring, ring.slice(operands, lax.axis_index(ring.axis), 0, 0)


def _of_hops(operands: Operands) -> Operands:
    """Removes sinks, which `attention` adds after the last hop, and the dropout key:
    `ids_and_seeds` replaces it.
    """
    return operands._replace(sinks=None, dropout_rng=None)


def trainable_of(operands: Operands) -> Trainable:
    return {
        name: getattr(operands, name)
        for name in ("query", "key", "value", "bias", "captured", "scale")
    }


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
    options: Options  # the options of the call
    # The `Engine` that computes the hops; `attention` sets it and its plan.
    engine: Any = None
    plan: Any = None  # the `Plan` of every hop

    def fold(
        self,
        operands: Operands,
        step: Callable[[Operands, Cut, Scalar, T], T],
        state: T,
        after_hop: Callable[[T], T] = lambda state: state,
    ) -> T:
        """Runs `state = step(held, cut, i, state)` for each pair of chunks in each hop;
        returns the last state.

        `held` is `operands` with this hop's keys and values: first the device's own,
        later those of other devices. `cut(held)` makes the call of a pair: chunk `i` of
        the device's queries, and one chunk of these keys. `after_hop` updates the state
        at the end of each hop.
        """
        rank, (leaves, structure) = (
            lax.axis_index(self.axis),
            jax.tree.flatten(operands),
        )
        travels = [axes.travels for axes in slices.sequence_axes(operands)]

        def hop(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
            state, arrays = carry
            following = self.send(arrays)
            source = (rank - number) % self.size
            arrived = iter(arrays)
            held = [
                next(arrived) if moves else x
                for x, moves in zip(leaves, travels, strict=True)
            ]
            held_operands = jax.tree.unflatten(structure, held)

            def pair(n: Scalar, state: T) -> T:
                i = n // self.chunks
                j = n % self.chunks
                return step(
                    held_operands,
                    functools.partial(self.slice, source=source, i=i, j=j),
                    i,
                    state,
                )

            if self.chunks == 1:
                state = pair(0, state)
            else:
                state = lax.fori_loop(0, self.chunks**2, pair, state)
            return (after_hop(state), following), None

        start = state, [x for x, moves in zip(leaves, travels, strict=True) if moves]
        return lax.scan(hop, start, jnp.arange(self.size, dtype=jnp.int32))[0][0]

    def slice(self, operands: Operands, source: Scalar, i: Scalar, j: Scalar) -> Call:
        """Makes a pair's call: chunk `i` of this device's queries, and chunk `j` of the
        keys of device `source`.
        """
        queries, keys = operands.lengths
        height = queries // self.chunks
        width = keys // self.chunks
        first_query = split.chunk_of(lax.axis_index(self.axis), i, self.size) * height
        first_key = split.chunk_of(source, j, self.size) * width
        key_slice = j * width, source * keys + j * width, width
        return Call(
            slices.slice_call(
                operands, (i * height, height), key_slice, (first_query, first_key)
            ),
            self.options,
        )

    def hop(self, call: Call, known: Result | None = None) -> Result:
        """Computes a pair's call in float32 at least, by `Engine.forward` or, given
        `known`, by `Engine.share`.
        """
        operands = call.operands
        engine: Engine = self.engine
        plan: Plan = self.plan
        query, key, value = (x.astype(self.options.dtype) for x in operands[:3])
        call = guard(
            call._replace(
                operands=operands._replace(query=query, key=key, value=value)
            ),
            plan,
        )
        if known is None:
            return engine.forward(plan, call)
        return engine.share(plan, call, known)

    def share(
        self, held: Operands, cut: Cut, known: Result
    ) -> Callable[[Trainable], Result]:
        """Makes a function of the trainable operands that returns `known`, with this
        pair's share as its derivative.

        `known` is the result of the pair's queries over all keys. For `held` and `cut`,
        see `fold`.
        """
        return lambda trainable: self.hop(cut(held._replace(**trainable)), known)

    def send(self, tree: T) -> T:
        """Sends arrays to the next device, and returns those from the previous device."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def send_keys(self, trainable: Trainable) -> Trainable:
        return trainable | self.send(
            {name: trainable[name] for name in ("key", "value")}
        )

    def rows(self, results: T, chunk: Scalar) -> T:
        """Returns the slice of each array in the pytree `results` that belongs to one
        chunk of queries.
        """

        def cut(x: Array) -> Array:
            size = x.shape[self.rows_axis] // self.chunks
            return lax.dynamic_slice_in_dim(x, chunk * size, size, self.rows_axis)

        return jax.tree.map(cut, results)

    def put_rows(self, results: T, chunk: Scalar, parts: T) -> T:
        """Returns `results` with `parts` in place of the slices that `rows(results,
        chunk)` returns.
        """

        def put(x: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(
                x, part, chunk * part.shape[self.rows_axis], self.rows_axis
            )

        return jax.tree.map(put, results, parts)


def _merge_hops(ring: Ring, operands: Operands) -> Result:
    """Runs the forward pass: merges the results of all hops to output, log-sum-exp and,
    if wanted, largest scores.

    In the online softmax, the result over some keys is like one more key: its score is
    the log-sum-exp and its value is the output. The state keeps maximum and sum apart;
    a merged log-sum-exp would be rounded in every hop.
    """

    def step(
        held: Operands, cut: Cut, i: Scalar, merged: OnlineSoftmax
    ) -> OnlineSoftmax:
        result: Any = ring.hop(cut(held))
        before = ring.rows(merged, i)
        count = result.lse.size
        values = result.output.reshape(count, result.output.shape[-1])
        # Rows of all heads.
        flat = jax.tree.map(
            lambda x: x.reshape(count, *x.shape[result.lse.ndim :]), before
        )
        after = flat.update(
            result.lse.reshape(count, 1), lambda weights: weights * values
        )
        if before.largest is not None:  # largest scores, not log-sum-exps
            after = after._replace(largest=lax.max(before.largest, result.largest))
        return ring.put_rows(
            merged,
            i,
            jax.tree.map(lambda rows, old: rows.reshape(old.shape), after, before),
        )

    (*rows, _), features, options = (
        operands.query.shape,
        operands.value.shape[-1],
        ring.options,
    )
    start = OnlineSoftmax.start(
        tuple(rows), features, None, options.dtype, options.return_max_score
    )
    return Result(*ring.fold(operands, step, start).finish())


def _tangents(
    ring: Ring, operands: Operands, known: Result, d_operands: Trainable
) -> Result:
    """Computes the tangents of `known` (output and log-sum-exp) from those of a
    device's operands, `d_operands`.

    They are the sums of all hops' shares. Tangents of keys and values travel around the
    ring with keys and values.
    """

    def step(held: Operands, cut: Cut, i: Scalar, state: tuple) -> tuple:
        sums, d_operands = state
        share = ring.share(held, cut, ring.rows(known, i))
        _, more = jax.jvp(share, (trainable_of(held),), (d_operands,))
        return ring.put_rows(
            sums, i, jax.tree.map(jnp.add, ring.rows(sums, i), more)
        ), d_operands

    start = jax.tree.map(jnp.zeros_like, known), d_operands
    return ring.fold(
        operands, step, start, lambda state: (state[0], ring.send_keys(state[1]))
    )[0]


def _gradients(
    ring: Ring, operands: Operands, known: Result, cotangents: Result
) -> Trainable:
    """Computes the gradients of a device's operands from the cotangents of `known`: the
    transpose of `_tangents`.
    """

    def step(held: Operands, cut: Cut, i: Scalar, sums: Trainable) -> Trainable:
        query, key, value = (x.astype(ring.options.dtype) for x in held[:3])
        trainable = trainable_of(held) | {"query": query, "key": key, "value": value}
        [more] = jax.vjp(ring.share(held, cut, ring.rows(known, i)), trainable)[1](
            ring.rows(cotangents, i)
        )
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)

    trainable = trainable_of(operands)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), trainable
    )
    sums = ring.fold(operands, step, zeros, ring.send_keys)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), sums, trainable)


def _with_sinks(
    output: Array, lse: Array, sinks: Float[Array, "*B 1 N"]
) -> tuple[Array, Array]:
    """Adds sinks (one score per head, without a value) to a finished softmax; returns
    new output and log-sum-exp.
    """
    # Rows that are NaN, or have neither a visible score nor a sink, stay as they are
    # and have no gradient.
    proper = (lse < jnp.inf) & ((lse > -jnp.inf) | (sinks > -jnp.inf))
    a, b = (
        jnp.where(proper, x, jnp.zeros_like(x))
        for x in (lse, jnp.broadcast_to(sinks, lse.shape))
    )
    share = jnp.where(proper, jax.nn.sigmoid(a - b), jnp.ones_like(lse))
    return output * share[..., None], jnp.where(proper, jnp.logaddexp(a, b), lse)


def _results(ring: Ring, operands: Operands) -> Any:
    """Computes `_merge_hops` as one JAX operation with the derivatives `_tangents` and
    `_gradients`.
    """
    leaves, structure = jax.tree.flatten(operands)
    rows = operands.query.shape[:-1]
    dtype = ring.options.dtype
    shapes = (
        (*rows, operands.value.shape[-1]),
        *(rows for _ in range(1 + ring.options.return_max_score)),
    )

    def evaluate(*arguments: Any) -> list[Array]:
        return jax.tree.leaves(
            _merge_hops(ring, jax.tree.unflatten(structure, arguments))
        )

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        output, lse, *largest = attend(*arguments)
        known = name_residuals(output, lse)
        d_arguments = [
            tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(arguments)
        ]
        operands, d_operands = (
            jax.tree.unflatten(structure, x) for x in (arguments, d_arguments)
        )
        # It has no tangent.
        without_max = ring._replace(
            options=ring.options._replace(return_max_score=False)
        )
        tangent = _linear(
            _tangents, without_max, operands, Result(*known), trainable_of(d_operands)
        )
        return [*known, *largest], [*tangent, *(None for _ in largest)]

    attend = Function(
        [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], evaluate, jvp
    )
    return Result(*attend(*leaves))


def _linear(
    compute: Callable, ring: Ring, operands: Operands, known: Result, linear: Any
) -> list[Array]:
    """Returns the leaves of `compute(ring, operands, known, linear)`, as one operation
    that JAX can transpose.

    `compute` is `_tangents` or its transpose `_gradients`, and `linear` holds the
    tangents or cotangents.
    """
    leaves, residuals = jax.tree.flatten((operands, known))
    linear_leaves, structure = jax.tree.flatten(linear)
    like, results = jax.tree.flatten(
        known if compute is _tangents else trainable_of(operands)
    )
    first = len(leaves)

    def evaluate(*arguments: Any) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, arguments[:first])
        return jax.tree.leaves(
            compute(
                ring, operands, known, jax.tree.unflatten(structure, arguments[first:])
            )
        )

    def transpose(
        residual_leaves: Sequence[Any], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        operands, known = jax.tree.unflatten(residuals, residual_leaves)
        other = _gradients if compute is _tangents else _tangents
        return _linear(
            other, ring, operands, known, jax.tree.unflatten(results, cotangents)
        )

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    return linear_function(outputs, evaluate, transpose, first)(*leaves, *linear_leaves)
