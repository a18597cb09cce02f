"""Latent attention: keys and values of all heads are linear in one short vector per
token, the latent, which is cached.

A token has a latent c [C] and a rotary key r [R], which all heads share. A head's query
has a rotary part q_r; q is the rest. With the head's matrices W and V:

    query . key = q . (W c) + q_r . r = (W^T q) . c + q_r . r        value = V c

So attention can run on the cache itself if queries are multiplied by W^T ("absorbed").
All heads then share the keys [c, r]; the values are their first C features; and V
multiplies the output. Liu et al., DeepSeek-V2, arXiv:2405.04434.

Only a plain product can be absorbed. If another layer computes W c and V c (LoRA,
quantization), every call expands the latents to the keys and values of all heads by
calling that layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src.call.call import accumulation_dtype

Layer = Callable[[Array], Array]


class Latent(NamedTuple):
    """Computes keys and values of all heads from latents, or absorbs their matrices;
    see the docstring of this file.
    """

    size: int  # C, the number of features of a latent
    # The features of a head's query and key that are not rotary, the first ones of F.
    key_size: int
    # Projects latents [B..., S, C] to W c, then V c, along the axis F of [B..., S, N,
    # F].
    layer: Layer
    # W and V of all heads, [C, N, F], if that product is all that `layer` does; None:
    # nothing can be absorbed.
    kernel: Float[Array, "C N F"] | None = None
    dtype: DTypeLike | None = None  # of the products; None infers it
    precision: lax.PrecisionLike = None

    def expand(
        self, key: Float[Array, "*B S 1 CR"]
    ) -> tuple[Float[Array, "*B S N H"], Float[Array, "*B S N Hv"]]:
        """Computes the keys [W c, r] and the values V c of all heads from cached keys
        [c, r].
        """
        heads = self.layer(key[..., 0, : self.size])
        content = heads[..., : self.key_size]
        value = heads[..., self.key_size :]
        # Sharded like heads.
        rotary = key[..., self.size :].astype(heads.dtype) + jnp.zeros_like(
            content[..., :1]
        )
        return jnp.concatenate([content, rotary], axis=-1), value

    def absorb(self, query: Float[Array, "*B T N H"]) -> Float[Array, "*B T N CR"]:
        """Multiplies queries by W^T: products with cached keys [c, r] then equal those
        with the keys of all heads.
        """
        assert self.kernel is not None
        content = query[..., : self.key_size]
        rotary = query[..., self.key_size :]
        absorbed = self._product(
            "...nf,cnf->...nc", content, self.kernel[..., : self.key_size]
        )
        return jnp.concatenate([absorbed, rotary.astype(absorbed.dtype)], axis=-1)

    def project(self, x: Float[Array, "*B T N CR"]) -> Float[Array, "*B T N Hv"]:
        """Computes each head's output V c from x = [c, r], the average of cached keys
        with the head's weights.
        """
        assert self.kernel is not None
        # Heads come first in both operands. Without the barrier, XLA on CPUs would fuse
        # the transposes into the product: V is then read with strides, and products of
        # bfloat16 fail ("DotThunk ... BF16 x BF16 = F32").
        averages = jnp.moveaxis(x[..., : self.size], -2, 0)
        by_head = jnp.swapaxes(self.kernel[..., self.key_size :], 0, 1)
        averages, by_head = lax.optimization_barrier((averages, by_head))
        values = self._product("n...c,ncf->n...f", averages, by_head)
        return jnp.moveaxis(values, 0, -2)

    def _product(self, axes: str, x: Array, kernel: Array) -> Array:
        x, kernel = dtypes.promote_dtype((x, kernel), dtype=self.dtype)
        # A TPU may add up products of bfloat16 in bfloat16.
        wide = accumulation_dtype(x.dtype)
        products = jnp.einsum(
            axes, x, kernel, precision=self.precision, preferred_element_type=wide
        )
        return products.astype(x.dtype)
