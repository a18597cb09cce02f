"""The class of an implementation; `registry.py` lists one object of it for each."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._src.call.operands import Call, Output, OutputAndLse


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    Its `hop(call, result, dtype)` computes attention over some of the keys, as each device of a ring does. Inputs are
    in float32 at least, and may be rounded to `dtype` for matrix products. If `result` is None, `hop` returns output
    and log-sum-exp over these keys. Otherwise `result` is output and log-sum-exp over all keys: `hop` returns both
    unchanged, but with the derivatives of these keys' contribution alone.
    """

    name: str  # its name in the argument `implementation`
    attention: Callable[[Call], Output]  # computes a call
    refusals: Callable[[Call], list[str]] | None = None  # lists why it cannot compute a call; None: it computes all
    hop: Callable[..., OutputAndLse] | None = None  # None if it cannot compute hops
    variant: Callable[[Call], str] | None = None  # names the algorithm for a call; None if there is only one


def reasons_against_dtype(dtypes: Sequence[DTypeLike], dtype: jnp.dtype) -> list[str]:
    """Returns [a reason] if a kernel that computes the dtypes `dtypes` does not compute `dtype`, else []."""
    if dtype in dtypes:
        return []
    known = " and ".join(jnp.dtype(x).name for x in dtypes)
    remedy = "pass dtype=jnp.bfloat16 to the module, or cast query, key and value"
    return [f"it supports only {known}, but the inputs are {dtype}: {remedy}"]


EMPTY = "an axis has length 0: pass non-empty arrays, or skip the call"


def reason_against_platform(platform: str, devices: str, here: str) -> str:
    """Returns the reason against a kernel for `devices`, if a call runs on `here`; `platform` is the caller's name."""
    remedy = f'run it there, or explain it with platform="{platform}"'
    return f"it runs only on {devices}, but this call runs on {here}: {remedy}"


# Names for policies of `jax.checkpoint`: gradients need output and log-sum-exp besides the inputs. Those of `dense.py`
# also need the products of queries and keys, "attention_scores".
RESIDUALS = ("attention_output", "attention_lse")


def name_residuals(
    output: Float[Array, "..."], lse: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns output and log-sum-exp with the names `RESIDUALS`, by which policies of `jax.checkpoint` find them."""
    return checkpoint_name(output, RESIDUALS[0]), checkpoint_name(lse, RESIDUALS[1])
