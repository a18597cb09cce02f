"""Recipes that choose the keys of each query by their contents; they return
`key_indices`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.call.arguments import check_inputs
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
    costs T * S / block dot products, computed for a few queries at a time; attention
    then costs T * count * block instead of T * S. A block whose keys hold NaN or
    infinity is always chosen, so that the output is NaN.

    Args:
      query: Queries, which are also passed to the attention; rotate them first.
      key: Keys, which are also passed to the attention; rotate them first.
      block: Number of keys in a block; the last block may have fewer.
      count: Number of blocks for each query, its own included.
      query_offset: Position of the first query, an int or int [B...]; while decoding,
        the number of tokens before it.

    Raises:
      ValueError: If `block` or `count` is not an integer of at least 1, or if `query`,
        `key` or `query_offset` has a wrong shape or dtype.

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
    query, key, _, _ = check_inputs(query, key, key, any_dtypes=True)
    offset = int32("query_offset", query_offset)
    broadcastable("query_offset", offset, query.shape[:-3], "[batch...]")

    *batch, keys, num_heads, size = key.shape
    queries = query.shape[-3]
    group = query.shape[-2] // num_heads
    number = -(-keys // block)
    if isinstance(number, int):
        number = max(number, 1)
        count = min(count, number)
    else:
        # A symbol of `jax.export`; there may be fewer than `count`.
        number = number + count

    # The mean key of each block, [B..., blocks, K, H]; the last block may be shorter.
    widths = [(0, 0)] * key.ndim
    widths[-3] = (0, number * block - keys)
    padded = jnp.pad(lax.stop_gradient(key), widths)
    padded = padded.reshape(*batch, number, block, num_heads, size)
    sums = padded.astype(jnp.float32).sum(-3)
    sizes = jnp.clip(keys - jnp.arange(number) * block, 1, block).astype(jnp.float32)
    means = sums / jnp.broadcast_to(sizes[:, None, None], sums.shape)
    means = jnp.where(jnp.isfinite(means), means, jnp.nan)

    # The sum of the query heads that share a key head, [T, B..., K, H].
    grouped = lax.stop_gradient(query).astype(jnp.float32)
    # A NaN in one head must not change the choice of the others.
    grouped = jnp.where(jnp.isfinite(grouped), grouped, 0.0)
    grouped = grouped.reshape(*batch, queries, num_heads, group, size).sum(-2)
    grouped = jnp.moveaxis(grouped, -3, 0)

    rows = jnp.arange(queries, dtype=jnp.int32)
    first = jnp.asarray(query_offset, jnp.int32)
    first = jnp.broadcast_to(first, tuple(batch))[..., None, None]

    def select(query_and_row: tuple[Array, Array]) -> Array:
        """Returns the blocks of one query, [B..., K, count]; -1 is no block."""
        query, row = query_and_row
        products = jnp.einsum("...kh,...nkh->...kn", query, means)
        # A block with NaN comes first: it must not be dropped in silence.
        largest = jnp.finfo(jnp.float32).max
        products = jnp.where(products < largest, products, largest)
        # Only the query's own block comes before it; later blocks are hidden.
        own = (row + first) // block
        blocks = lax.broadcasted_iota(jnp.int32, products.shape, products.ndim - 1)
        is_earlier = (blocks < own) & (blocks * block < keys)
        own_or_later = jnp.where(blocks == own, jnp.inf, -jnp.inf)
        _, chosen = lax.top_k(jnp.where(is_earlier, products, own_or_later), count)
        return jnp.where(chosen <= own, chosen, -1)

    # If all sizes are known, as many queries at a time as have 2**22 products (16 MiB).
    products_of_query = math.prod((*batch, num_heads, number))
    if isinstance(products_of_query * queries, int):
        height = max(1, 2**22 // max(1, products_of_query))
        chosen = lax.map(select, (grouped, rows), batch_size=height)
    else:
        chosen = jax.vmap(select)((grouped, rows))
    chosen = jnp.moveaxis(chosen, 0, -3)

    # The keys in the chosen blocks, [B..., T, K, count * block]; -1 is no key.
    begin = chosen[..., None] * block
    steps = lax.broadcasted_iota(jnp.int32, (*chosen.shape, block), chosen.ndim)
    indices = begin + steps
    exists = (begin >= 0) & (indices < keys)
    indices = jnp.where(exists, indices, -1)
    indices = lax.collapse(indices, indices.ndim - 2)
    return {"mask": CausalMask(), "key_indices": indices}
