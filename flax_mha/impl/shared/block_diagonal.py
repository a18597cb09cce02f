"""Products of the queries of all heads with keys and values in the caller's layout, [B..., S, K, H].

A product for each key head needs the keys of this head one after another: they are copied. Of few queries, one product
for all heads is faster: every query is filled up with zeros to the features of all key heads, so that its products with
the keys of other heads are 0, and of its outputs only those of its own head are used. That multiplies K times as much,
but reads every key once, where it is.

In such a product, a key that is not finite makes the products of other heads NaN, too; `decode.py` repairs that.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_mha.impl.shared.head import map_heads, split_heads


def with_keys(
    query: Float[Array, "*B K G t H"], dot: Callable[..., Array], block_diagonal: bool
) -> Callable[[Float[Array, "*B s K H"]], Float[Array, "*B K G t s"]]:
    """What multiplies these queries by keys.

    Args:
      query: Queries.
      dot: The matrix product of two matrices; with `transpose_b`, of the first and the transposed second.
      block_diagonal: Whether one product serves all heads.
    """
    *batch, num_heads, _, _, size = query.shape

    def product(pair: tuple[Array, Array]) -> Array:
        query, key = pair
        return dot(key, query, transpose_b=True)  # in the other order XLA would transpose the keys

    def by_head(key: Float[Array, "*B s K H"]) -> Float[Array, "*B K G t s"]:
        keys = split_heads(key, (num_heads, 1))
        return jnp.matrix_transpose(map_heads(product, (query, keys), len(batch) + 2))

    def of_all_heads(key: Float[Array, "*B s K H"]) -> Float[Array, "*B K G t s"]:
        own = jnp.where(_own(num_heads)[..., None], query[..., None, :], 0)
        rows = own.reshape(*batch, -1, num_heads * size)
        products = map_heads(product, (rows, key.reshape(*key.shape[:-2], -1)), len(batch))
        products = jnp.matrix_transpose(lax.optimization_barrier(products))  # else XLA would change the order
        return products.reshape(*query.shape[:-1], -1)

    return of_all_heads if block_diagonal else by_head


def with_values(
    weights: Float[Array, "*B K G t s"],
    value: Float[Array, "*B s K Hv"],
    dot: Callable[..., Array],
    block_diagonal: bool,
) -> Float[Array, "*B K G t Hv"]:
    """The values multiplied by these weights; arguments as for `with_keys`."""
    *batch, num_heads, _, _, length = weights.shape

    def product(pair: tuple[Array, Array]) -> Array:
        return dot(*pair)

    if not block_diagonal:
        values = split_heads(value, (num_heads, 1))
        return map_heads(product, (weights, values), len(batch) + 2)
    of_all = map_heads(product, (weights.reshape(*batch, -1, length), value.reshape(*value.shape[:-2], -1)), len(batch))
    of_all = of_all.reshape(*weights.shape[:-1], num_heads, -1)
    return jnp.where(_own(num_heads)[..., None], of_all, 0).sum(-2)


def _own(num_heads: int) -> Bool[Array, "K 1 1 K"]:
    """Which of the key heads on the last axis is the one on the first."""
    return jnp.eye(num_heads, dtype=bool)[:, None, None, :]
