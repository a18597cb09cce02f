"""TPU attention through the splash attention kernels that come with jax, where they give our result.

A mask by position alone becomes one that the kernel computes, and by which it skips tiles; lengths and segments become
its segment ids. Around the kernel our semantics for masked values are kept: rows whose keys are all masked return 0,
and what masked keys hold reaches nothing.
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

from flax_mha._call import Call, Operands, Options
from flax_mha._impl import kernel_mask, nonfinite
from flax_mha._impl.kernel_mask import KernelMask

DTYPES = (jnp.float32, jnp.bfloat16)
# In float32 with every kind of mask, twice this no longer compiles for TPU v4, whose tiles must fit in 16 MiB.
LARGEST_HEAD = 256
# The kernel's tables take three bytes of scalar memory (1 MiB) per tile.
MOST_TILES = 512 * 512
# Rows and columns of a tile; lengths are padded to multiples of them.
TILES = (512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Band(splash_masks.Mask):
    """Keys from `left` before the query to `right` after it, and none of the padding behind `keys`.

    Like splash's own masks, but for a tile that is one value throughout it returns that one value: building the
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
    operands, mask = call.operands, kernel_mask.kernel_mask(call)
    reasons = kernel_mask.refusals(call, mask, caps=True)
    target = call.options.target
    if target.platform != "tpu":
        reasons.append(f"it runs on TPUs, and this runs on {target.platform}")
    if operands.query.dtype not in DTYPES:
        reasons.append(f"it computes float32 and bfloat16, and this is {operands.query.dtype}")
    if max(operands.query.shape[-1], operands.value.shape[-1]) > LARGEST_HEAD:
        reasons.append(f"head sizes must be up to {LARGEST_HEAD}, or the tiles do not fit next to the matrix unit")
    if math.prod(-(-length // _tile(length)) for length in operands.lengths) > MOST_TILES:
        reasons.append(
            f"its table of tiles does not fit, for {operands.lengths[0]} queries and {operands.lengths[1]} keys"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        reasons.append("its kernels do not compile with jax_enable_x64")
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in kernel_mask.DEFAULT_PRECISION:
        reasons.append(f"its matrix products have the default precision, and this asks for {precision}")
    if 0 in operands.query.shape or 0 in operands.value.shape:
        reasons.append("an axis is empty")
    if target.may_be_split:
        reasons.append("on several devices it must know how its arrays are split; pass qkv_sharding")
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying:
        reasons.append("inside jax.shard_map it needs check_vma=False")
    return reasons


def splash_attention(call: Call, interpret: bool = False) -> tuple[Float[Array, "*B T N Hv"], None]:
    """The output of all heads; the log-sum-exp stays with the kernel. `interpret`: on any machine, slowly."""
    return _attention(*call, interpret=interpret), None


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def _attention(operands: Operands, options: Options, interpret: bool) -> Float[Array, "*B T N Hv"]:
    (queries, keys), axes = operands.lengths, operands.query.ndim - 3
    mask = kernel_mask.kernel_mask(Call(operands, options)).flat(operands.query.shape[:axes])
    query, key, value = (kernel_mask.flat(x, axes) for x in (operands.query, operands.key, operands.value))
    if mask.masks_scores:
        key, value, of_keys = nonfinite.finite_keys(key, value)
        of_queries = nonfinite.magnitude_of(query * options.scale)
        query = nonfinite.finite(query, of_queries)
        masked, sees_bad = _rows(mask, of_keys == jnp.inf, queries)
        query = jnp.where(masked[:, :, None, None], jnp.zeros_like(query), query)
    query = (query.astype(jnp.float32) * options.scale).astype(query.dtype)
    sides = (_tile(queries), _tile(keys))
    # Built anew for every trace: a kernel holds arrays of the trace that it was built in.
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([_mask(mask, (queries, keys), sides)] * query.shape[2]),
        block_sizes=_block_sizes(*sides),
        attn_logits_soft_cap=options.soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    padded = (kernel_mask.pad_to(x, 1, side) for x, side in zip((query, key, value), (*sides, sides[1]), strict=True))
    output = jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in padded), _segment_ids(mask, query, key, sides))
    output = jnp.swapaxes(output, 1, 2)[:, :queries]
    if mask.masks_scores:
        nonfinite_rows = kernel_mask.for_query_heads(sees_bad, query.shape[2]) | (of_queries == jnp.inf)
        output = kernel_mask.with_our_rows(output, masked, nonfinite_rows)
    return output.reshape(*operands.query.shape[:-1], value.shape[-1])


def _rows(mask: KernelMask, bad: Bool[Array, "B S K"], queries: int) -> tuple[Bool[Array, "B T"], Bool[Array, "B T K"]]:
    """Which queries see nothing, and which see a key that is not finite; that is only looked for if there is one."""
    batch, keys, heads = bad.shape
    first, end = kernel_mask.visible_range(mask, batch, (queries, keys))
    sees = functools.partial(kernel_mask.sees_any, first=first, end=end, segments=mask.segments)
    hidden = end <= first if mask.segments is None else ~sees(jnp.ones((batch, keys), bool))
    none = jnp.zeros((heads, batch, queries), bool)
    poisoned = lax.cond(jnp.any(bad), lambda: lax.map(sees, jnp.moveaxis(bad, 2, 0)), lambda: none)
    return hidden, jnp.moveaxis(poisoned, 0, 2)


def _tile(length: int) -> int:
    """The largest tile whose padded length exceeds that of the smallest tile by at most one eighth."""
    padded = [length + -length % tile for tile in TILES]
    return next(tile for tile, total in zip(TILES, padded, strict=True) if 8 * total <= 9 * padded[-1])


def _block_sizes(rows: int, columns: int) -> splash.BlockSizes:
    """The same tiles in all kernels: what forward skips holds NaN, which backward must skip too.

    Backward is two kernels; the one for all holds a gradient of the queries for every column of tiles, O(T * S).
    """
    return splash.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )


def _mask(mask: KernelMask, lengths: tuple[int, int], sides: tuple[int, int]) -> splash_masks.Mask:
    """The mask by position alone; none where it masks everything, because splash needs a visible tile."""
    queries, keys = lengths
    size = queries + -queries % sides[0], keys + -keys % sides[1]
    nearest = 1 - queries if mask.left is None else max(-mask.left, 1 - queries)
    furthest = keys - 1 if mask.right is None else min(mask.right, keys - 1)
    everything = mask.left is None and mask.right is None and size[1] == keys
    return splash_masks.FullMask(size) if everything or furthest < nearest else Band(size, mask.left, mask.right, keys)


def _segment_ids(mask: KernelMask, query: Array, key: Array, sides: tuple[int, int]) -> splash.SegmentIds | None:
    """Ids of queries and keys; keys behind their sequence's end get one that no query has."""
    if mask.segments is None and mask.key_lengths is None:
        return None
    if mask.segments is None:
        query_ids, key_ids = (jnp.zeros(x.shape[:2], jnp.int32) for x in (query, key))
    else:
        query_ids, key_ids = mask.segments.query_ids, mask.segments.key_value_ids
    if mask.key_lengths is not None:
        inside = jnp.arange(key.shape[1], dtype=jnp.int32)[None, :] < mask.key_lengths[:, None]
        key_ids = jnp.where(inside, key_ids, _unused(query_ids)[:, None])
    return splash.SegmentIds(kernel_mask.pad_to(query_ids, 1, sides[0]), kernel_mask.pad_to(key_ids, 1, sides[1]))


def _unused(ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The least of the numbers 0 to T that is none of the T ids."""
    numbers = jnp.arange(ids.shape[1] + 1, dtype=jnp.int32)
    taken = (ids[:, :, None] == numbers[None, None, :]).any(1)
    return jnp.argmin(taken, axis=1).astype(jnp.int32)
