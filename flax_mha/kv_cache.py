"""`KVCache`: the keys and values of the tokens so far, a value in and a value out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_mha import _check
from flax_mha._platform import readable
from flax_mha.masks import ArrayMask, Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of up to S tokens, the first `index` of which are written.

    Attributes:
      key: [B..., S, K, H].
      value: [B..., S, K, Hv].
      index: Where the next token goes; int32.
    """

    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    index: Int[Array, ""]

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Key, value and index."""
        return self.key, self.value, self.index

    @property
    def has_room(self) -> Bool[Array, ""] | bool:
        """Whether one more token fits: True, or under `jit` an array.

        Raises:
          ValueError: If none fits and the index is known.
        """
        length = self.key.shape[-3]
        if not readable(self.index):
            return self.index < length
        if int(np.asarray(self.index)) >= length:
            raise ValueError(
                f"the cache must have room for one more token, but all its {length} places are taken; start one with "
                "a greater length."
            )
        return True

    def append(self, key: Float[Array, "*B 1 K H"], value: Float[Array, "*B 1 K Hv"]) -> "KVCache":
        """The cache with one more token. If it is full: under `jit` the same cache, else a ValueError (`has_room`)."""
        key, value = (
            cached.at[..., self.index, :, :].set(new[..., 0, :, :].astype(cached.dtype), mode="drop")
            for cached, new in ((self.key, key), (self.value, value))
        )
        return KVCache(key, value, self.index + jnp.asarray(self.has_room, self.index.dtype))

    def masked(self, mask: Array | Mask | None) -> Array | Mask:
        """The mask of the next query: what `mask` shows of all keys up to the place where that query's token goes."""
        length = self.key.shape[-3]
        written = jnp.broadcast_to(jnp.arange(length) <= self.index, (*self.key.shape[:-3], 1, 1, length))
        if isinstance(mask, Mask):
            return mask & ArrayMask(written)
        return written if mask is None else written & _check.mask_of_numbers(mask)
