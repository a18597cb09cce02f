"""`implementation="blockwise"`: attention tile by tile, in memory O(T + S), forward and backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao, FlashAttention-2,
arXiv:2307.08691, algorithm 2, with the rows outside: the scores of a tile are computed again from what was saved,
which is query, key, value, output and log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha.call.operands import Call, Operands, Options, OutputAndLse
from flax_mha.core.tile import Scalar, Tile, pad
from flax_mha.core.tracing import varying_alike, varying_as
from flax_mha.impl import dense
from flax_mha.impl.implementation import Implementation
from flax_mha.impl.shared import nonfinite, online_softmax, schedule
from flax_mha.impl.shared.head import Head, from_caller, heads_of, map_heads, numbers_as_arrays, to_caller
from flax_mha.impl.shared.nonfinite import NonfiniteFlags
from flax_mha.impl.shared.schedule import TilePlan
from flax_mha.impl.shared.scores import ScoreRule
from flax_mha.impl.shared.tiling import BlockMask, TileBand, Tiling, dynamic_block_mask, padded_mask
from flax_mha.masks import Mask

T = TypeVar("T")


def attention(call: Call, result: OutputAndLse | None = None) -> OutputAndLse:
    """Output and log-sum-exp of all heads.

    Args:
      call: The call.
      result: Output and log-sum-exp over these and other keys, if they are known: see `blockwise_head`.
    """
    call = schedule.with_occupancy(numbers_as_arrays(call))
    plan, blocks = schedule.plan_tiles(call)
    try:
        return _all_heads(call.operands, call.options, plan, blocks, result)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            'implementation must be "xla" for forward-mode differentiation (jax.jvp, jax.jacfwd), but got "blockwise", '
            'or None, which chose it; pass implementation="xla".'
        ) from error


def hop(call: Call, result: OutputAndLse | None, dtype: DTypeLike) -> OutputAndLse:
    """`attention` of some of the keys; matrix products are those of its inputs' dtype."""
    return attention(call, result)


BLOCKWISE = Implementation("blockwise", attention, hop=hop)


@functools.partial(jax.jit, static_argnames=("options", "plan"))
def _all_heads(
    operands: Operands, options: Options, plan: TilePlan, blocks: BlockMask | None, result: OutputAndLse | None
) -> OutputAndLse:
    head, axes = (
        heads_of(operands, options, "flags and scales" if plan.fuses_rows else "flags", plan.dtype),
        operands.query.ndim - 1,
    )
    if blocks is None:
        blocks = _block_mask(head.rule, plan.tiling, axes)
    # Heads whose loops visit different numbers of tiles must not be vmapped together: each would run the longest loop.
    looped_axes = plan.looped_axes
    if looped_axes is not None and not blocks.single:
        looped_axes = max([looped_axes, *(axis + 1 for axis in range(axes) if blocks.column.shape[axis] > 1)])
    known = None if result is None else from_caller(*result, operands.groups)
    one_head = functools.partial(blockwise_head, plan.tiling, blocks.single and plan.fuses_rows)
    operands_of_heads = varying_alike((head, blocks, known))
    output, lse = map_heads(one_head, operands_of_heads, axes, looped_axes or 0, plan.vmap_batch)
    return to_caller(output, lse, operands.query.dtype)


def _block_mask(rule: ScoreRule, tiling: Tiling, axes: int) -> BlockMask:
    """Makes the block mask, once for all heads that share it, and without any tracing where it is static."""
    if not jax.tree.leaves((rule.mask, rule.offsets)):
        blocks = schedule.block_mask_of_one(tiling, rule.mask, rule.offsets.numbers)
        return jax.tree.map(lambda x: x[(None,) * (axes - 1)], blocks)
    return map_heads(lambda x: dynamic_block_mask(tiling, x[0], x[1].values), (rule.mask, rule.offsets), axes)


def blockwise_head(
    tiling: Tiling,
    fuse_rows: bool,
    operands: tuple[Head, BlockMask, tuple[Float[Array, "T Hv"], Float[Array, " T"]] | None],
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Output and log-sum-exp of one head.

    Args:
      tiling: How the scores are cut.
      fuse_rows: Whether to compute all rows of tiles at once, if there is no gradient; needs `blocks.single`.
      operands: The head; which tiles are visited; output and log-sum-exp over these and other keys, if they are known.
        Then they are returned, and nothing is computed but gradients: those of what these keys contribute.
    """
    head, blocks, result = operands
    head, (queries, features) = _pad(head, tiling), (tiling.lengths[0], head.value.shape[1])
    if result is None:
        output, lse = _attend(tiling, fuse_rows, head, blocks)
    else:
        rows = tiling.shape[0]
        known = pad(result[0], (rows, features)), pad(result[1][:, None], (rows, 1))[:, 0]
        output, lse = _known(tiling, known, head, blocks)
    return output[:queries], lse[:queries]


def _pad(head: Head, tiling: Tiling) -> Head:
    """Lengthens the arrays of a head to whole tiles."""
    (rows, columns), flags = tiling.shape, head.nonfinite
    if flags is not None:
        widths = (rows - tiling.lengths[0], columns - tiling.lengths[1])
        flags = NonfiniteFlags(*(jnp.pad(x, (0, width)) for x, width in zip(flags, widths, strict=True)))
    bias = None if head.inputs.bias is None else pad(head.inputs.bias, tiling.shape)
    return dataclasses.replace(
        head,
        query=pad(head.query, (rows, head.query.shape[1])),
        key=pad(head.key, (columns, head.key.shape[1])),
        value=pad(head.value, (columns, head.value.shape[1])),
        inputs=head.inputs._replace(bias=bias),
        nonfinite=flags,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(tiling: Tiling, fuse_rows: bool, head: Head, blocks: BlockMask) -> tuple[Array, Array]:
    if fuse_rows:
        return _output_of_single_tiles(tiling, True, head, blocks)
    # jax traces the forward rule under an explicit abstract mesh. Setting it here too makes the cache key of `_output`
    # the same, so that it is traced only once.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return _output(tiling, head, blocks)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _output(tiling: Tiling, head: Head, blocks: BlockMask) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    if blocks.single:
        return _output_of_single_tiles(tiling, False, head, blocks)
    rule, flags = head.rule, head.nonfinite

    def row(own: tuple) -> tuple[Array, Array]:
        i, blocks, q, q_flags = own

        def visit_tile(visit: TileVisit, mask: Mask | None, state: online_softmax.State) -> online_softmax.State:
            keys, values = visit.keys(head.key), visit.keys(head.value)
            own_flags = None if flags is None else NonfiniteFlags(visit.rows(q_flags), visit.keys(flags.key))
            s, row_poison = rule.tile_scores(visit.rows(q), keys, head.inputs, visit.tile, mask, own_flags)
            before = online_softmax.State(*map(visit.rows, state))
            after = online_softmax.update(before, s, lambda p: rule.weigh(p, values, visit.tile), row_poison)
            return online_softmax.State(*map(visit.put_rows, state, after))

        nothing = online_softmax.start(tiling.height, head.value.shape[1], head.inputs.sink, rule.dtype)
        return online_softmax.finish(over_keys(blocks, tiling, rule, i, visit_tile, varying_as(q, nothing)))

    output, lse = lax.map(row, by_row(tiling, blocks, head.query, None if flags is None else flags.query))
    return output.reshape(tiling.shape[0], head.value.shape[1]), lse.reshape(-1)


def _output_of_single_tiles(
    tiling: Tiling, fuse_rows: bool, head: Head, blocks: BlockMask
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    attend = dense.fused_rows if fuse_rows else dense.plain_rows
    mask = padded_mask(head.rule.mask, tiling) if blocks.partial_bands else None
    flags = head.nonfinite

    def row(own: tuple) -> tuple[Array, Array]:
        i, blocks, q, q_flags = own
        tile = tiling.tile(
            i * tiling.height, element(blocks.column, 0, 0), (tiling.height, tiling.width), head.rule.offsets.values
        )
        part = dataclasses.replace(
            head,
            query=q,
            key=tile.cut_columns(head.key, 0),
            value=tile.cut_columns(head.value, 0),
            inputs=head.inputs.cut(tile),
            nonfinite=None if flags is None else NonfiniteFlags(q_flags, tile.cut_columns(flags.key, 0)),
        )
        return attend(part, tile, mask)

    rows = by_row(tiling, blocks, head.query, None if flags is None else flags.query)
    output, lse = jax.vmap(row)(rows) if fuse_rows else lax.map(row, rows)
    return output.reshape(tiling.shape[0], head.value.shape[1]), lse.reshape(-1)


def _forward(tiling: Tiling, fuse_rows: bool, head: Head, blocks: BlockMask) -> tuple[tuple[Array, Array], tuple]:
    result = _output(tiling, head, blocks)
    return result, (head, blocks, result)


def _backward(tiling: Tiling, fuse_rows: bool, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    head, blocks, result = saved
    rule, key, value = head.rule, head.key, head.value
    query, d_output, lse, delta = nonfinite.backward_rows(
        head.query, result, cotangents, keys_are_finite=head.nonfinite is not None
    )
    zeros = functools.partial(jnp.zeros, dtype=rule.dtype)
    may_be_nan = head.inputs.bias is not None or rule.score_mod is not None

    def row(sums: tuple, own: tuple) -> tuple[tuple, Array]:
        i, blocks, q, d_output, lse_i, delta = own
        q_transposed, d_output_transposed = q.T, d_output.T

        def visit_tile(visit: TileVisit, mask: Mask | None, state: tuple) -> tuple:
            d_query, d_key, d_value, d_inputs = state
            tile, queries, keys = visit.tile, visit.rows(q), visit.keys(key)
            s, pull = rule.tile_vjp(rule.products(queries, keys), head.inputs.cut(tile), tile, mask)
            weights = nonfinite.backward_weights(s, visit.rows(lse_i), may_be_nan)
            kept = rule.dropout_multiplier(tile, s.dtype)
            d_weights = _times(rule.dot(visit.rows(d_output), visit.keys(value), transpose_b=True), kept)
            d_products, d_part = pull(weights * (d_weights - visit.rows(delta)))
            d_query = visit.put_rows(d_query, visit.rows(d_query) + rule.dot(d_products, _for_gradients(keys)))
            d_key = visit.add_keys(d_key, rule.dot(_for_gradients(visit.rows(q_transposed, 1)), d_products))
            d_value = visit.add_keys(d_value, rule.dot(visit.rows(d_output_transposed, 1), _times(weights, kept)))
            return d_query, d_key, d_value, d_inputs.add(tile, d_part)

        start = (varying_as(query, zeros(q.shape)), *sums)
        d_query, *new_sums = over_keys(blocks, tiling, rule, i, visit_tile, start)
        return tuple(new_sums), (d_query * rule.scale).astype(q.dtype)

    # A CPU multiplies matrices up to three times faster if the result is wide, [F, s], not tall.
    sums = varying_as(query, (zeros(key.T.shape), zeros(value.T.shape), head.inputs.zeros()))
    rows = by_row(tiling, blocks, query, d_output, lse[:, None], delta[:, None])
    (d_key, d_value, d_inputs), d_query = lax.scan(row, sums, rows)
    if head.inputs.sink is not None:
        d_inputs = d_inputs._replace(sink=-jnp.sum(jnp.exp(head.inputs.sink - lse) * delta))
    d_head = Head(
        query=d_query.reshape(query.shape),
        key=(d_key.T * rule.scale).astype(key.dtype),
        value=d_value.T.astype(value.dtype),
        inputs=jax.tree.map(lambda d, x: d.astype(x.dtype), d_inputs, head.inputs),
        rule=None,  # type: ignore[arg-type]  # nothing in it has a gradient
        nonfinite=None,
    )
    return jax.tree.map(_once.bind, d_head), None


_attend.defvjp(_forward, _backward)


def _refuse_second_order(*_: Any) -> Any:
    raise TypeError(
        'implementation must be "xla" for gradients of gradients, but got "blockwise", or None, which chose it; pass '
        'implementation="xla".'
    )


# The identity. Its transpose is an error that says more than that of the loops before it.
_once = Primitive("once_differentiated")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
ad.deflinear2(_once, _refuse_second_order)
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda _, x: [x])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _known(tiling: Tiling, result: tuple[Array, Array], head: Head, blocks: BlockMask) -> tuple[Array, Array]:
    """As `_attend`, where output and log-sum-exp are known: only its backward pass computes anything."""
    return result


def _known_forward(
    tiling: Tiling, result: tuple[Array, Array], head: Head, blocks: BlockMask
) -> tuple[tuple[Array, Array], tuple]:
    return result, (head, blocks, result)


def _known_backward(tiling: Tiling, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    return (None, *_backward(tiling, False, saved, cotangents))


_known.defvjp(_known_forward, _known_backward)


def _for_gradients(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Widens an operand of products with gradients of scores, which may be too large for float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _times(weights: Float[Array, "t s"], kept: Float[Array, "t s"] | None) -> Float[Array, "t s"]:
    return weights if kept is None else weights * kept


class TileVisit(NamedTuple):
    """One tile to compute, which begins `first` rows below the top of its row of tiles."""

    first: int
    tile: Tile

    def rows(self, x: Array, axis: int = 0) -> Array:
        """Cuts the tile's part out of an array of its row of tiles."""
        height = self.tile.shape[0]
        return x if x.shape[axis] == height else lax.slice_in_dim(x, self.first, self.first + height, axis=axis)

    def put_rows(self, x: Array, part: Array) -> Array:
        """Replaces the tile's part of an array of its row of tiles."""
        return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, self.first, 0)

    def keys(self, x: Float[Array, "S ..."]) -> Float[Array, "s ..."]:
        """Cuts the tile's part out of keys or values."""
        return self.tile.cut_columns(x, 0)

    def add_keys(self, x: Float[Array, "F S"], part: Float[Array, "F s"]) -> Float[Array, "F S"]:
        """Sums of keys or values, transposed, with the tile's part added."""
        return Tile(0, self.tile.column, (part.shape[0], part.shape[1])).add(x, part)


def over_keys(
    blocks: BlockMask,
    tiling: Tiling,
    rule: ScoreRule,
    i: Int[Array, ""],
    step: Callable[[TileVisit, Mask | None, T], T],
    state: T,
) -> T:
    """Folds `step` over the tiles of row i that are visited; `blocks` is the row's own."""
    mask = padded_mask(rule.mask, tiling) if blocks.partial_bands else None

    def visit(band: TileBand, mask: Mask | None, n: Scalar, state: T) -> T:
        columns = tuple(element(blocks.column, n, run) for run in range(band.runs))
        shape = (band.end - band.first, band.runs * tiling.width)
        tile = tiling.tile(i * tiling.height + band.first, columns, shape, rule.offsets.values)
        return step(TileVisit(band.first, tile), mask, state)

    for bands, mask_of_tile, first, end in (
        (blocks.full_bands, None, 0, blocks.num_full),
        (blocks.partial_bands, mask, blocks.num_full, blocks.num_tiles),
    ):
        visits = [functools.partial(visit, band, mask_of_tile) for band in bands]
        if not visits:
            continue
        one = visits[0] if len(visits) == 1 else functools.partial(_visit_band, blocks.band, visits)
        state = one(0, state) if blocks.single else lax.fori_loop(first, end, one, state)
    return state


def _visit_band(band: Any, visits: Sequence[Callable[[Scalar, T], T]], n: Scalar, state: T) -> T:
    """Visits tile n by the function for its band."""
    return lax.switch(element(band, n), visits, n, state)


def element(x: Any, *place: Scalar) -> Int[Array, ""]:
    """One entry of an array, in place."""
    first = [jnp.asarray(i, jnp.int32) for i in place]
    return lax.dynamic_slice(x, first, (1,) * x.ndim, allow_negative_indices=False).reshape(())


def by_row(tiling: Tiling, blocks: BlockMask, *arrays: Array | None) -> tuple:
    """Cuts by rows of tiles: their numbers, block masks, and parts of the arrays [T, ...]."""
    shape = (tiling.rows, tiling.height)
    parts = (None if x is None else x.reshape(*shape, *x.shape[1:]) for x in arrays)
    return jnp.arange(tiling.rows, dtype=jnp.int32), blocks, *parts
