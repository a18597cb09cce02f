"""Attention of few queries over many keys, as in decoding: keys and values are read
where they are.

Other algorithms copy keys and values to the layout of one head, which reads and writes
all of them. Here a loop reads blocks of keys [B..., S, K, H] where they are, a block
for all heads, and only from the first to the last block that holds a visible key: of
each batch entry on a CPU, of any batch entry on accelerators. So a step of decoding
costs what has been written to the cache, not what the cache can hold. If most of the
cache has been written, blocks are larger, or all of it is one block, not copied. So is
a cache that is small (`plan.MAX_NUMBERS_WHOLE`), however empty it is.

A matrix product for each key head copies the keys of this head. For few queries, one
block-diagonal product for all heads is faster: every query is padded with zeros to the
features of all key heads, so that the keys of other heads contribute 0, and of its
outputs only those of the query's head are used. That multiplies K times as much, but
reads every key once, in place. In such a product, a key that is not finite makes the
products of other heads NaN, too.

Numbers in 8 bits are exact in bfloat16. If the CPU multiplies bfloat16, keys in
bfloat16 or 8 bits are multiplied as they are, and the scales multiply scores and
weights.

Looking for keys and values that are not finite would take as long as all the rest. So
only if an output is not finite, it is computed again with zeros for these keys
(`guard.py`). Visible products that are not finite make outputs NaN.
"""

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
from flax_mha._src.call.operands import Call, Operands, Options, Result
from flax_mha._src.core.eight_bits import as_floats, dequantize_cache
from flax_mha._src.core.tile import Grid, Scalar, Tile
from flax_mha._src.core.tracing import (
    by_mapped_axis,
    platform,
    varying_alike,
    varying_as,
)
from flax_mha._src.engines.xla import dense
from flax_mha._src.masks import LengthMask, Mask
from flax_mha._src.masks.base import conjuncts, merged
from flax_mha._src.math.head import (
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

# Output, log-sum-exp and, with `return_max_score`, each query's largest score.
Results = tuple[
    Float[Array, "*B K G T Hv"],
    Float[Array, "*B K G T"],
    Float[Array, "*B K G T"] | None,
]

# XLA's CPU cuts blocks out of these dtypes faster as integers with the same bits: it
# converts such floats first.
BITS = {"float8_e4m3fn": jnp.uint8, "bfloat16": jnp.uint16}


class BatchSlice(NamedTuple):
    """Some queries of all batch entries, or of one (batch axes of length 1), and
    everything their attention needs.

    Attributes:
      first: Index of the first of these batch entries along each batch axis.
      query: The queries in the dtype of the products, with leading axes for batch and
        heads (`head.py`).
      query_scale: Factor of the products, if scaling the queries would round them; None
        if queries are scaled.
      key: All keys of all batch entries, not copied.
      value: All values, not copied.
      guarded: Whether to replace keys and values that are not finite by zeros
        (`guard.py`).
      row: Index of the first of these queries among all queries of the call.
      inputs: Bias, sink and captured arrays, which enter the scores in addition to the
        products.
      rule: The rule that makes scores from products.
      cache_scale: Scales of all keys and values, if they are in 8 bits
        (`KVCache.scale`), else None.
    """

    first: tuple[Scalar, ...]
    query: Float[Array, "*B K G t H"]
    query_scale: Float[Array, "*#B 1 1 1 1"] | None
    key: Shaped[Array, "*B S K H"]
    value: Shaped[Array, "*B S K Hv"]
    guarded: bool
    row: Scalar
    inputs: ScoreInputs
    rule: ScoreRule
    cache_scale: Float[Array, "*B S K _"] | None


def attention(plan: Plan, call: Call) -> Result:
    """Computes a call in blocks of keys, with the sizes in `plan.in_place`. Derivatives
    use dense attention.
    """
    return _differentiable(plan, call.options, call.operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(plan: Plan, options: Options, operands: Operands) -> Result:
    inputs, rule = scores_of(operands, options)
    if operands.scale is None:
        scale = jnp.asarray(options.scale, rule.dtype)
    else:
        scale = operands.scale.astype(rule.dtype)
    arrays = *operands[:3], scale, inputs, rule, operands.cache_scale
    query, key, value, scale, *others = varying_alike(arrays)
    queries = split_heads(query, operands.groups)
    blocks: Any = plan.in_place
    return to_caller(
        _mapped(blocks)(
            queries, key, value, scale.reshape((1,) * queries.ndim), *others
        ),
        query.dtype,
    )


@_differentiable.defjvp
def _differentiable_jvp(
    plan: Plan, options: Options, primals: tuple[Operands], tangents: tuple[Operands]
) -> tuple[Result, Result]:
    def dense_of(operands: Operands) -> Result:
        scale = operands.cache_scale
        wide = options.dtype
        query = operands.query
        if scale is not None:
            key, value = dequantize_cache(
                operands.key, operands.value, scale, options.value_size, wide
            )
            operands = operands._replace(key=key, value=value, cache_scale=None)
        of_all_scores = plan._replace(dtype=wide, guard_first=True, in_place=None)
        result = dense.attention(
            of_all_scores, guard.guard(Call(operands, options), of_all_scores)
        )
        return result._replace(output=result.output.astype(query.dtype))

    return jax.jvp(dense_of, primals, tangents)


def _mapped(blocks: KeyBlocks) -> Callable[..., Results]:
    """Returns `_attend` with a rule for `jax.vmap`, which makes the mapped axis one
    more batch axis.

    Without this rule `jax.vmap` would compute both branches of every `lax.cond`, and
    visit for each entry as many blocks as the longest one needs. Where mapped entries
    share keys, the rule adds no axis: that would copy them.
    """
    call = jax.custom_batching.custom_vmap(functools.partial(_attend, blocks))

    @call.def_vmap
    def one_more_axis(
        size: int, is_batched: tuple, *operands: Any
    ) -> tuple[Results, Any]:
        def here(*operands: Any) -> Results:
            has_queries, *has_keys_and_values = is_batched[:3]
            has_keys_and_values += jax.tree.leaves(is_batched[-1])
            # Shared keys would have to be copied for each mapped entry.
            if not (size and all(has_keys_and_values)):
                axes = jax.tree.map(
                    lambda batched: 0 if batched else None, tuple(is_batched)
                )
                in_blocks = functools.partial(_attend, blocks._replace(wide=None))
                return jax.vmap(in_blocks, axes)(*operands)
            queries, *others = jax.tree.map(
                lambda x, batched: x if batched else x[None],
                operands,
                tuple(is_batched),
            )
            if has_queries:
                queries = queries
            else:
                queries = jnp.broadcast_to(
                    queries, (len(others[0]), *queries.shape[1:])
                )
            return _mapped(blocks)(queries, *others)

        results = by_mapped_axis(here, operands, tuple(is_batched))
        return results, jax.tree.map(lambda _: True, results)

    return call


def _attend(
    blocks: KeyBlocks,
    queries: Float[Array, "*B K G T H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    scale: Float[Array, "*#B 1 1 1 1"],
    inputs: ScoreInputs,
    rule: ScoreRule,
    cache_scale: Float[Array, "*B S K _"] | None,
) -> Results:
    blocks = blocks.fitting(
        math.prod(queries.shape[:-1]) * key.shape[-3], key.size + value.size
    )
    masks = rule.masks_scores(inputs)
    wide = blocks.wide
    is_narrow = blocks.dtype != rule.dtype
    if is_narrow:
        query = queries.astype(blocks.dtype)
    else:
        query = queries.astype(rule.dtype) * scale
    query_scale = scale if is_narrow else None
    first = (0,) * (queries.ndim - 4)
    part = BatchSlice(
        first, query, query_scale, key, value, False, 0, inputs, rule, cache_scale
    )

    def again() -> Results:
        if masks:
            return _entries(blocks, part._replace(guarded=True))
        # Without masks, NaN and infinity propagate by themselves, if no product mixes
        # heads.
        return _entries(blocks._replace(block_diagonal=False), part)

    if wide is None:
        results = _entries(blocks, part)
    else:
        most_seen = _seen(blocks, part, key.shape[-3]).mean() > 0.5
        results = lax.cond(
            most_seen, lambda: _entries(wide, part), lambda: _entries(blocks, part)
        )
    if masks or blocks.block_diagonal or wide is not None:
        results = lax.cond(jnp.isfinite(results[0]).all(), lambda: results, again)
    return results


def _entries(blocks: KeyBlocks, part: BatchSlice) -> Results:
    """Computes all batch entries; if `blocks.sequential`, in a loop, so that each reads
    only the keys that it needs.
    """
    batch = part.query.shape[:-4]
    if not blocks.sequential:
        return _blocks_of_rows(blocks, part)

    def one_entry(i: Int[Array, ""]) -> Results:
        place = jnp.unravel_index(i, batch)
        arrays = part.query, part.query_scale, part.inputs, part.rule
        query, scale, inputs, rule = _of_entry(arrays, place)
        own = part._replace(
            first=place, query=query, query_scale=scale, inputs=inputs, rule=rule
        )
        return _blocks_of_rows(blocks, own)

    answers = lax.map(one_entry, jnp.arange(math.prod(batch), dtype=jnp.int32))
    return jax.tree.map(
        lambda x: x.reshape(*batch, *x.shape[len(batch) + 1 :]), answers
    )


def _of_entry(tree: Any, place: tuple[Array, ...]) -> Any:
    """Returns `tree` with only the batch entry at indices `place` of each array; batch
    axes then have length 1.
    """

    def own(x: Array) -> Array:
        for axis, i in enumerate(place):
            x = x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, i, 1, axis)
        return x

    return jax.tree.map(own, tree)


def _blocks_of_rows(blocks: KeyBlocks, part: BatchSlice) -> Results:
    """Computes attention for the queries of `part`, `blocks.height` of them at a time,
    which limits memory.
    """
    length = part.query.shape[-2]
    axis = part.query.ndim - 2
    if length <= blocks.height:
        return _rows(blocks, part)

    def rows(row: Scalar) -> Results:
        query = lax.dynamic_slice_in_dim(part.query, row, blocks.height, axis)
        return _rows(blocks, part._replace(query=query, row=row))

    return by_blocks(rows, length, blocks.height, axis)


def _rows(blocks: KeyBlocks, part: BatchSlice) -> Results:
    """Computes one block of queries, in a loop over the blocks of keys that may hold
    visible keys.
    """
    shape = (*part.query.shape[:-2], blocks.height)
    value_size = blocks.value_size or part.value.shape[-1]
    state = OnlineSoftmax.start(
        shape, value_size, part.inputs.sink, part.rule.dtype, part.rule.returns_max
    )
    state = varying_as(part.query, state)
    step = functools.partial(_step, blocks, part)
    if blocks.unconditional:
        return step(0, state).finish()
    begin, end = _visited(blocks, part, part.key.shape[-3])
    if blocks.whole:
        # Not a loop: XLA (jax 0.10) would fuse reading with writing new keys, outside
        # of it, and copy the cache.
        return lax.cond(begin < end, lambda: step(0, state), lambda: state).finish()
    return lax.fori_loop(jnp.int32(begin), jnp.int32(end), step, state).finish()


def _step(
    blocks: KeyBlocks, part: BatchSlice, i: Scalar, carry: OnlineSoftmax
) -> OnlineSoftmax:
    """Adds block `i` of the keys to `carry`, the state of the online softmax, and
    returns the new state.
    """
    length = part.key.shape[-3]
    dtype = part.query.dtype
    # The last block ends at the last key.
    column = jnp.minimum(i * blocks.width, length - blocks.width)
    keys, v, scales, flags = _read_block(blocks, part, column)

    def one_head(own: tuple) -> tuple[OnlineSoftmax, Array]:
        products, query_scale, scales, inputs, rule, flags, state = own
        if query_scale is None:
            products = products
        else:
            products = [x * query_scale for x in products]
        if scales is not None:
            products = [
                x * scale[None, :] for x, scale in zip(products, scales, strict=False)
            ]
        product = sum(products[1:], products[0])
        tile = Tile(
            part.row,
            column,
            (blocks.height, blocks.width),
            rule.offsets.values,
            ring=rule.ring,
        )
        # Infinite products become NaN: -inf would get the weight 0. NaN is added twice,
        # as `score_mod` may hide it.
        poison = product * 0
        s = rule.tile(
            product + poison,
            inputs.cut(tile),
            tile,
            poison if flags is None else poison + flags[None],
        )
        # Then the last block begins with keys of the block before it.
        if length % blocks.width:
            s = jnp.where(tile.columns >= i * blocks.width, s, -jnp.inf)
        state, weights = state.rescale(s, None, dtype if scales is None else None)
        weights = times(weights, rule.dropout_multiplier(tile, s.dtype))
        weights = weights if scales is None else weights * scales[1][None, :]
        return state, weights.astype(dtype)

    products = [
        _key_products(part.query[..., features], k, part.rule, blocks.block_diagonal)
        for features, k in zip(_scaled_features(blocks), keys, strict=True)
    ]
    operands = (
        products,
        part.query_scale,
        scales,
        part.inputs,
        part.rule,
        flags,
        carry,
    )
    state, weights = map_heads(one_head, operands, part.query.ndim - 2)
    of_values = _value_products(weights, v, part.rule, blocks.block_diagonal)
    return state._replace(output=state.output + of_values)


def _read_block(
    blocks: KeyBlocks, part: BatchSlice, column: Scalar
) -> tuple[list[Array], Array, list[Array] | None, Float[Array, "*B K 1 s"] | None]:
    """Reads the block of keys that begins at key `column`: returns its keys, values,
    scales and flags.

    The keys are one array or, if keys hold the values (`blocks.value_size`), two: the
    features after the values, then the values. The scales of a cache in 8 bits are two
    arrays, of keys and of values, else None. Flags are None unless `part.guarded`; then
    a flag is infinity if the key or its value was not finite and became zeros, else 0.
    """
    groups = (part.key.shape[-2], 1)
    scale = None
    flags = None
    read = functools.partial(_block, part=part, column=column, width=blocks.width)
    keys = [
        read(part.key, features, dtype=part.query.dtype)
        for features in _scaled_features(blocks)
    ]
    if blocks.value_size is None:
        v = read(part.value, slice(None), dtype=part.query.dtype)
    else:
        v = keys[1]
    if part.cache_scale is not None:
        scale = read(part.cache_scale, slice(None), dtype=part.rule.dtype)
    if part.guarded:
        if scale is None:
            keys[0], v, of_keys = guard.zero_keys(keys[0], v)
        # Numbers in 8 bits are finite; a key or value that was not finite has a scale
        # of NaN.
        else:
            of_keys = guard.flag(scale)
            scale = guard.zero(scale, of_keys)
        flags = vectors_by_head(of_keys.astype(part.rule.dtype), groups)
    if scale is None:
        return keys, v, None, flags
    # Without the barrier, XLA's CPU would read all scales again, with a stride of 2, in
    # every use of one.
    scales = lax.optimization_barrier(
        [vectors_by_head(scale[..., i], groups) for i in (0, 1)]
    )
    return keys, v, scales, flags


def _scaled_features(blocks: KeyBlocks) -> list[slice]:
    """Lists slices of a key, each with its own scale: all or, if keys hold values,
    [value_size:] and [:value_size].
    """
    number = blocks.value_size
    if number is None:
        return [slice(None)]
    return [slice(number, None), slice(number)]


def _block(
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
    bits = BITS.get(x.dtype.name) if platform() == "cpu" else None
    has_8_bits = x.dtype.itemsize == 1
    batch, (length, num_heads, size) = part.query.shape[:-4], x.shape[-3:]

    def convert(block: Array) -> Array:
        if has_8_bits:
            return as_floats(block, dtype)
        return lax.bitcast_convert_type(block, x.dtype).astype(dtype)

    if width == length and batch == x.shape[:-3] and not (has_8_bits and bits):
        return convert(x[..., features])
    start = [jnp.asarray(i, jnp.int32) for i in (*part.first, column, 0, 0)]
    shape = (*batch, width, num_heads, size)

    def read() -> Array:
        block = x if bits is None else lax.bitcast_convert_type(x, bits)
        return convert(
            lax.dynamic_slice(block, start, shape, allow_negative_indices=False)[
                ..., features
            ]
        )

    if bits is None:
        return read()
    # XLA's CPU converts an array before it cuts a part out, and so would convert all
    # keys before the loop. It moves nothing out of a branch of `lax.cond`, if it does
    # not know that this branch is always taken.
    nothing = varying_as(x, jnp.zeros(shape, dtype)[..., features])
    always = lax.optimization_barrier(start[-3]) >= 0
    return lax.cond(always, read, lambda: nothing)


def _visited(
    blocks: KeyBlocks, part: BatchSlice, num_keys: int
) -> tuple[Scalar, Scalar]:
    """Returns the range of key blocks to read, as first and end (exclusive); all
    visible keys are in it.
    """
    some = _seen(blocks, part, num_keys)
    some = some.any(range(some.ndim - 1))
    before, after = (jnp.argmax(x).astype(jnp.int32) for x in (some, some[::-1]))
    return before, jnp.where(some.any(), some.size - after, 0)


def _seen(
    blocks: KeyBlocks, part: BatchSlice, num_keys: int
) -> Bool[Array, "*#B #K #G count"]:
    """Returns, for each block of keys, whether any query of `part` may attend to a key
    in it.
    """
    rule = part.rule
    count = -(-num_keys // blocks.width)
    if rule.ring is not None:  # in a ring cache, all slots that have been written
        newest = jnp.asarray(rule.offsets.values[1])
        return jax.vmap(lambda first: first <= newest, out_axes=-1)(
            jnp.arange(count, dtype=newest.dtype) * blocks.width
        )
    mask = _bounds(rule.mask)
    if mask is None:
        return jnp.ones((count,), bool)

    def one_head(own: tuple) -> Bool[Array, " count"]:
        mask, offsets = own
        first, first_key = offsets.values
        grid = Grid(
            (1, count), (blocks.height, blocks.width), (first + part.row, first_key)
        )
        return jnp.broadcast_to(mask.occupancy(grid).any_visible, (1, count))[0]

    return map_heads(one_head, (mask, rule.offsets), part.query.ndim - 2)


def _bounds(mask: Mask | None) -> Mask | None:
    """Returns the causal, window and length masks in `mask`, which limit the keys to
    read; None if it has none.
    """
    return merged(
        [
            part
            for part in conjuncts(mask)
            if part.window is not None or isinstance(part, LengthMask)
        ]
    )


def _key_products(
    query: Float[Array, "*B K G t H"],
    key: Float[Array, "*B s K H"],
    rule: ScoreRule,
    block_diagonal: bool,
) -> Float[Array, "*B K G t s"]:
    """Computes products of queries and keys, by one matrix product for all heads if
    `block_diagonal`.
    """
    *batch, num_heads, _, _, size = query.shape

    def product(pair: tuple[Array, Array]) -> Array:
        query, key = pair
        if query.dtype != rule.dtype:  # of 16 bits
            return rule.dot(query, key, transpose_b=True)
        # In the other order, or without the barrier, XLA would transpose the keys.
        return lax.optimization_barrier(rule.dot(key, query, transpose_b=True)).T

    if not block_diagonal:
        return map_heads(
            product, (query, split_heads(key, (num_heads, 1))), len(batch) + 2
        )
    rows = jnp.where(
        jnp.eye(num_heads, dtype=bool)[:, None, None, :, None], query[..., None, :], 0
    )
    # Not -1: there may be no features.
    rows = rows.reshape(*batch, math.prod(query.shape[-4:-1]), num_heads * size)
    products = map_heads(
        product, (rows, key.reshape(*key.shape[:-2], num_heads * size)), len(batch)
    )
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
        return rule.dot(*pair)

    if not block_diagonal:
        return map_heads(
            product, (weights, split_heads(value, (num_heads, 1))), len(batch) + 2
        )
    of_all = map_heads(
        product,
        (weights.reshape(*batch, -1, length), value.reshape(*value.shape[:-2], -1)),
        len(batch),
    )
    of_all = of_all.reshape(*weights.shape[:-1], num_heads, -1)
    return jnp.where(
        jnp.eye(num_heads, dtype=bool)[:, None, None, :, None], of_all, 0
    ).sum(-2)
