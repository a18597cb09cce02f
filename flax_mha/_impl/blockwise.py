"""Attention of one head, tile by tile: memory O(T + S), forward and backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao, FlashAttention-2,
arXiv:2307.08691, algorithm 2, with the rows outside: the scores of a tile are computed again from what was saved,
which is query, key, value, output and log-sum-exp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from flax_mha._call import accumulation_dtype
from flax_mha._impl import dense, online_softmax
from flax_mha._impl.block_mask import BlockMask
from flax_mha._impl.nonfinite import Magnitudes
from flax_mha._impl.scores import ScoreParams, Scores
from flax_mha._impl.tiling import Tiling, padded_mask
from flax_mha._impl.visit import Visit, by_row, element, over_keys
from flax_mha._platform import varying_as
from flax_mha._tiles import pad
from flax_mha.masks import Mask


def blockwise_head(
    tiling: Tiling,
    fuse_rows: bool,
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
    blocks: BlockMask,
    result: tuple[Float[Array, "T Hv"], Float[Array, " T"]] | None = None,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Output and log-sum-exp of one head.

    Args:
      tiling: How the scores are cut.
      fuse_rows: Whether to compute all rows of tiles at once, if there is no gradient; needs `blocks.single`.
      query: Scaled; finite if anything may be masked.
      key: Likewise.
      value: Likewise.
      params: The other differentiable inputs: bias, sink and the arrays that `score_mod` captures.
      scores: How products of queries and keys become scores.
      magnitudes: Of queries and keys; None if nothing can be masked.
      blocks: Which tiles are visited.
      result: Output and log-sum-exp over these and other keys, if they are known. Then they are returned, and nothing
        is computed but gradients: those of what these keys contribute.
    """
    rows, columns = tiling.shape
    query = pad(query, (rows, query.shape[1]))
    key, value = pad(key, (columns, key.shape[1])), pad(value, (columns, value.shape[1]))
    params = params._replace(bias=None if params.bias is None else pad(params.bias, tiling.shape))
    if magnitudes is not None:
        widths = (rows - tiling.lengths[0], columns - tiling.lengths[1])
        magnitudes = Magnitudes(*(jnp.pad(x, (0, width)) for x, width in zip(magnitudes, widths, strict=True)))
    operands = (query, key, value, params, scores, magnitudes, blocks)
    if result is None:
        output, lse = _head(tiling, fuse_rows, *operands)
    else:
        output, lse = _known(
            tiling, pad(result[0], (rows, value.shape[1])), pad(result[1][:, None], (rows, 1))[:, 0], *operands
        )
    return output[: tiling.lengths[0]], lse[: tiling.lengths[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head(tiling: Tiling, fuse_rows: bool, *operands: Any) -> tuple[Array, Array]:
    if fuse_rows:
        return _output_of_single_tiles(tiling, True, *operands)
    # jax traces the forward rule under an explicit abstract mesh. Setting it here too makes the cache key of `_output`
    # the same, so that it is traced only once.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return _output(tiling, *operands)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _output(
    tiling: Tiling,
    query: Array,
    key: Array,
    value: Array,
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
    blocks: BlockMask,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    if blocks.single:
        return _output_of_single_tiles(tiling, False, query, key, value, params, scores, magnitudes, blocks)

    def row(own: tuple) -> tuple[Array, Array]:
        i, blocks, q, q_magnitude = own

        def visit_tile(visit: Visit, mask: Mask | None, state: online_softmax.State) -> online_softmax.State:
            tile, products = visit.tile, scores.products(visit.rows(q), visit.keys(key))
            kept = scores.dropout_multiplier(tile, products.dtype)
            of_tile = None if magnitudes is None else Magnitudes(visit.rows(q_magnitude), visit.keys(magnitudes.key))
            marks = row_marks = None
            if of_tile is not None:
                # Without marks of scores, XLA's CPU can fuse the product with the row maximum.
                masks = scores.masks_tile(params, mask)
                marks, row_marks = of_tile.marks_of_keys() if masks else None, of_tile.marks_of_rows(not masks)
            s = scores.tile(products, params.cut(tile), tile, mask, marks)
            before = online_softmax.State(*map(visit.rows, state))
            after = online_softmax.update(
                before, s, lambda p: scores.dot(_times(p, kept), visit.keys(value)), row_marks
            )
            return online_softmax.State(*map(visit.put_rows, state, after))

        nothing = online_softmax.start(tiling.height, value.shape[1], params.sink, accumulation_dtype(value.dtype))
        return online_softmax.finish(over_keys(blocks, tiling, scores, i, visit_tile, varying_as(q, nothing)))

    of_queries = None if magnitudes is None else magnitudes.query
    output, lse = lax.map(row, by_row(tiling, blocks, query, of_queries))
    return output.reshape(tiling.shape[0], value.shape[1]), lse.reshape(-1)


def _output_of_single_tiles(
    tiling: Tiling,
    fuse_rows: bool,
    query: Array,
    key: Array,
    value: Array,
    params: ScoreParams,
    scores: Scores,
    magnitudes: Magnitudes | None,
    blocks: BlockMask,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    mask = padded_mask(scores.mask, tiling) if blocks.partial_parts else None

    attend = dense.fused_rows if fuse_rows else dense.plain_rows

    def row(own: tuple) -> tuple[Array, Array]:
        i, blocks, q, q_magnitude = own
        column = element(blocks.column, 0, 0)
        tile = tiling.tile(i * tiling.height, column, (tiling.height, tiling.width), scores.offsets)
        of_tile = None if magnitudes is None else Magnitudes(q_magnitude, tile.cut_columns(magnitudes.key, 0))
        keys, values = tile.cut_columns(key, 0), tile.cut_columns(value, 0)
        return attend(q, keys, values, params.cut(tile), scores, of_tile, tile, mask)

    of_queries = None if magnitudes is None else magnitudes.query
    rows = by_row(tiling, blocks, query, of_queries)
    output, lse = jax.vmap(row)(rows) if fuse_rows else lax.map(row, rows)
    return output.reshape(tiling.shape[0], value.shape[1]), lse.reshape(-1)


def _forward(tiling: Tiling, fuse_rows: bool, *operands: Any) -> tuple[tuple[Array, Array], tuple]:
    output, lse = _output(tiling, *operands)
    return (output, lse), (*operands, output, lse)


def _backward(tiling: Tiling, fuse_rows: bool, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    query, key, value, params, scores, magnitudes, blocks, output, lse = saved
    row_data = _row_data(query, output, lse, cotangents, magnitudes is not None)
    zeros = functools.partial(jnp.zeros, dtype=accumulation_dtype(query.dtype))

    def row(sums: tuple, own: tuple) -> tuple[tuple, Array]:
        i, blocks, q, d_output, lse_i, delta = own
        q_transposed, d_output_transposed = q.T, d_output.T

        def visit_tile(visit: Visit, mask: Mask | None, state: tuple) -> tuple:
            d_query, d_key, d_value, d_params = state
            tile, keys = visit.tile, visit.keys(key)
            products = scores.products(visit.rows(q), keys)
            kept = scores.dropout_multiplier(tile, products.dtype)
            s, pull = scores.tile_vjp(products, params.cut(tile), tile, mask)
            weights = _weights(s, visit.rows(lse_i), scores, params)
            d_weights = _times(scores.dot(visit.rows(d_output), visit.keys(value), transpose_b=True), kept)
            d_products, d_part = pull(weights * (d_weights - visit.rows(delta)))
            d_query = visit.put_rows(d_query, visit.rows(d_query) + scores.dot(d_products, _for_gradients(keys)))
            d_key = visit.add_keys(d_key, scores.dot(_for_gradients(visit.rows(q_transposed, 1)), d_products))
            d_value = visit.add_keys(d_value, scores.dot(visit.rows(d_output_transposed, 1), _times(weights, kept)))
            return d_query, d_key, d_value, d_params.add(tile, d_part)

        start = (varying_as(query, zeros(q.shape)), *sums)
        d_query, *new_sums = over_keys(blocks, tiling, scores, i, visit_tile, start)
        return tuple(new_sums), (d_query * scores.scale).astype(q.dtype)

    # A CPU multiplies matrices up to three times faster if the result is wide, [F, s], not tall.
    sums = varying_as(query, (zeros(key.T.shape), zeros(value.T.shape), params.zeros()))
    (d_key, d_value, d_params), d_query = lax.scan(row, sums, by_row(tiling, blocks, *row_data))
    if params.sink is not None:
        _, _, lse_rows, delta_rows = row_data
        d_params = d_params._replace(sink=-jnp.sum(jnp.exp(params.sink - lse_rows) * delta_rows))
    d_params = jax.tree.map(lambda d, x: d.astype(x.dtype), d_params, params)
    d_key, d_value = (d_key.T * scores.scale).astype(key.dtype), d_value.T.astype(value.dtype)
    gradients = jax.tree.map(_once.bind, (d_query.reshape(query.shape), d_key, d_value, d_params))
    return *gradients, None, None, None


_head.defvjp(_forward, _backward)


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
def _known(tiling: Tiling, output: Array, lse: Array, *operands: Any) -> tuple[Array, Array]:
    """As `_head`, where output and log-sum-exp are known: only its backward pass computes anything."""
    return output, lse


def _known_forward(tiling: Tiling, output: Array, lse: Array, *operands: Any) -> tuple[tuple[Array, Array], tuple]:
    return (output, lse), (*operands, output, lse)


def _known_backward(tiling: Tiling, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    return (None, None, *_backward(tiling, False, saved, cotangents))


_known.defvjp(_known_forward, _known_backward)


def _row_data(
    query: Array, output: Array, lse: Array, cotangents: tuple[Array, Array], keys_are_finite: bool
) -> tuple[Float[Array, "T H"], Float[Array, "T Hv"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """What the backward pass needs of every row; FlashAttention-2, algorithm 2, line 4.

    The log-sum-exp's own cotangent d enters through `weights * d`, so it is subtracted from delta. Rows whose
    log-sum-exp is not finite, for they saw nothing or something that is not finite, have no gradient. Their products
    may be infinite, though all of queries and keys is finite; so their queries count as 0.
    """
    d_output, d_lse = cotangents
    finite = jnp.isfinite(lse)
    d_output = jnp.where(finite[:, None], d_output, jnp.zeros_like(d_output))
    delta = jnp.sum(d_output * jnp.where(finite[:, None], output, jnp.zeros_like(output)), axis=1)
    delta = jnp.where(finite, delta - d_lse, jnp.zeros_like(delta))
    query = jnp.where(finite[:, None], query, jnp.zeros_like(query)) if keys_are_finite else query
    # exp(score - inf) = 0, also where the score is -inf
    lse = jnp.where(finite, lse, jnp.full_like(lse, jnp.inf))
    return query, d_output.astype(query.dtype), lse[:, None], delta[:, None]


def _for_gradients(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """What the gradients of scores are multiplied with: these may be too large for float16, which has no wide range."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _weights(
    s: Float[Array, "t s"], lse: Float[Array, "t 1"], scores: Scores, params: ScoreParams
) -> Float[Array, "t s"]:
    """The softmax, from scores and the log-sum-exp of their rows; 0 in rows where that is infinite."""
    weights = jnp.exp(s - lse)
    if params.bias is None and scores.score_mod is None:
        return weights
    return jnp.where(lse == jnp.inf, jnp.zeros_like(weights), weights)  # a bias or score_mod may be NaN itself


def _times(weights: Float[Array, "t s"], kept: Float[Array, "t s"] | None) -> Float[Array, "t s"]:
    return weights if kept is None else weights * kept
