"""Rotary positions: `rope.py` rotates, `scaling.py` changes the frequencies of longer
sequences.
"""

from flax_mha._src.rope.rope import RoPE as RoPE
from flax_mha._src.rope.rope import apply_rope as apply_rope
from flax_mha._src.rope.scaling import NTK as NTK
from flax_mha._src.rope.scaling import Linear as Linear
from flax_mha._src.rope.scaling import Llama3 as Llama3
from flax_mha._src.rope.scaling import LongRoPE as LongRoPE
from flax_mha._src.rope.scaling import Proportional as Proportional
from flax_mha._src.rope.scaling import YaRN as YaRN
