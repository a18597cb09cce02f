"""`context_parallel` gives the result of one device: every strategy and layout, on any
mesh, in either module.
"""

import contextlib
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import contexts
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from cases import close, compiled_for, nothing_is_compiled, refused
from contexts import (
    CASES,
    QKV,
    B,
    H,
    N,
    T,
    arrays,
    compare,
    errors,
    mesh_of,
    moved,
    on_one_device,
)
from flax import nnx
from jax.sharding import AxisType
from marks import core
from meshes import floats, put
from test_derivatives import hessian_product, squares

import flax_mha
import flax_mha.linen
from flax_mha._src.modules.context_parallel import to_zigzag, zigzag_positions
from flax_mha.rope import RoPE

STRATEGIES = ("ring", "ulysses", "allgather")


@pytest.mark.parametrize(
    ("strategy", "case", "devices", "layout"),
    [
        ("ring", "plain", 2, "contiguous"),
        core("allgather", "plain", 2, "contiguous"),
        *((strategy, "plain", 8, "zigzag") for strategy in ("ring", "ulysses")),
        core("ring", "everything", 4, "zigzag"),
        ("allgather", "everything", 4, "zigzag"),
        core("ulysses", "windows", 2, "contiguous"),
        ("ring", "windows", 2, "zigzag"),
    ],
)
def test_as_on_one_device(strategy, case, devices, layout, small_tiles):
    mesh = mesh_of(context=devices)
    attention_fn = flax_mha.context_parallel("context", strategy, layout, mesh=mesh)
    program, results = contexts.on_devices(attention_fn, case, layout, mesh)
    compare(results, on_one_device(case))
    if case == "plain":
        expected = {
            "ring": {"collective-permute": 6},
            "ulysses": {"all-to-all": 8},
            "allgather": {"all-gather": 2},
        }
        assert moved(program.as_text()) == expected[strategy]


def second_derivatives(loss_and_aux):
    """Each mode of the other: `hessian_product`, the tangent, and its gradient."""

    def answers(x, tangents):
        tangent, across = jax.value_and_grad(
            lambda x: jax.jvp(lambda x: loss_and_aux(x)[0], (x,), (tangents,))[1]
        )(x)
        return hessian_product(loss_and_aux)(x, tangents) | {
            "tangent": tangent,
            "gradient of tangent": across,
        }

    return answers


def gradient_of_gradient(loss_and_aux):
    """Reverse mode of reverse mode."""
    gradient = jax.grad(lambda x: loss_and_aux(x)[0])
    return lambda x, _: {
        "gradient of gradient": jax.grad(lambda x: squares(gradient(x)))(x)
    }


@pytest.mark.parametrize(
    ("derivatives", "strategy", "case", "devices", "layout"),
    [
        core(gradient_of_gradient, "ring", "plain", 2, "zigzag"),
        (hessian_product, "ring", "everything", 2, "zigzag"),
        (second_derivatives, "ring", "windows", 4, "contiguous"),
        (hessian_product, "ulysses", "everything", 2, "zigzag"),
        (hessian_product, "allgather", "windows", 2, "contiguous"),
    ],
)
def test_derivatives_of_every_order(
    derivatives, strategy, case, devices, layout, small_tiles
):
    """Each mode of each, in three programs: all of them of one call take minutes."""
    mesh = mesh_of(context=devices)
    attention_fn = flax_mha.context_parallel("context", strategy, layout, mesh=mesh)
    contexts.compare_derivatives(derivatives, attention_fn, case, layout, mesh)


def with_largest_scores(attention_fn, x):
    """The output, and the largest score of each head."""
    sown = []
    arguments = CASES["everything"][0](x, lambda x, axis: x)
    module = SimpleNamespace(sow=lambda collection, name, x: sown.append(x))
    return attention_fn(
        *(x[name] for name in QKV), **arguments, max_score_module=module
    ), sown[-1]


@functools.cache
def largest_scores():
    attention_fn = functools.partial(flax_mha.attention_fn, implementation="xla")
    return jax.jit(functools.partial(with_largest_scores, attention_fn))(
        CASES["everything"][1]
    )[1]


@pytest.mark.parametrize(
    ("strategy", "axis_type"),
    [
        ("ring", AxisType.Auto),
        ("ulysses", AxisType.Explicit),
        ("allgather", AxisType.Auto),
    ],
)
def test_on_a_mesh_of_data_context_and_heads(strategy, axis_type):
    """Known from types with Explicit axes, else given; largest scores do not change the
    output and its gradients.

    The ring exchanges the ids of segments, too.
    """
    mesh = mesh_of(axis_type, data=2, context=2, model=2)
    if axis_type == AxisType.Auto:
        axes = {"batch_axes": "data", "head_axis": "model"}
    else:
        axes = {}
    attend = functools.partial(
        with_largest_scores, flax_mha.context_parallel("context", strategy, **axes)
    )

    def run(x):
        (output, max_score), pull = jax.vjp(attend, x)
        return max_score, (output, pull((jnp.cos(output), jnp.ones_like(max_score)))[0])

    with jax.set_mesh(mesh) if axes else contextlib.nullcontext():
        x = contexts.placed(CASES["everything"][1], mesh, "data", "model")
        program = jax.jit(run).lower(x).compile()
        max_score, results = program(x)
    np.testing.assert_allclose(max_score, largest_scores(), rtol=1e-6)
    compare(results, on_one_device("everything"))
    if strategy == "ring":
        assert moved(program.as_text()) == {"collective-permute": 8}


@pytest.mark.parametrize("context", [False, True], ids=["no mesh", "set_mesh"])
def test_outside_jit_the_split_is_known_from_the_arrays(context):
    """Equal arguments make equal functions, so the program is compiled once."""
    mesh = mesh_of(data=2, context=2, model=2)
    functions = [flax_mha.context_parallel("context", "allgather")] * 2
    x = contexts.placed(arrays(8), mesh, "data", "model")
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        out = functions[0](**x, is_causal=True)
        with nothing_is_compiled():
            functions[1](**x, is_causal=True)
    assert out.sharding.is_equivalent_to(x["query"].sharding, out.ndim)
    want, _ = on_one_device("plain")
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_memory_does_not_grow_with_the_devices():
    """Temporaries of the ring's gradient, at 1024 tokens per device."""

    def temporaries(devices):
        mesh = mesh_of(context=devices)
        fn = flax_mha.context_parallel("context", "ring", "zigzag", mesh=mesh)
        sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
        x = jax.ShapeDtypeStruct(
            (1, 1024 * devices, 8, 64), jnp.float32, sharding=sharding
        )

        def gradient(query, key, value):
            return jax.vjp(lambda *x: fn(*x, is_causal=True), query, key, value)[1](
                query
            )

        return (
            jax.jit(gradient)
            .lower(x, x, x)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert temporaries(8) <= 1.1 * temporaries(2)


@pytest.mark.parametrize(
    ("strategy", "devices", "dtype", "rounding"),
    [
        ("ring", 4, "bfloat16", 2**-9),
        ("allgather", 4, "bfloat16", 2**-9),
        ("ring", 8, "float32", 1e-6),
    ],
)
def test_as_exact_as_on_one_device(strategy, devices, dtype, rounding):
    """FlashAttention's rule: at most twice the error of the same computation on one
    device, and one rounding.

    Scores in float32 are large: a log-sum-exp of 100 is rounded to 4e-6, and merging
    two hops must not add that error.
    """
    x = arrays(8, dtype=jnp.dtype(dtype))
    x |= {name: x[name] * (5 if dtype == "float32" else 1) for name in ("query", "key")}
    allowed, largest = errors(flax_mha.attention_fn, x)
    assert dtype != "float32" or largest > 100
    found, _ = errors(
        flax_mha.context_parallel("context", strategy, mesh=mesh_of(context=devices)), x
    )
    assert (found <= 2 * allowed + rounding).all()


FEATURES = 32


def test_nnx_module_with_rotary_positions():
    """In zigzag order, with dropout, on a mesh that also splits batch and heads, which
    the module knows.
    """
    mesh, (order, back) = (
        mesh_of(data=2, context=2, model=2),
        contexts.in_order("zigzag", 2),
    )
    split = flax_mha.context_parallel("context", "ring", "zigzag", batch_axes="data")
    options = {"num_kv_heads": 2, "rope": RoPE(), "dropout_rate": 0.1, "decode": False}

    def run(attention_fn, order, positions, **head_axis):
        more = options | head_axis | {"attention_fn": attention_fn}
        module = flax_mha.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0), **more)
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        ids = order(
            jnp.asarray(np.repeat([[0, 1, 2, 3], [0, 0, 1, 1]], T // 4, 1), jnp.int32),
            1,
        )

        def apply(params, x):
            module = nnx.merge(graph, params, rest)
            dropout = {"deterministic": False, "rngs": nnx.Rngs(1)}
            return module(
                x, is_causal=True, segment_ids=ids, positions=positions, **dropout
            )

        inputs = jax.device_put(
            order(x, 1), jax.P("data", "context") if head_axis else None
        )
        program = (
            jax.jit(functools.partial(meshes.gradients, apply))
            .lower(params, inputs)
            .compile()
        )
        assert moved(program.as_text()) == (
            {"collective-permute": 8} if head_axis else {}
        )
        output, (d_params, d_x) = program(params, inputs)
        return output, d_params, d_x

    x = floats(5, B, T, FEATURES)
    expected = run(flax_mha.attention_fn, lambda x, axis: x, None)
    with jax.set_mesh(mesh):
        output, d_params, d_x = run(
            split, order, jnp.asarray(zigzag_positions(T, 2)), head_axis="model"
        )
    close((back(output), d_params, back(d_x)), expected)


def linen_gradients(attention_fn, params, x):
    layer = flax_mha.linen.MultiHeadDotProductAttention(
        4, num_kv_heads=2, rope=RoPE(), attention_fn=attention_fn
    )
    params = jax.jit(layer.init)(jax.random.key(0), x) if params is None else params
    apply = functools.partial(layer.apply, is_causal=True)
    return params, jax.jit(functools.partial(meshes.gradients, apply))(params, x)


@functools.cache
def linen_on_one_device():
    """Inputs, parameters, and output with gradients."""
    x = floats(6, B, T, FEATURES)
    return x, *jax.device_get(linen_gradients(flax_mha.attention_fn, None, x))


@pytest.mark.parametrize("strategy", [core("ring"), "ulysses", "allgather"])
def test_linen_module_on_an_explicit_mesh(strategy):
    mesh, (x, params, expected) = (
        mesh_of(AxisType.Explicit, data=2, context=2),
        linen_on_one_device(),
    )
    with jax.set_mesh(mesh):
        x = put(x, mesh, "data", "context")
        close(
            linen_gradients(flax_mha.context_parallel("context", strategy), params, x)[
                1
            ],
            expected,
        )


@pytest.mark.core
def test_explanations():
    x = jnp.ones((1, 1024, 2, 64))
    chosen = {}
    for strategy in STRATEGIES:
        fn = flax_mha.context_parallel("context", strategy, mesh=mesh_of(context=2))
        module = flax_mha.MultiHeadAttention(
            2, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(0)
        )
        chosen[strategy] = module.explain(jnp.ones((1, 8, 16))).chosen
        assert (
            flax_mha.explain_implementation(x, x, x, qkv_sharding=fn.context).chosen
            == "blockwise"
        )
    assert chosen == {"ring": "blockwise", "ulysses": "xla", "allgather": "xla"}


def test_ulysses_keeps_the_fused_kernel(monkeypatch):
    """Of a TPU, lowered for it on this machine: one call of the kernel forward, and no
    others.
    """
    compiled_for(monkeypatch, "tpu")
    mesh = mesh_of(context=4)
    fn = flax_mha.context_parallel("context", "ulysses", "zigzag", mesh=mesh)
    sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
    x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16, sharding=sharding)
    program = (
        jax.jit(lambda x: fn(x, x, x, is_causal=True))
        .trace(x)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    )
    assert program.count("tpu_custom_call") == 1


X = jnp.ones((2, 16, 4, 8))
REFUSED = {
    "no mesh": (
        {"mesh": None},
        {},
        "'context'; no mesh is set; use jax.set_mesh, or mesh=",
    ),
    "an unknown axis": (
        {"axis": "sequence"},
        {},
        r"'sequence'; the mesh has \('data', 'context'\)",
    ),
    "an unknown batch axis": ({"batch_axes": ("data", "x")}, {}, "'x'; the mesh has"),
    "an axis twice": ({"batch_axes": "context"}, {}, "must be different mesh axes"),
    "a strategy": (
        {"strategy": "star"},
        {},
        "strategy must be 'ring' or 'ulysses' or 'allgather', but got 'star'",
    ),
    "a layout": (
        {"layout": "random"},
        {},
        "layout must be 'contiguous' or 'zigzag', but got 'random'",
    ),
    "two axes": (
        {"axis": ("data", "context")},
        {},
        "axis must be the name of a single mesh axis",
    ),
    "a list of numbers": (
        {"head_axis": [1]},
        {},
        "head_axis must be the name of a mesh axis",
    ),
    "the length": (
        {},
        {"query": X[:, :6]},
        "number of queries must be a multiple of 4.*but got 6; pad",
    ),
    "keys": (
        {},
        {"key": X[:, :6], "value": X[:, :6]},
        "number of keys must be a multiple of 4.*but got 6",
    ),
    "zigzag": (
        {"layout": "zigzag"},
        {"query": X[:, :12]},
        r"multiple of 8 \(two chunks per device with layout=",
    ),
    "heads": ({"head_axis": "data"}, {"query": X[:, :, :3]}, "must be a multiple"),
    "key heads": (
        {"strategy": "ulysses"},
        dict.fromkeys(("key", "value"), X[:, :, :2]),
        'got 2; use "ring" or "allg',
    ),
    "sown weights": ({}, {"module": nnx.Module()}, r"but got module \(sow_weights\)"),
    "einsums": (
        {},
        {"einsum_dot_general": jax.lax.dot_general},
        "but got einsum_dot_general",
    ),
    "complex": (
        {},
        dict.fromkeys(QKV, X.astype(jnp.complex64)),
        "a query of complex64",
    ),
    "two answers": (
        {"head_axis": "data"},
        {"qkv_sharding": jax.P(None, None, "x")},
        "must use the same mesh axes",
    ),
    "a mesh that is none": (
        {"mesh": "x"},
        {},
        "mesh must be a jax.sharding.Mesh or None, but got 'x'",
    ),
    "a sharding that is none": (
        {},
        {"qkv_sharding": "data"},
        "qkv_sharding must be a jax.P or a NamedSharding",
    ),
    "too many entries": (
        {},
        {"qkv_sharding": jax.P(*[None] * 5)},
        "at most 4 entries, one per axis of the query",
    ),
    "no query": ({}, {"query": None}, "query must be an array"),
    "a query of two axes": (
        {},
        {"query": X[0, :, 0]},
        "query, key, value must have same rank",
    ),
    "batch": (
        {"batch_axes": "data"},
        dict.fromkeys(QKV, X[0]),
        "if there is no batch axis",
    ),
    "lists of keys": (
        {},
        {"key_indices": jnp.zeros((2, 16, 1), int)},
        "context_parallel does not support key_indices",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    made, called, message = REFUSED[reason]
    made = {"axis": "context", "mesh": mesh_of(data=2, context=4)} | made
    refused(
        message,
        lambda: flax_mha.context_parallel(**made)(**dict.fromkeys(QKV, X) | called),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_axis_in_a_tuple_and_no_keys(strategy):
    mesh = mesh_of(data=2, context=4)
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh, batch_axes=("data",))
    np.testing.assert_allclose(
        fn(X, X, X, qkv_sharding=jax.P("data")), fn(X, X, X), rtol=0, atol=0
    )
    assert not np.any(fn(X, X[:, :0], X[:, :0]))


@pytest.mark.core
def test_refusals_of_the_ring_and_its_helpers():
    for devices in (0, -1, 2.0, True):
        refused("devices must be an int >= 1, but got", zigzag_positions, 8, devices)
    refused(
        r"axis must be an axis of x, but got 1 for shape \(8,\)",
        to_zigzag,
        np.ones(8),
        2,
    )
    fn = flax_mha.context_parallel("context", mesh=mesh_of(context=4))
    with pytest.raises(
        NotImplementedError,
        match='cannot differentiate a single hop of strategy="ring"',
    ):
        fn(X, X, X, implementation="xla")
    refused("implementation must be", fn, X, X, X, implementation="fast")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_batch(strategy):
    mesh = mesh_of(
        AxisType.Auto if strategy == "ulysses" else AxisType.Explicit, context=2
    )
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh)
    x = put(jnp.zeros((0, T, N, H)), mesh, None, "context")

    def loss(x, sinks):
        return fn(
            x,
            x,
            x,
            sinks=sinks,
            is_causal=True,
            key_value_seq_lengths=jnp.zeros(0, jnp.int32),
        ).sum()

    assert jax.jit(loss)(x, jnp.ones(N)) == 0
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.grad(loss, (0, 1)))(x, jnp.ones(N))
    np.testing.assert_array_equal(gradients[0], x)
    np.testing.assert_array_equal(gradients[1], jnp.zeros(N))


@pytest.mark.core
def test_masked_rows_and_numbers_that_are_not_finite():
    x = {
        name: array.at[1, 3].set(np.nan) if name == "key" else array
        for name, array in arrays(8).items()
    }
    on_mesh = flax_mha.context_parallel("context", mesh=mesh_of(context=4))
    sinks = jnp.full((N,), -jnp.inf), floats(3, N)
    for output in contexts.compare_not_finite(
        flax_mha.attention_fn, on_mesh, x, sinks, lengths=[0, 30], window=4
    ):
        assert np.isnan(output).any()


def test_the_blocks_of_the_page_run():
    names = {}
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    # As a reader has it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(block, "docs/devices.md", "exec"), names)
        names["layer"].attention_fn = flax_mha.attention_fn
        want = nnx.jit(functools.partial(names["layer"], is_causal=True))(
            names["tokens"]
        )
    np.testing.assert_allclose(
        names["out"], want, rtol=0, atol=1e-5 * np.abs(want).max()
    )
