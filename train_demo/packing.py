"""Several documents in one window: a mark on the first token of each, from which everything else follows.

Where the data has several documents, windows are cut from all of them, one after the other. A token attends only to
tokens of its own document, and the first token of a document, which nothing announces, is not predicted. Positions are
not counted anew: rotary positions matter only as differences, which are the same.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from train_demo.data import FIRST


class Packed(NamedTuple):
    """Windows, with what the marks in them say.

    Attributes:
        numbers: the tokens.
        segment_ids: the document of each token, counted from the start of its window.
        first: whether a token is the first one of its document.
    """

    numbers: Int[Array, "*B T"]
    segment_ids: Int[Array, "*B T"]
    first: Bool[Array, "*B T"]


def unpack(windows: Int[Array, "*B T"]) -> Packed:
    """Takes the marks off the tokens.

    Example:
        >>> numbers, segment_ids, first = unpack(jnp.array([7, 8, 5 | FIRST, 6]))
        >>> numbers.tolist(), segment_ids.tolist(), first.tolist()
        ([7, 8, 5, 6], [0, 0, 1, 1], [False, False, True, False])
    """
    first = windows >= FIRST
    return Packed(windows % FIRST, jnp.cumsum(first, axis=-1, dtype=jnp.int32), first)


def predicted_share(windows: Int[Array, "*B T+1"]) -> Float[Array, ""]:
    """The share of the tokens after the first of each window that are predicted: 1, if no document starts there."""
    return 1 - unpack(windows).first[..., 1:].mean()
