"""`benchmarks/hlo.py` reads costs out of a program; `benchmarks/targets.py` makes
choices for another device; `benchmarks/start.py` compiles for it, and many layers.
"""

import argparse
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import forget_programs
from jax import lax

from flax_mha import dot_product_attention, explain_implementation


def benchmark(name):
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hlo = benchmark("hlo")
targets = benchmark("targets")
start = benchmark("start")

TEXT = """HloModule f

%fused (p.0: f32[1024], p.1: s32[]) -> f32[256] {
  %p.0 = f32[1024]{0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %slice = f32[256]{0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={256}
}

%body (p: (f32[1024], s32[])) -> (f32[1024], s32[]) {
  %p = (f32[1024]{0}, s32[]) parameter(0)
  %x = f32[1024]{0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %part = f32[256]{0} fusion(%x, %i), kind=kLoop, calls=%fused
  ROOT %out = (f32[1024]{0}, s32[]) tuple(%x, %i)
}

%plain (p: f32[1024]) -> f32[1024] {
  ROOT %p = f32[1024]{0} parameter(0)
}

%careful (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %copy = f32[1024]{0} copy(%p)
}

ENTRY %main (x: f32[1024], i: s32[], yes: pred[]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %i = s32[] parameter(1)
  %yes = pred[] parameter(2)
  %start = (f32[1024]{0}, s32[]) tuple(%x, %i)
  %loop = (f32[1024]{0}, s32[]) while(%start), condition=%c, body=%body{TRIPS}
  %y = f32[1024]{0:T(8,128)S(1)} custom-call(%x), custom_call_target="{KERNEL}"
  %sum = f32[1024]{0} all-reduce(%y), replica_groups={}, to_apply=%add
  %z = f32[1024]{0} negate(%y)
  ROOT %answer = f32[1024]{0} conditional(%yes, %z, %z), {BRANCHES}
}
"""
TEXT = TEXT.replace("{KERNEL}", "__cudnn$fmhaSoftmax")
TEXT = TEXT.replace("{BRANCHES}", "true_computation=%careful, false_computation=%plain")


@pytest.mark.core
@pytest.mark.parametrize(
    ("known", "trips"), [('{"known_trip_count":{"n":"5"}}', 5), ("{}", None)]
)
def test_costs_of_a_program(known, trips):
    text = TEXT.replace("{TRIPS}", f", backend_config={known}")
    costs = hlo.Program(text).costs()
    step = 1024 + 4 + 1024  # the slice that is read, its place, what is written
    assert costs.attention == 1
    assert costs.others == (trips or 1) + 1
    assert costs.traffic == (trips or 1) * step + 4096  # y is in fast memory
    assert costs.step == step
    assert costs.is_exact == (trips is not None)
    assert costs.collectives == {"all-reduce": 1}


@pytest.mark.parametrize("loops", [1, 2])
def test_consecutive_loops_share_the_trips(loops):
    """Such as the loops over tiles with and without a mask."""
    text = TEXT.replace("{TRIPS}", "")
    loop = next(line for line in text.splitlines() if " while(" in line)
    text = text.replace(loop, "\n".join([loop] * loops))
    assert hlo.Program(text, trips=6).costs().others == 6 + 1


def test_a_program_compiled_here():
    """Every instruction is understood."""

    def f(x, i):
        x = lax.fori_loop(0, 7, lambda _, x: jnp.sin(x @ x), x)
        chosen = lax.cond(i > 0, lambda: x, lambda: x @ x + 1)
        return chosen, lax.dynamic_update_slice(x, x[:2], (i, i))

    # What XLA fuses differs by version, so only lower bounds are known.
    text = jax.jit(f).lower(jnp.ones((64, 64)), 1).compile().as_text()
    costs = hlo.Program(text).costs()
    assert costs.others >= 7
    assert costs.traffic >= 7 * 2 * 64 * 64 * 4
    assert len(re.findall("ENTRY", text)) == 1


@pytest.mark.parametrize(
    ("dtype", "chosen"), [(jnp.bfloat16, "cudnn"), (jnp.float32, "xla")]
)
def test_choices_for_the_target_device(dtype, chosen):
    names = []

    def note(x):
        names.append(explain_implementation(x, x, x, is_causal=True).chosen)

    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), dtype)
    with targets.compiling_for(targets.Target("gpu", [])):
        jax.eval_shape(note, x)
    assert names == [chosen]


ONE_ROUND = argparse.Namespace(rounds=1, seconds=0.0)


def test_lowering_for_cuda_is_timed_without_a_gpu(request):
    request.addfinalizer(forget_programs)  # those for a GPU
    rows = start.tracing(start.CUDA, "backward", 256, ONE_ROUND, lambda text: None)
    assert list(rows) == [start.OURS, start.THEIRS]
    assert all(row["ms"] > 0 and row["to_jax_nn"] > 0 for row in rows.values())


def test_compiling_layers_is_timed_beside_flax(monkeypatch):
    monkeypatch.setattr(start, "LAYERS", 2)
    monkeypatch.setattr(start, "FEATURES", 16)
    rows = start.compiling(32, ONE_ROUND, lambda text: None)
    assert list(rows) == [start.OURS, start.FLAX]
    assert all(row["ms"] > 0 and row["kernels"] > 1 for row in rows.values())
    assert rows[start.FLAX]["to_flax"] == 1


@pytest.mark.parametrize(
    ("implementation", "sinks"),
    [("xla", None), ("xla", np.float32([0.5, -1.0])), ("blockwise", None)],
)
def test_programs_for_gpus_compute_the_same(implementation, sinks):
    """Other forms of the softmax and of dropout, run on a CPU; with masked rows, NaN
    and derivatives.
    """
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 2, 130, 2, 8))
    query, key, value = jnp.asarray(arrays, jnp.float32)
    key = key.at[1, 5].set(jnp.nan)
    value = value.at[0, 101, 0, 0].set(jnp.inf)

    def attend(query, key, value):
        output = dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            local_window_size=(20, None),
            key_value_seq_lengths=jnp.array([101, 0]),
            dropout_rate=0.25,
            dropout_rng=jax.random.key(1),
            sinks=sinks,
            implementation=implementation,
        )
        return (jnp.where(jnp.isfinite(output), output, 0) ** 2).sum(), output

    def both(*arrays):
        gradient = jax.grad(attend, (0, 1, 2), has_aux=True)
        return jax.jvp(
            lambda query: gradient(query, *arrays[1:]), arrays[:1], (jnp.cos(query),)
        )

    expected = jax.jit(both)(query, key, value)
    with targets.compiling_for(targets.Target("gpu", [])):
        # A new function, so that it is traced for the target.
        answers = jax.jit(lambda *arrays: both(*arrays))(query, key, value)
    leaves = zip(jax.tree.leaves(answers), jax.tree.leaves(expected), strict=True)
    for got, want in leaves:
        atol = 1e-5 * max(1, np.nanmax(np.abs(want)))
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
