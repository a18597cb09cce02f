"""Kinds of calls that no GPU of this kind has run yet: they are tried on the device at
hand before `implementation=None` chooses cuDNN.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_mha._src.call import arguments
from flax_mha._src.call.call import Call, Result
from flax_mha._src.core.tracing import by_itself
from flax_mha._src.core.validation import warn_once
from flax_mha._src.engines import xla
from flax_mha._src.engines.kernels.cudnn.faults import Capability, Version, version
from flax_mha._src.guard import guard

# A mask, or a bias with axes of length 1, as a bias; a log-sum-exp with a gradient; and
# sinks.
Kind = Literal["mask", "residual", "sinks"]


class Ran(NamedTuple):
    """A kind of call that was compared with dense attention on a GPU."""

    kind: Kind
    capability: Capability
    version: Version  # the oldest of cuDNN
    date: str


# Calls of other kinds ran on an H200 with cuDNN 9.19 on 2026-11-28, and are chosen
# without a trial.
RAN: tuple[Ran, ...] = ()
# The largest difference to dense attention in float32, as a part of the largest number:
# twelve roundings to bfloat16.
TOLERANCE = 0.05


def doubts(
    kind: Kind,
    dtype: jnp.dtype,
    head_size: int,
    capability: Capability | None,
    attend: Callable[[Call], Result],
) -> list[str]:
    """Returns why cuDNN should not be chosen for a kind of call, as a list of reasons;
    empty if it ran before, or if a trial on this device succeeds.
    """
    installed = version()
    for ran in RAN:
        is_known = installed is not None and installed >= ran.version
        if ran.kind == kind and ran.capability == capability and is_known:
            return []
    if jax.process_count() > 1:
        return [
            f'cuDNN has not run with kind "{kind}" on such a GPU, and several '
            'processes must compile the same program: pass implementation="cudnn"'
        ]
    try:
        problem = by_itself(_tried, kind, dtype, head_size, attend)
    except Exception as error:  # any error means that cuDNN cannot be used
        # Not cached: memory may have been full.
        problem = (str(error).strip() or repr(error)).splitlines()[0]
    if problem is None:
        return []
    reason = (
        f'a trial of kind "{kind}" on this GPU failed ({problem}): use a different '
        "version of cuDNN or jax"
    )
    warn_once(f"cuDNN is not chosen, because {reason}.")
    return [reason]


@functools.cache
def _tried(
    kind: Kind, dtype: jnp.dtype, head_size: int, attend: Callable[[Call], Result]
) -> str | None:
    """Compares output and gradients with those of dense attention; returns what is
    wrong, or None.
    """
    inputs, options = _example(kind, head_size)
    exact = _answers(_dense, inputs, options)
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    got = _answers(attend, inputs, options)
    for name, expected in exact.items():
        is_finite = np.isfinite(expected)
        if not np.array_equal(got[name][~is_finite], expected[~is_finite]):
            return f"the {name} is wrong in rows without keys"
        difference = got[name][is_finite] - expected[is_finite]
        part = np.abs(difference).max() / np.abs(expected[is_finite]).max()
        # Not `>`, which is False for NaN.
        if not part <= TOLERANCE:
            return f"the {name} differs by {part:.2g}"
    return None


def _example(kind: Kind, head_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes arrays that get gradients, and other arguments.

    The mask has padding on the left, tiles that are masked throughout, and rows without
    keys.
    """
    rng = np.random.default_rng(0)
    length = 256

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    inputs: dict[str, Any] = {"query": normal(3, length, 4, head_size)}
    for name in ("key", "value"):
        inputs[name] = normal(3, length, 2, head_size)
    if kind != "mask":
        lengths = np.array([length, 100, 0], np.int32)
        options: dict[str, Any] = {"is_causal": True, "key_value_seq_lengths": lengths}
        if kind == "sinks":
            inputs["sinks"] = normal(4)
        else:
            options["return_residual"] = True
        return inputs, options
    mask = np.ones((3, 1, length, length), bool)
    mask[0, ..., :100] = False
    mask[1, :, :128, 128:] = False
    mask[1, :, 128:, :128] = False
    mask[2, :, 10:20] = False
    return inputs, {"mask": mask}


def _dense(call: Call) -> Result:
    plan, call = xla.XLA().plan(call)
    return xla.XLA().forward(plan, guard(call, plan))


def _answers(
    attend: Callable[[Call], Result], inputs: dict[str, Any], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Computes output, log-sum-exp if there is one, and all gradients, in float32."""

    def run(inputs: Any) -> dict[str, Array]:
        result = attend(arguments.canonical(**inputs, **options))
        found = {"output": result.output}
        if "return_residual" in options:
            lse: Any = result.lse
            found["log-sum-exp"] = getattr(lse, "rounded", lse)
        return found

    @jax.jit
    def both(inputs: Any) -> dict[str, Array]:
        found, pull = jax.vjp(run, inputs)
        cotangents = {}
        for name, x in found.items():
            cotangents[name] = jnp.where(jnp.isfinite(x), jnp.cos(x), jnp.zeros_like(x))
        [gradients] = pull(cotangents)
        for name, x in gradients.items():
            found[f"gradient of {name}"] = x
        return found

    found = jax.device_get(both(inputs))
    return {name: x.astype(np.float32) for name, x in found.items()}
