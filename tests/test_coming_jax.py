"""Flags of JAX that are off by default, and may become the default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, forget_programs
from kernels import abstract, as_if_cudnn_were_here, lowered
from test_user_functions import ARRAYS, jvp_rule, loss_of, vjp_rule

from flax_mha import FunctionMask, dot_product_attention

# JAX 0.10 has these flags too, but cannot map a name over an axis with them.
IS_NEW = jax.__version_info__ >= (0, 12)
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"key_value_seq_lengths": np.int32([3])},
    "bias": {"bias": np.zeros((1, 2, 300, 300), np.float32)},
}


@pytest.fixture
def remat3():
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


@pytest.mark.skipif(not IS_NEW, reason="needs JAX 0.12")
@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_with_remat3_equal_those_without_checkpoints(name, implementation):
    """Gradients, also of a function that saves by name or saves nothing, and under
    `vmap`.
    """
    x = np.random.default_rng(0).standard_normal((1, 300, 2, 8)).astype(np.float32)
    save = jax.checkpoint_policies.save_only_these_names(
        "attention_output", "attention_lse", "attention_scores"
    )
    attend = functools.partial(
        dot_product_attention, implementation=implementation, **CASES[name]
    )

    def gradients(change):
        def loss(x):
            return jnp.sum(change(lambda x: attend(jnp.sin(x), x, x))(x) ** 2)

        gradient = jax.grad(loss)
        mapped = jax.jit(jax.vmap(gradient))(x[None])
        return jax.jit(gradient)(x), mapped[0]

    plain = gradients(lambda attend: attend)
    close(plain[1], plain[0])
    close(gradients(functools.partial(jax.checkpoint, policy=save)), plain)
    close(gradients(jax.checkpoint), plain)


@pytest.mark.skipif(not IS_NEW, reason="needs JAX 0.12")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize(
    ("flag", "rule"), [("jax_custom_jvp3", jvp_rule), ("jax_custom_vjp3", vjp_rule)]
)
def test_rules_of_custom_derivatives_are_compared(flag, rule, implementation):
    """Two score functions that differ only in their rules: the second call must not get
    the gradient of the first.
    """

    def gradient(factor):
        return jax.grad(loss_of(rule([factor]), implementation))(ARRAYS[0])

    jax.config.update(flag, True)
    try:
        first = gradient(1.0)
        second = gradient(3.0)
    finally:
        jax.config.update(flag, False)
    close(second, 3 * first)


@pytest.mark.skipif(not IS_NEW, reason="needs JAX 0.12")
@pytest.mark.parametrize("implementation", [None, "cudnn", "splash"])
def test_gradients_by_kernels_are_lowered_with_custom_vjp3(implementation, monkeypatch):
    """The kernels' own `custom_vjp` then is an operation that JAX expands first."""
    platform = {"splash": "tpu"}.get(implementation, "cuda")
    compiled_for(monkeypatch, {"cuda": "gpu"}.get(platform, platform))
    as_if_cudnn_were_here(monkeypatch)
    forget_programs()
    jax.config.update("jax_custom_vjp3", True)
    try:
        program = lowered(
            abstract(256, 256, h=64),
            platform=platform,
            is_causal=True,
            key_value_seq_lengths=np.int32([3, 256]),
            implementation=implementation,
        )
    finally:
        jax.config.update("jax_custom_vjp3", False)
        forget_programs()
    assert "tpu_custom_call" in program or "cudnn" in program


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_user_functions_may_use_nonzero(implementation):
    """In JAX 0.12, it is an operation that JAX expands before it compiles."""
    is_even = jnp.arange(8) % 2 == 0

    def visible(b, h, q_idx, kv_idx):
        [even] = jnp.nonzero(is_even, size=4)
        return even[kv_idx % 4] <= q_idx

    def raised(score, b, h, q_idx, kv_idx):
        [far] = jnp.nonzero(jnp.arange(8) > kv_idx % 3, size=8)
        return score + far[q_idx % 8].astype(score.dtype)

    def gradient(arguments):
        def loss(x):
            return attend(jnp.sin(x), x, x, **arguments).sum()

        return jax.grad(loss)(x)

    attend = functools.partial(dot_product_attention, implementation=implementation)
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 8)).astype(np.float32)
    query = np.arange(20)[:, None]
    key = np.arange(20)[None]
    far = query % 8 + key % 3 + 1
    want = {
        "mask": key % 4 * 2 <= query,
        "bias": np.where(far < 8, far, 0).astype(np.float32),
    }
    close(
        gradient({"mask": FunctionMask(visible), "score_mod": raised}), gradient(want)
    )
