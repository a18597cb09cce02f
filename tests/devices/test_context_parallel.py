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
import test_large_scores
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


# How much of output and gradients each strategy sends.
MOVED = {
    "ring": {"collective-permute": 6},
    "ulysses": {"all-to-all": 8},
    "allgather": {"all-gather": 2},
}


@pytest.mark.parametrize(
    ("strategy", "case", "devices", "layout"),
    [
        ("ring", "plain", 2, "contiguous"),
        core("allgather", "plain", 2, "contiguous"),
        ("ring", "plain", 8, "zigzag"),
        ("ulysses", "plain", 8, "zigzag"),
        core("ring", "everything", 4, "zigzag"),
        ("allgather", "everything", 4, "zigzag"),
        core("ulysses", "windows", 2, "contiguous"),
        ("ring", "windows", 2, "zigzag"),
    ],
)
def test_results_equal_those_of_one_device(
    strategy, case, devices, layout, small_tiles
):
    mesh = mesh_of(context=devices)
    attention_fn = flax_mha.context_parallel("context", strategy, layout, mesh=mesh)
    program, results = contexts.on_devices(attention_fn, case, layout, mesh)
    compare(results, on_one_device(case))
    if case == "plain":
        assert moved(program.as_text()) == MOVED[strategy]


def second_derivatives(loss_and_aux):
    """Each mode of the other: `hessian_product`, the tangent, and its gradient."""

    def loss(x):
        return loss_and_aux(x)[0]

    def answers(x, tangents):
        def along(x):
            return jax.jvp(loss, (x,), (tangents,))[1]

        tangent, across = jax.value_and_grad(along)(x)
        products = hessian_product(loss_and_aux)(x, tangents)
        return products | {"tangent": tangent, "gradient of tangent": across}

    return answers


def gradient_of_gradient(loss_and_aux):
    """Reverse mode of reverse mode."""
    gradient = jax.grad(lambda x: loss_and_aux(x)[0])
    second = jax.grad(lambda x: squares(gradient(x)))
    return lambda x, _: {"gradient of gradient": second(x)}


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
def test_second_derivatives_equal_those_of_one_device(
    derivatives, strategy, case, devices, layout, small_tiles
):
    # Each mode of each, in three programs: all of them of one call take minutes.
    mesh = mesh_of(context=devices)
    attention_fn = flax_mha.context_parallel("context", strategy, layout, mesh=mesh)
    contexts.compare_derivatives(derivatives, attention_fn, case, layout, mesh)


@pytest.mark.parametrize(
    ("derivatives", "devices", "layout", "arguments", "has_sinks"),
    [
        core(test_large_scores.gradient, 4, "zigzag", "causal", True),
        (test_large_scores.derivatives, 4, "zigzag", "causal", True),
        (test_large_scores.derivatives, 4, "contiguous", "causal", False),
        (test_large_scores.derivatives, 2, "zigzag", "soft cap", False),
        (test_large_scores.derivatives, 2, "contiguous", "full", True),
    ],
)
def test_rings_compute_scores_of_any_size(
    derivatives, devices, layout, arguments, has_sinks
):
    ring = flax_mha.context_parallel(
        "context", "ring", layout, mesh=mesh_of(context=devices)
    )
    order, back = contexts.in_order(layout, devices)

    def attend(x):
        ordered = contexts.in_order_of(order, x)
        ordered["bias"] = order(order(x["bias"], 2), 3)
        qkv = [ordered.pop(name) for name in QKV]
        return (back(ring(*qkv, **ordered, **test_large_scores.ARGUMENTS[arguments])),)

    given = test_large_scores.given(has_sinks)
    got = jax.device_get(jax.jit(derivatives(attend))(*given))

    want = test_large_scores.expected(derivatives, arguments, has_sinks, has_lse=False)
    close(got, want, 2e-6)


def with_largest_scores(attention_fn, x):
    """The output, and the largest score of each head."""
    sown = []
    module = SimpleNamespace(sow=lambda collection, name, x: sown.append(x))
    arguments = CASES["everything"][0](x, lambda x, axis: x)
    arrays = (x[name] for name in QKV)
    output = attention_fn(*arrays, **arguments, max_score_module=module)
    return output, sown[-1]


@functools.cache
def largest_scores():
    attention_fn = functools.partial(flax_mha.attention_fn, implementation="xla")
    run = jax.jit(functools.partial(with_largest_scores, attention_fn))
    _, max_score = run(CASES["everything"][1])
    return max_score


@pytest.mark.parametrize(
    ("strategy", "axis_type"),
    [
        ("ring", AxisType.Auto),
        ("ulysses", AxisType.Explicit),
        ("allgather", AxisType.Auto),
    ],
)
def test_results_are_the_same_on_a_mesh_of_data_context_and_heads(strategy, axis_type):
    mesh = mesh_of(axis_type, data=2, context=2, model=2)
    axes = {}
    context = contextlib.nullcontext()
    # Explicit axes are known from the types of the arrays.
    if axis_type == AxisType.Auto:
        axes = {"batch_axes": "data", "head_axis": "model"}
        context = jax.set_mesh(mesh)
    attention_fn = flax_mha.context_parallel("context", strategy, **axes)
    attend = functools.partial(with_largest_scores, attention_fn)

    def run(x):
        (output, max_score), pull = jax.vjp(attend, x)
        (gradients,) = pull((jnp.cos(output), jnp.ones_like(max_score)))
        return max_score, (output, gradients)

    with context:
        x = contexts.placed(CASES["everything"][1], mesh, "data", "model")
        program = jax.jit(run).lower(x).compile()
        max_score, results = program(x)

    np.testing.assert_allclose(max_score, largest_scores(), rtol=1e-6)
    # The largest scores, and their cotangents, do not change output and gradients.
    compare(results, on_one_device("everything"))
    if strategy == "ring":
        # The ring exchanges the ids of segments, too.
        assert moved(program.as_text()) == {"collective-permute": 8}


@pytest.mark.parametrize("context", [False, True], ids=["no mesh", "set_mesh"])
def test_outside_jit_the_split_is_known_from_the_arrays(context):
    mesh = mesh_of(data=2, context=2, model=2)
    x = contexts.placed(arrays(8), mesh, "data", "model")
    first = flax_mha.context_parallel("context", "allgather")
    second = flax_mha.context_parallel("context", "allgather")

    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        out = first(**x, is_causal=True)
        # Equal arguments make equal functions, so the program is compiled once.
        with nothing_is_compiled():
            second(**x, is_causal=True)

    assert out.sharding.is_equivalent_to(x["query"].sharding, out.ndim)
    want, _ = on_one_device("plain")
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_memory_of_the_gradient_does_not_grow_with_the_devices():
    def temporaries(devices):
        mesh = mesh_of(context=devices)
        fn = flax_mha.context_parallel("context", "ring", "zigzag", mesh=mesh)
        attend = functools.partial(fn, is_causal=True)
        sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
        # 1024 tokens a device.
        shape = (1, 1024 * devices, 8, 64)
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        def gradient(query, key, value):
            _, pull = jax.vjp(attend, query, key, value)
            return pull(query)

        program = jax.jit(gradient).lower(x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(8) <= 1.1 * temporaries(2)


@pytest.mark.parametrize(
    ("strategy", "devices", "dtype", "rounding"),
    [
        ("ring", 4, "bfloat16", 2**-9),
        ("allgather", 4, "bfloat16", 2**-9),
        ("ring", 8, "float32", 1e-6),
    ],
)
def test_errors_are_at_most_twice_those_of_one_device(
    strategy, devices, dtype, rounding
):
    """FlashAttention's rule, and one rounding."""
    x = arrays(8, dtype=jnp.dtype(dtype))
    # Large scores: a log-sum-exp of 100 is rounded to 4e-6 in float32, and merging two
    # hops must not add that error.
    if dtype == "float32":
        x["query"] = x["query"] * 5
        x["key"] = x["key"] * 5
    allowed, largest = errors(flax_mha.attention_fn, x)
    assert dtype != "float32" or largest > 100

    mesh = mesh_of(context=devices)
    found, _ = errors(flax_mha.context_parallel("context", strategy, mesh=mesh), x)
    assert (found <= 2 * allowed + rounding).all()


FEATURES = 32


def test_nnx_module_with_rotary_positions_and_dropout_equals_one_device():
    # In zigzag order. The mesh also splits batch and heads, which the module knows.
    mesh = mesh_of(data=2, context=2, model=2)
    order, back = contexts.in_order("zigzag", 2)
    split = flax_mha.context_parallel("context", "ring", "zigzag", batch_axes="data")
    documents = np.repeat([[0, 1, 2, 3], [0, 0, 1, 1]], T // 4, 1)
    documents = jnp.asarray(documents, jnp.int32)
    x = floats(5, B, T, FEATURES)

    def compiled(x, ids, positions, **options):
        options |= {"num_kv_heads": 2, "rope": RoPE(), "dropout_rate": 0.1}
        module = flax_mha.MultiHeadAttention(
            4, FEATURES, decode=False, rngs=nnx.Rngs(0), **options
        )
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        arguments = {"is_causal": True, "segment_ids": ids, "positions": positions}

        def apply(params, x):
            module = nnx.merge(graph, params, rest)
            rngs = nnx.Rngs(1)
            return module(x, **arguments, deterministic=False, rngs=rngs)

        run = jax.jit(functools.partial(meshes.gradients, apply))
        program = run.lower(params, x).compile()
        return moved(program.as_text()), program(params, x)

    sent, expected = compiled(x, documents, None)
    assert sent == {}
    with jax.set_mesh(mesh):
        inputs = jax.device_put(order(x, 1), jax.P("data", "context"))
        positions = jnp.asarray(zigzag_positions(T, 2))
        options = {"attention_fn": split, "head_axis": "model"}
        sent, got = compiled(inputs, order(documents, 1), positions, **options)
    assert sent == {"collective-permute": 8}
    output, (d_params, d_x) = got
    close((back(output), (d_params, back(d_x))), expected)


def linen_gradients(attention_fn, params, x):
    layer = flax_mha.linen.MultiHeadDotProductAttention(
        4, num_kv_heads=2, rope=RoPE(), attention_fn=attention_fn
    )
    if params is None:
        params = jax.jit(layer.init)(jax.random.key(0), x)
    apply = functools.partial(layer.apply, is_causal=True)
    return params, jax.jit(functools.partial(meshes.gradients, apply))(params, x)


@functools.cache
def linen_on_one_device():
    """Inputs, parameters, and output with gradients."""
    x = floats(6, B, T, FEATURES)
    return x, *jax.device_get(linen_gradients(flax_mha.attention_fn, None, x))


@pytest.mark.parametrize("strategy", [core("ring"), "ulysses", "allgather"])
def test_linen_module_on_an_explicit_mesh_equals_one_device(strategy):
    mesh = mesh_of(AxisType.Explicit, data=2, context=2)
    x, params, expected = linen_on_one_device()
    attention_fn = flax_mha.context_parallel("context", strategy)
    with jax.set_mesh(mesh):
        x = put(x, mesh, "data", "context")
        _, got = linen_gradients(attention_fn, params, x)
        close(got, expected)


@pytest.mark.core
@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [("ring", "blockwise"), ("ulysses", "xla"), ("allgather", "xla")],
)
def test_explain_names_the_implementation_of_one_device(strategy, chosen):
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh_of(context=2))
    module = flax_mha.MultiHeadAttention(
        2, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(0)
    )
    assert module.explain(jnp.ones((1, 8, 16))).chosen == chosen

    x = jnp.ones((1, 1024, 2, 64))
    explanation = flax_mha.explain_implementation(x, x, x, qkv_sharding=fn.context)
    assert explanation.chosen == "blockwise"


def test_ulysses_calls_the_fused_kernel_of_a_tpu_once(monkeypatch):
    compiled_for(monkeypatch, "tpu")
    mesh = mesh_of(context=4)
    fn = flax_mha.context_parallel("context", "ulysses", "zigzag", mesh=mesh)
    sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
    x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16, sharding=sharding)

    # Lowered for it on this machine.
    traced = jax.jit(lambda x: fn(x, x, x, is_causal=True)).trace(x)
    program = traced.lower(lowering_platforms=("tpu",)).as_text()

    assert program.count("tpu_custom_call") == 1


X = jnp.ones((2, 16, 4, 8))
REFUSED = []


def refuses(message, made=None, **called):
    """Adds a case: arguments of `context_parallel`, and of the function it returns."""
    REFUSED.append((message, made or {}, called))


refuses("'context'; no mesh is set; use jax.set_mesh, or mesh=", made={"mesh": None})
refuses(r"'sequence'; the mesh has \('data', 'context'\)", made={"axis": "sequence"})
refuses("'x'; the mesh has", made={"batch_axes": ("data", "x")})
refuses("must be different mesh axes", made={"batch_axes": "context"})
refuses(
    "strategy must be 'ring' or 'ulysses' or 'allgather', but got 'star'",
    made={"strategy": "star"},
)
refuses(
    "layout must be 'contiguous' or 'zigzag', but got 'random'",
    made={"layout": "random"},
)
refuses(
    "axis must be the name of a single mesh axis", made={"axis": ("data", "context")}
)
refuses("head_axis must be the name of a mesh axis", made={"head_axis": [1]})
refuses("number of queries must be a multiple of 4.*but got 6; pad", query=X[:, :6])
refuses(
    "number of keys must be a multiple of 4.*but got 6", key=X[:, :6], value=X[:, :6]
)
refuses(
    r"multiple of 8 \(two chunks per device with layout=",
    made={"layout": "zigzag"},
    query=X[:, :12],
)
refuses("must be a multiple", made={"head_axis": "data"}, query=X[:, :, :3])
refuses(
    'got 2; use "ring" or "allg',
    made={"strategy": "ulysses"},
    **dict.fromkeys(("key", "value"), X[:, :, :2]),
)
refuses(r"but got module \(sow_weights\)", module=nnx.Module())
refuses("but got einsum_dot_general", einsum_dot_general=jax.lax.dot_general)
refuses("a query of complex64", **dict.fromkeys(QKV, X.astype(jnp.complex64)))
refuses(
    "must use the same mesh axes",
    made={"head_axis": "data"},
    qkv_sharding=jax.P(None, None, "x"),
)
refuses("mesh must be a jax.sharding.Mesh or None, but got 'x'", made={"mesh": "x"})
refuses("qkv_sharding must be a jax.P or a NamedSharding", qkv_sharding="data")
refuses("at most 4 entries, one per axis of the query", qkv_sharding=jax.P(*[None] * 5))
refuses("query, key and value must have the same rank", query=X[0, :, 0])
refuses(
    "if there is no batch axis", made={"batch_axes": "data"}, **dict.fromkeys(QKV, X[0])
)
refuses(
    "context_parallel does not support key_indices",
    key_indices=jnp.zeros((2, 16, 1), int),
)


@pytest.mark.core
@pytest.mark.parametrize(("message", "made", "called"), REFUSED)
def test_wrong_meshes_axes_and_arguments_raise_errors(message, made, called):
    made = {"axis": "context", "mesh": mesh_of(data=2, context=4)} | made
    called = dict.fromkeys(QKV, X) | called
    refused(message, lambda: flax_mha.context_parallel(**made)(**called))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_axes_may_be_a_tuple(strategy):
    mesh = mesh_of(data=2, context=4)
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh, batch_axes=("data",))
    got = fn(X, X, X, qkv_sharding=jax.P("data"))
    np.testing.assert_array_equal(got, fn(X, X, X))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_queries_without_keys_are_zero(strategy):
    mesh = mesh_of(data=2, context=4)
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh, batch_axes=("data",))
    no_keys = X[:, :0]
    assert not np.any(fn(X, no_keys, no_keys))


@pytest.mark.core
def test_zigzag_order_needs_devices_and_an_axis():
    for devices in (0, 2.0):
        refused("devices must be an int >= 1, but got", zigzag_positions, 8, devices)
    message = r"axis must be an axis of x, but got 1 for shape \(8,\)"
    refused(message, to_zigzag, np.ones(8), 2)


@pytest.mark.core
def test_ring_refuses_implementations_that_cannot_differentiate_a_hop():
    fn = flax_mha.context_parallel("context", mesh=mesh_of(context=4))
    message = 'cannot differentiate a single hop of strategy="ring"'
    with pytest.raises(NotImplementedError, match=message):
        fn(X, X, X, implementation="xla")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_batch_has_empty_results_and_gradients(strategy):
    kind = AxisType.Auto if strategy == "ulysses" else AxisType.Explicit
    mesh = mesh_of(kind, context=2)
    fn = flax_mha.context_parallel("context", strategy, mesh=mesh)
    x = put(jnp.zeros((0, T, N, H)), mesh, None, "context")
    lengths = jnp.zeros(0, jnp.int32)

    def loss(x, sinks):
        more = {"sinks": sinks, "is_causal": True}
        return fn(x, x, x, key_value_seq_lengths=lengths, **more).sum()

    assert jax.jit(loss)(x, jnp.ones(N)) == 0
    with jax.set_mesh(mesh):
        d_x, d_sinks = jax.jit(jax.grad(loss, (0, 1)))(x, jnp.ones(N))
    np.testing.assert_array_equal(d_x, x)
    np.testing.assert_array_equal(d_sinks, jnp.zeros(N))


@pytest.mark.core
def test_masked_rows_and_numbers_that_are_not_finite_equal_those_of_one_device():
    x = dict(arrays(8))
    x["key"] = x["key"].at[1, 3].set(np.nan)
    on_mesh = flax_mha.context_parallel("context", mesh=mesh_of(context=4))
    sinks = jnp.full((N,), -jnp.inf), floats(3, N)
    outputs = contexts.compare_not_finite(
        flax_mha.attention_fn, on_mesh, x, sinks, lengths=[0, 30], window=4
    )
    for output in outputs:
        assert np.isnan(output).any()


def test_blocks_of_the_page_about_devices_equal_one_device():
    names = {}
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    # As a reader has it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(block, "docs/devices.md", "exec"), names)
        layer = names["layer"]
        layer.attention_fn = flax_mha.attention_fn
        run = nnx.jit(functools.partial(layer, is_causal=True))
        want = run(names["tokens"])
    tolerance = 1e-5 * np.abs(want).max()
    np.testing.assert_allclose(names["out"], want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("strategy", "length"), [core("ring", 256), ("allgather", 512)]
)
def test_gradients_in_bfloat16_of_whole_tiles(strategy, length):
    """A CPU that multiplies bfloat16 lacks some products of these sizes."""
    shape = (3, 1, length, 2, 64)
    query, key, value = floats(0, *shape, dtype=jnp.bfloat16)
    mesh = mesh_of(context=2)
    attend = flax_mha.context_parallel("context", strategy=strategy, mesh=mesh)

    def gradients(attend, *arrays):
        def loss(*arrays):
            return attend(*arrays, is_causal=True).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    ours = gradients(attend, query, key, value)

    arrays = [x.astype(jnp.float32) for x in (query, key, value)]
    expected = gradients(flax_mha.dot_product_attention, *arrays)
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(got), want, rtol=2**-7, atol=2**-7)
