"""Recipes that choose the keys of each query by their contents; they return
`key_indices`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.core.validation import broadcastable, int32, int_at_least
from flax_mha._src.masks import CausalMask


def top_blocks(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    block: int,
    count: int,
    query_offset: int | Int[Array, "*B"] = 0,
) -> dict[str, Any]:
    """Lets each query attend to its own block of keys and the blocks that match it
    best. MoBA, arXiv:2502.13189.

    Causal. Keys are cut into blocks, and a block is represented by the mean of its
    keys. Of the blocks before its own, a query attends to the `count - 1` blocks whose
    mean has the largest product with the query. Query heads that share a key head share
    blocks, chosen by the sum of their products. The choice has no gradient. Choosing
    takes T x S / block products of vectors; attention then takes T x count x block
    products instead of T x S.

    Args:
      query: Queries, which are also passed to the attention; rotate them first.
      key: Keys, which are also passed to the attention; rotate them first.
      block: Number of keys in a block; the last block may have fewer.
      count: Number of blocks for each query, its own included.
      query_offset: Position of the first query, an int or int [B...]; while decoding,
        the number of tokens before it.

    Raises:
      ValueError: If `block` or `count` is not an integer of at least 1, or if
        `query_offset` has another shape or dtype.

    Example:
      >>> import jax
      >>> from flax_mha import dot_product_attention, recipes
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 1000, 4, 16))
      >>> blocks = recipes.top_blocks(query, key, block=50, count=3)
      >>> blocks["key_indices"].shape
      (1, 1000, 4, 150)
      >>> dot_product_attention(query, key, value, **blocks).shape
      (1, 1000, 4, 16)
    """
    # Check the arguments.
    block = int_at_least("block", block, 1)
    count = int_at_least("count", count, 1)
    offset = int32("query_offset", query_offset)
    broadcastable("query_offset", offset, query.shape[:-3], "[batch...]")

    *batch, keys, num_heads, size = key.shape
    number = -(-keys // block)

    # The mean key of each block, [B..., blocks, K, H]; the last block may be shorter.
    widths = [(0, 0)] * key.ndim
    widths[-3] = (0, number * block - keys)
    padded = jnp.pad(lax.stop_gradient(key), widths)
    padded = padded.reshape(*batch, number, block, num_heads, size)
    sums = padded.astype(jnp.float32).sum(-3)
    sizes = jnp.minimum(block, keys - jnp.arange(number) * block).astype(jnp.float32)
    means = sums / jnp.broadcast_to(sizes[:, None, None], sums.shape)

    # Its products with the query heads that share a key head, [B..., T, K, blocks].
    grouped = lax.stop_gradient(query).astype(jnp.float32)
    grouped = grouped.reshape(*query.shape[:-2], num_heads, -1, size).sum(-2)
    products = jnp.einsum("...tkh,...nkh->...tkn", grouped, means)

    # A query's own block comes first; later blocks are hidden.
    row = lax.broadcasted_iota(jnp.int32, products.shape, products.ndim - 3)
    first = jnp.asarray(query_offset, jnp.int32)
    first = jnp.broadcast_to(first, query.shape[:-3])[..., None, None, None]
    own = (row + first) // block
    blocks = lax.broadcasted_iota(jnp.int32, products.shape, products.ndim - 1)
    is_earlier = blocks < own
    own_or_later = jnp.where(blocks == own, jnp.inf, -jnp.inf)
    products = jnp.where(is_earlier, products, own_or_later)
    best, chosen = lax.top_k(products, min(count, number))

    # The keys in the chosen blocks, [B..., T, K, count * block]; -1 is no key.
    begin = chosen[..., None] * block
    steps = lax.broadcasted_iota(jnp.int32, (*chosen.shape, block), chosen.ndim)
    indices = begin + steps
    exists = (best[..., None] > -jnp.inf) & (indices < keys)
    indices = jnp.where(exists, indices, -1)
    indices = lax.collapse(indices, indices.ndim - 2)
    return {"mask": CausalMask(), "key_indices": indices}
