"""Rotary embeddings of a module's queries and keys, at the positions that a call gives or that a cache counts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flax_mha.rope import RoPE, apply_rope


def rotate(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    rope: RoPE | None,
    positions: Array | tuple[Array, Array] | None,
    self_attention: bool,
    start: Int[Array, "..."] | int = 0,
    stored: bool = False,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"]]:
    """Rotates query and key by their positions.

    Args:
      query: Normalized, if that is asked for.
      key: Likewise.
      rope: The rotary embeddings, or None.
      positions: [B..., T] or [T], or a pair for queries and keys; None counts from `start`.
      self_attention: Whether keys are those of the queries' tokens.
      start: The position of the first query, [] or [B...]; that of the first key is 0, if it is another's.
      stored: Whether the keys were rotated when they were stored.
    """
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
        start = jnp.asarray(start, jnp.int32)[..., None]
        query_positions = start + jnp.arange(query.shape[-3], dtype=jnp.int32).reshape((1,) * (start.ndim - 1) + (-1,))
        key_positions = query_positions if self_attention else jnp.arange(key.shape[-3], dtype=jnp.int32)
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
