"""`implementation="splash"`: JAX's splash attention kernels for TPUs.

A window becomes a mask that the kernel computes, and by which it skips tiles; lengths,
segments and mask arrays that depend only on the key become segment ids. The output of
queries whose keys are all masked is set to 0, and `guarded.around_kernel` keeps NaN and
infinity in masked keys out of the result.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_masks,
)
from jaxtyping import Array, Float, Int

from flax_mha._src.call.call import DEFAULT_PRECISION, Call, Result
from flax_mha._src.core.fields import static
from flax_mha._src.core.tracing import NEEDS_SHARDING, manual_axes, varying_axes
from flax_mha._src.engines.engine import (
    EMPTY,
    Engine,
    reason_against_platform,
    reasons_against_dtype,
)
from flax_mha._src.engines.kernels import guarded
from flax_mha._src.engines.kernels import mask as kernel_mask
from flax_mha._src.engines.kernels.mask import Arrays
from flax_mha._src.masks import ArrayMask
from flax_mha._src.masks.visible import Visible
from flax_mha._src.plan import Plan

# Rows and columns of a tile; lengths are padded to multiples of them.
TILES = (512, 256, 128)
# Twice this, in float32 with every kind of mask, does not compile for TPU v4, whose
# tiles must fit in 16 MiB.
LARGEST_HEAD = 256
# The kernel's tables take three bytes of scalar memory (1 MiB) per tile.
MOST_TILES = 512 * 512


@dataclasses.dataclass(frozen=True)
class Band(splash_masks.Mask):
    """A splash mask for a window, from `left` keys before a query to `right` after it,
    among the first `keys` keys.

    None means no limit, and `size` is (queries, keys) with padding. Unlike splash's own
    masks, it returns a single value for a tile that is all True or all False. Then
    building the kernel for 32768 queries and keys takes 0.1 s instead of 6 to 11 s.
    """

    size: tuple[int, int]
    left: int | None
    right: int | None
    keys: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    @property
    def q_sequence(self) -> np.ndarray:
        """The indices of the queries, which the kernel passes to `mask_function`."""
        return np.arange(self.size[0], dtype=np.int32)

    def mask_function(self, rows: Any, columns: Any) -> Any:
        """Computes which scores of queries `rows` and keys `columns` are visible; also
        called inside the kernel.
        """
        visible = columns < self.keys
        if self.left is not None:
            visible = visible & (columns >= rows - self.left)
        if self.right is not None:
            visible = visible & (columns <= rows + self.right)
        return visible

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows = np.arange(tile[0].start, tile[0].stop, dtype=np.int32)
        columns = np.arange(tile[1].start, tile[1].stop, dtype=np.int32)
        # If the two corners with the largest distances are visible, so is all of the
        # tile.
        sees_first_key = self.mask_function(rows[-1], columns[0])
        if sees_first_key and self.mask_function(rows[0], columns[-1]):
            return np.ones((1, 1), bool)
        before = self.left is not None and columns[-1] < rows[0] - self.left
        ahead = self.right is not None and columns[0] > rows[-1] + self.right
        if before or ahead or columns[0] >= self.keys:
            return np.zeros((1, 1), bool)
        return np.asarray(self.mask_function(rows[:, None], columns[None, :]))


def tile_size(length: int) -> int:
    """Chooses the side of tiles along a sequence of this `length`: the largest of
    `TILES` that pads little, to at most 9/8 of the length that the smallest pads to.
    """
    least = length + -length % TILES[-1]
    return next(x for x in TILES if 8 * (length + -length % x) <= 9 * least)


# The kernel's arrays are padded to whole tiles, with the axes [B, N | K, T | S, H].
Kernel = Callable[[Arrays, splash.SegmentIds | None], Float[Array, "B N T Hv"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedWithSinks:
    """What the backward pass needs: the kernel's gradient `pull`, a pytree, and the
    places of output and log-sum-exp among its leaves, if they are known.
    """

    pull: Any
    sinks: Any  # [B, N]
    places: tuple[int, int] | None = static()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_sinks(
    kernel: Kernel, inputs: Arrays, segment_ids: splash.SegmentIds | None
) -> Float[Array, "B N T Hv"]:
    """Runs the kernel; computes the gradient of the sinks in float32.

    JAX before 0.12 rounds each term of this gradient to the inputs' dtype, and the
    terms often cancel (https://github.com/jax-ml/jax/issues/40128).
    """
    return kernel(inputs, segment_ids)


def _forward_with_sinks(
    kernel: Kernel, inputs: Arrays, segment_ids: splash.SegmentIds | None
) -> tuple[Array, SavedWithSinks]:
    output, pull = jax.vjp(lambda inputs: kernel(inputs, segment_ids), inputs)
    # The kernel's gradient stores output and log-sum-exp. Find them there, instead of
    # storing them twice.
    leaves = jax.tree.leaves(pull)
    of_rows = (output.shape[:-1], jnp.float32)
    outputs = [i for i, x in enumerate(leaves) if x is output]
    lses = [i for i, x in enumerate(leaves) if (x.shape, x.dtype) == of_rows]
    places = None
    # In the versions of JAX that were tried, there is one of each.
    if len(outputs) == len(lses) == 1:
        places = (outputs[0], lses[0])
    return output, SavedWithSinks(pull, inputs.sinks, places)


def _backward_with_sinks(
    kernel: Kernel, saved: SavedWithSinks, d_output: Array
) -> tuple[Arrays, None]:
    [gradients] = saved.pull(d_output)
    if saved.places is None:
        return gradients, None
    leaves = jax.tree.leaves(saved.pull)
    output, lse = (leaves[i] for i in saved.places)
    output = output.astype(jnp.float32)
    # P_sink = exp(sink - LSE), d_sink = -sum over rows of P_sink (O . dO)
    sinks = saved.sinks[..., None]
    # Without a sink, not -inf + inf.
    exponent = jnp.where(sinks == -jnp.inf, jnp.full_like(lse, -jnp.inf), sinks - lse)
    products = jnp.sum(output * d_output.astype(jnp.float32), axis=-1)
    d_sinks = -jnp.sum(jnp.exp(exponent) * products, axis=-1)
    return gradients._replace(sinks=d_sinks), None


_with_sinks.defvjp(_forward_with_sinks, _backward_with_sinks)


class Fused(NamedTuple):
    """Splash's kernel as a `guarded.Fused`: `guarded.around_kernel` keeps NaN in masked
    keys out of the result.
    """

    soft_cap: float | None
    interpret: bool
    scale: float = 1.0  # of queries: they are scaled already

    def run(
        self, arrays: Arrays, mask: Visible, differentiated: guarded.Names
    ) -> tuple[guarded.Results, tuple[Array, ...]]:
        """Returns the output (0 for rows without visible keys) and arrays to check: it
        is correct if all are finite.
        """
        rows, columns = map(tile_size, arrays.lengths)
        sides = (rows, columns)
        mask_of_head = _mask(mask, arrays.lengths, sides)
        num_heads = arrays.query.shape[2]

        def kernel(
            inputs: Arrays, segment_ids: splash.SegmentIds | None
        ) -> Float[Array, "B N T Hv"]:
            # Built in every trace, because it holds arrays of the trace.
            attend = splash.make_splash_mha(
                splash_masks.MultiHeadMask([mask_of_head] * num_heads),
                # A row whose tiles are all skipped is NaN after the forward pass, so
                # the backward pass must also skip them. That pass is two kernels; a
                # single fused one would store a gradient of the queries for every
                # column of tiles.
                block_sizes=splash.BlockSizes(
                    block_q=rows,
                    block_kv=columns,
                    block_q_dkv=rows,
                    block_kv_dkv=columns,
                    block_q_dq=rows,
                    block_kv_dq=columns,
                ),
                attn_logits_soft_cap=self.soft_cap,
                head_shards=1,
                q_seq_shards=1,
                interpret=self.interpret,
            )
            return jax.vmap(attend)(
                inputs.query, inputs.key, inputs.value, segment_ids, inputs.sinks
            )

        def padded(x: Array, side: int) -> Array:
            return kernel_mask.pad_to(jnp.swapaxes(x, 1, 2), 2, side)

        inputs = Arrays(
            query=padded(arrays.query, rows),
            key=padded(arrays.key, columns),
            value=padded(arrays.value, columns),
            sinks=arrays.sinks,
        )
        segment_ids = _segment_ids(mask, arrays, sides)
        if arrays.sinks is None:
            output = kernel(inputs, segment_ids)
        else:
            output = _with_sinks(kernel, inputs, segment_ids)
        output = jnp.swapaxes(output[:, :, : arrays.lengths[0]], 1, 2)
        # Splash's output is arbitrary if all keys of a query are masked.
        if not kernel_mask.every_row_sees_a_key(mask, arrays.lengths):
            masked = kernel_mask.masked_rows(mask, arrays)
            output = jnp.where(masked[..., None], jnp.zeros_like(output), output)
        return (output,), arrays[:3]


@dataclasses.dataclass(frozen=True)
class Splash(Engine):
    """The engine of JAX's splash attention. It returns no log-sum-exp; `interpret=True`
    runs on any machine, slowly.
    """

    name = "splash"
    platform = "tpu"
    guard_first = False
    interpret: bool = False

    def supports(self, call: Call) -> list[str]:
        reasons = super().supports(call)
        if reasons:
            return reasons
        mask = kernel_mask.kernel_mask(call)
        # Arrays that depend only on the key become segment ids.
        if all(
            isinstance(x, ArrayMask) and x.visible.shape[-3:-1] == (1, 1)
            for x in mask.others
        ):
            mask = dataclasses.replace(mask, rest=None)
        reasons = kernel_mask.reasons_against(call, mask, ["logits_soft_cap", "sinks"])

        # Dtypes and sizes.
        query, key, value = call.inputs
        queries, keys = call.lengths
        target = call.target
        config: Any = jax.config
        if target.platform != "tpu":
            reasons.append(reason_against_platform("tpu", "TPUs", target.platform))
        reasons += reasons_against_dtype((jnp.float32, jnp.bfloat16), query.dtype)
        largest = max(query.shape[-1], value.shape[-1])
        if largest > LARGEST_HEAD:
            reasons.append(
                f"head sizes must be at most {LARGEST_HEAD}, but the largest is "
                f"{largest}: change num_heads or qkv_features"
            )
        if config.jax_enable_x64:
            reasons.append(
                "its kernels do not compile with 64-bit types: set jax_enable_x64 to "
                "False"
            )
        if 0 in (*query.shape, *key.shape, *value.shape):
            reasons.append(EMPTY)

        # The mesh. The rule of `partitioned.py` does not apply: XLA for TPUs does not
        # call it (https://github.com/jax-ml/jax/issues/38196).
        if target.may_be_split:
            reasons.append(f"on multiple devices, {NEEDS_SHARDING}")
        axes = manual_axes()
        if axes and varying_axes(lax.axis_index(axes)):
            reasons.append(
                "inside jax.shard_map, it does not support check_vma=True: pass "
                "check_vma=False"
            )

        rows_of_tiles = -(-queries // tile_size(queries))
        columns_of_tiles = -(-keys // tile_size(keys))
        if rows_of_tiles * columns_of_tiles > MOST_TILES:
            reasons.append(
                f"its tile table does not fit for {queries} queries and {keys} keys: "
                'use shorter sequences, or implementation="blockwise"'
            )
        precision = config.jax_default_matmul_precision
        if precision not in DEFAULT_PRECISION:
            reasons.append(
                f"it supports only the default matmul precision, not {precision}: "
                "leave jax_default_matmul_precision unset"
            )
        return reasons

    def forward(self, plan: Plan, call: Call) -> Result:
        mask = kernel_mask.kernel_mask(call)
        # All others are arrays: combine them.
        others = [x.visible for x in mask.others if isinstance(x, ArrayMask)]
        if others:
            of_keys = functools.reduce(jnp.logical_and, others)
            mask = dataclasses.replace(mask, rest=ArrayMask(of_keys))
        mask = kernel_mask.flattened(call, mask)
        axes = len(call.batch)
        query, key, value = (kernel_mask.flat(x, axes) for x in call.inputs)
        scale = np.asarray(call.scale, query.dtype)
        if float(scale) == call.scale:
            query = query * scale
        else:
            # A rounded scale would change all scores in one direction.
            query = (query.astype(jnp.float32) * call.scale).astype(query.dtype)
        arrays = Arrays(query, key, value, sinks=kernel_mask.flat_sinks(call))
        kernel = Fused(call.soft_cap, self.interpret)
        [output] = guarded.compute(kernel, arrays, mask)
        return Result(output.reshape(*call.query.shape[:-1], value.shape[-1]), None)


def _mask(
    mask: Visible, lengths: tuple[int, int], sides: tuple[int, int]
) -> splash_masks.Mask:
    """Makes splash's mask of window and padding; `lengths` T and S are padded to
    multiples of `sides`, a tile's shape.

    If it would hide everything, it hides nothing: splash needs a visible tile, and
    `Fused.run` zeroes the output.
    """
    queries, keys = lengths
    size = (queries + -queries % sides[0], keys + -keys % sides[1])
    if mask.left is None and mask.right is None and size[1] == keys:
        return splash_masks.FullMask(size)
    # Distances, key minus query, that are visible and that occur.
    nearest = 1 - queries
    furthest = keys - 1
    if mask.left is not None:
        nearest = -mask.left
    if mask.right is not None:
        furthest = mask.right
    if furthest < nearest:
        return splash_masks.FullMask(size)
    return Band(size, left=mask.left, right=mask.right, keys=keys)


def _segment_ids(
    mask: Visible, arrays: Arrays, sides: tuple[int, int]
) -> splash.SegmentIds | None:
    """Makes padded segment ids, by which splash hides keys of other segments, keys past
    their sequence's length, and those that a mask array hides (`mask.rest`).

    The latter two get an id that no query has. Returns None if there are none of these.
    See also `_mask`.
    """
    hides_others = mask.key_lengths is not None or mask.rest is not None
    if mask.segments is None and not hides_others:
        return None
    if mask.segments is None:
        query_ids = jnp.zeros(arrays.query.shape[:2], jnp.int32)
        key_ids = jnp.zeros(arrays.key.shape[:2], jnp.int32)
    else:
        query_ids = mask.segments.query_ids
        key_ids = mask.segments.key_value_ids
    is_used = jnp.ones((1, 1), bool)
    if mask.key_lengths is not None:
        columns = jnp.arange(arrays.key.shape[1], dtype=jnp.int32)[None, :]
        is_used = columns < mask.key_lengths[:, None]
    if isinstance(mask.rest, ArrayMask):
        is_used = is_used & mask.rest.visible[:, 0, 0]
    if hides_others:
        key_ids = jnp.where(is_used, key_ids, _unused(query_ids)[:, None])
    return splash.SegmentIds(
        kernel_mask.pad_to(query_ids, 1, sides[0]),
        kernel_mask.pad_to(key_ids, 1, sides[1]),
    )


def _unused(ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """Returns, for each batch entry, the least number >= 0 that is not among its ids;
    hidden keys get it as an id.
    """
    batch, length = ids.shape
    # Among length + 1 numbers, one is not taken; larger ids do not matter.
    is_small = (ids >= 0) & (ids <= length)
    places = jnp.where(is_small, ids, length + 1)
    entries = jnp.arange(batch, dtype=jnp.int32)[:, None]
    taken = jnp.zeros((batch, length + 1), bool)
    taken = taken.at[entries, places].set(True, mode="drop")
    return jnp.argmin(taken, axis=1).astype(jnp.int32)
