"""Flags of JAX that are off by default, and may become the default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from test_user_functions import ARRAYS, jvp_rule, loss_of, vjp_rule

from flax_mha import dot_product_attention

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
