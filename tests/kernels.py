"""What tests of fused kernels share: shapes of arrays, programs for devices that this
host lacks, and explanations.
"""

import functools

import cases
import cudnn_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Only to lower for a GPU where there is none.
from jax._src.cudnn import fused_attention_stablehlo

from flax_mha import dot_product_attention, explain_implementation, masks
from flax_mha._src.engines.kernels import splash
from flax_mha._src.engines.kernels.cudnn import call as calls
from flax_mha._src.engines.kernels.cudnn import engine as cudnn
from flax_mha._src.engines.kernels.cudnn import trials


def shapes(t=256, s=256, *, batch=(2,), n=2, k=1, h=32, hv=None):
    hv = h if hv is None else hv
    return (*batch, t, n, h), (*batch, s, k, h), (*batch, s, k, hv)


def call(arrays, **arguments):
    """A case of a table: arrays or their sizes, and arguments."""
    return arrays, arguments


def abstract(*lengths, dtype=jnp.bfloat16, **sizes):
    return [jax.ShapeDtypeStruct(size, dtype) for size in shapes(*lengths, **sizes)]


def normal(*sizes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(size).astype(dtype) for size in sizes]


# Within 1e-5 of the largest number, or of 1.
close = functools.partial(cases.close, at_least=1.0)


def as_if_cudnn_were_here(patch):
    """As on an H200 whose plans all compile. `patch` is a pytest.MonkeyPatch."""

    def device(platform):
        if platform == "gpu":
            return cudnn.Device("NVIDIA H200", (9, 0))
        return cudnn.Device(platform, None)

    patch.setattr(cudnn, "device", device)
    patch.setattr(cudnn, "failure", lambda fused: [])
    patch.setattr(trials, "_tried", lambda *arguments: None)
    patch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    patch.setattr(
        fused_attention_stablehlo, "check_compute_capability", lambda capability: True
    )


def as_on_a_gpu(patch):
    """A context for fixtures: as on an H200. `patch` is a pytest.MonkeyPatch."""
    cases.compiled_for(patch, "gpu")
    as_if_cudnn_were_here(patch)
    cases.forget_programs()
    yield
    cases.forget_programs()


def compute_for_cudnn(patch):
    """Replaces cuDNN's two custom calls by dense computations, also for float32.
    `patch` is a pytest.MonkeyPatch.
    """
    patch.setattr(calls, "call_forward", cudnn_calls.call_forward)
    patch.setattr(calls, "call_backward", cudnn_calls.call_backward)
    patch.setattr(calls, "differences_from_jax", list)
    # Comparisons in float32 are exact enough to find any mistake.
    patch.setattr(cudnn, "DTYPES", (jnp.float32,))
    patch.setattr(cudnn, "DTYPES_OF_BIAS", (jnp.float32,))


def as_on_a_tpu():
    """A context for fixtures: as on a TPU, in small tiles."""
    patch = pytest.MonkeyPatch()
    cases.compiled_for(patch, "tpu")
    patch.setattr(splash, "TILES", (128,))
    cases.forget_programs()
    yield patch
    patch.undo()
    cases.forget_programs()


def lowered(
    arrays, attend=dot_product_attention, platform="tpu", gradient=True, **arguments
):
    """The program of a device for the output and, unless `gradient` is False, for
    gradients.
    """
    attend = functools.partial(attend, **arguments)

    def run(*arrays):
        if not gradient:
            return attend(*arrays)
        output, pull = jax.vjp(attend, *arrays)
        return output, pull(output)

    traced = jax.jit(run).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def explained(arrays, **arguments):
    """The explanation of a call that is traced."""
    # An explanation is no array, so the traced function cannot return it.
    explanations = []
    explain = functools.partial(explain_implementation, **arguments)
    jax.eval_shape(lambda *arrays: explanations.append(explain(*arrays)), *arrays)
    return explanations[0]


# Arguments that cuDNN and "splash" refuse, for 2 x 256 tokens, and the reason.
REFUSED_BY_BOTH = {
    "dropout": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "dropout_rate",
    ),
    "score_mod": ({"score_mod": lambda score, b, h, q, k: score + 1}, "score_mod"),
    "largest score": (
        {"return_max_score": True},
        "return_max_score requires the running maximum",
    ),
    "scale as data": ({"scale": jnp.float32(0.3)}, "scale"),
    "precision": (
        {"precision": "highest"},
        "precision must be the default, but is highest",
    ),
}
# Arguments that become a bias for cuDNN, and that "splash" refuses.
MASKS = {
    "array mask": ({"mask": np.ones((2, 1, 256, 256), bool)}, "ArrayMask"),
    "function": (
        {"mask": masks.FunctionMask(lambda b, h, q, k: q > k)},
        "not a causal, window, length or",
    ),
    "either": ({"mask": masks.CausalMask() | masks.LocalMask(3, 3)}, "Or"),
    "offset as data": (
        {"is_causal": True, "query_offset": np.int32([7, 9])},
        "query_offset",
    ),
    # Without the offset, the window would hide nothing.
    "offset as data, wide window": (
        {"local_window_size": (300, None), "query_offset": np.int32([400, 9])},
        "query_offset is an array",
    ),
}
REFUSED_BY_SPLASH = MASKS | {"residual": ({"return_residual": True}, "return_residual")}
KERNELS = {"cudnn": "__cudnn$fmha", "splash": "pallas_call"}


def assert_refused(name, arrays, arguments, reason):
    """If the implementation is not named, another one computes the call; each reason
    says what to change.
    """
    attend = functools.partial(dot_product_attention, **arguments)
    assert KERNELS[name] not in str(jax.make_jaxpr(attend)(*arrays))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(attend, implementation=name), *arrays)
    refusals = explained(arrays, **arguments).refusals[name]
    assert all(map(cases.REMEDY.search, refusals))
    return refusals


def assert_one_reason(arrays, name, reason, setting):
    """Only the setting keeps this implementation from computing the call, and the
    reason says what to change.
    """
    assert explained(arrays).refusals[name] == []
    with setting():
        [refusal] = explained(arrays).refusals[name]
    assert reason in refusal
    assert cases.REMEDY.search(refusal)


def in_bfloat16_by_the_rule_of_flash_attention(name, sizes, visible, **arguments):
    """The output and the gradients of a kernel; `visible` is the mask of the arguments,
    as an array.
    """
    naive = functools.partial(
        cases.naive_attention,
        visible=visible,
        logits_soft_cap=arguments.get("logits_soft_cap"),
    )
    attend = functools.partial(dot_product_attention, **arguments)
    ours = functools.partial(attend, implementation=name)
    exact = functools.partial(attend, implementation="xla")

    @functools.partial(jax.jit, static_argnums=0)
    def answers(attend, arrays):
        output, pull = jax.vjp(attend, *arrays)
        cotangent = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        return output, *pull(cotangent.astype(output.dtype))

    arrays = normal(*sizes, dtype=jnp.bfloat16)
    truth = answers(exact, [x.astype(jnp.float32) for x in arrays])
    cases.by_the_rule_of_flash_attention(
        answers(ours, arrays), answers(naive, arrays), truth
    )


def kernels_of_two_blocks(names, x, platform=None, **arguments):
    """How many kernels a gradient of two blocks runs: with a policy that saves by name,
    without, and without names.
    """
    save = jax.checkpoint_policies.save_only_these_names(
        "attention_output", "attention_lse", "attention_scores"
    )

    def count(change):
        def block(x):
            query = jnp.sin(x)
            key = jnp.cos(x)
            return x + dot_product_attention(query, key, 2 * key, **arguments)

        def loss(x):
            return change(block)(change(block)(x)).astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss)).trace(x)
        if platform is not None:
            lowered = traced.lower(lowering_platforms=(platform,))
            assert "tpu_custom_call" in lowered.as_text()
        equations = cases.equations(traced.jaxpr.jaxpr)
        found = (x.params.get("target_name", x.primitive.name) for x in equations)
        return sum(name in names for name in found)

    saved = count(functools.partial(jax.checkpoint, policy=save))
    without = count(lambda f: f)
    anew = count(jax.checkpoint)
    return saved, without, anew
