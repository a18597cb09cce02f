"""Cuts and joins stacked weights, adds and drops biases of zeros, and checks shapes against heads and layouts."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from flax_mha.convert import layouts
from flax_mha.convert.layouts import ALL, PATHS, SIZES, TORCH_AXES, Layout

Arrays = dict[str, np.ndarray]


def cut(layout: Layout, key: str, array: np.ndarray, heads: int, kv_heads: int) -> Iterable[np.ndarray]:
    """Cuts the array under one key into the weights [out, in] or biases [out] that `layout.stacks[key]` names."""
    array = array.T if layout.transposed else array
    if len(layout.stacks[key]) == 1:
        return [array]
    counts = [heads if path.startswith(("query", "gate")) else kv_heads for path in layout.stacks[key]]
    groups = layout.groups or min(counts)
    size, rest = divmod(len(array), sum(counts))
    if rest or any(count % groups for count in counts):
        into = "query, key and value heads" if layout.is_stacked else "query and gate heads"
        raise ValueError(
            f"num_heads and num_kv_heads must split the {len(array)} features of {key} into {into} of equal size, but "
            f"got {heads} and {kv_heads}; use the values from the model's config."
        )
    rows = array.reshape(groups, -1, size, *array.shape[1:])
    parts = np.split(rows, np.cumsum(counts)[:-1] // groups, axis=1)
    return [part.reshape(-1, *array.shape[1:]) for part in parts]


def join(layout: Layout, paths: list[str], found: Arrays, sizes: Mapping[str, int]) -> np.ndarray:
    """Stacks the arrays in `found` with these Flax paths into a new array in C order; the inverse of `cut`."""
    groups = 1 if len(paths) == 1 else layout.groups or sizes["K" if layout.is_stacked else "N"]
    arrays = [found[path] for path in paths]
    rows = [array.reshape(groups, -1, *array.shape[1:]) for array in arrays]
    array = np.concatenate(rows, axis=1).reshape(-1, *arrays[0].shape[1:])
    return (array.T if layout.transposed else array).copy()


def torch_axes(has_head_gate: bool) -> dict[str, str]:
    return TORCH_AXES | (layouts.TORCH_HEAD_GATE if has_head_gate else {})


def flax_axes(has_head_gate: bool, norms_of_all_heads: Collection[str]) -> dict[str, str]:
    norms = {path: axes for path, axes in layouts.NORMS_OF_ALL_HEADS.items() if path in norms_of_all_heads}
    return layouts.FLAX_AXES | layouts.OTHER_AXES | norms | (layouts.HEAD_GATE if has_head_gate else {})


def find_sizes(arrays: Arrays, axes: Mapping[str, str]) -> dict[str, int]:
    """Returns the size of each letter in `axes`, which names the axes of each array; refuses arrays that disagree."""
    sizes: dict[str, int] = {}
    for path, array in arrays.items():
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in axes[path])
        pairs = zip(axes[path], array.shape, strict=False)
        if array.ndim != len(axes[path]) or any(sizes.setdefault(letter, size) != size for letter, size in pairs):
            raise ValueError(f"{path} must have shape ({expected}) to match the other arrays, but got {array.shape}")
    return sizes


def head_sizes(sizes: Mapping[str, int], heads: int, kv_heads: int) -> dict[str, int]:
    """Returns heads N and K, and their sizes H and U; raises a ValueError unless they fit the features in `sizes`."""
    found = {}
    for letter, queries, keys, what in (
        ("H", "A", "B", f"{sizes['A']} query and {sizes['B']} key features"),
        ("U", "C", "W", f"the {sizes['C']} input features of the output projection, and {sizes['W']} value features,"),
    ):
        found[letter], rest = divmod(sizes[queries], heads)
        if rest or found[letter] * kv_heads != sizes[keys]:
            raise ValueError(
                f"num_heads and num_kv_heads must split {what} into heads of equal size, but got {heads} and "
                f"{kv_heads}; use the values from the model's config."
            )
    return {"N": heads, "K": kv_heads, **found}


def misfit(layout: Layout, arrays: Arrays, sizes: Mapping[str, int]) -> str:
    """Returns why the layout cannot hold the arrays, or an empty string; `sizes` maps letters of axes to sizes."""
    biased = tuple(name for name in ALL if f"{name}/bias" in arrays)
    if biased not in layout.biased:
        choices = " or on ".join(", ".join(choice) or "none" for choice in layout.biased)
        return f"it requires biases on {choices} (got {', '.join(biased) or 'none'})"
    if others := arrays.keys() - {*PATHS} - {path for paths in layout.stacks.values() for path in paths}:
        return f"it has no {', '.join(sorted(others))}"
    if missing := [x for paths in layout.stacks.values() if paths[0] in arrays for x in paths if x not in arrays]:
        return f"it also has {', '.join(missing)}"
    for key, paths in layout.stacks.items():
        if len(dtypes := {str(arrays[path].dtype) for path in paths if path in arrays}) > 1:
            return f"the arrays stacked in {key} must have the same dtype, but have dtypes {', '.join(sorted(dtypes))}"
    if not layout.gate_bias and "gate/kernel" not in arrays:
        return "it requires a gate"
    if not layout.value_sizes and (sizes["A"], sizes["B"]) != (sizes["C"], sizes["W"]):
        return (
            f"its values must have the head size of its queries, but got query out {sizes['A']}, key out {sizes['B']}, "
            f"value out {sizes['W']}, out in {sizes['C']}"
        )
    if layout.groups > 1 and any(sizes.get(c, 0) % layout.groups for c in "NK"):
        return f"num_heads and num_kv_heads must be multiples of {layout.groups}, but got {sizes['N']} and {sizes['K']}"
    for letters, reason in (
        (layout.equal, "feature sizes must be equal"),
        ("QSV", "stacked weights must have the same input size"),
    ):
        if len({sizes[c] for c in letters}) > 1 and (letters == layout.equal or layout.is_stacked):
            return f"its {reason}, but got {', '.join(f'{SIZES[c]} {sizes[c]}' for c in letters)}"
    return ""


def fill_with_zeros(arrays: Arrays) -> Arrays:
    """Adds biases of zeros to projections without one, if any projection has a bias."""
    if not any(path.endswith("/bias") for path in arrays):
        return arrays
    kernels = {name: arrays[f"{name}/kernel"] for name in (*ALL, "gate") if f"{name}/kernel" in arrays}
    shapes = {name: kernel.shape[-1:] if name == "out" else kernel.shape[1:] for name, kernel in kernels.items()}
    return {f"{name}/bias": np.zeros(shapes[name], kernel.dtype) for name, kernel in kernels.items()} | arrays


def drop_zeros(layout: Layout, arrays: Arrays) -> Arrays:
    """Leaves out biases that are zero, if models of this layout may lack them; else returns all arrays."""
    biased = {name for name in ALL if f"{name}/bias" in arrays}
    for choice in layout.biased:
        dropped = {f"{name}/bias" for name in biased - {*choice}}
        if not layout.gate_bias or "query/bias" in dropped:
            dropped |= {"gate/bias"} & {*arrays}
        if biased.issuperset(choice) and not any(arrays[path].any() for path in dropped):
            return {path: array for path, array in arrays.items() if path not in dropped}
    return dict(arrays)
