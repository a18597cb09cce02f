"""TPU attention through the splash attention kernels that come with jax, where they give our result.

What hides by position alone becomes a mask that the kernel computes, and skips tiles by; lengths and segments become
its segment ids. Around the kernel our meanings are kept: a query that sees nothing answers 0, and what hidden keys
hold reaches nothing.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jaxtyping import Array, Bool, Float, Int

from flax_mha._call import Call, Operands, Options, finite_keys, platform, sharded
from flax_mha._impl import fused
from flax_mha._impl.fused import Visible

DTYPES = (jnp.float32, jnp.bfloat16)
# In float32 with all that there is to hide, twice this no longer compiles for TPU v4: 16 MiB hold the tiles.
LARGEST_HEAD = 256
# A megabyte of scalar memory holds three bytes for each.
MOST_TILES = 512 * 512
# Rows and columns of a tile; lengths are padded to multiples of them.
TILES = (512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Band(splash_masks.Mask):
    """Keys from `left` before the query to `right` after it, and none of the padding behind `keys`.

    Like splash's own masks, but asked for a tile that is one value throughout it answers that one value: building the
    kernel for 32768 queries and keys then takes 0.1 s instead of 6 to 11.
    """

    size: tuple[int, int]
    left: int | None
    right: int | None
    keys: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole mask."""
        return self.size

    @property
    def q_sequence(self) -> np.ndarray:
        """The queries' positions, which the kernel hands to `mask_function`."""
        return np.arange(self.size[0], dtype=np.int32)

    def mask_function(self, rows: Any, columns: Any) -> Any:
        """What is visible, inside the kernel."""
        visible = columns < self.keys
        if self.left is not None:
            visible = visible & (columns >= rows - self.left)
        if self.right is not None:
            visible = visible & (columns <= rows + self.right)
        return visible

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(side.start, side.stop, dtype=np.int32) for side in tile)
        # The corners that see furthest back and ahead: between them lies all of the tile.
        if self.mask_function(rows[-1], columns[0]) and self.mask_function(rows[0], columns[-1]):
            return np.ones((1, 1), bool)
        before = self.left is not None and columns[-1] < rows[0] - self.left
        ahead = self.right is not None and columns[0] > rows[-1] + self.right
        if before or ahead or columns[0] >= self.keys:
            return np.zeros((1, 1), bool)
        return np.asarray(self.mask_function(rows[:, None], columns[None, :]))


def refusals(call: Call) -> list[str]:
    """Why splash attention cannot compute this call with our result."""
    operands, words = call.operands, fused.visible(call)
    reasons = fused.refusals(call, words, caps=True)
    if platform() != "tpu":
        reasons.append(f"it runs on TPUs, and this runs on {platform()}")
    if operands.query.dtype not in DTYPES:
        reasons.append(f"it computes float32 and bfloat16, and this is {operands.query.dtype}")
    if max(operands.query.shape[-1], operands.value.shape[-1]) > LARGEST_HEAD:
        reasons.append(f"head sizes must be up to {LARGEST_HEAD}, or the tiles do not fit next to the matrix unit")
    if math.prod(length // _tile(length) for length in operands.lengths) > MOST_TILES:
        reasons.append(
            f"its table of tiles does not fit, for {operands.lengths[0]} queries and {operands.lengths[1]} keys"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        reasons.append("its kernels do not compile with jax_enable_x64")
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in fused.DEFAULT_PRECISION:
        reasons.append(f"its matrix products have the default precision, and this asks for {precision}")
    if 0 in operands.query.shape or 0 in operands.value.shape:
        reasons.append("an axis is empty")
    if sharded():
        reasons.append("under a mesh it needs to be told how its arrays are split, which is not known here")
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying:
        reasons.append("inside jax.shard_map it needs check_vma=False")
    return reasons


def attend(call: Call, interpret: bool = False) -> tuple[Float[Array, "*B T N Hv"], None]:
    """The output of all heads; the log-sum-exp stays with the kernel. `interpret`: on any machine, slowly."""
    return _attend(*call, interpret=interpret), None


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def _attend(operands: Operands, options: Options, interpret: bool) -> Float[Array, "*B T N Hv"]:
    (queries, keys), axes = operands.lengths, operands.query.ndim - 3
    words = fused.visible(Call(operands, options)).flat(operands.query.shape[:axes])
    query, key, value = (fused.flat(x, axes) for x in (operands.query, operands.key, operands.value))
    if words.hides:
        key, value, bad = finite_keys(key, value)
        hidden, poisoned = _rows(words, bad, queries)
        query = jnp.where(hidden[:, :, None, None], jnp.zeros_like(query), query)
    query = (query.astype(jnp.float32) * options.scale).astype(query.dtype)
    sides = (_tile(queries), _tile(keys))
    # Built anew for every trace: a kernel holds arrays of the trace that it was built in.
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([_mask(words, (queries, keys), sides)] * query.shape[2]),
        block_sizes=_block_sizes(*sides),
        attn_logits_soft_cap=options.soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    padded = (fused.pad_to(x, 1, side) for x, side in zip((query, key, value), (*sides, sides[1]), strict=True))
    output = jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in padded), _segment_ids(words, query, key, sides))
    output = jnp.swapaxes(output, 1, 2)[:, :queries]
    if words.hides:
        output = fused.answers(output, hidden, poisoned)
    return output.reshape(*operands.query.shape[:-1], value.shape[-1])


def _rows(words: Visible, bad: Bool[Array, "B S K"], queries: int) -> tuple[Bool[Array, "B T"], Bool[Array, "B T K"]]:
    """Which queries see nothing, and which see a key that is not finite; the latter is looked for if there is one."""
    batch, keys, heads = bad.shape
    first, end = fused.seen_range(words, batch, (queries, keys))
    sees = functools.partial(fused.sees, first=first, end=end, segments=words.segments)
    hidden = end <= first if words.segments is None else ~sees(jnp.ones((batch, keys), bool))
    none = jnp.zeros((heads, batch, queries), bool)
    poisoned = lax.cond(jnp.any(bad), lambda: lax.map(sees, jnp.moveaxis(bad, 2, 0)), lambda: none)
    return hidden, jnp.moveaxis(poisoned, 0, 2)


def _tile(length: int) -> int:
    """The largest tile that lengthens the sequence by no more than an eighth of what the smallest makes of it."""
    padded = [length + -length % tile for tile in TILES]
    return next(tile for tile, total in zip(TILES, padded, strict=True) if 8 * total <= 9 * padded[-1])


def _block_sizes(rows: int, columns: int) -> splash.BlockSizes:
    """The same tiles in all kernels: what forward skips holds NaN, which backward must skip too.

    Backward is two kernels; the one for all holds a gradient of the queries for every column of tiles, O(T * S).
    """
    return splash.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )


def _mask(words: Visible, lengths: tuple[int, int], sides: tuple[int, int]) -> splash_masks.Mask:
    """What hides by position alone; nothing where it hides all, for splash needs a visible tile."""
    queries, keys = lengths
    size = queries + -queries % sides[0], keys + -keys % sides[1]
    nearest = 1 - queries if words.left is None else max(-words.left, 1 - queries)
    furthest = keys - 1 if words.right is None else min(words.right, keys - 1)
    everything = words.left is None and words.right is None and size[1] == keys
    return (
        splash_masks.FullMask(size) if everything or furthest < nearest else Band(size, words.left, words.right, keys)
    )


def _segment_ids(words: Visible, query: Array, key: Array, sides: tuple[int, int]) -> splash.SegmentIds | None:
    """Ids of queries and keys; keys behind their sequence's end get one that no query has."""
    if words.segments is None and words.key_lengths is None:
        return None
    if words.segments is None:
        query_ids, key_ids = (jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key))
    else:
        query_ids, key_ids = words.segments.query_ids, words.segments.key_value_ids
    if words.key_lengths is not None:
        inside = jnp.arange(key.shape[1], dtype=jnp.int32)[None, :] < words.key_lengths[:, None]
        key_ids = jnp.where(inside, key_ids, _unused(query_ids)[:, None])
    return splash.SegmentIds(fused.pad_to(query_ids, 1, sides[0]), fused.pad_to(key_ids, 1, sides[1]))


def _unused(ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The least of the numbers 0 to T that is none of the T ids."""
    numbers = jnp.arange(ids.shape[1] + 1, dtype=jnp.int32)
    taken = (ids[:, :, None] == numbers[None, None, :]).any(1)
    return jnp.argmin(taken, axis=1).astype(jnp.int32)
