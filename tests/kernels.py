"""What tests of fused kernels share: shapes of arrays, programs for devices that are not here, and explanations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import REMEDY, compiled_for, equations, forget_programs
from jax._src.cudnn import fused_attention_stablehlo  # only to lower for a GPU where there is none

from flax_mha import dot_product_attention, explain_implementation
from flax_mha._src.engines.kernels import cudnn
from flax_mha._src.engines.kernels import tpu as tpu_kernels


def shapes(t=256, s=256, *, batch=(2,), n=2, k=1, h=32, hv=None):
    return (*batch, t, n, h), (*batch, s, k, h), (*batch, s, k, h if hv is None else hv)


def abstract(*lengths, dtype=jnp.bfloat16, **sizes):
    return [jax.ShapeDtypeStruct(size, dtype) for size in shapes(*lengths, **sizes)]


def normal(*sizes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(size).astype(dtype) for size in sizes]


def close(answers, expected):
    """Within 1e-5 of the largest value, or of 1."""
    for got, want in zip(answers, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.nanmax(np.abs(want), initial=1))


def with_gradients(implementation=None, **arguments):
    """A function of query, key and value: the output, and gradients; rows that are not finite have none."""

    def run(*arrays):
        attend = functools.partial(dot_product_attention, implementation=implementation, **arguments)
        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(jnp.where(jnp.isfinite(output), jnp.cos(output), jnp.zeros_like(output)))

    return run


def as_if_cudnn_were_here(patch):
    """On a GPU of this kind, whose plans all compile. `patch` is a pytest.MonkeyPatch."""
    hopper = cudnn.Device("NVIDIA H200", (9, 0))
    patch.setattr(cudnn, "device", lambda platform: hopper if platform == "gpu" else cudnn.Device(platform, None))
    patch.setattr(cudnn, "failure", lambda kernel: [])
    patch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    patch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)


def as_on_a_tpu():
    """A context for fixtures: as on a TPU, in small tiles."""
    patch = pytest.MonkeyPatch()
    compiled_for(patch, "tpu")
    patch.setattr(tpu_kernels, "TILES", (128,))
    forget_programs()
    yield patch
    patch.undo()
    forget_programs()


def lowered(arrays, attend=dot_product_attention, platform="tpu", gradient=True, **arguments):
    """What a device would be given for the output and, unless `gradient` is False, for gradients."""
    attend = functools.partial(attend, **arguments)

    def both(*arrays):
        output, pull = jax.vjp(attend, *arrays)
        return output, pull(output)

    traced = jax.jit(both if gradient else lambda *arrays: attend(*arrays)).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def explained(arrays, **arguments):
    """The explanation of a call that is traced."""
    explanations = []
    explain = functools.partial(explain_implementation, **arguments)
    jax.eval_shape(lambda *arrays: explanations.append(explain(*arrays)), *arrays)
    return explanations[0]


def assert_one_reason(arrays, name, reason, setting):
    """Nothing keeps this implementation from computing these arrays but the setting, and what to change is said."""
    assert explained(arrays).refusals[name] == []
    with setting():
        [refusal] = explained(arrays).refusals[name]
    assert reason in refusal
    assert REMEDY.search(refusal)


def by_the_rule_of_flash_attention(ours, naive, exact, arrays):
    """At most twice the error of scores and weights in bfloat16, plus one rounding of the result: all functions."""

    @functools.partial(jax.jit, static_argnums=0)
    def answers(attend, arrays):
        output, pull = jax.vjp(attend, *arrays)
        return output, *pull(jnp.cos(jnp.arange(output.size)).reshape(output.shape).astype(output.dtype))

    truth = answers(exact, [x.astype(jnp.float32) for x in arrays])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        simple = answers(naive, arrays)
    for got, plain, want in zip(answers(ours, arrays), simple, truth, strict=True):
        assert got.dtype == plain.dtype == jnp.bfloat16
        error, naive_error = (np.abs(np.float64(x) - np.float64(want)).max() for x in (got, plain))
        assert error <= 2 * naive_error + float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want).max()


def kernels_of_two_blocks(primitive, x, platform=None, **arguments):
    """How many kernels a gradient of two blocks runs: with a policy that saves by name, without, and without names."""
    save = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")

    def count(change):
        def block(x):
            query, key = jnp.sin(x), jnp.cos(x)
            return x + dot_product_attention(query, key, 2 * key, **arguments)

        def loss(x):
            return change(block)(change(block)(x)).astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss)).trace(x)
        if platform is not None:
            assert "tpu_custom_call" in traced.lower(lowering_platforms=(platform,)).as_text()
        return sum(x.primitive.name == primitive for x in equations(traced.jaxpr.jaxpr))

    return [count(change) for change in (functools.partial(jax.checkpoint, policy=save), lambda f: f, jax.checkpoint)]
