"""Prints how far a reader has to go: the files of flax_mha that one call enters, and how deep it calls.

For each call: the number of files, how often it returns to a file that it had left, how often it changes files, and the
largest depth of calls. While tracing, and then while lowering too, when the rules for derivatives are traced.

    python benchmarks/routes.py
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # for the ring; must be set before jax is imported

import jax
import jax.numpy as jnp
from flax import nnx

import flax_mha


class Route(NamedTuple):
    files: int
    returns: int
    changes: int
    depth: int


def route(stage: str, call: Callable[..., Any], *arguments: Any) -> Route:
    """Follows a call through the files of the package; `stage` is "trace" or "lower"."""
    stack: list[str] = []
    visited: list[str] = []
    depth = 0

    def follow(frame: Any, event: str, _: object) -> None:
        nonlocal depth
        file = frame.f_code.co_filename
        if not file.startswith(flax_mha.__path__[0]) or event not in ("call", "return"):
            return
        if event == "call":
            stack.append(file)
        elif stack:
            stack.pop()
        depth = max(depth, len(stack))
        if stack and stack[-1:] != visited[-1:]:
            visited.append(stack[-1])

    sys.setprofile(follow)
    try:
        getattr(jax.jit(call), stage)(*arguments)
    finally:
        sys.setprofile(None)
    files = len(set(visited))
    return Route(files, len(visited) - files, len(visited) - 1, depth)


def module(**options: Any) -> Any:
    made = flax_mha.MultiHeadAttention(8, 64, rngs=nnx.Rngs(0), **options)
    if made.decode:
        made.init_cache((2, 4096, 64))
    return nnx.split(made)


def run(graph: Any, **arguments: Any) -> Callable[..., jax.Array]:
    return lambda state, x: nnx.merge(graph, state)(x, **arguments)


def main() -> None:
    x = jnp.ones((2, 1024, 64))
    mesh = jax.make_mesh((4,), ("c",), axis_types=(jax.sharding.AxisType.Auto,))
    causal, state = module(decode=False)
    step, cached = module(decode=True)
    ring, of_ring = module(decode=False, attention_fn=flax_mha.context_parallel("c", mesh=mesh))
    calls = {
        "causal, T = 1024": (run(causal, is_causal=True), state, x),
        "decoding step": (run(step), cached, x[:, :1]),
        "ring": (run(ring, is_causal=True), of_ring, x),
    }
    print(f"{'call':18}{'stage':8}" + "".join(f"{name:>9}" for name in Route._fields))
    for stage in ("trace", "lower"):
        for name, arguments in calls.items():
            getattr(jax.jit(arguments[0]), stage)(*arguments[1:])  # imports happen once, not in every call
            jax.clear_caches()  # nothing is known from the calls before
            print(f"{name:18}{stage:8}" + "".join(f"{number:9}" for number in route(stage, *arguments)))


if __name__ == "__main__":
    main()
