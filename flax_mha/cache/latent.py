"""Latent attention: keys and values of all heads are linear in one short vector per token, the latent, which is cached.

A token has a latent c [C] and a rotary key r [R], which all heads share. A head's query has a rotary part q_r; q is the
rest. With the head's matrices W and V:

    query . key = q . (W c) + q_r . r = (W^T q) . c + q_r . r        value = V c

So attention can run on the cache itself if queries are multiplied by W^T ("absorbed"). All heads then share the keys
[c, r]; the values are their first C features; and V multiplies the output. Liu et al., DeepSeek-V2, arXiv:2405.04434.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jaxtyping import Array, Float

Layer = Callable[[Array], Array]


class Latent(NamedTuple):
    """Multiplies by the matrices W and V of all heads, which one kernel holds; see the docstring of this file."""

    kernel: Float[Array, "C N F"]  # W, then V, along the axis F
    key_size: int  # the features of a head's query and key that are not rotary, the first ones of F
    dtype: Any = None  # of the products; None infers it
    precision: Any = None

    @property
    def size(self) -> int:
        """C, the number of features of a latent."""
        return self.kernel.shape[0]

    def expand(self, key: Float[Array, "*B S 1 CR"]) -> tuple[Float[Array, "*B S N H"], Float[Array, "*B S N Hv"]]:
        """Computes the keys [W c, r] and the values V c of all heads from cached keys [c, r]."""
        heads = self._product("...c,cnf->...nf", key[..., 0, : self.size], self.kernel)
        content, value = heads[..., : self.key_size], heads[..., self.key_size :]
        rotary = key[..., self.size :].astype(heads.dtype) + jnp.zeros_like(content[..., :1])  # sharded like heads
        return jnp.concatenate([content, rotary], axis=-1), value

    def absorb(self, query: Float[Array, "*B T N H"]) -> Float[Array, "*B T N CR"]:
        """Multiplies queries by W^T: products with cached keys [c, r] then equal those with the keys of all heads."""
        content, rotary = query[..., : self.key_size], query[..., self.key_size :]
        absorbed = self._product("...nf,cnf->...nc", content, self.kernel[..., : self.key_size])
        return jnp.concatenate([absorbed, rotary.astype(absorbed.dtype)], axis=-1)

    def project(self, x: Float[Array, "*B T N CR"]) -> Float[Array, "*B T N Hv"]:
        """Computes each head's output V c from x = [c, r], the average of cached keys with the head's weights."""
        # Without the barrier, XLA on CPUs fuses the transpose into the product, which then reads V with strides.
        by_head = lax.optimization_barrier(jnp.swapaxes(self.kernel[..., self.key_size :], 0, 1))
        return self._product("...nc,ncf->...nf", x[..., : self.size], by_head)

    def _product(self, axes: str, x: Array, kernel: Array) -> Array:
        x, kernel = dtypes.promote_dtype((x, kernel), dtype=self.dtype)
        return jnp.einsum(axes, x, kernel, precision=self.precision)


def compress(
    project: Layer, normalize: Layer, normalize_rotary: Layer | None, size: int, x: Float[Array, "*B T D"]
) -> Float[Array, "*B T 1 CR"]:
    """Computes the one key of all heads from inputs x: the normalized latent (`size` features), then the rotary key.

    `project` maps x to both parts, before the norms; without `normalize_rotary`, the rotary key has no norm.
    """
    both = project(x)
    latent, rotary = normalize(both[..., :size]), both[..., size:]
    rotary = rotary if normalize_rotary is None else normalize_rotary(rotary)
    return jnp.concatenate([latent, rotary.astype(latent.dtype)], axis=-1)[..., None, :]
