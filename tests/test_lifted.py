"""Modules under Flax's transformations, and in copies, checkpoints, exported programs
and Keras.
"""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_parts, linen_step
from flax import nnx
from flax_cases import assert_close, assert_same, flax_rules, normal
from jax import export

import flax_mha
from flax_mha import linen, masks
from flax_mha.rope import RoPE, YaRN

B = 2
T = 6
D = 16
N = 4
LAYERS = 2
OURS = flax_mha.MultiHeadAttention
OURS_LINEN = linen.MultiHeadDotProductAttention
FLAX_LINEN = nn.MultiHeadDotProductAttention
MORE = {
    "num_kv_heads": 2,
    "rope": RoPE(scaling=YaRN(4.0, 8)),
    "sinks": True,
    "local_window_size": (3, 0),
}
X = normal(0, B, T, D)
KEY = jax.random.key(0)


def filled(params):
    """Fills a tree with numbers that differ in each array and layer; modules of nnx and
    linen get the same ones.
    """
    leaves, structure = jax.tree.flatten(params)
    numbers = []
    for i, leaf in enumerate(leaves):
        x = np.random.default_rng(i).normal(size=leaf.shape, scale=0.25)
        numbers.append(jnp.asarray(x.astype(np.float32)))
    return jax.tree.unflatten(structure, numbers)


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make(rngs=None, slots=None, dtype=None, **options):
    """A module whose weights take no compiling, with a cache if there are slots."""
    rngs = nnx.Rngs(0) if rngs is None else rngs
    module = OURS(
        N,
        D,
        decode=slots is not None,
        kernel_init=nnx.initializers.zeros,
        rngs=rngs,
        **options,
    )
    nnx.update(module, filled(nnx.state(module, nnx.Param)))
    if slots is not None:
        module.init_cache((B, slots, D), dtype)
    return module


def make_layers(**options):
    """Layers made by nnx.vmap."""
    layers = nnx.split_rngs(splits=LAYERS)(
        nnx.vmap(lambda rngs: make(rngs=rngs, **MORE, **options))
    )(nnx.Rngs(0))
    nnx.update(layers, filled(nnx.state(layers, nnx.Param)))
    return layers


@functools.cache
def causal(layers=None):
    """The gradients of the parameters, and the output, of one module or of this many
    layers in a plain loop.
    """
    module = make(**MORE) if layers is None else make_layers()
    graph, params, others = nnx.split(module, nnx.Param, ...)

    @functools.partial(jax.grad, has_aux=True)
    def gradients(params):
        if layers is None:
            return 0.0, nnx.merge(graph, params, others)(X, is_causal=True)
        x = X
        for i in range(layers):
            weights, rest = jax.tree.map(lambda w, i=i: w[i], (params, others))
            x = x + nnx.merge(graph, weights, rest)(x, is_causal=True)
        return (x**2).sum(), x

    params, output = jax.jit(gradients)(params)
    return nnx.to_pure_dict(params), output


# Layers of flax.nnx -------------------------------------------------------------------


def run(layers, x, remat, **arguments):
    """Calls the layers one after another, in nnx.scan."""

    def block(module, x):
        return x + module(x, **arguments)

    block = nnx.remat(block) if remat else block
    return nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_nnx_vmap_in_nnx_scan_equal_a_loop(remat):
    @nnx.jit
    @functools.partial(nnx.grad, has_aux=True)
    def gradients(layers):
        x = run(layers, X, remat, is_causal=True)
        return (x**2).sum(), x

    got, output = gradients(make_layers())
    assert_close((nnx.to_pure_dict(got), output), causal(LAYERS))


@pytest.mark.parametrize("remat", [False, True])
def test_decoding_in_nnx_while_loop_equals_the_whole_forward(remat):
    """One token after another, each through all layers."""

    @nnx.jit
    def decode(layers):
        def step(state):
            layers, outputs, i = state
            x = jax.lax.dynamic_slice_in_dim(X, i, 1, axis=1)
            y = run(layers, x, remat)
            outputs = jax.lax.dynamic_update_slice_in_dim(outputs, y, i, axis=1)
            return layers, outputs, i + 1

        start = layers, jnp.zeros_like(X), jnp.int32(0)
        _, outputs, _ = nnx.while_loop(lambda state: state[2] < T, step, start)
        return outputs

    layers = make_layers(slots=T)
    assert_close(decode(layers), causal(LAYERS)[1])
    # Each layer has a cache of its own.
    assert (layers.cache_index[...] == T).all()


# Layers of flax.linen -----------------------------------------------------------------


class Block(nn.Module):
    """A layer of nn.scan or nn.vmap."""

    cls: type
    options: dict

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.cls(N, name="attention", **self.options)(x), None


def test_linen_layers_with_dropout_equal_those_of_flax():
    """nn.scan of nn.vmap of nn.remat; both classes call the same attention function
    with the keys that they draw.
    """
    options = {
        "dropout_rate": 0.5,
        "deterministic": False,
        "broadcast_dropout": False,
        "attention_fn": flax_mha.attention_fn,
    }
    split = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True, "dropout": True},
    }
    layers = nn.scan(nn.vmap(nn.remat(Block), **split), length=LAYERS, **split)
    x = jnp.stack([X, X])

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=1, has_aux=True)
    def gradients(cls, params):
        y = layers(cls, options).apply({"params": params}, x, rngs={"dropout": KEY})[0]
        return (y**2).sum(), y

    with flax_rules():
        init = functools.partial(
            layers(FLAX_LINEN, options).init, {"params": KEY, "dropout": KEY}
        )
        params = filled(jax.eval_shape(init, x)["params"])
        expected = gradients(FLAX_LINEN, params)
    assert_close(gradients(OURS_LINEN, params), expected)


def test_linen_caches_in_nn_scan_decode_as_the_whole_forward():
    """One token after another; the weights are those of the layers of flax.nnx."""
    axes = {"variable_axes": {"params": 0, "cache": 0}, "split_rngs": {"params": True}}
    layers = nn.scan(Block, length=LAYERS, **axes)(OURS_LINEN, MORE | {"decode": True})
    shapes = jax.eval_shape(layers.init, KEY, X)
    params = filled(shapes["params"])

    @jax.jit
    def decode(cache, x):
        def step(cache, x):
            (y, _), changed = layers.apply(
                {"params": params, "cache": cache}, x, mutable=["cache"]
            )
            return changed["cache"], y[:, 0]

        return jax.lax.scan(step, cache, x)[1]

    # [T, B, 1, D]: the scan takes a token a step.
    got = decode(zeros(shapes["cache"]), np.moveaxis(X[:, :, None], 1, 0))
    assert_close(jnp.moveaxis(got, 0, 1), causal(LAYERS)[1])


# Bridges ------------------------------------------------------------------------------


def test_an_nnx_module_decodes_as_one_of_linen():
    """ToLinen of a module that makes its own cache, called twice with parts of x."""
    module = nnx.bridge.ToLinen(make, kwargs=MORE | {"slots": T})
    shapes = jax.eval_shape(module.init, KEY, X)
    step = linen_step(
        module, {"params": filled(shapes["params"]), "cache": zeros(shapes["cache"])}
    )
    assert_close(in_parts(step, X, (3, 3)), np.asarray(causal()[1]))


def test_a_linen_module_decodes_as_one_of_nnx():
    """ToNNX inside another module, whose parameters and empty cache lazy_init makes."""

    class Model(nnx.Module):
        def __init__(self):
            self.attention = nnx.bridge.ToNNX(
                OURS_LINEN(N, **MORE, decode=True), rngs=nnx.Rngs(0)
            )

        def __call__(self, x):
            return self.attention(x, mutable=["cache"])

    model = nnx.jit(lambda: nnx.bridge.lazy_init(Model(), X))()
    nnx.update(model, filled(nnx.state(model, nnx.Param)))
    step = nnx.jit(lambda model, x: model(x))
    assert_close(
        in_parts(functools.partial(step, model), X, (3, 3)), np.asarray(causal()[1])
    )


# Checkpoints and copies ---------------------------------------------------------------


def sparse(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 < 2


class Layer(nnx.Module):
    """Attention that decodes two tokens a call, with its own mask and its own cache."""

    def __init__(self, dtype):
        ids = jnp.arange(8) // 3
        self.mask = nnx.data(
            masks.FunctionMask(sparse) | masks.SegmentMask(ids[:2], ids)
        )
        self.attention = make(slots=8, dtype=dtype, **MORE)

    def __call__(self, x):
        return self.attention(x, mask=self.mask)


def committed(layer):
    """Commits the arrays of a layer to a device, like restored arrays, so that all
    layers share one program.
    """
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.device_put(state, jax.devices()[0]))


call = nnx.jit(lambda layer, x: layer(x))


@pytest.mark.core
def test_orbax_restores_parameters_and_caches(tmp_path):
    """Variables of nnx and linen; decoding continues from the restored ones."""
    ocp = pytest.importorskip(
        "orbax.checkpoint", reason="needs orbax-checkpoint, which comes with Flax"
    )
    layer = committed(Layer("int8"))
    call(layer, X[:, :2])
    variables = jax.eval_shape(
        OURS_LINEN(N, **MORE, decode=True, cache_dtype="int8").init, KEY, X
    )
    state = {
        "int8": nnx.state(layer),
        "bfloat16": nnx.state(Layer("bfloat16")),
        "linen": filled(variables),
    }
    # A cache in 8 bits, one in 16, and the variables of linen.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(lambda: state)
        )
    assert_same(restored, state)
    other = nnx.merge(nnx.graphdef(Layer("int8")), restored["int8"])
    assert_same(call(other, X[:, 2:4]), call(layer, X[:, 2:4]))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": nnx.clone,
}


@pytest.mark.core
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_layers_masks_and_caches_compute_the_same(name):
    """A copy has its own cache, and the same graph, so nothing is compiled for it."""
    layer = committed(Layer("int8"))
    call(layer, X[:, :2])
    copied = committed(COPIES[name](layer))
    assert nnx.graphdef(copied) == nnx.graphdef(layer)
    got = call(copied, X[:, 2:4])
    # The copy's call did not write into the original.
    assert layer.attention.cache_index[...] == 2
    assert_same(got, call(layer, X[:, 2:4]))


# Exported programs, and code written for other attention ------------------------------


def test_a_serialized_export_of_a_module_with_symbolic_sizes():
    """One program for every batch size and length."""
    module = make(**MORE)
    apply = jax.jit(lambda x, lengths: module(x, is_causal=True, lengths=lengths))
    batch, length = export.symbolic_shape("batch, length")
    shapes = (
        jax.ShapeDtypeStruct((batch, length, D), X.dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    program = export.deserialize(export.export(apply)(*shapes).serialize())
    lengths = np.array([T, 2], np.int32)
    expected = apply(X, lengths)
    assert_close(program.call(X, lengths), expected)
    assert_close(program.call(X[:1, :5], np.array([5], np.int32)), expected[:1, :5])


def test_attention_of_keras_computes_with_this_package(monkeypatch, tmp_path):
    """Keras catches errors of `jax.nn.dot_product_attention`, so the test counts the
    calls that return.
    """
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    keras = pytest.importorskip(
        "keras", reason="needs keras, on which this package does not depend"
    )
    assert keras.backend.backend() == "jax"
    layer = keras.layers.MultiHeadAttention(N, D // N)
    calls = []
    padding = np.array([[[1, 1, 1, 1, 0, 0]], [[1, 0, 0, 0, 0, 0]]])
    uses = [
        {},
        {"use_causal_mask": True},
        {"use_causal_mask": True, "attention_mask": padding},
    ]

    def gradients(x):
        def loss(x, use):
            return (layer(x, x, **use) ** 2).sum()

        return [jax.grad(loss)(x, use) for use in uses]

    def attend(*arrays, **arguments):
        output = flax_mha.dot_product_attention(*arrays, **arguments)
        calls.append(arguments)
        return output

    with flax_rules():
        layer.build(X.shape, X.shape)
        expected = jax.jit(gradients)(X)
        # Keras has no argument for another function.
        monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
        assert_close(jax.jit(lambda x: gradients(x))(X), expected)
    assert len(calls) == len(uses)
