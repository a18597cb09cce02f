"""The choice of an implementation, refusals with their reasons, and programs for
devices that this host lacks.
"""

import functools
import inspect
import re
from typing import NamedTuple

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
    forget_programs,
    kernels_in,
    refused,
    with_gradients,
)
from flax import nnx
from kernels import call, explained, normal
from marks import with_core

from flax_mha import (
    MultiHeadAttention,
    dot_product_attention,
    explain_implementation,
    masks,
)
from flax_mha._src.core import validation
from flax_mha._src.engines.kernels.cudnn import call as calls
from flax_mha._src.engines.kernels.cudnn import engine as cudnn
from flax_mha.cache import KVCache, cached_attention

B = 2
T = 256
N = 4
K = 2
H = 64
# JAX exports only custom calls that it knows to be stable.
CUDNN_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{x}")
    for x in ("", "Backward")
]
IDS = jnp.zeros((B, T), jnp.int32)
COMPILES = cudnn.failure  # which `as_if_cudnn_were_here` replaces


@pytest.fixture
def hopper(monkeypatch):
    yield from kernels.as_on_a_gpu(monkeypatch)


inputs = functools.partial(kernels.abstract, n=N, k=K, h=H)
lowered = functools.partial(kernels.lowered, platform="cuda", gradient=False)


def bias_of(*shape, masked=False):
    """If `masked`, with a row of -inf, another with one visible number, and a key of
    -inf.
    """
    bias = np.random.default_rng(4).standard_normal(shape, np.float32)
    if masked:
        bias[..., 7, :] = -np.inf
        bias[..., 9, 1:] = -np.inf
        bias[..., 30] = -np.inf
    return jnp.asarray(bias, jnp.bfloat16)


def lengths(of_queries, of_keys):
    return {
        "query_seq_lengths": jnp.array(of_queries),
        "key_value_seq_lengths": jnp.array(of_keys),
    }


KEY_LENGTHS = {"key_value_seq_lengths": jnp.array([200, 0])}
BOTH_LENGTHS = lengths([100, 300], [200, 30])
OFFSETS = {"query_offset": jnp.array([-20, 30]), "key_value_offset": jnp.array([5])}
OFFSETS |= lengths([100, 256], [250, 300])
# Equal offsets shift lengths, but change no causal mask.
SHIFTED = {"query_offset": 30, "key_value_offset": 30} | lengths([130, 286], [280, 300])
MASKED = {"bias": bias_of(N, 301, 170, masked=True), "is_causal": True}
# Arrays and arguments that cuDNN's kernel computes.
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


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", FUSED)
def test_a_gpu_chooses_the_fused_kernel(name):
    arrays, arguments = FUSED[name]
    assert explained(arrays, **arguments).chosen == "cudnn"


def calls_of_cudnn(text):
    return kernels_in(text, r"@__cudnn\$fmha(\w+)\(")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "name",
    with_core(
        (
            "plain",
            "causal, more queries, lengths",
            "causal window",
            "lengths",
            "mask objects",
            "head size 256",
            "offsets of each sequence, lengths",
            "two batch axes",
        ),
        "plain",
        "causal window",
        "lengths",
    ),
)
def test_a_gpu_gets_the_fused_kernel_without_a_mask_as_an_array(name):
    arrays, arguments = FUSED[name]
    text = lowered(arrays, gradient=True, **arguments)
    assert calls_of_cudnn(text) == ["Softmax", "SoftmaxBackward"]
    # cuDNN would get an array of a mask as a bias.
    assert "ScaleBias" not in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["bias", "bias, two batch axes, fewer keys"])
def test_a_gpu_gets_the_fused_kernel_with_a_bias(name):
    arrays, arguments = FUSED[name]
    text = lowered(arrays, gradient=True, **arguments)
    assert calls_of_cudnn(text) == ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]


# Arguments that are not causal masks, windows to the left or lengths, and the kernels
# of a gradient with them.
BIAS = ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
WITH_A_BIAS = {
    "mask of keys": ({"mask": np.ones((B, 1, 1, T), bool)}, BIAS),
    "segments": ({"query_segment_ids": IDS, "key_value_segment_ids": IDS}, BIAS),
    "function": ({"mask": masks.FunctionMask(lambda b, h, q, k: q != k)}, BIAS),
    "window of both sides": ({"local_window_size": (9, 9)}, BIAS),
    "offset": ({"is_causal": True, "query_offset": 7}, BIAS),
    "sinks": (
        {"sinks": jnp.zeros(N), "is_causal": True},
        ["Softmax", "SoftmaxBackward"],
    ),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", with_core(WITH_A_BIAS, "mask of keys", "sinks"))
def test_a_gpu_gets_the_fused_kernel_for_every_mask(name):
    arguments, kernels_of_gradient = WITH_A_BIAS[name]
    text = lowered(inputs(), gradient=True, implementation="cudnn", **arguments)
    assert calls_of_cudnn(text) == kernels_of_gradient


@pytest.mark.usefixtures("hopper")
def test_the_gradient_of_a_log_sum_exp_is_another_backward_pass():
    def loss(*arrays):
        attend = functools.partial(
            dot_product_attention, implementation="cudnn", return_residual=True
        )
        output, lse = attend(*arrays)
        return output.astype(jnp.float32).sum() + lse.sum()

    traced = jax.jit(jax.grad(loss)).trace(*inputs())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # It runs only if there is a gradient.
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 2
    assert text.count("@__cudnn$fmhaSoftmax(") == 1


# Calls that the kernel would compute differently --------------------------------------


def not_fused(reason, arrays=None, **arguments):
    """A GPU gets portable code, and on every platform the explanation has lines that
    are not too long, and says what to change.
    """
    arrays = inputs() if arrays is None else arrays
    kernels.assert_refused("cudnn", arrays, arguments, reason)
    for platform in ("cpu", "cuda", "tpu"):
        explanation = explained(arrays, platform=platform, **arguments)
        for reasons in explanation.refusals.values():
            assert all(map(REMEDY.search, reasons))
        assert max(map(len, str(explanation).splitlines())) <= 100


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", kernels.REFUSED_BY_BOTH)
def test_what_no_kernel_supports_is_not_fused(name):
    arguments, reason = kernels.REFUSED_BY_BOTH[name]
    not_fused(reason, **arguments)


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_other_dtypes_and_sizes_are_not_fused():
    float32 = inputs(dtype=jnp.float32)
    not_fused("are float32: pass dtype=jnp.bfloat16 to the module, or cast", float32)
    not_fused("multiple of 8", inputs(h=60))
    not_fused("multiple of 8", inputs(h=264))
    not_fused("value head size", inputs(hv=32))


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_what_would_be_rounded_is_not_fused():
    not_fused("bias and query must be bfloat16", bias=jnp.zeros((1, T, T)))
    half = inputs(dtype=jnp.float16)
    not_fused("its mask becomes a bias", half, query_segment_ids=IDS)
    not_fused("logits_soft_cap", logits_soft_cap=30.0)


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
    said = str(error.value)
    assert "float16" in said
    assert "multiple of 8" in said
    assert "logits_soft_cap" in said
    assert "window" in said
    assert "Pass None" in said


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
def test_one_query_gets_no_kernel():
    assert "__cudnn" not in lowered(inputs(t=1))


@pytest.mark.usefixtures("hopper")
def test_a_plan_that_fails_is_a_reason(monkeypatch):
    """Also for arrays on a CPU, if the given platform is available."""
    reason = "cuDNN has no execution plan for it: out of luck"
    monkeypatch.setattr(cudnn, "failure", lambda fused: [reason])

    assert "__cudnn" not in lowered(inputs())
    with pytest.raises(NotImplementedError, match="out of luck"):
        lowered(inputs(), implementation="cudnn")

    explanation = explain_implementation(*half(), platform="cuda")
    assert explanation.chosen == "xla"
    assert explain_implementation(*half(), platform="cpu").chosen == "xla"
    assert "out of luck" in explanation.refusals["cudnn"][0]
    assert "did not run" not in str(explanation)


@pytest.mark.core
def test_a_kernel_that_does_not_compile_has_no_plan():
    # There is no cuDNN on a CPU, and on a GPU none for float32.
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)
    fused = cudnn.Fused(calls.Settings(1.0, is_causal=True), calls.Operands(x, x, x))
    [reason] = cudnn.failure(fused)
    assert reason.startswith("cuDNN has no execution plan for this call (")
    assert REMEDY.search(reason)


@pytest.mark.core
def test_a_kernel_that_fails_for_a_passing_reason_is_tried_again(monkeypatch):
    compiled_for(monkeypatch, "gpu")
    kernels.as_if_cudnn_were_here(monkeypatch)
    monkeypatch.setattr(cudnn, "failure", COMPILES)
    validation.warn_once.cache_clear()

    def chosen():
        return explained(inputs(), is_causal=True).chosen

    def without_memory(*arguments):
        raise RuntimeError("INTERNAL: no plan:\nRESOURCE_EXHAUSTED: 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(calls, "forward", without_memory)
        with pytest.warns(UserWarning, match="RESOURCE_EXHAUSTED.*jax.clear_caches"):
            assert chosen() == "xla"
        # It warns once.
        assert chosen() == "xla"
        [reason] = explained(inputs(), is_causal=True).refusals["cudnn"]
        assert REMEDY.search(reason)

    monkeypatch.setattr(calls, "forward", lambda kernel, operands: operands[:2])
    monkeypatch.setattr(calls, "backward", lambda kernel, operands, *given: given)
    assert chosen() == "cudnn"


# Around the kernel --------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs cuDNN's kernel")
@pytest.mark.parametrize("name", FUSED)
def test_the_kernel_of_this_gpu(name):
    """No replacement: the output and gradients of cuDNN, with NaN in keys that are
    masked for all queries.
    """
    shapes, arguments = FUSED[name]
    others = dict(arguments)
    bias = others.pop("bias", None)
    dtype = shapes[0].dtype
    arrays = normal(*(x.shape for x in shapes), dtype=dtype)
    if bias is not None:
        arrays.append(bias)
    # Without NaN: what is exact must not depend on our handling of it.
    exact = [x.astype(jnp.float32) for x in arrays]
    if "masked" in name or "bias of all" in name:
        for array in arrays[1:3]:
            array[..., 30, :, :] = np.nan

    def answers(arrays, implementation, **more):
        run = jax.jit(with_gradients(implementation, **others, **more))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return run(*arrays)

    truth = answers(exact, "xla", precision="highest")
    got = answers(arrays, "cudnn")
    simple = answers([x.astype(dtype) for x in exact], "xla")
    cases.by_the_rule_of_flash_attention(got, simple, truth)


@pytest.mark.usefixtures("hopper")
def test_derivatives_of_every_order_around_a_kernel(monkeypatch):
    """Also under vmap; each part of the rule is used: tangent, gradient, and the
    tangents of both.
    """
    kernels.compute_for_cudnn(monkeypatch)
    arrays = normal(*[(2, 1, 64, 2, 16)] * 3, (1, 2, 64, 64))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation, arrays):
        attend = functools.partial(
            dot_product_attention, is_causal=True, implementation=implementation
        )
        mapped = jax.vmap(attend, (0, 0, 0, None))
        tangents = jax.tree.map(jnp.cos, arrays)

        def loss(arrays):
            return jnp.sin(mapped(*arrays)).sum()

        gradient = jax.grad(loss)

        def along(x):
            _, tangent = jax.jvp(loss, (x,), (tangents,))
            return tangent

        def squares(x):
            return sum((y**2).sum() for y in gradient(x))

        return {
            "tangent": jax.jvp(loss, (arrays,), (tangents,)),
            "gradient": gradient(arrays),
            "tangent of the gradient": jax.jvp(gradient, (arrays,), (tangents,))[1],
            "gradient of the tangent": jax.grad(along)(arrays),
            "gradient of the gradient": jax.grad(squares)(arrays),
        }

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = derivatives("xla", arrays)
        close(derivatives(None, arrays), expected)
        close(derivatives("cudnn", arrays), expected)


@pytest.mark.core
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize(
    ("arguments", "in_forward"),
    [
        ({}, 1),
        # With masks, also the branch for NaN has one.
        ({"is_causal": True, "key_value_seq_lengths": np.int32([300])}, 2),
    ],
)
def test_policies_that_save_by_name_do_not_run_the_kernel_again(
    implementation, arguments, in_forward
):
    """As many kernels as without `jax.checkpoint`; without names each block runs one
    more.
    """
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    kernel = ["__cudnn$fmhaSoftmax"]
    saved, without, again = kernels.kernels_of_two_blocks(
        kernel, x, implementation=implementation, **arguments
    )
    assert 0 < saved == without == again - 2 * in_forward


def test_a_mask_that_would_become_a_large_bias_is_not_fused(hopper, monkeypatch):
    mask = np.ones((B, 1, 1, T), bool)
    monkeypatch.setattr(cudnn, "MAX_BIAS", B * T * T)
    lowered(inputs(), implementation="cudnn", mask=mask)

    monkeypatch.setattr(cudnn, "MAX_BIAS", B * T * T - 1)
    with pytest.raises(NotImplementedError, match="would have 131,072 numbers"):
        lowered(inputs(), implementation="cudnn", mask=mask)


def half(dtype=jnp.bfloat16):
    return [jnp.asarray(x, dtype) for x in normal(*(x.shape for x in inputs()))]


def near(got, expected):
    """Results below 2 in bfloat16, each rounded once."""
    got = np.asarray(got, np.float32)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-7)


def in_float32():
    """The output for `half()`, exactly."""
    exact = (x.astype(jnp.float32) for x in half())
    return dot_product_attention(*exact, is_causal=True, implementation="xla")


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_host_arrays_on_a_cpu_get_a_program_for_it():
    arrays = half()

    explanation = explain_implementation(*arrays, is_causal=True)
    output = dot_product_attention(*arrays, is_causal=True)

    assert (explanation.chosen, explanation.on_cpu) == ("xla", None)
    assert "this call runs on cpu" in explanation.refusals["cudnn"][0]
    near(output, in_float32())


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_host_a_traced_call_also_runs_on_a_cpu():
    """jit(backend="cpu") is unknown while tracing."""
    arrays = half()
    explained = []

    def attend(*arrays):
        explained.append(explain_implementation(*arrays, is_causal=True))
        return dot_product_attention(*arrays, is_causal=True)

    def total(*arrays):
        return attend(*arrays).sum().astype(jnp.float32)

    near(jax.jit(attend)(*arrays), in_float32())
    assert (explained[0].chosen, explained[0].on_cpu) == ("cudnn", "xla")
    assert "chosen if compiled for a CPU" in str(explained[0])
    gradient = jax.jit(jax.grad(total))(*arrays)
    assert jnp.isfinite(gradient).all()


@pytest.mark.usefixtures("hopper")
def test_a_program_exported_for_two_platforms_is_right_on_a_cpu():
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
    export = jax.export.export(
        program, platforms=("cpu", "cuda"), disabled_checks=CUDNN_CALLS
    )
    exported = export(lengths, *inputs())
    for name in CUDNN_CALLS:
        assert name.is_custom_call() in exported.mlir_module()

    expected = program(lengths, *(x.astype(jnp.float32) for x in arrays))
    for got, want in zip(exported.call(lengths, *arrays), expected, strict=True):
        scale = jnp.abs(want).max()
        near(got.astype(jnp.float32) / scale, want / scale)


@pytest.mark.core
def test_the_explanation_on_this_host_has_all_implementations():
    x = jnp.ones((1, 1000, 2, 64), jnp.bfloat16)
    explanation = explain_implementation(x, x, x, is_causal=True)
    assert list(explanation.refusals) == ["xla", "blockwise", "cudnn", "splash"]
    assert explanation.refusals["xla"] == explanation.refusals["blockwise"] == []
    assert not explanation.refusals[explanation.chosen]
    assert explanation.chosen in str(explanation)


@pytest.mark.core
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads errors for a CPU")
@pytest.mark.parametrize(
    ("name", "device"), [("cudnn", "NVIDIA GPUs"), ("splash", "TPUs")]
)
def test_a_cpu_refuses_fused_kernels(name, device):
    x = jnp.ones((1, 8, 2, 64))
    assert explain_implementation(x, x, x).chosen == "xla"
    message = f"runs only on {device}, but this call runs on cpu"
    with pytest.raises(NotImplementedError, match=message):
        dot_product_attention(x, x, x, implementation=name)


@pytest.mark.parametrize(
    ("lengths", "window"),
    [(None, None), (jnp.array([200, 3]), 99)],
    ids=["all", "ring"],
)
def test_a_prompt_for_an_empty_cache_uses_the_kernel(hopper, lengths, window):
    """Under jit, the program finds out whether the cache is empty."""
    cache = jax.eval_shape(
        lambda: KVCache.create(B, 512, K, H, jnp.bfloat16, window, per_row=True)
    )

    def program(number, lengths):
        prompt = functools.partial(
            cached_attention, lengths=lengths, local_window_size=window and (window, 0)
        )
        traced = jax.jit(prompt).trace(*inputs(number, number), cache)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    # One token is read in place.
    assert "__cudnn$fmhaSoftmax" in program(T, lengths)
    assert "__cudnn" not in program(1, None)


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
def test_products_have_operands_in_16_bits(
    platform, dtype, arguments, operands, monkeypatch, request
):
    """Unless `precision` or JAX's default asks for float32; results have 32 bits."""
    compiled_for(monkeypatch, platform)
    request.addfinalizer(forget_programs)
    # JAX's own gradient of "xla" multiplies float32, and so do ours of scores in
    # float16, which may overflow.
    types = functools.partial(
        types_of_operands,
        inputs(dtype=jnp.dtype(dtype)),
        platform="cuda" if platform == "gpu" else platform,
        gradient=arguments["implementation"] == "blockwise" and dtype != "float16",
        **arguments,
    )
    assert types() == {operands}
    with jax.default_matmul_precision("float32"):
        assert types() == {"f32"}


def types_of_operands(arrays, *, gradient, **arguments):
    """The dtypes of all products' operands in a program; results are float32."""
    tensors = r"\(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) -> tensor<\S+x(\w+)>"
    product = re.compile(rf"stablehlo.dot_general.*: {tensors}")
    forget_programs()
    found = product.findall(lowered(arrays, gradient=gradient, **arguments))
    # Two products forward, and five backward.
    assert len(found) >= (7 if gradient else 2)
    types = set()
    for left, right, result in found:
        assert result == "f32"
        types |= {left, right}
    return types


@pytest.mark.core
def test_bfloat16_is_right_on_a_cpu():
    kernels.in_bfloat16_by_the_rule_of_flash_attention(
        "blockwise",
        kernels.shapes(256, 384),
        visible=np.tri(256, 384) > 0,
        is_causal=True,
    )


@pytest.mark.core
def test_bfloat16_gradients_on_a_cpu_with_lengths_known_only_at_run_time():
    """On CPUs with AMX, XLA keeps products of bfloat16, but lacks some of these."""
    arrays = normal(*kernels.shapes(256, 256), dtype=jnp.bfloat16)
    exact = [x.astype(jnp.float32) for x in arrays]

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, arrays, length):
        def loss(arrays):
            output = dot_product_attention(
                *arrays, key_value_seq_lengths=length, implementation=implementation
            )
            return (output.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(arrays)

    got = gradients("blockwise", arrays, 200)
    want = gradients("xla", exact, 200)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(
            x.astype(jnp.float32), y, rtol=0, atol=0.02 * np.abs(y).max()
        )


class Elsewhere(NamedTuple):
    """A call, and its implementation on a platform that this host may lack."""

    platform: str
    chosen: str
    arrays: list
    arguments: dict = {}  # noqa: RUF012


ELSEWHERE = {
    "cuda": Elsewhere("cuda", "cudnn", inputs(), {"is_causal": True}),
    # The head size of an H100.
    "gpu": Elsewhere("gpu", "cudnn", inputs(h=256), {"is_causal": True}),
    # The budget of GPUs.
    "cuda, float32": Elsewhere("cuda", "xla", inputs(1024, 1024, dtype=jnp.float32)),
    "cuda, named": Elsewhere("cuda", "cudnn", inputs(), {"implementation": "cudnn"}),
    "tpu": Elsewhere("tpu", "splash", inputs(), {"query_segment_ids": IDS}),
    "cpu": Elsewhere("cpu", "blockwise", inputs(1024, 1024)),
}


@pytest.mark.core
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_choice_for_another_platform(name):
    """Without its device: nothing is compiled, and the explanation says that cuDNN did
    not run.
    """
    platform, chosen, arrays, arguments = ELSEWHERE[name]
    concrete = [jnp.zeros(x.shape, x.dtype) for x in arrays]
    explain = functools.partial(explain_implementation, *concrete, **arguments)
    cudnn.failure.cache_clear()

    traced = explained(arrays, platform=platform, **arguments)
    for explanation in (traced, explain(platform=platform)):
        assert explanation.chosen == chosen
        assert explanation.on_cpu is None
        says_so = "cuDNN did not run" in str(explanation)
        assert says_so == (platform in ("cuda", "gpu"))
    assert cudnn.failure.cache_info().misses == 0
    if platform == jax.default_backend() == "cpu":
        assert explain() == explain(platform="cpu")


class Described:
    """Not an array, but it has a shape and a dtype."""

    shape = (B, 1024, N, H)
    dtype = jnp.bfloat16


@pytest.mark.core
def test_shapes_are_explained_without_arrays():
    x = jax.ShapeDtypeStruct(Described.shape, Described.dtype)
    mask = jax.ShapeDtypeStruct((B, 1, 1, 1024), jnp.bool_)
    array = jnp.ones(Described.shape, jnp.bfloat16)
    explain = functools.partial(explain_implementation, platform="cuda")

    expected = explain(array, array, array, mask=jnp.ones(mask.shape, bool))
    assert expected.chosen == "cudnn"
    assert explain(x, x, x, mask=mask) == expected
    assert explain(x, array, Described(), None, mask) == expected
    refused("mask must", explain, x, x, x, mask=x)

    module = MultiHeadAttention(
        N, N * H, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0)
    )
    tokens = jax.ShapeDtypeStruct((B, 1024, N * H), jnp.float32)
    assert module.explain(tokens, mask=mask, platform="cuda").chosen == "cudnn"


@pytest.mark.core
def test_unknown_platforms_are_refused():
    x = jnp.ones((1, 8, 2, 4))
    message = 'platform must be "cpu", "cuda", "tpu" or None, but got'
    for platform in ("rocm", ["tpu"]):
        refused(message, explain_implementation, x, x, x, platform=platform)


def test_explain_takes_the_arguments_of_the_attention():
    parameters = inspect.signature(dot_product_attention).parameters
    explained = dict(inspect.signature(explain_implementation).parameters)
    # The only one that is not of the attention.
    assert explained.pop("platform").default is None
    assert list(explained.items()) == list(parameters.items())
