"""What fused kernels share: a mask said in their few words, and our meaning of what is hidden kept around them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from flax_mha._call import Call
from flax_mha.masks import And, CausalMask, LengthMask, LocalMask, Mask, SegmentMask

DEFAULT_PRECISION = (None, "default", "bfloat16", lax.Precision.DEFAULT)


class Visible(NamedTuple):
    """A mask in a kernel's words: query i sees keys i - left to i + right, in its segment, before the lengths' ends.

    Attributes:
      left: None does not limit; neither do None in the others.
      right: How far ahead, or, negative, how far behind the sight ends.
      query_lengths: [B...].
      key_lengths: [B...].
      segments: Ids of queries [B..., T] and keys [B..., S].
      others: Names of the masks that these words cannot say.
    """

    left: int | None
    right: int | None
    query_lengths: Int[Array, "*B"] | None
    key_lengths: Int[Array, "*B"] | None
    segments: SegmentMask | None
    others: tuple[str, ...]

    @property
    def hides(self) -> bool:
        """Whether anything can be hidden at all."""
        return any(x is not None for x in self[:-1])

    def flat(self, batch: tuple[int, ...]) -> "Visible":
        """The same, with the batch axes of all arrays in full, as one."""

        def whole(x: Array) -> Array:
            rest = x.shape[len(batch) :]
            return flat(jnp.broadcast_to(x, (*batch, *rest)), len(batch))

        query_lengths, key_lengths, segments = jax.tree.map(
            whole, (self.query_lengths, self.key_lengths, self.segments)
        )
        return self._replace(query_lengths=query_lengths, key_lengths=key_lengths, segments=segments)


def visible(call: Call) -> Visible:
    """The call's mask, read as far as it can be."""
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
    (queries, keys), offset = call.operands.lengths, call.options.static_offset
    # From positions to rows; a limit that no query reaches is none.
    left = None if left is None or left - offset >= queries - 1 else left - offset
    right = None if right is None or right + offset >= keys - 1 else right + offset
    return Visible(left, right, query_lengths, key_lengths, segments, tuple(others))


def _parts(mask: Mask | None) -> list[Mask]:
    """The masks all of which must show a score."""
    if isinstance(mask, And):
        return [*_parts(mask.left), *_parts(mask.right)]
    return [] if mask is None else [mask]


def _smaller(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return a if b is None else b
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def refusals(call: Call, words: Visible, caps: bool = False) -> list[str]:
    """Why no fused kernel can compute this call; `caps`: but a soft cap this one can."""
    operands, options = call
    unknown = {
        "bias": operands.bias is not None and "may hide whole rows, and holds T x S values",
        "logits_soft_cap": options.soft_cap is not None and not caps and "is not computed by it",
        "sinks": operands.sinks is not None and "take part in no kernel's sum",
        "score_mod": options.program is not None and "is Python, which no kernel calls",
        "dropout_rate": options.dropout_rate > 0 and "needs the random numbers of the key given",
        "return_residual": options.return_residual and "needs a log-sum-exp with a gradient, in float32",
        "query_offset": operands.query_offset is not None and "must be a number known while tracing",
        "scale": operands.scale is not None and "must be a number known while tracing",
        "precision": options.precision not in DEFAULT_PRECISION
        and f"must be the default, all that kernels have, and this asks for {options.precision}",
    }
    reasons = [f"{name} {why}" for name, why in unknown.items() if why]
    return reasons + [
        f"the mask holds {name}, which is none of causal, window, lengths, segments" for name in words.others
    ]


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """`x` lengthened with zeros along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def flat(x: Array, axes: int) -> Array:
    """The first `axes` axes as one."""
    return x.reshape(-1, *x.shape[axes:])


def together(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as they are, but under `vmap` mapped all or none, as kernels need; compiles to nothing."""
    never = functools.reduce(jnp.logical_or, (x.ravel()[0] != x.ravel()[0] for x in arrays)) & False
    return tuple(jnp.where(never, jnp.zeros_like(x), x) for x in arrays)


def seen_range(words: Visible, batch: int, lengths: tuple[int, int]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """First visible key of each query, and the one after the last, of `words.flat`; segments left aside."""
    queries, keys = lengths
    rows = jnp.arange(queries, dtype=jnp.int32)
    first = jnp.zeros_like(rows) if words.left is None else jnp.clip(rows - words.left, 0, keys)
    end = jnp.full_like(rows, keys) if words.right is None else jnp.clip(rows + words.right + 1, 0, keys)
    if words.key_lengths is not None:
        end = jnp.minimum(*jnp.broadcast_arrays(end, jnp.maximum(words.key_lengths, 0)[..., None]))
    if words.query_lengths is not None:
        rows, end = jnp.broadcast_arrays(rows, end)
        end = jnp.where(rows < words.query_lengths[..., None], end, jnp.zeros_like(end))
    return jnp.broadcast_to(first, (batch, queries)), jnp.broadcast_to(end, (batch, queries))


def counted(flags: Bool[Array, "B S K"], first: Int[Array, "B T"], end: Int[Array, "B T"]) -> Int[Array, "B T K"]:
    """How many flags are set from `first` up to, not including, `end`."""
    sums = jnp.pad(jnp.cumsum(flags, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    at_end, at_first = (jnp.take_along_axis(sums, i[:, :, None], axis=1) for i in (jnp.maximum(first, end), first))
    return at_end - at_first


def sees(
    flags: Bool[Array, "B S"], first: Int[Array, "B T"], end: Int[Array, "B T"], segments: SegmentMask | None
) -> Bool[Array, "B T"]:
    """Whether a flag is set from `first` up to, not including, `end`, in the query's segment.

    T * S comparisons, which compilers reduce while making them and never store.
    """
    places = jnp.arange(flags.shape[1], dtype=jnp.int32)[None, None, :]
    seen = flags[:, None, :] & (first[:, :, None] <= places) & (places < end[:, :, None])
    if segments is not None:
        seen = seen & (segments.query_ids[:, :, None] == segments.key_value_ids[:, None, :])
    return seen.any(-1)


def answers(
    output: Float[Array, "B T N Hv"], hidden: Bool[Array, "B T"], poisoned: Bool[Array, "B T K"]
) -> Float[Array, "B T N Hv"]:
    """The kernel's output, but 0 for queries that see nothing and NaN for those that see a key that is not finite."""
    group = output.shape[2] // poisoned.shape[2]
    poisoned = jnp.repeat(poisoned, group, axis=2)[..., None]
    output = jnp.where(poisoned, jnp.full_like(output, jnp.nan), output)
    return jnp.where(hidden[:, :, None, None], jnp.zeros_like(output), output)
