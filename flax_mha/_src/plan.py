"""Chooses how an engine computes a call: dense or in tiles, tile shapes, loops over
heads, dtypes of products.

These choices change results only by rounding. The numbers below were measured on CPUs;
those for GPUs and TPUs were counted in compiled programs (`benchmarks/compiled.py`).
Only how a GPU reads a cache in place was also timed, on an H200. What each choice is
worth that reads a cache on a CPU: `benchmarks/results/cache-knobs-cpu.md`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha._src.call.call import DEFAULT_PRECISION, Call
from flax_mha._src.core.tracing import (
    being_traced,
    is_key,
    multiplies_bfloat16,
    readable,
)
from flax_mha._src.masks import Mask
from flax_mha._src.masks.function import store_occupancy
from flax_mha._src.math import tiling as tilings
from flax_mha._src.math.head import mask_by_head, one_of
from flax_mha._src.math.tiling import (
    BlockMask,
    TileShape,
    Tiling,
    static_block_mask,
    tiles_of,
    tiling_of,
)

# The first two fields of a `Target`, `platform` and `may_be_split`, for one CPU and one
# TPU.
ON_ONE_CPU = ("cpu", False)
ON_ONE_TPU = ("tpu", False)

# GPU: up to this many scores of all heads, 1 GiB of float32, are computed at once.
# Counted in bytes and launches, tiles gain next to nothing then, even with a window: a
# tile launches some 25 kernels.
MAX_SCORES_GPU = 2**28
# TPU: the heads that run together have at most this many scores in memory. Then a step
# over tiles stays in the fast memory of a v5e: with eight times as many, it moves 2.2
# GiB instead of 8 x 32 MiB.
MAX_SCORES_TPU = 64 * 512 * 512

# CPU: up to this many scores of a head, T * S, dense attention is about as fast as
# tiles, and compiles faster. Up to this many in a head or a tile, XLA compiles product,
# softmax and product into one kernel.
MAX_SCORES_DENSE = 256 * 256
# That kernel is fast if all heads together have at least this many scores, 2 MiB in
# float32.
MIN_SCORES_FUSED_IN_ALL = 512 * 1024
# Tile shapes to choose from: large enough for fast matrix products, small enough for
# the caches. The first is used for masks that are not known while tracing, and on
# accelerators. Up to 704 keys, a tile of 2 MiB holds whole rows.
TILE_SHAPES = (
    TileShape(512, 512),
    TileShape(1024, 512, 2),
    TileShape(2048, 512, 4),
    TileShape(704, 704),
    TileShape(256, 512),
    TileShape(128, 128),
)
# The cost of a tile of n scores on a CPU, in units of one score of a large tile. XLA
# uses all cores for matrix products of at least PARALLEL multiplications (n times the
# head size): such a tile costs n + STEP, a smaller one SERIAL * n. In partial tiles, n
# is multiplied by MASKED.
PARALLEL = 2**23
STEP = 24 * 1024
SERIAL = 2
MASKED = 1.15
# If a mask differs between heads, the costs are added up for this many heads.
EXAMPLES = 4
# CPU: all batch entries and heads are vmapped if a head holds at most this many scores
# in memory at a time.
MAX_SCORES_ALL_HEADS = 128 * 128
# Otherwise, the heads of one batch entry are vmapped if a head holds at most this many
# scores, and all heads of the entry at most the second number.
MAX_SCORES_ONE_ENTRY = 512 * 512
MAX_SCORES_ONE_ENTRY_IN_ALL = 8 * 512 * 512

# CPU: keys are read in place from caches, and for few queries over many keys.
MAX_QUERIES_IN_PLACE = 16  # most queries, without a cache
MIN_KEYS_IN_PLACE = 512  # fewest keys, without a cache
MAX_HEIGHT_IN_PLACE = 128  # most queries in a block
MAX_NUMBERS_IN_PLACE = 64 * 1024  # most numbers in a block's keys and values, all heads
MIN_WIDTH_IN_PLACE = 64  # fewest keys in a block
MAX_WIDTH_IN_PLACE = 512  # most keys in a block
# Blocks are wider if products are in bfloat16, if the cache has 8 bits, or if most
# blocks hold a visible key.
MAX_BYTES_WIDE = 2 * 2**20  # most bytes of its keys and values, in the products' dtype
MAX_SCORES_WIDE = 64 * 1024  # most scores of one batch entry in such a block
# One block-diagonal product may serve all heads (`in_place.py`). K * T * N measures its
# work.
MAX_JOINT_ROWS = 128  # most K * T * N of a block
MAX_JOINT_ROWS_WHOLE = 1024  # most K * T * N if all keys are one block
MAX_SCORES_WHOLE = 256 * 1024  # most scores, B * T * N * S, if all keys are one block
# Up to this many numbers in keys and values, 512 KiB in float32, all keys are one block
# however many are visible: a step over such a cache compiles in half the time. If an
# output is not finite, the second pass holds a copy of them.
MAX_NUMBERS_WHOLE = 128 * 1024
# Most keys in a block on accelerators, which compute all batch entries together.
MAX_WIDTH_ACCELERATOR = 4096


class KeyBlocks(NamedTuple):
    """How attention that reads keys in place (`in_place.py`) loops over blocks of
    queries and keys.
    """

    height: int  # queries in a block
    width: int  # keys in a block
    # Whether batch entries run one after another, each over the blocks that it needs,
    # or together.
    sequential: bool
    block_diagonal: bool = False  # whether one matrix product serves all heads
    # The blocks to use if more than half of these, over all heads, hold a visible key;
    # None: always these.
    wide: "KeyBlocks | None" = None
    # Whether the only block is read without asking whether it holds a visible key.
    unconditional: bool = False

    def is_only_block(self, keys: int) -> bool:
        """Returns whether one block holds the `keys` keys of all batch entries."""
        return self.width == keys and not self.sequential

    def fitting(self, keys: int, scores: int, numbers: int) -> "KeyBlocks":
        """Returns the blocks for the sizes that the call has once `jax.vmap` has added
        batch axes: the number of all scores, and of all numbers in keys and values.

        If `wide` is one block of all keys, too many scores drop it, and few numbers
        make it the only choice, however many keys are visible.
        """
        if self.wide is None or not self.wide.is_only_block(keys):
            return self
        if scores > MAX_SCORES_WHOLE:
            return self._replace(wide=None)
        if numbers <= MAX_NUMBERS_WHOLE:
            return self.wide
        return self


class Plan(NamedTuple):
    """How an engine computes a call. `Engine.plan` makes it once for a call; it is
    hashable, and never changes.
    """

    dtype: jnp.dtype  # of the operands of matrix products
    # Whether `guard.guard` makes keys and values finite before the engine gets them.
    guard_first: bool = True
    # Number of leading axes [B..., K, G] over which `map_heads` loops; it vmaps the
    # others. "blockwise" also loops over axes along which heads visit different tiles.
    # None: no loops at all, as on accelerators and if arrays may be split between
    # devices.
    looped_axes: int | None = 0
    # Most heads that `map_heads` vmaps at a time; None sets no limit, as on CPUs and
    # GPUs.
    max_heads: int | None = None
    # Whether XLA's CPU backend compiles `rows_of` of a head or a tile to one kernel.
    fuses_rows: bool = False
    # The tiles of one head; None for engines without tiles.
    tiling: Tiling | None = None
    # The blocks that "xla" reads in place; None computes all scores at once.
    in_place: KeyBlocks | None = None
    # Queries whose keys "xla" gathers at a time, if queries list keys.
    gathered: int | None = None

    @property
    def variant(self) -> str | None:
        """The algorithm that the plan chooses for "xla", in words, for explanations;
        None if the plan has tiles.
        """
        if self.tiling is not None:
            return None
        if self.gathered is not None:
            return "keys gathered for each query"
        if self.in_place is not None:
            return "keys read in place"
        return "all scores at once"


def plan_xla(call: Call) -> Plan:
    """Plans a call for "xla", which gathers the keys in `key_indices`, reads keys in
    place, or computes all scores.
    """
    if call.key_indices is not None:
        return _plan_gathered(call, call.key_indices.shape[-1])
    blocks = blocks_in_place(call)
    if blocks is not None:
        dtype = _dtype_in_place(call)
        return Plan(dtype, guard_first=False, in_place=blocks)
    scores = math.prod(call.lengths)
    looped_axes, max_heads = _loops(call, scores)
    if _is_plain_and_small(call, scores):
        # XLA may compile such a call to one kernel (MAX_SCORES_DENSE), which is faster
        # in a batch: 64 heads of 256 x 256 scores took 8.4 ms, and 15.0 ms in a loop.
        looped_axes = 0
    return Plan(
        dtype=product_dtype(call, tiles=False),
        looped_axes=looped_axes,
        max_heads=max_heads,
        fuses_rows=_fuses_rows(call, scores),
    )


def _plan_gathered(call: Call, count: int) -> Plan:
    """Plans a call in which each query lists `count` keys (`key_indices`): chooses how
    many queries form a block.

    A block gathers about as many keys as the call has. Then memory is linear in the
    number of keys, and adding up the gradients of keys from all blocks takes no longer
    than gathering the keys.
    """
    queries, keys = call.lengths
    dtype = product_dtype(call, tiles=False)
    if not call.has_known_sizes:
        # Symbolic sizes: all queries in one block.
        return Plan(dtype, guard_first=False, looped_axes=None, gathered=queries)
    height = max(keys // count, MAX_QUERIES_IN_PLACE)
    height = min(queries, height)
    looped_axes, max_heads = _loops(call, height * count)
    if looped_axes is not None:
        # Heads that share a key head gather its keys together.
        batch_and_key_heads = call.query.ndim - 2
        looped_axes = min(looped_axes, batch_and_key_heads)
    return Plan(
        dtype=dtype,
        guard_first=False,
        looped_axes=looped_axes,
        max_heads=max_heads,
        gathered=height,
    )


def plan_tiles(call: Call) -> tuple[Plan, Call]:
    """Returns a plan in tiles, and the call with the tiles to visit and the occupancy
    of `mask_mod`s, if known now.
    """
    # A mask without arrays computes its occupancy by itself.
    if jax.tree.leaves(call.mask) and call.offsets.are_known:
        numbers = call.offsets.numbers
        mask = store_occupancy(call.mask, call.lengths, numbers, tilings.CELL)
        call = call.replace(mask=mask)
    on_cpu = call.target.platform == "cpu"
    shapes = TILE_SHAPES if on_cpu else TILE_SHAPES[:1]
    tiling, tiles = choose_tiles(call, shapes)
    scores = tiling.height * tiling.width
    looped_axes, max_heads = _loops(call, scores)
    plan = Plan(
        dtype=product_dtype(call, tiles=True),
        looped_axes=looped_axes,
        max_heads=max_heads,
        fuses_rows=_fuses_rows(call, scores, tiling.rows),
        tiling=tiling,
    )
    return plan, call.replace(tiles=tiles)


def choose_tiles(
    call: Call, shapes: tuple[TileShape, ...]
) -> tuple[Tiling, BlockMask | None]:
    """Chooses the cheapest tiling with one of `shapes`, and lists the tiles to visit.

    If mask or offsets are not known, chooses the first shape. The list is made here
    only if JAX is tracing and the mask's arrays are concrete. Otherwise it is None, and
    made later: at trace time without arrays (`block_mask_of_one`), at run time with
    them (`dynamic_block_mask`).
    """
    lengths = call.lengths
    offsets = call.offsets
    head_size = product_size(call)
    arrays = jax.tree.leaves(call.mask)
    if offsets.are_known and not arrays:
        tiling = _cheapest_of_one(
            call.mask, lengths, offsets.numbers, shapes, head_size
        )
        return tiling, None
    # Outside of a trace, every call would read the mask again.
    is_readable = all(map(readable, arrays)) and call.query.size > 0
    if not offsets.are_known or not is_readable or not being_traced():
        return tiling_of(lengths, shapes[0]), None

    masks, head_axes = _masks_of_heads(call)  # one for each distinct head
    step = max(1, -(-len(masks) // EXAMPLES))
    examples = masks[::step]
    tiling = _cheapest(examples, lengths, offsets.numbers, shapes, head_size)
    tiles = static_block_mask(tiling, masks, offsets.numbers)
    tiles = jax.tree.map(lambda x: x.reshape(*head_axes, *x.shape[1:]), tiles)
    return tiling, tiles


def _masks_of_heads(call: Call) -> tuple[list[Mask], tuple[int, ...]]:
    """Lists the masks of all heads, as NumPy arrays, and the sizes of their axes
    [B..., K, G].

    An axis along which heads share a mask has the size 1.
    """
    concrete = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), call.mask)
    batch_rank = len(call.batch)
    mask = mask_by_head(concrete, batch_rank, call.groups)
    num_axes = batch_rank + 2  # B..., K and G
    shapes_of_axes = [x.shape[:num_axes] for x in jax.tree.leaves(mask)]
    head_axes = np.broadcast_shapes(*shapes_of_axes)
    return [one_of(mask, place) for place in np.ndindex(head_axes)], head_axes


def product_size(call: Call) -> int:
    """Returns the number of multiplications per score in a matrix product: the larger
    head size, H or Hv.
    """
    return max(call.query.shape[-1], call.value.shape[-1])


def _cheapest(
    masks: Sequence[Mask | None],
    lengths: tuple[int, int],
    offsets: tuple[int, int],
    shapes: Sequence[TileShape],
    head_size: int,
) -> Tiling:
    """Returns the tiling that costs the least for the `masks` of some heads, with one
    of the tile `shapes`.
    """
    candidates = [tiling_of(lengths, shape, fine=True) for shape in shapes]
    costs = []
    with jax.ensure_compile_time_eval():
        for candidate in candidates:
            of_masks = [_cost(candidate, mask, offsets, head_size) for mask in masks]
            costs.append(sum(of_masks))
    return candidates[int(np.argmin(costs))]


# Cached for masks without arrays: all layers of a model, and all traces of its training
# step, need the same tiling.
@functools.lru_cache(maxsize=256)
def _cheapest_of_one(mask: Mask | None, *context: Any) -> Tiling:
    return _cheapest((mask,), *context)


def _cost(
    candidate: Tiling, mask: Mask | None, offsets: tuple[int, int], head_size: int
) -> float:
    """Returns what a head with this mask costs, in units of one score of a large tile;
    see `PARALLEL`.
    """
    tiles = tiles_of(candidate, mask, offsets)
    height = tiles.band[..., 1] - tiles.band[..., 0]
    number = np.arange(height.shape[1])
    is_full = number < tiles.num_full[:, None]
    is_tile = number < tiles.num_tiles[:, None]
    scores = height * candidate.width
    scores = np.where(is_full, scores, MASKED * scores)
    is_parallel = scores * head_size >= PARALLEL
    cost = np.where(is_parallel, scores + STEP, SERIAL * scores)
    return float(cost[is_tile].sum())


def is_memory_bound(call: Call) -> bool:
    """Returns whether reading the keys takes most of the time, for example in decoding:
    then "xla" is the fastest.
    """
    if reads_in_place(call):
        return True
    return call.has_known_sizes and call.query.shape[-3] == 1


def prefers_dense(call: Call) -> bool:
    """Returns whether "xla" is faster than "blockwise", or sizes are symbolic, which
    "blockwise" does not support.
    """
    scores = math.prod(call.lengths)
    if not call.has_known_sizes or scores <= MAX_SCORES_DENSE:
        return True
    scores_of_all_heads = _number_of_heads(call) * scores
    return call.target.platform == "gpu" and scores_of_all_heads <= MAX_SCORES_GPU


def _number_of_heads(call: Call) -> int:
    """Returns the number of query heads in all batch entries, B * N."""
    *batch, _, num_heads, _ = call.query.shape
    return math.prod(batch) * num_heads


def _fuses_rows(call: Call, scores: int, rows: int = 1) -> bool:
    """Returns whether XLA's CPU backend compiles `rows_of` to one fast kernel that
    writes no score to memory.

    `scores` counts the scores of one tile, and `rows` the tiles of a head that run
    together. Dense attention computes a head as one tile.
    """
    if not _is_plain_and_small(call, scores):
        return False
    scores_in_all = _number_of_heads(call) * rows * scores
    # Matrix products that use all cores are faster outside of that kernel.
    is_parallel = scores * product_size(call) >= PARALLEL
    return scores_in_all >= MIN_SCORES_FUSED_IN_ALL and not is_parallel


def _is_plain_and_small(call: Call, scores: int) -> bool:
    """Returns whether a call is a plain softmax on one CPU, with at most
    MAX_SCORES_DENSE `scores` in a head or a tile.
    """
    if not call.has_known_sizes or call.target[:2] != ON_ONE_CPU:
        return False
    # Only the output of a plain softmax becomes one kernel.
    changes_weights = call.score_mod is not None or call.dropout_rng is not None
    returns_more = call.return_residual or call.return_max_score
    if changes_weights or returns_more:
        return False
    return scores <= MAX_SCORES_DENSE


def reads_in_place(call: Call) -> bool:
    """Returns whether "xla" reads keys and values [B..., S, K, H] where they are,
    instead of copying them head by head.

    "xla" does so for a cache (`Call.cached`) if no implementation is named, and on a
    CPU for few queries, many keys.
    """
    if not call.has_known_sizes or call.key_indices is not None:
        return False
    is_empty = not all(x.size for x in call.inputs)
    if is_empty:
        return False
    if call.has_custom_vjp:
        # `in_place.py` has a rule for jax.jvp, which cannot differentiate a custom_vjp.
        return False
    if call.cached:
        return True
    queries, keys = call.lengths
    is_few_to_many = queries <= MAX_QUERIES_IN_PLACE and keys >= MIN_KEYS_IN_PLACE
    return is_few_to_many and call.target.platform == "cpu"


def blocks_in_place(call: Call) -> KeyBlocks | None:
    """Chooses the blocks of keys that are read in place; None if all scores are
    computed at once.
    """
    if not reads_in_place(call):
        return None
    if call.target.platform == "cpu":
        return _blocks_on_cpu(call)
    return _blocks_on_accelerator(call)


def _blocks_on_accelerator(call: Call) -> KeyBlocks:
    queries, keys = call.lengths
    height = min(queries, MAX_HEIGHT_IN_PLACE)
    width = MAX_WIDTH_ACCELERATOR
    if call.cache_scale is not None:
        width = MAX_WIDTH_IN_PLACE  # 8 bits are converted
    blocks = KeyBlocks(
        height=height,
        width=min(keys, width),
        sequential=False,
    )
    if call.target.platform != "gpu":
        return blocks
    return blocks._replace(
        # Without a block-diagonal product, XLA transposes the whole cache.
        block_diagonal=height * call.num_heads <= MAX_JOINT_ROWS,
        # A GPU waits for the host at every condition.
        unconditional=keys <= width,
    )


def _blocks_on_cpu(call: Call) -> KeyBlocks | None:
    queries, keys = call.lengths
    num_kv_heads, _ = call.groups
    height = min(queries, MAX_HEIGHT_IN_PLACE)
    is_sequential = not call.target.may_be_split
    dtype = _dtype_in_place(call)

    # The most keys of a wide block, not yet rounded.
    widest = min(
        MAX_BYTES_WIDE // dtype.itemsize // _numbers_per_key(call),
        MAX_SCORES_WIDE // (queries * call.num_heads),
    )
    width = _width_on_cpu(call, dtype, widest)
    width = min(width // 64 * 64, MAX_WIDTH_IN_PLACE)
    width = max(MIN_WIDTH_IN_PLACE, width)
    width = min(keys, width)

    if keys % width and not call.masks_scores(call.bias):
        return None  # the last block would have to mask some of its keys
    blocks = KeyBlocks(
        height=height,
        width=width,
        sequential=is_sequential,
    )
    if not is_sequential:
        return blocks
    joint_rows = num_kv_heads * height * call.num_heads
    blocks = blocks._replace(block_diagonal=joint_rows <= MAX_JOINT_ROWS)
    return blocks._replace(wide=_wide_blocks(call, blocks, dtype, widest))


def _numbers_per_key(call: Call) -> int:
    """Counts the numbers in one key and its value, in all key heads."""
    key = call.key
    return key.shape[-2] * (key.shape[-1] + call.value.shape[-1])


def _width_on_cpu(call: Call, dtype: jnp.dtype, widest: int) -> int:
    """Chooses how many keys a block has, not yet rounded; for products in `dtype`.

    `widest` is the most keys of a wide block, see MAX_BYTES_WIDE.
    """
    is_sequential = not call.target.may_be_split
    has_8_bits = call.cache_scale is not None
    if is_sequential and (has_8_bits or dtype != call.dtype):
        # Keys that are converted, or multiplied in fewer bits, take fewer and larger
        # blocks.
        return widest
    if has_8_bits:
        return 2 * MAX_NUMBERS_IN_PLACE // _numbers_per_key(call)
    return MAX_NUMBERS_IN_PLACE // _numbers_per_key(call)


def _wide_blocks(
    call: Call, blocks: KeyBlocks, dtype: jnp.dtype, widest: int
) -> KeyBlocks | None:
    """Chooses larger blocks, of all keys or at most `widest`, to use if most of
    `blocks` hold a visible key; None: use `blocks`.
    """
    queries, keys = call.lengths
    num_kv_heads, _ = call.groups
    scores = _number_of_heads(call) * queries * keys
    joint_rows = queries * call.num_heads * num_kv_heads
    is_small = scores <= MAX_SCORES_WHOLE and joint_rows <= MAX_JOINT_ROWS_WHOLE
    is_one_block = is_small and queries <= MAX_HEIGHT_IN_PLACE
    # Keys of another dtype would all have to be converted at once.
    if is_one_block and call.key.dtype == dtype:
        return blocks._replace(width=keys, sequential=False, block_diagonal=True)
    has_8_bits = call.cache_scale is not None
    entries = math.prod(call.batch)
    # One after the other, entries take 1.2 times as long.
    if has_8_bits and widest >= 2 * keys and entries > 1:
        width = max(MIN_WIDTH_IN_PLACE, widest // entries // 64 * 64)
        return blocks._replace(width=min(width, keys), sequential=False)
    width = min(widest, keys) // 64 * 64
    gains = has_8_bits or num_kv_heads == 1
    if gains and width > blocks.width:
        return blocks._replace(width=width)
    return None


def _dtype_in_place(call: Call) -> jnp.dtype:
    """Chooses the dtype of matrix products with keys that are read in place on one CPU
    or on GPUs.

    The dtype is bfloat16 if the device multiplies bfloat16, queries are bfloat16, and
    keys and values have bfloat16 or 8 bits. Products are then scaled instead of
    queries, so only weights are rounded. That makes the log-sum-exp less exact. So if
    the call returns it, or asks for more precision than the default, the dtype is
    `call.dtype`.
    """
    if call.return_residual or not _may_round(call):
        return call.dtype
    platform = call.target.platform
    is_one_cpu = call.target[:2] == ON_ONE_CPU
    is_fast = platform == "gpu" or (is_one_cpu and multiplies_bfloat16(platform))
    has_8_bits = call.cache_scale is not None
    dtypes = {call.query.dtype}
    if not has_8_bits:
        dtypes |= {call.key.dtype, call.value.dtype}
    if is_fast and dtypes == {jnp.dtype(jnp.bfloat16)}:
        return call.query.dtype
    return call.dtype


def product_dtype(call: Call, tiles: bool) -> jnp.dtype:
    """Chooses the dtype in which query, key, value and weights enter matrix products;
    sums are float32 at least.

    A query's dtype of 16 bits is kept on accelerators, where it makes products faster,
    unless gradients in float16 could overflow. Calls on CPUs, and calls with more
    precision than the default, use `call.dtype`. `tiles`: whether the call is computed
    tile by tile.
    """
    dtype = call.query.dtype
    wide = call.dtype
    # XLA's CPU lacks some products of bfloat16 in gradients, even with AMX:
    # "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
    is_on_cpu = call.target.platform == "cpu"
    if is_on_cpu or dtype.itemsize > 2 or not _may_round(call):
        return wide
    # Some gradients reach the dtype of products before the scale makes them smaller,
    # and may overflow in float16: without tiles those of the weights, and those of
    # queries that were scaled before the products.
    rounds_before_scale = not tiles or call.scale_array is not None
    if dtype == jnp.float16 and rounds_before_scale:
        return wide
    return dtype


def _may_round(call: Call) -> bool:
    """Returns whether operands of products may have 16 bits: neither the call nor JAX's
    config raises the precision.
    """
    of_jax = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return call.precision in DEFAULT_PRECISION and of_jax in DEFAULT_PRECISION


def _loops(call: Call, scores: int) -> tuple[int | None, int | None]:
    """Chooses `Plan.looped_axes` and `Plan.max_heads`, so that the scores computed
    together fit in fast memory.

    `scores` counts the scores of one head that are in memory at a time.
    """
    target = call.target[:2]
    has_known_sizes = call.has_known_sizes
    if target == ON_ONE_TPU and has_known_sizes:
        max_heads = MAX_SCORES_TPU // max(scores, 1)
        return None, max(max_heads, 1)
    if target != ON_ONE_CPU or not has_known_sizes:
        # A GPU computes all heads together, and a mesh may split them.
        return None, None
    if scores <= MAX_SCORES_ALL_HEADS:
        return 0, None
    num_axes = call.query.ndim - 1  # [B..., K, G]
    fits = (
        scores <= MAX_SCORES_ONE_ENTRY
        and call.num_heads * scores <= MAX_SCORES_ONE_ENTRY_IN_ALL
    )
    if fits:
        return num_axes - 2, None
    return num_axes, None
