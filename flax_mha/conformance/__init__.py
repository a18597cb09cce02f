"""Checks an attention function against the equation in float64.

`python -m flax_mha.conformance PACKAGE.FUNCTION` lists which calls a function computes, which raise an error, which
follow another convention, and which are wrong. The function may take any of the arguments of
`flax_mha.dot_product_attention`.
"""

from flax_mha.conformance.checks import CHECKS as CHECKS
from flax_mha.conformance.checks import Result as Result
from flax_mha.conformance.checks import check as check
