"""The layout of one head: every array of a call as [B..., K or 1, G or 1, the part of one head].

B are the batch axes, K the key and value heads, G = N / K the query heads that share one of them. An axis of length 1
is shared by all. In this layout `heads.over_heads` maps the math of one head over all of them.
"""

import functools
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha.masks import Mask

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


def by_head(x: AnyArray, axes: str, batch_rank: int, groups: tuple[int, int]) -> AnyArray:
    """An array with the axes [B..., N or 1, part], of which any may be missing, in the layout of one head.

    Args:
      x: The array.
      axes: Names of its axes, as in the field metadata of masks (`masks/base.py`), for example "B N T S".
      batch_rank: Number of batch axes of the call.
      groups: K and G.
    """
    names = axes.split()
    batch = batch_rank if "B" in names else 0
    head = groups if "N" in names and x.shape[batch] != 1 else (1, 1)
    part = x.shape[batch + ("N" in names) :]
    return x.reshape(*(x.shape[:batch] if batch else (1,) * batch_rank), *head, *part)


def mask_by_head(mask: Mask, batch_rank: int, groups: tuple[int, int]) -> Mask:
    """A canonical mask in the layout of one head."""
    return mask.map_arrays(functools.partial(by_head, batch_rank=batch_rank, groups=groups))


def split_heads(x: Float[Array, "*B L N F"], groups: tuple[int, int]) -> Float[Array, "*B K G L F"]:
    """Queries, keys or values; keys and values have groups (K, 1)."""
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])


def vectors_by_head(x: Float[Array, "*B L N"], groups: tuple[int, int]) -> Float[Array, "*B K G L"]:
    """One number for each query, or for each key."""
    rank = x.ndim - 2
    x = lax.transpose(x, (*range(rank), rank + 1, rank))
    return lax.reshape(x, (*x.shape[:rank], *groups, x.shape[-1]))


def to_caller(
    output: Float[Array, "*B K G T Hv"], lse: Float[Array, "*B K G T"], dtype: DTypeLike
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output, in this dtype, and log-sum-exp in the caller's layout."""
    return join_heads(output).astype(dtype), join_heads(lse[..., None])[..., 0]


def from_caller(
    output: Float[Array, "*B T N Hv"], lse: Float[Array, "*B T N"], groups: tuple[int, int]
) -> tuple[Float[Array, "*B K G T Hv"], Float[Array, "*B K G T"]]:
    """The inverse of `to_caller`, in the dtype of the log-sum-exp."""
    return split_heads(output.astype(lse.dtype), groups), vectors_by_head(lse, groups)


def join_heads(x: Float[Array, "*B K G L F"]) -> Float[Array, "*B L N F"]:
    """Back to the caller's layout."""
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)
