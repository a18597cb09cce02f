"""Sections of `RoPE`: the coordinate of a position that rotates each pair, and the frequency of the pair."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import numpy as np

from flax_mha._src.core.integers import is_int

SectionLayout = Literal["contiguous", "interleaved", "axial", "axial_strided"]
LAYOUTS: tuple[str, ...] = get_args(SectionLayout)


def check_sections(sections: Any, layout: Any) -> tuple[int, ...] | None:
    """Returns `sections` as a tuple of integers, or None; raises a ValueError unless it is one and fits the layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"section_layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}.")
    if sections is None:
        if layout != "contiguous":
            raise ValueError(
                f"sections must be given for section_layout {layout!r}, but got None; pass the number of pairs per "
                "coordinate."
            )
        return None
    found = tuple(sections) if isinstance(sections, Iterable) else ()
    if not found or not all(is_int(pairs) and pairs > 0 for pairs in found):
        raise ValueError(
            "sections must be None or positive integers (the number of rotated pairs per coordinate), such as "
            f"(16, 24, 24), but got {sections!r}."
        )
    if layout == "axial_strided" and len({*found}) > 1:
        raise ValueError(f"sections must all be equal for section_layout 'axial_strided', but got {found}.")
    return tuple(map(int, found))


def coordinates_of_pairs(sections: tuple[int, ...], layout: str, size: int) -> np.ndarray:
    """Returns the number of the coordinate that rotates each pair of `size` features: integers `[size / 2]`."""
    if 2 * sum(sections) != size:
        raise ValueError(
            f"sections must add up to the number of rotated pairs, {size // 2} for {size} rotated features, but got "
            f"{sections}, which sum to {sum(sections)}."
        )
    if layout != "interleaved":
        return np.repeat(np.arange(len(sections)), sections)
    pairs = np.arange(size // 2)
    turn = pairs % len(sections)
    found = np.where(pairs // len(sections) < np.asarray(sections)[turn], turn, 0)
    if tuple(np.bincount(found, minlength=len(sections))) != sections:
        raise ValueError(
            f"sections must interleave the coordinates across {size // 2} pairs and give any leftover pairs to the "
            f"first coordinate, but got {sections}."
        )
    return found


def frequencies_of_pairs(
    sections: tuple[int, ...], layout: str, size: int, of_size: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Returns the frequency of each pair, `[size / 2]`; `of_size(size)` returns those of a head without sections."""
    if layout == "axial":
        return np.concatenate([of_size(2 * pairs) for pairs in sections])
    found = of_size(size)
    return found.reshape(-1, len(sections)).T.ravel() if layout == "axial_strided" else found
