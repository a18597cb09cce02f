"""Dense attention: all scores of a head at once. It is the fastest for short sequences."""

import functools

from flax_mha._src.call.operands import Call, Result
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.math.head import heads_of, map_heads, to_caller
from flax_mha._src.math.softmax import dense_head
from flax_mha._src.plan import Plan


def attention(plan: Plan, call: Call) -> Result:
    """Computes a call: each head with all its scores at once."""
    head = varying_alike(heads_of(call, plan.dtype))
    one_head = functools.partial(dense_head, plan.fuses_rows)
    results = map_heads(
        one_head, head, head.query.ndim - 2, plan.looped_axes or 0, plan.max_heads
    )
    return to_caller(results, call.operands.query.dtype)
