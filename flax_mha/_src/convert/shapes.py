"""Cuts and joins stacked weights, adds and drops biases of zeros, and checks shapes
against heads and layouts.
"""

from collections.abc import Collection, Mapping

import numpy as np

from flax_mha._src.convert import layouts
from flax_mha._src.convert.layouts import ALL, PATHS, SIZES, TORCH_AXES, Layout

Arrays = dict[str, np.ndarray]


def cut(
    layout: Layout, key: str, array: np.ndarray, heads: int, kv_heads: int
) -> list[np.ndarray]:
    """Cuts the array under one key into the weights [out, in] or biases [out] that
    `layout.stacks[key]` names.
    """
    if layout.transposed:
        array = array.T
    paths = layout.stacks[key]
    if len(paths) == 1:
        return [array]
    counts = [
        heads if path.startswith(("query", "gate")) else kv_heads for path in paths
    ]
    groups = layout.groups or min(counts)
    rows = len(array)
    features = array.shape[1:]
    if rows % sum(counts) or any(count % groups for count in counts):
        if layout.is_stacked:
            into = "query, key and value heads"
        else:
            into = "query and gate heads"
        raise ValueError(
            f"num_heads and num_kv_heads must split the {rows} features of {key} into "
            f"{into} of equal size, but got {heads} and {kv_heads}; use the values "
            "from the model's config."
        )
    size = rows // sum(counts)
    in_groups = array.reshape(groups, -1, size, *features)
    ends = np.cumsum(counts) // groups
    parts = np.split(in_groups, ends[:-1], axis=1)
    return [part.reshape(-1, *features) for part in parts]


def join(
    layout: Layout, paths: list[str], found: Arrays, sizes: Mapping[str, int]
) -> np.ndarray:
    """Stacks the arrays in `found` with these Flax paths into a new array in C order;
    the inverse of `cut`.
    """
    groups = 1
    if len(paths) > 1:
        groups = layout.groups or sizes["K" if layout.is_stacked else "N"]
    arrays = [found[path] for path in paths]
    features = arrays[0].shape[1:]
    in_groups = [array.reshape(groups, -1, *features) for array in arrays]
    array = np.concatenate(in_groups, axis=1).reshape(-1, *features)
    if layout.transposed:
        array = array.T
    return array.copy()


def torch_axes(has_head_gate: bool) -> dict[str, str]:
    """Returns the axes of each parameter in PyTorch."""
    if has_head_gate:
        return TORCH_AXES | layouts.TORCH_HEAD_GATE
    return dict(TORCH_AXES)


def flax_axes(
    has_head_gate: bool, norms_of_all_heads: Collection[str]
) -> dict[str, str]:
    """Returns the letters of each parameter's axes in Flax, by the parameter's path."""
    axes = layouts.FLAX_AXES | layouts.OTHER_AXES
    for path, letters in layouts.NORMS_OF_ALL_HEADS.items():
        if path in norms_of_all_heads:
            axes[path] = letters
    if has_head_gate:
        axes |= layouts.HEAD_GATE
    return axes


def find_sizes(arrays: Arrays, axes: Mapping[str, str]) -> dict[str, int]:
    """Returns the size of each letter in `axes`, which names the axes of each array;
    refuses arrays that disagree.
    """
    sizes: dict[str, int] = {}
    for path, array in arrays.items():
        letters = axes[path]
        expected = [sizes.get(letter, letter) for letter in letters]
        fits = array.ndim == len(letters)
        for letter, size in zip(letters, array.shape, strict=False):
            fits = fits and sizes.setdefault(letter, size) == size
        if not fits:
            shape = ", ".join(map(str, expected))
            raise ValueError(
                f"{path} must have shape ({shape}) to match the other arrays, but got "
                f"{array.shape}"
            )
    return sizes


def head_sizes(sizes: Mapping[str, int], heads: int, kv_heads: int) -> dict[str, int]:
    """Returns heads N and K, and their sizes H and U; raises a ValueError unless they
    fit the features in `sizes`.
    """
    qk = f"{sizes['A']} query and {sizes['B']} key features"
    values = (
        f"the {sizes['C']} input features of the output projection, and {sizes['W']} "
        "value features,"
    )

    def head_size(features: int, kv_features: int, what: str) -> int:
        size, rest = divmod(features, heads)
        if rest or size * kv_heads != kv_features:
            raise ValueError(
                f"num_heads and num_kv_heads must split {what} into heads of equal "
                f"size, but got {heads} and {kv_heads}; use the values from the "
                "model's config."
            )
        return size

    # A, B, C and W are the features of queries, keys, output and values.
    return {
        "N": heads,
        "K": kv_heads,
        "H": head_size(sizes["A"], sizes["B"], qk),
        "U": head_size(sizes["C"], sizes["W"], values),
    }


def misfit(layout: Layout, arrays: Arrays, sizes: Mapping[str, int]) -> str:
    """Returns why the layout cannot hold the arrays, or an empty string; `sizes` maps
    letters of axes to sizes.
    """
    biased = tuple(name for name in ALL if f"{name}/bias" in arrays)
    # Layers may lack projections that they share with other layers.
    own = {name for name in ALL if f"{name}/kernel" in arrays}
    if biased not in [tuple(x for x in names if x in own) for names in layout.biased]:
        choices = " or on ".join(
            ", ".join(choice) or "none" for choice in layout.biased
        )
        return f"it requires biases on {choices} (got {', '.join(biased) or 'none'})"

    # Which arrays there are.
    known = {path for paths in layout.stacks.values() for path in paths}
    others = {*arrays} - {*PATHS} - known
    if others:
        return f"it has no {', '.join(sorted(others))}"
    for paths in layout.stacks.values():
        missing = [path for path in paths if path not in arrays]
        if missing and paths[0] in arrays:
            return f"it also has {', '.join(missing)}"
    if not layout.gate_bias and "gate/kernel" not in arrays:
        return "it requires a gate"

    # Their dtypes and sizes.
    for key, paths in layout.stacks.items():
        dtypes = {str(arrays[path].dtype) for path in paths if path in arrays}
        if len(dtypes) > 1:
            return (
                f"the arrays stacked in {key} must have the same dtype, but have "
                f"dtypes {', '.join(sorted(dtypes))}"
            )
    if not layout.value_sizes and (sizes["A"], sizes["B"]) != (sizes["C"], sizes["W"]):
        return (
            "its values must have the head size of its queries, but got query out "
            f"{sizes['A']}, key out {sizes['B']}, value out {sizes['W']}, out in "
            f"{sizes['C']}"
        )
    # The heads are known only for Flax's parameters.
    heads = [sizes.get(letter, 0) for letter in "NK"]
    if layout.groups > 1 and any(number % layout.groups for number in heads):
        return (
            f"num_heads and num_kv_heads must be multiples of {layout.groups}, but "
            f"got {sizes['N']} and {sizes['K']}"
        )
    equal = [(layout.equal, "feature sizes must be equal")]
    if layout.is_stacked:
        equal.append(("QSV", "stacked weights must have the same input size"))
    for letters, reason in equal:
        if len({sizes[letter] for letter in letters}) > 1:
            got = [f"{SIZES[letter]} {sizes[letter]}" for letter in letters]
            return f"its {reason}, but got {', '.join(got)}"
    return ""


def fill_with_zeros(arrays: Arrays) -> Arrays:
    """Adds biases of zeros to projections without one, if any projection has a bias."""
    if not any(path.endswith("/bias") for path in arrays):
        return arrays
    biases: Arrays = {}
    for name in (*ALL, "gate"):
        kernel = arrays.get(f"{name}/kernel")
        if kernel is not None:
            shape = kernel.shape[-1:] if name == "out" else kernel.shape[1:]
            biases[f"{name}/bias"] = np.zeros(shape, kernel.dtype)
    return biases | arrays


def drop_zeros(layout: Layout, arrays: Arrays) -> Arrays:
    """Leaves out biases that are zero, if models of this layout may lack them; else
    returns all arrays.
    """
    biased = {name for name in ALL if f"{name}/bias" in arrays}
    for choice in layout.biased:
        dropped = {f"{name}/bias" for name in biased - {*choice}}
        if "gate/bias" in arrays and (not layout.gate_bias or "query/bias" in dropped):
            dropped.add("gate/bias")
        are_zeros = not any(arrays[path].any() for path in dropped)
        if biased.issuperset(choice) and are_zeros:
            kept = [path for path in arrays if path not in dropped]
            return {path: arrays[path] for path in kept}
    return dict(arrays)
