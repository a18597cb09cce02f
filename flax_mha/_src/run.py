"""Computes a checked call, in three steps, each of which calls the next.

1. `run` splits the call over the devices of a mesh, if there is one.
2. `on_device` chooses an engine for the part of one device.
3. `compute` plans the part, guards it, and lets the engine compute it.

`strategy="ring"` differs: `distributed/ring.py` plans once, then guards and computes
each hop of the ring itself.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha._src import plan as plans
from flax_mha._src.call.call import Call, Context, LogSumExp, Result
from flax_mha._src.core.products import jit_products
from flax_mha._src.core.tracing import (
    EXAMPLES_OF_SHARDING,
    NEEDS_SHARDING,
    Target,
    being_traced,
)
from flax_mha._src.core.validation import warn_once
from flax_mha._src.distributed import ring, split
from flax_mha._src.distributed.exchange import allgather, ulysses
from flax_mha._src.engines.engine import Engine
from flax_mha._src.engines.kernels.derivatives import with_derivatives
from flax_mha._src.engines.kernels.lower_for_platform import compile_for
from flax_mha._src.explanation import ASSUMPTIONS, Explanation
from flax_mha._src.guard import guard
from flax_mha._src.plan import Plan

Implementation = Literal["xla", "blockwise", "cudnn", "splash"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
CLASSES = {
    "xla": "xla:XLA",
    "blockwise": "blockwise:Blockwise",
    "cudnn": "kernels.cudnn.engine:CuDNN",
    "splash": "kernels.splash:Splash",
}


class _Engines(dict[str, Engine]):
    """Engines by name. Each is imported when it is first looked up, because importing
    Pallas takes a second.
    """

    def __missing__(self, name: str) -> Engine:
        engine_class = pkgutil.resolve_name(f"flax_mha._src.engines.{CLASSES[name]}")
        self[name] = engine_class()
        return self[name]


ENGINES = _Engines()
# Kernels that `implementation=None` chooses: cuDNN by its times on an H200 (see
# docs/performance.md), splash by published speeds, for this package has not run on a
# TPU.
PREFERRED = {"gpu": ("cudnn",), "tpu": ("splash",)}
# The engine that computes the derivatives that kernels lack, and the hops of a ring
# unless another one is named.
PORTABLE = "blockwise"


def run(call: Call, implementation: str | None) -> Result:
    """Computes a call by the engine named `implementation`; None chooses one.

    If the call asks for largest scores, `Result.largest` is the largest score of each
    head [B..., N], not of each row.

    Raises:
      ValueError: If no implementation has this name.
      NotImplementedError: If the named implementation does not support this call.
    """
    check_name(implementation)
    parts = split.split_of(call)
    # Symbolic sizes cannot be compared with 0. `split.empty_result` says why empty
    # calls are not split.
    is_empty = call.has_known_sizes and 0 in call.query.shape[:-1]
    if parts is None:
        result = on_device(_unsplit(call), implementation)
    elif is_empty:
        explain(call, implementation)  # raises the errors that computing it would raise
        result = split.empty_result(call, parts)
    else:
        on_mesh = _on_mesh if being_traced() else _compiled_on_mesh
        result = on_mesh(call, parts, implementation)
    if result.largest is None:
        return result
    return result._replace(largest=_max_score(result.lse, result.largest))


def on_device(call: Call, implementation: str | None = None) -> Result:
    """Computes a call on one device by the engine named `implementation`; None chooses
    one.
    """
    name = _supported(call, implementation)
    if implementation is None:
        _warn_of_unknown_sharding(call, name)
    engine = ENGINES[name]
    if engine.platform is None:
        return compute(engine, call)
    kernel = functools.partial(compute, engine)
    portable = functools.partial(compute, ENGINES[PORTABLE])
    cpu_target = _on_cpu(call, implementation, name)
    if cpu_target is None:
        return with_derivatives(kernel, portable, call)
    platform = {"gpu": "cuda", "tpu": "tpu"}[call.target.platform]

    def of_kernel(call: Call) -> Result:
        compiled = functools.partial(compile_for, platform)
        return with_derivatives(kernel, portable, call, compiled)

    def of_cpu(call: Call) -> Result:
        result = on_device(call.replace(target=cpu_target))
        if call.return_residual:
            return result
        # Kernels return no log-sum-exp that nobody asked for.
        return result._replace(lse=None)

    # JAX compiles both branches for every platform of a program, but the kernel only
    # for its own (`lower_for_platform.py`).
    branches = {platform: of_kernel}
    return lax.platform_dependent(call, **branches, default=of_cpu)


def compute(engine: Engine, call: Call) -> Result:
    """Plans a call on one device, guards it against NaN, and runs `engine` on it,
    without the derivatives that kernels lack.
    """
    plan, call = engine.plan(call)
    return _compute(engine, plan, call)


@functools.partial(jit_products, static_argnames=("engine", "plan"))
def _compute(engine: Engine, plan: Plan, call: Call) -> Result:
    """Guards a planned call and computes it, as one program."""
    result = engine.forward(plan, guard(call, plan))
    if isinstance(result.lse, LogSumExp):
        return result._replace(lse=result.lse.rounded)
    return result


def choose(call: Call) -> str:
    """Returns the name of the engine that `implementation=None` uses on one device."""
    if call.key_indices is not None:
        return "xla"  # no other engine supports them
    if plans.is_memory_bound(call):
        return "xla"  # a fused kernel gains nothing
    for name in PREFERRED.get(call.target.platform, ()):
        if not refusals(name, call) and not ENGINES[name].doubts(call):
            return name
    if plans.prefers_dense(call):
        return "xla"
    return PORTABLE


def _warn_of_unknown_sharding(call: Call, chosen: str) -> None:
    """Warns if a fused kernel is not chosen for the only reason that the sharding of
    the arrays is not known.
    """
    target = call.target
    kernels = PREFERRED.get(target.platform, ())
    if not target.may_be_split or chosen in kernels:
        return
    if call.key_indices is not None or plans.is_memory_bound(call):
        return  # no kernel would be chosen
    for name in kernels:
        reasons = refusals(name, call)
        if all(NEEDS_SHARDING in reason for reason in reasons):
            warn_once(
                f'"{name}" does not compute this call, but "{chosen}": '
                f"{'; '.join(reasons)}{EXAMPLES_OF_SHARDING}"
            )


def refusals(name: str, call: Call, in_ring: bool = False) -> list[str]:
    """Lists why an engine cannot compute a call on one device, each reason with a
    remedy; empty if it can.

    `in_ring`: whether the call is a hop of strategy="ring".
    """
    engine = ENGINES[name]
    if in_ring:
        return engine.supports_hop(call)
    return engine.supports(call)


def check_name(implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
        raise ValueError(
            f"implementation must be {known} or None, but got {implementation!r}."
        )


def _supported(call: Call, implementation: str | None, in_ring: bool = False) -> str:
    """Returns the name of the engine that computes a call on one device: the one that
    is named `implementation`, if it supports the call, or the chosen one.

    `in_ring`: whether the call is a hop of strategy="ring".
    """
    if implementation is None:
        if in_ring:
            return PORTABLE
        return choose(call)
    reasons = refusals(implementation, call, in_ring)
    if reasons:
        raise NotImplementedError(
            f'implementation="{implementation}" does not support this call: '
            f"{'; '.join(reasons)}. Pass None to let the library choose."
        )
    return implementation


def _on_cpu(call: Call, implementation: str | None, chosen: str) -> Target | None:
    """Returns the target of `call` if the program that JAX traces is compiled for a CPU
    instead.

    None if that cannot happen, or does not matter: JAX does not trace, an
    implementation is named, the chosen one also runs on CPUs, or the call is only
    explained for another platform. See `lower_for_platform.py`.
    """
    target = call.target
    if implementation is not None or ENGINES[chosen].platform is None:
        return None
    if target.assumed or not being_traced():
        return None
    return target._replace(platform="cpu")


def _unsplit(call: Call) -> Call:
    """Removes the sharding that a call names; for a call that no mesh splits."""
    if call.sharding is None:
        return call
    return split.unsplit(call)


def _on_mesh(call: Call, parts: split.Split, implementation: str | None) -> Result:
    """Computes each device's part of a call."""
    attend = functools.partial(on_device, implementation=implementation)

    def engine_of(hop: Call) -> Engine:
        return ENGINES[_supported(hop, implementation, in_ring=True)]

    in_ring = functools.partial(ring.attention, engine_of=engine_of)
    part = _by_strategy(parts.context, attend, in_ring)
    return split.run_on_mesh(call, parts, part)


_compiled_on_mesh = jit_products(_on_mesh, static_argnames=("parts", "implementation"))


def _by_strategy(
    context: Context | None,
    attend: Callable[[Call], Result],
    in_ring: Callable[..., Result],
) -> Callable[[Call], Result]:
    """Returns the function of one device's part of a call: `attend`, with the
    communication of "ulysses" or "allgather", or `in_ring`.
    """
    if context is None:
        return attend
    if context.strategy == "ring":
        return functools.partial(in_ring, context=context)
    strategy = ulysses if context.strategy == "ulysses" else allgather
    return functools.partial(strategy, context=context, attend=attend)


@jax.jit
def _max_score(
    lse: Float[Array, "*B T N"], largest: Float[Array, "*B T N"]
) -> Float[Array, "*B N"]:
    """Computes each head's largest score from the rows' `largest`; NaN if a row's `lse`
    is NaN. Has no gradient.
    """
    lse, largest = lax.stop_gradient((lse, largest))
    largest = jnp.max(largest, axis=-2, initial=-jnp.inf)
    # `jnp.max` may lose NaN.
    return jnp.where(jnp.isnan(lse).any(-2), jnp.nan, largest)


def explain(call: Call, implementation: str | None) -> Explanation:
    """Explains which engine `run` would use on each device, or raises the error that
    `run` would raise.
    """
    check_name(implementation)
    parts = split.split_of(call)
    if parts is None:
        explanation = _explain_part(_unsplit(call), implementation)
    else:
        explanation = _explain_on_mesh(call, implementation, parts)
    if call.target.assumed:
        return explanation._replace(note=ASSUMPTIONS[call.target.platform])
    return explanation


def _explain_on_mesh(
    call: Call, implementation: str | None, parts: split.Split
) -> Explanation:
    """Explains one device's part, by tracing the split but not the attention."""
    explanations = []  # filled while tracing; they are equal on all devices

    def attend(call: Call, in_ring: bool = False) -> Result:
        explanations.append(_explain_part(call, implementation, in_ring))
        shape = (*call.query.shape[:-1], call.value.shape[-1])
        return Result(jnp.zeros(shape), None)

    def in_ring(call: Call, context: Context) -> Result:
        return attend(ring.first_hop(call, context), in_ring=True)

    part = _by_strategy(parts.context, attend, in_ring)
    jax.eval_shape(lambda call: split.run_on_mesh(call, parts, part), call)
    return explanations[0]


def _explain_part(
    call: Call, implementation: str | None, in_ring: bool = False
) -> Explanation:
    chosen = _supported(call, implementation, in_ring)
    chosen_on_cpu = None
    cpu_target = _on_cpu(call, implementation, chosen)
    if cpu_target is not None:
        chosen_on_cpu = choose(call.replace(target=cpu_target))
    variant = None
    table = {name: refusals(name, call, in_ring) for name in IMPLEMENTATIONS}
    doubts = {}
    # Hops of a ring have one algorithm.
    if not in_ring:
        variant = ENGINES[chosen].variant(call)
        for name, reasons in table.items():
            if name != chosen and not reasons:
                doubts[name] = ENGINES[name].doubts(call)
    return Explanation(
        chosen, refusals=table, on_cpu=chosen_on_cpu, variant=variant, doubts=doubts
    )
