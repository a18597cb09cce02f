"""Recipes for a sequence that contains several texts, or one text several times."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_mha._src.core.integers import extremes, ids_int32, int32, int_at_least
from flax_mha._src.core.tracing import readable
from flax_mha._src.core.user_function import made_for
from flax_mha.masks import CausalMask, FunctionMask, SegmentMask
from flax_mha.recipes.arguments import Arguments


def shared_prefix(ids: Int[Array, "*B S"]) -> Arguments:
    """Packs several continuations of one prompt; each attends to the prompt and itself. arXiv:2410.20305.

    Causal: query i attends to key j <= i if ids[j] is 0 (the prompt) or ids[j] = ids[i]. The prompt is computed only
    once, for example for the chosen and the rejected answer in preference learning, or for all samples of a group. For
    modules with rotary positions, also pass `positions` in which every continuation starts where the prompt ends.

    Args:
      ids: 0 for tokens of the prompt, another number for each continuation.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import recipes
      >>> print(recipes.shared_prefix(jnp.array([0, 0, 0, 1, 1, 2, 2, 2]))["mask"])
      █·······
      ██······
      ███·····
      ████····
      █████···
      ███··█··
      ███··██·
      ███··███
    """
    ids = ids_int32("ids", ids)
    return {"mask": CausalMask() & (SegmentMask(ids, ids) | SegmentMask(ids * 0, ids))}


def block_diffusion(length: int, block: int) -> Arguments:
    """Lets noised blocks attend to earlier clean blocks (block diffusion). BD3-LM, arXiv:2503.09573, 3.3; Fast-dLLM v2.

    The sequence is the noised text followed by the clean text, with `length` tokens each. If i' is the index of token i
    in its text, and blocks have `block` tokens, query i attends to key j if

        both are noised or both are clean, and i' // block = j' // block, or
        j is clean, and i' // block > j' // block.

    For modules with rotary positions, also pass `positions`: the positions in the text, twice.

    Raises:
      ValueError: If `length` or `block` is not an integer of at least 1; in the attention, if there are more than
        2 x `length` positions.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.block_diffusion(length=4, block=2)["mask"])
      ██······
      ██······
      ··████··
      ··████··
      ····██··
      ····██··
      ····████
      ····████
    """
    length, block = int_at_least("length", length, 1), int_at_least("block", block, 1)

    @made_for(q_idx=2 * length, kv_idx=2 * length)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        q_block, kv_block = (x % length // block for x in (q_idx, kv_idx))
        same_block = (q_block == kv_block) & ((q_idx < length) == (kv_idx < length))
        return same_block | ((kv_idx >= length) & (kv_block < q_block))

    return {"mask": FunctionMask(visible)}


def tree_causal(parents: Int[Array, "*B T"], index: Int[Array, "*B"] | int = 0) -> Arguments:
    """Lets drafted tokens in a tree attend to their own branch and the text before. SpecInfer, arXiv:2305.09781.

    One call over a cache then verifies all branches, and `KVCache.keep` keeps one of them. For modules with rotary
    positions, also pass `positions`: `index` plus the depth of each token.

    Args:
      parents: For each token of the tree, the index of its parent, which must be smaller than its own index; -1 for the
        first token of a branch. [T], or [B, T] if each sequence has its own tree.
      index: Number of tokens before the tree: [] or [B].

    Raises:
      ValueError: If a parent does not come before its token and the values are not traced; in the attention, if there
        are queries after the tree, or more batch entries than trees.
    """
    parents, index = int32("parents", parents), int32("index", index)
    batches = {x.shape[0] for x, rank in ((parents, 2), (index, 1)) if x.ndim == rank}
    if parents.ndim not in (1, 2) or index.ndim > 1 or not parents.size or len(batches) > 1:
        raise ValueError(
            f"parents must have shape [T] or [B, T], and index [] or [B], but got {parents.shape} and {index.shape}."
        )
    each = np.arange(parents.shape[-1], dtype=np.int32)
    if readable(parents) and not np.all((parents >= -1) & (parents < each)):
        raise ValueError(f"parents must precede their tokens or be -1, but got {np.asarray(parents).tolist()}.")
    sizes = {"b": max(batches)} if batches else {}
    if readable(index):
        sizes["q_idx"] = extremes(index)[1] + each.size

    def move_up(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, node = carry
        above = jnp.take_along_axis(jnp.asarray(parents), jnp.maximum(node, 0), axis=-1)
        return seen | jax.nn.one_hot(node, each.size, dtype=bool), jnp.where(node < 0, -1, above)

    start = jnp.zeros((*parents.shape, each.size), bool), jnp.broadcast_to(each, parents.shape)
    seen, _ = jax.lax.fori_loop(0, each.size, move_up, start)

    @made_for(**sizes)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        first = jnp.asarray(index) if index.ndim == 0 else jnp.asarray(index)[b]
        q, kv = (jnp.clip(x - first, 0, each.size - 1) for x in (q_idx, kv_idx))
        return (kv_idx < first) | (seen[q, kv] if parents.ndim == 1 else seen[b, q, kv])

    return {"mask": CausalMask() & FunctionMask(visible)}
