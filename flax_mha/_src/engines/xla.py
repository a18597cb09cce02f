"""`implementation="xla"`: all scores of a head together, or keys read in place or
gathered. It supports every call.
"""

import dataclasses
import functools

import jax

from flax_mha._src import guard
from flax_mha._src import plan as plans
from flax_mha._src.call.call import Call, Result
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.engines import gathered, in_place
from flax_mha._src.engines.engine import Engine
from flax_mha._src.math.head import (
    heads_of,
    map_heads,
    numbers_as_arrays,
    to_caller,
    with_float_keys,
)
from flax_mha._src.math.softmax import dense_head
from flax_mha._src.plan import Plan


@dataclasses.dataclass(frozen=True)
class XLA(Engine):
    """The engine of plain XLA operations: `forward` computes a call by one of three
    algorithms.
    """

    name = "xla"

    def supports(self, call: Call) -> list[str]:
        return []

    def plan(self, call: Call) -> tuple[Plan, Call]:
        call = numbers_as_arrays(call)
        return plans.plan_xla(call), call

    def forward(self, plan: Plan, call: Call) -> Result:
        if plan.gathered is not None:
            return gathered.attention(plan, call)
        if plan.in_place is not None:
            return _in_place(plan, call)
        return _dense(plan, call)


def _dense(plan: Plan, call: Call) -> Result:
    """Computes all scores of a head at a time, the fastest for short sequences."""
    head = varying_alike(heads_of(call, plan.dtype))
    results = map_heads(
        functools.partial(dense_head, plan.fuses_rows),
        head,
        axes=head.query.ndim - 2,
        looped_axes=plan.looped_axes,
        max_heads=plan.max_heads,
    )
    return to_caller(results, call.query.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_place(plan: Plan, call: Call) -> Result:
    """Reads keys in place. Derivatives use dense attention."""
    return in_place.attention(plan, call)


@_in_place.defjvp
def _in_place_jvp(
    plan: Plan, primals: tuple[Call], tangents: tuple[Call]
) -> tuple[Result, Result]:
    dtype = primals[0].dtype
    plan = plan._replace(dtype=dtype, guard_first=True)

    def compute_densely(call: Call) -> Result:
        call = with_float_keys(call, dtype)
        return _dense(plan, guard.guard(call, plan))

    return jax.jvp(compute_densely, primals, tangents)
