"""`head_axis`: heads split over a mesh axis, from the projections to the sum of the
output; caches split like them.
"""

import functools
import re

import jax
import numpy as np
import pytest
from cases import close
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from marks import core
from meshes import context, floats, gradients, mesh_of, put

import flax_mha
from flax_mha import Gate, Norm, linen
from flax_mha.rope import RoPE

FEATURES = 16
N = 4
OF_NNX = [core(N, "explicit, set_mesh"), (1, "auto, set_mesh")]
OF_LINEN = [(N, "explicit"), (1, "explicit, set_mesh")]
RING = (10, 0)
OPTIONS = {
    "rope": RoPE(),
    "normalize_qk": Norm("rms"),
    "sinks": True,
    "gate": True,
    "dropout_rate": 0.1,
}


def clip_keys(query, key, value):
    return query, key.clip(-1.0, 1.0), value


OF_HEADS = {
    "gate": Gate("head"),
    "normalize_qk": Norm("layer", scale="heads"),
    "value_norm": Norm("rms", scale="heads"),
    "out_norm": Norm("rms", scale="heads", over="all_heads"),
    "process_heads": clip_keys,
    "value_dim": 6,
    "sinks": False,
}


def inputs(length=24):
    return floats(0, 4, length, FEATURES)


def collectives(text):
    counts = {}
    for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        number = len(re.findall(rf" {name}(?:-start)?\(", text))
        if number:
            counts[name] = number
    return counts


def nnx_layer(num_kv_heads, **options):
    options = OPTIONS | {"decode": False} | options
    return flax_mha.MultiHeadAttention(
        N, FEATURES, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(0), **options
    )


def of_nnx(graph, state, x):
    """Output and gradients; with dropout."""

    def attend(state):
        layer = nnx.merge(graph, state)
        rngs = nnx.Rngs(dropout=1)
        return layer(x, is_causal=True, deterministic=False, rngs=rngs)

    return gradients(attend, state)


@functools.cache
def nnx_on_one_device(num_kv_heads):
    graph, state = nnx.split(nnx_layer(num_kv_heads, keep_rngs=False))
    run = jax.jit(functools.partial(of_nnx, graph))
    return jax.device_get(run(state, inputs()))


def linen_layer(num_kv_heads, **options):
    return linen.MultiHeadDotProductAttention(
        N, num_kv_heads=num_kv_heads, deterministic=True, **OPTIONS | options
    )


def of_linen(layer, variables, x):
    rngs = {"dropout": jax.random.key(1)}
    layer = layer.copy(deterministic=False)

    def attend(variables):
        return layer.apply(variables, x, is_causal=True, rngs=rngs)

    return gradients(attend, variables)


@functools.cache
def linen_on_one_device(num_kv_heads):
    """The variables, and what `of_linen` returns."""
    layer = linen_layer(num_kv_heads)
    variables = layer.init(jax.random.key(0), inputs())
    run = jax.jit(functools.partial(of_linen, layer))
    return variables, jax.device_get(run(variables, inputs()))


def check(function, state, mesh, kind, expected):
    """On the mesh the output is the same, after one sum in the forward pass."""
    x = put(inputs(), mesh, "data")
    forward = jax.jit(lambda state, x: function(state, x)[0])
    with context(mesh, kind):
        program = forward.lower(state, x).compile()
        answer = jax.jit(function)(state, x)
    close(answer, expected)
    # Only the output layer sums over heads.
    assert collectives(program.as_text()) == {"all-reduce": 1}


def spec_of(variable):
    return tuple(variable[...].sharding.spec)


@pytest.mark.parametrize(("num_kv_heads", "kind"), OF_NNX)
def test_nnx_module_with_split_heads_equals_one_device(num_kv_heads, kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        layer = nnx_layer(num_kv_heads, keep_rngs=False, head_axis="model")
    # A single key head is on every device.
    heads = "model" if num_kv_heads == N else None
    assert spec_of(layer.query.kernel) == (None, "model", None)
    assert spec_of(layer.value.kernel) == (None, heads, None)
    assert spec_of(layer.out.kernel) == ("model", None, None)

    graph, state = nnx.split(layer)
    run = functools.partial(of_nnx, graph)
    check(run, state, mesh, kind, nnx_on_one_device(num_kv_heads))


@pytest.mark.parametrize(("num_kv_heads", "kind"), OF_LINEN)
def test_linen_module_with_split_heads_equals_one_device(num_kv_heads, kind):
    variables, whole = linen_on_one_device(num_kv_heads)
    mesh = mesh_of(kind)
    layer = linen_layer(num_kv_heads, head_axis="model")
    with jax.set_mesh(mesh):
        boxed = jax.jit(layer.init)(jax.random.key(0), inputs())
    # Each device draws its part of the same weights.
    close(nn.unbox(boxed), variables)
    specs = nn.get_partition_spec(boxed)
    assert specs["params"]["query"]["kernel"] == jax.P(None, "model", None)
    placed = jax.tree.map(lambda x, spec: put(x, mesh, *spec), variables, specs)
    check(functools.partial(of_linen, layer), placed, mesh, kind, whole)


@pytest.mark.parametrize(
    ("num_kv_heads", "kind"), [(N, "auto, set_mesh"), (2, "explicit, set_mesh")]
)
def test_gates_and_norms_of_heads_are_split_like_heads(num_kv_heads, kind):
    mesh = mesh_of(kind)
    options = OF_HEADS | {"dropout_rate": 0.0}
    whole = linen_layer(num_kv_heads, **options)
    layer = linen_layer(num_kv_heads, head_axis="model", **options)
    variables = whole.init(jax.random.key(0), inputs())

    with jax.set_mesh(mesh):
        boxed = jax.jit(layer.init)(jax.random.key(0), inputs())
        of_nnx = nnx_layer(num_kv_heads, head_axis="model", **options)

    specs = nn.get_partition_spec(boxed)
    assert specs["params"]["gate"]["kernel"] == jax.P(None, "model")
    assert spec_of(of_nnx.gate.kernel) == (None, "model")
    # Fewer key heads than devices are not split.
    of_keys = "model" if num_kv_heads == N else None
    axes = {"query_ln": "model", "out_norm": "model"}
    axes |= {"key_ln": of_keys, "value_ln": of_keys}
    for name, axis in axes.items():
        assert specs["params"][name]["scale"] == jax.P(axis, None), name
        assert spec_of(getattr(of_nnx, name).scale) == (axis, None), name

    placed = jax.tree.map(lambda x, spec: put(x, mesh, *spec), variables, specs)
    x = put(inputs(), mesh, "data")
    with context(mesh, kind):
        answer = jax.jit(functools.partial(of_linen, layer))(placed, x)
    want = jax.jit(functools.partial(of_linen, whole))(variables, inputs())
    close(answer, want)


@functools.cache
def plain_on_one_device():
    """The linen layer's variables and output, and the output of the nnx layer."""
    layer = linen_layer(N)
    variables = jax.jit(layer.init)(jax.random.key(0), inputs())
    linen_output = jax.jit(layer.apply)(variables, inputs())
    of_nnx = jax.jit(functools.partial(nnx_layer(N), deterministic=True))
    return variables, jax.device_get((linen_output, of_nnx(inputs())))


@pytest.mark.parametrize("kind", ["auto, set_mesh", "explicit, set_mesh"])
def test_logical_axis_may_be_several_mesh_axes(kind):
    axis_type = AxisType.Explicit if "explicit" in kind else AxisType.Auto
    names = ("data", "row", "column")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(axis_type,) * 3)
    split = linen_layer(N, head_axis="heads")
    variables, expected = plain_on_one_device()
    rules = nn.logical_axis_rules([("heads", ("row", "column"))])

    with jax.set_mesh(mesh), rules:
        boxed = jax.jit(split.init)(jax.random.key(0), inputs())
        logical = nn.get_partition_spec(boxed)
        specs = nn.logical_to_mesh(logical)
        layer = nnx_layer(N, head_axis="heads")
        linen_output = jax.jit(split.apply)(boxed, inputs())
        nnx_output = nnx.jit(lambda x: layer(x, deterministic=True))(inputs())

    of_heads = (None, ("row", "column"), None)
    assert logical["params"]["query"]["kernel"] == jax.P(None, "heads", None)
    assert specs["params"]["query"]["kernel"] == jax.P(*of_heads)
    assert spec_of(layer.query.kernel) == of_heads
    close((nn.unbox(boxed), linen_output, nnx_output), (variables, *expected))


@pytest.mark.core
def test_head_axis_without_a_mesh_is_only_metadata():
    layer = nnx_layer(N, head_axis="model")
    assert layer.query.kernel.get_metadata("out_sharding") == (None, "model", None)
    expected = nnx_layer(N)(inputs(), deterministic=True)
    np.testing.assert_array_equal(layer(inputs(), deterministic=True), expected)


@pytest.mark.core
def test_head_axis_and_sharding_in_metadata_exclude_each_other():
    metadata = {"out_sharding": ("model",), "eager_sharding": False}
    message = "head_axis must be None if metadata sets out_sharding"
    with pytest.raises(ValueError, match=message):
        nnx_layer(N, head_axis="model", kernel_metadata=metadata)


@pytest.mark.parametrize(
    ("num_kv_heads", "kind", "window"), [core(N, "explicit", RING), (1, "auto", None)]
)
def test_cache_stays_split_over_batch_and_heads(num_kv_heads, kind, window):
    options = {"local_window_size": window, "dropout_rate": 0.0, "sinks": False}
    whole = nnx_layer(num_kv_heads, **options)
    expected = jax.jit(functools.partial(whole, is_causal=True))(inputs(81))
    mesh = mesh_of(kind)
    heads = "model" if num_kv_heads == N else None
    spec = jax.P("data", None, heads, None)
    options |= {"decode": True, "head_axis": "model"}
    with jax.set_mesh(mesh):
        layer = nnx_layer(num_kv_heads, **options)
        layer.init_cache((4, 120, FEATURES), per_row=True, sharding=spec)
        x = put(inputs(81), mesh, "data")
        graph, cache, rest = nnx.split(layer, nnx.Cache, ...)

        @jax.jit
        def step(cache, rest, x):
            layer = nnx.merge(graph, cache, rest)
            return layer(x), nnx.state(layer, nnx.Cache)

        outputs = []
        for start, end in ((0, 40), (40, 41), (41, 81)):
            output, cache = step(cache, rest, x[:, start:end])
            outputs.append(jax.device_get(output))

    close(np.concatenate(outputs, 1), expected)
    key = cache["cached_key"][...]
    assert key.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), key.ndim)


@pytest.mark.core
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_axis", "words"),
    [
        (N, N, "heads", r"head_axis must be an axis of the mesh \('data', 'model'\)"),
        (N, N, 3, "head_axis must be the name of a mesh axis"),
        (6, 6, "model", "the size of head_axis must divide num_heads"),
        (
            12,
            3,
            "model",
            "the number of key heads must divide 4, the number of devices on mesh "
            "axis 'model'",
        ),
    ],
)
def test_wrong_head_axes_raise_errors(heads, kv_heads, head_axis, words):
    options = {"num_kv_heads": kv_heads, "head_axis": head_axis, "rngs": nnx.Rngs(0)}
    mesh = mesh_of("auto")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
        flax_mha.MultiHeadAttention(heads, 2 * heads, **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_keys_that_two_layers_share_are_split_like_heads(kind):
    def pair():
        options = {"num_kv_heads": 2, "rope": RoPE(), "decode": True}
        options |= {"head_axis": "model", "rngs": nnx.Rngs(0)}
        first = flax_mha.MultiHeadAttention(N, FEATURES, **options)
        # It only reads the cache of the first layer.
        second = flax_mha.MultiHeadAttention(N, FEATURES, reuse_kv=True, **options)
        first.init_cache((2, 9, FEATURES))
        return nnx.List([first, second])

    @nnx.jit
    def step(layers, x):
        y, kv = layers[0](x, return_kv=True)
        return layers[1](y, kv=kv)

    def decode():
        layers = pair()
        x = floats(0, 2, 9, FEATURES)
        outputs = []
        for first, end in ((0, 6), (6, 7), (7, 9)):
            outputs.append(np.asarray(step(layers, x[:, first:end])))
        sharding = layers[0].cached_key.get_value().sharding
        return np.concatenate(outputs, axis=1), sharding

    expected, _ = decode()
    with jax.set_mesh(jax.make_mesh((2,), ("model",), axis_types=(kind,))):
        got, sharding = decode()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert sharding.spec[2] == "model"
