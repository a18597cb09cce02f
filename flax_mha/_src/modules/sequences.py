"""Arguments of a module's call that differ between sequences: segment ids, lengths,
positions, stored keys.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.call.arguments import check_window
from flax_mha._src.core import validation
from flax_mha._src.core.validation import int32
from flax_mha._src.masks import Mask
from flax_mha._src.rope import RoPE, apply_rope

PerSequence = Int[Array, "*B"]
OneOrPair = Array | tuple[Array, Array] | None  # a pair is for queries and keys


def check_segment_ids(
    segment_ids: OneOrPair, inputs_q: Array, inputs_k: Array
) -> tuple[Any, Any]:
    """Returns the segment ids of queries and of keys.

    They are checked here, because `dot_product_attention` would call them
    `query_segment_ids` in its errors.
    """
    query_ids, key_ids = pair("segment_ids", segment_ids)
    if segment_ids is None:
        return None, None
    queries = inputs_q.shape[-2]
    keys = inputs_k.shape[-2]
    names = ("segment_ids of queries", "segment_ids of keys")
    if not isinstance(segment_ids, tuple):
        names = ("segment_ids", "segment_ids")
        if queries != keys:
            raise ValueError(
                "segment_ids must be a pair (queries, keys) if their lengths differ, "
                f"but got one array for lengths {queries} and {keys}."
            )
    shape = validation.Shape(inputs_q.shape[:-2], queries, keys)
    validation.segment_ids(query_ids, key_ids, shape, names)
    return query_ids, key_ids


def pair(name: str, given: object) -> tuple[Any, Any]:
    """Returns the argument `name` for queries and for keys; one array is for both."""
    if not isinstance(given, tuple):
        return (given, given)
    if len(given) != 2:
        raise ValueError(
            f"{name} must be one array or a pair (queries, keys), but got "
            f"{len(given)} arrays."
        )
    return given


def zero_after(
    x: Float[Array, "*B T D"], lengths: Array | None
) -> Float[Array, "*B T D"]:
    """Sets padding to 0, so that NaN in padding does not reach gradients of parameters.

    `lengths` are the numbers of tokens before the padding; None: all.
    """
    *batch, number, _ = x.shape
    shape = validation.Shape(tuple(batch), number, number)
    lengths = validation.lengths("lengths", lengths, shape, number)
    if lengths is None:
        return x
    is_token = _before(lengths, number)
    return jnp.where(is_token[..., None], x, jnp.zeros((), x.dtype))


def _before(lengths: PerSequence, number: int) -> Bool[Array, "*B n"]:
    """Returns whether each of `number` tokens is before the padding."""
    positions = _arange(number, lengths.ndim)
    return positions < lengths[..., None]


def _arange(number: int, num_batch_axes: int) -> Int[Array, "..."]:
    positions = jnp.arange(number, dtype=jnp.int32)
    return positions.reshape((1,) * num_batch_axes + (-1,))


def positions_of(
    positions: OneOrPair,
    rope: RoPE,
    queries: int,
    keys: int,
    self_attention: bool,
    start: Int[Array, "..."] | int,
) -> tuple[Array, Array]:
    """Returns the positions of queries and keys, given a module's argument `positions`,
    of which one array is for both in self-attention.

    None counts from `start`, or from 0 for the keys of cross-attention.
    """
    if isinstance(positions, tuple):
        return pair("positions", positions)
    if positions is not None:
        if not self_attention:
            raise ValueError(
                "positions must be a pair (queries, keys) if inputs_k is not inputs_q, "
                "but got one array."
            )
        return positions, positions
    if rope.section_layout.startswith("axial"):
        raise ValueError(
            "positions must be [..., T, coordinates] if rope is axial, but got None."
        )
    start = jnp.asarray(start, jnp.int32)[..., None]
    query_positions = start + _arange(queries, start.ndim - 1)
    key_positions = query_positions
    if not self_attention:
        key_positions = jnp.arange(keys, dtype=jnp.int32)
    # Text has the same position on all axes (time, height, width).
    number = len(rope.sections or ())
    if number > 0:
        query_positions = jnp.repeat(query_positions[..., None], number, axis=-1)
        key_positions = jnp.repeat(key_positions[..., None], number, axis=-1)
    return query_positions, key_positions


def rotate_features(
    x: Float[Array, "*B T N H"], positions: Array, rope: RoPE, size: int | None
) -> Float[Array, "*B T N H"]:
    """Rotates queries or keys by their positions, [B..., T] or [T], with a last axis of
    coordinates if `rope` has sections.

    With a `size`, only the last `size` features of a head are rotated.
    """
    if size is None:
        return apply_rope(x, positions, rope)
    rotated = apply_rope(x[..., -size:], positions, rope)
    return jnp.concatenate([x[..., :-size], rotated], axis=-1)


def key_lengths(lengths: Array | None, key: Float[Array, "*B S K H"]) -> PerSequence:
    """Converts `lengths`, the number of keys before the padding of each sequence, to
    int32 [B...]; None means S.
    """
    number = key.shape[-3]
    lengths = int32("lengths", number if lengths is None else lengths)
    if key.ndim == 3:
        # Without a batch axis, one length in an array of any rank.
        lengths = lengths.reshape(())
    return jnp.broadcast_to(lengths, key.shape[:-3])


NO_POSITIONS = (
    "calls with stored keys do not track positions, so {} cannot be used; use a mask "
    "or bias array [..., queries, keys]."
)


def check_stored(
    local_window_size: object,
    preset: Mapping[str, Any],
    mask: Array | Mask | None,
    score_mod: object,
) -> None:
    """Raises a ValueError for a mask object, `score_mod` or window: with stored keys,
    query positions are unknown.

    `preset` holds the arguments that a `functools.partial` around `attention_fn` sets.
    """
    window = check_window(local_window_size)
    preset_window = check_window(preset.get("local_window_size"))
    has_objects = isinstance(mask, Mask) or isinstance(preset.get("mask"), Mask)
    has_score_mod = score_mod is not None or preset.get("score_mod") is not None
    given = {
        "a mask object": has_objects,
        "score_mod": has_score_mod,
        "local_window_size": window is not None or preset_window is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(NO_POSITIONS.format(name))


def mask_padding(
    mask: Array | None, lengths: PerSequence, key: Float[Array, "*B S K H"]
) -> Array:
    """Returns a bool mask that hides what `mask` hides, and the keys of each sequence
    after the first `lengths`.
    """
    shown = _before(lengths, key.shape[-3])[..., None, None, :]
    if mask is None:
        return shown
    return mask & shown
