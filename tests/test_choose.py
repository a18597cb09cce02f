"""Who computes a call: what is chosen, what is refused and why, read out of the lowered text for devices not here."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import REMEDY, compiled_for, dense_gradients, dense_kernel, forget_programs, kernels_in
from jax import lax
from kernels import abstract, as_if_cudnn_were_here, explained, kernels_of_two_blocks, lowered
from marks import with_core, with_core_tuples

from flax_mha import dot_product_attention, explain_implementation, masks
from flax_mha._src.engines.kernels import cudnn
from flax_mha.cached_attention import cached_attention
from flax_mha.kv_cache import KVCache

B, T, N, K, H = 2, 256, 4, 2, 64
CUDNN_CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{x}") for x in ("", "Backward")]
IDS = jnp.zeros((B, T), jnp.int32)


@pytest.fixture
def hopper(monkeypatch):
    """As on a GPU of this kind, whose plans all compile."""
    compiled_for(monkeypatch, "gpu")
    as_if_cudnn_were_here(monkeypatch)
    forget_programs()
    yield
    forget_programs()


inputs = functools.partial(abstract, n=N, k=K, h=H)
lowered = functools.partial(lowered, platform="cuda", gradient=False)


def bias_of(*shape, masked=False):
    """Where `masked`, with a row of -inf, another with one number that is visible, and a key of -inf."""
    bias = np.random.default_rng(4).standard_normal(shape, np.float32)
    if masked:
        bias[..., 7, :], bias[..., 9, 1:], bias[..., 30] = -np.inf, -np.inf, -np.inf
    return jnp.asarray(bias, jnp.bfloat16)


FUSED = {
    "plain": (inputs(), {}),
    "float16": (inputs(dtype=jnp.float16), {}),
    "causal": (inputs(), {"is_causal": True}),
    "no batch": (inputs(batch=()), {"is_causal": True}),
    "two batch axes": (inputs(batch=(2, 3)), {}),
    "lengths": (inputs(), {"key_value_seq_lengths": jnp.array([200, 0]), "query_seq_lengths": jnp.array([100, 256])}),
    "causal, lengths": (inputs(), {"is_causal": True, "key_value_seq_lengths": jnp.array([200, 0])}),
    "causal, more keys": (inputs(s=384), {"is_causal": True}),
    "causal, more queries": (inputs(301, 200), {"is_causal": True}),
    "causal, more queries, lengths": (
        inputs(301, 200),
        {"is_causal": True, "key_value_seq_lengths": jnp.array([200, 30]), "query_seq_lengths": jnp.array([100, 300])},
    ),
    "causal window": (inputs(), {"is_causal": True, "local_window_size": 100}),
    "causal window, more queries, some see nothing": (inputs(301, 170), {"is_causal": True, "local_window_size": 60}),
    "window backwards": (inputs(), {"local_window_size": (100, 0)}),
    "odd lengths": (inputs(301, 517), {}),
    "mask objects": (inputs(), {"mask": masks.CausalMask() & masks.LocalMask(100, 5)}),
    "window wider than the keys": (inputs(), {"local_window_size": (1000, 1000)}),
    "offsets of each sequence, lengths": (
        inputs(),
        {
            "query_offset": jnp.array([-20, 30]),
            "key_value_offset": jnp.array([5]),
            "query_seq_lengths": jnp.array([100, 256]),
            "key_value_seq_lengths": jnp.array([250, 300]),
        },
    ),
    "offsets, causal, lengths": (
        inputs(),
        {
            "query_offset": 30,
            "key_value_offset": 30,
            "is_causal": True,
            "query_seq_lengths": jnp.array([130, 286]),
            "key_value_seq_lengths": jnp.array([280, 300]),
        },
    ),
    "head size 256": (inputs(h=256), {"scale": 0.5}),
    "as many heads": (inputs(k=N), {"is_causal": True}),
    "bias": (inputs(), {"bias": bias_of(B, N, T, T)}),
    "bias of all, causal": (inputs(), {"bias": bias_of(1, 1, T, T, masked=True), "is_causal": True}),
    "bias that masks": (inputs(), {"bias": bias_of(B, 1, T, T, masked=True)}),
    "bias, two batch axes, fewer keys": (
        inputs(301, 170, batch=(1, 2)),
        {"bias": bias_of(N, 301, 170, masked=True), "is_causal": True},
    ),
    "bias, lengths": (inputs(), {"bias": bias_of(N, T, T, masked=True), "key_value_seq_lengths": jnp.array([200, 0])}),
}
NOT_FUSED = {
    "float32": (inputs(dtype=jnp.float32), {}, "float16 and bfloat16"),
    "head size": (inputs(h=60), {}, "multiple of 8"),
    "large head size": (inputs(h=264), {}, "multiple of 8"),
    "value head size": (inputs(hv=32), {}, "value head size"),
    "bias, float32": (inputs(), {"bias": jnp.zeros((1, T, T))}, "bias and query must be bfloat16"),
    "bias of keys": (inputs(), {"bias": bias_of(N, 1, T)}, r"the last two axes of bias must be \(256, 256\)"),
    "bias of some batch axes": (inputs(batch=(2, 3)), {"bias": bias_of(3, 1, T, T)}, "batch axes of bias"),
    "array mask": (inputs(), {"mask": jnp.ones((B, 1, 1, T), bool)}, "ArrayMask"),
    "segments": (inputs(), {"query_segment_ids": IDS}, "segment ids"),
    "dropout": (inputs(), {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate"),
    "soft cap": (inputs(), {"logits_soft_cap": 30.0}, "logits_soft_cap"),
    "sinks": (inputs(), {"sinks": jnp.zeros(N)}, "sinks"),
    "score_mod": (inputs(), {"score_mod": lambda score, b, h, q, k: score + 1}, "score_mod"),
    "residual": (inputs(), {"return_residual": True}, "return_residual"),
    "largest score": (inputs(), {"return_max_score": True}, "return_max_score requires the running maximum"),
    "window ahead": (inputs(), {"local_window_size": (100, 5)}, "window must end"),
    "window ahead only": (inputs(), {"local_window_size": (None, 5)}, "window must end"),
    "offset": (inputs(), {"is_causal": True, "query_offset": 7}, "window must end"),
    "offset as data": (inputs(), {"is_causal": True, "query_offset": jnp.array([7, 9])}, "query_offset"),
    "scale as data": (inputs(), {"scale": jnp.float32(0.3)}, "scale"),
    "precision": (inputs(), {"precision": "highest"}, "precision must be the default"),
    "function": (inputs(), {"mask": masks.FunctionMask(lambda b, h, q, k: q > k)}, "not a causal, window, length or"),
    "either": (inputs(), {"mask": masks.CausalMask() | masks.LocalMask(3, 3)}, "Or"),
}


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", FUSED)
def test_a_gpu_chooses_the_fused_kernel(name):
    arrays, arguments = FUSED[name]
    assert explained(arrays, **arguments).chosen == "cudnn"


LOWERED = ("plain", "causal, more queries, lengths", "causal window", "lengths", "mask objects", "head size 256")
LOWERED += ("offsets of each sequence, lengths", "two batch axes", "bias", "bias, two batch axes, fewer keys")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", with_core(LOWERED, "plain", "causal window", "lengths"))
def test_a_gpu_gets_the_fused_kernel(name):
    arrays, arguments = FUSED[name]
    text = lowered(arrays, gradient=True, **arguments)
    kind = "ScaleBias" if "bias" in arguments else ""  # no mask as an array
    assert kernels_in(text, r"@__cudnn\$fmha(\w+)\(") == [f"{kind}Softmax", f"{kind}SoftmaxBackward"]
    assert kind or "ScaleBias" not in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", NOT_FUSED)
def test_a_gpu_gets_the_portable_one_where_the_kernel_would_answer_something_else(name):
    arrays, arguments, reason = NOT_FUSED[name]
    assert "__cudnn" not in lowered(arrays, **arguments)
    with pytest.raises(NotImplementedError, match=reason):
        lowered(arrays, implementation="cudnn", **arguments)


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_every_reason_is_named():
    with pytest.raises(NotImplementedError) as error:
        lowered(inputs(dtype=jnp.float32, h=60), implementation="cudnn", logits_soft_cap=1.0, local_window_size=3)
    for reason in ("float16", "multiple of 8", "logits_soft_cap", "window", "Pass None"):
        assert reason in str(error.value)


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_one_query_and_short_sequences():
    assert "__cudnn" not in lowered(inputs(t=1))
    assert "__cudnn" in lowered(inputs(t=2), implementation="cudnn")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["plain", "bias of all, causal"])
def test_vmap_over_some_of_the_inputs(name):
    (query, key, value), arguments = FUSED[name]
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)

    def loss(*arrays):
        return dot_product_attention(*arrays, implementation="cudnn", **arguments).astype(jnp.float32).sum()

    attend = jax.vmap(jax.grad(loss), (0, None, None))
    text = jax.jit(attend).trace(queries, key, value).lower(lowering_platforms=("cuda",)).as_text()
    assert "SoftmaxBackward" in text


@pytest.mark.usefixtures("hopper")
def test_a_plan_that_fails_is_a_reason(monkeypatch):
    monkeypatch.setattr(cudnn, "failure", lambda kernel: ["cuDNN has no execution plan for it: out of luck"])
    assert "__cudnn" not in lowered(inputs())
    with pytest.raises(NotImplementedError, match="out of luck"):
        lowered(inputs(), implementation="cudnn")


@pytest.mark.core
def test_what_fails_to_compile_has_no_plan():
    kernel = cudnn.Kernel((1, 128, 1, 64), (1, 128, 1, 64), jnp.dtype("bfloat16"), 1.0, True, None, False)
    [reason] = cudnn.failure(kernel)  # there is no cuDNN on a CPU, and on a GPU this has no reason
    assert reason.startswith("cuDNN has no execution plan for this call (")
    assert REMEDY.search(reason)


# More queries than keys, or lengths, are among the others together with what these have.
MET_BY_OTHERS = ("causal", "causal window", "causal, lengths", "float16", "head size 256")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "devices"),
    with_core_tuples(
        [(name, 1) for name in FUSED if name not in MET_BY_OTHERS and "bias" not in name]
        + [(name, 2) for name in ("causal, more queries, lengths", "offsets of each sequence, lengths")],
        *(
            (name, 1)
            for name in ("lengths", "causal, more queries, lengths", "causal window, more queries, some see nothing")
        ),
    ),
)
def test_around_the_kernel_our_meanings_are_kept(name, devices, monkeypatch):
    """With a dense computation in the kernel's place: rows that see nothing, NaN in hidden and in visible keys.

    Of several devices no one knows what all arrays hold.
    """
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(cudnn.Kernel, "__call__", dense_kernel)
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32,))
    shapes, arguments = FUSED[name]
    rng = np.random.default_rng(0)
    finite, spoilt = ([rng.standard_normal(x.shape).astype(np.float32) for x in shapes] for _ in range(2))
    spoilt[1][..., 150, 0, :], spoilt[2][..., 20, 1, :] = np.nan, np.inf
    masked = arguments and name != "window wider than the keys"  # else NaN reaches what the kernel lets it reach

    def run(implementation):
        def gradients(arrays):
            attend = functools.partial(dot_product_attention, implementation=implementation, **arguments)
            output, pull = jax.vjp(attend, *arrays)
            return output, *pull(jnp.where(jnp.isfinite(output), jnp.cos(output), 0))

        return jax.jit(gradients)

    ours, dense = run("cudnn"), run("xla") if "mask" in arguments else functools.partial(dense_gradients, **arguments)
    for arrays in (finite, spoilt) if masked else (finite,):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            answers = ours(arrays), dense(arrays)
        for answer, expected in zip(*answers, strict=True):
            np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-4)


def kernel_with_a_gradient(kernel, query, key, value, query_lengths, key_lengths, residual=False, bias=None):
    """`dense_kernel` with what cuDNN's has: a gradient of first order, in reverse mode alone."""

    def run(arrays):
        return dense_kernel(kernel, *arrays[:3], query_lengths, key_lengths, residual, *arrays[3:])

    def forward(arrays):
        results, pull = jax.vjp(run, arrays)
        return results, jax.tree.map(lax.optimization_barrier, pull)

    run_once = jax.custom_vjp(run)
    run_once.defvjp(forward, lambda pull, cotangents: pull(cotangents))
    return run_once([query, key, value] if bias is None else [query, key, value, bias])


@pytest.mark.usefixtures("hopper")
def test_derivatives_of_every_order_around_a_kernel(monkeypatch):
    """Also under vmap; of the rule's parts each is used: tangent, gradient, and the tangents of both."""
    monkeypatch.setattr(cudnn.Kernel, "__call__", kernel_with_a_gradient)
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32,))
    monkeypatch.setattr(cudnn, "DTYPES_OF_BIAS", (jnp.float32,))
    rng = np.random.default_rng(0)
    query, key, value, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (*[(2, 1, 64, 2, 16)] * 3, (1, 2, 64, 64))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation, arrays):
        def loss(arrays):
            attend = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
            return jnp.sin(jax.vmap(attend, (0, 0, 0, None))(*arrays)).sum()

        tangents = jax.tree.map(jnp.cos, arrays)
        gradient = jax.grad(loss)
        products = jax.jvp(gradient, (arrays,), (tangents,))[1]
        across = jax.grad(lambda x: jax.jvp(loss, (x,), (tangents,))[1])(arrays)
        squares = jax.grad(lambda x: sum((y**2).sum() for y in gradient(x)))(arrays)
        return jax.jvp(loss, (arrays,), (tangents,)), gradient(arrays), products, across, squares

    arrays = (query, key, value, bias)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, *answers = (jax.tree.leaves(derivatives(name, arrays)) for name in ("xla", None, "cudnn"))
    for got in answers:
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True, "key_value_seq_lengths": np.int32([300])}])
def test_what_a_policy_saves_by_name_does_not_run_the_kernel_again(implementation, arguments):
    """As many kernels as without `jax.checkpoint`; without names each block runs one more, as cuDNN or on a CPU."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    saved, without, anew = kernels_of_two_blocks(
        "dot_product_attention_fwd_wrapper", x, implementation=implementation, **arguments
    )
    in_forward = 2 if arguments else 1  # with masks also the branch for NaN has one
    assert 0 < saved == without == anew - 2 * in_forward


# NaN in a key and its value that the bias masks for all queries, and in the bias itself: row 60 stands before key 100.
SPOILT = {
    "masked key and value": ((1, (..., 30, 0, slice(None)), np.nan), (2, (..., 30, 0, slice(None)), np.nan)),
    "masked bias": ((3, (..., 60, 100), np.nan),),
    "visible bias": ((3, (..., 200, 100), np.nan),),
    "infinite bias": ((3, (..., 200, 100), np.inf),),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", with_core([x for x in FUSED if "bias" in x and x != "bias"], "bias of all, causal"))
def test_around_the_kernel_a_bias_keeps_our_meanings(name, monkeypatch):
    """With a dense computation in the kernel's place, under vmap: a bias of -inf masks, NaN is seen where visible."""
    monkeypatch.setattr(cudnn.Kernel, "__call__", dense_kernel)
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32,))
    monkeypatch.setattr(cudnn, "DTYPES_OF_BIAS", (jnp.float32,))
    shapes, arguments = FUSED[name]
    others = {name: x for name, x in arguments.items() if name != "bias"}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(x.shape).astype(np.float32) for x in shapes]
    arrays.append(np.array(arguments["bias"], np.float32))

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *arrays):
        def attend(*arrays):
            return dot_product_attention(*arrays, implementation=implementation, **others)

        output, pull = jax.vjp(jax.vmap(attend, (0, 0, 0, None)), *arrays)
        return output, pull(jnp.where(jnp.isfinite(output), jnp.cos(output), 0))

    for spoilt in ("finite", *(SPOILT if name == "bias of all, causal" else ())):
        given = [x.copy() for x in arrays]
        for which, place, filling in SPOILT.get(spoilt, ()):
            given[which][place] = filling
        pairs = [*(np.stack([x, x[::-1]]) for x in given[:3]), given[3]]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            (got, got_grads), (want, want_grads) = run("cudnn", *pairs), run("xla", *pairs)
        assert np.isnan(got).any() == (spoilt in ("visible bias", "infinite bias")), spoilt
        for answer, expected in zip((got, *got_grads), (want, *want_grads), strict=True):
            np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-4, err_msg=spoilt)


def test_a_large_bias_is_not_copied(hopper, monkeypatch):
    arrays, arguments = FUSED["bias"]
    monkeypatch.setattr(cudnn, "MAX_SCORES_OF_BIAS", B * N * T * T - 1)
    with pytest.raises(NotImplementedError, match="copies bias for every batch entry"):
        lowered(arrays, implementation="cudnn", **arguments)


def half(dtype=jnp.bfloat16):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(x.shape), dtype) for x in inputs()]


def near(got, expected):
    """Results below 2 in bfloat16, each rounded once."""
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0, atol=2**-7)


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_host_a_program_for_a_cpu_is_right():
    """Arrays that are on a CPU, and jit(backend="cpu"), of which nothing is known while tracing."""
    arrays = half()
    expected = dot_product_attention(*(x.astype(jnp.float32) for x in arrays), is_causal=True, implementation="xla")
    explanation = explain_implementation(*arrays, is_causal=True)
    assert (explanation.chosen, explanation.on_cpu) == ("xla", None)
    assert "this call runs on cpu" in explanation.refusals["cudnn"][0]
    near(dot_product_attention(*arrays, is_causal=True), expected)

    explained = []

    def attend(*arrays):
        explained.append(explain_implementation(*arrays, is_causal=True))
        return dot_product_attention(*arrays, is_causal=True)

    near(jax.jit(attend)(*arrays), expected)
    assert (explained[0].chosen, explained[0].on_cpu) == ("cudnn", "xla")
    assert "chosen if compiled for a CPU" in str(explained[0])
    gradient = jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum().astype(jnp.float32)))(*arrays)
    assert jnp.isfinite(gradient).all()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_exported_for_other_platforms(platforms):
    """With lengths that are data, gradients and a batch axis of vmap."""

    def with_gradients(lengths, *arrays):
        attend = functools.partial(dot_product_attention, is_causal=True, key_value_seq_lengths=lengths)
        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(output)

    program = jax.jit(jax.vmap(with_gradients, (0, None, None, None)))
    lengths = jnp.array([[200, 3], [7, 256]], jnp.int32)
    exported = jax.export.export(program, platforms=platforms, disabled_checks=CUDNN_CALLS)(lengths, *inputs())
    for name in CUDNN_CALLS:
        assert (name.is_custom_call() in exported.mlir_module()) == ("cuda" in platforms)
    if "cpu" in platforms:
        arrays = half()
        expected = program(lengths, *(x.astype(jnp.float32) for x in arrays))
        for got, want in zip(exported.call(lengths, *arrays), expected, strict=True):
            scale = jnp.abs(want).max()
            near(got.astype(jnp.float32) / scale, want / scale)


@pytest.mark.core
def test_on_this_machine():
    x = jnp.ones((1, 1000, 2, 64), jnp.bfloat16)
    explanation = explain_implementation(x, x, x, is_causal=True)
    assert list(explanation.refusals) == ["xla", "blockwise", "cudnn", "splash", "pallas"]
    assert explanation.refusals["xla"] == explanation.refusals["blockwise"] == []
    assert not explanation.refusals[explanation.chosen]
    assert explanation.chosen in str(explanation)
    with pytest.raises(
        ValueError, match='implementation must be "xla", "blockwise", "cudnn", "splash", "pallas" or None'
    ):
        dot_product_attention(x, x, x, implementation="flash")


@pytest.mark.core
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what a CPU is told")
def test_on_a_cpu():
    x = jnp.ones((1, 8, 2, 64))
    assert explain_implementation(x, x, x).chosen == "xla"
    for name, words in (
        ("cudnn", "runs only on NVIDIA GPUs, but this call runs on cpu"),
        ("splash", "runs only on TPUs"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            dot_product_attention(x, x, x, implementation=name)


@pytest.mark.parametrize(
    ("lengths", "window"), [(None, None), (jnp.array([200, 3]), (99, 0))], ids=["all tokens", "a padded ring"]
)
def test_a_prompt_that_meets_an_empty_cache_reaches_the_kernel(hopper, lengths, window):
    """Under jit, where whether it is empty is found out when the program runs."""
    query, key, value = inputs()
    cache = jax.eval_shape(
        lambda: KVCache.create(B, 512, K, H, jnp.bfloat16, window=window and window[0], per_row=True)
    )

    def prompt(query, key, value, cache):
        return cached_attention(query, key, value, cache, lengths=lengths, local_window_size=window)

    text = jax.jit(prompt).trace(query, key, value, cache).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    step = [jax.ShapeDtypeStruct((B, 1, *x.shape[2:]), x.dtype) for x in (query, key, value)]
    lengths = None
    assert "__cudnn" not in jax.jit(prompt).trace(*step, cache).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.core
@pytest.mark.parametrize(
    ("platform", "dtype", "arguments", "operands"),
    [
        ("gpu", "bfloat16", {"implementation": "xla"}, "bf16"),
        ("tpu", "bfloat16", {"implementation": "blockwise"}, "bf16"),
        ("tpu", "float16", {"implementation": "blockwise"}, "f16"),
        ("gpu", "float16", {"implementation": "xla"}, "f32"),
        ("gpu", "float32", {"implementation": "blockwise"}, "f32"),
        ("gpu", "bfloat16", {"implementation": "blockwise", "precision": "highest"}, "f32"),
    ],
)
def test_where_products_have_16_bits(platform, dtype, arguments, operands, monkeypatch, request):
    """Unless the precision asked for, here or as JAX's default, is that of float32."""
    compiled_for(monkeypatch, platform)
    request.addfinalizer(forget_programs)
    target = "cuda" if platform == "gpu" else platform

    def products():
        forget_programs()
        text = lowered(inputs(dtype=jnp.dtype(dtype)), platform=target, **arguments)
        found = re.findall(r"stablehlo.dot_general.*: \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\)", text)
        return {x for pair in found for x in pair}

    assert products() == {operands}
    with jax.default_matmul_precision("float32"):
        assert products() == {"f32"}


ELSEWHERE = {
    "cuda": ("cuda", inputs(), {"is_causal": True}, "cudnn"),
    "gpu": ("gpu", inputs(h=256), {"is_causal": True}, "cudnn"),  # the head size of an H100
    "cuda, float32": ("cuda", inputs(1024, 1024, dtype=jnp.float32), {}, "xla"),  # the budget of GPUs
    "cuda, named": ("cuda", inputs(), {"implementation": "cudnn"}, "cudnn"),
    "tpu": ("tpu", inputs(), {"query_segment_ids": IDS}, "splash"),
    "cpu": ("cpu", inputs(1024, 1024), {}, "blockwise"),
}


@pytest.mark.core
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_another_platform_would_choose(name):
    """Without its device: nothing is compiled, and the explanation says that cuDNN was not asked."""
    platform, arrays, arguments, chosen = ELSEWHERE[name]
    concrete = [jnp.zeros(x.shape, x.dtype) for x in arrays]
    cudnn.failure.cache_clear()
    traced = explained(arrays, platform=platform, **arguments)
    for explanation in (traced, explain_implementation(*concrete, platform=platform, **arguments)):
        assert explanation.chosen == chosen
        assert explanation.on_cpu is None
        assert ("cuDNN did not run" in str(explanation)) == (platform in ("cuda", "gpu"))
    assert cudnn.failure.cache_info().misses == 0
    if platform == "cpu" == jax.default_backend():
        assert explain_implementation(*concrete, **arguments) == explanation


@pytest.mark.usefixtures("hopper")
def test_a_platform_that_is_here_is_asked(monkeypatch):
    monkeypatch.setattr(cudnn, "failure", lambda kernel: ["cuDNN has no execution plan for it: out of luck"])
    arrays = half()  # on a CPU of a host with a GPU
    explanation = explain_implementation(*arrays, platform="cuda")
    assert explanation.chosen == "xla"
    assert "out of luck" in explanation.refusals["cudnn"][0]
    assert "did not run" not in str(explanation)
    assert explain_implementation(*arrays, platform="cpu").chosen == "xla"


@pytest.mark.core
def test_only_platforms_that_are_known():
    x = jnp.ones((1, 8, 2, 4))
    for platform in ("rocm", "CUDA", "", 3, ["tpu"]):
        with pytest.raises(ValueError, match='platform must be "cpu", "cuda", "tpu" or None, but got'):
            explain_implementation(x, x, x, platform=platform)


@pytest.mark.core
@pytest.mark.parametrize("name", NOT_FUSED)
def test_every_reason_ends_with_a_remedy(name):
    arrays, arguments, reason = NOT_FUSED[name]
    for platform in ("cpu", "cuda", "tpu"):
        explanation = explained(arrays, platform=platform, **arguments)
        reasons = [x for reasons in explanation.refusals.values() for x in reasons]
        assert re.search(reason, " ".join(explanation.refusals["cudnn"]))
        assert [x for x in reasons if not REMEDY.search(x)] == []
        assert max(map(len, str(explanation).splitlines())) <= 100


@pytest.mark.core
def test_float32_is_told_to_become_bfloat16():
    x = jnp.ones((1, 1024, 2, 64))
    explanation = explain_implementation(x, x, x, platform="cuda")
    assert explanation.refusals["cudnn"] == [
        "it supports only float16 and bfloat16, but the inputs are float32: pass dtype=jnp.bfloat16 to the module, "
        "or cast query, key and value"
    ]


def test_explain_takes_the_arguments_of_the_attention():
    parameters = inspect.signature(dot_product_attention).parameters
    explained = dict(inspect.signature(explain_implementation).parameters)
    assert explained.pop("platform").default is None
    assert list(explained.items()) == list(parameters.items())
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
        explain_implementation(*(jnp.ones((1, 3, 2, 4)),) * 3, is_casual=True)
