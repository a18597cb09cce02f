"""XLA's partitioner splits kernels by batch and heads, and moves nothing but sums.

A dense computation stands in for a kernel: XLA must not see into it, so it is only
called by `partitioned`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import close
from contexts import moved
from jax import lax
from marks import core
from meshes import context, floats, mesh_of, put

from flax_mha import dot_product_attention
from flax_mha._src.core.jaxprs import traced
from flax_mha._src.engines.kernels import guarded
from flax_mha._src.engines.kernels.cudnn import call as calls
from flax_mha._src.engines.kernels.lower_for_platform import compile_for
from flax_mha._src.engines.kernels.mask import Arrays
from flax_mha._src.engines.kernels.partitioned import partitioned
from flax_mha._src.masks.visible import Visible

B = 4
T = 16
N = 8
H = 8
CALLS = 4
AXES = ("B T N H", "B S K H", "B S K H", "#B #N T S", "B")


def dense(query, key, value, bias, lengths):
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / H**0.5 + bias
    visible = (
        jnp.arange(T, dtype=jnp.int32)[None, None, None] < lengths[:, None, None, None]
    )
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30))
    return [jnp.einsum("bnts,bsnh->btnh", weights, value)]


def gradients_of_dense(query, key, value, bias, lengths, d_output):
    attend = functools.partial(dense, lengths=lengths)
    _, pull = jax.vjp(attend, query, key, value, bias)
    return list(pull([d_output]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(may_be_split, *arrays):
    [output] = partitioned(dense, AXES, AXES[:1], may_be_split)(*arrays)
    return output


def forward(may_be_split, *arrays):
    return kernel(may_be_split, *arrays), arrays


def backward(may_be_split, arrays, d_output):
    pull = partitioned(gradients_of_dense, (*AXES, AXES[0]), AXES[:4], may_be_split)
    return (*pull(*arrays, d_output), None)


kernel.defvjp(forward, backward)


class Fused(NamedTuple):
    """The kernel for `guarded.around_kernel`."""

    may_be_split: bool
    scale: float = 1.0

    def run(self, arrays, mask, differentiated):
        del differentiated
        inputs = (*arrays[:4], mask.key_lengths)
        return (kernel(self.may_be_split, *inputs),), arrays[:3]


def guarded_kernel(may_be_split, query, key, value, bias, lengths):
    mask = Visible(key_lengths=lengths)
    arrays = Arrays(query, key, value, bias)
    return guarded.around_kernel(Fused(may_be_split), arrays, mask)[0]


def evaluated_late(attend):
    """As `with_derivatives` evaluates kernels."""

    def run(*arrays):
        [output] = compile_for("cpu", traced(attend, *arrays))(*arrays)
        return output

    return run


def gradient(attend):
    def run(*arrays):
        def loss(*trainable):
            return jnp.sin(attend(*trainable, arrays[4])).sum()

        return jax.value_and_grad(loss, range(4))(*arrays[:4])

    return run


def layers(attend):
    def run(query, *others):
        def layer(x, _):
            return jnp.sin(attend(x, *others)), None

        return lax.scan(layer, query, length=3)[0]

    return run


def mapped(attend):
    """The bias is shared."""
    return jax.vmap(attend, (0, 0, 0, None, 0))


PROGRAMS = {
    "forward": lambda attend: attend,
    "gradient": gradient,
    "layers": lambda attend: gradient(layers(attend)),
    "layers, checkpoint": lambda attend: gradient(layers(jax.checkpoint(attend))),
    "evaluated late": evaluated_late,
    "mapped, gradient": lambda attend: mapped(gradient(attend)),
    "gradient of mapped": lambda attend: gradient(mapped(attend)),
    "mapped, evaluated late": lambda attend: mapped(evaluated_late(attend)),
}


class Placed(NamedTuple):
    """The mesh axes that split batch, heads and the axis that is mapped."""

    batch: str | None = None
    heads: str | None = None
    calls: str | None = None
    num_kv_heads: int = N
    bias: tuple[int, int] = (1, 1)


BY_BOTH = Placed("data", "model")


def arrays_of(placed, is_mapped, mesh=None):
    """Queries, keys, values, bias and lengths, split over the mesh."""
    kv_heads = placed.num_kv_heads
    shared = floats(3, *placed.bias, T, T)
    sizes = [(B, T, N, H), (B, T, kv_heads, H), (B, T, kv_heads, H)]
    calls = (CALLS,) if is_mapped else ()
    rng = np.random.default_rng(4)
    lengths = jnp.asarray(rng.integers(1, T, (*calls, B)), jnp.int32)
    qkv = [floats(i, *calls, *size) for i, size in enumerate(sizes)]
    if mesh is None:
        return [*qkv, shared, lengths]
    of_calls = (placed.calls,) if is_mapped else ()
    found = []
    for x in qkv:
        # A single key head is on all devices.
        heads = placed.heads if x.shape[-2] > 1 else None
        found.append(put(x, mesh, *of_calls, placed.batch, None, heads))
    return [*found, put(shared, mesh), put(lengths, mesh, *of_calls, placed.batch)]


def compare(attend, wrap, arrays, parts):
    """Compares results with those of one device; returns the text of the program."""
    expected = jax.jit(wrap(functools.partial(attend, False)))(*arrays)
    split = jax.jit(wrap(functools.partial(attend, True)))
    program = split.lower(*parts).compile()
    close(program(*parts), expected)
    return program.as_text()


@pytest.mark.parametrize("attend", [kernel, guarded_kernel])
@pytest.mark.parametrize(
    ("name", "placed"),
    [
        core("forward", BY_BOTH),
        ("gradient", Placed("data")),
        core("gradient", Placed("data", "model", num_kv_heads=4)),
        ("gradient", Placed("data", "model", num_kv_heads=1)),
        ("gradient", Placed(None, "model", bias=(B, N))),
        ("gradient", Placed("data", None, bias=(1, N))),
        ("layers", BY_BOTH),
        ("layers, checkpoint", BY_BOTH),
        core("evaluated late", BY_BOTH),
        ("mapped, gradient", Placed("data", None)),
        core("mapped, gradient", Placed(None, "model", "data")),
        ("mapped, gradient", Placed("data", "model", bias=(B, 1))),
        ("gradient of mapped", Placed(None, "model")),
        ("gradient of mapped", Placed("model", None, "data")),
        ("mapped, evaluated late", BY_BOTH),
    ],
)
def test_only_sums_move_between_devices(attend, name, placed):
    """Among them is the sum of "is all finite?", by which every device branches."""
    is_mapped = "mapped" in name
    arrays = arrays_of(placed, is_mapped)
    parts = arrays_of(placed, is_mapped, mesh_of("auto"))
    text = compare(attend, PROGRAMS[name], arrays, parts)
    # Each device has a part of the queries, and none has all of them.
    sizes = [str(x) for x in arrays[0].shape]
    assert f"f32[{','.join(sizes)}]" not in text
    assert moved(text) == {}


SHARED = {
    "queries": (None, 0, 0, None, 0),
    "keys and lengths": (0, None, 0, None, None),
    "nothing": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("shared", SHARED)
def test_any_operand_may_be_shared_by_mapped_calls(shared):
    axes = SHARED[shared]
    mesh = mesh_of("auto")

    def wrap(attend):
        return jax.vmap(gradient(attend), axes)

    arrays = arrays_of(BY_BOTH, is_mapped=False)
    parts = []
    stacked = []
    for x, axis in zip(arrays, axes, strict=True):
        calls = () if axis is None else ("data",)
        if calls:
            x = jnp.stack([x, x + 1, x - 1, x + 2])
        stacked.append(x)
        parts.append(put(x, mesh, *calls))
    assert moved(compare(kernel, wrap, stacked, parts)) == {}


@pytest.mark.parametrize("kind", ["auto", "auto, set_mesh"])
def test_axes_that_devices_do_not_divide_are_not_split(kind):
    """Two key heads for four devices, and three sequences for two."""
    mesh = mesh_of(kind)
    with context(mesh, kind):
        arrays = arrays_of(Placed(num_kv_heads=2), is_mapped=False)
        parts = arrays_of(BY_BOTH._replace(num_kv_heads=2), is_mapped=False)
        parts[0] = put(parts[0], mesh, "data", None, "model")

        def wrap(attend):
            def run(query, key, value, bias, lengths):
                few = (x[:3] for x in (query, key, value))
                return gradient(attend)(*few, bias, lengths[:3])

            return run

        compare(kernel, wrap, arrays, parts)


@pytest.fixture
def gpu(monkeypatch):
    yield from kernels.as_on_a_gpu(monkeypatch)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "arguments",
    [
        core({"mask": np.tri(B * T, dtype=bool).reshape(B, 1, T, B * T)[..., :T]}),
        {"key_value_seq_lengths": np.int32([3, 16, 0, 7]), "is_causal": True},
        {"sinks": np.linspace(-1, 1, N, dtype=np.float32), "is_causal": True},
        {"bias": np.array(floats(7, 1, N, T, T)), "local_window_size": (3, 3)},
    ],
    ids=["mask", "lengths", "sinks", "bias, window"],
)
def test_plain_jit_splits_attention_by_cudnn(arguments, monkeypatch):
    """With dense computations in place of cuDNN's calls; the sharding is not named."""
    kernels.compute_for_cudnn(monkeypatch)
    arrays = arrays_of(BY_BOTH, is_mapped=False)[:3]
    parts = arrays_of(BY_BOTH, is_mapped=False, mesh=mesh_of("auto"))[:3]

    def with_gradients(implementation):
        def attend(*arrays):
            return dot_product_attention(
                *arrays, implementation=implementation, **arguments
            )

        def run(*arrays):
            output, pull = jax.vjp(attend, *arrays)
            return output, *pull(jnp.cos(output))

        return jax.jit(run)

    program = with_gradients("cudnn").lower(*parts).compile()
    close(program(*parts), with_gradients("xla")(*arrays))
    assert moved(program.as_text()) == {}


@pytest.mark.usefixtures("gpu")
def test_plain_jit_chooses_cudnn_without_a_named_sharding():
    lengths = {"key_value_seq_lengths": np.int32([200, 0])}
    bias = {"bias": np.zeros((1, 2, 256, 256), jnp.bfloat16)}
    # A warning would be an error.
    for arguments in ({}, lengths, bias):
        program = kernels.lowered(kernels.abstract(h=64), platform="cuda", **arguments)
        assert "__cudnn" in program


def test_shard_map_of_some_axes():
    """JAX does not tell how the other axes split arrays, so these are gathered."""
    mesh = mesh_of("auto")

    def wrap(attend):
        if attend.args == (False,):
            return gradient(attend)
        of_batch = jax.P("data")

        def run(*arrays):
            value, gradients = gradient(attend)(*arrays)
            bias = lax.psum(gradients[3], "data")
            return lax.psum(value, "data"), (*gradients[:3], bias)

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(*[of_batch] * 3, jax.P(), of_batch),
            out_specs=(jax.P(), (*[of_batch] * 3, jax.P())),
            axis_names={"data"},
            check_vma=False,
        )

    arrays = arrays_of(BY_BOTH, is_mapped=False)
    compare(kernel, wrap, arrays, arrays_of(BY_BOTH, is_mapped=False, mesh=mesh))


def test_the_partitioner_before_shardy():
    arrays = arrays_of(BY_BOTH, is_mapped=False)
    parts = arrays_of(BY_BOTH, is_mapped=False, mesh=mesh_of("auto"))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        text = compare(guarded_kernel, gradient, arrays, parts)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert moved(text) == {}


@pytest.mark.parametrize("kind", ["auto, set_mesh", "explicit, set_mesh"])
def test_a_mesh_does_not_change_how_calls_are_compared_with_those_of_jax(
    kind, monkeypatch
):
    """XLA's partitioner would split JAX's calls, so that no custom call is seen."""
    kernels.as_if_cudnn_were_here(monkeypatch)
    calls.differences_from_jax.cache_clear()
    with context(mesh_of(kind), kind):
        assert calls.differences_from_jax() == []
