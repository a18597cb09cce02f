"""A mask in the terms of fused kernels.

Fused kernels know a window, lengths and segments. `kernel_mask` reads them out of a call's mask; what is left over is a
reason to refuse. Kernels compute something for rows whose keys are all masked; other functions here say which these
are.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_mha.call.operands import DEFAULT_PRECISION, Call
from flax_mha.masks import And, CausalMask, LengthMask, LocalMask, Mask, SegmentMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelMask:
    """Row i sees columns i - left to i + right, in its segment, below the lengths.

    Attributes:
      left: How far back the first visible column is or, if negative, how far ahead. None: no limit.
      right: How far ahead the last visible column is or, if negative, how far behind.
      query_lengths: Rows that are used [B...].
      key_lengths: Columns that are used [B...].
      segments: Ids of queries [B..., T] and keys [B..., S].
      others: Names of the masks that cannot be said in these terms.
    """

    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})
    query_lengths: Int[Array, "*B"] | None
    key_lengths: Int[Array, "*B"] | None
    segments: SegmentMask | None
    others: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def masks_scores(self) -> bool:
        """True if anything may be masked at all."""
        return self.left is not None or self.right is not None or bool(jax.tree.leaves(self))

    def flat(self, batch: tuple[int, ...]) -> "KernelMask":
        """Broadcasts all arrays over the batch axes, and makes these one axis."""
        rank = len(batch)
        return jax.tree.map(lambda x: flat(jnp.broadcast_to(x, (*batch, *x.shape[rank:])), rank), self)


def kernel_mask(call: Call) -> KernelMask:
    """The call's mask, as far as it can be said in the terms of kernels; windows only if offsets are numbers."""
    left = right = query_lengths = key_lengths = segments = None
    others = []
    for part in _parts(call.operands.mask):
        if isinstance(part, CausalMask | LocalMask):
            before, ahead = (None, part.offset) if isinstance(part, CausalMask) else (part.left, part.right)
            left, right = _smaller(left, before), _smaller(right, ahead)
        elif isinstance(part, LengthMask):
            query_lengths = _smaller(query_lengths, part.query_lengths)
            key_lengths = _smaller(key_lengths, part.key_value_lengths)
        elif isinstance(part, SegmentMask) and segments is None:
            segments = part
        else:
            others.append(type(part).__name__.strip("_"))
    (queries, keys), (query_offset, key_offset) = call.operands.lengths, call.operands.offsets.values
    # Convert positions to rows and columns. A limit that masks nothing becomes None; one that masks everything is
    # clamped to the size of the arrays.
    shift: Any = query_offset - key_offset if call.operands.offsets.are_known else 0
    left = None if left is None or left - shift >= queries - 1 else max(left - shift, -keys)
    right = None if right is None or right + shift >= keys - 1 else max(right + shift, -queries)
    if not call.operands.offsets.are_known:  # then any limit is a reason to refuse
        left, right = (None if side is None else 0 for side in (left, right))
    query_lengths = None if query_lengths is None else query_lengths - query_offset
    key_lengths = None if key_lengths is None else key_lengths - key_offset
    return KernelMask(left, right, query_lengths, key_lengths, segments, tuple(others))


def _parts(mask: Mask | None) -> list[Mask]:
    """The masks all of which must show a score."""
    if isinstance(mask, And):
        return [*_parts(mask.left), *_parts(mask.right)]
    return [] if mask is None else [mask]


def _smaller(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return a if b is None else b
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def refusals(call: Call, mask: KernelMask, supported: Collection[str] = ()) -> list[str]:
    """The reasons that hold for every fused kernel why it cannot compute this call; it has the `supported` ones."""
    operands, options = call
    has_band = mask.left is not None or mask.right is not None
    fixed = "must be a number known while tracing, because the kernel's causal masks and windows stand still"
    unknown = {
        "bias": operands.bias is not None and "is not supported: it may mask whole rows, and holds T x S values",
        "logits_soft_cap": options.soft_cap is not None and "is not computed by it",
        "sinks": operands.sinks is not None and "are not supported by it",
        "score_mod": options.score_mod is not None and "is not supported by fused kernels",
        "dropout_rate": options.dropout_rate > 0 and "needs the random numbers of the key given",
        "return_residual": options.return_residual and "needs a log-sum-exp with a gradient, in float32",
        "return_max_score": options.return_max_score and "needs the running maximum, which the kernel does not return",
        "query_offset": has_band and operands.offsets.query_array is not None and fixed,
        "key_value_offset": has_band and operands.offsets.key_array is not None and fixed,
        "scale": operands.scale is not None and "must be a number known while tracing",
        "precision": options.precision not in DEFAULT_PRECISION
        and f"must be the default, all that kernels have, and this asks for {options.precision}",
    }
    reasons = [f"{name} {why}" for name, why in unknown.items() if why and name not in supported]
    if mask.segments is not None and mask.segments.query_ids.dtype != jnp.int32:
        reasons.append(f"segment ids must be int32, and are {mask.segments.query_ids.dtype}")
    return reasons + [
        f"the mask holds {name}, which is none of causal, window, lengths, segments" for name in mask.others
    ]


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """`x` with zeros at the end of `axis`, whose length becomes a multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def flat(x: Array, axes: int) -> Array:
    """The first `axes` axes as one."""
    return x.reshape(-1, *x.shape[axes:])


def vmapped_together(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as they are, but under `vmap` mapped all or none, as kernels need; compiles to nothing."""
    never = functools.reduce(jnp.logical_or, (x.ravel()[0] != x.ravel()[0] for x in arrays)) & False
    return tuple(jnp.where(never, jnp.zeros_like(x), x) for x in arrays)


def visible_range(
    mask: KernelMask, batch: int, lengths: tuple[int, int]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """First visible key of each query, and the one after the last, of `mask.flat`; without regard to segments."""
    queries, keys = lengths
    rows = jnp.arange(queries, dtype=jnp.int32)
    first = jnp.zeros_like(rows) if mask.left is None else jnp.clip(rows - mask.left, 0, keys)
    end = jnp.full_like(rows, keys) if mask.right is None else jnp.clip(rows + mask.right + 1, 0, keys)
    if mask.key_lengths is not None:
        end = jnp.minimum(*jnp.broadcast_arrays(end, jnp.maximum(mask.key_lengths, 0)[..., None]))
    if mask.query_lengths is not None:
        rows, end, used = jnp.broadcast_arrays(rows, end, mask.query_lengths[..., None])
        end = jnp.where(rows < used, end, jnp.zeros_like(end))
    return jnp.broadcast_to(first, (batch, queries)), jnp.broadcast_to(end, (batch, queries))


def counted(flags: Bool[Array, "B S K"], first: Int[Array, "B T"], end: Int[Array, "B T"]) -> Int[Array, "B T K"]:
    """Counts the flags that are set from `first` up to, not including, `end`."""
    sums = jnp.pad(jnp.cumsum(flags, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    at_end, at_first = (jnp.take_along_axis(sums, i[:, :, None], axis=1) for i in (jnp.maximum(first, end), first))
    return at_end - at_first


def shows_all_rows_something(mask: KernelMask, lengths: tuple[int, int]) -> bool:
    """Returns whether every query sees a key, by positions alone."""
    queries, keys = lengths
    if mask.query_lengths is not None or mask.key_lengths is not None or mask.segments is not None:
        return False
    return (mask.right is None or mask.right >= 0) and (mask.left is None or queries <= keys + mask.left)


def masked_rows(
    mask: KernelMask, batch: int, lengths: tuple[int, int], bias: Float[Array, "B T N S"] | None = None
) -> Bool[Array, "B T #N"]:
    """Returns the queries that see no key, of `mask.flat`, or have a bias of -inf for all that they see.

    With segments or a bias these are T * S comparisons, which compilers reduce while making them and never store.
    """
    first, end = (x[:, :, None] for x in visible_range(mask, batch, lengths))
    if mask.segments is None and bias is None:
        return end <= first
    places = jnp.arange(lengths[1], dtype=jnp.int32)[None, None, None, :]
    seen = (first[..., None] <= places) & (places < end[..., None])
    if mask.segments is not None:
        query_ids, key_ids = mask.segments.query_ids, mask.segments.key_value_ids
        seen = seen & (query_ids[:, :, None, None] == key_ids[:, None, None, :])
    if bias is not None:
        seen = seen & (bias != -jnp.inf)
    return ~seen.any(-1)
