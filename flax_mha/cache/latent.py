"""Latent attention: keys and values of all heads are linear in one short vector per token, which is what is cached.

With the latent c of a token [C], the rotary part r of its key [R], which all heads share, and a head's matrices W, V:

    query . key = q . (W c) + q_r . r = (W^T q) . c + q_r . r        value = V c

So queries can be multiplied into the cache ("absorbed"), where [c, r] is the one key that all heads have, its first C
features are the value, and V is applied to what the attention returns. Liu et al., DeepSeek-V2, arXiv:2405.04434.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jaxtyping import Array, Float


class Latent(NamedTuple):
    """The matrices W and V of all heads, in one kernel, and products by them; the module's docstring defines them."""

    kernel: Float[Array, "C N F"]  # W and V of the module's docstring
    key_size: int  # the features of a head's query and key that are not rotary, the first ones of F
    dtype: Any = None  # of the products; None infers it
    precision: Any = None

    @property
    def size(self) -> int:
        """C, the features of the latent."""
        return self.kernel.shape[0]

    def expand(self, key: Float[Array, "*B S 1 CR"]) -> tuple[Float[Array, "*B S N H"], Float[Array, "*B S N Hv"]]:
        """Computes the keys [W c, r] and the values V c of all heads from cached keys [c, r]."""
        heads = self._product("...c,cnf->...nf", key[..., 0, : self.size], self.kernel)
        content, value = heads[..., : self.key_size], heads[..., self.key_size :]
        rotary = key[..., self.size :].astype(heads.dtype) + jnp.zeros_like(content[..., :1])  # split as heads are
        return jnp.concatenate([content, rotary], axis=-1), value

    def absorb(self, query: Float[Array, "*B T N H"]) -> Float[Array, "*B T N CR"]:
        """Multiplies queries by W^T: their products with cached keys [c, r] are then those with the keys of heads."""
        content, rotary = query[..., : self.key_size], query[..., self.key_size :]
        absorbed = self._product("...nf,cnf->...nc", content, self.kernel[..., : self.key_size])
        return jnp.concatenate([absorbed, rotary.astype(absorbed.dtype)], axis=-1)

    def project(self, x: Float[Array, "*B T N CR"]) -> Float[Array, "*B T N Hv"]:
        """Drops the last R features of the attention's output, averages of cached keys [c, r], and multiplies by V."""
        # As one program with the product, XLA's CPU does not transpose V, but multiplies along its strides.
        by_head = lax.optimization_barrier(jnp.swapaxes(self.kernel[..., self.key_size :], 0, 1))
        return self._product("...nc,ncf->...nf", x[..., : self.size], by_head)

    def _product(self, axes: str, x: Array, kernel: Array) -> Array:
        x, kernel = dtypes.promote_dtype((x, kernel), dtype=self.dtype)
        return jnp.einsum(axes, x, kernel, precision=self.precision)


def compress(
    project: Callable[[Array], Array], normalize: Callable[[Array], Array], size: int, x: Float[Array, "*B T D"]
) -> Float[Array, "*B T 1 CR"]:
    """Computes from x the key that all heads share: the normalized latent of `size` features, then the rotary key."""
    both = project(x)
    latent = normalize(both[..., :size])
    return jnp.concatenate([latent, both[..., size:].astype(latent.dtype)], axis=-1)[..., None, :]
