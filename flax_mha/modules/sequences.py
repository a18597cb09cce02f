"""What a module's call says of its sequences: lengths, segments, rotary positions, keys that an earlier call stored."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flax_mha.call.arguments import check_window
from flax_mha.core import validation
from flax_mha.core.integers import int32
from flax_mha.masks import Mask
from flax_mha.rope import RoPE, apply_rope

PerSequence = Int[Array, "*B"]


def arguments_of(
    segment_ids: Array | tuple[Array, Array] | None,
    lengths: Array | tuple[Array | None, Array | None] | None,
    self_attention: bool,
    decode: bool,
    is_cached: bool,
) -> dict[str, Array | None]:
    """Splits segment ids and lengths into arguments of the attention: one of each for queries and for keys."""
    if decode and segment_ids is not None:
        raise ValueError("segment_ids must be None while decoding, but got an array; a cache holds one document.")
    if is_cached and isinstance(lengths, tuple):
        raise ValueError("lengths must be one array while decoding, the new tokens of each sequence, but got a pair.")
    if is_cached:
        return {}
    if lengths is not None and not isinstance(lengths, tuple) and not self_attention:
        raise ValueError(
            "lengths must be a pair (of queries, of keys) where keys are not the queries, but got one array; use "
            "(None, lengths) for the keys alone."
        )
    for name, given in (("segment_ids", segment_ids), ("lengths", lengths)):
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"{name} must be one array or a pair (of queries, of keys), but got {len(given)} arrays.")
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    query_lengths, key_lengths = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    return {
        "query_segment_ids": query_ids,
        "key_value_segment_ids": key_ids,
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


def rotate(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K Hk"],
    rope: RoPE | None,
    positions: Array | tuple[Array, Array] | None,
    self_attention: bool,
    start: Int[Array, "..."] | int = 0,
    stored: bool = False,
    size: int | None = None,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K Hk"]]:
    """Rotates query and key by their positions.

    These are [B..., T] or [T], with coordinates [..., D] if `rope` has sections, or a pair for queries and keys. None
    counts from `start` [] or [B...], the same in all coordinates; the first key of another sequence is at 0. `stored`
    keys were rotated when they were stored. `rope` is for the last `size` features; None means all.
    """
    if size is not None:
        ends = rotate(query[..., -size:], key[..., -size:], rope, positions, self_attention, start, stored)
        query, key = (jnp.concatenate([x[..., :-size], end], -1) for x, end in zip((query, key), ends, strict=True))
        return query, key
    if rope is None:
        if positions is not None:
            raise ValueError("positions must be None without rope, but got an array; pass rope=RoPE() to the module.")
        return query, key
    if stored:
        if positions is None or isinstance(positions, tuple):
            raise ValueError(
                "positions must be one array, of the queries, where rope is used with stored keys, but got "
                f"{'None' if positions is None else 'a pair'}."
            )
        return apply_rope(query, positions, rope), key
    if positions is None:
        if rope.section_layout.startswith("axial"):
            raise ValueError("positions must be [..., T, coordinates] where rope is axial, but got None.")
        start = jnp.asarray(start, jnp.int32)[..., None]
        query_positions = start + jnp.arange(query.shape[-3], dtype=jnp.int32).reshape((1,) * (start.ndim - 1) + (-1,))
        key_positions = query_positions if self_attention else jnp.arange(key.shape[-3], dtype=jnp.int32)
        if rope.sections:  # a token of text has the same number in all coordinates
            query_positions, key_positions = (
                jnp.repeat(x[..., None], len(rope.sections), axis=-1) for x in (query_positions, key_positions)
            )
    elif isinstance(positions, tuple):
        if len(positions) != 2:
            raise ValueError(
                f"positions must be one array or a pair (of queries, of keys), but got {len(positions)} arrays."
            )
        query_positions, key_positions = positions
    elif self_attention:
        query_positions = key_positions = positions
    else:
        raise ValueError(
            "positions must be a pair (of queries, of keys) where keys are not the queries, but got one array."
        )
    return apply_rope(query, query_positions, rope), apply_rope(key, key_positions, rope)


def lengths_of(by_sequence: dict[str, Array | None], key: Float[Array, "*B S K H"]) -> PerSequence:
    """Counts the keys of each sequence that are none of the padding."""
    lengths = by_sequence.get("key_value_seq_lengths")
    lengths = int32("lengths", key.shape[-3] if lengths is None else lengths)
    return jnp.broadcast_to(lengths if key.ndim > 3 else lengths.reshape(()), key.shape[:-3])


def check_stored(module: Any, preset: Mapping[str, Any], mask: Array | Mask | None, score_mod: Any) -> None:
    """Refuses what depends on the positions of queries: the cache does not count the calls that use stored keys."""
    given = {
        "mask": isinstance(mask, Mask) or isinstance(preset.get("mask"), Mask),
        "score_mod": score_mod is not None or preset.get("score_mod") is not None,
        "local_window_size": any(
            check_window(window) is not None for window in (module.local_window_size, preset.get("local_window_size"))
        ),
    }
    for name, is_given in given.items():
        if is_given:
            got = "a mask object" if name == "mask" else "one"
            raise ValueError(
                f"{name} must not depend on positions where keys are stored, whose calls are not counted, but got "
                f"{got}; use a mask or bias array [..., queries, keys]."
            )


def mask_of_stored(
    by_sequence: dict[str, Array | None],
    mask: Any,
    lengths: PerSequence,
    key: Float[Array, "*B S K H"],
    takes_lengths: bool,
) -> Any:
    """Returns the mask of stored keys; their lengths go into it, or into `by_sequence` if the function takes them."""
    if takes_lengths:
        by_sequence["key_value_seq_lengths"] = lengths
        return mask
    places = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape((1,) * lengths.ndim + (-1,))
    shown = (places < lengths[..., None])[..., None, None, :]
    return shown if mask is None else validation.mask_of_numbers(mask) & shown
