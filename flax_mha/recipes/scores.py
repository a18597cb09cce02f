"""Recipes that change scores, and `combine`."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flax_mha._src.core.user_function import NAMES, made_for
from flax_mha._src.core.validation import as_array, int_at_least
from flax_mha.masks import CausalMask, LocalMask


def alibi(num_heads: int) -> dict[str, Any]:
    """Lowers scores in proportion to the distance, with a slope for each head. Press et al., ALiBi, arXiv:2108.12409.

    The slopes are the same as in the authors' code and in Bloom. If the number of heads n is a power of two, they are
    2^(-8/n), 2^(-16/n), up to 2^-8. Any other number of heads uses the slopes for the next smaller power of two, then
    every second slope for the next larger one.

    Raises:
      ValueError: If `num_heads` is not an integer of at least 1.
    """
    return {"mask": CausalMask(), "score_mod": _alibi(int_at_least("num_heads", num_heads, 1))}


@functools.cache
def _alibi(num_heads: int) -> Callable[..., Array]:
    below = 2 ** (num_heads.bit_length() - 1)
    exponents = [*(8 * np.arange(1, below + 1) / below), *(4 * np.arange(1, 2 * (num_heads - below), 2) / below)]
    with jax.ensure_compile_time_eval():
        slopes = jnp.asarray(2.0 ** -np.array(exponents), jnp.float32)

    @made_for(h=num_heads)
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score - slopes[h].astype(score.dtype) * (q_idx - kv_idx).astype(score.dtype)

    score_mod.__qualname__ = "alibi.score_mod"  # in errors
    return score_mod


def t5_bias(table: Float[Array, "buckets N"], max_distance: int = 128, bidirectional: bool = False) -> dict[str, Any]:
    """Adds a learned bias by distance, in buckets; `table` gets a gradient. Raffel et al., T5, arXiv:1910.10683, 2.1.

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`. The attention is
    causal unless `bidirectional` is True, as in encoders; the upper half of the table is then for keys after the query.

    Raises:
      ValueError: If the table does not have two axes or has too few buckets, or if `max_distance` is too small for
        them.
    """
    table = as_array("table", table, "an array [buckets, heads]")
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least:
        raise ValueError(
            f"table must have shape [buckets, heads] with at least {least} buckets, but got {table.shape}."
        )
    buckets = table.shape[0] // (2 if bidirectional else 1)
    exact = buckets // 2
    max_distance = int_at_least("max_distance", max_distance, exact + 1)

    @made_for(h=table.shape[1])
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx) if bidirectional else jnp.maximum(q_idx - kv_idx, 0)
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / jnp.log(max_distance / exact)
        large = exact + (ratio * (buckets - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(large, buckets - 1))
        bucket += jnp.where(kv_idx > q_idx, buckets, 0) if bidirectional else 0
        return score + table[bucket, h].astype(score.dtype)

    return {"score_mod": score_mod} if bidirectional else {"mask": CausalMask(), "score_mod": score_mod}


def soft_cap(cap: float = 50.0) -> dict[str, Any]:
    """Caps scores s to cap * tanh(s / cap); causal. Gemma 2, arXiv:2408.00118, section 2.

    For `dot_product_attention`. For a module, pass `logits_soft_cap=cap` to the constructor and `causal()` to the call.
    """
    return {"mask": CausalMask(), "logits_soft_cap": cap}


def attention_sinks(sinks: Float[Array, " N"], width: int = 127) -> dict[str, Any]:
    """Adds a learned logit per head to the softmax's sum, in a `sliding_window(width)`. gpt-oss, arXiv:2508.10925.

    For `dot_product_attention`. For a module, pass `sinks=True` and `local_window_size=(width, 0)` to the constructor;
    the sinks are then a parameter of the module.
    """
    return {"mask": LocalMask(width, 0), "sinks": sinks}


def combine(*recipes: dict[str, Any]) -> dict[str, Any]:
    """Combines several recipes into one.

    A query attends to the keys that all masks show. Score functions are applied in the order of the recipes, each to
    the previous result. A soft cap is applied before all score functions, whatever the order. Arguments that are None
    are ignored.

    Raises:
      ValueError: If an argument that cannot be combined, such as `logits_soft_cap`, is in two recipes, or if score
        functions are made for different numbers of heads.

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
    given: dict[str, list[Any]] = {}
    for name, value in (item for recipe in recipes for item in recipe.items() if item[1] is not None):
        given.setdefault(name, []).append(value)
    combined = {}
    for name, values in given.items():
        if name == "mask":
            combined[name] = functools.reduce(operator.and_, values)
        elif len(values) == 1:
            combined[name] = values[0]
        elif name == "score_mod":
            combined[name] = made_for(**_common_sizes(values))(_in_order(values))
        else:
            raise ValueError(f"{name} must be set by only one recipe, but {len(values)} set it.")
    return combined


def _common_sizes(score_mods: list[Any]) -> dict[str, int]:
    """Merges the `made_for` sizes of several functions: b and h must agree, q_idx and kv_idx become the smallest."""
    common: dict[str, int] = {}
    for name, size in (item for one in score_mods for item in getattr(one, "made_for", {}).items()):
        if name in "bh" and common.get(name, size) != size:
            raise ValueError(
                f"recipes must be created for the same number of {NAMES[name]}, but got {common[name]} and {size}."
            )
        common[name] = min(common.get(name, size), size)
    return common


def _in_order(score_mods: list[Any]) -> Any:
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        for one in score_mods:
            score = one(score, b, h, q_idx, kv_idx)
        return score

    return score_mod
