"""LoRA on every projection, as `docs/lora.md` shows, computes what modules with the
merged kernels compute, in training and decoding.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, in_parts, linen_step
from flax import nnx
from marks import core, with_core

import flax_mha
from flax_mha import linen
from flax_mha.rope import RoPE

BATCH = 2
LENGTH = 23
FEATURES = 24
HEADS = 3
RANK = 2
PIECES = (19, 1, 1, 2)  # a prompt, and calls of one and of several tokens


class WithLoRA(nnx.Module):
    """Adds x A B to a layer's output."""

    def __init__(self, layer, features_in, rngs):
        features_out = layer.kernel.size // features_in
        self.layer = layer
        self.lora = nnx.LoRA(features_in, RANK, features_out, rngs=rngs)
        # As if it had been trained: B starts with zeros.
        self.lora.lora_b[...] = random(1, (RANK, features_out)) / 5

    def __call__(self, x, out_sharding=None):
        output = self.layer(x, out_sharding=out_sharding)
        flat = x.reshape(*x.shape[:2], -1)
        return output + self.lora(flat).reshape(output.shape)

    def merged_kernel(self):
        """W + A B."""
        kernel = self.layer.kernel[...]
        product = self.lora.lora_a[...] @ self.lora.lora_b[...]
        return kernel + product.reshape(kernel.shape)


def random(seed, shape):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def multi_head():
    return flax_mha.MultiHeadAttention(
        HEADS, FEATURES, rope=RoPE(), decode=False, rngs=nnx.Rngs(0)
    )


def latent(**options):
    return flax_mha.MultiHeadLatentAttention(
        HEADS,
        FEATURES,
        q_lora_rank=10,
        kv_lora_rank=14,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope=RoPE(interleaved=True),
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )


# Each projection, and the number of its input features.
OF_MULTI_HEAD = {"query": 24, "key": 24, "value": 24, "out": 24}
OF_LATENT = {
    "q_a_proj": 24,
    "q_b_proj": 10,
    "kv_a_proj_with_mqa": 24,
    "kv_b_proj": 14,
    "o_proj": 3 * 5,
}
MODULES = {
    "multi-head": (multi_head, OF_MULTI_HEAD),
    "latent": (latent, OF_LATENT),
}


def with_lora(name):
    """A module with LoRA on all projections, and one with the merged kernels."""
    make, projections = MODULES[name]
    module = make()
    merged = make()
    rngs = nnx.Rngs(1)
    for projection, features_in in projections.items():
        wrapper = WithLoRA(getattr(module, projection), features_in, rngs)
        setattr(module, projection, wrapper)
        getattr(merged, projection).kernel[...] = wrapper.merged_kernel()
    return module, merged


def causal(module, x):
    return module(x, is_causal=True)


@pytest.mark.parametrize("name", with_core(MODULES, "multi-head"))
def test_lora_on_all_projections_equals_merged_kernels(name):
    module, merged = with_lora(name)
    x = random(0, (BATCH, LENGTH, FEATURES))
    plain = causal(MODULES[name][0](), x)

    output = causal(module, x)

    close(output, causal(merged, x))
    assert np.abs(output - plain).max() > 0.1


@pytest.mark.parametrize("name", with_core(MODULES, "latent"))
def test_decoding_with_lora_on_all_projections_equals_one_call(name):
    module, merged = with_lora(name)
    x = random(0, (BATCH, LENGTH, FEATURES))
    module.init_cache(x.shape)
    step = nnx.jit(lambda module, x: module(x, decode=True))

    output = in_parts(functools.partial(step, module), x, PIECES)

    close(output, causal(merged, x))


@pytest.mark.parametrize("name", with_core(MODULES, "multi-head"))
def test_training_changes_every_lora_and_nothing_else(name):
    """The gradient of W + A B is G; so that of A is G B^T, and that of B is A^T G."""
    module, merged = with_lora(name)
    x = random(0, (BATCH, LENGTH, FEATURES))

    def loss(module):
        return (causal(module, x) ** 2).sum()

    gradients = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(module)
    of_merged = nnx.grad(loss)(merged)

    projections = MODULES[name][1]
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == 2 * len(projections)
    for projection, features_in in projections.items():
        lora = getattr(module, projection).lora
        of_kernel = of_merged[projection]["kernel"][...].reshape(features_in, -1)
        got = gradients[projection]["lora"]
        close(got["lora_a"][...], of_kernel @ lora.lora_b[...].T)
        close(got["lora_b"][...], lora.lora_a[...].T @ of_kernel)


class LinenLoRA(nn.Module):
    """The product x A B of one layer."""

    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(RANK, use_bias=False, name="lora_a")(x)
        return nn.Dense(self.features, use_bias=False, name="lora_b")(x)


class Adapted(nn.Module):
    """A module whose projections have LoRA, added by interception."""

    attention: nn.Module

    @nn.compact
    def __call__(self, x, **options):
        def add(call, arguments, keywords, context):
            output = call(*arguments, **keywords)
            is_projection = isinstance(context.module, nn.DenseGeneral)
            if not is_projection or context.method_name != "__call__":
                return output
            flat = arguments[0].reshape(*x.shape[:2], -1)
            features = math.prod(output.shape[2:])
            lora = LinenLoRA(features, name="lora")
            return output + lora(flat).reshape(output.shape)

        with nn.intercept_methods(add):
            return self.attention(x, **options)


def merge(params):
    """The parameters of an attention layer, with the LoRA of each projection merged."""
    merged = {}
    for name, projection in params.items():
        projection = dict(projection)
        lora = projection.pop("lora")
        kernel = projection["kernel"]
        product = lora["lora_a"]["kernel"] @ lora["lora_b"]["kernel"]
        projection["kernel"] = kernel + product.reshape(kernel.shape)
        merged[name] = projection
    return merged


@pytest.mark.parametrize("decode", [False, core(True)], ids=["whole", "decode"])
def test_lora_by_interception_in_linen_equals_merged_kernels(decode):
    attention = linen.MultiHeadDotProductAttention(HEADS, rope=RoPE())
    x = random(0, (BATCH, LENGTH, FEATURES))
    params = Adapted(attention).init(jax.random.key(0), x)["params"]
    projections = params["attention"]
    assert set(projections) == {"query", "key", "value", "out"}
    assert all("lora" in projection for projection in projections.values())
    mask = flax_mha.CausalMask()
    expected = attention.apply({"params": merge(projections)}, x, mask=mask)

    if decode:
        adapted = Adapted(attention.clone(decode=True))
        cache = adapted.init(jax.random.key(0), x)["cache"]
        step = linen_step(adapted, {"params": params, "cache": cache})
        output = in_parts(step, x, PIECES)
    else:
        output = Adapted(attention).apply({"params": params}, x, mask=mask)

    close(output, expected)
