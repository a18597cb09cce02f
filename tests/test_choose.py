"""The choice of an implementation, refusals with their reasons, and programs for
devices that this host lacks.
"""

import functools
import inspect
import re

import cases
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import (
    REMEDY,
    close,
    compiled_for,
    dense_gradients,
    forget_programs,
    kernels_in,
    refused,
    with_gradients,
)
from jax import lax
from kernels import call, explained, normal
from marks import with_core, with_core_tuples

from flax_mha import dot_product_attention, explain_implementation, masks
from flax_mha._src.engines.kernels import cudnn
from flax_mha.cache import KVCache, cached_attention

B = 2
T = 256
N = 4
K = 2
H = 64
CUDNN_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{x}")
    for x in ("", "Backward")
]
IDS = jnp.zeros((B, T), jnp.int32)


@pytest.fixture
def hopper(monkeypatch):
    """As on an H200 whose plans all compile."""
    compiled_for(monkeypatch, "gpu")
    kernels.as_if_cudnn_were_here(monkeypatch)
    forget_programs()
    yield
    forget_programs()


inputs = functools.partial(kernels.abstract, n=N, k=K, h=H)
lowered = functools.partial(kernels.lowered, platform="cuda", gradient=False)


def bias_of(*shape, masked=False):
    """If `masked`, with a row of -inf, another with one visible number, and a key of
    -inf.
    """
    bias = np.random.default_rng(4).standard_normal(shape, np.float32)
    if masked:
        bias[..., 7, :], bias[..., 9, 1:], bias[..., 30] = -np.inf, -np.inf, -np.inf
    return jnp.asarray(bias, jnp.bfloat16)


def lengths(of_queries, of_keys):
    return {
        "query_seq_lengths": jnp.array(of_queries),
        "key_value_seq_lengths": jnp.array(of_keys),
    }


KEY_LENGTHS = {"key_value_seq_lengths": jnp.array([200, 0])}
BOTH_LENGTHS = lengths([100, 300], [200, 30])
OFFSETS = {
    "query_offset": jnp.array([-20, 30]),
    "key_value_offset": jnp.array([5]),
} | lengths([100, 256], [250, 300])
SHIFTED = {"query_offset": 30, "key_value_offset": 30} | lengths([130, 286], [280, 300])
MASKED = {"bias": bias_of(N, 301, 170, masked=True), "is_causal": True}
FUSED = {
    "plain": call(inputs()),
    "float16": call(inputs(dtype=jnp.float16)),
    "causal": call(inputs(), is_causal=True),
    "no batch": call(inputs(batch=()), is_causal=True),
    "two batch axes": call(inputs(batch=(2, 3))),
    "lengths": (inputs(), lengths([100, 256], [200, 0])),
    "causal, lengths": call(inputs(), is_causal=True, **KEY_LENGTHS),
    "causal, more keys": call(inputs(s=384), is_causal=True),
    "causal, more queries": call(inputs(301, 200), is_causal=True),
    "causal, more queries, lengths": call(
        inputs(301, 200), is_causal=True, **BOTH_LENGTHS
    ),
    "causal window": call(inputs(), is_causal=True, local_window_size=100),
    "causal window, more queries, some see nothing": call(
        inputs(301, 170), is_causal=True, local_window_size=60
    ),
    "window backwards": call(inputs(), local_window_size=(100, 0)),
    "odd lengths": call(inputs(301, 517)),
    "mask objects": call(inputs(), mask=masks.CausalMask() & masks.LocalMask(100, 5)),
    "window wider than the keys": call(inputs(), local_window_size=(1000, 1000)),
    "offsets of each sequence, lengths": (inputs(), OFFSETS),
    "offsets, causal, lengths": call(inputs(), is_causal=True, **SHIFTED),
    "head size 256": call(inputs(h=256), scale=0.5),
    "as many heads": call(inputs(k=N), is_causal=True),
    "bias": call(inputs(), bias=bias_of(B, N, T, T)),
    "bias of all, causal": call(
        inputs(), bias=bias_of(1, 1, T, T, masked=True), is_causal=True
    ),
    "bias that masks": call(inputs(), bias=bias_of(B, 1, T, T, masked=True)),
    "bias, two batch axes, fewer keys": (inputs(301, 170, batch=(1, 2)), MASKED),
    "bias, lengths": call(inputs(), bias=bias_of(N, T, T, masked=True), **KEY_LENGTHS),
}
NOT_FUSED = {
    "float32": (
        inputs(dtype=jnp.float32),
        {},
        "are float32: pass dtype=jnp.bfloat16 to the module, or cast",
    ),
    "head size": (inputs(h=60), {}, "multiple of 8"),
    "large head size": (inputs(h=264), {}, "multiple of 8"),
    "value head size": (inputs(hv=32), {}, "value head size"),
    "bias, float32": (
        inputs(),
        {"bias": jnp.zeros((1, T, T))},
        "bias and query must be bfloat16",
    ),
    "bias of keys": (
        inputs(),
        {"bias": bias_of(N, 1, T)},
        r"the last two axes of bias must be \(256, 256\)",
    ),
    "bias of some batch axes": (
        inputs(batch=(2, 3)),
        {"bias": bias_of(3, 1, T, T)},
        "batch axes of bias",
    ),
    **{name: (inputs(), *given) for name, given in kernels.REFUSED_BY_BOTH.items()},
    "segments": (inputs(), {"query_segment_ids": IDS}, "segment ids"),
    "soft cap": (inputs(), {"logits_soft_cap": 30.0}, "logits_soft_cap"),
    "sinks": (inputs(), {"sinks": jnp.zeros(N)}, "sinks"),
    "window ahead": (inputs(), {"local_window_size": (100, 5)}, "window must end"),
    "window ahead only": (
        inputs(),
        {"local_window_size": (None, 5)},
        "window must end",
    ),
    "offset": (inputs(), {"is_causal": True, "query_offset": 7}, "window must end"),
}


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", FUSED)
def test_a_gpu_chooses_the_fused_kernel(name):
    arrays, arguments = FUSED[name]
    assert explained(arrays, **arguments).chosen == "cudnn"


LOWERED = (
    "plain",
    "causal, more queries, lengths",
    "causal window",
    "lengths",
    "mask objects",
    "head size 256",
)
LOWERED += (
    "offsets of each sequence, lengths",
    "two batch axes",
    "bias",
    "bias, two batch axes, fewer keys",
)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "name", with_core(LOWERED, "plain", "causal window", "lengths")
)
def test_a_gpu_gets_the_fused_kernel(name):
    arrays, arguments = FUSED[name]
    text = lowered(arrays, gradient=True, **arguments)
    kind = "ScaleBias" if "bias" in arguments else ""  # no mask as an array
    assert kernels_in(text, r"@__cudnn\$fmha(\w+)\(") == [
        f"{kind}Softmax",
        f"{kind}SoftmaxBackward",
    ]
    assert kind or "ScaleBias" not in text


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", NOT_FUSED)
def test_a_gpu_gets_portable_code_if_the_kernel_would_return_something_else(name):
    arrays, arguments, reason = NOT_FUSED[name]
    kernels.assert_refused("cudnn", arrays, arguments, reason)
    for platform in ("cpu", "cuda", "tpu"):
        explanation = explained(arrays, platform=platform, **arguments)
        reasons = [x for reasons in explanation.refusals.values() for x in reasons]
        assert [x for x in reasons if not REMEDY.search(x)] == []
        assert max(map(len, str(explanation).splitlines())) <= 100


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_every_reason_is_named():
    with pytest.raises(NotImplementedError) as error:
        lowered(
            inputs(dtype=jnp.float32, h=60),
            implementation="cudnn",
            logits_soft_cap=1.0,
            local_window_size=3,
        )
    for reason in (
        "float16",
        "multiple of 8",
        "logits_soft_cap",
        "window",
        "Pass None",
    ):
        assert reason in str(error.value)
    assert "__cudnn" not in lowered(inputs(t=1))  # one query needs no kernel


@pytest.mark.usefixtures("hopper")
def test_a_plan_that_fails_is_a_reason(monkeypatch):
    """Also for arrays on a CPU, if the given platform is available."""
    monkeypatch.setattr(
        cudnn,
        "failure",
        lambda kernel: ["cuDNN has no execution plan for it: out of luck"],
    )
    assert "__cudnn" not in lowered(inputs())
    refused(
        "out of luck",
        lowered,
        inputs(),
        implementation="cudnn",
        error=NotImplementedError,
    )
    explanation = explain_implementation(*half(), platform="cuda")
    assert (
        explanation.chosen
        == explain_implementation(*half(), platform="cpu").chosen
        == "xla"
    )
    assert "out of luck" in explanation.refusals["cudnn"][0]
    assert "did not run" not in str(explanation)


@pytest.mark.core
def test_a_kernel_that_does_not_compile_has_no_plan():
    # There is no cuDNN on a CPU, and on a GPU none for float32.
    kernel = cudnn.Kernel(
        (1, 128, 1, 64), (1, 128, 1, 64), jnp.dtype("float32"), 1.0, True, None, False
    )
    [reason] = cudnn.failure(kernel)
    assert reason.startswith("cuDNN has no execution plan for this call (")
    assert REMEDY.search(reason)


# The others have these arguments together with lengths, or with more queries than keys.
COVERED_BY_OTHERS = (
    "causal",
    "causal window",
    "causal, lengths",
    "float16",
    "head size 256",
    "bias",
)
# Numbers in a key and a value; in a key and value that the bias masks for all queries;
# in the bias itself, whose row 60 comes before key 100.
FINITE = {"finite": ()}
SPOILT = {"key and value": ((1, (150, 0), np.nan), (2, (20, 1), np.inf))}
SPOILT_BIAS = {
    "masked key and value": ((1, (30, 0), np.nan), (2, (30, 0), np.nan)),
    "masked bias": ((3, (60, 100), np.nan),),
    "visible bias": ((3, (200, 100), np.nan),),
    "infinite bias": ((3, (200, 100), np.inf),),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "devices"),
    with_core_tuples(
        [(name, 1) for name in FUSED if name not in COVERED_BY_OTHERS]
        + [
            (name, 2)
            for name in (
                "causal, more queries, lengths",
                "offsets of each sequence, lengths",
            )
        ],
        ("causal, more queries, lengths", 1),
        ("bias of all, causal", 1),
    ),
)
def test_our_semantics_around_the_kernel(name, devices, monkeypatch):
    """With a dense computation instead of the kernel: masked rows, NaN in masked and in
    visible places.

    With a bias, under vmap. With several devices, no device knows all arrays.
    """
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    kernels.compute_for_cudnn(monkeypatch)
    shapes, arguments = FUSED[name]
    others = {name: x for name, x in arguments.items() if name != "bias"}
    arrays = normal(*(x.shape for x in shapes))
    if "bias" in arguments:
        arrays = [
            *(np.stack([x, x[::-1]]) for x in arrays),
            np.array(arguments["bias"], np.float32),
        ]
        fillings = FINITE | (SPOILT_BIAS if name == "bias of all, causal" else {})
    else:  # without a mask, NaN spreads as in the kernel
        fillings = FINITE | (
            SPOILT if arguments and name != "window wider than the keys" else {}
        )
    axes = (0, 0, 0, None) if "bias" in arguments else None
    ours, dense = (jax.jit(with_gradients(x, axes, **others)) for x in ("cudnn", "xla"))
    if not {"bias", "mask"} & set(arguments):
        dense = lambda *arrays: dense_gradients(arrays, **arguments)  # noqa: E731
    for filling, places in fillings.items():
        given = [x.copy() for x in arrays]
        for which, place, number in places:
            given[which][
                (..., *place) if which == 3 else (..., *place, slice(None))
            ] = number
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            got = ours(*given)
            want = dense(*given)
        for answer, expected in zip(got, want, strict=True):
            np.testing.assert_allclose(
                answer, expected, rtol=0, atol=1e-4, err_msg=filling
            )
        if axes:
            assert np.isnan(got[0]).any() == (
                filling in ("visible bias", "infinite bias")
            ), filling


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs cuDNN's kernel")
@pytest.mark.parametrize("name", FUSED)
def test_the_kernel_of_this_gpu(name):
    """No replacement: the output and gradients of cuDNN, with NaN in keys that are
    masked for all queries.
    """
    shapes, arguments = FUSED[name]
    others = {name: x for name, x in arguments.items() if name != "bias"}
    dtype = shapes[0].dtype
    arrays = normal(*(x.shape for x in shapes), dtype=dtype)
    if "bias" in arguments:
        arrays.append(arguments["bias"])
    exact = [x.astype(jnp.float32) for x in arrays]
    if "masked" in name or "bias of all" in name:
        for array in arrays[1:3]:
            array[..., 30, :, :] = np.nan

    def answers(arrays, implementation, **more):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jax.jit(with_gradients(implementation, **others, **more))(*arrays)

    truth = answers(exact, "xla", precision="highest")
    got = answers(arrays, "cudnn")
    simple = answers([x.astype(dtype) for x in exact], "xla")
    cases.by_the_rule_of_flash_attention(got, simple, truth)


def kernel_with_a_gradient(
    kernel, query, key, value, query_lengths, key_lengths, residual=False, bias=None
):
    """`dense_kernel` with the derivatives of cuDNN's kernel: only gradients of first
    order.
    """

    def run(arrays):
        return cases.dense_kernel(
            kernel, *arrays[:3], query_lengths, key_lengths, residual, *arrays[3:]
        )

    def forward(arrays):
        results, pull = jax.vjp(run, arrays)
        return results, jax.tree.map(lax.optimization_barrier, pull)

    run_once = jax.custom_vjp(run)
    run_once.defvjp(forward, lambda pull, cotangents: pull(cotangents))
    return run_once([query, key, value] if bias is None else [query, key, value, bias])


@pytest.mark.usefixtures("hopper")
def test_derivatives_of_every_order_around_a_kernel(monkeypatch):
    """Also under vmap; each part of the rule is used: tangent, gradient, and the
    tangents of both.
    """
    kernels.compute_for_cudnn(monkeypatch, kernel_with_a_gradient)
    arrays = normal(*[(2, 1, 64, 2, 16)] * 3, (1, 2, 64, 64))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation, arrays):
        def loss(arrays):
            attend = functools.partial(
                dot_product_attention, is_causal=True, implementation=implementation
            )
            return jnp.sin(jax.vmap(attend, (0, 0, 0, None))(*arrays)).sum()

        tangents = jax.tree.map(jnp.cos, arrays)
        gradient = jax.grad(loss)
        products = jax.jvp(gradient, (arrays,), (tangents,))[1]
        across = jax.grad(lambda x: jax.jvp(loss, (x,), (tangents,))[1])(arrays)
        squares = jax.grad(lambda x: sum((y**2).sum() for y in gradient(x)))(arrays)
        return (
            jax.jvp(loss, (arrays,), (tangents,)),
            gradient(arrays),
            products,
            across,
            squares,
        )

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, *answers = (
            derivatives(name, arrays) for name in ("xla", None, "cudnn")
        )
    for got in answers:
        close(got, expected)


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize(
    "arguments", [{}, {"is_causal": True, "key_value_seq_lengths": np.int32([300])}]
)
def test_policies_that_save_by_name_do_not_run_the_kernel_again(
    implementation, arguments
):
    """As many kernels as without `jax.checkpoint`; without names each block runs one
    more.
    """
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    kernel = ["dot_product_attention_fwd_wrapper"]
    saved, without, again = kernels.kernels_of_two_blocks(
        kernel, x, implementation=implementation, **arguments
    )
    in_forward = 2 if arguments else 1  # with masks also the branch for NaN has one
    assert 0 < saved == without == again - 2 * in_forward


def test_a_large_bias_is_not_copied(hopper, monkeypatch):
    arrays, arguments = FUSED["bias"]
    monkeypatch.setattr(cudnn, "MAX_SCORES_OF_BIAS", B * N * T * T - 1)
    with pytest.raises(NotImplementedError, match="copies bias for every batch entry"):
        lowered(arrays, implementation="cudnn", **arguments)


def half(dtype=jnp.bfloat16):
    return [jnp.asarray(x, dtype) for x in normal(*(x.shape for x in inputs()))]


def near(got, expected):
    """Results below 2 in bfloat16, each rounded once."""
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        np.asarray(expected, np.float32),
        rtol=0,
        atol=2**-7,
    )


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_host_a_program_for_a_cpu_is_right():
    """Arrays on a CPU, and jit(backend="cpu"), which is unknown while tracing."""
    arrays = half()
    expected = dot_product_attention(
        *(x.astype(jnp.float32) for x in arrays), is_causal=True, implementation="xla"
    )
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
    gradient = jax.jit(
        jax.grad(lambda *arrays: attend(*arrays).sum().astype(jnp.float32))
    )(*arrays)
    assert jnp.isfinite(gradient).all()


@pytest.mark.usefixtures("hopper")
def test_exported_for_two_platforms():
    """With lengths that are data, gradients and a batch axis of vmap."""

    def run(lengths, *arrays):
        attend = functools.partial(
            dot_product_attention, is_causal=True, key_value_seq_lengths=lengths
        )
        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(output)

    program = jax.jit(jax.vmap(run, (0, None, None, None)))
    lengths = jnp.array([[200, 3], [7, 256]], jnp.int32)
    arrays = half()
    exported = jax.export.export(
        program, platforms=("cpu", "cuda"), disabled_checks=CUDNN_CALLS
    )(lengths, *inputs())
    assert all(name.is_custom_call() in exported.mlir_module() for name in CUDNN_CALLS)
    expected = program(lengths, *(x.astype(jnp.float32) for x in arrays))
    for got, want in zip(exported.call(lengths, *arrays), expected, strict=True):
        scale = jnp.abs(want).max()
        near(got.astype(jnp.float32) / scale, want / scale)


@pytest.mark.core
def test_on_this_host():
    x = jnp.ones((1, 1000, 2, 64), jnp.bfloat16)
    explanation = explain_implementation(x, x, x, is_causal=True)
    assert list(explanation.refusals) == ["xla", "blockwise", "cudnn", "splash"]
    assert explanation.refusals["xla"] == explanation.refusals["blockwise"] == []
    assert not explanation.refusals[explanation.chosen]
    assert explanation.chosen in str(explanation)


@pytest.mark.core
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads errors for a CPU")
def test_on_a_cpu():
    x = jnp.ones((1, 8, 2, 64))
    assert explain_implementation(x, x, x).chosen == "xla"
    for name, device in {"cudnn": "NVIDIA GPUs", "splash": "TPUs"}.items():
        with pytest.raises(
            NotImplementedError,
            match=f"runs only on {device}, but this call runs on cpu",
        ):
            dot_product_attention(x, x, x, implementation=name)


@pytest.mark.parametrize(
    ("lengths", "window"),
    [(None, None), (jnp.array([200, 3]), (99, 0))],
    ids=["all", "ring"],
)
def test_a_prompt_for_an_empty_cache_uses_the_kernel(hopper, lengths, window):
    """Under jit, the program finds out whether the cache is empty."""
    query, key, value = inputs()
    create = functools.partial(
        KVCache.create, window=window and window[0], per_row=True
    )
    cache = jax.eval_shape(lambda: create(B, 512, K, H, jnp.bfloat16))

    def prompt(query, key, value, cache):
        return cached_attention(
            query, key, value, cache, lengths=lengths, local_window_size=window
        )

    text = (
        jax.jit(prompt)
        .trace(query, key, value, cache)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "__cudnn$fmhaSoftmax" in text
    step = [
        jax.ShapeDtypeStruct((B, 1, *x.shape[2:]), x.dtype) for x in (query, key, value)
    ]
    lengths = None
    assert (
        "__cudnn"
        not in jax.jit(prompt)
        .trace(*step, cache)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("platform", "dtype", "arguments", "operands"),
    [
        ("gpu", "bfloat16", {"implementation": "xla"}, "bf16"),
        ("tpu", "bfloat16", {"implementation": "blockwise"}, "bf16"),
        ("tpu", "float16", {"implementation": "blockwise"}, "f16"),
        ("gpu", "float16", {"implementation": "xla"}, "f32"),
        ("gpu", "float32", {"implementation": "blockwise"}, "f32"),
        (
            "gpu",
            "bfloat16",
            {"implementation": "blockwise", "precision": "highest"},
            "f32",
        ),
    ],
)
def test_products_in_16_bits(
    platform, dtype, arguments, operands, monkeypatch, request
):
    """Unless `precision` or JAX's default asks for float32; results have 32 bits."""
    compiled_for(monkeypatch, platform)
    request.addfinalizer(forget_programs)
    target = "cuda" if platform == "gpu" else platform

    def products():
        forget_programs()
        # JAX's own gradient of "xla" multiplies float32, and so do ours of scores in
        # float16, which may overflow.
        gradient = arguments["implementation"] == "blockwise" and dtype != "float16"
        text = lowered(
            inputs(dtype=jnp.dtype(dtype)),
            platform=target,
            gradient=gradient,
            **arguments,
        )
        tensors = r"\(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) -> tensor<\S+x(\w+)>"
        found = re.findall(rf"stablehlo.dot_general.*: {tensors}", text)
        assert len(found) >= (7 if gradient else 2)
        assert {types[2] for types in found} == {"f32"}
        return {x for types in found for x in types[:2]}

    assert products() == {operands}
    with jax.default_matmul_precision("float32"):
        assert products() == {"f32"}


ELSEWHERE = {
    "cuda": ("cuda", inputs(), {"is_causal": True}, "cudnn"),
    # The head size of an H100.
    "gpu": ("gpu", inputs(h=256), {"is_causal": True}, "cudnn"),
    # The budget of GPUs.
    "cuda, float32": ("cuda", inputs(1024, 1024, dtype=jnp.float32), {}, "xla"),
    "cuda, named": ("cuda", inputs(), {"implementation": "cudnn"}, "cudnn"),
    "tpu": ("tpu", inputs(), {"query_segment_ids": IDS}, "splash"),
    "cpu": ("cpu", inputs(1024, 1024), {}, "blockwise"),
}


@pytest.mark.core
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_choice_for_another_platform(name):
    """Without its device: nothing is compiled, and the explanation says that cuDNN did
    not run.
    """
    platform, arrays, arguments, chosen = ELSEWHERE[name]
    concrete = [jnp.zeros(x.shape, x.dtype) for x in arrays]
    cudnn.failure.cache_clear()
    traced = explained(arrays, platform=platform, **arguments)
    for explanation in (
        traced,
        explain_implementation(*concrete, platform=platform, **arguments),
    ):
        assert explanation.chosen == chosen
        assert explanation.on_cpu is None
        assert ("cuDNN did not run" in str(explanation)) == (
            platform in ("cuda", "gpu")
        )
    assert cudnn.failure.cache_info().misses == 0
    if platform == "cpu" == jax.default_backend():
        assert explain_implementation(*concrete, **arguments) == explanation


@pytest.mark.core
def test_unknown_platforms_are_refused():
    x = jnp.ones((1, 8, 2, 4))
    for platform in ("rocm", "CUDA", "", 3, ["tpu"]):
        with pytest.raises(
            ValueError, match='platform must be "cpu", "cuda", "tpu" or None, but got'
        ):
            explain_implementation(x, x, x, platform=platform)


def test_explain_takes_the_arguments_of_the_attention():
    parameters = inspect.signature(dot_product_attention).parameters
    explained = dict(inspect.signature(explain_implementation).parameters)
    assert explained.pop("platform").default is None
    assert list(explained.items()) == list(parameters.items())
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
        explain_implementation(*(jnp.ones((1, 3, 2, 4)),) * 3, is_casual=True)
