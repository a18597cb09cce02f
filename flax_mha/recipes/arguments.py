"""`combine`, and the type of the arguments that a recipe returns."""

import functools
import operator
from typing import Any

from jaxtyping import Array

from flax_mha._src.core.user_function import NAMES, made_for

Arguments = dict[str, Any]


def combine(*recipes: Arguments) -> Arguments:
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
