"""Checks what an attention function computes, what it refuses, and what it gets wrong.

`python -m flax_mha.conformance PACKAGE.FUNCTION` checks any function that takes the arguments of
`jax.nn.dot_product_attention`, some of them or more, by the equation in float64.
"""

from flax_mha.conformance.checks import CHECKS as CHECKS
from flax_mha.conformance.checks import Result as Result
from flax_mha.conformance.checks import check as check
