"""TPU attention: interpreted against the dense computation, lowered for a TPU, chosen or refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import REMEDY, compiled_for, dense_gradients, interpret, kernels_in
from jax import export
from jax.sharding import AbstractMesh, use_abstract_mesh
from kernels import (
    abstract,
    as_on_a_tpu,
    assert_one_reason,
    by_the_rule_of_flash_attention,
    close,
    explained,
    kernels_of_two_blocks,
    lowered,
    normal,
    shapes,
    with_gradients,
)
from marks import with_core

from flax_mha import dot_product_attention, masks
from flax_mha.cached_attention import cached_attention
from flax_mha.kv_cache import KVCache

B, T, N, K, H = 2, 256, 2, 1, 32
# Ids in no order, the least and the greatest among them.
SEGMENTS = np.random.default_rng(1).choice(np.array([-(2**31), -1, 0, 1, 2**31 - 1], np.int32), (B, T))
PACKED = np.sort(SEGMENTS, axis=-1)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run here, as XLA programs; jax's own code promotes."""
    interpret(monkeypatch, "splash")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True, scope="module")
def tpu():
    yield from as_on_a_tpu()


def gradients(implementation, arguments):
    """Jitted, with arrays of the arguments as data."""
    data = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in arguments.items() if name not in data}
    run = jax.jit(lambda arrays, data: with_gradients(implementation, **static, **data)(*arrays))
    return lambda arrays: jax.device_get(run(arrays, data))


def lengths(*numbers):
    return np.array(numbers, np.int32)


PLAIN = {
    "as many heads": (shapes(k=N), {"scale": -0.3}),
    "odd lengths, groups, value head size": (shapes(200, 333, n=6, k=2, h=8, hv=5), {}),
    "two batch axes, window wider than the keys": (shapes(130, batch=(2, 1)), {"local_window_size": (1000, 1000)}),
}
HIDING = {
    "no batch, causal window, soft cap": (
        shapes(300, 300, batch=()),
        {"is_causal": True, "local_window_size": 100, "logits_soft_cap": 2.0},
    ),
    "window ahead, offset, one length for all": (
        shapes(130, 400),
        {"local_window_size": (None, 5), "query_offset": 150, "key_value_seq_lengths": lengths(260)},
    ),
    # Edges that meet corners of tiles.
    "window of one key before": (shapes(), {"local_window_size": (1, 200)}),
    "window of one key after": (shapes(), {"local_window_size": (200, 1)}),
    "offset below, whole tiles see nothing": (shapes(400, 260), {"is_causal": True, "query_offset": -140}),
    "lengths": (shapes(), {"key_value_seq_lengths": lengths(200, 0), "query_seq_lengths": lengths(100, 256)}),
    "groups, segments, window": (
        shapes(n=4, k=2, h=8),
        {"query_segment_ids": SEGMENTS, "local_window_size": (100, 5), "scale": -0.3},
    ),
    "packed segments, causal, lengths": (
        shapes(),
        {"key_value_segment_ids": PACKED, "is_causal": True, "key_value_seq_lengths": lengths(200, 256)},
    ),
    "two batch axes, shared segments, window, lengths": (
        shapes(s=333, batch=(2, B)),
        {
            "query_segment_ids": SEGMENTS,
            "key_value_segment_ids": np.pad(SEGMENTS, ((0, 0), (0, 77))),
            "local_window_size": 60,
            "query_seq_lengths": lengths(256, 0),
            "key_value_seq_lengths": np.array([[300, 50], [-1, 100]], np.int32),
        },
    ),
    "mask objects": (shapes(), {"mask": masks.CausalMask(3) & masks.LocalMask(100, -2)}),
    "mask objects, everything masked": (shapes(), {"mask": masks.CausalMask(4 - T) & masks.LocalMask(T - 5, None)}),
    "offsets of each sequence, lengths": (
        shapes(),
        {
            "query_offset": lengths(-20, 30),
            "key_value_offset": lengths(5),
            "query_seq_lengths": lengths(100, 256),
            "key_value_seq_lengths": lengths(250, 300),
        },
    ),
}


CORE = ("no batch, causal window, soft cap", "window ahead, offset, one length for all", "lengths")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", with_core([*PLAIN, *HIDING], *CORE))
def test_output_and_gradients(name):
    """Then, where something is hidden, with NaN in a key and inf in a value: where that is seen, the row is NaN.

    Queries that see nothing may hold NaN too.
    """
    sizes, arguments = (PLAIN | HIDING)[name]
    ours, dense = gradients("splash", arguments), functools.partial(dense_gradients, **arguments)
    if "mask" in arguments:
        dense = gradients("xla", arguments)
    arrays = query, key, value = normal(*sizes)
    expected = dense(arrays)
    assert all(np.isfinite(x).all() for x in expected)
    close(ours(arrays), expected)
    if name in HIDING:
        key[..., 150, 0, :], value[..., 20, -1, 0] = np.nan, np.inf
        expected = dense(arrays)
        query[(expected[0] == 0).all(-1)] = np.nan
        close(ours(arrays), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"is_causal": True, "logits_soft_cap": 3.0}, np.tri(T, dtype=bool)),
        ({"query_segment_ids": PACKED[:1]}, PACKED[0][:, None] == PACKED[0][None, :]),
    ],
)
def test_bfloat16_by_the_rule_of_flash_attention(arguments, seen):
    def naive(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, 2, 2)) * arguments.get("scale", H**-0.5)
        if cap := arguments.get("logits_soft_cap"):
            scores = cap * jnp.tanh(scores / cap)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(value, 2, 2))

    ours, exact = (functools.partial(dot_product_attention, implementation=x, **arguments) for x in ("splash", "xla"))
    by_the_rule_of_flash_attention(ours, naive, exact, normal(*shapes(), dtype=jnp.bfloat16))


SINKS = np.float32([0.5, 3.0]), np.float32([[-np.inf, 1.0], [80.0, -2.0]])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("sinks", "arguments"),
    [
        (SINKS[0], {}),
        (SINKS[0], HIDING["lengths"][1]),
        pytest.param(SINKS[1], {"is_causal": True, "logits_soft_cap": 2.0}, marks=pytest.mark.core),
    ],
)
def test_sinks(sinks, arguments):
    """One for each head, or each head of each sequence, with gradients; rows that see nothing among them."""

    @functools.partial(jax.jit, static_argnums=0)
    def answers(implementation, *arrays):
        def attend(query, key, value, sinks):
            return dot_product_attention(query, key, value, sinks=sinks, implementation=implementation, **arguments)

        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(jnp.where(jnp.isfinite(output), jnp.cos(output), jnp.zeros_like(output)))

    query, key, value = normal(*shapes())
    expected = answers("xla", query, key, value, sinks)
    assert np.abs(expected[-1]).max() > 1e-4
    close(answers("splash", query, key, value, sinks), expected)
    if arguments:
        key[0, 250], value[1, 130, 0, 3] = np.nan, np.inf
        close(answers("splash", query, key, value, sinks), answers("xla", query, key, value, sinks))


@pytest.mark.usefixtures("interpreted")
def test_infinity_that_is_seen_reaches_the_output():
    """Also where all products with it are minus infinity, which kernels take for masked scores."""
    ours, dense = (gradients(implementation, {"is_causal": True}) for implementation in ("splash", "xla"))
    for which, infinity in itertools.product(range(3), (np.inf, -np.inf)):
        arrays = [np.abs(x) for x in normal(*shapes())]
        arrays[which][0, 200, :, 5] = infinity
        output = ours(arrays)[0]
        np.testing.assert_array_equal(np.isnan(output), np.isnan(dense(arrays)[0]))
        assert np.isnan(output[0, 200]).all()


@pytest.mark.usefixtures("interpreted")
def test_vmap_over_some_of_the_inputs():
    query, key, value = normal(*shapes(t=130))
    queries = jnp.stack([query, -query])

    def mapped(implementation):
        def attend(query, length):
            lengths = {"key_value_seq_lengths": length}
            return dot_product_attention(query, key, value, is_causal=True, implementation=implementation, **lengths)

        return jax.vmap(attend)(queries, jnp.array([[200, 0], [7, 256]]))

    np.testing.assert_allclose(mapped("splash"), mapped("xla"), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_gradients_under_vmap():
    """Of a batch of calls, one of which holds NaN where it is not seen: that one decides for all."""
    query, key, value = normal(*shapes(batch=(3, B)))
    key[1, 0, 250:], value[2, 1, 251] = np.nan, np.inf
    lengths = np.array([[T, 250], [250, T], [T, 100]], np.int32)

    def mapped(implementation):
        def loss(query, key, value, length):
            attend = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
            return jnp.sum(jnp.cos(attend(query, key, value, key_value_seq_lengths=length)))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(query, key, value, lengths)

    close(mapped("splash"), mapped("xla"))


CHOSEN = {
    "plain": (abstract(t=1024, s=1024), {}),
    "float32": (abstract(dtype=jnp.float32), {"is_causal": True}),
    "causal": (abstract(), {"is_causal": True}),
    "no batch": (abstract(batch=(), h=64), {"is_causal": True}),
    "two batch axes": (abstract(batch=(2, 3)), {"scale": 2}),
    "groups": (abstract(n=6, k=2, h=128), {}),
    "head size": (abstract(h=33, hv=20), {}),
    "odd lengths": (abstract(301, 517), {"local_window_size": (100, 5)}),
    "offset": (abstract(300, 512), {"is_causal": True, "query_offset": 212}),
    "lengths": (abstract(), {"query_seq_lengths": lengths(100, 256), "key_value_seq_lengths": lengths(9, 0)}),
    "segments": (abstract(), {"query_segment_ids": SEGMENTS, "key_value_seq_lengths": lengths(9, 0)}),
    "soft cap": (abstract(), {"logits_soft_cap": 30.0}),
    "mask objects": (abstract(), {"mask": masks.CausalMask() & masks.SegmentMask(PACKED, PACKED)}),
    "precision": (abstract(), {"precision": "default"}),
    "sinks": (abstract(), {"sinks": jnp.zeros(N), "is_causal": True}),
    "offsets as data, lengths": (
        abstract(),
        {"query_offset": lengths(7, 9), "query_seq_lengths": lengths(100, 256), "query_segment_ids": SEGMENTS},
    ),
}
REFUSED = {
    "float16": (abstract(dtype=jnp.float16), {}, "float32 and bfloat16, but the inputs are float16"),
    "head size": (abstract(h=264), {}, "head sizes must be at most 256"),
    "value head size": (abstract(hv=264), {}, "head sizes must be at most 256"),
    "bias": (abstract(), {"bias": jnp.zeros((1, T, T))}, "bias"),
    "array mask": (abstract(), {"mask": np.ones((T, T), bool)}, "ArrayMask"),
    "function": (abstract(), {"mask": masks.FunctionMask(lambda b, h, q, k: q > k)}, "not a causal, window, length or"),
    "either": (abstract(), {"mask": masks.CausalMask() | masks.LocalMask(3, 3)}, "Or"),
    "not": (abstract(), {"mask": ~masks.CausalMask()}, "Not"),
    "two segmentations": (
        abstract(),
        {"query_segment_ids": PACKED, "mask": masks.SegmentMask(SEGMENTS, SEGMENTS)},
        "SegmentMask",
    ),
    "dropout": (abstract(), {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate"),
    "score_mod": (abstract(), {"score_mod": lambda score, b, h, q, k: score + 1}, "score_mod"),
    "residual": (abstract(), {"return_residual": True}, "return_residual"),
    "largest score": (abstract(), {"return_max_score": True}, "return_max_score requires the running maximum"),
    "offset as data": (abstract(), {"is_causal": True, "query_offset": lengths(7, 9)}, "query_offset"),
    "scale as data": (abstract(), {"scale": jnp.float32(0.3)}, "scale"),
    "precision": (abstract(), {"precision": "highest"}, "must be the default, but is highest"),
    "half a million keys": (abstract(2**19, 2**19), {}, "its tile table does not fit"),
    "no keys": (abstract(s=0), {}, "an axis has length 0"),
    "no value features": (abstract(hv=0), {}, "an axis has length 0"),
}


@pytest.mark.parametrize("name", with_core(CHOSEN, "groups", "segments"))
def test_a_tpu_gets_the_kernels(name):
    arrays, arguments = CHOSEN[name]
    text = lowered(arrays, **arguments)
    names = kernels_in(text, r'kernel_name = "(\w+)"')
    assert len(names) == 3
    for phase in ("fwd", "dq", "dkv"):
        assert any(f"splash_mha_{phase}" in name for name in names)


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_a_tpu_gets_the_portable_one_where_the_kernels_would_answer_something_else(name):
    arrays, arguments, reason = REFUSED[name]
    attend = functools.partial(dot_product_attention, **arguments)
    assert "pallas_call" not in str(jax.make_jaxpr(attend)(*arrays))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(attend, implementation="splash"), *arrays)
    assert all(map(REMEDY.search, explained(arrays, platform="tpu", **arguments).refusals["splash"]))


@pytest.mark.core
def test_every_reason_is_named(monkeypatch):
    compiled_for(monkeypatch, "cpu")
    with pytest.raises(NotImplementedError) as error:
        lowered(abstract(dtype=jnp.float16), implementation="splash", return_residual=True, bias=jnp.zeros((T, T)))
    for reason in (
        "it runs only on TPUs, but this call runs on cpu",
        "float16",
        "bias",
        "return_residual",
        "Pass None",
    ):
        assert reason in str(error.value)


def test_a_prompt_that_meets_an_empty_cache_reaches_the_kernel():
    """Under jit, where whether it is empty is found out when the program runs."""
    query, key, value = abstract()
    cache = jax.eval_shape(lambda: KVCache.create(B, 600, key.shape[2], key.shape[3], jnp.bfloat16))
    prompt = jax.jit(lambda *arrays: cached_attention(*arrays)[0])
    assert "tpu_custom_call" in export.export(prompt, platforms=["tpu"])(query, key, value, cache).mlir_module()


BOTH = pytest.mark.parametrize("implementation", ["splash", "pallas"])
MESH = AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.core
@pytest.mark.parametrize(
    ("implementation", "setting", "reason"),
    [
        *((x, lambda: jax.enable_x64(True), "jax_enable_x64") for x in ("splash", "pallas")),
        ("splash", lambda: jax.default_matmul_precision("high"), "default matmul precision, not high"),
        ("pallas", lambda: jax.default_matmul_precision("tensorfloat32"), "not tensorfloat32"),
        *(
            (x, lambda: use_abstract_mesh(MESH), "on multiple devices, it needs to know how its arr")
            for x in ("splash", "pallas")
        ),
    ],
)
def test_settings_that_the_kernels_do_not_know(implementation, setting, reason):
    assert_one_reason(abstract(), implementation, reason, setting)
    with jax.set_mesh(mesh()):  # of one device, which splits nothing
        assert explained(abstract()).refusals[implementation] == []


@pytest.mark.core
@BOTH
def test_float64_is_refused(implementation):
    with jax.enable_x64(True):
        reasons = explained(abstract(dtype=jnp.float64)).refusals[implementation]
    assert any("the inputs are float64" in reason for reason in reasons)


def mesh():
    return jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@BOTH
def test_inside_shard_map(implementation):
    """The kernels do not say how their results vary over the mesh, which `check_vma` wants to know."""

    def lowered_with(check_vma, name):
        attend = functools.partial(dot_product_attention, is_causal=True, implementation=name)
        specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x"), "check_vma": check_vma}
        return lowered(abstract(k=2), jax.shard_map(attend, mesh=mesh(), **specs))

    kernels = lowered_with(False, implementation).count("tpu_custom_call")
    assert kernels == 3 if implementation == "pallas" else kernels  # "splash" has more in the branch for NaN
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        lowered_with(True, implementation)
    assert "tpu_custom_call" in lowered_with(False, None)
    assert "tpu_custom_call" not in lowered_with(True, None)


@pytest.mark.core
@BOTH
@pytest.mark.parametrize("arguments", [{"is_causal": True}, {"local_window_size": 40, "query_offset": -3}])
def test_what_a_policy_saves_by_name_does_not_run_the_kernel_again(implementation, arguments):
    """As many kernels in the program as without `jax.checkpoint`; with it and no names, one more for each block."""
    x = jax.ShapeDtypeStruct((1, T, N, 128), jnp.float32)
    saved, without, anew = kernels_of_two_blocks("pallas_call", x, "tpu", implementation=implementation, **arguments)
    in_forward = 2 if implementation == "splash" else 1  # with masks also the branch for NaN has one
    assert saved == without == anew - 2 * in_forward
