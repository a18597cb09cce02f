"""Dense attention: all scores of a head at a time, the fastest for short sequences."""

import functools

from flax_mha._src.call.operands import Call, Result
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.math.head import heads_of, map_heads, to_caller
from flax_mha._src.math.softmax import dense_head
from flax_mha._src.plan import Plan


def attention(plan: Plan, call: Call) -> Result:
    """Computes a call: each head with a matrix of all its scores."""
    head = varying_alike(heads_of(call, plan.dtype))
    results = map_heads(
        functools.partial(dense_head, plan.fuses_rows),
        head,
        axes=head.query.ndim - 2,
        looped_axes=plan.looped_axes or 0,
        max_heads=plan.max_heads,
    )
    return to_caller(results, call.query.dtype)
