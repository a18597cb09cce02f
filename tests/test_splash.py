"""TPU attention: interpreted against the dense computation, lowered for a TPU, chosen
or refused.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import (
    by_the_rule_of_flash_attention,
    dense_gradients,
    equations,
    gradients,
    interpret,
    kernels_in,
    naive_attention,
)
from jax.sharding import AbstractMesh, use_abstract_mesh
from kernels import abstract, call, close, explained, normal, shapes
from marks import with_core

from flax_mha import dot_product_attention, masks
from flax_mha._src.engines.kernels import splash

B = 2
T = 256
N = 2
K = 1
H = 32
# Unsorted ids, with the smallest and the largest of int32.
IDS = np.array([-(2**31), -1, 0, 1, 2**31 - 1], np.int32)
SEGMENTS = np.random.default_rng(1).choice(IDS, (B, T))
PACKED = np.sort(SEGMENTS, axis=-1)
# As Flax's masks of padding, which are [B, 1, 1, S]: here, anywhere.
OF_KEYS = np.random.default_rng(2).random((B, 1, 1, T)) < 0.8


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run as XLA programs; jax's own code promotes."""
    interpret(monkeypatch, "splash")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True, scope="module")
def tpu():
    yield from kernels.as_on_a_tpu()


def lengths(*numbers):
    return np.array(numbers, np.int32)


# No key is masked in these, so NaN would spread as in the kernels.
PLAIN = {
    "as many heads": call(shapes(k=N), scale=-0.3),
    "odd lengths, groups, value head size": call(shapes(200, 333, n=6, k=2, h=8, hv=5)),
    "two batch axes, window wider than the keys": call(
        shapes(130, batch=(2, 1)), local_window_size=(1000, 1000)
    ),
}
# Each of these masks some keys.
HIDING = {
    "causal window, soft cap, one length for all": call(
        shapes(),
        is_causal=True,
        local_window_size=100,
        logits_soft_cap=2.0,
        key_value_seq_lengths=lengths(240),
    ),
    "no batch, window ahead, offset, length": call(
        shapes(130, 400, batch=()),
        local_window_size=(None, 5),
        query_offset=150,
        key_value_seq_lengths=np.array(260, np.int32),
    ),
    # Edges that meet corners of tiles.
    "window of one key before": call(shapes(), local_window_size=(1, 200)),
    "window of one key after": call(shapes(), local_window_size=(200, 1)),
    "offset below, masked tiles": call(
        shapes(400, 260), is_causal=True, query_offset=-140
    ),
    "lengths": call(
        shapes(),
        key_value_seq_lengths=lengths(200, 0),
        query_seq_lengths=lengths(100, 256),
    ),
    "groups, segments, window": call(
        shapes(n=4, k=2, h=8),
        query_segment_ids=SEGMENTS,
        local_window_size=(100, 5),
        scale=-0.3,
    ),
    "packed segments, causal, lengths": call(
        shapes(),
        key_value_segment_ids=PACKED,
        is_causal=True,
        key_value_seq_lengths=lengths(200, 256),
    ),
    "two batch axes, shared segments, window, lengths": call(
        shapes(s=333, batch=(2, B)),
        query_segment_ids=SEGMENTS,
        key_value_segment_ids=np.pad(SEGMENTS, ((0, 0), (0, 77))),
        local_window_size=60,
        query_seq_lengths=lengths(256, 0),
        key_value_seq_lengths=np.array([[300, 50], [-1, 100]], np.int32),
    ),
    "mask objects": call(shapes(), mask=masks.CausalMask(3) & masks.LocalMask(100, -2)),
    "mask objects, everything masked": call(
        shapes(), mask=masks.CausalMask(4 - T) & masks.LocalMask(T - 5, None)
    ),
    "mask of keys": call(shapes(n=4, k=2), mask=OF_KEYS),
    "mask of keys, some sequences see none; causal": call(
        shapes(), mask=OF_KEYS & np.array([[[[True]]], [[[False]]]]), is_causal=True
    ),
    "masks of keys, segments, lengths, two batch axes": call(
        shapes(batch=(2, B)),
        mask=masks.ArrayMask(OF_KEYS[0, 0, 0]) & masks.ArrayMask(OF_KEYS),
        query_segment_ids=SEGMENTS,
        key_value_seq_lengths=lengths(200, 0),
    ),
    "offsets of each sequence, lengths": call(
        shapes(),
        query_offset=lengths(-20, 30),
        key_value_offset=lengths(5),
        query_seq_lengths=lengths(100, 256),
        key_value_seq_lengths=lengths(250, 300),
    ),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name", with_core([*PLAIN, *HIDING], "no batch, window ahead, offset, length")
)
def test_output_and_gradients_equal_the_dense_computation(name):
    """If keys are masked, also with NaN in a key, infinity in a value, and NaN in
    queries without visible keys.
    """
    sizes, arguments = (PLAIN | HIDING)[name]
    ours = gradients("splash", arguments)
    dense = functools.partial(dense_gradients, **arguments)
    if "mask" in arguments:
        dense = gradients("xla", arguments)
    arrays = query, key, value = normal(*sizes)

    expected = dense(arrays)
    assert all(np.isfinite(x).all() for x in expected)
    close(ours(arrays), expected)

    if name in HIDING:
        key[..., 150, 0, :] = np.nan
        value[..., 20, -1, 0] = np.inf
        expected = dense(arrays)
        # Rows without visible keys.
        query[(expected[0] == 0).all(-1)] = np.nan
        close(ours(arrays), expected)


@pytest.mark.usefixtures("interpreted")
def test_bfloat16_by_the_rule_of_flash_attention():
    ids = PACKED[0]
    kernels.in_bfloat16_by_the_rule_of_flash_attention(
        "splash",
        shapes(),
        visible=np.tri(T, dtype=bool) & (ids[:, None] == ids),
        query_segment_ids=ids[None],
        is_causal=True,
        logits_soft_cap=3.0,
    )


class Sinks(NamedTuple):
    """Sinks of heads, or of the heads of each sequence."""

    sinks: list
    arguments: dict = {}  # noqa: RUF012


_, LENGTHS = HIDING["lengths"]
_, CAUSAL_WINDOW = HIDING["causal window, soft cap, one length for all"]
SINKS = {
    "of heads": Sinks([0.5, 3.0]),
    "of heads, lengths": Sinks([0.5, 3.0], LENGTHS),
    "of minus infinity, lengths": Sinks([-np.inf, 0.5], LENGTHS),
    "of sequences": Sinks([[-np.inf, 1.0], [80.0, -2.0]], CAUSAL_WINDOW),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", SINKS)
def test_sinks_and_their_gradients_equal_the_dense_computation(name):
    """Also in rows without visible keys. There, a sink of minus infinity is as none,
    and has no gradient.
    """
    sinks = np.float32(SINKS[name].sinks)
    arguments = SINKS[name].arguments
    ours = gradients("splash", arguments)
    dense = gradients("xla", arguments)
    _, key, value = arrays = normal(*shapes())

    expected = dense(arrays, sinks=sinks)
    assert all(np.isfinite(x).all() for x in expected)
    # The gradient of the sinks is no rounding error.
    assert np.abs(expected[-1]).max() > 1e-4
    close(ours(arrays, sinks=sinks), expected)

    if arguments:
        # Masked for all queries.
        key[0, 245] = np.nan
        value[1, 130, 0, 3] = np.inf
        close(ours(arrays, sinks=sinks), dense(arrays, sinks=sinks))


@pytest.mark.core
@pytest.mark.usefixtures("interpreted")
def test_gradient_of_sinks_in_bfloat16_although_its_terms_cancel():
    """Every weight is a power of 2 and all rows are equal, so only rounding of the
    terms could cause an error.
    """
    sinks = np.full(N, np.log(T), np.float32)
    query, key, value = normal(*shapes(), dtype=jnp.bfloat16)
    query = np.zeros_like(query)
    value = np.broadcast_to(value[:, :1], value.shape)
    arrays = query, key, value
    of_all_keys = np.float64(value[:, :1])
    d_output = np.random.default_rng(1).standard_normal((B, 1, N, H))
    # Orthogonal to the output, so that the products with it almost cancel.
    product = (d_output * of_all_keys).sum(-1, keepdims=True)
    square = (of_all_keys**2).sum(-1, keepdims=True)
    d_output = d_output - product / square * of_all_keys
    d_output = np.broadcast_to(d_output.astype(jnp.bfloat16), (B, T, N, H))

    def gradient(attend, arrays):
        def loss(sinks, *arrays):
            output = attend(*arrays, sinks=sinks)
            return jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32))

        return [jax.jit(jax.grad(loss))(sinks, *arrays)]

    ours = functools.partial(dot_product_attention, implementation="splash")
    exact = functools.partial(dot_product_attention, implementation="xla")
    truth = gradient(exact, [x.astype(np.float32) for x in arrays])
    answers = gradient(ours, arrays)
    by_the_rule_of_flash_attention(answers, gradient(naive_attention, arrays), truth)
    close(answers, truth)


@pytest.mark.usefixtures("interpreted")
def test_visible_infinity_gives_nan():
    """Also if all products with it are minus infinity, which the kernels treat as
    masked scores.
    """
    ours = gradients("splash", {"is_causal": True})
    dense = gradients("xla", {"is_causal": True})
    for which, infinity in itertools.product(range(3), (np.inf, -np.inf)):
        arrays = [np.abs(x) for x in normal(*shapes())]
        arrays[which][0, 200, :, 5] = infinity
        is_nan = np.isnan(ours(arrays)[0])
        np.testing.assert_array_equal(is_nan, np.isnan(dense(arrays)[0]))
        assert is_nan[0, 200].all()


@pytest.mark.usefixtures("interpreted")
def test_gradients_under_vmap():
    """With a batch of calls, one of which has masked NaN, so that all take the branch
    for NaN.
    """
    query, key, value = normal(*shapes(batch=(3, B)))
    key[1, 0, 250:] = np.nan
    value[2, 1, 251] = np.inf
    lengths = np.array([[T, 250], [250, T], [T, 100]], np.int32)

    def mapped(implementation):
        attend = functools.partial(
            dot_product_attention, is_causal=True, implementation=implementation
        )

        def loss(query, key, value, length):
            output = attend(query, key, value, key_value_seq_lengths=length)
            return jnp.sum(jnp.cos(output))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(query, key, value, lengths)

    close(mapped("splash"), mapped("xla"))


CHOSEN = {
    "plain": call(abstract(t=1024, s=1024)),
    "float32": call(abstract(dtype=jnp.float32), is_causal=True),
    "head size": call(abstract(h=33, hv=20)),
    "precision": call(abstract(), precision="default"),
    "sinks": call(abstract(), sinks=jnp.zeros(N), is_causal=True),
} | {
    name: ([jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes], arguments)
    for name, (sizes, arguments) in (PLAIN | HIDING).items()
    if "shared segments" not in name  # a length of -1 can only be data
}


@pytest.mark.parametrize(
    "name", with_core(CHOSEN, "head size", "groups, segments, window")
)
def test_a_tpu_gets_the_kernels(name):
    arrays, arguments = CHOSEN[name]
    text = kernels.lowered(arrays, **arguments)
    names = kernels_in(text, r'kernel_name = "(\w+)"')
    # Forward, and backward for queries and for keys with values.
    assert len(names) == 3
    for phase in ("fwd", "dq", "dkv"):
        assert any(f"splash_mha_{phase}" in name for name in names)


def not_chosen(reason, arrays=None, **arguments):
    """A TPU gets the portable computation, for this reason."""
    arrays = abstract() if arrays is None else arrays
    kernels.assert_refused("splash", arrays, arguments, reason)


REFUSED = kernels.REFUSED_BY_BOTH | kernels.REFUSED_BY_SPLASH


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_supports_is_not_chosen(name):
    arguments, reason = REFUSED[name]
    not_chosen(reason, **arguments)


@pytest.mark.core
def test_other_dtypes_and_sizes_are_not_chosen():
    float16 = abstract(dtype=jnp.float16)
    not_chosen("float32 and bfloat16, but the inputs are float16", float16)
    not_chosen("head sizes must be at most 256", abstract(h=264))
    not_chosen("head sizes must be at most 256", abstract(hv=264))
    not_chosen("its tile table does not fit", abstract(2**17, 2**17))
    not_chosen("an axis has length 0", abstract(s=0))
    not_chosen("an axis has length 0", abstract(hv=0))


@pytest.mark.core
def test_biases_and_other_masks_are_not_chosen():
    not_chosen("bias", bias=jnp.zeros((1, T, T)))
    not_chosen("Not", mask=~masks.CausalMask())
    of_queries = masks.ArrayMask(np.swapaxes(OF_KEYS, 2, 3))
    not_chosen("ArrayMask", mask=masks.ArrayMask(OF_KEYS) & of_queries)
    not_chosen("ArrayMask", mask=np.repeat(OF_KEYS, N, 1))
    segments = masks.SegmentMask(SEGMENTS, SEGMENTS)
    not_chosen("SegmentMask", query_segment_ids=PACKED, mask=segments)


MESH = AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


SETTINGS = {
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "not high": lambda: jax.default_matmul_precision("high"),
    "on multiple devices, it needs to know how its arr": lambda: use_abstract_mesh(
        MESH
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("reason", SETTINGS)
def test_settings_that_the_kernels_refuse(reason):
    kernels.assert_one_reason(abstract(), "splash", reason, SETTINGS[reason])
    with jax.set_mesh(mesh()):  # of one device, so nothing is split
        assert explained(abstract()).refusals["splash"] == []
    with jax.enable_x64(True):
        reasons = explained(abstract(dtype=jnp.float64)).refusals["splash"]
    assert any("the inputs are float64" in reason for reason in reasons)


def mesh():
    return jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def test_shard_map_gets_the_kernels_only_without_check_vma():
    """The kernels do not declare how their results vary over the mesh, which
    `check_vma` requires.
    """

    def lowered_with(check_vma, name):
        attend = functools.partial(
            dot_product_attention, is_causal=True, implementation=name
        )
        split = jax.shard_map(
            attend,
            mesh=mesh(),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=check_vma,
        )
        return kernels.lowered(abstract(k=2), split)

    # Three, and more in the branch for NaN.
    assert lowered_with(False, "splash").count("tpu_custom_call") > 3
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        lowered_with(True, "splash")
    assert "tpu_custom_call" in lowered_with(False, None)
    assert "tpu_custom_call" not in lowered_with(True, None)


@pytest.mark.core
@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"local_window_size": 40, "query_offset": -3}]
)
def test_a_policy_saves_kernel_results_by_name(arguments):
    """As many kernels as without `jax.checkpoint`; with `jax.checkpoint` but no policy,
    one more for each block.
    """
    x = jax.ShapeDtypeStruct((1, T, N, 128), jnp.float32)
    saved, without, anew = kernels.kernels_of_two_blocks(
        ["pallas_call"], x, "tpu", implementation="splash", **arguments
    )
    in_forward = 2  # with masks, the branch for NaN has another one
    assert saved == without == anew - 2 * in_forward


def test_the_id_of_hidden_keys_is_unused_and_takes_linear_memory():
    ids = np.array([[0, 1, 3, 1], [1, 2, 3, 4], [3, 2, 1, 0], [-1, 0, -4, 2**31 - 1]])
    unused = jax.jit(splash._unused)(ids.astype(np.int32))
    np.testing.assert_array_equal(unused, [2, 0, 4, 1])

    length = 2**14
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    program = jax.make_jaxpr(splash._unused)(ids)
    sizes = [x.outvars[0].aval.size for x in equations(program.jaxpr)]
    assert max(sizes) < 10 * length
