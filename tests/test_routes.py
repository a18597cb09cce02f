"""How far a reader has to go: the files that one call enters, how often it changes files, and how deep it calls.

While tracing, and with the lowering, where the functions of `derivatives.py` are traced.
"""

import json
import os
import subprocess
import sys

import pytest

# Files, changes of file, depth.
ROUTES = {"causal, T = 1024": (15, 230, 18), "decoding step": (16, 190, 20), "ring": (20, 250, 22)}
LOWERED = {"causal, T = 1024": (17, 230, 18), "decoding step": (16, 190, 20), "ring": (23, 250, 22)}

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from flax import nnx
import flax_mha

def route(call, *arguments):
    stack, files, changes, depth = [], set(), 0, 0

    def follow(frame, event, _):
        nonlocal changes, depth
        file = frame.f_code.co_filename
        if not file.startswith(flax_mha.__path__[0]) or event not in ("call", "return"):
            return
        before = stack[-1] if stack else None
        if event == "call":
            stack.append(file)
            files.add(file)
            depth = max(depth, len(stack))
        elif stack:
            stack.pop()
        now = stack[-1] if stack else file
        changes += now != before

    sys.setprofile(follow)
    try:
        getattr(jax.jit(call), sys.argv[1])(*arguments)
    finally:
        sys.setprofile(None)
    return len(files), changes, depth

def module(**options):
    made = flax_mha.MultiHeadAttention(8, 64, rngs=nnx.Rngs(0), **options)
    if made.decode:
        made.init_cache((2, 4096, 64))
    return nnx.split(made)

def run(graph, **arguments):
    return lambda state, x: nnx.merge(graph, state)(x, **arguments)

x = jnp.ones((2, 1024, 64))
mesh = jax.make_mesh((4,), ("c",), axis_types=(jax.sharding.AxisType.Auto,))
causal, state = module(decode=False)
step, cached = module(decode=True)
ring, of_ring = module(decode=False, attention_fn=flax_mha.context_parallel("c", mesh=mesh))
print(json.dumps({
    "causal, T = 1024": route(run(causal, is_causal=True), state, x),
    "decoding step": route(run(step), cached, x[:, :1]),
    "ring": route(run(ring, is_causal=True), of_ring, x),
}))
"""


@pytest.mark.parametrize(("stage", "limits"), [("trace", ROUTES), ("lower", LOWERED)])
def test_routes_are_short(stage, limits):
    environment, command = os.environ | {"JAX_NUM_CPU_DEVICES": "4"}, [sys.executable, "-c", PROGRAM, stage]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found.keys() == limits.keys()
    too_long = {name: found[name] for name, most in limits.items() if any(map(int.__gt__, found[name], most))}
    assert not too_long, f"files, changes of file, depth: at most {limits}, but got {too_long}"
