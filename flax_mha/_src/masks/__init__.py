"""Mask objects, which compute masks from positions; only `ArrayMask` stores T x S
values.
"""

from flax_mha._src.masks.arrays import ArrayMask as ArrayMask
from flax_mha._src.masks.arrays import LengthMask as LengthMask
from flax_mha._src.masks.arrays import SegmentMask as SegmentMask
from flax_mha._src.masks.arrays import segments_from_offsets as segments_from_offsets
from flax_mha._src.masks.base import And as And
from flax_mha._src.masks.base import CausalMask as CausalMask
from flax_mha._src.masks.base import LocalMask as LocalMask
from flax_mha._src.masks.base import Mask as Mask
from flax_mha._src.masks.base import Not as Not
from flax_mha._src.masks.base import Occupancy as Occupancy
from flax_mha._src.masks.base import Or as Or
from flax_mha._src.masks.base import WrittenMask as WrittenMask
from flax_mha._src.masks.function import FunctionMask as FunctionMask
