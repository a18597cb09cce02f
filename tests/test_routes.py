"""How far a reader has to go: the files that one call enters, how often it changes files, and how deep it calls.

Lowering counts, too: the functions of `derivatives.py` are only traced there.
"""

import json
import os
import subprocess
import sys

# Files, changes of file, depth.
ROUTES = {"causal, T = 1024": (17, 230, 18), "decoding step": (16, 190, 20), "ring": (23, 250, 22)}

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
        jax.jit(call).lower(*arguments)
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


def test_routes_are_short():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == ROUTES.keys()
    too_long = {name: found[name] for name, most in ROUTES.items() if any(map(int.__gt__, found[name], most))}
    assert not too_long, f"files, changes of file, depth: at most {ROUTES}, but got {too_long}"
