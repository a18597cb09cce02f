"""`implementation="blockwise"`: attention tile by tile, in memory O(T + S), forward and
backward.

Forward: Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1. Backward: Dao,
FlashAttention-2, arXiv:2307.08691, algorithm 2, with the outer loop over rows of tiles
(tiles with the same queries). It computes the scores of each tile again, and needs only
query, key, value, output and log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src import guard
from flax_mha._src import plan as plans
from flax_mha._src.call.operands import Call, NonFinite, Result, accumulation_dtype
from flax_mha._src.core.products import jit_products, products_are_replaced
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike, varying_as
from flax_mha._src.engines.engine import Engine
from flax_mha._src.math.derivatives import Function
from flax_mha._src.math.head import (
    Head,
    from_caller,
    heads_of,
    map_heads,
    numbers_as_arrays,
    to_caller,
)
from flax_mha._src.math.scores import ScoreInputs, ScoreRule, times
from flax_mha._src.math.softmax import (
    OnlineSoftmax,
    ResultsOfHead,
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
    blocks = call.operands.tiles
    axes = call.operands.query.ndim - 1
    if blocks is None:
        blocks = _block_mask(head.rule, tiling, axes)
    # Heads with different numbers of tiles must not be vmapped: each would run the
    # longest loop.
    looped_axes = plan.looped_axes
    if looped_axes is not None and not blocks.single:
        looped_axes = max(
            [
                looped_axes,
                *(axis + 1 for axis in range(axes) if blocks.column.shape[axis] > 1),
            ]
        )
    if products_are_replaced():
        looped_axes = axes  # see `map_heads`
    known = None if result is None else from_caller(result, call.operands.groups)
    one_head = functools.partial(
        blockwise_head, tiling, blocks.single and plan.fuses_rows
    )
    operands_of_heads = varying_alike((head, blocks, known))
    results = map_heads(
        one_head, operands_of_heads, axes, looped_axes or 0, plan.max_heads
    )
    return to_caller(results, call.operands.query.dtype)


def _block_mask(rule: ScoreRule, tiling: Tiling, axes: int) -> BlockMask:
    """Lists the tiles that each head visits: while tracing if mask and offsets hold no
    arrays, else at run time.

    The arrays have `axes` leading axes, [B..., K, G]. If all heads along an axis share
    a list, its length is 1.
    """
    if not jax.tree.leaves((rule.mask, rule.offsets)):
        blocks = block_mask_of_one(tiling, rule.mask, rule.offsets.numbers)
        return jax.tree.map(lambda x: x[(None,) * (axes - 1)], blocks)
    return map_heads(
        lambda x: dynamic_block_mask(tiling, x[0], x[1].values),
        (rule.mask, rule.offsets),
        axes,
    )


def blockwise_head(
    tiling: Tiling,
    fuse_rows: bool,
    operands: tuple[
        Head, BlockMask, tuple[Float[Array, "T Hv"], Float[Array, " T"]] | None
    ],
) -> ResultsOfHead:
    """Computes output and log-sum-exp of a head; also each row's largest score, None
    unless `rule.returns_max` is True.

    Args:
      tiling: How the scores are cut into tiles.
      fuse_rows: Whether to compute all rows of tiles at once, which requires a single
        tile in each row. Under differentiation, rows are computed one after another in
        any case.
      operands: The head, the tiles to visit, and None or, for `Engine.share`, the
        output and log-sum-exp to return.
    """
    head, blocks, result = operands
    head, (queries, _), (rows, _) = _pad(head, tiling), tiling.lengths, tiling.shape
    known = None if result is None else tuple(_pad_to(x, rows) for x in result)
    results = [x[:queries] for x in _attention(tiling, fuse_rows, head, blocks, known)]
    return results[0], results[1], results[2] if head.rule.returns_max else None


def _pad(head: Head, tiling: Tiling) -> Head:
    """Pads queries, keys, values, flags and bias of a head with zeros to
    `tiling.shape`, the lengths of whole tiles.
    """
    (queries, keys), nonfinite = tiling.shape, head.nonfinite
    if nonfinite is not None:
        nonfinite = NonFinite(
            _pad_to(nonfinite.query, queries), _pad_to(nonfinite.key, keys)
        )
    bias = head.inputs.bias
    if bias is not None:  # axes of length 1 are broadcast
        bias = _pad_to(
            bias,
            *(
                1 if size == 1 else n
                for size, n in zip(bias.shape, tiling.shape, strict=True)
            ),
        )
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
    widths = [
        (0, length - size) for size, length in zip(x.shape, lengths, strict=False)
    ]
    if any(after for _, after in widths):
        return jnp.pad(x, widths + [(0, 0)] * (x.ndim - len(widths)))
    return x


def _attention(
    tiling: Tiling, fuse_rows: bool, head: Head, blocks: BlockMask, known: Any
) -> list[Array]:
    """Computes a padded head as one JAX operation with derivatives of every order.

    `known` is None or, for `Engine.share`, an output and a log-sum-exp: then these are
    returned, not computed.
    """
    leaves, structure = jax.tree.flatten((head, blocks, known))
    shapes = (
        (tiling.shape[0], head.value.shape[1]),
        *((tiling.shape[0],) for _ in range(1 + head.rule.returns_max)),
    )
    outputs = [jax.ShapeDtypeStruct(shape, head.rule.dtype) for shape in shapes]

    def evaluate(*arguments: Any) -> Sequence[Array]:
        head, blocks, known = jax.tree.unflatten(structure, arguments)
        if known is not None:
            return known
        if fuse_rows:
            return jax.tree.leaves(_output_of_single_tiles(tiling, True, head, blocks))
        return jax.tree.leaves(_output(tiling, head, blocks))

    def jvp(arguments: Sequence[Any], tangents: Mapping[int, Array]) -> Any:
        head, blocks, known = jax.tree.unflatten(structure, arguments)
        output, lse, *largest = known or _attention(tiling, False, head, blocks, None)
        result = known or name_residuals(output, lse)
        d_arguments = [
            tangents.get(i, jnp.zeros_like(x)) for i, x in enumerate(arguments)
        ]
        tangent = _tangent(
            tiling, head, blocks, result, jax.tree.unflatten(structure, d_arguments)[0]
        )
        return [*result, *largest], [*tangent, *(None for _ in largest)]

    return Function(outputs, evaluate, jvp)(*leaves)


@functools.partial(jit_products, static_argnums=0, inline=True)
def _output(tiling: Tiling, head: Head, blocks: BlockMask) -> ResultsOfHead:
    if blocks.single:
        return _output_of_single_tiles(tiling, False, head, blocks)
    rule = head.rule

    def row(part: tuple) -> ResultsOfHead:
        i, blocks, q, flags = part
        q = q if flags is None else guard.zero(q, flags)

        def visit_tile(
            visit: TileVisit, rule: ScoreRule, state: OnlineSoftmax
        ) -> OnlineSoftmax:
            keys, values = (
                visit.tile.cut_columns(x, 0) for x in (head.key, head.value)
            )
            flags_of_tile = _cut_flags(
                head.nonfinite, jax.tree.map(visit.rows, flags), visit.tile
            )
            s, row_poison = rule.tile_scores(
                visit.rows(q), keys, head.inputs, visit.tile, flags_of_tile
            )
            before = jax.tree.map(visit.rows, state)
            after = before.update(
                s, lambda p: rule.weigh(p, values, visit.tile), row_poison
            )
            return jax.tree.map(visit.put_rows, state, after)

        features = head.value.shape[1]
        sink = head.inputs.sink
        start = OnlineSoftmax.start(
            tiling.height, features, sink, rule.dtype, rule.returns_max
        )
        return over_keys(
            blocks, tiling, rule, i, visit_tile, varying_as(q, start)
        ).finish()

    return _join_rows(
        lax.map(
            row,
            by_row(
                tiling,
                blocks,
                head.query,
                None if head.nonfinite is None else head.nonfinite.query,
            ),
        )
    )


def _join_rows(results: Any) -> ResultsOfHead:
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), results)


def _cut_flags(
    nonfinite: NonFinite | None, of_queries: Array | None, tile: Tile
) -> NonFinite | None:
    """Returns the flags (`guard.py`) of a tile: `of_queries`, and those of its keys;
    None if the head has no flags.
    """
    if nonfinite is None or of_queries is None:
        return None
    return NonFinite(of_queries, tile.cut_columns(nonfinite.key, 0))


def _output_of_single_tiles(
    tiling: Tiling, fuse_rows: bool, head: Head, blocks: BlockMask
) -> ResultsOfHead:
    """Computes a head whose rows of tiles have one tile each: row after row or, with
    `fuse_rows`, all rows at once.
    """
    mask = padded_mask(head.rule.mask, tiling) if blocks.partial_bands else None
    rule = dataclasses.replace(head.rule, mask=mask)

    def row(part: tuple) -> ResultsOfHead:
        i, blocks, q, flags = part
        shape = tiling.height, tiling.width
        tile = tiling.tile(
            i * tiling.height, element(blocks.column, 0), shape, rule.offsets.values
        )
        head_of_tile = dataclasses.replace(
            head,
            query=q,
            key=tile.cut_columns(head.key, 0),
            value=tile.cut_columns(head.value, 0),
            inputs=head.inputs.cut(tile),
            rule=rule,
            nonfinite=_cut_flags(head.nonfinite, flags, tile),
        )
        return rows_of(head_of_tile, tile, fuse_rows)

    rows = by_row(
        tiling,
        blocks,
        head.query,
        None if head.nonfinite is None else head.nonfinite.query,
    )
    return _join_rows(jax.vmap(row)(rows) if fuse_rows else lax.map(row, rows))


def _tangent(
    tiling: Tiling,
    head: Head,
    blocks: BlockMask,
    result: tuple[Array, Array],
    d_head: Head,
) -> tuple[Float[Array, "T Hv"], Float[Array, " T"]]:
    """Computes the tangents of output and log-sum-exp (`result`) from `d_head`, the
    tangents of the head's arrays.

    With weights p = exp(s - lse) and tangents s' of scores and v' of values, lse' is
    the sum of p s' over keys and sink, and the output's tangent is (p s') v + p v' -
    output lse'. The transpose of this linear function is FlashAttention-2's backward
    pass.
    """
    query, output, lse, finite = guard.derivative_rows(
        head.query, result, head.nonfinite is not None
    )
    function = _tangent_of_tile(head, lse)
    arguments = _arguments(head)
    residuals = [query, lse[:, None], *arguments]
    backward = functools.partial(
        _backward, tiling, head.rule.scale, head.inputs.bias is not None
    )
    tangents = [d_head.query, *_arguments(d_head)]
    weighted, d_lse = tile_sum(
        tiling, function, head.rule, blocks, residuals, tangents, backward
    )
    d_lse = d_lse[:, 0]
    if head.inputs.sink is not None and d_head.inputs.sink is not None:
        d_lse = d_lse + jnp.exp(head.inputs.sink - lse) * d_head.inputs.sink
    d_output = weighted - output * d_lse[:, None]
    return guard.zero(d_output, lse), jnp.where(finite, d_lse, jnp.zeros_like(lse))


def _arguments(head: Head) -> list[Array]:
    """Lists the arrays that `_tangent` passes to its tile sum last: keys, values, bias
    if any, captured arrays.
    """
    bias = [] if head.inputs.bias is None else [head.inputs.bias]
    return [head.key, head.value, *bias, *head.inputs.captured]


def _inputs(arguments: Sequence[Array], has_bias: bool) -> ScoreInputs:
    """Makes a tile's `ScoreInputs` from its `arguments`: the bias (if `has_bias`), then
    captured arrays.
    """
    bias, captured = (arguments[0], arguments[1:]) if has_bias else (None, arguments)
    bias = None if bias is None else bias.astype(accumulation_dtype(bias.dtype))
    return ScoreInputs(bias, None, list(captured))


def _tangent_of_tile(head: Head, lse: Array) -> TileSummand:
    """Makes the function that `_tangent` sums over tiles; for the symbols below, see
    there.

    The function returns (p s') v + p v' [t, Hv], and the sum of p s' over the tile's
    keys [t, 1]. `lse` is the log-sum-exp of each row over all keys.
    """
    has_bias, (rows, features) = (
        head.inputs.bias is not None,
        (head.query.shape[0], head.value.shape[1]),
    )
    may_be_nan = has_bias or head.rule.score_mod is not None

    def compute(
        rule: ScoreRule,
        tile: Tile,
        residuals: Sequence[Array],
        linear: Sequence[Array],
        safe: bool,
    ) -> tuple:
        if rule.forward_mode_error:
            raise NotImplementedError(rule.forward_mode_error)
        query, lse, key, value, *inputs = residuals
        d_query, d_key, d_value, *d_inputs = linear
        d_products = rule.products(d_query, key) + rule.products(query, d_key)
        primals = rule.products(query, key), _inputs(inputs, has_bias)
        scores = rule.differentiable_tile if safe else rule.tile
        s, d_s = jax.jvp(
            lambda x, p: scores(x, p, tile),
            primals,
            (d_products, _inputs(d_inputs, has_bias)),
        )
        if rule.score_mod is None:
            d_s = d_s
        else:
            d_s = jnp.where(s == -jnp.inf, jnp.zeros_like(d_s), d_s)
        weights = guard.backward_weights(s, lse, may_be_nan)
        kept = rule.dropout_multiplier(tile, s.dtype)
        d_weights = weights * d_s
        weighted = rule.dot(times(d_weights, kept), _for_gradients(value)) + rule.dot(
            times(weights, kept), d_value
        )
        return weighted, jnp.sum(d_weights, axis=1, keepdims=True)

    shared = _arguments(head)
    dtype = head.rule.dtype
    kinds = (
        ["queries", "keys", "keys"]
        + ["scores"] * has_bias
        + ["whole"] * len(head.inputs.captured)
    )
    linear = Argument.of(kinds, (head.query, *shared))
    outputs = (
        Argument("queries", (rows, features), dtype),
        Argument("queries", (rows, 1), dtype),
    )
    return TileSummand(
        compute,
        (linear[0], Argument("queries", (rows, 1), lse.dtype), *linear[1:]),
        linear,
        outputs,
    )


def _backward(
    tiling: Tiling,
    scale: float,
    has_bias: bool,
    rule: ScoreRule,
    blocks: BlockMask,
    residuals: Sequence[Array],
    cotangents: Sequence[Array],
) -> list[Array]:
    """Computes FlashAttention-2's backward pass: the transpose of the tile sum in
    `_tangent`.

    `residuals` are that sum's residuals: queries, log-sum-exp, keys, values, bias (if
    `has_bias`) and captured arrays. `cotangents` are those of its two outputs. Products
    of queries and keys are multiplied by `scale`. Returns the cotangents of queries,
    keys, values, bias (if `has_bias`) and captured arrays.
    """
    query, lse, key, value, *inputs = residuals
    # The transpose of the last lines of `_tangent` makes `d_lse` the log-sum-exp's
    # cotangent minus FlashAttention-2's delta, which is the output's cotangent times
    # the output, summed over features.
    d_output, d_lse = cotangents
    d_output = d_output.astype(query.dtype)
    may_be_nan = has_bias or rule.score_mod is not None

    def compute(
        rule: ScoreRule,
        tile: Tile,
        residuals: Sequence[Array],
        linear: Sequence[Array],
        safe: bool,
    ) -> tuple:
        (
            (query, query_transposed, lse, key, value, *inputs),
            (d_output, d_output_transposed, d_lse),
        ) = residuals, linear
        primals = rule.products(query, key), _inputs(inputs, has_bias)
        if safe:
            s, pull = jax.vjp(
                lambda x, p: rule.differentiable_tile(x, p, tile), *primals
            )
        else:
            s, pull = rule.tile_vjp(*primals, tile)
        weights = guard.backward_weights(s, lse, may_be_nan)
        kept = rule.dropout_multiplier(tile, s.dtype)
        d_weights = times(rule.dot(d_output, value, transpose_b=True), kept)
        d_products, d_inputs = pull(weights * (d_weights + d_lse))
        d_query = rule.dot(d_products, _for_gradients(key))
        d_key = rule.dot(_for_gradients(query_transposed), d_products)
        d_value = rule.dot(d_output_transposed, times(weights, kept))
        bias = [] if d_inputs.bias is None else [d_inputs.bias]
        return d_query, d_key, d_value, *bias, *d_inputs.captured

    kinds = ["scores"] * has_bias + ["whole"] * (len(inputs) - has_bias)
    of_rows = "queries", "queries transposed", "queries"
    residuals = [query, query, lse, key, value, *inputs]
    linear = [d_output, d_output, d_lse]
    outputs = (
        Argument("queries", query.shape, query.dtype, scale),
        Argument("keys transposed", key.shape[::-1], key.dtype, scale),
        Argument("keys transposed", value.shape[::-1], value.dtype),
        *Argument.of(kinds, inputs),
    )
    arguments = (
        Argument.of((*of_rows, "keys", "keys", *kinds), residuals),
        Argument.of(of_rows, linear),
    )
    function = TileSummand(compute, *arguments, outputs)
    d_query, d_key, d_value, *d_inputs = tile_sum(
        tiling, function, rule, blocks, residuals, linear
    )
    return [d_query, d_key.T, d_value.T, *d_inputs]


def _for_gradients(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Converts float16 to float32: products with a float16 array would round the
    gradients of scores to float16.
    """
    if x.dtype == jnp.float16:
        return x.astype(jnp.float32)
    return x
