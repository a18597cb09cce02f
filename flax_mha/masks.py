"""Mask objects, which compute masks from positions; only `ArrayMask` stores T x S
values.
"""

from flax_mha._src.masks import And as And
from flax_mha._src.masks import ArrayMask as ArrayMask
from flax_mha._src.masks import CausalMask as CausalMask
from flax_mha._src.masks import FunctionMask as FunctionMask
from flax_mha._src.masks import LengthMask as LengthMask
from flax_mha._src.masks import LocalMask as LocalMask
from flax_mha._src.masks import Mask as Mask
from flax_mha._src.masks import Not as Not
from flax_mha._src.masks import Occupancy as Occupancy
from flax_mha._src.masks import Or as Or
from flax_mha._src.masks import SegmentMask as SegmentMask
from flax_mha._src.masks import WrittenMask as WrittenMask
from flax_mha._src.masks import segments_from_offsets as segments_from_offsets

__all__ = [
    "And",
    "ArrayMask",
    "CausalMask",
    "FunctionMask",
    "LengthMask",
    "LocalMask",
    "Mask",
    "Not",
    "Occupancy",
    "Or",
    "SegmentMask",
    "WrittenMask",
    "segments_from_offsets",
]
