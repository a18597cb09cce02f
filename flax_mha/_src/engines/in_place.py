"""Attention of few queries over many keys, as in decoding: keys and values are read
where they are, [B..., S, K, H], not copied to the layout of one head.

A step of decoding then costs what has been written to the cache, not what the cache can
hold. `plan.py` chooses among these cases (`KeyBlocks`):

- Blocks in a loop: from the first to the last block that holds a visible key, each for
  all heads. On one CPU every batch entry has a loop of its own (`sequential`), except
  in some wide blocks; accelerators, and devices between which the call may be split,
  compute all entries together.
- One block without a loop: for a small cache, because it compiles faster, and as the
  wide blocks of a call with few scores.
- One block-diagonal product for all heads (`block_diagonal`): a product for each key
  head would copy the keys of this head.
- Wide blocks (`wide`): if more than half of the blocks hold a visible key, fewer steps
  are faster, although they read more masked keys. A `lax.cond` decides.
- A second pass, only if an output is not finite. The first does not look for NaN in
  keys and values, which would take as long as all the rest; the second reads zeros in
  their place (`guarded`).

In a block-diagonal product, a query is padded with zeros to the features of all key
heads, so the keys of other heads contribute 0, and only its own head's outputs are
used. It multiplies K times as much, but reads every key once, in place. A key that is
not finite makes the products of other heads NaN, which also needs the second pass.

Numbers in 8 bits are exact in bfloat16. On GPUs, and on one CPU that multiplies
bfloat16, queries in bfloat16 are multiplied by keys in bfloat16 or 8 bits as they are
(`_dtype_in_place` in `plan.py`). The scales of 8 bits multiply scores and weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from flax_mha._src import guard
from flax_mha._src.call.call import Call, Result
from flax_mha._src.core.eight_bits import as_floats
from flax_mha._src.core.fields import static
from flax_mha._src.core.tile import Grid, Scalar, Tile
from flax_mha._src.core.tracing import (
    by_mapped_axis,
    platform,
    varying_alike,
    varying_as,
)
from flax_mha._src.masks.visible import Visible
from flax_mha._src.math.head import (
    ResultsOfHead,
    by_blocks,
    map_heads,
    scores_of,
    split_heads,
    to_caller,
    vectors_by_head,
)
from flax_mha._src.math.scores import ScoreInputs, ScoreRule, times
from flax_mha._src.math.softmax import OnlineSoftmax
from flax_mha._src.plan import KeyBlocks, Plan

# XLA's CPU cuts blocks out of these dtypes faster as integers with the same bits: it
# converts such floats first.
BITS = {"float8_e4m3fn": jnp.uint8, "bfloat16": jnp.uint16}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """All keys and values of all batch entries: where they are, not copied."""

    key: Shaped[Array, "*B S K H"]
    value: Shaped[Array, "*B S K Hv"]
    # Scales of keys and values in 8 bits (`KVCache.scale`), else None.
    scale: Float[Array, "*B S K _"] | None
    # If given, the first features of keys are the values, and have a scale of their
    # own.
    value_size: int | None = static()


class Inputs(NamedTuple):
    """The arrays of a call, and the rule that makes scores from products; queries in
    the layout of one head (`head.py`).
    """

    query: Float[Array, "*B K G T H"]
    stored: Stored
    scale: Float[Array, "*#B 1 1 1 1"]  # factor of the products
    # Bias, sink and captured arrays, which also enter the scores.
    score_inputs: ScoreInputs
    rule: ScoreRule


class BatchSlice(NamedTuple):
    """Some queries of all batch entries, or of one (batch axes of length 1), and
    everything their attention needs.
    """

    # Index of the first of these batch entries along each batch axis.
    first: tuple[Scalar, ...]
    row: Scalar  # index of the first of these queries among all queries of the call
    query: Float[Array, "*B K G t H"]  # in the dtype of the products
    # Factor of the products, if scaling the queries would round them; None if queries
    # are scaled.
    query_scale: Float[Array, "*#B 1 1 1 1"] | None
    stored: Stored
    # Whether to replace keys and values that are not finite by zeros (`guard.py`).
    guarded: bool
    score_inputs: ScoreInputs  # as in `Inputs`, of these batch entries
    rule: ScoreRule


class Block(NamedTuple):
    """A block of keys that was read, in the dtype of the products."""

    # One array or, if keys hold the values (`Stored.value_size`), two: the features
    # after the values, then the values.
    keys: list[Array]
    value: Float[Array, "*B s K Hv"]
    # Of keys and of values, each [B..., K, 1, s]; None unless the cache is in 8 bits.
    scales: list[Array] | None
    # Infinity if a key or its value was not finite and became zeros, else 0; None
    # unless `BatchSlice.guarded`.
    flags: Float[Array, "*B K 1 s"] | None


def attention(plan: Plan, call: Call) -> Result:
    """Computes a call in blocks of keys, with the sizes in `plan.in_place`. JAX cannot
    differentiate it.
    """
    score_inputs, rule = scores_of(call)
    if call.scale_array is None:
        scale = jnp.asarray(call.scale, rule.dtype)
    else:
        scale = call.scale_array.astype(rule.dtype)
    query = split_heads(call.query, call.groups)
    inputs = Inputs(
        query=query,
        stored=Stored(call.key, call.value, call.cache_scale, call.value_size),
        scale=scale.reshape((1,) * query.ndim),
        score_inputs=score_inputs,
        rule=rule,
    )
    blocks: Any = plan.in_place
    results = _with_vmap_rule(plan.dtype, blocks)(varying_alike(inputs))
    return to_caller(results, call.query.dtype)


def _with_vmap_rule(
    dtype: jnp.dtype, blocks: KeyBlocks
) -> Callable[[Inputs], ResultsOfHead]:
    """Returns `_attend` with a rule for `jax.vmap`, which makes the mapped axis one
    more batch axis.

    Without this rule `jax.vmap` would compute both branches of every `lax.cond`, and
    visit for each entry as many blocks as the longest one needs. If mapped entries
    share keys, the rule adds no axis: that would copy them.
    """
    attend = jax.custom_batching.custom_vmap(functools.partial(_attend, dtype, blocks))

    @attend.def_vmap
    def one_more_axis(
        size: int, in_batched: list[Any], inputs: Inputs
    ) -> tuple[ResultsOfHead, Any]:
        [is_mapped] = in_batched
        keys_are_mapped = all(jax.tree.leaves(is_mapped.stored))

        def on_one_device(inputs: Inputs) -> ResultsOfHead:
            if size == 0 or not keys_are_mapped:  # no new batch axis
                narrow = blocks._replace(wide=None)
                in_blocks = functools.partial(_attend, dtype, narrow)
                axes = jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped)
                return jax.vmap(in_blocks, (axes,))(inputs)

            def with_axis(x: Array, mapped: bool) -> Array:
                if mapped:
                    return x
                return x[None]

            inputs = jax.tree.map(with_axis, inputs, is_mapped)
            if not is_mapped.query:
                # Results have the batch axes of the queries.
                query = inputs.query
                shape = (len(inputs.stored.key), *query.shape[1:])
                inputs = inputs._replace(query=jnp.broadcast_to(query, shape))
            return _with_vmap_rule(dtype, blocks)(inputs)

        results = by_mapped_axis(on_one_device, (inputs,), (is_mapped,))
        return results, jax.tree.map(lambda _: True, results)

    return attend


def _attend(dtype: jnp.dtype, blocks: KeyBlocks, inputs: Inputs) -> ResultsOfHead:
    """Computes all queries, in `blocks` or in wider ones, with products in `dtype`.

    If an output is not finite, computes them again: guarded or, without masks, without
    a block-diagonal product.
    """
    queries = inputs.query
    stored = inputs.stored
    rule = inputs.rule
    num_keys = stored.key.shape[-3]
    num_scores = math.prod(queries.shape[:-1]) * num_keys
    num_numbers = stored.key.size + stored.value.size
    blocks = blocks.fitting(num_keys, num_scores, num_numbers)
    if dtype == rule.dtype:
        query = queries.astype(rule.dtype) * inputs.scale
        query_scale = None
    else:
        # Scaling before the conversion to fewer bits would round the queries.
        query = queries.astype(dtype)
        query_scale = inputs.scale
    part = BatchSlice(
        first=(0,) * (queries.ndim - 4),
        row=0,
        query=query,
        query_scale=query_scale,
        stored=stored,
        guarded=False,
        score_inputs=inputs.score_inputs,
        rule=rule,
    )

    wide = blocks.wide
    if wide is None:
        results = _entries(blocks, part)
    else:
        most_are_seen = _seen(blocks, part).mean() > 0.5
        results = lax.cond(
            most_are_seen,
            lambda: _entries(wide, part),
            lambda: _entries(blocks, part),
        )

    masks = rule.masks_scores(inputs.score_inputs.bias)
    # Without masks, NaN belongs in the output; only a product that mixes heads, here or
    # in wide blocks, may carry it to other heads.
    if not masks and not blocks.block_diagonal and wide is None:
        return results

    def again() -> ResultsOfHead:
        if masks:
            return _entries(blocks, part._replace(guarded=True))
        return _entries(blocks._replace(block_diagonal=False), part)

    output = results[0]
    return lax.cond(jnp.isfinite(output).all(), lambda: results, again)


def _entries(blocks: KeyBlocks, part: BatchSlice) -> ResultsOfHead:
    """Computes all batch entries; if `blocks.sequential`, in a loop, so that each reads
    only the keys that it needs.
    """
    if not blocks.sequential:
        return _query_blocks(blocks, part)
    batch = part.query.shape[:-4]

    def one_entry(i: Int[Array, ""]) -> ResultsOfHead:
        place = jnp.unravel_index(i, batch)
        own = part._replace(
            first=place,
            query=_of_entry(part.query, place),
            query_scale=_of_entry(part.query_scale, place),
            score_inputs=_of_entry(part.score_inputs, place),
            rule=_of_entry(part.rule, place),
        )
        return _query_blocks(blocks, own)

    def with_batch(x: Array) -> Array:
        return x.reshape(*batch, *x.shape[len(batch) + 1 :])

    results = lax.map(one_entry, jnp.arange(math.prod(batch), dtype=jnp.int32))
    return jax.tree.map(with_batch, results)


def _of_entry(tree: Any, place: tuple[Array, ...]) -> Any:
    """Returns `tree` with only the batch entry at indices `place` of each array; batch
    axes then have length 1.
    """

    def own(x: Array) -> Array:
        for axis, i in enumerate(place):
            if x.shape[axis] != 1:
                x = lax.dynamic_slice_in_dim(x, i, 1, axis)
        return x

    return jax.tree.map(own, tree)


def _query_blocks(blocks: KeyBlocks, part: BatchSlice) -> ResultsOfHead:
    """Computes attention for the queries of `part`, `blocks.height` of them at a time,
    which limits memory.
    """
    length = part.query.shape[-2]
    axis = part.query.ndim - 2
    if length <= blocks.height:
        return _over_keys(blocks, part)

    def one_block(row: Scalar) -> ResultsOfHead:
        query = lax.dynamic_slice_in_dim(part.query, row, blocks.height, axis)
        return _over_keys(blocks, part._replace(query=query, row=row))

    return by_blocks(one_block, length, blocks.height, axis)


def _over_keys(blocks: KeyBlocks, part: BatchSlice) -> ResultsOfHead:
    """Computes one block of queries, by an online softmax over the blocks of keys that
    may hold visible keys.
    """
    stored = part.stored
    value_size = stored.value_size or stored.value.shape[-1]
    state = OnlineSoftmax.start(
        rows=(*part.query.shape[:-2], blocks.height),
        features=value_size,
        sink=part.score_inputs.sink,
        fields=part.rule,
    )
    state = varying_as(part.query, state)
    step = functools.partial(_step, blocks, part)
    if blocks.unconditional:
        return step(0, state).finish()
    begin, end = _visited(blocks, part)
    if blocks.is_only_block(stored.key.shape[-3]):
        # Not a loop: XLA (jax 0.10) would fuse reading with writing new keys, outside
        # of it, and copy the cache.
        state = lax.cond(begin < end, lambda: step(0, state), lambda: state)
        return state.finish()
    state = lax.fori_loop(jnp.int32(begin), jnp.int32(end), step, state)
    return state.finish()


def _visited(blocks: KeyBlocks, part: BatchSlice) -> tuple[Scalar, Scalar]:
    """Returns the range of key blocks to read, as first and end (exclusive); all
    visible keys are in it.
    """
    is_seen = _seen(blocks, part)
    is_seen = is_seen.any(range(is_seen.ndim - 1))
    from_end = is_seen[::-1]
    first = jnp.argmax(is_seen).astype(jnp.int32)
    num_after = jnp.argmax(from_end).astype(jnp.int32)
    # If no block is seen: (0, 0).
    return first, jnp.where(is_seen.any(), is_seen.size - num_after, 0)


def _seen(blocks: KeyBlocks, part: BatchSlice) -> Bool[Array, "*#B #K #G count"]:
    """Returns, for each block of keys, whether any query of `part` may attend to a key
    in it.
    """
    rule = part.rule
    count = -(-part.stored.key.shape[-3] // blocks.width)
    if rule.ring is not None:
        # Of a ring cache, all slots that have been written.
        newest = jnp.asarray(rule.offsets.values[1])
        firsts = jnp.arange(count, dtype=newest.dtype) * blocks.width
        return jax.vmap(lambda first: first <= newest, out_axes=-1)(firsts)
    limits = Visible()
    if isinstance(rule.mask, Visible):
        # Only window and lengths limit the keys to read.
        limits = dataclasses.replace(rule.mask, segments=None, rest=None)
    if not limits.hides_keys:
        return jnp.ones((count,), bool)

    def one_head(own: tuple) -> Bool[Array, " count"]:
        limits, offsets = own
        first_query, first_key = offsets.values
        grid = Grid(
            (1, count),
            (blocks.height, blocks.width),
            (first_query + part.row, first_key),
        )
        visible = limits.occupancy(grid).any_visible
        return jnp.broadcast_to(visible, (1, count))[0]

    return map_heads(one_head, (limits, rule.offsets), part.query.ndim - 2)


def _step(
    blocks: KeyBlocks, part: BatchSlice, i: Scalar, state: OnlineSoftmax
) -> OnlineSoftmax:
    """Reads block `i` of the keys, computes its scores, and adds it to `state`, the
    online softmax; returns the new state.
    """
    num_keys = part.stored.key.shape[-3]
    dtype = part.query.dtype
    # The last block ends at the last key.
    column = jnp.minimum(i * blocks.width, num_keys - blocks.width)
    block = _read_block(blocks, part, column)

    products = []
    features_of_keys = _scaled_features(part.stored)
    for features, keys in zip(features_of_keys, block.keys, strict=True):
        query = part.query[..., features]
        products.append(_key_products(query, keys, part.rule, blocks.block_diagonal))

    def one_head(own: tuple) -> tuple[OnlineSoftmax, Array]:
        products, query_scale, scales, flags, score_inputs, rule, state = own
        tile = Tile(
            part.row,
            column,
            shape=(blocks.height, blocks.width),
            offsets=rule.offsets.values,
            ring=rule.ring,
        )
        if query_scale is not None:
            products = [x * query_scale for x in products]
        if scales is not None:
            # `zip` stops at the last product: if keys hold no values, the second scale
            # is only for the values.
            pairs = zip(products, scales, strict=False)
            products = [x * scale[None, :] for x, scale in pairs]
        product = sum(products[1:], products[0])

        # A product of -inf would count as a masked score. Turn infinite products into
        # NaN (infinity * 0), now and again after `score_mod`, which may hide it
        # (`poison`). `rule.tile` replaces masked scores.
        poison = product * 0
        product = product + poison
        if flags is not None:
            poison = poison + flags[None]
        s = rule.tile(product, score_inputs.cut(tile), tile, poison=poison)
        # The last block begins with keys of the block before it; they count once.
        if num_keys % blocks.width:
            s = jnp.where(tile.columns >= i * blocks.width, s, -jnp.inf)

        # Weights p = exp(s - m), with m and l in the state. Without scales, `rescale`
        # rounds them, also in l. With scales, they are rounded after the multiplication
        # by the values' scale, and l is not.
        rounded = None
        if scales is None:
            rounded = dtype
        state, weights = state.rescale(s, dtype=rounded)
        weights = times(weights, rule.dropout_multiplier(tile, s.dtype))
        if scales is not None:
            weights = weights * scales[1][None, :]
        return state, weights.astype(dtype)

    heads = (
        products,
        part.query_scale,
        block.scales,
        block.flags,
        part.score_inputs,
        part.rule,
        state,
    )
    state, weights = map_heads(one_head, heads, axes=part.query.ndim - 2)
    weighted = _value_products(weights, block.value, part.rule, blocks.block_diagonal)
    return state._replace(output=state.output + weighted)


def _read_block(blocks: KeyBlocks, part: BatchSlice, column: Scalar) -> Block:
    """Reads the block of keys that begins at key `column`, in place."""
    stored = part.stored
    groups = (stored.key.shape[-2], 1)
    dtype = part.query.dtype
    read = functools.partial(_read, part=part, column=column, width=blocks.width)
    keys = [read(stored.key, x, dtype=dtype) for x in _scaled_features(stored)]
    if stored.value_size is None:
        value = read(stored.value, slice(None), dtype=dtype)
    else:
        value = keys[1]
    scale = None
    if stored.scale is not None:
        scale = read(stored.scale, slice(None), dtype=part.rule.dtype)

    flags = None
    if part.guarded:
        if scale is None:
            keys[0], value, key_flags = guard.zero_keys(keys[0], value)
        else:
            # Numbers in 8 bits are finite; a key or value that was not finite has a
            # scale of NaN.
            key_flags = guard.flag(scale)
            scale = guard.zero(scale, key_flags)
        flags = vectors_by_head(key_flags.astype(part.rule.dtype), groups)
    if scale is None:
        return Block(keys, value, scales=None, flags=flags)
    scales = [vectors_by_head(scale[..., i], groups) for i in (0, 1)]
    return Block(keys, value, scales=scales, flags=flags)


def _scaled_features(stored: Stored) -> list[slice]:
    """Lists the slices of a key's features that are multiplied separately: one slice of
    all or, with `value_size`, the features after the values, then the values.

    In a cache in 8 bits, these two slices have different scales.
    """
    number = stored.value_size
    if number is None:
        return [slice(None)]
    return [slice(number, None), slice(number)]


def _read(
    x: Shaped[Array, "*B S K F"],
    features: slice,
    part: BatchSlice,
    column: Scalar,
    width: int,
    dtype: DTypeLike,
) -> Float[Array, "*B s K f"]:
    """Reads a block of `x` (keys, values or scales) for the batch entries of `part`,
    and converts it to `dtype`.

    The block has `width` keys, from key `column` on, and the slice `features` of each.
    """
    batch = part.query.shape[:-4]
    num_keys, num_heads, size = x.shape[-3:]
    bits = None
    if platform() == "cpu":
        bits = BITS.get(x.dtype.name)

    is_all_of_x = width == num_keys and batch == x.shape[:-3]
    # On a CPU, float8 is converted from its bits (`as_floats`).
    needs_bits = bits is not None and x.dtype.itemsize == 1
    if is_all_of_x and not needs_bits:
        return _floats(x[..., features], x.dtype, dtype)
    start = [jnp.asarray(i, jnp.int32) for i in (*part.first, column, 0, 0)]
    start_column = start[len(batch)]
    shape = (*batch, width, num_heads, size)

    def cut() -> Array:
        array = x
        if bits is not None:
            array = lax.bitcast_convert_type(x, bits)
        block = lax.dynamic_slice(array, start, shape, allow_negative_indices=False)
        return _floats(block[..., features], x.dtype, dtype)

    if bits is None:
        return cut()
    # XLA's CPU converts an array before it cuts a part out, and so would convert all
    # keys before the loop. It moves nothing out of a branch of `lax.cond`, if it does
    # not know that this branch is always taken.
    nothing = varying_as(x, jnp.zeros(shape, dtype)[..., features])
    # Always true, which XLA cannot tell.
    column_is_known = lax.optimization_barrier(start_column) >= 0
    return lax.cond(column_is_known, cut, lambda: nothing)


def _floats(block: Array, stored_dtype: jnp.dtype, dtype: DTypeLike) -> Array:
    """Converts a block of numbers in `stored_dtype`, or of their bits as integers, to
    `dtype`.
    """
    if stored_dtype.itemsize == 1:
        return as_floats(block, dtype)
    # From `stored_dtype` to itself, this changes nothing.
    return lax.bitcast_convert_type(block, stored_dtype).astype(dtype)


def _key_products(
    query: Float[Array, "*B K G t H"],
    key: Float[Array, "*B s K H"],
    rule: ScoreRule,
    block_diagonal: bool,
) -> Float[Array, "*B K G t s"]:
    """Computes products of queries and keys, by one matrix product for all heads if
    `block_diagonal`.
    """
    *batch, num_heads, groups, length, size = query.shape

    def product(pair: tuple[Array, Array]) -> Array:
        query, key = pair
        if query.dtype != rule.dtype:  # of 16 bits
            return rule.dot(query, key, transpose_b=True)
        # In the other order, or without the barrier, XLA would transpose the keys.
        transposed = rule.dot(key, query, transpose_b=True)
        return lax.optimization_barrier(transposed).T

    if not block_diagonal:
        keys = split_heads(key, (num_heads, 1))
        return map_heads(product, (query, keys), len(batch) + 2)
    # Row (k, g, t) holds the query's features in the place of key head k, and zeros in
    # those of other heads.
    rows = jnp.where(_is_own_head(num_heads), query[..., None, :], 0)
    rows = rows.reshape(*batch, num_heads * groups * length, num_heads * size)
    keys = key.reshape(*key.shape[:-2], num_heads * size)
    products = map_heads(product, (rows, keys), len(batch))
    return products.reshape(*query.shape[:-1], -1)


def _value_products(
    weights: Float[Array, "*B K G t s"],
    value: Float[Array, "*B s K Hv"],
    rule: ScoreRule,
    block_diagonal: bool,
) -> Float[Array, "*B K G t Hv"]:
    """Computes sums of the weighted values, by one matrix product for all heads if
    `block_diagonal`.
    """
    *batch, num_heads, _, _, length = weights.shape

    def product(pair: tuple[Array, Array]) -> Array:
        weights, value = pair
        return rule.dot(weights, value)

    if not block_diagonal:
        values = split_heads(value, (num_heads, 1))
        return map_heads(product, (weights, values), len(batch) + 2)
    rows = weights.reshape(*batch, -1, length)
    values = value.reshape(*value.shape[:-2], -1)
    # A row holds sums of the values of all heads; keep those of its own head.
    sums = map_heads(product, (rows, values), len(batch))
    sums = sums.reshape(*weights.shape[:-1], num_heads, -1)
    return jnp.where(_is_own_head(num_heads), sums, 0).sum(-2)


def _is_own_head(num_heads: int) -> Bool[Array, "K 1 1 K 1"]:
    return jnp.eye(num_heads, dtype=bool)[:, None, None, :, None]
