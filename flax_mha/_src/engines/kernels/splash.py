"""`implementation="splash"`: JAX's splash attention kernels for TPUs.

A window becomes a mask that the kernel computes, and by which it skips tiles; lengths,
segments and mask arrays that depend on the key alone become segment ids. The output of
queries whose keys are all masked is set to 0, and `guarded.around_kernel` keeps NaN and
infinity in masked keys out of the result.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_masks,
)
from jaxtyping import Array, Float, Int

from flax_mha._src.call.call import DEFAULT_PRECISION, Call, Result
from flax_mha._src.core.tracing import reasons_against_kernel, varying_alike
from flax_mha._src.engines.engine import (
    EMPTY,
    Engine,
    reason_against_platform,
    reasons_against_dtype,
)
from flax_mha._src.engines.kernels import guarded
from flax_mha._src.engines.kernels import mask as kernel_mask
from flax_mha._src.engines.kernels.mask import Arrays
from flax_mha._src.masks import ArrayMask, Mask
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
    for tile in TILES:
        padded = length + -length % tile
        if 8 * padded <= 9 * least:
            return tile
    return TILES[-1]


def _reasons(call: Call) -> list[str]:
    queries, keys = call.lengths
    mask = kernel_mask.kernel_mask(call)
    if all(map(_is_of_keys, mask.others)):
        mask = dataclasses.replace(mask, rest=None)
    reasons = kernel_mask.reasons_against(call, mask, ["logits_soft_cap", "sinks"])
    reasons += _reasons_of_device(call)
    rows_of_tiles = -(-queries // tile_size(queries))
    columns_of_tiles = -(-keys // tile_size(keys))
    if rows_of_tiles * columns_of_tiles > MOST_TILES:
        reasons.append(
            f"its tile table does not fit for {queries} queries and {keys} keys: use "
            'shorter sequences, or implementation="blockwise"'
        )
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in DEFAULT_PRECISION:
        reasons.append(
            f"it supports only the default matmul precision, not {precision}: leave "
            "jax_default_matmul_precision unset"
        )
    return reasons


def _reasons_of_device(call: Call) -> list[str]:
    """Lists the reasons that dtypes, sizes and devices give."""
    query, key, value = call.inputs
    target = call.target
    reasons = []
    if target.platform != "tpu":
        reasons.append(reason_against_platform("tpu", "TPUs", target.platform))
    reasons += reasons_against_dtype((jnp.float32, jnp.bfloat16), query.dtype)
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST_HEAD:
        reasons.append(
            f"head sizes must be at most {LARGEST_HEAD}, but the largest is {largest}: "
            "change num_heads or qkv_features"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        reasons.append(
            "its kernels do not compile with 64-bit types: set jax_enable_x64 to False"
        )
    if 0 in (*query.shape, *key.shape, *value.shape):
        reasons.append(EMPTY)
    return reasons + reasons_against_kernel(target)


class Kernel(NamedTuple):
    """The static part of a call of splash's kernel.

    Its arrays are padded to whole tiles, with the axes [B, N | K, T | S, H].
    """

    mask: splash_masks.Mask  # of every head
    num_heads: int
    sides: tuple[int, int]  # of a tile
    soft_cap: float | None
    interpret: bool

    def __call__(
        self, inputs: Arrays, segment_ids: splash.SegmentIds | None
    ) -> Float[Array, "B N T Hv"]:
        # Built in every trace, because a kernel holds arrays of the trace that it was
        # built in.
        mask_of_heads = splash_masks.MultiHeadMask([self.mask] * self.num_heads)
        attend = splash.make_splash_mha(
            mask_of_heads,
            block_sizes=_block_sizes(*self.sides),
            attn_logits_soft_cap=self.soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        return jax.vmap(attend)(
            inputs.query, inputs.key, inputs.value, segment_ids, inputs.sinks
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedWithSinks:
    """What the backward pass needs: the kernel's gradient `pull`, a pytree, and the
    places of output and log-sum-exp among its leaves, if they are known.
    """

    pull: Any
    sinks: Any  # [B, N]
    places: tuple[int, int] | None = dataclasses.field(metadata={"static": True})


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
    outputs = []
    lses = []
    for i, x in enumerate(jax.tree.leaves(pull)):
        if x is output:
            outputs.append(i)
        if x.shape == output.shape[:-1] and x.dtype == jnp.float32:
            lses.append(i)
    places = None
    # In the versions of JAX that were tried, there is one of each.
    if len(outputs) == 1 and len(lses) == 1:
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


class Masked(NamedTuple):
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
        kernel = Kernel(
            mask=_mask(mask, arrays.lengths, sides),
            num_heads=arrays.query.shape[2],
            sides=sides,
            soft_cap=self.soft_cap,
            interpret=self.interpret,
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
        return super().supports(call) or _reasons(call)

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
        arrays = Arrays(_scaled(query, call.scale), key, value)
        if call.sinks is not None:
            sinks = jnp.broadcast_to(call.sinks, (*call.batch, call.num_heads))
            sinks = sinks.astype(jnp.float32)
            arrays = arrays._replace(sinks=kernel_mask.flat(sinks, axes))
        kernel = Masked(call.soft_cap, self.interpret)
        if mask.hides_keys:
            arrays, mask = varying_alike((arrays, mask))
            [output] = guarded.around_kernel(kernel, arrays, mask)
        else:
            [output], _ = kernel.run(arrays, mask, guarded.NONE)
        output = output.reshape(*call.query.shape[:-1], value.shape[-1])
        return Result(output, None)


def _is_of_keys(mask: Mask) -> bool:
    """Returns whether a mask is an array that depends on the key alone, not on head or
    query.
    """
    return isinstance(mask, ArrayMask) and mask.visible.shape[-3:-1] == (1, 1)


def _scaled(query: Float[Array, "B T N H"], scale: float) -> Float[Array, "B T N H"]:
    number = np.asarray(scale, query.dtype)
    if float(number) == scale:
        return query * number
    # A rounded scale would change all scores in one direction.
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _block_sizes(rows: int, columns: int) -> splash.BlockSizes:
    """Makes splash's description of tiles of `rows` and `columns`, the same forward and
    backward.

    A row whose tiles are all skipped is NaN after the forward pass, so the backward
    pass must also skip them. That pass is two kernels; a single fused one would store a
    gradient of the queries for every column of tiles.
    """
    return splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )


def _mask(
    mask: Visible, lengths: tuple[int, int], sides: tuple[int, int]
) -> splash_masks.Mask:
    """Makes splash's mask of window and padding; `lengths` T and S are padded to
    multiples of `sides`, a tile's shape.

    If it would hide everything, it hides nothing: splash needs a visible tile, and
    `Masked.run` zeroes the output.
    """
    queries, keys = lengths
    size = (queries + -queries % sides[0], keys + -keys % sides[1])
    pads_keys = size[1] != keys
    if mask.left is None and mask.right is None and not pads_keys:
        return splash_masks.FullMask(size)
    # Distances, key minus query, that are visible and that occur.
    nearest = 1 - queries
    furthest = keys - 1
    if mask.left is not None:
        nearest = max(-mask.left, nearest)
    if mask.right is not None:
        furthest = min(mask.right, furthest)
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
    if mask.segments is None and mask.key_lengths is None and mask.rest is None:
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
    if mask.key_lengths is not None or mask.rest is not None:
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
