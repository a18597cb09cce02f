"""How shapes, heads and stacked weights fit together, on both sides."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flax_mha.convert.layouts import ALL, ALL_HEADS, KERNELS, NORMS, OTHER_SHAPES, PATHS, SIZES, Layout
from flax_mha.core.integers import is_int

Arrays = dict[str, np.ndarray]


def cut(layout: Layout, key: str, array: np.ndarray, heads: int, kv_heads: int, parts: int) -> Iterable[np.ndarray]:
    """The weights [out, in] or biases [out] that are stacked in one array."""
    array = array.T if layout.transposed else array
    if parts == 1:
        return [array]
    size, rest = divmod(len(array), heads + 2 * kv_heads)
    if rest:
        raise ValueError(
            f"num_heads and num_kv_heads must cut the {len(array)} features of {key} into query heads and twice as "
            f"many key heads of one size, got {heads} and {kv_heads}; pass those of the model's config."
        )
    if not layout.by_group:
        return np.split(array, [heads * size, (heads + kv_heads) * size])
    groups = heads // kv_heads
    grouped = array.reshape(kv_heads, groups + 2, size, *array.shape[1:])
    split = np.split(grouped, [groups, groups + 1], axis=1)
    return [part.reshape(-1, *array.shape[1:]) for part in split]


def check_cut(layout: Layout, arrays: Arrays, heads: int, kv_heads: int) -> None:
    """Heads other than the model's may cut stacked weights too, but into other queries than the output takes."""
    query, out = arrays["query/kernel"], arrays["out/kernel"]
    stacked = any(len(paths) > 1 and paths[0] in KERNELS for paths in layout.stacks.values())
    if stacked and out.ndim == 2 and len(query) != out.shape[1]:
        raise ValueError(
            f"num_heads and num_kv_heads must cut the stacked weights into {out.shape[1]} query features, which the "
            f"output takes, got {heads} and {kv_heads}, which make {len(query)}; pass those of the model's config."
        )


def joined(layout: Layout, arrays: list[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """The inverse of `cut`: one new array in C order."""
    if len(arrays) > 1 and layout.by_group:
        rows = [array.reshape(sizes["K"], -1, *array.shape[1:]) for array in arrays]
        array = np.concatenate(rows, axis=1).reshape(-1, *arrays[0].shape[1:])
    else:
        array = np.concatenate(arrays)
    return (array.T if layout.transposed else array).copy()


def shapes_of_others(arrays: Arrays, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of norms and sinks in Flax, after a check that they have as many numbers.

    As many numbers as all heads together have tell a norm over all of them.
    """
    query = arrays.get(NORMS[0])
    letters = OTHER_SHAPES | (ALL_HEADS if query is not None and query.shape == (sizes["A"],) != (sizes["H"],) else {})
    shapes = {path: tuple(sizes[c] for c in letters[path]) for path in arrays.keys() & OTHER_SHAPES.keys()}
    for path, shape in shapes.items():
        if arrays[path].shape != (math.prod(shape),):
            raise ValueError(
                f"{path} must have shape ({math.prod(shape)},) for {sizes['N']} and {sizes['K']} heads, got "
                f"{arrays[path].shape}."
            )
    return shapes


def misfit(layout: Layout, arrays: Arrays, sizes: Mapping[str, int]) -> str:
    """Says why the layout cannot hold the arrays; nothing if it can."""
    biased = tuple(name for name in ALL if f"{name}/bias" in arrays)
    if biased not in layout.biased:
        choices = " or on ".join(", ".join(choice) or "none" for choice in layout.biased)
        return f"biases must be on {choices}, got them on {', '.join(biased) or 'none'}"
    if others := arrays.keys() - {*PATHS} - {path for paths in layout.stacks.values() for path in paths}:
        return f"it has no {', '.join(sorted(others))}"
    for key, paths in layout.stacks.items():
        if len(dtypes := {str(arrays[path].dtype) for path in paths if path in arrays}) > 1:
            return f"{key} must stack arrays of one dtype, got {', '.join(sorted(dtypes))}"
    if len({sizes[c] for c in layout.equal}) > 1:
        return f"its features must be one number, got {', '.join(f'{SIZES[c]} {sizes[c]}' for c in layout.equal)}"
    stacked = any(len(paths) > 1 and paths[0] in KERNELS for paths in layout.stacks.values())
    if stacked and len({sizes[c] for c in "QSV"}) > 1:
        return f"its weights stack inputs of one size, got {', '.join(f'{SIZES[c]} {sizes[c]}' for c in 'QSV')}"
    return ""


def find_sizes(arrays: Arrays, shapes: Mapping[str, str]) -> dict[str, int]:
    """Finds the size of every letter, after a check that it has but one."""
    sizes: dict[str, int] = {}
    for path, array in arrays.items():
        letters = shapes[path]
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        fits = all(sizes.setdefault(letter, size) == size for letter, size in zip(letters, array.shape, strict=False))
        if array.ndim != len(letters) or not fits:
            raise ValueError(f"{path} must have shape ({expected}) to fit the others, got {array.shape}")
    return sizes


def check_heads(heads: Any, kv_heads: Any) -> None:
    """Positive integers, of which the second divides the first."""
    if not (is_int(heads) and is_int(kv_heads)) or heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_heads must be a positive multiple of num_kv_heads, got {heads!r} and {kv_heads!r}.")


def head_sizes(features: int, kv_features: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Finds the sizes that are heads, after a check that they divide the features."""
    if features % heads or features // heads * kv_heads != kv_features:
        cut = f"cut {features} query and {kv_features} key features into heads of one size, got {heads} and {kv_heads}"
        raise ValueError(f"num_heads and num_kv_heads must {cut}; pass those of the model's config.")
    return {"N": heads, "K": kv_heads, "H": features // heads}
