"""`implementation="xla"`: all scores of a head together, or keys read in place or
gathered. It supports every call.
"""

import dataclasses

from flax_mha._src import plan as plans
from flax_mha._src.call.operands import Call, Result
from flax_mha._src.engines.engine import Engine
from flax_mha._src.engines.xla import dense, gathered, in_place
from flax_mha._src.math.head import numbers_as_arrays
from flax_mha._src.plan import Plan


@dataclasses.dataclass(frozen=True)
class XLA(Engine):
    """The engine of plain XLA operations: `forward` computes a call by one of the three
    algorithms in this folder.
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
        if plan.in_place is None:
            return dense.attention(plan, call)
        return in_place.attention(plan, call)
