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


def per_sequence_arguments(
    inputs: tuple[Array, Array, Array],
    segment_ids: Array | tuple[Array, Array] | None,
    lengths: Array | tuple[Array | None, Array | None] | None,
    self_attention: bool,
    decode: bool,
    is_cached: bool,
) -> tuple[tuple[Array, Array, Array], dict[str, Array | None]]:
    """Turns `segment_ids` and `lengths` of a module's call into arguments of
    `dot_product_attention`.

    Returns (inputs, arguments). In the inputs [B..., T, D] of queries, keys and values,
    padding is set to 0, so that NaN in padding does not reach gradients of parameters.
    If `is_cached`, there are no arguments: the lengths are passed to the cache instead.
    """
    if decode and segment_ids is not None:
        raise ValueError(
            "segment_ids must be None while decoding, but got an array; a cache holds "
            "one document per sequence."
        )
    if is_cached and isinstance(lengths, tuple):
        raise ValueError(
            "lengths must be a single array while decoding (the number of new tokens "
            "per sequence), but got a pair."
        )
    if lengths is not None and not isinstance(lengths, tuple) and not self_attention:
        raise ValueError(
            "lengths must be a pair (queries, keys) if inputs_k is not inputs_q, but "
            "got one array; pass (None, lengths) to set only the key lengths."
        )
    for name, given in (("segment_ids", segment_ids), ("lengths", lengths)):
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(
                f"{name} must be one array or a pair (queries, keys), but got "
                f"{len(given)} arrays."
            )
    if segment_ids is not None:
        _check_segment_ids(segment_ids, inputs[0], inputs[1])
    queries, keys = _pair(lengths)
    inputs_q, *others = inputs
    key, value = (_zero_after(x, keys) for x in others)
    names = (
        "query_segment_ids",
        "key_value_segment_ids",
        "query_seq_lengths",
        "key_value_seq_lengths",
    )
    if is_cached:
        arguments = {}
    else:
        arguments = dict(zip(names, (*_pair(segment_ids), queries, keys), strict=True))
    return (_zero_after(inputs_q, queries), key, value), arguments


def _pair(given: Any) -> tuple[Any, Any]:
    if isinstance(given, tuple):
        return given
    return (given, given)


def _zero_after(x: Float[Array, "*B T D"], lengths: Any) -> Float[Array, "*B T D"]:
    *batch, number, _ = x.shape
    lengths = validation.lengths(
        "lengths",
        lengths,
        validation.Shape(tuple(batch), number, number, 1, 1, 1, 1),
        number,
    )
    if lengths is None:
        return x
    return jnp.where(_before(lengths, number)[..., None], x, jnp.zeros((), x.dtype))


def _before(lengths: PerSequence, number: int) -> Bool[Array, "*B n"]:
    return (
        jnp.arange(number, dtype=jnp.int32).reshape((1,) * lengths.ndim + (-1,))
        < lengths[..., None]
    )


def _check_segment_ids(segment_ids: Any, inputs_q: Array, inputs_k: Array) -> None:
    """Checks `segment_ids` here, because `dot_product_attention` would call them
    `query_segment_ids` in its errors.
    """
    queries = inputs_q.shape[-2]
    keys = inputs_k.shape[-2]
    is_pair = isinstance(segment_ids, tuple)
    if not is_pair and queries != keys:
        raise ValueError(
            "segment_ids must be a pair (queries, keys) if their lengths differ, but "
            f"got one array for lengths {queries} and {keys}."
        )
    if is_pair:
        names = ("segment_ids of queries", "segment_ids of keys")
    else:
        names = ("segment_ids", "segment_ids")
    shape = validation.Shape(inputs_q.shape[:-2], queries, keys, 1, 1, 1, 1)
    validation.segment_ids(*_pair(segment_ids), shape, names)


def rotate(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K Hk"],
    rope: RoPE | None,
    positions: Array | tuple[Array, Array] | None,
    self_attention: bool,
    start: Int[Array, "..."] | int,
    stored: bool,
    shared: bool,
    size: int | None,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K Hk"]]:
    """Rotates query and key by their positions; `stored` and `shared` keys are rotated
    already, and do not change.

    `positions` are [B..., T] or [T], with a last axis of coordinates if `rope` has
    sections, or a pair for queries and keys. None counts from `start`, or from 0 for
    the keys of cross-attention. With a `size`, only the last `size` features of a head
    are rotated.
    """
    if rope is None:
        if positions is not None:
            raise ValueError(
                "positions must be None without rope, but got an array; pass "
                "rope=RoPE() to the module."
            )
        return query, key
    if stored:
        if positions is None or isinstance(positions, tuple):
            raise ValueError(
                "positions must be a single array (for the queries) if rope is used "
                "with stored keys, but got "
                f"{'None' if positions is None else 'a pair'}."
            )
        return _rotate_end(query, positions, rope, size), key
    if positions is None:
        positions = _count(query.shape[-3], key.shape[-3], rope, self_attention, start)
    if not isinstance(positions, tuple):
        if not self_attention:
            raise ValueError(
                "positions must be a pair (queries, keys) if inputs_k is not inputs_q, "
                "but got one array."
            )
        positions = positions, positions
    if len(positions) != 2:
        raise ValueError(
            "positions must be one array or a pair (queries, keys), but got "
            f"{len(positions)} arrays."
        )
    return _rotate_end(query, positions[0], rope, size), key if shared else _rotate_end(
        key, positions[1], rope, size
    )


def _rotate_end(
    x: Float[Array, "*B T N H"], positions: Array, rope: RoPE, size: int | None
) -> Float[Array, "*B T N H"]:
    if size is None:
        return apply_rope(x, positions, rope)
    return jnp.concatenate(
        [x[..., :-size], apply_rope(x[..., -size:], positions, rope)], axis=-1
    )


def _count(
    queries: int,
    keys: int,
    rope: RoPE,
    self_attention: bool,
    start: Int[Array, "..."] | int,
) -> tuple[Array, Array]:
    """Returns default positions of queries and keys: `start`, `start` + 1, ...; from 0
    for keys of cross-attention.
    """
    if rope.section_layout.startswith("axial"):
        raise ValueError(
            "positions must be [..., T, coordinates] if rope is axial, but got None."
        )
    start = jnp.asarray(start, jnp.int32)[..., None]
    query_positions = start + jnp.arange(queries, dtype=jnp.int32).reshape(
        (1,) * (start.ndim - 1) + (-1,)
    )
    positions = (
        query_positions,
        query_positions if self_attention else jnp.arange(keys, dtype=jnp.int32),
    )
    if rope.sections:
        query_positions, key_positions = (
            jnp.repeat(x[..., None], len(rope.sections), axis=-1) for x in positions
        )
        return query_positions, key_positions
    return positions


def key_lengths(lengths: Array | None, key: Float[Array, "*B S K H"]) -> PerSequence:
    """Converts `lengths`, the number of keys before the padding of each sequence, to
    int32 [B...]; None means S.
    """
    lengths = int32("lengths", key.shape[-3] if lengths is None else lengths)
    return jnp.broadcast_to(
        lengths if key.ndim > 3 else lengths.reshape(()), key.shape[:-3]
    )


def check_stored(
    module: Any, preset: Mapping[str, Any], mask: Array | Mask | None, score_mod: Any
) -> None:
    """Raises a ValueError for a mask object, `score_mod` or window: with stored keys,
    query positions are unknown.

    `preset` holds the arguments that a `functools.partial` around `attention_fn` sets.
    """
    windows = map(
        check_window, (module.local_window_size, preset.get("local_window_size"))
    )
    given = {
        "mask": isinstance(mask, Mask) or isinstance(preset.get("mask"), Mask),
        "score_mod": score_mod is not None or preset.get("score_mod") is not None,
        "local_window_size": any(window is not None for window in windows),
    }
    for name, is_given in given.items():
        if is_given:
            got = "a mask object" if name == "mask" else "one"
            raise ValueError(
                f"{name} must not depend on positions if keys are stored, because "
                f"calls with stored keys do not track positions, but got {got}; use a "
                "mask or bias array [..., queries, keys]."
            )


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
