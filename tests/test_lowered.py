"""`benchmarks/lowered.py` tells programs that differ from those that only look
different.
"""

import jax
import jax.numpy as jnp
import lowered
import pytest
from jax import lax
from lowered_calls import Program, shape

ROWS = shape(8, 4)
VECTOR = shape(4)


def text_of(inner, swapped=False, factor=2.0):
    """A program with a function that is called twice, a loop, and arguments in either
    order.
    """
    inner = jax.jit(inner)

    def run(rows, vector):
        outside = inner(rows, vector)
        loop = lax.fori_loop(
            0, 3, lambda i, x: (x[1], inner(x[0], vector)), (outside, rows)
        )
        return loop, factor * vector

    if not swapped:
        return lowered.lowered(Program(run, (ROWS, VECTOR)), "cpu")
    program = Program(lambda vector, rows: run(rows, vector), (VECTOR, ROWS))
    return lowered.lowered(program, "cpu")


def minus(rows, vector):
    return rows - jnp.sin(vector)[None]


def renamed(rows, vector):
    return rows - jnp.sin(vector)[None]


def in_two_steps(rows, vector):
    return jax.jit(lambda x, y: x - y[None])(rows, jnp.sin(vector))


def plus(rows, vector):
    return rows + jnp.sin(vector)[None]


@pytest.mark.core
@pytest.mark.parametrize(
    ("inner", "changes", "verdict"),
    [
        (minus, {}, lowered.SAME),
        (renamed, {}, lowered.SAME_BUT_NAMES),
        (in_two_steps, {}, lowered.SAME_OPERATIONS),
        (minus, {"swapped": True}, lowered.SAME_OPERATIONS),
        (plus, {}, lowered.DIFFERENT),
        (minus, {"factor": 3.0}, lowered.DIFFERENT),
    ],
    ids=["same", "renamed", "other calls", "other order", "operation", "constant"],
)
def test_the_verdict_on_two_programs(inner, changes, verdict):
    other = text_of(inner, **changes)

    found, differences = lowered.compared(text_of(minus), other)

    assert found == verdict
    assert bool(differences) == (verdict == lowered.DIFFERENT)


def test_what_differs_is_counted_in_every_call():
    _, differences = lowered.compared(text_of(minus), text_of(plus))

    # Once outside of the loop, once inside.
    of_rows = "tensor<8x4xf32>"
    assert differences == [
        f"-2 % = stablehlo.subtract %, % : {of_rows}",
        f"+2 % = stablehlo.add %, % : {of_rows}",
    ]


KERNELS = {"cuda": "__cudnn$fmha", "tpu": "tpu_custom_call", "mesh": "sdy.manual"}


@pytest.mark.parametrize("group", lowered.GROUPS)
def test_a_call_of_each_group(group):
    result = lowered.lower_apart(lowered.ROOT, group, only="second derivative")

    assert result["errors"] == {}
    kernel = KERNELS.get(group, "stablehlo")
    assert any(kernel in text for text in result["texts"].values())
