"""Eleven kinds of attention in plain Python: each function returns arguments for `dot_product_attention`.

Recipes of a mask or a score function are arguments for the call of a module, too; `soft_cap` and `attention_sinks` say
what a module's constructor takes instead. `combine` makes one of several recipes.

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

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_mha.core.integers import int32, is_int
from flax_mha.core.tracing import readable
from flax_mha.masks import CausalMask, FunctionMask, LocalMask, SegmentMask

Arguments = dict[str, Any]


def combine(*recipes: Arguments) -> Arguments:
    """The arguments of several recipes as those of one.

    A score is visible where all masks agree. Score functions are applied in the order of the recipes, each to the
    result of the one before it. A soft cap comes before all score functions, wherever it stands.

    Raises:
      ValueError: If an argument that cannot be combined, such as `logits_soft_cap`, is in two recipes.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.combine(recipes.sliding_window(3), recipes.dilated(2))["mask"])
      █·······
      ·█······
      █·█·····
      ·█·█····
      ··█·█···
      ···█·█··
      ····█·█·
      ·····█·█
    """
    for recipe in recipes:
        if not isinstance(recipe, dict):
            raise ValueError(f'a recipe must be a dict of arguments, such as {{"mask": mask}}, but got {recipe!r}.')
    given = {name: [recipe[name] for recipe in recipes if name in recipe] for recipe in recipes for name in recipe}
    combined = {}
    for name, values in given.items():
        if name == "mask":
            combined[name] = functools.reduce(operator.and_, values)
        elif len(values) == 1:
            combined[name] = values[0]
        elif name == "score_mod":
            combined[name] = _in_order(values)
        else:
            raise ValueError(f"{name} must be in one of the recipes only, but got it in {len(values)}.")
    return combined


def _in_order(score_mods: list[Any]) -> Any:
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        for one in score_mods:
            score = one(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def causal() -> Arguments:
    """Each token sees itself and what came before."""
    return {"mask": CausalMask()}


def sliding_window(width: int) -> Arguments:
    """Each token sees itself and the `width` before it. Beltagy et al., Longformer, arXiv:2004.05150.

    A module that decodes takes `local_window_size=(width, 0)` in its constructor instead: its cache is a ring then.
    """
    return {"mask": LocalMask(width, 0)}


def prefix_lm(length: int) -> Arguments:
    """The first `length` tokens see each other, the others what came before. Raffel et al., T5, arXiv:1910.10683."""
    return {"mask": CausalMask() | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < length)}


def documents(ids: Int[Array, "*B S"]) -> Arguments:
    """Several documents packed into one sequence: each token sees what came before in its own."""
    return {"mask": CausalMask() & SegmentMask(ids, ids)}


def alibi(num_heads: int) -> Arguments:
    """Scores fall with the distance, at another rate in each head. Press et al., ALiBi, arXiv:2108.12409, section 3.

    The slopes are those of the authors' code, as Bloom has them: of n heads, n a power of two, 2^(-8/n), 2^(-16/n), up
    to 2^-8. Another number of heads takes the slopes of the power of two below it, and then every second one of the
    power of two above it.

    Raises:
      ValueError: If `num_heads` is no integer of 1 or more.
    """
    if not is_int(num_heads) or num_heads < 1:
        raise ValueError(f"num_heads must be an int >= 1, but got {num_heads!r}.")
    return {"mask": CausalMask(), "score_mod": _alibi(int(num_heads))}


@functools.cache
def _alibi(num_heads: int) -> Callable[..., Array]:
    below = 2 ** (num_heads.bit_length() - 1)
    exponents = [*(8 * np.arange(1, below + 1) / below), *(4 * np.arange(1, 2 * (num_heads - below), 2) / below)]
    with jax.ensure_compile_time_eval():
        slopes = jnp.asarray(2.0 ** -np.array(exponents), jnp.float32)

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score - slopes[h].astype(score.dtype) * (q_idx - kv_idx).astype(score.dtype)

    score_mod.__qualname__ = "alibi.score_mod"  # in errors
    return score_mod


def t5_bias(table: Float[Array, "buckets N"], max_distance: int = 128, bidirectional: bool = False) -> Arguments:
    """A learned bias by distance, in buckets that widen; `table` gets a gradient. Raffel et al., arXiv:1910.10683, 2.1.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`; causal. With
    `bidirectional`, as in encoders, the upper half of the table is for keys after the query.
    """
    table = jnp.asarray(table)
    buckets = table.shape[0] // (2 if bidirectional else 1)
    exact = buckets // 2

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx) if bidirectional else jnp.maximum(q_idx - kv_idx, 0)
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / jnp.log(max_distance / exact)
        large = exact + (ratio * (buckets - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(large, buckets - 1))
        bucket += jnp.where(kv_idx > q_idx, buckets, 0) if bidirectional else 0
        return score + table[bucket, h].astype(score.dtype)

    return {"score_mod": score_mod} if bidirectional else {"mask": CausalMask(), "score_mod": score_mod}


def soft_cap(cap: float = 50.0) -> Arguments:
    """Causal; scores s become cap * tanh(s / cap). Gemma 2, arXiv:2408.00118, section 2.

    For `dot_product_attention`. A module takes `logits_soft_cap=cap` in its constructor, and `causal()` in its call.
    """
    return {"mask": CausalMask(), "logits_soft_cap": cap}


def attention_sinks(sinks: Float[Array, " N"], width: int = 127) -> Arguments:
    """One learned logit per head that takes attention and has no value, with a window. gpt-oss, arXiv:2508.10925.

    For `dot_product_attention`. A module takes `sinks=True` and `local_window_size=(width, 0)` in its constructor: the
    sinks are its parameter.
    """
    return {"mask": LocalMask(width, 0), "sinks": sinks}


def dilated(step: int) -> Arguments:
    """Each token sees every `step`-th before it. Child et al., Sparse Transformers, arXiv:1904.10509, section 4.2."""
    return {"mask": CausalMask() & FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0)}


def block_sparse(table: Bool[Array, "N rows columns"], block: int) -> Arguments:
    """Blocks of `block` x `block` scores as `table` says, for each head. Zaheer et al., BigBird, arXiv:2007.14062.

    The table must have a row for each block of queries and a column for each block of keys of the call.
    """
    table = jnp.asarray(table)
    return {"mask": FunctionMask(lambda b, h, q_idx, kv_idx: table[h, q_idx // block, kv_idx // block])}


def tree_causal(parents: Int[Array, "*B T"], index: Int[Array, "*B"] | int = 0) -> Arguments:
    """Drafted tokens see the branch of a tree that leads to them, and all before it. SpecInfer, arXiv:2305.09781.

    One call over a cache verifies all branches then, and `KVCache.keep` keeps one of them. Modules with rotary
    positions take `positions` besides: `index` plus the depth of each token.

    Args:
      parents: For each token of the tree the number of the one before it in its branch, which must come earlier in the
        array; -1 for one that follows the text. [T], or [B, T] where trees differ.
      index: Number of tokens before the tree: one, or [B].

    Raises:
      ValueError: If a parent does not come before its token, and that is known.
    """
    parents, index = int32("parents", parents), int32("index", index)
    if parents.ndim not in (1, 2) or index.ndim > 1 or not parents.size:
        raise ValueError(
            f"parents must be [T] or [B, T] and index [] or [B], but got {parents.shape} and {index.shape}."
        )
    each = np.arange(parents.shape[-1], dtype=np.int32)
    if readable(parents) and not np.all(parents < each):
        raise ValueError(f"parents must come before their tokens, but got {np.asarray(parents).tolist()}.")

    def one_up(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, node = carry
        above = jnp.take_along_axis(jnp.asarray(parents), jnp.maximum(node, 0), axis=-1)
        return seen | jax.nn.one_hot(node, each.size, dtype=bool), jnp.where(node < 0, -1, above)

    start = jnp.zeros((*parents.shape, each.size), bool), jnp.broadcast_to(each, parents.shape)
    seen, _ = jax.lax.fori_loop(0, each.size, one_up, start)

    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        first = jnp.asarray(index) if index.ndim == 0 else jnp.asarray(index)[b]
        q, kv = (jnp.clip(x - first, 0, each.size - 1) for x in (q_idx, kv_idx))
        return (kv_idx < first) | (seen[q, kv] if parents.ndim == 1 else seen[b, q, kv])

    return {"mask": CausalMask() & FunctionMask(visible)}
