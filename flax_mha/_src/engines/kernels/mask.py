"""Converts the limits of a call's mask for fused kernels, which support only a window,
lengths and segments.

Calls with other masks are not supported. Kernels return arbitrary output for queries
whose keys are all masked: `masked_rows` finds these rows. `clean` replaces NaN and
infinity in a kernel's arrays, and finds the rows that must be NaN.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src import guard
from flax_mha._src.call.call import DEFAULT_PRECISION, Call
from flax_mha._src.core.tile import Offsets, Tile
from flax_mha._src.masks import ArrayMask, Mask
from flax_mha._src.masks.visible import Visible
from flax_mha._src.math.head import map_heads, mask_by_head


class Arrays(NamedTuple):
    """The arrays that a fused kernel takes, with all batch axes flattened to one."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K Hv"]
    bias: Float[Array, "#B #N T S"] | None = None
    sinks: Float[Array, "B N"] | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of queries T, and of keys S."""
        return self.query.shape[1], self.key.shape[1]


def kernel_mask(call: Call) -> Visible:
    """Returns the call's mask with limits in rows and columns, indices into its arrays,
    in place of positions.

    A side of the window that masks nothing becomes None; one that masks everything is
    clamped to the size of the arrays. If an offset is an array, the window stays in
    positions: `reasons_against` only asks whether there is one.
    """
    mask = call.mask
    if mask is None:
        return Visible()
    queries, keys = call.lengths
    query_offset, key_offset = call.offsets.values
    left = mask.left
    right = mask.right
    if call.offsets.are_known:
        shift = query_offset - key_offset
        left = _side(left, -shift, queries - 1, -keys)
        right = _side(right, shift, keys - 1, -queries)
    query_lengths = mask.query_lengths
    if query_lengths is not None:
        query_lengths = query_lengths - query_offset
    key_lengths = mask.key_lengths
    if key_lengths is not None:
        key_lengths = key_lengths - key_offset
    return dataclasses.replace(
        mask,
        left=left,
        right=right,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
    )


def _side(limit: int | None, shift: int, most: int, least: int) -> int | None:
    """Shifts a limit of the window; None if it is then `most` or more, which masks
    nothing, and at least `least`.
    """
    if limit is None or limit + shift >= most:
        return None
    return max(limit + shift, least)


def flattened(call: Call, mask: Visible) -> Visible:
    """Broadcasts the batch axes of all arrays of a mask, lengths or segment ids, and
    flattens them to one axis.
    """
    rank = len(call.batch)

    def flatten(x: Array) -> Array:
        return flat(jnp.broadcast_to(x, (*call.batch, *x.shape[rank:])), rank)

    return jax.tree.map(flatten, mask)


def as_array(call: Call, mask: Mask) -> Bool[Array, "#B #N #T S"]:
    """Evaluates a mask in positions of the call, with one batch axis. Along an axis on
    which it does not depend, the array has length 1.
    """
    rank = len(call.batch)
    axes = rank + 2

    def of_head(own: tuple[Mask, Offsets]) -> Bool[Array, "#T S"]:
        mask, offsets = own
        visible = mask.tile(Tile(0, 0, call.lengths, offsets.values))
        return jnp.broadcast_to(visible, (visible.shape[0], call.lengths[1]))

    offsets = jax.tree.map(
        lambda x: x.reshape(*x.shape, *(1,) * (axes - x.ndim)), call.offsets
    )
    own = (mask_by_head(mask, rank, call.groups), offsets)
    visible = map_heads(of_head, own, axes)
    *batch, key_heads, group, rows, columns = visible.shape
    if max(batch, default=1) > 1:
        visible = jnp.broadcast_to(visible, (*call.batch, *visible.shape[rank:]))
    return visible.reshape(-1, key_heads * group, rows, columns)


def depends_on(call: Call, mask: Mask) -> tuple[bool, bool]:
    """Returns whether `as_array` has an axis of all batch entries, and one of all
    heads.
    """
    rank = len(call.batch)
    by_batch = not call.offsets.are_known
    by_head = False

    def look(x: Array, axes: str) -> Array:
        nonlocal by_batch, by_head
        names = axes.split()
        if "B" in names:
            by_batch = by_batch or math.prod(x.shape[:rank]) > 1
        if "N" in names:
            by_head = by_head or x.shape[names.index("N") * rank] > 1
        return x

    mask.map_arrays(look)
    return by_batch, by_head


def reasons_against(call: Call, mask: Visible, supported: Collection[str]) -> list[str]:
    """Lists the reasons why a fused kernel cannot compute a call; `mask` is
    `kernel_mask(call)`.

    `supported` names arguments, such as "bias", that this kernel accepts and others do
    not.
    """
    offsets = call.offsets
    has_band = mask.left is not None or mask.right is not None
    masks_only = (
        "is not supported: if it only masks, pass a causal mask, window or lengths "
        "instead"
    )
    cannot_shift = (
        "is an array, but the kernel can shift a causal mask or window only by a "
        "constant: pass a Python int"
    )
    # Each argument: whether the call uses it, and what to do instead.
    arguments = {
        "dropout_rate": (
            call.dropout_rate > 0,
            "must be 0, because dropout_rng is not supported: pass 0, or pass "
            "deterministic=True to the module",
        ),
        "bias": (call.bias is not None, masks_only),
        "logits_soft_cap": (
            call.soft_cap is not None,
            "is not supported: leave it out",
        ),
        "sinks": (call.sinks is not None, "are not supported: leave them out"),
        "score_mod": (call.score_mod is not None, masks_only),
        "return_residual": (
            call.return_residual,
            "requires a float32 log-sum-exp with a gradient, which it does not "
            "return: leave it out",
        ),
        "return_max_score": (
            call.return_max_score,
            "requires the running maximum, which it does not return: leave it out "
            "(sow_max_score in a module)",
        ),
        "query_offset": (has_band and offsets.query_array is not None, cannot_shift),
        "key_value_offset": (has_band and offsets.key_array is not None, cannot_shift),
        "scale": (
            call.scale_array is not None,
            "is an array, but must be a Python float: pass a float, or multiply the "
            "query by the array and pass 1.0",
        ),
        "precision": (
            call.precision not in DEFAULT_PRECISION,
            f"must be the default, but is {call.precision}: leave it out",
        ),
    }
    reasons = []
    for name, (is_used, why) in arguments.items():
        if is_used and name not in supported:
            reasons.append(f"{name} {why}")

    # Masks.
    if mask.segments is not None and mask.segments.query_ids.dtype != jnp.int32:
        reasons.append(
            f"segment ids must be int32, but are {mask.segments.query_ids.dtype}: use "
            ".astype(jnp.int32)"
        )
    for part in mask.others:
        name = type(part).__name__.strip("_")
        reasons.append(
            f"the mask contains {name}, which is not a causal, window, length or "
            "segment mask: use only these, combined with &, if possible"
        )
    return reasons


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """Pads the end of `axis` with zeros, up to a multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def flat(x: Array, axes: int) -> Array:
    """Flattens the batch axes, the first `axes` axes of `x`, to one axis."""
    return x.reshape(-1, *x.shape[axes:])


def flat_sinks(call: Call) -> Float[Array, "B N"] | None:
    """Returns the sink of each batch entry and head, in float32, with one batch
    axis.
    """
    if call.sinks is None:
        return None
    sinks = jnp.broadcast_to(call.sinks, (*call.batch, call.num_heads))
    return flat(sinks, len(call.batch)).astype(jnp.float32)


def visible_range(
    mask: Visible, arrays: Arrays
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Computes the first key that each query attends to, and one past the last, by
    window and lengths.

    `mask` has one batch axis (see `flattened`).
    """
    queries, keys = arrays.lengths
    rows = jnp.arange(queries, dtype=jnp.int32)
    if mask.left is None:
        first = jnp.zeros_like(rows)
    else:
        first = jnp.clip(rows - mask.left, 0, keys)
    if mask.right is None:
        end = jnp.full_like(rows, keys)
    else:
        end = jnp.clip(rows + mask.right + 1, 0, keys)
    if mask.key_lengths is not None:
        used = jnp.maximum(mask.key_lengths, 0)[..., None]
        end, used = jnp.broadcast_arrays(end, used)
        end = jnp.minimum(end, used)
    if mask.query_lengths is not None:
        # Queries that are not used attend to no key.
        used = mask.query_lengths[..., None]
        rows, end, used = jnp.broadcast_arrays(rows, end, used)
        end = jnp.where(rows < used, end, jnp.zeros_like(end))
    shape = arrays.query.shape[:2]
    return jnp.broadcast_to(first, shape), jnp.broadcast_to(end, shape)


def every_row_sees_a_key(mask: Visible, lengths: tuple[int, int]) -> bool:
    """Returns whether every query surely has a visible key, by a window alone.

    `lengths` is (T, S).
    """
    queries, keys = lengths
    if jax.tree.leaves(mask):
        return False
    # The first query's window must end at a key, and the last one's begin at a key.
    first_sees_a_key = mask.right is None or mask.right >= 0
    last_sees_a_key = mask.left is None or queries <= keys + mask.left
    return first_sees_a_key and last_sees_a_key


def masked_rows(mask: Visible, arrays: Arrays) -> Bool[Array, "#B T #N"]:
    """Computes which queries have no visible key; a bias of -inf also hides a key.
    `mask` has one batch axis.
    """
    if _is_range(mask, arrays):
        first, end = visible_range(mask, arrays)
        return (end <= first)[:, :, None]
    return jnp.swapaxes(~_visible(mask, arrays).any(-1), 1, 2)


def largest_bias(mask: Visible, arrays: Arrays) -> Float[Array, "#B T #N"]:
    """Computes the largest bias of each row's visible scores; -inf without any. Has no
    gradient.
    """
    bias: Any = jax.lax.stop_gradient(arrays.bias)
    hidden = jnp.full((), -jnp.inf, bias.dtype)
    largest = jnp.where(_visible(mask, arrays), bias, hidden).max(-1)
    return jnp.swapaxes(largest, 1, 2)


def _is_range(mask: Visible, arrays: Arrays) -> bool:
    """Returns whether `visible_range` says all that is visible."""
    return mask.segments is None and mask.rest is None and arrays.bias is None


def _visible(mask: Visible, arrays: Arrays) -> Bool[Array, "#B #N T S"]:
    """Computes which of the T * S scores are visible.

    Callers reduce the result immediately; then XLA does not store it.
    """
    first, end = visible_range(mask, arrays)
    if mask.query_lengths is None and mask.key_lengths is None:
        # All batch entries have the same range.
        first, end = first[:1], end[:1]
    first = first[:, None, :, None]
    end = end[:, None, :, None]
    places = jnp.arange(arrays.key.shape[1], dtype=jnp.int32)[None, None, None, :]
    visible = (first <= places) & (places < end)
    if mask.segments is not None:
        query_ids = mask.segments.query_ids
        key_ids = mask.segments.key_value_ids
        visible = visible & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
    if isinstance(mask.rest, ArrayMask):
        visible = visible & mask.rest.visible
    if arrays.bias is None:
        return visible
    return visible & (arrays.bias != -jnp.inf)


def clean(
    arrays: Arrays, mask: Visible, scale: float
) -> tuple[Arrays, Bool[Array, "B T N"]]:
    """Replaces queries, keys, values and biases that are not finite by zeros, so that a
    kernel can run on them.

    Also returns which rows with visible keys must be NaN: their query, or a visible
    key, value or bias, was replaced. -inf in a bias stays, because it masks. A query
    that overflows when multiplied by `scale` is also replaced.
    """
    query = arrays.query
    bias = arrays.bias
    group = query.shape[2] // arrays.key.shape[2]
    key, value, key_flags = guard.zero_keys(arrays.key, arrays.value)
    query_flags = guard.flag(query.astype(jnp.float32) * scale)
    is_bad_bias: Any = None
    if bias is not None:
        is_bad_bias = ~((bias == -jnp.inf) | jnp.isfinite(bias))

    # Which queries attend to a key that was replaced. A window needs no T x S scores.
    bad_keys = jnp.repeat(key_flags == jnp.inf, group, axis=2)
    if _is_range(mask, arrays):
        first, end = visible_range(mask, arrays)
        sees_bad = _count(bad_keys, first, end) > 0
    else:
        bad = jnp.swapaxes(bad_keys, 1, 2)[:, :, None]
        if bias is not None:
            bad = bad | is_bad_bias
        sees_bad = jnp.swapaxes((_visible(mask, arrays) & bad).any(-1), 1, 2)
    is_bad_query = query_flags == jnp.inf
    is_masked = masked_rows(mask, arrays)
    is_nan = sees_bad | (is_bad_query & ~is_masked)

    if bias is not None:
        bias = jnp.where(is_bad_bias, jnp.zeros_like(bias), bias)
    query = guard.zero(query, query_flags.astype(query.dtype))
    finite = arrays._replace(query=query, key=key, value=value, bias=bias)
    return finite, is_nan


def _count(
    flags: Bool[Array, "B S N"], first: Int[Array, "B T"], end: Int[Array, "B T"]
) -> Int[Array, "B T N"]:
    """Counts, for each query, the keys from `first` to `end - 1` whose flag is True."""
    # sums[n] is the number of flags before key n.
    sums = jnp.cumsum(flags, axis=1, dtype=jnp.int32)
    sums = jnp.pad(sums, ((0, 0), (1, 0), (0, 0)))
    end = jnp.maximum(first, end)
    before_end = jnp.take_along_axis(sums, end[:, :, None], axis=1)
    before_first = jnp.take_along_axis(sums, first[:, :, None], axis=1)
    return before_end - before_first
