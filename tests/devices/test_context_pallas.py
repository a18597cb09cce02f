"""Sequences that are split over devices, computed by the kernels for TPUs: interpreted, against "xla"."""

import functools
import re

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import compiled_for, forget_programs, interpret
from contexts import QKV, compare, errors, mesh_of, moved, on_devices, on_one_device
from jax import lax
from marks import core
from meshes import floats
from test_derivatives import hessian_product

import flax_mha
from flax_mha._src.engines.kernels import tpu as tpu_kernels


@pytest.fixture(autouse=True)
def tpu(monkeypatch):
    """As on a TPU, in small tiles."""
    compiled_for(monkeypatch, "tpu")
    monkeypatch.setattr(tpu_kernels, "TILES", (128,))
    forget_programs()
    yield
    forget_programs()


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run here, as XLA programs."""
    interpret(monkeypatch, "pallas")


def parallel(devices, strategy="ring", layout="contiguous"):
    attention_fn = flax_mha.context_parallel("context", strategy, layout, mesh=mesh_of(context=devices))
    return functools.partial(attention_fn, implementation="pallas")


@pytest.mark.parametrize(
    ("strategy", "layout", "devices", "case"),
    [
        core("ring", "contiguous", 2, "long"),
        ("ring", "zigzag", 2, "everything"),
        ("ring", "contiguous", 8, "windows"),
        ("ulysses", "zigzag", 2, "long"),
    ],
)
def test_as_on_one_device(strategy, layout, devices, case, interpreted):
    """Output and gradients of parts of several tiles, of masked parts, and with all arguments."""
    attention_fn = parallel(devices, strategy, layout)
    program, results = on_devices(attention_fn, case, layout, mesh_of(context=devices))
    compare(results, on_one_device(case))
    if case == "long":
        assert moved(program.as_text()) == {"all-to-all": 8} if strategy == "ulysses" else {"collective-permute": 6}


def test_derivatives_of_every_order(interpreted):
    """The kernels themselves only have gradients."""
    parallel_ring, mesh = parallel(2, "ring", "zigzag"), mesh_of(context=2)
    contexts.compare_derivatives(hessian_product, parallel_ring, "plain", "zigzag", mesh, np.float32)


def test_not_finite(interpreted):
    x = {name: floats(i, 2, 16, 2, 8) for i, name in enumerate(QKV)}
    x |= {"key": x["key"].at[1, 3].set(np.nan), "value": x["value"].at[1, 15].set(np.inf)}
    dense = functools.partial(flax_mha.attention_fn, implementation="xla")
    sinks = [jnp.float32([0.5, -jnp.inf])]
    [output] = contexts.compare_not_finite(dense, parallel(4), x, sinks, lengths=[0, 14], window=2)
    assert np.isnan(output[1, 1:6]).all()
    assert np.isfinite(output).sum() == 11 * 16 + 16 * 16


def test_bfloat16_is_as_exact_as_on_one_device(interpreted):
    """Parts are merged and added up in float32: eight devices err as one does, but for one rounding."""
    x = {name: floats(i, 1, 160, 2, 16, dtype=jnp.bfloat16) for i, name in enumerate(QKV)}
    (allowed, _), (found, _) = (errors(attention_fn, x) for attention_fn in (parallel(1, "allgather"), parallel(8)))
    assert (found <= allowed + 2**-9).all()


def test_a_tpu_gets_the_kernels():
    """One forward and two backward, in a loop over the hops, that multiply bfloat16 and return float32."""
    sharding = jax.NamedSharding(mesh_of(context=4), jax.P(None, "context"))
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16, sharding=sharding)

    def both(query, key, value):
        output, pull = jax.vjp(functools.partial(parallel(4), is_causal=True), query, key, value)
        return output, pull(output)

    text = jax.jit(both).trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
    kernels = [line.rpartition(" : ")[2] for line in text.splitlines() if "tpu_custom_call" in line]
    assert len(kernels) == 3
    for types in kernels:
        given, _, returned = types.partition("->")
        assert "xbf16>" in given
        assert "xbf16>" not in returned
    assert text.count("stablehlo.collective_permute") == 6
    assert not re.search("all_gather|all_to_all|all_reduce|reduce_scatter", text)


@pytest.mark.core
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "allgather"])
def test_it_is_never_chosen(strategy):
    """It runs only if it is named."""
    explanations, context = [], parallel(4, strategy).func.context

    def explain(x):
        for name in (None, "pallas"):
            more = {"is_causal": True, "qkv_sharding": context, "implementation": name}
            explanations.append(flax_mha.explain_implementation(x, x, x, **more))
        return x

    jax.eval_shape(explain, jnp.ones((2, 256, 4, 8)))
    assert explanations[0].chosen != "pallas" == explanations[1].chosen
    assert all(explanation.refusals["pallas"] == [] for explanation in explanations)


REFUSED = {
    "off TPUs": ({}, {}, "it runs only on TPUs, but this call runs on cpu"),
    "float16": ({"dtype": jnp.float16}, {}, "it supports only float32 and bfloat16, but the inputs are float16"),
    "precision": ({"dtype": jnp.bfloat16}, {"precision": "highest"}, "the highest, for float32"),
    "control flow": (
        {},
        {"score_mod": lambda score, b, h, q, k: lax.cond(q > k, lambda: score, lambda: -score)},
        "score_mod must not apply cond",
    ),
    "tiles of a hop": ({"length": 2**19, "batch": 64}, {}, "tile table does not fit: .* 1024 x 1024 tiles"),
    "another implementation": ({}, {"implementation": "splash"}, 'only "blockwise" and "pallas" can differentiate'),
}


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name, monkeypatch):
    """By the call and by its explanation; "blockwise" accepts all of these."""
    array, arguments, reason = REFUSED[name]
    compiled_for(monkeypatch, "cpu" if name == "off TPUs" else "tpu")
    sizes = {"batch": 1, "length": 256, "dtype": jnp.float32} | array
    x = jax.ShapeDtypeStruct((sizes["batch"], sizes["length"], 2, 8), sizes["dtype"])
    attention_fn = parallel(4)
    arguments = {"is_causal": True, "implementation": "pallas"} | arguments
    explain = functools.partial(flax_mha.explain_implementation, qkv_sharding=attention_fn.func.context)
    for function in (attention_fn, lambda *x, **more: explain(*x, **more) and x[0]):
        with pytest.raises(NotImplementedError, match=f'implementation="{arguments["implementation"]}".*{reason}'):
            jax.eval_shape(functools.partial(function, **arguments), x, x, x)
    jax.eval_shape(functools.partial(attention_fn.func, **arguments | {"implementation": "blockwise"}), x, x, x)
