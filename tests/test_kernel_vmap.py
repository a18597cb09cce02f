"""Fused kernels under `jax.vmap`: every transformation with every choice of mapped
operands.

Programs are lowered for a GPU or a TPU to count their kernels. For numbers, a dense
computation replaces cuDNN's kernel and the others are interpreted.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, forget_programs, interpret, kernels_in
from flax import nnx
from kernels import as_if_cudnn_were_here, compute_for_cudnn
from marks import core, pairwise

from flax_mha import MultiHeadAttention, dot_product_attention
from flax_mha._src.engines.kernels import splash

B = 2
N = 2
K = 1
H = 8
CALLS = 3
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
FLOATS = ("query", "key", "value", "bias")


@pytest.fixture(autouse=True)
def accelerators(request, monkeypatch):
    """As on a GPU or a TPU: the platform of the test's parameter `kernel`."""
    if hasattr(request.node, "callspec"):
        kernel = request.node.callspec.params.get("kernel", "cudnn")
    else:
        kernel = "cudnn"
    compiled_for(monkeypatch, PLATFORMS[kernel])
    as_if_cudnn_were_here(monkeypatch)
    monkeypatch.setattr(splash, "TILES", (128,))
    forget_programs()
    yield
    forget_programs()


def total(function):
    return lambda *arguments: jnp.sum(jnp.sin(function(*arguments).astype(jnp.float32)))


def vmap_of_grad(attend, axes):
    return jax.vmap(jax.grad(total(attend)), axes)


def vmap_over_cotangents(attend, axes):
    def pulled(floats, others):
        output, pull = jax.vjp(lambda floats: attend(floats, others), floats)
        return jax.vmap(pull)(jnp.stack([output, output * output]))

    return jax.vmap(pulled, axes)


def jvp_of_vmap(attend, axes):
    return lambda floats, others: jax.jvp(
        lambda floats: jax.vmap(attend, axes)(floats, others),
        (floats,),
        (jax.tree.map(jnp.cos, floats),),
    )


def two_vmaps(attend, axes):
    """The outer one maps the operands that the inner one does not."""

    def both(*arguments):
        outer = tuple(
            {name: 0 if axis is None else None for name, axis in group.items()}
            for group in axes
        )
        pairs = [
            {
                name: x if axis[name] is None else jnp.stack([x, x[::-1]])
                for name, x in group.items()
            }
            for group, axis in zip(arguments, outer, strict=True)
        ]
        return jax.vmap(vmap_of_grad(attend, axes), outer)(*pairs)

    return both


TRANSFORMATIONS = {
    "forward": jax.vmap,
    "vmap_of_grad": vmap_of_grad,
    "grad_of_vmap": lambda attend, axes: jax.grad(total(jax.vmap(attend, axes))),
    "vmap_over_cotangents": vmap_over_cotangents,
    "jacrev": lambda attend, axes: jax.vmap(
        jax.jacrev(lambda *arguments: attend(*arguments)[0, 0]), axes
    ),
    "jvp_of_vmap": jvp_of_vmap,
    "two_vmaps": two_vmaps,
}
# The axis that is mapped, if any: not always the first.
AXIS = {"query": 0, "key": 1, "value": 2, "bias": 1, "lengths": 1, "ids": 0}
SUPPORTED = {"cudnn": (*FLOATS, "lengths"), "splash": (*FLOATS[:3], "lengths", "ids")}


def cases():
    """(kernel, transformation, T, is_causal), and which operands of the kernel are
    mapped.
    """
    qkv = [("shared", "mapped")] * 3
    optional = [("absent", "shared", "mapped")] * 2
    sizes = (100, False), (128, True), (1000, True)
    chosen = pairwise(tuple(SUPPORTED), tuple(TRANSFORMATIONS), sizes, *qkv, *optional)
    for kernel, name, size, *kinds in chosen:
        # No kernel takes both a bias and ids, so these share a column.
        kinds = dict(zip(AXIS, (*kinds, kinds[-2]), strict=True))
        operands = {x: kinds[x] for x in SUPPORTED[kernel] if kinds[x] != "absent"}
        yield kernel, name, *size, operands


def shape(name, t):
    others = {"bias": (B, N, t, t), "lengths": (B,), "ids": (B, t)}
    return others.get(name, (B, t, N if name == "query" else K, H))


def program(transformation, t, is_causal, operands, implementation, dtype=jnp.bfloat16):
    """The transformed attention, and arrays for it."""
    rng = np.random.default_rng(0)
    # An array of numbers of the calls is always mapped, so that all operands can be
    # shared.
    arrays = {"call": np.arange(CALLS), "outer": np.arange(1)}
    axes = {"call": 0, "outer": None}
    for name, kind in operands.items():
        axes[name] = AXIS[name] if kind == "mapped" else None
        size = (CALLS,) * (kind == "mapped") + shape(name, t)
        if name == "lengths":
            x = rng.integers(1, t, size, np.int32)
        elif name == "ids":
            x = np.sort(rng.integers(0, 3, size, np.int32))
        else:
            x = rng.standard_normal(size).astype(dtype)
        arrays[name] = np.moveaxis(x, 0, axes[name] or 0)

    def attend(floats, others):
        return dot_product_attention(
            **floats,
            key_value_seq_lengths=others.get("lengths"),
            query_segment_ids=others.get("ids"),
            is_causal=is_causal,
            implementation=implementation,
        )

    def split(names):
        floats = {x: names[x] for x in names if x in FLOATS}
        return floats, {x: names[x] for x in names if x not in FLOATS}

    return TRANSFORMATIONS[transformation](attend, split(axes)), split(arrays)


def kernels(kernel, function, *arrays):
    """How many kernels the lowered program runs: forward, and others. Equal kernels
    share a function there.
    """
    if kernel == "cudnn":
        platform = "cuda"
        pattern = r"@__cudnn\$fmha(\w+)\("
    else:
        platform = "tpu"
        pattern = r'kernel_name = "(\w+)"'
    traced = jax.jit(function).trace(*arrays)
    lowered = traced.lower(lowering_platforms=(platform,))
    names = kernels_in(lowered.as_text(), pattern)
    forward = sum(bool(re.search("Softmax$|_fwd|_forward", name)) for name in names)
    return forward, len(names) - forward


def expected_kernels(kernel, transformation):
    if transformation in ("forward", "jvp_of_vmap"):
        return 1, 0
    # splash has one for queries, and one for keys and values.
    return 1, {"cudnn": 1, "splash": 2}[kernel]


def padded_cudnn():
    """Without masks: lengths that pad T = 100 are shared, and residuals are if only
    cotangents are mapped.
    """
    shared = dict.fromkeys(FLOATS[:3], "shared")
    mapped = dict.fromkeys(FLOATS[:3], "mapped")
    for t in (100, 128):
        yield "cudnn", "forward", t, False, mapped
        yield "cudnn", "vmap_of_grad", t, False, shared | {"key": "mapped"}
        yield "cudnn", "vmap_over_cotangents", t, False, shared


LOWERED = [*itertools.starmap(core, padded_cudnn()), *cases()]


@pytest.mark.parametrize(
    ("kernel", "transformation", "t", "is_causal", "operands"), LOWERED
)
def test_each_kernel_runs_once(kernel, transformation, t, is_causal, operands):
    implementation = kernel if is_causal else None  # the others are chosen
    function, arrays = program(transformation, t, is_causal, operands, implementation)
    expected = expected_kernels(kernel, transformation)
    assert kernels(kernel, function, *arrays) == expected


def test_a_kernel_that_runs_again_is_counted():
    x = jnp.zeros((CALLS, B, 100, N, H), jnp.bfloat16)

    def loss(x):
        output = dot_product_attention(x, x, x, implementation="cudnn")
        return output.astype(jnp.float32).sum()

    recomputed = jax.value_and_grad(jax.checkpoint(lambda x: loss(jnp.sin(x))))
    assert kernels("cudnn", jax.vmap(recomputed), x) == (2, 1)


@pytest.mark.core
def test_gradients_of_a_module_for_each_example():
    module = MultiHeadAttention(
        2, 16, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0)
    )
    graph, parameters = nnx.split(module)

    def loss(parameters, x, length):
        return (
            nnx.merge(graph, parameters)(x, is_causal=True, lengths=length)
            .astype(jnp.float32)
            .sum()
        )

    x = jnp.zeros((CALLS, 100, 16), jnp.bfloat16)
    lengths = jnp.arange(CALLS)
    assert kernels(
        "cudnn", jax.vmap(jax.grad(loss), (None, 0, 0)), parameters, x, lengths
    ) == (1, 1)


NUMBERS = [
    core(
        "cudnn",
        "vmap_of_grad",
        {"query": "shared", "key": "mapped", "value": "shared", "lengths": "shared"},
    ),
    (
        "cudnn",
        "vmap_over_cotangents",
        {"query": "shared", "key": "shared", "value": "shared", "bias": "shared"},
    ),
    (
        "splash",
        "forward",
        {"query": "mapped", "key": "shared", "value": "shared", "lengths": "mapped"},
    ),
    (
        "splash",
        "vmap_over_cotangents",
        {"query": "shared", "key": "shared", "value": "shared"},
    ),
]


@pytest.mark.parametrize(("kernel", "transformation", "operands"), NUMBERS)
def test_results_equal_xla(kernel, transformation, operands, monkeypatch):
    if kernel == "cudnn":
        compute_for_cudnn(monkeypatch)
    else:
        interpret(monkeypatch, kernel)
    # jax's own code promotes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        programs = (
            program(transformation, 100, True, operands, name, jnp.float32)
            for name in (kernel, "xla")
        )
        got, want = (jax.jit(function)(*arrays) for function, arrays in programs)
    close(got, want)
