"""`implementation="blockwise"`: FlashAttention, attention tile by tile in memory
O(T + S), forward and backward.

i counts rows of tiles (tiles with the same queries), and j the tiles in a row.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1, with the outer loop
over rows of tiles, as in Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1. For each
tile, with m_i', l_i' and O_i' from the tiles before it::

    S_ij  = scale Q_i K_j^T, masked
    m_i   = max(m_i', rowmax(S_ij))
    P_ij  = exp(S_ij - m_i)
    l_i   = exp(m_i' - m_i) l_i' + rowsum(P_ij)
    O_i   = exp(m_i' - m_i) O_i' + P_ij V_j

After the last tile, O_i is divided by l_i, and LSE_i = m_i + log(l_i); `LogSumExp`
keeps the two terms apart.

Backward: FlashAttention-2, algorithm 2, also with the outer loop over rows. It computes
the scores of each tile again, and needs only Q, K, V, O, m and log(l)::

    D_i   = rowsum(dO_i * O_i)
    P_ij  = exp((S_ij - m_i) - log(l_i))
    dV_j += P_ij^T dO_i
    dP_ij = dO_i V_j^T
    dS_ij = P_ij * (dP_ij - D_i)
    dQ_i += scale dS_ij K_j
    dK_j += scale dS_ij^T Q_i

The forward pass is `_output`. The backward pass is `_backward`, the transpose of the
sum over tiles in `_tangent`, from which JAX derives all further derivatives.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src import guard
from flax_mha._src import plan as plans
from flax_mha._src.call.call import (
    Call,
    LogSumExp,
    NonFinite,
    Result,
    accumulation_dtype,
)
from flax_mha._src.core.products import jit_products
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike, varying_as
from flax_mha._src.engines.engine import Engine
from flax_mha._src.math.head import (
    Head,
    ResultsOfHead,
    from_caller,
    heads_of,
    map_heads,
    numbers_as_arrays,
    to_caller,
)
from flax_mha._src.math.scores import ScoreInputs, ScoreRule, times
from flax_mha._src.math.softmax import (
    OnlineSoftmax,
    attention_operation,
    name_residuals,
    rows_of,
)
from flax_mha._src.math.tile_sum import Argument, TileSummand, tile_sum
from flax_mha._src.math.tiling import (
    BlockMask,
    TileVisit,
    Tiling,
    block_mask_of_one,
    by_row,
    dynamic_block_mask,
    element,
    over_keys,
    padded_mask,
)
from flax_mha._src.plan import Plan


@dataclasses.dataclass(frozen=True)
class Blockwise(Engine):
    """The engine that computes attention tile by tile; it runs on every platform."""

    name = "blockwise"

    def supports_hop(self, call: Call) -> list[str]:
        return self.supports(call)

    def plan(self, call: Call) -> tuple[Plan, Call]:
        return plans.plan_tiles(numbers_as_arrays(call))

    def forward(self, plan: Plan, call: Call) -> Result:
        return _all_heads(plan, call, None)

    def share(self, plan: Plan, call: Call, result: Result) -> Result:
        return _all_heads(plan, call, result)


def _all_heads(plan: Plan, call: Call, result: Result | None) -> Result:
    """Computes attention in all heads or, given `result`, implements `Engine.share`.

    `result` is the output and log-sum-exp over all keys of a ring. It is returned
    unchanged, but with a new derivative.
    """
    tiling: Any = plan.tiling
    head = heads_of(call, plan.dtype)
    axes = call.query.ndim - 1  # B..., K and G
    tiles = call.tiles
    if tiles is None:
        tiles = _block_mask(head.rule, tiling, axes)

    looped_axes = plan.looped_axes
    if looped_axes is not None and not tiles.single:
        # Heads with different numbers of tiles must not be vmapped: each would run the
        # longest loop.
        for axis in range(axes):
            if tiles.column.shape[axis] > 1:
                looped_axes = max(looped_axes, axis + 1)

    known = None
    if result is not None:
        known = from_caller(result, call.groups)
    results = map_heads(
        functools.partial(_one_head, tiling, plan.fuses_rows),
        varying_alike((head, tiles, known)),
        axes,
        looped_axes=looped_axes,
        max_heads=plan.max_heads,
        has_loops=True,
    )
    return to_caller(results, call.query.dtype)


def _block_mask(rule: ScoreRule, tiling: Tiling, axes: int) -> BlockMask:
    """Lists the tiles that each head visits: while tracing if mask and offsets hold no
    arrays, otherwise at run time.

    The arrays have `axes` leading axes, [B..., K, G]. If all heads along an axis share
    a list, its length is 1.
    """
    if jax.tree.leaves((rule.mask, rule.offsets)):

        def one_head(own: tuple) -> BlockMask:
            mask, offsets = own
            return dynamic_block_mask(tiling, mask, offsets.values)

        return map_heads(one_head, (rule.mask, rule.offsets), axes)
    tiles = block_mask_of_one(tiling, rule.mask, rule.offsets.numbers)
    new_axes = (None,) * (axes - 1)
    return jax.tree.map(lambda x: x[new_axes], tiles)


def _one_head(
    tiling: Tiling,
    fuse_rows: bool,
    operands: tuple[Head, BlockMask, tuple[Float[Array, "T Hv"], LogSumExp] | None],
) -> ResultsOfHead:
    """Computes output and log-sum-exp of a head; also each row's largest score, None
    unless `rule.return_max_score` is True.

    Args:
      tiling: How the scores are cut into tiles.
      fuse_rows: Whether to compute all rows of tiles together, if each has a single
        tile. Under differentiation, rows are computed one after another in any case.
      operands: The head, the tiles to visit, and None or, for `Engine.share`, the
        output and log-sum-exp to return.
    """
    head, tiles, known = operands
    queries, _ = tiling.lengths
    head = _pad(head, tiling)
    known = jax.tree.map(lambda x: _pad_to(x, head.query.shape[0]), known)
    results = _attention(tiling, fuse_rows, head, tiles, known)
    return jax.tree.map(lambda x: x[:queries], results)


def _pad(head: Head, tiling: Tiling) -> Head:
    """Pads queries, keys, values, flags and bias of a head with zeros to
    `tiling.shape`, the lengths of whole tiles.
    """
    queries, keys = tiling.shape
    nonfinite = head.nonfinite
    if nonfinite is not None:
        nonfinite = NonFinite(
            query=_pad_to(nonfinite.query, queries), key=_pad_to(nonfinite.key, keys)
        )
    bias = head.inputs.bias
    if bias is not None:
        lengths = [queries, keys]
        for axis in (0, 1):
            if bias.shape[axis] == 1:  # it is broadcast
                lengths[axis] = 1
        bias = _pad_to(bias, *lengths)
    return dataclasses.replace(
        head,
        query=_pad_to(head.query, queries),
        key=_pad_to(head.key, keys),
        value=_pad_to(head.value, keys),
        inputs=head.inputs._replace(bias=bias),
        nonfinite=nonfinite,
    )


def _pad_to(x: Array, *lengths: int) -> Array:
    """Pads the ends of the first axes of `x` with zeros; `lengths` are the new lengths
    of these axes.
    """
    widths = [(0, 0)] * x.ndim
    for axis, length in enumerate(lengths):
        widths[axis] = (0, length - x.shape[axis])
    if any(after for _, after in widths):
        return jnp.pad(x, widths)
    return x


def _attention(
    tiling: Tiling,
    fuse_rows: bool,
    head: Head,
    tiles: BlockMask,
    known: tuple[Array, LogSumExp] | None,
) -> ResultsOfHead:
    """Computes a padded head as one JAX operation with derivatives of every order.

    `known` is None or, for `Engine.share`, an output and a log-sum-exp: then these are
    returned, not computed.
    """

    def compute(
        head: Head, tiles: BlockMask, known: tuple[Array, LogSumExp] | None
    ) -> tuple:
        if known is not None:
            return known
        return _output(tiling, fuse_rows, head, tiles)

    def with_tangents(arguments: tuple, tangents: tuple) -> tuple[Any, Array, Array]:
        head, tiles, known = arguments
        d_head, _, _ = tangents
        largest = None
        if known is None:
            output, lse, largest = _attention(
                tiling, fuse_rows=False, head=head, tiles=tiles, known=None
            )
            known = name_residuals(output, lse)
        d_output, d_log_sum = _tangent(tiling, head, tiles, known, d_head)
        return (known, largest), d_output, d_log_sum

    return attention_operation(
        (head.query.shape[0], head.value.shape[1]),
        head.rule,
        compute,
        with_tangents,
        head,
        tiles,
        known,
    )


@functools.partial(jit_products, static_argnums=(0, 1), inline=True)
def _output(
    tiling: Tiling, fuse_rows: bool, head: Head, tiles: BlockMask
) -> ResultsOfHead:
    """Computes FlashAttention's forward pass: a loop over rows i of tiles, and in each
    row an online softmax over the tiles j that it visits.

    `fuse_rows` is for rows of single tiles, see `_output_of_single_tiles`.
    """
    if tiles.single:
        return _output_of_single_tiles(tiling, fuse_rows, head, tiles)

    def row(part: tuple) -> ResultsOfHead:
        i, tiles, Q_i, flags_i = part
        if flags_i is not None:
            Q_i = guard.zero(Q_i, flags_i)

        def visit_tile(
            visit: TileVisit, rule: ScoreRule, state: OnlineSoftmax
        ) -> OnlineSoftmax:
            tile = visit.tile
            # A visit of a partial tile computes only the bands that it needs.
            query, flags = jax.tree.map(visit.rows, (Q_i, flags_i))
            own = _cut(head, rule, tile, query, flags)
            products = rule.products(own.query, own.key)
            poison = None
            row_poison = None
            if own.nonfinite is not None:
                # If possible, flags change the row maximum, not the scores: XLA's CPU
                # can then fuse it with the product.
                masks = rule.masks_scores(own.inputs.bias)
                if masks:
                    poison = own.nonfinite.key[None]
                row_poison = guard.poison_of_rows(own.nonfinite, unmasked=not masks)
            S_ij = rule.tile(products, own.inputs, tile, poison)

            rows = jax.tree.map(visit.rows, state)
            rows, P_ij = rows.rescale(S_ij, row_poison)
            weighted = rule.weigh(P_ij, own.value, tile)
            rows = rows._replace(output=rows.output + weighted)
            return jax.tree.map(visit.put_rows, state, rows)

        # m_i = -inf, l_i = 0, O_i = 0; a sink is a score before the first tile.
        start = OnlineSoftmax.start(
            rows=tiling.height,
            features=head.value.shape[1],
            sink=head.inputs.sink,
            fields=head.rule,
        )
        start = varying_as(Q_i, start)
        state = over_keys(tiles, tiling, head.rule, i, visit_tile, start)
        return state.finish()

    return _join_rows(lax.map(row, _rows(tiling, head, tiles)))


def _rows(tiling: Tiling, head: Head, tiles: BlockMask) -> tuple:
    """Returns the inputs of a loop over rows of tiles: for each row its number, block
    mask, queries, and the flags of these, or None.
    """
    flags = None
    if head.nonfinite is not None:
        flags = head.nonfinite.query
    return by_row(tiling, tiles, head.query, flags)


def _join_rows(results: Any) -> ResultsOfHead:
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), results)


def _cut(
    head: Head, rule: ScoreRule, tile: Tile, query: Array, query_flags: Array | None
) -> Head:
    """Returns a tile's part of a head, with the tile's `query`, the flags of it, and
    its `rule`.
    """
    nonfinite = head.nonfinite
    if nonfinite is not None and query_flags is not None:
        nonfinite = NonFinite(query_flags, tile.cut_columns(nonfinite.key, 0))
    return Head(
        query=query,
        key=tile.cut_columns(head.key, 0),
        value=tile.cut_columns(head.value, 0),
        inputs=head.inputs.cut(tile),
        rule=rule,
        nonfinite=nonfinite,
    )


def _output_of_single_tiles(
    tiling: Tiling, fuse_rows: bool, head: Head, tiles: BlockMask
) -> ResultsOfHead:
    """Computes a head whose rows of tiles have one tile each, which needs no online
    softmax: row after row or, with `fuse_rows`, all rows together.
    """
    # If no tile is partial, nothing is masked.
    mask = None
    if tiles.partial_bands:
        mask = padded_mask(head.rule.mask, tiling)
    rule = head.rule.replace(mask=mask)

    def row(part: tuple) -> ResultsOfHead:
        i, tiles, Q_i, flags_i = part
        tile = Tile(
            row=i * tiling.height,
            column=element(tiles.column, 0),
            shape=(tiling.height, tiling.width),
            offsets=rule.offsets.values,
            lengths=tiling.inside,
        )
        return rows_of(_cut(head, rule, tile, Q_i, flags_i), tile, fuse_rows)

    rows = _rows(tiling, head, tiles)
    if fuse_rows:
        return _join_rows(jax.vmap(row)(rows))
    return _join_rows(lax.map(row, rows))


def _tangent(
    tiling: Tiling,
    head: Head,
    tiles: BlockMask,
    result: tuple[Array, LogSumExp],
    d_head: Head,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Computes the tangents of output and log-sum-exp (`result`) from `d_head`, the
    tangents of the head's arrays.

    With weights P, tangents dS and dV, and sums over keys and sink::

        dLSE = rowsum(P * dS)
        dO   = (P * dS) V + P dV - O * dLSE

    The transpose of this linear function is FlashAttention-2's backward pass.
    """
    query, output, lse, is_finite = guard.derivative_rows(
        head.query,
        result,
        keys_are_finite=head.nonfinite is not None,  # `guard` zeroed the others
    )
    structure = jax.tree.structure(_shared(head))
    # Summed over tiles: (P * dS) V + P dV, and rowsum(P * dS).
    weighted, d_lse = tile_sum(
        tiling,
        _tangent_of_tile(head),
        head.rule,
        tiles,
        residuals=[query, *(x[:, None] for x in lse), *_arguments(head)],
        linear=[d_head.query, *_arguments(d_head)],
        backward=functools.partial(_backward, tiling, structure),
    )
    d_lse = d_lse[:, 0]
    sink = head.inputs.sink
    d_sink = d_head.inputs.sink
    if sink is not None and d_sink is not None:
        d_lse = d_lse + lse.weights(sink) * d_sink
    d_output = weighted - output * d_lse[:, None]
    # Rows without derivatives have the `log_sum` infinity (`derivative_rows`), like a
    # flag. So the transpose needs only that, not a mask [T, Hv].
    d_output = guard.zero(d_output, lse.log_sum)
    return d_output, jnp.where(is_finite, d_lse, jnp.zeros_like(d_lse))


def _arguments(head: Head) -> list[Array]:
    """Lists the arrays that `_tangent` passes to its tile sum last: keys, values, and
    the leaves of `_shared`.
    """
    return [head.key, head.value, *jax.tree.leaves(_shared(head))]


def _shared(head: Head) -> ScoreInputs:
    """Returns what tiles need of the inputs: bias, if any, and captured arrays."""
    return head.inputs._replace(sink=None)


def _kinds(inputs: ScoreInputs) -> list[str]:
    """Lists the kinds (see `Argument`) of the leaves of `_shared`."""
    kinds = ["whole"] * len(inputs.captured)
    if inputs.bias is None:
        return kinds
    return ["scores", *kinds]


def _inputs_of_tile(structure: Any, arrays: Sequence[Array]) -> ScoreInputs:
    """Makes a tile's `ScoreInputs` from its parts of the leaves of `_shared`, which has
    this pytree structure.
    """
    inputs = jax.tree.unflatten(structure, arrays)
    if inputs.bias is None:
        return inputs
    # Gradients are summed in float32 at least.
    dtype = accumulation_dtype(inputs.bias.dtype)
    return inputs._replace(bias=inputs.bias.astype(dtype))


def _tangent_of_tile(head: Head) -> TileSummand:
    """Makes the function that `_tangent` sums over tiles; for the symbols below, see
    there.

    The function returns (P * dS) V + P dV [t, Hv], and the sum of P * dS over the
    tile's keys [t, 1].
    """
    shared = _shared(head)
    structure = jax.tree.structure(shared)
    may_be_nan = shared.bias is not None or head.rule.score_mod is not None

    def compute(
        rule: ScoreRule,
        tile: Tile,
        residuals: Sequence[Array],
        linear: Sequence[Array],
        safe: bool,
    ) -> tuple:
        if rule.forward_mode_error:
            raise NotImplementedError(rule.forward_mode_error)
        Q_i, m_i, log_l_i, K_j, V_j, *inputs = residuals
        dQ_i, dK_j, dV_j, *d_inputs = linear

        # S_ij and dS_ij: from Q K^T through cap, `score_mod`, bias and mask.
        scores = rule.differentiable_tile if safe else rule.tile
        d_products = rule.products(dQ_i, K_j) + rule.products(Q_i, dK_j)
        products = rule.products(Q_i, K_j)
        S_ij, dS_ij = jax.jvp(
            lambda products, inputs: scores(products, inputs, tile),
            (products, _inputs_of_tile(structure, inputs)),
            (d_products, _inputs_of_tile(structure, d_inputs)),
        )
        if rule.score_mod is not None:
            # Its derivative may be NaN at a masked score.
            dS_ij = jnp.where(S_ij == -jnp.inf, jnp.zeros_like(dS_ij), dS_ij)

        P_ij = guard.backward_weights(S_ij, LogSumExp(m_i, log_l_i), may_be_nan)
        dropout = rule.dropout_multiplier(tile, S_ij.dtype)
        P_dS = P_ij * dS_ij
        P_dS_V = rule.dot(times(P_dS, dropout), _for_gradients(V_j))
        P_dV = rule.dot(times(P_ij, dropout), dV_j)
        return P_dS_V + P_dV, jnp.sum(P_dS, axis=1, keepdims=True)

    rows = head.query.shape[0]
    kinds = ["queries", "keys", "keys", *_kinds(shared)]
    query, *others = Argument.of(kinds, (head.query, *_arguments(head)))
    dtype = head.rule.dtype
    of_rows = Argument("queries", (rows, 1), dtype)
    return TileSummand(
        compute,
        residuals=(query, of_rows, of_rows, *others),
        linear=(query, *others),
        outputs=(Argument("queries", (rows, head.value.shape[1]), dtype), of_rows),
    )


def _backward(
    tiling: Tiling,
    structure: Any,
    rule: ScoreRule,
    tiles: BlockMask,
    residuals: Sequence[Array],
    cotangents: Sequence[Array],
) -> list[Array]:
    """Computes FlashAttention-2's backward pass: the transpose of the tile sum in
    `_tangent`.

    `residuals` are that sum's residuals: queries, both parts of the log-sum-exp, keys,
    values, and the leaves of `_shared`, which has this `structure`. `cotangents` are
    those of its two outputs. Returns the cotangents of queries, keys, values and these
    leaves.
    """
    query, m, log_l, key, value, *inputs = residuals
    shared = jax.tree.unflatten(structure, inputs)
    # The transpose of `d_output = weighted - output * d_lse` in `_tangent` gives the
    # second cotangent: that of the log-sum-exp, minus D = rowsum(dO * O).
    d_output, minus_D = cotangents
    d_output = d_output.astype(query.dtype)
    may_be_nan = shared.bias is not None or rule.score_mod is not None

    def compute(
        rule: ScoreRule,
        tile: Tile,
        residuals: Sequence[Array],
        linear: Sequence[Array],
        safe: bool,
    ) -> tuple:
        Q_i, Q_i_transposed, m_i, log_l_i, K_j, V_j, *inputs_ij = residuals
        dO_i, dO_i_transposed, minus_D_i = linear

        # S_ij, and `pull` from dS_ij to the cotangents of Q_i K_j^T and of the inputs.
        products = rule.products(Q_i, K_j)
        score_inputs = _inputs_of_tile(structure, inputs_ij)
        if safe:
            S_ij, pull = jax.vjp(
                lambda products, inputs: rule.differentiable_tile(
                    products, inputs, tile
                ),
                products,
                score_inputs,
            )
        else:
            S_ij, pull = rule.tile_vjp(products, score_inputs, tile)

        P_ij = guard.backward_weights(S_ij, LogSumExp(m_i, log_l_i), may_be_nan)
        dropout = rule.dropout_multiplier(tile, S_ij.dtype)
        dP_ij = times(rule.dot(dO_i, V_j, transpose_b=True), dropout)
        dS_ij = P_ij * (dP_ij + minus_D_i)
        d_products, d_inputs = pull(dS_ij)
        dQ_i = rule.dot(d_products, _for_gradients(K_j))
        # A CPU multiplies faster if the result is wide: the transposes [F, s].
        dK_j_transposed = rule.dot(_for_gradients(Q_i_transposed), d_products)
        dV_j_transposed = rule.dot(dO_i_transposed, times(P_ij, dropout))
        gradients_of_inputs = jax.tree.leaves(d_inputs)
        return dQ_i, dK_j_transposed, dV_j_transposed, *gradients_of_inputs

    kinds = _kinds(shared)
    kinds_of_rows = ("queries", "queries transposed", "queries")
    # The query twice: tiles use it as [t, F] and as [F, t].
    sum_residuals = [query, query, m, log_l, key, value, *inputs]
    sum_linear = [d_output, d_output, minus_D]
    residual_kinds = (*kinds_of_rows, "queries", "keys", "keys", *kinds)
    function = TileSummand(
        compute,
        residuals=Argument.of(residual_kinds, sum_residuals),
        linear=Argument.of(kinds_of_rows, sum_linear),
        outputs=(
            Argument("queries", query.shape, query.dtype, factor=rule.scale),
            Argument("keys transposed", key.shape[::-1], key.dtype, factor=rule.scale),
            Argument("keys transposed", value.shape[::-1], value.dtype),
            *Argument.of(kinds, inputs),
        ),
    )
    dQ, dK_transposed, dV_transposed, *d_inputs = tile_sum(
        tiling, function, rule, tiles, residuals=sum_residuals, linear=sum_linear
    )
    return [dQ, dK_transposed.T, dV_transposed.T, *d_inputs]


def _for_gradients(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Converts float16 to float32: products with a float16 array would round the
    gradients of scores to float16.
    """
    if x.dtype == jnp.float16:
        return x.astype(jnp.float32)
    return x
