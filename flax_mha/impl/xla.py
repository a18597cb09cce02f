"""`implementation="xla"`: all scores at once (`dense.py`), or keys read in place (`decode.py`).

The latter is for few queries over many keys, as in decoding. On GPUs `dense_gpu.py` makes fewer passes over the scores.
"""

from flax_mha.call.operands import Call, OutputAndLse, numbers_as_arrays
from flax_mha.impl import decode, dense, dense_gpu
from flax_mha.impl.implementation import Implementation
from flax_mha.impl.shared import schedule


def attention(call: Call) -> OutputAndLse:
    """Output and log-sum-exp of all heads."""
    call = numbers_as_arrays(call)
    blocks = schedule.blocks_in_place(call)
    if blocks is not None:
        return decode.attention(call, blocks)
    return dense_gpu.attention(call) if schedule.on_gpu(call) else dense.attention(call)


def variant(call: Call) -> str:
    """Names the one of the two that computes a call."""
    return "all scores at once" if schedule.blocks_in_place(call) is None else "keys read in place"


XLA = Implementation("xla", attention, variant=variant)
