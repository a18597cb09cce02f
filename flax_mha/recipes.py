"""Ten kinds of attention in plain Python: each function returns arguments for `dot_product_attention`.

They are as short as they look: copy one, change a line, and it is another attention, still in memory O(T + S).
The names of the arguments follow PyTorch's FlexAttention, whose recipes can be ported line by line.

Example:
  >>> import jax
  >>> from flax_mha import dot_product_attention, recipes
  >>> query = key = value = jax.random.normal(jax.random.key(0), (1, 1000, 4, 16))
  >>> dot_product_attention(query, key, value, **recipes.alibi(num_heads=4)).shape
  (1, 1000, 4, 16)
  >>> print(recipes.prefix_lm(3)["mask"])
  ███·····
  ███·····
  ███·····
  ████····
  █████···
  ██████··
  ███████·
  ████████
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_mha.masks import CausalMask, FunctionMask, LocalMask, SegmentMask

Arguments = dict[str, Any]


def causal() -> Arguments:
    """Each token sees itself and what came before."""
    return {"mask": CausalMask()}


def sliding_window(width: int) -> Arguments:
    """Each token sees itself and the `width` before it. Beltagy et al., Longformer, arXiv:2004.05150."""
    return {"mask": LocalMask(width, 0)}


def prefix_lm(length: int) -> Arguments:
    """The first `length` tokens see each other, the others what came before. Raffel et al., T5, arXiv:1910.10683."""
    return {"mask": CausalMask() | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < length)}


def documents(ids: Int[Array, "*B S"]) -> Arguments:
    """Several documents packed into one sequence: each token sees what came before in its own."""
    return {"mask": CausalMask() & SegmentMask(ids, ids)}


def alibi(num_heads: int) -> Arguments:
    """ScoreRule fall with the distance, at another rate in each head. Press et al., ALiBi, arXiv:2108.12409, section 3.

    The slopes are those of the authors' code, as Bloom has them: of n heads, n a power of two, 2^(-8/n), 2^(-16/n), up
    to 2^-8. Another number of heads takes the slopes of the power of two below it, and then every second one of the
    power of two above it.

    Raises:
      ValueError: If `num_heads` is no integer of 1 or more.
    """
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or num_heads < 1:
        raise ValueError(f"num_heads must be an int >= 1, but got {num_heads!r}.")
    below = 2 ** (num_heads.bit_length() - 1)
    exponents = [*(8 * np.arange(1, below + 1) / below), *(4 * np.arange(1, 2 * (num_heads - below), 2) / below)]
    slopes = jnp.asarray(2.0 ** -np.array(exponents), jnp.float32)

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score - slopes[h].astype(score.dtype) * (q_idx - kv_idx).astype(score.dtype)

    return {"mask": CausalMask(), "score_mod": score_mod}


def t5_bias(table: Float[Array, "buckets N"], max_distance: int = 128) -> Arguments:
    """A learned bias by distance, in buckets that widen; `table` gets a gradient. Raffel et al., arXiv:1910.10683, 2.1.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`; causal.
    """
    table, exact = jnp.asarray(table), table.shape[0] // 2

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.maximum(q_idx - kv_idx, 0)
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / jnp.log(max_distance / exact)
        large = exact + (ratio * (table.shape[0] - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(large, table.shape[0] - 1))
        return score + table[bucket, h].astype(score.dtype)

    return {"mask": CausalMask(), "score_mod": score_mod}


def soft_cap(cap: float = 50.0) -> Arguments:
    """Causal; scores s become cap * tanh(s / cap). Gemma 2, arXiv:2408.00118, section 2."""
    return {"mask": CausalMask(), "logits_soft_cap": cap}


def attention_sinks(sinks: Float[Array, " N"], width: int = 127) -> Arguments:
    """One learned logit per head that takes attention and has no value, with a window. gpt-oss, arXiv:2508.10925."""
    return {"mask": LocalMask(width, 0), "sinks": sinks}


def dilated(step: int) -> Arguments:
    """Each token sees every `step`-th before it. Child et al., Sparse Transformers, arXiv:1904.10509, section 4.2."""
    return {"mask": CausalMask() & FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0)}


def block_sparse(table: Bool[Array, "N rows columns"], block: int) -> Arguments:
    """Blocks of `block` x `block` scores as `table` says, for each head. Zaheer et al., BigBird, arXiv:2007.14062."""
    table = jnp.asarray(table)
    return {"mask": FunctionMask(lambda b, h, q_idx, kv_idx: table[h, q_idx // block, kv_idx // block])}
